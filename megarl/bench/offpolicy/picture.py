"""Pictures of `megarl bench offpolicy`: score against divergence, as in figures 3 to 5 of arXiv:2410.18252."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = ("#2f6fab", "#c26a2d", "#3b8f6b", "#8c5a8c", "#d9a441", "#9a9a9a", "#b03a48")


def draw(facts: Mapping[str, Any], path: str) -> None:
    """Writes `path`: a panel for each part; lines are runs, points their last weights, larger with more mini-batches or a longer lag."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = {part: results for part, results in facts["parts"].items() if results}
    figure = Figure(figsize=(4.2 * max(1, len(parts)), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(parts)), sharey=True, squeeze=False)[0]
    for panel, (part, results) in zip(panels, parts.items()):
        _draw_part(panel, part, results)
    panels[0].set_ylabel("score of the last weights")
    figure.savefig(path, dpi=150)


def _draw_part(panel: Any, part: str, results: Sequence[Mapping[str, Any]]) -> None:
    by = {"policies": "policy", "asynchrony": "policy", "reward_models": "reward_model"}.get(part, "algorithm")
    for name, colour in zip(dict.fromkeys(each[by] for each in results), COLOURS):
        own = [each for each in results if each[by] == name]
        for each in own:
            panel.plot(
                [point["kl"] for point in each["curve"]], [point["score"] for point in each["curve"]], color=colour, alpha=0.3, lw=0.8
            )
        last = [each["curve"][-1] for each in own]
        sizes = [18 * (1 + each["minibatches"] * each["epochs"] + each["capacity"]) ** 0.7 for each in own]
        panel.scatter([point["kl"] for point in last], [point["score"] for point in last], s=sizes, color=colour, alpha=0.6, label=name)
    panel.set_xlabel("KL from the first weights, nats a response")
    panel.set_title(part, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=7)
