"""Who sends to whom, and how evenly, as a picture."""

from __future__ import annotations

import matplotlib
import numpy as np

from megarl.config.errors import ConfigError
from megarl.reshard.map import ReshardMap

FORMATS = (".svg", ".png")
MOST_CELLS = 512  # along a side of the matrix; more ranks than that are put together


def traffic(map: ReshardMap, most_cells: int = MOST_CELLS) -> np.ndarray:
    """Bytes from sender to receiver, [senders, receivers]; runs of ranks are summed where a side has more than `most_cells`."""
    per = [-(-layout.world_size // most_cells) for layout in (map.source, map.destination)]
    shape = [-(-layout.world_size // n) for layout, n in zip((map.source, map.destination), per)]
    matrix = np.zeros(shape[0] * shape[1], dtype=np.int64)
    for row, size in map.routes():
        service = map.service(row)
        cells = service.senders // per[0] * shape[1] + service.receivers // per[1]
        np.add.at(matrix, cells, size * service.sizes[:, None])
    return matrix.reshape(shape)


def draw(map: ReshardMap, path: str, title: str) -> None:
    """Writes `path`, an .svg or .png: the matrix in the middle, each sender's bytes on its left, each receiver's above.

    Raises ConfigError for another suffix.
    """
    if not path.endswith(FORMATS):
        raise ConfigError(f"--picture {path}: must end in {' or '.join(FORMATS)}")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    gib = 2.0**-30
    sent, received = (total * gib for total in map.rank_bytes())
    matrix = traffic(map) * gib
    figure, axes = plt.subplots(
        2, 2, figsize=(10, 9), width_ratios=(1, 4), height_ratios=(1, 4), layout="constrained", sharex="col", sharey="row"
    )
    above, left, main = axes[0][1], axes[1][0], axes[1][1]
    axes[0][0].axis("off")
    extent = (-0.5, len(received) - 0.5, len(sent) - 0.5, -0.5)
    shown = np.ma.masked_equal(matrix, 0)
    image = main.imshow(shown, aspect="auto", extent=extent, interpolation="nearest", cmap="viridis")
    main.set_xlabel("generator rank")
    left.set_ylabel("trainer rank")
    for axis, values, by_row in ((above, received, False), (left, sent, True)):
        steps = np.repeat(values, 2)
        edges = np.repeat(np.arange(len(values) + 1) - 0.5, 2)[1:-1]
        mean = values.mean()
        if by_row:
            axis.fill_betweenx(edges, steps, color="tab:blue", lw=0)
            axis.axvline(mean, color="tab:red", lw=1)
            axis.set_xlim(1.15 * values.max(), 0)
            axis.set_xlabel(f"GiB sent\nmax/mean {values.max() / mean:.3f}")
        else:
            axis.fill_between(edges, steps, color="tab:blue", lw=0)
            axis.axhline(mean, color="tab:red", lw=1)
            axis.set_ylim(0, 1.15 * values.max())
            axis.set_ylabel("GiB received")
            axis.tick_params(labelleft=True)
            axis.set_title(f"{title}\n{sent.sum():,.0f} GiB; receivers max/mean {values.max() / mean:.3f}", fontsize=10)
    figure.colorbar(image, ax=main, label="GiB from sender to receiver (white: none)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
