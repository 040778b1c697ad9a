"""Plays episodes of hub environments with a fake policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megarl.agents.hubs.rollout import HubRollout
from megarl.base.rollout_types import Group, Prompt
from megarl.data.tokenizer import tokenizer_of
from megarl.generator.completions import Completion, Sampling
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.rollout import CheckedRollout

ROOT = Path(__file__).parents[2]
TOKENIZER = tokenizer_of(str(ROOT / "configs/models/tiny-agent"), "model.path")
FOLDER = str(Path(__file__).with_name("hub_folder"))
FAILED = [
    "failed_environment",
    "failed_deadline",
    "failed_reward",
    "failed_worker",
    "failed_unanswered",
]


class Saying:
    """A fake of generate: says one text after another, and repeats the last one."""

    def __init__(self, *texts: str):
        self._texts = list(texts)
        self.prompts: list[str] = []

    async def __call__(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.prompts.append(TOKENIZER.decode_all(prompt_ids))
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        ids = [*TOKENIZER.encode_text(text), TOKENIZER.eos_id]
        return [Completion(ids, [-0.25] * len(ids), [1] * len(ids), "stop")]  # pyright: ignore[reportArgumentType]


class Played:
    """A rollout in an event loop of its own. When it is closed, its process must have ended."""

    def __init__(self, make: Callable[[], HubRollout]):
        self._runner = asyncio.Runner()
        self._make = make
        # such as zombies of earlier tests
        self.earlier_children = set(psutil.Process().children(recursive=True))

    def __enter__(self) -> Played:
        self.rollout = self._make()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.rollout.close())
        self._runner.close()
        leftover_processes = set(psutil.Process().children(recursive=True)) - self.earlier_children
        # orphans become children of the tests (conftest.py), so they are reaped here
        _, alive = psutil.wait_procs(leftover_processes, timeout=5.0)
        assert not alive, "what a worker has started has outlived its rollout"

    def __call__(
        self, generate: Any, row: dict[str, Any], n: int = 1, max_tokens: int = 200
    ) -> Group:
        context = RolloutContext(TOKENIZER, generate, None, None, 5.0)  # type: ignore[arg-type]
        sampling = Sampling(max_tokens, stop_token_ids=TOKENIZER.eos_ids)
        checked = CheckedRollout("hub", self.rollout, context, 300.0, 112)
        return self._runner.run(checked(Prompt(0, [1, 5], "", "", row=row), sampling, n))
