"""What the page says about a run beside `observe.advisories`: few things, each with the numbers that it is concluded from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, median_high
from typing import Any

from megarl.observe.advisories import scoring_binds
from megarl.observe.metrics import Row

RECENT = 20  # steps that are looked at
FEWEST = 10
WAITS = 0.4  # of a step
TRUNCATED = 0.1
NO_SIGNAL = 0.5
SOLVED = 0.9  # where the mean reward is between a step's lowest and highest
GROWTH = 2.0  # the queue at the end beside that of as many steps before
SLOW = 0.7  # of its peers' tokens
FEWEST_TOKENS = 10_000  # of an engine's peer


def advice(rows: Sequence[Row], settings: Mapping[str, Any], engine_tokens: Mapping[int, int]) -> list[str]:
    recent = rows[-RECENT:]
    if len(recent) < FEWEST:
        return []
    rules = (_waits(recent, settings), _truncated(recent), _no_signal(recent), _queue(rows), _slow_engine(engine_tokens))
    return [text for text in rules if text]


def _waits(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    step, trainer, generator = (_median(rows, f"time/{name}_s") for name in ("step", "trainer_wait", "generator_wait"))
    if not step > 0 or settings.get("async.capacity") == 0:  # a synchronous run waits by its nature
        return ""
    if trainer > WAITS * step and trainer > generator and not scoring_binds(rows):
        return (
            f"the trainer waits {trainer / step:.0%} of a step ({trainer:.3g} of {step:.3g} s, median of the last {len(rows)}): "
            "generation is the slower side; more engines, shorter responses, or a larger async.capacity if their times vary"
        )
    if generator > WAITS * step and generator > trainer:
        return (
            f"the engines wait {generator / step:.0%} of a step for weights ({generator:.3g} of {step:.3g} s, median of the last "
            f"{len(rows)}): training is the slower side; fewer engines or more trainer ranks, or a larger async.capacity"
        )
    return ""


def _truncated(rows: Sequence[Row]) -> str:
    share = _median(rows, "truncated_fraction")
    most = "rollout.max_tokens"
    return (
        f"{share:.0%} of the responses end at {most} (median of the last {len(rows)} steps): their rewards say little"
        if share > TRUNCATED
        else ""
    )


def _no_signal(rows: Sequence[Row]) -> str:
    share = _median(rows, "zero_advantage_fraction")
    if not NO_SIGNAL < share < 1:
        return ""
    lowest, mean, highest = (_median(rows, f"reward/{name}") for name in ("min", "mean", "max"))
    height = (mean - lowest) / (highest - lowest) if highest > lowest else math.nan
    if height >= SOLVED:  # equal since they are right: it has learned what there is to learn
        return ""
    why = "hard" if height <= 1 - SOLVED else "easy or too hard"
    return (
        f"in {share:.0%} of the groups all rewards are equal (median of the last {len(rows)} steps), so they teach nothing: the prompts "
        f"are too {why}; rollout.dynamic_sampling replaces them"
    )


def _queue(rows: Sequence[Row]) -> str:
    if len(rows) < 2 * RECENT:
        return ""
    before, now = (_median(part, "prompts/buffered") for part in (rows[-2 * RECENT : -RECENT], rows[-RECENT:]))
    if not (now > GROWTH * before and now > 1):
        return ""
    return f"the queue of finished groups grows: {now:.0f} wait, {before:.0f} did {RECENT} steps before; samples become older than need be"


def _slow_engine(tokens: Mapping[int, int]) -> str:
    if len(tokens) < 2:
        return ""
    usual = median_high(tokens.values())
    slow = [index for index, count in sorted(tokens.items()) if count < SLOW * usual]
    if usual < FEWEST_TOKENS or not slow:
        return ""
    shares = ", ".join(f"engine {index} {tokens[index] / usual:.0%}" for index in slow[:5])
    return f"engines that made far fewer tokens than their peers, in per cent of the median engine's: {shares}"


def _median(rows: Sequence[Row], key: str) -> float:
    values = [row[key] for row in rows if isinstance(row.get(key), int | float) and math.isfinite(row[key])]
    return median(values) if values else math.nan
