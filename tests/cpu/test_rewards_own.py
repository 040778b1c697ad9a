"""A user's own reward functions, in worker processes and in the event loop: their arguments and
their failures.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from reward_pools import DEADLINE_S, RewardPool

from megarl.base.rollout_types import Failure
from megarl.config.errors import RunError
from megarl.config.schema import RewardConfig
from megarl.rewards import pool as rewards
from megarl.rewards.pool import RewardInLoop
from megarl.rewards.score import Score, ScoreRequest, parameters_of

GRADERS = """
import dataclasses, os, sys
import numpy

@dataclasses.dataclass
class Parts:
    score: float
    length: int

def bug():
    found = {}
    return found["key"]

def letters(text, answer):
    print("seen", text)
    if text == "slow":
        while True: pass
    return {
        "bad": lambda: int("x"), "memory": lambda: bytearray(1 << 40), "exit": lambda: os._exit(3), "quit": lambda: sys.exit("bye"),
        "bug": bug, "none": lambda: None, "nan": lambda: float("nan"), "text": lambda: "1.0", "large": lambda: 1e308,
        "huge": lambda: 10**400, "longer": lambda: 10**5000, "complex": lambda: 1j, "unnamed": lambda: {"reward": 1.0},
        "named text": lambda: {"score": 1, "why": "so"}, "true": lambda: True, "numpy": lambda: numpy.float32(0.5),
        "numpy true": lambda: numpy.bool_(True), "array": lambda: numpy.array(2), "dict": lambda: {"score": numpy.int64(3), "format": True},
        "dataclass": lambda: Parts(0.25, len(text)),
    }.get(text, lambda: text.count(answer) / 2)()

def everything(row, sample_index, text, **rest):
    return {"score": row["difficulty"], "sample": sample_index, "ids": len(rest["token_ids"]), "prompt": rest["prompt_token_ids"][0],
            "truncated": rest["truncated"], "version": rest["version"], "when": len(row["when"])}
