"""What a program or an environment says of its episode: a reward, and further numbers."""

from __future__ import annotations

import json
import re
from typing import Any

from megarl.config.schema import MAX_REWARD
from megarl.rewards.score import Score

MOST_METRICS = 32
_METRIC = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


class NoReward(Exception):
    """Whoever was to say a reward has said none."""


def said(output: str) -> tuple[Score, dict[str, float]]:
    """The reward in the last line, and what other numbers are beside it, as metrics. Raises NoReward."""
    line = output.strip().rpartition("\n")[2]
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    form = f"a JSON object of numbers with one, with at most {MOST_METRICS} names of letters, digits and _"
    return numbers(
        found if isinstance(found, dict) else {"reward": found}, f"its last line of output is neither a reward nor {form}: {line[:200]!r}"
    )


def numbers(told: dict[str, Any], otherwise: str) -> tuple[Score, dict[str, float]]:
    """The reward and the metrics that an object has. Raises NoReward with the message `otherwise` if these are not all that it has."""
    found = {name: float(value) for name, value in told.items() if type(value) in (int, float) and abs(value) <= MAX_REWARD}
    named = len(told) <= MOST_METRICS and all(map(_METRIC.fullmatch, told))
    if "reward" not in found or len(found) < len(told) or not named:
        raise NoReward(otherwise)
    return Score(found["reward"]), {name: value for name, value in found.items() if name != "reward"}
