"""Draws how many bytes each rank sends to each other rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megarl.reshard.forwarding import Forwarding
from megarl.reshard.map import ReshardMap
from megarl.reshard.report import sender_bound

MOST_CELLS = 512  # most cells along a side of the matrix; with more ranks, several share a cell


def traffic(map: ReshardMap) -> np.ndarray:
    """The bytes from sender to receiver, [senders, receivers]; runs of ranks are summed if a side
    has more than MOST_CELLS.
    """
    per = [-(-layout.world_size // MOST_CELLS) for layout in (map.source, map.destination)]
    shape = [-(-layout.world_size // n) for layout, n in zip((map.source, map.destination), per)]
    matrix = np.zeros(shape[0] * shape[1], dtype=np.int64)
    for row, size in map.routes():
        assignment = map.turns.assignment(row)
        cells = assignment.senders // per[0] * shape[1] + assignment.receivers // per[1]
        np.add.at(matrix, cells, size * assignment.sizes[:, None])
    return matrix.reshape(shape)


def draw(map: ReshardMap, path: str, title: str, forwarding: Forwarding | None = None) -> None:
    """Writes `path`, an .svg or .png: the matrix in the middle, each sender's bytes on its left,
    each receiver's above it.

    The matrix shows what the trainer sends. The title tells how much engines pass on.
    """
    gib = 2.0**-30
    sent, received = (total * gib for total in map.rank_bytes())
    # without pyplot, whose state may be a notebook's
    figure = Figure(figsize=(10, 9), layout="constrained")
    axes = figure.subplots(
        2, 2, width_ratios=(1, 4), height_ratios=(1, 4), sharex="col", sharey="row"
    )
    (corner_axis, top_axis), (left_axis, main_axis) = axes
    passed_on = forwarding.rank_bytes()[0].sum() * gib if forwarding is not None else 0.0
    relayed = f", and {passed_on:,.0f} GiB from engine to engine" if passed_on else ""
    figure.suptitle(f"{title}: {sent.sum():,.0f} GiB{relayed}", fontsize=11)
    corner_axis.axis("off")
    legend = "red: mean\ndashed: the least\nthat the stages\nallow the busiest"
    corner_axis.text(
        0, 0.5, legend, color="tab:red", va="center", fontsize=9, transform=corner_axis.transAxes
    )
    extent = (-0.5, len(received) - 0.5, len(sent) - 0.5, -0.5)
    matrix = np.ma.masked_equal(traffic(map) * gib, 0)
    image = main_axis.imshow(
        matrix, aspect="auto", extent=extent, interpolation="nearest", cmap="viridis"
    )
    main_axis.set_xlabel("receiver: generator rank")
    _bars(top_axis, received, by_row=False)
    top_axis.set_ylabel(f"GiB received\nmax/mean {received.max() / received.mean():.3f}")
    top_axis.tick_params(labelleft=True)
    _bars(left_axis, sent, by_row=True)
    bound = sender_bound(map)
    left_axis.axvline(bound * sent.mean(), color="tab:red", lw=1, ls="--")
    left_axis.set_xlabel(f"GiB sent\nmax/mean {sent.max() / sent.mean():.3f}\n(least: {bound:.3f})")
    left_axis.set_ylabel("sender: trainer rank")
    figure.colorbar(image, ax=main_axis, label="GiB from sender to receiver (white: none)")
    figure.savefig(path, dpi=110)


def _bars(axis: Any, values: np.ndarray, by_row: bool) -> None:
    """Draws a bar per rank and the mean as a line. With `by_row` bars grow to the left."""
    steps = np.repeat(values, 2)
    edges = np.repeat(np.arange(len(values) + 1) - 0.5, 2)[1:-1]
    if by_row:
        axis.fill_betweenx(edges, steps, color="tab:blue", lw=0)
        axis.axvline(values.mean(), color="tab:red", lw=1)
        axis.set_xlim(1.15 * values.max(), 0)
    else:
        axis.fill_between(edges, steps, color="tab:blue", lw=0)
        axis.axhline(values.mean(), color="tab:red", lw=1)
        axis.set_ylim(0, 1.15 * values.max())
