"""What `megarl bench sync` measured, as bars."""

from __future__ import annotations

from typing import Any

COLOURS = {"direct": "#2f6fab", "gather": "#c26a2d", "ceiling": "#9a9a9a"}  # by the first word of a way's name


def title(facts: dict[str, Any]) -> str:
    return (
        f"{facts['model']}, {facts['bytes'] / 1e6:.1f} MB; trainer TP{facts['trainer_tp']} -> engine TP{facts['engine_tp']}; "
        f"{facts['hardware']}; median of {facts['repeats']}"
    )


def draw(facts: dict[str, Any], path: str) -> None:
    """Writes `path`: the median of each way with its quartiles; the darker part is what an audit adds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ways = facts["ways"]
    names = [way["name"] for way in ways]
    median = [way["median_s"] * 1e3 for way in ways]
    spread = [[abs(end * 1e3 - m) for m, end in zip(median, ends)] for ends in zip(*(way["quartiles_s"] for way in ways))]
    figure = Figure(figsize=(9, 0.6 + 0.36 * len(ways)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.barh(names, median, xerr=spread, color=[COLOURS[name.split()[0]] for name in names], error_kw={"lw": 1, "capsize": 2})
    audit = [max(0.0, way["audit_s"] or 0.0) * 1e3 for way in ways]
    axes.barh(names, audit, left=median, color="#1d4469", label="audit")
    axes.invert_yaxis()
    axes.set_xlabel("ms until every byte is in the live engine")
    axes.set_title(title(facts), fontsize=8)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
