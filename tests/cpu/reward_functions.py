"""Reward functions for tests of runs and for test_rewards_pool.py, which call them in worker
processes.
"""

from __future__ import annotations

import json
import zlib
from typing import Any


def by_level(
    response: str, row: dict[str, Any], version: int, sample_index: int, token_ids: list[int]
) -> dict[str, float]:
    """The first sample of each prompt fails; from version 2 on all do."""
    print("scored one of level", row["level"], flush=False)
    if sample_index == 0 or version >= 2:
        raise ValueError(f"no\nnumber at level {row['level']}")
    return {"score": len(response) % 2, "level": row["level"], "tokens": len(token_ids)}


def broken(text: str, answer: str) -> float:
    """Fails on the policy's responses, which have at most 16 characters, but not on the texts that
    are tried before a run.
    """
    if text in (answer, "") or len(text) > 100:
        return 0.0
    grades: dict[str, float] = {}
    return grades[answer]


def patient(text: str, answer: str) -> float:
    while text == "slow":
        pass
    return float(text == answer)


def by_chance(response: str, prompt: str) -> float:
    """0 or 1 by the response's text. For a third of the prompts it is always the same."""
    of_prompt = zlib.crc32(prompt.encode())
    return float(of_prompt // 3 % 2 if of_prompt % 3 == 0 else zlib.crc32(response.encode()) % 2)


def by_chance_of_source(response: str, prompt: str, source: str) -> dict[str, float]:
    return {
        "score": by_chance(response, prompt),
        **{f"is_{name}": source == name for name in ("few", "verl", "chain")},
    }


def constant(response: str) -> float:
    return 0.5


def unasked() -> float:
    """Does not take the response."""
    return 0.25


def told(
    response: str, prompt: str, sample_index: int, prompt_token_ids: list[int], token_ids: list[int]
) -> float:
    """Prints all its arguments."""
    print(json.dumps([prompt, sample_index, response, prompt_token_ids, token_ids]), flush=True)
    return float(len(token_ids) % 2)
