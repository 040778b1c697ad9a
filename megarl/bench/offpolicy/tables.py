"""The tables of `megarl bench offpolicy`: one of each part, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
NEEDED = "score of the last weights (range over seeds) at their divergence from the first in nats a response"
LEARNED = "; in brackets the share of responses that score more than their demonstration, and the reward model's score"


def render(facts: Mapping[str, Any]) -> str:
    found = [RENDER[part](results) for part, results in facts["parts"].items() if results]
    if models := facts.get("reward_models"):
        found.append(_reward_models(models))
    return "\n\n".join(found) or "no run is complete"


def _reward_models(models: Sequence[Result]) -> str:
    lines = ["**Reward models:** share of held-out pairs in the right order", "", "| | seed | `megarl reward-model` | plain PyTorch |"]
    rows = (f"| {each['size']} | {each['seed']} | {each['accuracy']:.3f} | {each['accuracy_plain']:.3f} |" for each in models)
    return "\n".join([*lines, "|---|---|---|---|", *rows])


def _grid(title: str, results: Sequence[Result], row: Callable[[Result], str], column: Callable[[Result], str]) -> str:
    """A cell for each pair of a row and a column, over seeds."""
    rows, columns = (list(dict.fromkeys(map(of, results))) for of in (row, column))
    learned = LEARNED if results[0]["curve"][-1].get("proxy") is not None else ""
    lines = [f"**{title}** {NEEDED}{learned}", "", f"| | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for name in rows:
        cells = [_cell([each for each in results if (row(each), column(each)) == (name, other)]) for other in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return "–"
    last = [each["curve"][-1] for each in results]
    scores, divergence = [point["score"] for point in last], statistics.fmean(point["kl"] for point in last)
    spread = f" ({min(scores):.2f}–{max(scores):.2f})" if len(scores) > 1 else ""
    found = f"{statistics.fmean(scores):.3f}{spread} at {divergence:.2f}"
    if last[0].get("proxy") is None:
        return found
    wins, proxy = (statistics.fmean(point[key] for point in last) for key in ("win_rate", "proxy"))
    return f"{found} [{wins:.0%}, {proxy:.2f}]"


def _timed(title: str, results: Sequence[Result], row: Callable[[Result], str], column: Callable[[Result], str]) -> str:
    """As _grid, with the seconds of a step."""
    table, times = _grid(title, results, row, column), []
    for name in dict.fromkeys(map(row, results)):
        by_column = {column(each): each for each in results if row(each) == name}
        times.append(f"{name}: " + ", ".join(f"{each['step_s']:.3f} s ({other})" for other, each in by_column.items()))
    return f"{table}\n\nMedian seconds of a step: {'; '.join(times)}."


def _minibatches(result: Result) -> str:
    return f"N={result['minibatches']}"


RENDER: Mapping[str, Callable[[Sequence[Result]], str]] = {
    "losses": lambda results: _grid("Losses by mini-batches:", results, lambda each: each["algorithm"], _minibatches),
    "lags": lambda results: _grid(
        "With and without correction:", results, lambda each: each["algorithm"], lambda each: f"lag {each['capacity']}"
    ),
    "policies": lambda results: _grid("Sizes of policies, online_dpo:", results, lambda each: each["policy"], _minibatches),
    "reward_models": lambda results: _grid("Sizes of reward models, online_dpo:", results, lambda each: each["reward_model"], _minibatches),
    "epochs": lambda results: _grid(
        "Updates a batch, online_dpo:", results, lambda each: each["algorithm"], lambda each: f"T={each['epochs']}"
    ),
    "samples": lambda results: _grid(
        "Samples to a prompt, online_dpo:",
        results,
        lambda each: each["algorithm"],
        lambda each: f"K={each['samples']}" + (", half the updates and learning rate" if each["halved"] else ""),
    ),
    "asynchrony": lambda results: _timed(
        "Synchronous and one step behind, online_dpo:",
        results,
        lambda each: each["policy"],
        lambda each: "synchronous" if each["capacity"] == 0 else "one step behind",
    ),
}
