"""A plan as a picture: the memory of a GPU on each side, and the time of a step, by parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megarl.estimate.baseline import Baseline
from megarl.estimate.estimate import Estimate, generate_parts, train_parts
from megarl.estimate.report import gib_parts

# a letter's share of the longest bar: names that do not fit into their part are only in the legend
LETTER = 0.0085


def draw(result: Estimate, baseline: Baseline | None, path: str, title: str) -> None:
    """Writes `path`, an .svg or .png."""
    # without pyplot, whose state may be a notebook's
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    memory, time = figure.subplots(2, 1)
    _bars(memory, {"generator": gib_parts(result.generator), "trainer": gib_parts(result.trainer)})
    memory.axvline(result.cluster.gpu.memory_gib, color="tab:red", lw=1.2)
    memory.set_xlabel(f"GiB per GPU; red: what one {result.cluster.gpu.name} has")
    memory.set_title(
        f"{title}\nfits: {'no' if result.overfull else 'yes'}; binds: {result.binding}", fontsize=10
    )
    others = {
        "weight update": result.sync_s,
        "waits for places": result.places_wait_s,
        "the rest of a step": result.glue_s,
    }
    rows = {
        "generation": generate_parts(result.generate),
        "training": train_parts(result.train),
        "beside them": others,
    }
    _bars(time, rows)
    time.axvline(result.step_s, color="tab:blue", lw=1.2)
    text = f"seconds; blue: a step, {result.step_s:.3g}"
    time.set_xlabel(
        text + (f"; the synchronous baseline's, {baseline.step_s:.3g}" if baseline else "")
    )
    figure.savefig(path, dpi=110)


def _bars(axes: Axes, rows: Mapping[str, Mapping[str, float]]) -> None:
    """One stacked bar for each row.

    A part has the same colour in all rows, and is left out if it is 0.
    """
    rows = {
        row: {name: value for name, value in parts.items() if value > 0}
        for row, parts in rows.items()
    }
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    colours = matplotlib.colormaps["tab20"]
    longest = max(sum(parts.values()) for parts in rows.values())
    for row, parts in rows.items():
        bar_end = 0.0
        for name, value in parts.items():
            axes.barh(
                row,
                value,
                left=bar_end,
                color=colours(names.index(name) % 20),
                edgecolor="white",
                lw=0.5,
                label=name,
            )
            if value > LETTER * len(name) * longest:
                middle: Any = row  # a category, as for barh, but not in the annotation of `text`
                axes.text(
                    bar_end + value / 2,
                    middle,
                    f"{name}\n{value:.3g}",
                    ha="center",
                    va="center",
                    fontsize=7,
                )
            bar_end += value
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))  # each part once
    axes.legend(
        handles.values(), handles.keys(), fontsize=7, bbox_to_anchor=(1.0, 1.0), loc="upper left"
    )
