"""Held-out scores of a run: which versions are evaluated, the files eval/version_<weight version>.json, and how sure a mean is."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.base.files import write_whole
from megarl.base.rollout_types import Version
from megarl.config.schema import RunConfig
from megarl.observe.metrics import METRICS_FILE, Row, change_rows, read_metrics
from megarl.plan.checkpoints import complete_checkpoints
from megarl.plan.resolve import RunPlan

# Engines of their own for held-out evaluation (`eval.engines`): which versions are evaluated, and the plan that these engines follow.


def is_due(config: RunConfig, version: Version) -> bool:
    """Whether this version of the weights is evaluated: the first, the last, and every `eval.every`-th."""
    return version in (0, config.max_steps) or (config.eval.every > 0 and version % config.eval.every == 0)


def evaluation_plan(plan: RunPlan) -> RunPlan:
    """The plan with the evaluation's engines in the generator's place. Each version is written whole, since they lack those in between; no
    request runs meanwhile, and probes are the generator's."""
    config, merges = plan.config, plan.sent_adapters is None  # which weights.delta has decided
    own = replace(
        config,
        lora=replace(config.lora, sync="merge") if merges else config.lora,
        generator=replace(config.generator, engines=config.eval.engines, groups={}),
        async_=replace(config.async_, partial_rollout="block", chunk_tokens=None),
        weights=replace(config.weights, delta="off"),
        observe=replace(config.observe, probe_every=0),
    )
    return replace(plan, config=own)


# Held-out evaluations of a run: the files eval/version_<weight version>.json, and their place in the metrics.
#
# An evaluation runs beside the training. Its scores go into the row of the first step that ends after it, with `eval/version`, the weights
# that were evaluated. When all processes have ended, scores of the last weights are added to the last row, and others to rows before it.


JOURNAL = "journal.jsonl"  # in run_dir/eval, where engines of their own evaluate: what became of each version
BEGUN = "begun"
SKIPPED, FAILED, LOST = MISSED = ("skipped", "failed", "lost")
Evaluation = dict[str, Any]  # "version", the scores of data.eval, and "suites": the scores of each by name
VERSION_KEY = "eval/version"


def write_result(run_dir: Path | str, version: Version, result: Evaluation) -> None:
    """Writes the result ("pass@1", "reward/mean", …) of one weight version; a second result replaces the first."""
    folder = Path(run_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_result_path(run_dir, version), json.dumps({"version": version, **result}))


def _result_path(run_dir: Path | str, version: Version) -> Path:
    return Path(run_dir) / "eval" / f"version_{version:06d}.json"


def read_results(run_dir: Path | str) -> list[Evaluation]:
    """A run's evaluations, in the order of their weight versions, without damaged ones."""
    return sorted((result for _, result in _results(run_dir) if result is not None), key=lambda result: result["version"])


def damaged_results(run_dir: Path | str) -> list[Path]:
    """Evaluation files that cannot be read."""
    return [path for path, result in _results(run_dir) if result is None]


def _results(run_dir: Path | str) -> Iterator[tuple[Path, Evaluation | None]]:
    for path in sorted((Path(run_dir) / "eval").glob("version_*.json")):
        try:
            result = json.loads(path.read_text())
            yield path, result if path == _result_path(run_dir, result["version"] + 0) else None  # not a copy by another name
        except (OSError, ValueError, TypeError, KeyError):
            yield path, None


def note(run_dir: Path | str, version: Version, what: str, why: str = "") -> None:
    """Adds to the journal that the evaluation of `version` has BEGUN, or is one of MISSED."""
    folder = Path(run_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / JOURNAL, "a") as file:
        file.write(json.dumps({"version": version, "what": what, **({"why": why} if why else {})}) + "\n")


