"""What `megarl bench overlap` measured, as bars of efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLOURS = ("#9a9a9a", "#c26a2d", "#d9a441", "#2f6fab", "#5a93c4", "#3b8f6b", "#8c5a8c")


def draw(facts: Mapping[str, Any], path: str) -> None:
    """Writes `path`: a panel for each kind of lengths, a group of bars for each ratio, a bar for each setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = facts["cells"]
    lengths, ratios, settings = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("lengths", "ratio", "setting"))
    found = {(cell["lengths"], cell["ratio"], cell["setting"]): cell["efficiency"] for cell in cells}
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    width = 0.84 / len(settings)
    for panel, kind in zip(panels, lengths):
        for index, (setting, colour) in enumerate(zip(settings, COLOURS, strict=True)):
            places = [place + (index - (len(settings) - 1) / 2) * width for place in range(len(ratios))]
            panel.bar(places, [found[kind, ratio, setting] for ratio in ratios], width, color=colour, label=setting)
        panel.axhline(0.95, color="black", lw=0.8, ls="--")
        panel.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
        panel.set_xlabel("trainer's phase / generator's")
        panel.set_title(f"{kind} lengths (emulated)", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ideal / achieved step time")
    panels[0].set_ylim(0, 1.05)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
