"""If ranks wait in vain, a report names the missing rank and what it was doing.

One of the real gloo ranks stops or is busy, and another ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.launch.processes import ProcessFailed, ProcessGroup, ProcessSpec
from megarl.launch.watch import watch

RANK = Path(__file__).with_name("waiting_rank.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode, doing",
    [
        ("stopped", "is stopped (SIGSTOP, or a debugger)"),
        pytest.param("busy", "was in busy (cpu/waiting_rank.py:", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_does_not_come_is_named(tmp_path, mode, doing):
    with ProcessGroup(tmp_path / "logs") as group:
        for rank in range(3):
            argv = [
                sys.executable,
                str(RANK),
                str(rank),
                "3",
                str(tmp_path / "store"),
                str(tmp_path),
                mode,
            ]
            group.start(ProcessSpec(f"trainer.{rank}", argv, dumps_stacks=True))
        with pytest.raises(ProcessFailed) as failed:
            watch(group, {f"trainer.{rank}" for rank in range(3)}, poll=lambda: None)
    text = str(failed.value)
    assert "trainer.1 exited with status 1" in text
    waited = (
        "trainer.1 waited 3 s for trainer.0 or trainer.2 in all_reduce of "
        "TENSOR_MODEL_PARALLEL_GROUP, called outside of megarl"
    )
    assert f"TimeoutError: {waited}" in text, text
    late = [line for line in text.splitlines() if line.endswith("<- not waiting")]
    assert len(late) == 1 and late[0].startswith("  trainer.2: step 7 (") and doing in late[0], text
    assert any(line.startswith("  trainer.0: step 7 (") for line in text.splitlines()), text