def read_journal(run_dir: Path | str) -> dict[Version, tuple[str, str]]:
    """The last note on each version, and its reason. A torn line is left out."""
    path, found = Path(run_dir) / "eval" / JOURNAL, {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            found[row["version"] + 0] = row["what"], row.get("why", "")
    return found


def missed(run_dir: Path | str) -> dict[Version, tuple[str, str]]:
    """The versions that were due but have no scores, each with one of MISSED and a reason."""
    noted = {v: told for v, told in sorted(read_journal(run_dir).items()) if told[0] in MISSED}
    there = {result["version"] for result in read_results(run_dir)} if noted else ()
    return {v: told for v, told in noted.items() if v not in there}


def missed_counts(run_dir: Path | str) -> dict[str, int]:
    """eval/skipped and so on; only those that are not 0."""
    counts = Counter(what for what, _ in missed(run_dir).values())
    return {f"eval/{what}": counts[what] for what in MISSED if counts[what]}


def note_lost(run_dir: Path | str, version: Version, due: Collection[Version] = ()) -> list[Version]:
    """Notes the evaluations that a resumed run, which starts from `version`, cannot make again: those of older weights that had begun when
    the run ended, and those of `due` that had not begun. Returns their versions."""
    there, journal = {result["version"] for result in read_results(run_dir)}, read_journal(run_dir)
    begun = {v for v, (what, _) in journal.items() if what == BEGUN and v < version}
    lost = sorted((begun | (set(due) - journal.keys())) - there)
    for each in lost:
        note(run_dir, each, LOST, "the run ended meanwhile")
    return lost


def forget_after(run_dir: Path | str, version: Version) -> None:
    """Removes evaluations of weights newer than `version`, which a resumed run will make again."""
    for result in read_results(run_dir):
        if result["version"] > version:
            _result_path(run_dir, result["version"]).unlink()
    if (journal := Path(run_dir) / "eval" / JOURNAL).exists():
        kept = {v: told for v, told in read_journal(run_dir).items() if v <= version}
        journal.unlink()
        for each, told in kept.items():
            note(run_dir, each, *told)


def sets(evaluation: Mapping[str, Any]) -> dict[str, Evaluation]:
    """The scores of each held-out set by name; data.eval's name is ""."""
    own = {key: value for key, value in evaluation.items() if key not in ("suites", "version")}
    return ({"": own} if own else {}) | evaluation.get("suites", {})


def as_metrics(evaluation: Evaluation) -> dict[str, float]:
    """eval/pass@1 and so on for data.eval, eval/NAME/pass@1 and so on for eval.suites."""
    found = {VERSION_KEY: evaluation["version"]}
    for name, scores in sets(evaluation).items():
        found |= {"/".join(("eval", *name.split(), key)): value for key, value in scores.items()}
    return found


def best_checkpoint(config: RunConfig) -> tuple[int, float] | None:
    """(step, score) of the checkpoint with the highest score by checkpoint.keep_best, of equal ones the earliest; None if none has been
    evaluated."""
    scores = {result["version"]: as_metrics(result).get(config.checkpoint.keep_best or "") for result in read_results(config.run_dir)}
    found = [(score, -step) for step, _ in complete_checkpoints(config.run_dir) if (score := scores.get(step)) is not None]
    return (-max(found)[1], max(found)[0]) if found else None


def spared_steps(config: RunConfig) -> set[int]:
    """Steps whose checkpoints stay besides the newest: that of the best, and those whose evaluation is still to come."""
    if config.checkpoint.keep_best is None:
        return set()
    last = max((result["version"] for result in read_results(config.run_dir)), default=-1)
    best = best_checkpoint(config)
    none = missed(config.run_dir)
    coming = {
        step for step, _ in complete_checkpoints(config.run_dir) if step > last and step % config.eval.every == 0 and step not in none
    }
    return coming | ({best[0]} if best else set())


class NewEvaluations:
    """Evaluations that no row of the metrics has. Make it after the MetricsWriter: what a resumed run cuts off is reported again."""

    def __init__(self, run_dir: Path | str):
        self._run_dir, self._reported = Path(run_dir), _reported(read_metrics(Path(run_dir) / METRICS_FILE))
        self._missed: dict[str, int] = {}

    def metrics(self) -> dict[str, float]:
        """The oldest of them as metrics, and how many versions were missed by now, if that has changed; empty if nothing is new."""
        found: dict[str, float] = {}
        if (counts := missed_counts(self._run_dir)) != self._missed:
            self._missed = counts
            found |= counts
        if new := [result for result in read_results(self._run_dir) if result["version"] not in self._reported]:
            self._reported.add(new[0]["version"])
            found |= as_metrics(new[0])
        return found


def complete_metrics(run_dir: Path | str) -> None:
    """Adds what no row has. Missed evaluations go to the last row. Scores go to rows in the order of their versions, the newest to the last
    row. A row has one evaluation; where no row is left, the newest takes the place of one before, which has its file alone. Call it when
    the run's processes have ended."""
    results, rows = {result["version"]: result for result in read_results(run_dir)}, read_metrics(Path(run_dir) / METRICS_FILE)
    if not rows:
        return
    counts = missed_counts(run_dir)
    told = {key: value for row in rows for key, value in row.items() if key in counts}
    changed: dict[int, Row] = {rows[-1]["step"]: rows[-1] | counts} if counts != told else {}
    waiting = results.keys() - _reported(rows)
    free = [row["step"] for row in rows if VERSION_KEY not in row]
    free = free[max(0, len(free) - len(waiting)) :]
    takes = [row for row in rows if VERSION_KEY in row or row["step"] in free] if waiting else []
    versions = sorted(_reported(rows) | waiting)
    for row, version in zip(takes, [*versions[: len(takes) - 1], versions[-1]] if takes else ()):
        if row.get(VERSION_KEY) != version and version in results:
            others = as_metrics(results.get(row.get(VERSION_KEY, -1), {"version": -1}))
            kept = {key: value for key, value in changed.get(row["step"], row).items() if key not in others}
            changed[row["step"]] = kept | as_metrics(results[version])
    if changed:
        change_rows(run_dir, changed)


def _reported(rows: Sequence[Row]) -> set[Version]:
    """The evaluations that rows have."""
    return {row[VERSION_KEY] for row in rows if VERSION_KEY in row}


# How sure a mean over prompts is.


Z95 = 1.959963984540054  # the normal distribution's 97.5% quantile


def interval(shares: Sequence[float], samples: int, weights: Sequence[float] | None = None) -> tuple[float, float]:
    """The 95% confidence interval of the mean of `shares`, one of 0 to 1 a prompt, from `samples` samples; prompts are draws from all
    prompts there might be. `weights`: how many things each share is of, where the mean is over these.

    It is Wilson's interval (1927), with as many draws as would give the variance that the shares have. With one sample of one thing a
    prompt that is their number: then it is Wilson's own. Otherwise the variance is itself estimated, and with few prompts there are fewer
    draws (Korn and Graubard 1998). If prompts do not differ, all samples are draws. Unlike the mean's standard error it is not empty where
    all are right or all are wrong.
    """
    counts = [1.0] * len(shares) if weights is None else weights
    mean, total = fmean(shares, counts), sum(counts)
    draws = total**2 / sum(count**2 for count in counts)
    plain = samples == 1 and set(counts) == {1.0}
    if not plain and len(shares) > 1 and mean not in (0.0, 1.0):
        draws = min(_draws(shares, counts, mean), total * samples)
    centre = (mean + Z95**2 / (2 * draws)) / (1 + Z95**2 / draws)
    half = Z95 / (1 + Z95**2 / draws) * sqrt(mean * (1 - mean) / draws + Z95**2 / (4 * draws**2))
    return min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half))


def _draws(shares: Sequence[float], counts: Sequence[float], mean: float) -> float:
    prompts = len(shares)
    variance = sum((count * (share - mean)) ** 2 for share, count in zip(shares, counts)) / sum(counts) ** 2 * prompts / (prompts - 1)
    return mean * (1 - mean) / variance * (Z95 / _t95(prompts - 1)) ** 2 if variance else float("inf")


def _t95(freedom: int) -> float:
    """Student's 97.5% quantile, below 0.5% off (Abramowitz and Stegun 1964, 26.7.5; the series is of no use below 4)."""
    if freedom <= 3:
        return (12.706, 4.303, 3.182)[freedom - 1]
    z, v = Z95, freedom
    terms = (z**3 + z) / 4 / v, (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3
    return z + sum(terms)
