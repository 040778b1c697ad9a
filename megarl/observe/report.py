"""The report on a run: a summary in words, report.png, agreement.png and trace.json."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.evaluation.scores import (
    Evaluation,
    as_metrics,
    complete_metrics,
    damaged_results,
    read_results,
    sampling_text,
    sets,
)
from megarl.observe.agreement import AGES, DIFFERENCE, HISTOGRAM_EDGES, LIMIT, advisories
from megarl.observe.metrics import METRICS_FILE, Row, damaged_lines, read_metrics
from megarl.observe.samples import FailuresTail
from megarl.observe.status import merge_traces
from megarl.rewards.score import describe_failed_episodes, describe_failures

SMOOTH_STEPS = 10  # trailing window of the moving mean
# (key, label, colour): the trainer's times are stacked upwards from the axis, the generator's
# downwards.
TRAINER = [
    ("time/train_s", "training", "#2b5c8a"),
    ("time/sync_s", "weight sync", "#e07b39"),
    ("time/trainer_wait_s", "waiting", "#cfd4da"),
]
GENERATOR = [
    ("time/generate_s", "generation", "#4f9d69"),
    ("time/sync_pause_s", "paused for sync", "#f2b880"),
    ("time/generator_wait_s", "waiting", "#cfd4da"),
]
HELD_OUT_COLOURS = ("#b5423c", "#8a4f9d", "#c98a1b", "#3c7d8a")
LEGEND_ROOM = 1.3  # height of the axis / height of what it shows
# height of the axis / 97th percentile: a slow first step must not flatten all others
HEADROOM = 1.25


def plot(run_dir: Path | str) -> Path:
    """Writes `run_dir`/report.png and returns its path. Uses no display and no state of pyplot.

    It shows reward per step and on held-out prompts, response length and entropy, and how the time
    was spent.
    """
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    figure = Figure(figsize=(9, 9), dpi=130, layout="constrained")
    reward_axes, length_axes, time_axes = figure.subplots(
        3, 1, sharex=True, height_ratios=[1, 0.7, 1.15]
    )
    _plot_reward(reward_axes, rows)
    _plot_held_out(reward_axes, read_results(run_dir))
    _plot_responses(length_axes, rows)
    _plot_times(time_axes, rows)
    reward_axes.legend(loc="lower right", frameon=False)
    for axes in (reward_axes, length_axes, time_axes):
        style(axes)
    target = run_dir / "report.png"
    figure.savefig(target)
    return target


def style(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)


def series(rows: list[Row], key: str) -> np.ndarray:
    """[steps] the key's values; NaN on steps without one."""
    return np.array([row.get(key, math.nan) for row in rows], dtype=float)


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """[steps] means over trailing windows; NaN values do not count."""
    return np.array(
        [_nanmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    )


def _nanmean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    if len(finite):
        return float(finite.mean())
    return math.nan


def _plot_reward(axes, rows: list[Row]) -> None:
    steps = series(rows, "step")
    reward = series(rows, "reward/mean")
    axes.plot(
        steps,
        reward,
        color="#9db8d2",
        linewidth=1,
        marker="o",
        markersize=2.5,
        label="mean of the step",
    )
    axes.plot(
        steps,
        moving_mean(reward, SMOOTH_STEPS),
        color="#2b5c8a",
        linewidth=2.2,
        label=f"mean of the last {SMOOTH_STEPS} steps",
    )
    axes.set_title("Reward", loc="left", fontweight="bold")
    axes.set_ylabel("mean reward")
    if np.nanmin(reward, initial=0.0) >= 0 and np.nanmax(reward, initial=0.0) <= 1:
        axes.set_ylim(0, 1.03)


def _plot_held_out(axes, evaluations: list[Evaluation]) -> None:
    """Draws pass@1 or the mean reward of each held-out set.

    Version v is drawn at step v - 1, which has made it.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for evaluation in evaluations:
        scores = as_metrics(evaluation)
        for key, value in scores.items():
            # the mean reward, of a set without pass@1
            is_reward = key.endswith("/reward/mean")
            if is_reward and key.replace("reward/mean", "pass@1") in scores:
                continue
            if is_reward or key.endswith("pass@1"):
                name = key.removeprefix("eval/").replace("/", " ")
                points.setdefault(name, []).append((evaluation["version"], value))
    for (name, set_points), colour in zip(points.items(), cycle(HELD_OUT_COLOURS)):
        axes.plot(
            *zip(*set_points),
            color=colour,
            linewidth=1.2,
            linestyle="--",
            marker="D",
            markersize=5,
            label=f"held-out {name}",
        )


def _plot_responses(axes, rows: list[Row]) -> None:
    """Draws response length with the middle 80 % as a band.

    Entropy, and the divergence from teachers, have a second axis.
    """
    steps = series(rows, "step")
    length = series(rows, "response_tokens/mean")
    low = series(rows, "response_tokens/p10")
    high = series(rows, "response_tokens/p90")
    axes.fill_between(
        steps, low, high, color="#4f9d69", alpha=0.18, linewidth=0, label="10 % to 90 %"
    )
    axes.plot(steps, length, color="#4f9d69", linewidth=1.6, label="mean length")
    axes.set_title("Responses", loc="left", fontweight="bold")
    axes.set_ylabel("tokens")
    axes.set_ylim(0, LEGEND_ROOM * max(1.0, np.nanmax([*length, *high, 0.0])))
    entropy = series(rows, "entropy/mean")
    entropy_axes = axes.twinx()
    entropy_axes.plot(steps, entropy, color="#8a4f9d", linewidth=1.3, label="entropy")
    divergence = series(rows, "distill/kl")
    if np.isfinite(divergence).any():
        entropy_axes.plot(
            steps, divergence, color="#b5423c", linewidth=1.3, label="divergence from teachers"
        )
    entropy_axes.set_ylabel("nats per token", color="#8a4f9d")
    entropy_axes.set_ylim(0, LEGEND_ROOM * max(1e-3, np.nanmax([*entropy, *divergence, 0.0])))
    entropy_axes.spines[["top", "left"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    entropy_handles, entropy_labels = entropy_axes.get_legend_handles_labels()
    axes.legend(
        handles + entropy_handles,
        labels + entropy_labels,
        loc="upper right",
        ncols=3,
        frameon=False,
    )


def _plot_times(axes, rows: list[Row]) -> None:
    steps = series(rows, "step")
    up = _stack(axes, steps, rows, TRAINER, sign=1)
    down = _stack(axes, steps, rows, GENERATOR, sign=-1)
    axes.axhline(0, color="#3a3f45", linewidth=1)
    for total, sign in ((up, 1), (down, -1)):
        limit_s = HEADROOM * float(np.percentile(total, 97)) if len(total) else 0.0
        axes.set_ylim(**{"top" if sign > 0 else "bottom": sign * max(limit_s, 1e-3)})
    axes.set_title("Time per step", loc="left", fontweight="bold")
    axes.set_ylabel("generator  |  trainer   (s)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    axes.legend(
        *_unique_legend(axes),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=5,
        frameon=False,
    )


def _stack(
    axes, steps: np.ndarray, rows: list[Row], parts: list[tuple[str, str, str]], sign: int
) -> np.ndarray:
    """Draws one side's bars; returns their heights, [steps] seconds."""
    base = np.zeros(len(rows))
    for key, label, colour in parts:
        heights = np.nan_to_num(series(rows, key))
        axes.bar(steps, sign * heights, bottom=sign * base, width=0.9, color=colour, label=label)
        base = base + heights
    return base


def _unique_legend(axes) -> tuple[list, list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    return list(unique.values()), list(unique)


RATIO_STEPS = 20  # first and last steps whose ratios are shown
AGE_COLOURS: dict[str, str] = dict(
    zip(
        AGES,
        ("#1b3a5c", "#2b5c8a", "#4f9d69", "#c98a1b", "#e07b39", "#b5423c", "#8a4f9d"),
        strict=True,
    )
)


def plot_agreement(run_dir: Path) -> Path:
    """Writes `run_dir`/agreement.png, if the run has meters, and returns its path.

    It shows the agreement meters over a run's steps, by the age of tokens, and the ratios of its
    first and last steps.
    """
    from matplotlib.figure import Figure

    target = run_dir / "agreement.png"
    rows = [row for row in read_metrics(run_dir / METRICS_FILE) if "agreement/tokens" in row]
    if not rows:
        return target
    figure = Figure(figsize=(9, 9), dpi=130, layout="constrained")
    difference, size, ratios = figure.subplots(3, 1, height_ratios=[1.2, 0.8, 1])
    _plot_differences(difference, rows)
    _plot_sizes(size, rows)
    _plot_ratios(ratios, rows)
    for axes in (difference, size, ratios):
        style(axes)
    figure.savefig(target)
    return target


def _plot_differences(axes, rows: list[Row]) -> None:
    steps = series(rows, "step")
    axes.plot(
        steps,
        series(rows, "agreement/abs_diff_max"),
        ".",
        color="#cfd4da",
        markersize=2.5,
        label="all tokens, maximum",
    )
    axes.plot(
        steps,
        series(rows, "agreement/abs_diff_p99"),
        ".",
        color="#9aa3ad",
        markersize=2.5,
        label="all tokens, 99th percentile",
    )
    for age in _present(rows):
        values = moving_mean(series(rows, f"agreement/{age}/abs_diff_mean"), SMOOTH_STEPS)
        axes.plot(
            steps, values, color=AGE_COLOURS[age], linewidth=1.6, label=f"{_words(age)}, mean"
        )
    axes.plot(
        steps, series(rows, DIFFERENCE), "D", color="#1d1f21", markersize=3, label="probe, mean"
    )
    axes.plot(
        steps, series(rows, LIMIT), "--", color="#b5423c", linewidth=1, label="observe.probe_limit"
    )
    axes.set_yscale("log")
    axes.set_title(
        "Log-prob difference of trainer and sampling policy", loc="left", fontweight="bold"
    )
    axes.set_ylabel("|log π - log μ|")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4, frameon=False, fontsize=8)


def _plot_sizes(axes, rows: list[Row]) -> None:
    steps = series(rows, "step")
    for age in _present(rows):
        values = moving_mean(series(rows, f"agreement/{age}/ess"), SMOOTH_STEPS)
        axes.plot(steps, values, color=AGE_COLOURS[age], linewidth=1.6)
    axes.set_title("Effective sample size, of tokens", loc="left", fontweight="bold")
    axes.set_ylabel("share of the tokens")
    axes.set_xlabel("step")


def _plot_ratios(axes, rows: list[Row]) -> None:
    """Draws the ratios.

    On the axis of log-ratios all bins have the same width: half a power of ten.
    """
    edges = HISTOGRAM_EDGES
    for part, colour, name in (
        (rows[:RATIO_STEPS], "#9db8d2", "first"),
        (rows[-RATIO_STEPS:], "#2b5c8a", "last"),
    ):
        counts = np.sum([row["agreement/histogram"] for row in part], axis=0)
        axes.stairs(
            counts / counts.sum(),
            np.arange(len(edges) + 2),
            color=colour,
            linewidth=1.8,
            label=f"{name} {len(part)} steps",
        )
    ticks = []
    for place, edge in enumerate(edges):
        if edge == 0 or (abs(edge) > 2e-7 and round(math.log10(abs(edge)), 6) % 2 == 1):
            ticks.append(place)
    axes.set_xticks([place + 1 for place in ticks], [f"{edges[place]:g}" for place in ticks])
    axes.set_title("Ratios π/μ of tokens", loc="left", fontweight="bold")
    axes.set_xlabel("log π - log μ")
    axes.set_ylabel("share of the tokens")
    axes.legend(loc="upper right", frameon=False)


def _present(rows: list[Row]) -> list[str]:
    return [age for age in AGES if any(f"agreement/{age}/tokens" in row for row in rows)]


def _words(age: str) -> str:
    return age.replace("_up", " and more").replace("_", " ", 1).replace("_", " to ")


LINES_NAMED = 5
ENDS = 10  # first and last steps whose mean rewards are compared
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
    """Writes report.png, agreement.png and trace.json to `run_dir`.

    Returns the summary and the paths of these and other files.

    The evaluation of version 0 counts as made before the first step, and the evaluation of the last
    version as made after the last step.
    """
    run_dir = Path(run_dir)
    complete_metrics(run_dir)
    summary = summarize(run_dir, read_results(run_dir))
    trace = merge_traces(run_dir)
    files = [("rollouts", run_dir / "rollouts"), ("trace (ui.perfetto.dev)", trace)]
    can_plot = importlib.util.find_spec("matplotlib") is not None
    if can_plot:
        plots = [("plot", plot(run_dir)), ("agreement", plot_agreement(run_dir))]
        files = plots + files
    lines = [(name, str(path)) for name, path in files if path.exists()]
    if not can_plot:
        lines.append(("plot", "not drawn, since matplotlib is not installed"))
    lines.append(("a page of all this", f"megarl report {run_dir}"))
    lines += [("left out, as damaged", str(path)) for path in damaged_results(run_dir)]
    damaged = damaged_lines(run_dir / METRICS_FILE)
    if damaged:
        text = (
            f"{run_dir / METRICS_FILE}: line{'s' * (len(damaged) > 1)} "
            f"{', '.join(map(str, damaged[:LINES_NAMED]))}"
        )
        if len(damaged) > LINES_NAMED:
            text += f" and {len(damaged) - LINES_NAMED} more"
        lines.append(("left out, as damaged", text))
    return summary + _table(lines)


def summarize(run_dir: Path | str, evaluations: Sequence[Evaluation]) -> str:
    """A summary of the run in about a dozen lines.

    `evaluations`: in the order of their versions.
    """
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    if not rows:
        return f"{run_dir}: no step was finished\n"
    lines = []
    if _values(rows, "reward/mean"):
        lines.append(("reward", _reward(rows)))
    lines += _failure_lines(run_dir, rows)
    lines += _prompt_lines(rows)
    lines += _held_out(evaluations, int(rows[-1]["step"]) + 1)
    lines += _policy_lines(rows)
    lines += _time_lines(rows)
    lines += [("note", text) for text in advisories(rows)]
    return f"\n{run_dir}: {len(rows)} steps (speed and times are medians)\n" + _table(lines)


def _failure_lines(run_dir: Path, rows: list[Row]) -> Iterator[tuple[str, str]]:
    failures = FailuresTail(run_dir)
    failures.poll()
    for name, text in (
        ("episodes", describe_failed_episodes(rows)),
        ("scores", describe_failures(rows)),
    ):
        if text:
            reason = failures.reason(episodes=name == "episodes")
            yield name, f"{text}{reason}; rollouts/ marks them"


def _prompt_lines(rows: list[Row]) -> Iterator[tuple[str, str]]:
    unanswered = sum(_values(rows, "prompts/unanswered"))
    if unanswered:
        yield "prompts unanswered", f"{unanswered:.0f}, dropped since a program sampled nothing"
    dropped = _values(rows, "prompts/dropped")
    if dropped and (sum(dropped) or not unanswered):
        yield "prompts dropped", _dropped(rows)


def _policy_lines(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """What the policy did, how old it was, and how well trainer and engines agreed on it."""
    turns = _values(rows, "turns/mean")
    if turns and max(turns) > 1:
        yield "turns", _turns(rows)
    staleness = _values(rows, "staleness/max")
    if staleness and _values(rows, "staleness/mean"):
        mean = _mean(rows, "staleness/mean")
        yield "staleness", f"{mean:.2f} steps on average, {max(staleness):.0f} at most"
    differences = _values(rows, "logprob/abs_diff_mean")
    if differences:
        text = (
            f"at most {max(differences):.1e} between trainer and generator, "
            f"{len(differences)} probes"
        )
        without_replay = _values(rows, "logprob/abs_diff_mean_own_routing")
        if without_replay:
            text += f"; at most {max(without_replay):.1e} without routing replay"
        yield "log-prob difference", text
    sizes = _values(rows, "agreement/ess")
    if sizes and _values(rows, "agreement/abs_diff_mean"):
        difference = _ends(rows, "agreement/abs_diff_mean", "mean log-prob difference")
        size = statistics.median(sizes)
        yield "trained on", f"{difference}; effective sample size {size:.2%} (median)"
    if _values(rows, "entropy/mean"):
        yield "entropy", _ends(rows, "entropy/mean", "nats a token")
    if _values(rows, "response_tokens/mean"):
        yield "response length", _ends(rows, "response_tokens/mean", "tokens")


def _time_lines(rows: list[Row]) -> Iterator[tuple[str, str]]:
    audits = _values(rows, "sync/audit_ok")
    if audits:
        yield "weight audits", f"{sum(map(bool, audits))} of {len(audits)} equal bit for bit"
    speed = _values(rows, "samples_per_s")
    if speed and _values(rows, "tokens_per_s"):
        tokens = _median(rows, "tokens_per_s")
        yield "speed", f"{statistics.median(speed):.0f} samples/s, {tokens:.0f} tokens/s"
    text = ""
    if _values(rows, "time/step_s"):
        text = f"{_median(rows, 'time/step_s'):.3f} s; of it, or beside it:"
    yield "a step takes", text
    for name, key in SPLIT.items():
        if _values(rows, key):
            yield f"  {name}", f"{_median(rows, key):.3f} s"


def _reward(rows: list[Row]) -> str:
    ends = _Ends.of(rows, "reward/mean")
    return (
        f"{ends.first:.3f} in the first {ends.steps}, {ends.last:.3f} in the last {ends.number} "
        f"({ends.last - ends.first:+.3f})"
    )


class _Ends(NamedTuple):
    """The means over the first and the last ENDS steps in which a metric has a value.

    Steps that train only a critic have no values of the policy.
    """

    first: float
    last: float
    number: int
    steps: str

    @staticmethod
    def of(rows: list[Row], key: str) -> _Ends:
        """The key must have at least one value."""
        values = _values(rows, key)
        count = min(ENDS, len(values))
        return _Ends(
            first=statistics.fmean(values[:count]),
            last=statistics.fmean(values[-count:]),
            number=count,
            steps=f"{count} steps" + " that have one" * (len(values) < len(rows)),
        )


def _dropped(rows: list[Row]) -> str:
    dropped = sum(_values(rows, "prompts/dropped"))
    right = sum(_values(rows, "prompts/dropped_right"))
    wrong = sum(_values(rows, "prompts/dropped_wrong"))
    text = f"{dropped:.0f}, {right:.0f} all right and {wrong:.0f} all wrong"
    if not _values(rows, "reward/trained_mean"):
        return text
    trained = _Ends.of(rows, "reward/trained_mean")
    return f"{text}; without them the reward was {trained.last:.3f} in the last {trained.steps}"


def _ends(rows: list[Row], key: str, unit: str) -> str:
    ends = _Ends.of(rows, key)
    first = f"{ends.first:.3g} {unit} in the first {ends.steps}"
    return f"{first}, {ends.last:.3g} in the last {ends.number}"


def _turns(rows: list[Row]) -> str:
    turns = _Ends.of(rows, "turns/mean")
    share = _Ends.of(rows, "environment_tokens/fraction").last
    end = f"{turns.last:.2f} in the last {turns.number}"
    of_environment = f"where the environment wrote {share:.0%} of the tokens"
    return f"{turns.first:.2f} a sample in the first {turns.steps}, {end}, {of_environment}"


def _held_out(evaluations: Sequence[Evaluation], steps: int) -> list[tuple[str, str]]:
    """For each held-out set, before the first step and at the end: pass@1, pass@k for the largest
    k, and mean reward if it says more.
    """
    if not evaluations:
        return []
    lines = []
    first_sets = sets(evaluations[0]) if evaluations[0]["version"] == 0 else {}
    version = evaluations[-1]["version"]
    end = "after" if version in (0, steps) else f"after {version} steps"
    for name, last in sets(evaluations[-1]).items():
        first = first_sets.get(name, {})
        title = " ".join(("held-out", *name.split()))
        scores = ["pass@1"]
        scores += [key for key in last if key.startswith("pass@")][-1:]
        if last.get("reward/mean") != last.get("pass@1"):
            scores.append("reward/mean")
        for score in dict.fromkeys(scores):
            if score in last:
                before = f"{first[score]:.3f}" if score in first else "not measured"
                after = f"{last[score]:.3f}" if version else "not measured"
                label = score.replace("reward/mean", "reward")
                lines.append((f"{title} {label}", f"{before} before, {after} {end}"))
        sampling = sampling_text(last)
        if sampling:
            lines.append((f"{title} sampling", sampling))
    return lines


def _values(rows: list[Row], key: str) -> list[float]:
    """The key's finite values."""
    return [row[key] for row in rows if key in row and math.isfinite(row[key])]


def _mean(rows: list[Row], key: str) -> float:
    values = _values(rows, key)
    if values:
        return statistics.fmean(values)
    return math.nan


def _median(rows: list[Row], key: str) -> float:
    values = _values(rows, key)
    if values:
        return statistics.median(values)
    return math.nan


def _table(lines: list[tuple[str, str]]) -> str:
    return "".join(f"  {name:<24}{text}\n" for name, text in lines)