"""


@pytest.fixture
def graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "graders.py").write_text(GRADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # other tests have modules of this name
    monkeypatch.delitem(sys.modules, "graders", raising=False)
    return tmp_path


async def test_a_function_of_the_users_own(graders: Path):
    """It is imported from the working directory. Its result counts, and its output is kept."""

    async with RewardPool("graders:letters", log_folder=graders) as pool:
        for text, score in {
            "banana": Score(1.5), "": Score(0.0), "true": Score(1.0), "numpy": Score(0.5),
            "numpy true": Score(1.0),
            "array": Score(2.0), "dict": Score(3.0, {"format": 1.0}),
            "dataclass": Score(0.25, {"length": 9.0}),
        }.items():  # fmt: skip
            assert await pool.score(ScoreRequest(text, "a")) == score, text
        assert await pool.rate("a" * 400_000, "a") == 200_000
        assert "seen banana\n" in (graders / "reward.0.log").read_text()


async def test_failures_say_what_they_are(graders: Path):
    """Each failure scores as the settings say.

    In the second case each failure also costs a worker.
    """

    async with RewardPool(
        "graders:letters", timeout_s=5.0, failed_score=-1.0, log_folder=graders
    ) as pool:
        for text, kind, reason in [
            ("bad", "error", "invalid literal for int() with base 10: 'x'"),
            ("slow", "timeout", "it took longer than 5 s (reward.timeout_s)"),
            ("memory", "memory", "it ran out of memory (reward.memory_mib=1024)"),
            (
                "exit",
                "exit",
                "it brought its process down (exit status 3); reward.memory_mib=1024 may be "
                "too little",
            ),
            (
                "quit",
                "exit",
                "it brought its process down (exit status 1); reward.memory_mib=1024 may be "
                "too little",
            ),
        ]:
            assert await pool.score(ScoreRequest(text, "a")) == Score(
                -1.0, failures=[Failure(kind, reason, text)]
            )
        assert await pool.rate("aa", "a") == 1.0


MISTAKES = {
    "bug": """graders.py, line 12, in bug: return found["key"]\nKeyError: 'key'\n""",
    "none": "it must give a number, or a dict with a score and its parts, not None\n",
    "nan": "finite and at most 1e+06 in size, not nan\n",
    "text": "it must give a number, or a dict with a score and its parts, not '1.0'\n",
    "large": "finite and at most 1e+06 in size, not 1e+308\n",
    "huge": "finite and at most 1e+06 in size, not 10000000",
    "longer": "finite and at most 1e+06 in size, not an integer of 16610 bits\n",
    "complex": "it must give a number, or a dict with a score and its parts, not 1j\n",
    "unnamed": "it must give a dict with the key 'score', not {'reward': 1.0}\n",
    "named text": "it must give a number as 'why', not 'so'\n",
}


@pytest.mark.parametrize("kind", ["processes", "event loop"])
async def test_mistakes_are_told_by_the_users_own_line(graders: Path, kind: str):
    import graders as module

    async def in_loop(text: str, answer: str) -> Any:
        return module.letters(text, answer)

    async with RewardPool("graders:letters") as pool:
        judge = (
            pool
            if kind == "processes"
            else RewardInLoop(RewardConfig(name="graders:letters"), in_loop, ["text", "answer"])
        )
        for text, mistake in MISTAKES.items():
            with pytest.raises(RunError) as error:
                await judge.score(ScoreRequest(text, "a"))
            assert str(error.value).startswith("reward.name=graders:letters: ") and mistake in str(
                error.value
            )
            assert f"It was given the response '{text}'" in str(error.value)
        assert (await judge.score(ScoreRequest("aa", "a"))).reward == 1.0
        assert (await judge.score(ScoreRequest("bad", "a"))).failures[0].kind == "error"


async def test_a_function_is_given_what_it_asks_for(graders: Path):
    from datetime import date

    from graders import everything

    request = ScoreRequest(
        "seven",
        "7",
        "3+4=",
        {"difficulty": 2, "when": date(2026, 1, 31)},
        [5, 6],
        [8, 9, 10],
        version=4,
        sample_index=1,
        truncated=True,
    )
    parameters = parameters_of(everything, "reward.name=graders:everything")
    parts = {
        "sample": 1.0,
        "ids": 3.0,
        "prompt": 5.0,
        "truncated": 1.0,
        "version": 4.0,
        "when": 10.0,
    }

    async with rewards.RewardPool(RewardConfig(name="graders:everything"), parameters) as pool:
        assert await pool.score(request) == Score(2.0, parts)


async def test_an_async_function_judges_all_at_once():
    arrived: list[str] = []

    async def judge(response: str) -> float:
        arrived.append(response)
        while len(arrived) < 100:
            await asyncio.sleep(0)
        if response == "late":
            await asyncio.sleep(60)
        return len(response) / 4

    verifier = RewardInLoop(RewardConfig(name="x:judge", timeout_s=2.0), judge, ["response"])
    scores = await asyncio.gather(
        *(verifier.score(ScoreRequest(text, "")) for text in ["late", *["four"] * 99])
    )
    late = Failure("timeout", "it took longer than 2 s (reward.timeout_s)", "late")
    assert scores == [Score(0.0, failures=[late]), *[Score(1.0)] * 99]


def test_reward_function_finds_its_files_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are where the launcher found them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "0.25")
    (tmp_path / "rubric.txt").write_text("0.5")
    (tmp_path / "own_rubric.py").write_text(
        "import os\nRIGHT, KEY = float(open('rubric.txt').read()), float(os.environ['JUDGE_KEY'])\n"
        "def graded(text, answer):\n    return RIGHT + KEY\n"
    )

    async def score() -> Score:
        async with rewards.RewardPool(
            RewardConfig(name="own_rubric:graded"), ["text", "answer"], tmp_path
        ) as pool:
            return await asyncio.wait_for(pool.score(ScoreRequest("a", "a")), DEADLINE_S)

    assert asyncio.run(score()) == Score(0.75)
