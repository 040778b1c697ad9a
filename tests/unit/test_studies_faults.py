"""How `python tests/studies faults` chooses and counts faults, without a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
from fault_kinds import KINDS, PROMPTS, FaultRun
from faults import Fault, plan, render, table
from json_files import write_json_lines

from megarl.base.processes import BEATS
from megarl.rollouts.buffer import LEDGER_FILE, Ledger


def test_every_kind_of_fault_comes_once_before_any_repeats():
    kinds = plan(50, 3, list(KINDS))
    assert set(kinds) == set(KINDS)
    assert len(kinds) == 50
    assert kinds == plan(50, 3, list(KINDS)) != plan(50, 4, list(KINDS))
    assert Counter(plan(5, 0, ["SIGTERM"])) == {"SIGTERM": 5}


def test_lost_repeated_and_unrecorded_prompts_are_found(tmp_path: Path):
    faulty = FaultRun(tmp_path, tmp_path / "model")
    record(faulty, [[0, 1, 2, 3], [4, 5, 7, 8], [6, 9, 10, 11]])
    save(faulty, 2, Ledger(6, [7, 8]))
    assert (faulty.repeated(), faulty.missing(), faulty.ledger_problems()) == ([], [], 0)
    record(faulty, [[0, 1, 2, 3], [4, 5, 3, 8], [6, 9, 10, 11]])
    assert (faulty.repeated(), faulty.missing()) == ([3], [7])
    assert faulty.ledger_problems() == 1, "the ledger says 7 was trained on, the record does not"


def record(run: FaultRun, steps: list[list[int]]) -> None:
    assert all(len(ordinals) == PROMPTS for ordinals in steps)
    path = run.run_dir / "rollouts/ordinals.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(
        path, ({"step": step, "ordinals": ordinals} for step, ordinals in enumerate(steps))
    )


def save(run: FaultRun, step: int, ledger: Ledger) -> None:
    folder = run.run_dir / f"checkpoints/step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / LEDGER_FILE).write_bytes(msgspec.msgpack.encode(ledger))


def test_the_table_counts_by_kind_and_in_all():
    faults = [
        Fault("SIGTERM", 1, "ended cleanly", lost=2),
        Fault("SIGTERM", 4, "hang"),
        Fault("tool hangs", 9, "survived", repeated=1),
    ]
    rows = table(faults)
    assert rows["SIGTERM"] == {
        "injected": 2, "survived": 0, "ended cleanly": 1, "hang": 1, "failed": 0, "orphans": 0,
        "lost": 2, "repeated": 0
    }  # fmt: skip
    text = render({"table": rows, "seed": 1, "seconds": 60, "hardware": "2 CPU cores"})
    assert text.splitlines()[-2].split() == ["all", "3", "1", "1", "1", "0", "0", "2", "1"]


def test_an_engine_is_known_by_the_file_of_its_beats(tmp_path: Path) -> None:
    """Not by its seed, which depends on the step at which a run resumes."""
    plays = [sys.executable, "-c", "input()", "megarl.generator.server"]
    run = FaultRun(tmp_path, tmp_path / "model")
    run.started = SimpleNamespace(pid=os.getpid())  # type: ignore[assignment]
    with contextlib.ExitStack() as stack:
        played = {}
        for index in (1, 10):
            environment = {**os.environ, BEATS: str(tmp_path / f"engine.{index}.beats")}
            played[index] = stack.enter_context(
                subprocess.Popen(plays, env=environment, stdin=subprocess.PIPE)
            )
            stack.callback(played[index].kill)
        assert [[process.pid for process in run.engines(index)] for index in (0, 1, 10)] == [
            [],
            [played[1].pid],
            [played[10].pid],
        ]
