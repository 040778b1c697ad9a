"""Held-out scores of a run: which versions are evaluated, the files eval/version_<weight
version>.json, their place in the metrics, and confidence intervals.

An evaluation runs beside the training. Its scores go into the row of the first step that ends after
it, and `eval/version` there is the version that was evaluated. When all processes have ended,
scores of the last weights are added to the last row, others to earlier rows.
"""

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
from megarl.plan.topologies import evaluation_group


def is_due(config: RunConfig, version: Version) -> bool:
    """Whether this version of the weights is evaluated: the first, the last, and every
    `eval.every`-th.
    """
    if version in (0, config.max_steps):
        return True
    return config.eval.every > 0 and version % config.eval.every == 0


def evaluation_plan(plan: RunPlan) -> RunPlan:
    """The plan with the evaluation's engines in the generator's place.

    Each version is written in full, since these engines lack the versions in between. No request
    runs during an update, and only the generator makes probes.
    """
    config = plan.config
    lora = config.lora
    if plan.sent_adapters is None:  # as weights.delta has decided
        lora = replace(lora, sync="merge")
    evaluation_config = replace(
        config,
        lora=lora,
        generator=evaluation_group(config).settings,
        async_=replace(config.async_, partial_rollout="block", chunk_tokens=None),
        weights=replace(config.weights, delta="off"),
        observe=replace(config.observe, probe_every=0),
    )
    return replace(plan, config=evaluation_config)


JOURNAL = "journal.jsonl"  # in run_dir/eval, with eval.engines: the outcome of each version
BEGUN = "begun"
SKIPPED = "skipped"
FAILED = "failed"
LOST = "lost"
MISSED = (SKIPPED, FAILED, LOST)
Evaluation = dict[str, Any]  # "version", the scores of data.eval, and "suites": name -> scores
VERSION_KEY = "eval/version"


def write_result(run_dir: Path | str, version: Version, result: Evaluation) -> None:
    """Writes the result ("pass@1", "reward/mean", …) of one weight version.

    It replaces an earlier result.
    """
    folder = Path(run_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_result_path(run_dir, version), json.dumps({"version": version, **result}))


def _result_path(run_dir: Path | str, version: Version) -> Path:
    return Path(run_dir) / "eval" / f"version_{version:06d}.json"


def read_results(run_dir: Path | str) -> list[Evaluation]:
    """A run's evaluations, in the order of their weight versions, without damaged ones."""
    return sorted(
        (result for _, result in _results(run_dir) if result is not None),
        key=lambda result: result["version"],
    )


def damaged_results(run_dir: Path | str) -> list[Path]:
    """Evaluation files that cannot be read."""
    return [path for path, result in _results(run_dir) if result is None]


