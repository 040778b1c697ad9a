"""Parts of the executors that need neither engines nor trainers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megarl.executors.checkpoints import checkpoint_path, complete_checkpoints, prune_checkpoints
from megarl.executors.evaluate import pass_at_1
from megarl.generator.completions import Sampling
from megarl.types import Group, Prompt, Sample


def test_an_evaluation_asks_for_no_more_at_once_than_engines_have_places():
    running, most = 0, 0

    async def rollout(prompt: Prompt, sampling: Sampling, n: int) -> Group:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Group(prompt, [Sample([1], [0.0], [0], "", float(prompt.ordinal % 2), "stop")] * n)

    prompts = [Prompt(ordinal, [1], "", "") for ordinal in range(10)]
    result = asyncio.run(pass_at_1(rollout, prompts, Sampling(max_tokens=1), at_once=3))
    assert (most, result["correct"], result["prompts"], result["pass@1"]) == (3, 5, 10, 0.5)


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path: Path, capsys):
    for step in (1, 2, 3):
        checkpoint_path(tmp_path, step).mkdir(parents=True)
    remnant = checkpoint_path(tmp_path, 1).with_suffix(".removing")
    (remnant / ".nfs0001").mkdir(parents=True)  # of an earlier attempt
    prune_checkpoints(tmp_path, keep=1)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1, 3]
    assert "step_000001 could not be removed" in capsys.readouterr().out
