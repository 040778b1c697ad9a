"""Functions in real worker processes.

(tests/cpu/test_rewards_pool.py tests what can bring a worker down.)
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from worker_functions import fail, wait_for, whose

from megarl.config.schema import RolloutConfig
from megarl.rollouts.environments.base import ToolError
from megarl.rollouts.environments.calculator import calculate
from megarl.rollouts.environments.loading import ToolProcesses


async def test_functions_run_elsewhere_and_fail_with_a_reason(tmp_path: Path) -> None:
    tools = ToolProcesses(RolloutConfig(tool_workers=1, tool_timeout_s=100.0))
    try:
        waiting = asyncio.create_task(tools.run(wait_for, str(tmp_path / "go")))
        (name, pid), result = await asyncio.gather(
            tools.run(whose, "\u00e9"), tools.run(calculate, "6*7")
        )
        assert (name, result) == ("\u00e9", "42") and pid != os.getpid()
        for mode, reason in {
            "value": "no such thing: \n\u00e9", "mistake": "it failed: KeyError",
            "odd": "it failed: TypeError",
            "memory": "it ran out of memory", "exit": "it brought its process down (exit "
                                                      "status 3)",
            "2000000": "more than 1048576 bytes of result",
        }.items():  # fmt: skip
            with pytest.raises(ToolError) as error:
                await tools.run(fail, mode)
            assert str(error.value) == reason
        assert len(await tools.run(fail, "1000000")) == 1_000_000
        # the second and third are written while the first runs
        requests = [tools.run(fail, "children") for _ in range(3)]
        assert await asyncio.gather(*requests) == ["18"] * 3
        with pytest.raises(ValueError, match="only a function of a module"):
            await tools.run(lambda: 1)
        assert not waiting.done(), "one that computes for long holds up nobody"
        (tmp_path / "go").touch()
        assert await waiting == "there"
    finally:
        await tools.close()


async def test_a_tool_that_takes_too_long_fails(tmp_path: Path) -> None:
    tools = ToolProcesses(RolloutConfig(tool_timeout_s=0.3))
    try:
        with pytest.raises(ToolError, match="it took longer than 0.3 s"):
            await tools.run(wait_for, str(tmp_path / "never"))
    finally:
        await tools.close()