def _results(run_dir: Path | str) -> Iterator[tuple[Path, Evaluation | None]]:
    for path in sorted((Path(run_dir) / "eval").glob("version_*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            # otherwise a copy under another name
            yield path, result if path == _result_path(run_dir, result["version"] + 0) else None
        except (OSError, ValueError, TypeError, KeyError):
            yield path, None


def note(run_dir: Path | str, version: Version, outcome: str, reason: str = "") -> None:
    """Notes in the journal that the evaluation of `version` has BEGUN, or one of MISSED."""
    folder = Path(run_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    row = {"version": version, "what": outcome}
    if reason:
        row["why"] = reason
    with open(folder / JOURNAL, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_journal(run_dir: Path | str) -> dict[Version, tuple[str, str]]:
    """For each version, the last note and its reason. Incomplete lines are ignored."""
    path = Path(run_dir) / "eval" / JOURNAL
    if not path.exists():
        return {}
    notes = {}
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            notes[row["version"] + 0] = (row["what"], row.get("why", ""))
    return notes


def missed(run_dir: Path | str) -> dict[Version, tuple[str, str]]:
    """The versions that were due but have no scores, each with one of MISSED and a reason."""
    notes = read_journal(run_dir)
    versions = {version for version, (outcome, _) in notes.items() if outcome in MISSED}
    if versions:
        versions -= {result["version"] for result in read_results(run_dir)}
    return {version: notes[version] for version in sorted(versions)}


def missed_counts(run_dir: Path | str) -> dict[str, int]:
    """The metrics eval/skipped and so on, without zeros."""
    counts = Counter(outcome for outcome, _ in missed(run_dir).values())
    return {f"eval/{outcome}": counts[outcome] for outcome in MISSED if counts[outcome]}


def note_lost(
    run_dir: Path | str, version: Version, due: Collection[Version] = ()
) -> list[Version]:
    """Notes evaluations that a run resumed from `version` cannot repeat.

    These are evaluations of older weights that were running when the run ended, and those in `due`
    that had not begun. Returns their versions.
    """
    journal = read_journal(run_dir)
    lost_versions = set(due) - journal.keys()
    for noted_version, (outcome, _) in journal.items():
        if outcome == BEGUN and noted_version < version:
            lost_versions.add(noted_version)
    lost_versions -= {result["version"] for result in read_results(run_dir)}
    for lost_version in sorted(lost_versions):
        note(run_dir, lost_version, LOST, "the run ended meanwhile")
    return sorted(lost_versions)


def forget_after(run_dir: Path | str, version: Version) -> None:
    """Removes evaluations of weights newer than `version`, which a resumed run will repeat."""
    for result in read_results(run_dir):
        if result["version"] > version:
            _result_path(run_dir, result["version"]).unlink()
    journal = Path(run_dir) / "eval" / JOURNAL
    if journal.exists():
        notes = read_journal(run_dir)
        journal.unlink()
        for noted_version, (outcome, reason) in notes.items():
            if noted_version <= version:
                note(run_dir, noted_version, outcome, reason)


def sets(evaluation: Mapping[str, Any]) -> dict[str, Evaluation]:
    """Name -> scores of each held-out set; the name of data.eval is ""."""
    scores = {key: value for key, value in evaluation.items() if key not in ("suites", "version")}
    suites = evaluation.get("suites", {})
    return {"": scores, **suites} if scores else dict(suites)


def sampling_text(scores: Mapping[str, Any]) -> str:
    """How a set was sampled; empty for scores of earlier versions of MegaRL, which do not say
    it.
    """
    sampling = scores.get("sampling")
    if not sampling:
        return ""
    unused = {"temperature": None, "top_p": 1, "top_k": -1, "min_p": 0, "stop": []}
    if sampling["temperature"] == 0:
        unused = {"stop": []}
    shown = [f"{name} {sampling[name]}" for name, off in unused.items() if sampling[name] != off]
    if sampling["temperature"] == 0:
        shown.insert(0, "greedy")
    return ", ".join([*shown, f"max_tokens {sampling['max_tokens']}"])


def as_metrics(evaluation: Evaluation) -> dict[str, float]:
    """eval/pass@1 and so on for data.eval, eval/NAME/pass@1 and so on for eval.suites."""
    metrics = {VERSION_KEY: evaluation["version"]}
    for name, scores in sets(evaluation).items():
        for key, value in scores.items():
            if key != "sampling":
                metrics["/".join(("eval", *name.split(), key))] = value
    return metrics


def best_checkpoint(config: RunConfig) -> tuple[int, float] | None:
    """(step, score) of the checkpoint with the highest score by checkpoint.keep_best, or the
    earliest of several. None if none has been evaluated.
    """
    scores = {
        result["version"]: as_metrics(result).get(config.checkpoint.keep_best or "")
        for result in read_results(config.run_dir)
    }
    best: tuple[int, float] | None = None
    for step, _ in complete_checkpoints(config.run_dir):  # oldest first
        score = scores.get(step)
        if score is not None and (best is None or score > best[1]):
            best = (step, score)
    return best


def spared_steps(config: RunConfig) -> set[int]:
    """Steps whose checkpoints are kept besides the newest: the best, and those that are not yet
    evaluated.
    """
    if config.checkpoint.keep_best is None:
        return set()
    last = max((result["version"] for result in read_results(config.run_dir)), default=-1)
    best = best_checkpoint(config)
    missed_versions = missed(config.run_dir)
    steps = {
        step
        for step, _ in complete_checkpoints(config.run_dir)
        if step > last and step % config.eval.every == 0 and step not in missed_versions
    }
    if best:
        steps.add(best[0])
    return steps


class NewEvaluations:
    """Evaluations that no row of the metrics has.

    Create it after the MetricsWriter, so that a resumed run reports again what was cut off.
    """

    def __init__(self, run_dir: Path | str):
        self._run_dir = Path(run_dir)
        self._reported = _reported(read_metrics(Path(run_dir) / METRICS_FILE))
        self._missed: dict[str, int] = {}

    def metrics(self) -> dict[str, float]:
        """The oldest of them as metrics, and the number of missed versions if it has changed; empty
        if nothing is new.
        """
        metrics: dict[str, float] = {}
        counts = missed_counts(self._run_dir)
        if counts != self._missed:
            self._missed = counts
            metrics |= counts
        for result in read_results(self._run_dir):
            if result["version"] not in self._reported:
                self._reported.add(result["version"])
                metrics |= as_metrics(result)
                break
        return metrics


def complete_metrics(run_dir: Path | str) -> None:
    """Adds all evaluations that no row has.

    Call it when the run's processes have ended. Missed evaluations go to the last row. Scores go to
    rows in the order of their versions, the newest to the last row. A row has one evaluation. If no
    row is left, the newest one replaces an earlier one, which remains in its own file.
    """
    results = {result["version"]: result for result in read_results(run_dir)}
    rows = read_metrics(Path(run_dir) / METRICS_FILE)
    if not rows:
        return
    changed: dict[int, Row] = {}
    counts = missed_counts(run_dir)
    reported_counts = {key: value for row in rows for key, value in row.items() if key in counts}
    if counts != reported_counts:
        changed[rows[-1]["step"]] = rows[-1] | counts
    waiting = results.keys() - _reported(rows)
    if waiting:
        free = [row["step"] for row in rows if VERSION_KEY not in row][-len(waiting) :]
        scored_rows = [row for row in rows if VERSION_KEY in row or row["step"] in free]
        versions = sorted(_reported(rows) | waiting)
        versions[len(scored_rows) - 1 : -1] = []  # the newest goes to the last row
        for row, version in zip(scored_rows, versions):
            if row.get(VERSION_KEY) != version and version in results:
                old_scores = as_metrics(results.get(row.get(VERSION_KEY, -1), {"version": -1}))
                new_row = dict(changed.get(row["step"], row))
                for key in old_scores:
                    new_row.pop(key, None)
                changed[row["step"]] = new_row | as_metrics(results[version])
    if changed:
        change_rows(run_dir, changed)


def _reported(rows: Sequence[Row]) -> set[Version]:
    """The versions whose evaluations rows have."""
    return {row[VERSION_KEY] for row in rows if VERSION_KEY in row}


Z95 = 1.959963984540054  # the normal distribution's 97.5% quantile


def interval(
    shares: Sequence[float], samples: int, weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """The 95% confidence interval of the mean of `shares` (one number from 0 to 1 for each prompt,
    from `samples` samples). Prompts count as random draws from all possible prompts. `weights`: the
    number of items behind each share, if the mean is over items instead of prompts.

    It is Wilson's interval (1927) for a number of draws whose variance equals that of the shares.
    With one sample of one item per prompt this is the number of prompts, and the interval is
    Wilson's own. Otherwise the variance is itself estimated, and with few prompts the number of
    draws is reduced (Korn and Graubard 1998). If prompts do not differ, all samples are draws.
    Unlike the standard error, the interval is not empty if all are right or all are wrong.
    """
    counts = [1.0] * len(shares) if weights is None else weights
    mean = fmean(shares, counts)
    total = sum(counts)
    draws = total**2 / sum(count**2 for count in counts)
    plain = samples == 1 and set(counts) == {1.0}
    if not plain and len(shares) > 1 and mean not in (0.0, 1.0):
        draws = min(_draws(shares, counts, mean), total * samples)
    centre = (mean + Z95**2 / (2 * draws)) / (1 + Z95**2 / draws)
    half = Z95 / (1 + Z95**2 / draws) * sqrt(mean * (1 - mean) / draws + Z95**2 / (4 * draws**2))
    return min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half))


def _draws(shares: Sequence[float], counts: Sequence[float], mean: float) -> float:
    prompts = len(shares)
    squares = sum((count * (share - mean)) ** 2 for share, count in zip(shares, counts))
    variance = squares / sum(counts) ** 2 * prompts / (prompts - 1)
    if not variance:
        return float("inf")
    return mean * (1 - mean) / variance * (Z95 / _t95(prompts - 1)) ** 2


def ratio_interval(numerators: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of sum(numerators) / sum(counts), one of each for each prompt.

    The variance is that of a ratio estimator (Cochran 1977, (6.13)). Without two prompts it is
    unknown, and the interval is the ratio alone.
    """
    prompts = len(counts)
    ratio = sum(numerators) / sum(counts)
    if prompts < 2:
        return ratio, ratio
    squares = sum((value - ratio * count) ** 2 for value, count in zip(numerators, counts))
    error = sqrt(squares * prompts / (prompts - 1)) / sum(counts)
    half = _t95(prompts - 1) * error
    return ratio - half, ratio + half


def _t95(freedom: int) -> float:
    """Student's 97.5% quantile, with an error below 0.5% (Abramowitz and Stegun 1964, 26.7.5; its
    series does not work below 4).
    """
    if freedom <= 3:
        return (12.706, 4.303, 3.182)[freedom - 1]
    z = Z95
    v = freedom
    terms = (
        (z**3 + z) / 4 / v,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3,
    )
    return z + sum(terms)
