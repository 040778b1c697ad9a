"""Advice about a run, in words: little, and only what is certain."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from megarl.observe.agreement import describe_agreement
from megarl.observe.metrics import Row
from megarl.observe.probe import describe_differences
from megarl.rewards.failures import FAILED_EPISODES, FAILED_FRACTION, describe_failed_episodes

FAILED_SHARE = 0.1  # of episodes or scores: more failures than that are no accident
BINDS = 0.2  # of a step
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
    if failed := describe_failed(rows[-steps:], FAILED_SHARE):
        return f"nothing has been learned for {steps} steps, since {failed}: rollouts/ marks them and says why"
    same = rows[-1].get("reward/std") == 0
    reward, most = rows[-1]["reward/mean"], max(row.get("reward/max", row["reward/mean"]) for row in rows)
    if same and reward == most and reward > min(row["reward/mean"] for row in rows):
        return f"all rewards have been equal for {steps} steps, and the highest of the run ({reward:g}): nothing is left to learn"
    what = f"all rewards have been equal ({rows[-1]['reward/mean']:g})" if same else "the rewards of each prompt have been equal"
    return f"{what} for {steps} steps, so nothing is learned: look into rollouts/ whether answers or reward are wrong"


def failures(rows: Sequence[Row]) -> str:
    """What many episodes or scores fail of is a mistake of the program or the reward, which the policy cannot help."""
    recent = rows[-EQUAL_STEPS:]
    failed = "" if equal_rewards(rows) else describe_failed(recent, FAILED_SHARE)
    return f"{failed} in the last {len(recent)} steps: rollouts/ marks them and says why" if failed else ""


def scoring_binds(rows: Sequence[Row]) -> str:
    """Where rollouts wait longer for their scores than for engines, and the trainer for rollouts, more engines would not help."""
    recent = rows[-EQUAL_STEPS:]
    if len(recent) < EQUAL_STEPS or not all("time/reward_s" in row for row in recent):
        return ""
    names = ("step", "trainer_wait", "generate", "reward")
    step, wait, generate, reward = (median(row[f"time/{name}_s"] for row in recent) for name in names)
    if not (reward > generate and reward > BINDS * step and wait > BINDS * step):
        return ""
    return (
        f"scoring binds: rollouts waited {reward:.3g} s of a step of {step:.3g} s for scores, generation took {generate:.3g} s (medians of "
        f"the last {len(recent)}): raise reward.workers, or give what scores more room (an async function's service, a role's engines)"
    )


def describe_failed(rows: Sequence[Row], least: float) -> str:
    """What failed in a share of at least `least`, episodes or else scores; empty if neither did."""
    shares = {key: fmean(row.get(key, 0.0) for row in rows) for key in (FAILED_EPISODES, FAILED_FRACTION)} if rows else {}
    if shares.get(FAILED_EPISODES, 0.0) >= least:
        return describe_failed_episodes(rows)
    return f"{shares[FAILED_FRACTION]:.0%} of the scores failed" if shares.get(FAILED_FRACTION, 0.0) >= least else ""


RULES = (equal_rewards, failures, scoring_binds, describe_differences, describe_agreement)
