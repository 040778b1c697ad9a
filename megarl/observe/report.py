"""The report on a run: a summary in words, report.png, agreement.png and trace.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from megarl.observe.advisories import advisories
from megarl.observe.evaluations import Evaluation, complete_metrics, damaged_results, read_results, sets
from megarl.observe.metrics import METRICS_FILE, Row, damaged_lines, read_metrics
from megarl.observe.plot import plot
from megarl.observe.plot_agreement import plot_agreement
from megarl.observe.rollouts import FailuresTail
from megarl.observe.trace import merge_traces
from megarl.rewards.failures import describe_failed_episodes, describe_failures

LINES_NAMED = 5
ENDS = 10  # the mean rewards of so many first and last steps are compared
SPLIT = {
    "training": "time/train_s",
    "generation": "time/generate_s",
    "scoring": "time/reward_s",
    "weight sync": "time/sync_s",
    "generation paused": "time/sync_pause_s",
    "trainer waits": "time/trainer_wait_s",
    "generator waits": "time/generator_wait_s",
}


def finish_report(run_dir: Path | str) -> str:
    """Writes report.png, agreement.png and trace.json into `run_dir`; returns the summary and where to find what.

    An evaluation counts as that before the run's first step if it is of version 0, and as that after its last if it is of its version.
    """
    run_dir = Path(run_dir)
    complete_metrics(run_dir)
    summary = summarize(run_dir, read_results(run_dir))
    trace = merge_traces(run_dir)
    files = [
        ("plot", plot(run_dir)),
        ("agreement", plot_agreement(run_dir)),
        ("rollouts", run_dir / "rollouts"),
        ("trace (ui.perfetto.dev)", trace),
    ]
    page = [("a page of all this", f"megarl report {run_dir}")]
    left_out = [("left out, as damaged", str(path)) for path in damaged_results(run_dir)]
    if lines := damaged_lines(run_dir / METRICS_FILE):
        where = f"{run_dir / METRICS_FILE}: line{'s' * (len(lines) > 1)} {', '.join(map(str, lines[:LINES_NAMED]))}"
        left_out.append(("left out, as damaged", where + (f" and {more} more" if (more := len(lines) - LINES_NAMED) > 0 else "")))
    return summary + _table([(what, str(path)) for what, path in files if path.exists()] + page + left_out)


def summarize(run_dir: Path | str, evaluations: Sequence[Evaluation]) -> str:
    """The run in about a dozen lines. `evaluations`: in the order of their versions."""
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    if not rows:
        return f"{run_dir}: no step was finished\n"
    lines = [("reward", _reward(rows))]
    failures = FailuresTail(run_dir)
    failures.poll()
    if failed := describe_failed_episodes(rows):
        lines.append(("episodes", f"{failed}{failures.reason(episodes=True)}; rollouts/ marks them"))
    if failed := describe_failures(rows):
        lines.append(("scores", f"{failed}{failures.reason(episodes=False)}; rollouts/ marks them"))
    unanswered = sum(_values(rows, "prompts/unanswered"))
    if unanswered:
        lines.append(("prompts unanswered", f"{unanswered:.0f}, dropped since a program sampled nothing"))
    if (dropped := _values(rows, "prompts/dropped")) and (sum(dropped) or not unanswered):
        lines.append(("prompts dropped", _dropped(rows)))
    lines += _held_out(evaluations, int(rows[-1]["step"]) + 1)
    turns = _values(rows, "turns/mean")
    if turns and max(turns) > 1:
        lines.append(("turns", _turns(rows)))
    staleness, speed = _values(rows, "staleness/max"), _values(rows, "samples_per_s")
    if staleness:
        lines.append(("staleness", f"{_mean(rows, 'staleness/mean'):.2f} steps on average, {max(staleness):.0f} at most"))
    differences = _values(rows, "logprob/abs_diff_mean")
    if differences:
        own = _values(rows, "logprob/abs_diff_mean_own_routing")
        without = f"; at most {max(own):.1e} without routing replay" if own else ""
        found = f"at most {max(differences):.1e} between trainer and generator, {len(differences)} probes{without}"
        lines.append(("log-prob difference", found))
    if sizes := _values(rows, "agreement/ess"):
        difference = _ends(rows, "agreement/abs_diff_mean", "mean log-prob difference")
        lines.append(("trained on", f"{difference}; effective sample size {statistics.median(sizes):.2%} (median)"))
    if _values(rows, "entropy/mean"):
        lines.append(("entropy", _ends(rows, "entropy/mean", "nats a token")))
    lengths = _values(rows, "response_tokens/mean")
    if lengths:
        lines.append(("response length", _ends(rows, "response_tokens/mean", "tokens")))
    audits = _values(rows, "sync/audit_ok")
    if audits:
        lines.append(("weight audits", f"{sum(map(bool, audits))} of {len(audits)} equal bit for bit"))
    if speed:
        lines.append(("speed", f"{statistics.median(speed):.0f} samples/s, {_median(rows, 'tokens_per_s'):.0f} tokens/s"))
    lines.append(("a step takes", f"{_median(rows, 'time/step_s'):.3f} s; of it, or beside it:" if _values(rows, "time/step_s") else ""))
    lines += [(f"  {name}", f"{_median(rows, key):.3f} s") for name, key in SPLIT.items() if _values(rows, key)]
    lines += [("note", text) for text in advisories(rows)]
    return f"\n{run_dir}: {len(rows)} steps (speed and times are medians)\n" + _table(lines)


def _reward(rows: list[Row]) -> str:
    count = min(ENDS, len(rows))
    first, last = _mean(rows[:count], "reward/mean"), _mean(rows[-count:], "reward/mean")
    return f"{first:.3f} in the first {count} steps, {last:.3f} in the last {count} ({last - first:+.3f})"


def _dropped(rows: list[Row]) -> str:
    dropped, right, wrong = (sum(_values(rows, f"prompts/dropped{kind}")) for kind in ("", "_right", "_wrong"))
    trained = _mean(rows[-min(ENDS, len(rows)) :], "reward/trained_mean")
    text = f"{dropped:.0f}, {right:.0f} all right and {wrong:.0f} all wrong"
    return f"{text}; without them the reward was {trained:.3f} in the last {min(ENDS, len(rows))} steps"


def _ends(rows: list[Row], key: str, unit: str) -> str:
    count = min(ENDS, len(rows))
    return f"{_mean(rows[:count], key):.3g} {unit} in the first {count} steps, {_mean(rows[-count:], key):.3g} in the last {count}"


def _turns(rows: list[Row]) -> str:
    count = min(ENDS, len(rows))
    first, last = _mean(rows[:count], "turns/mean"), _mean(rows[-count:], "turns/mean")
    share = _mean(rows[-count:], "environment_tokens/fraction")
    end = f"{last:.2f} in the last {count}, where the environment wrote {share:.0%} of the tokens"
    return f"{first:.2f} a sample in the first {count} steps, {end}"


def _held_out(evaluations: Sequence[Evaluation], steps: int) -> list[tuple[str, str]]:
    """Each held-out set's pass@1, pass@k with the largest k, and mean reward if it says more: before the first step, and as it was last."""
    lines = []
    for name, last in sets(evaluations[-1]).items() if evaluations else ():
        first = sets(evaluations[0]).get(name, {}) if evaluations[0]["version"] == 0 else {}
        version = evaluations[-1]["version"]
        when = "after" if version in (0, steps) else f"after {version} steps"
        for score in dict.fromkeys(["pass@1", *[key for key in last if key.startswith("pass@")][-1:], "reward/mean"]):
            if score in last and (score != "reward/mean" or last[score] != last.get("pass@1")):
                before = f"{first[score]:.3f}" if score in first else "not measured"
                after = f"{last[score]:.3f}" if version else "not measured"
                what = " ".join(("held-out", *name.split(), score.replace("reward/mean", "reward")))
                lines.append((what, f"{before} before, {after} {when}"))
    return lines


def _values(rows: list[Row], key: str) -> list[float]:
    """The key's finite values."""
    return [row[key] for row in rows if key in row and math.isfinite(row[key])]


def _mean(rows: list[Row], key: str) -> float:
    values = _values(rows, key)
    return statistics.fmean(values) if values else math.nan


def _median(rows: list[Row], key: str) -> float:
    values = _values(rows, key)
    return statistics.median(values) if values else math.nan


def _table(lines: list[tuple[str, str]]) -> str:
    return "".join(f"  {name:<24}{text}\n" for name, text in lines)
