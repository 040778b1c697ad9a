"""Advice about a run, in words: little, and only what is certain."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.observe.agreement import describe_agreement
from megarl.observe.metrics import Row
from megarl.observe.probe import describe_differences

EQUAL_STEPS = 5  # so many steps in a row without two different rewards in any group are no accident


def advisories(rows: Sequence[Row]) -> list[str]:
    """The advisories that the run's last steps call for; possibly none."""
    return [text for rule in RULES if (text := rule(rows))]


def equal_rewards(rows: Sequence[Row]) -> str:
    """Without different rewards there is no gradient: mostly the reward is wrong, or the task too hard or too easy."""
    steps = 0
    for row in reversed(rows):
        if row.get("zero_advantage_fraction") != 1:
            break
        steps += 1
    if steps < EQUAL_STEPS:
        return ""
    same = rows[-1].get("reward/std") == 0
    what = f"all rewards have been equal ({rows[-1]['reward/mean']:g})" if same else "the rewards of each prompt have been equal"
    return f"{what} for {steps} steps, so nothing is learned: look into rollouts/ whether answers or reward are wrong"


RULES = (equal_rewards, describe_differences, describe_agreement)
