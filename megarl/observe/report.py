"""What a run comes to: a summary in words, and with it report.png and trace.json."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from megarl.observe.evaluations import read_results
from megarl.observe.metrics import METRICS_FILE, Row, read_metrics
from megarl.observe.plot import plot
from megarl.observe.trace import merge_traces

ENDS = 10  # steps at each end of the run whose mean reward is compared
SPLIT = {
    "training": "time/train_s",
    "generation": "time/generate_s",
    "weight sync": "time/sync_s",
    "generation paused": "time/sync_pause_s",
    "trainer waits": "time/trainer_wait_s",
    "generator waits": "time/generator_wait_s",
}


def finish_report(run_dir: Path | str) -> str:
    """Writes report.png and trace.json into `run_dir` and returns the summary, with where to find what.

    Reads the run's own evaluations; before the first step and after the last are the first and the last of them.
    """
    run_dir = Path(run_dir)
    scores = [result["pass@1"] for result in read_results(run_dir)]
    summary = summarize(run_dir, scores[0] if scores else None, scores[-1] if len(scores) > 1 else None)
    trace = merge_traces(run_dir)
    files = [("plot", plot(run_dir)), ("rollouts", run_dir / "rollouts"), ("trace (ui.perfetto.dev)", trace)]
    return summary + _table([(what, str(path)) for what, path in files if path.exists()])


def summarize(run_dir: Path | str, eval_before: float | None, eval_after: float | None) -> str:
    """The run in about a dozen lines. The evaluations are held-out greedy pass@1, None where there was none."""
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    if not rows:
        return f"{run_dir}: no step was finished\n"
    lines = [("reward", _reward(rows))]
    if eval_before is not None or eval_after is not None:
        lines.append(("held-out pass@1", f"{_score(eval_before)} before, {_score(eval_after)} after"))
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
    audits = _values(rows, "sync/audit_ok")
    if audits:
        lines.append(("weight audits", f"{sum(map(bool, audits))} of {len(audits)} equal bit for bit"))
    if speed:
        lines.append(("speed", f"{statistics.median(speed):.0f} samples/s, {_median(rows, 'tokens_per_s'):.0f} tokens/s"))
    lines.append(("a step takes", f"{_median(rows, 'time/step_s'):.3f} s; of it, or beside it:" if _values(rows, "time/step_s") else ""))
    lines += [(f"  {name}", f"{_median(rows, key):.3f} s") for name, key in SPLIT.items() if _values(rows, key)]
    return f"\n{run_dir}: {len(rows)} steps (speed and times are medians)\n" + _table(lines)


def _reward(rows: list[Row]) -> str:
    count = min(ENDS, len(rows))
    first, last = _mean(rows[:count], "reward/mean"), _mean(rows[-count:], "reward/mean")
    return f"{first:.3f} in the first {count} steps, {last:.3f} in the last {count} ({last - first:+.3f})"


def _turns(rows: list[Row]) -> str:
    count = min(ENDS, len(rows))
    first, last = _mean(rows[:count], "turns/mean"), _mean(rows[-count:], "turns/mean")
    share = _mean(rows[-count:], "environment_tokens/fraction")
    end = f"{last:.2f} in the last {count}, where the environment wrote {share:.0%} of the tokens"
    return f"{first:.2f} a sample in the first {count} steps, {end}"


def _score(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _values(rows: list[Row], key: str) -> list[float]:
    """The key's finite values; steps without it, or where it was NaN, do not count."""
    return [row[key] for row in rows if key in row and math.isfinite(row[key])]


def _mean(rows: list[Row], key: str) -> float:
    values = _values(rows, key)
    return statistics.fmean(values) if values else math.nan


def _median(rows: list[Row], key: str) -> float:
    values = _values(rows, key)
    return statistics.median(values) if values else math.nan


def _table(lines: list[tuple[str, str]]) -> str:
    return "".join(f"  {name:<24}{text}\n" for name, text in lines)
