"""agreement.png: the meters of agreement over a run's steps, by the age of tokens, and the ratios of its first and last steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from megarl.observe.agreement import AGES, HISTOGRAM_EDGES
from megarl.observe.metrics import METRICS_FILE, Row, read_metrics
from megarl.observe.plot import SMOOTH_STEPS, moving_mean, series, style
from megarl.observe.probe import DIFFERENCE, LIMIT

ENDS = 20  # the ratios of so many first and last steps
AGE_COLOURS: dict[str, str] = dict(zip(AGES, ("#1b3a5c", "#2b5c8a", "#4f9d69", "#c98a1b", "#e07b39", "#b5423c", "#8a4f9d"), strict=True))


def plot_agreement(run_dir: Path) -> Path:
    """Writes `run_dir`/agreement.png, if the run has meters, and returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = run_dir / "agreement.png"
    rows = [row for row in read_metrics(run_dir / METRICS_FILE) if "agreement/tokens" in row]
    if not rows:
        return target
    figure = Figure(figsize=(9, 9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
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
    axes.plot(steps, series(rows, "agreement/abs_diff_max"), ".", color="#cfd4da", markersize=2.5, label="all tokens, maximum")
    axes.plot(steps, series(rows, "agreement/abs_diff_p99"), ".", color="#9aa3ad", markersize=2.5, label="all tokens, 99th percentile")
    for age in _present(rows):
        values = moving_mean(series(rows, f"agreement/{age}/abs_diff_mean"), SMOOTH_STEPS)
        axes.plot(steps, values, color=AGE_COLOURS[age], linewidth=1.6, label=f"{_words(age)}, mean")
    axes.plot(steps, series(rows, DIFFERENCE), "D", color="#1d1f21", markersize=3, label="probe, mean")
    axes.plot(steps, series(rows, LIMIT), "--", color="#b5423c", linewidth=1, label="observe.probe_limit")
    axes.set_yscale("log")
    axes.set_title("Log-prob difference of trainer and sampling policy", loc="left", fontweight="bold")
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
    """On the axis of log-ratios all bins have the same width: half a power of ten."""
    edges = HISTOGRAM_EDGES
    for part, colour, name in ((rows[:ENDS], "#9db8d2", "first"), (rows[-ENDS:], "#2b5c8a", "last")):
        counts = np.sum([row["agreement/histogram"] for row in part], axis=0)
        axes.stairs(counts / counts.sum(), np.arange(len(edges) + 2), color=colour, linewidth=1.8, label=f"{name} {len(part)} steps")
    ticks = [place for place, edge in enumerate(edges) if edge == 0 or (abs(edge) > 2e-7 and round(math.log10(abs(edge)), 6) % 2 == 1)]
    axes.set_xticks([place + 1 for place in ticks], [f"{edges[place]:g}" for place in ticks])
    axes.set_title("Ratios π/μ of tokens", loc="left", fontweight="bold")
    axes.set_xlabel("log π - log μ")
    axes.set_ylabel("share of the tokens")
    axes.legend(loc="upper right", frameon=False)


def _present(rows: list[Row]) -> list[str]:
    return [age for age in AGES if any(f"agreement/{age}/tokens" in row for row in rows)]


def _words(age: str) -> str:
    return age.replace("_up", " and more").replace("_", " ", 1).replace("_", " to ")
