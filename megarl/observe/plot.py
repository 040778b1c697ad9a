"""report.png: reward per step and on held-out prompts, response length and entropy, and where the time went."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path

import numpy as np

from megarl.observe.evaluations import Evaluation, as_metrics, read_results
from megarl.observe.metrics import METRICS_FILE, Row, read_metrics

SMOOTH_STEPS = 10  # trailing window of the moving mean
# (key, label, colour): the trainer's times are stacked upwards from the axis, the generator's downwards.
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
HEADROOM = 1.25  # height of the axis / 97th percentile: a slow first step must not flatten all others


def plot(run_dir: Path | str) -> Path:
    """Writes `run_dir`/report.png and returns its path. Uses no display and no state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    figure = Figure(figsize=(9, 9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    reward_axes, length_axes, time_axes = figure.subplots(3, 1, sharex=True, height_ratios=[1, 0.7, 1.15])
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
    return np.array([_nanmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)])


def _nanmean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _plot_reward(axes, rows: list[Row]) -> None:
    steps, reward = series(rows, "step"), series(rows, "reward/mean")
    axes.plot(steps, reward, color="#9db8d2", linewidth=1, marker="o", markersize=2.5, label="mean of the step")
    axes.plot(steps, moving_mean(reward, SMOOTH_STEPS), color="#2b5c8a", linewidth=2.2, label=f"mean of the last {SMOOTH_STEPS} steps")
    axes.set_title("Reward", loc="left", fontweight="bold")
    axes.set_ylabel("mean reward")
    if np.nanmin(reward, initial=0.0) >= 0 and np.nanmax(reward, initial=0.0) <= 1:
        axes.set_ylim(0, 1.03)


def _plot_held_out(axes, evaluations: list[Evaluation]) -> None:
    """pass@1 of every held-out set, or its mean reward, at the step of its weights: steps 0 to v - 1 have made version v."""
    points: dict[str, list[tuple[int, float]]] = {}
    for evaluation in evaluations:
        found = as_metrics(evaluation)
        for key, value in found.items():
            if key.endswith("pass@1") or (key.endswith("/reward/mean") and key.replace("reward/mean", "pass@1") not in found):
                points.setdefault(key.removeprefix("eval/").replace("/", " "), []).append((evaluation["version"], value))
    for (name, found), colour in zip(points.items(), cycle(HELD_OUT_COLOURS)):
        axes.plot(*zip(*found), color=colour, linewidth=1.2, linestyle="--", marker="D", markersize=5, label=f"held-out {name}")


def _plot_responses(axes, rows: list[Row]) -> None:
    """Response length with the band of the middle 80 %; entropy, and the divergence from teachers, on a second axis."""
    steps, length = series(rows, "step"), series(rows, "response_tokens/mean")
    low, high = series(rows, "response_tokens/p10"), series(rows, "response_tokens/p90")
    axes.fill_between(steps, low, high, color="#4f9d69", alpha=0.18, linewidth=0, label="10 % to 90 %")
    axes.plot(steps, length, color="#4f9d69", linewidth=1.6, label="mean length")
    axes.set_title("Responses", loc="left", fontweight="bold")
    axes.set_ylabel("tokens")
    axes.set_ylim(0, LEGEND_ROOM * max(1.0, np.nanmax([*length, *high, 0.0])))
    entropy, entropy_axes = series(rows, "entropy/mean"), axes.twinx()
    entropy_axes.plot(steps, entropy, color="#8a4f9d", linewidth=1.3, label="entropy")
    divergence = series(rows, "distill/kl")
    if np.isfinite(divergence).any():
        entropy_axes.plot(steps, divergence, color="#b5423c", linewidth=1.3, label="divergence from teachers")
    entropy_axes.set_ylabel("nats per token", color="#8a4f9d")
    entropy_axes.set_ylim(0, LEGEND_ROOM * max(1e-3, np.nanmax([*entropy, *divergence, 0.0])))
    entropy_axes.spines[["top", "left"]].set_visible(False)
    handles, labels = (left + right for left, right in zip(axes.get_legend_handles_labels(), entropy_axes.get_legend_handles_labels()))
    axes.legend(handles, labels, loc="upper right", ncols=3, frameon=False)


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
    axes.legend(*_unique_legend(axes), loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False)


def _stack(axes, steps: np.ndarray, rows: list[Row], parts: list[tuple[str, str, str]], sign: int) -> np.ndarray:
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
