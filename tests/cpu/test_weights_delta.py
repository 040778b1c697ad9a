"""Deltas over many optimizer steps, by all transports at once: the engines' memory equals a full
update bit for bit.

Trainer ranks and engine workers are bare processes with the real transports and commands
(delta_processes.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from delta_processes import DeltaTrainer
from pair_processes import ENGINES, TRAINERS, EngineWorker, map_of
from remote_object import RemoteObject
from test_transports_pairs import PairRun, host

from megarl.config.schema import WeightsConfig
from megarl.messaging.host import Host
from megarl.weight_sync.audit import packed_shares
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY
from megarl.weight_sync.updates import DeltaUpdate, WeightUpdate
from megarl.weight_sync.writing import WrittenPart, shares_of

# in float32, small enough that some bits stay
LR = {"float32": 5e-11, "bfloat16": 1e-6, "fp8_block": 1e-6, "fp8_channel-experts": 1e-6}
CHECKED_EVERY = 20  # steps; hashes are compared after each


class DeltaRun(PairRun):
    """Makes one update after the other."""

    def update(self, version: int, full: bool = False, keeps: bool = False) -> None:
        session = (WeightUpdate if full else DeltaUpdate)(self.workers, version)
        for process in self.trainers:
            process.start(*(("write_all", keeps) if full else ("write_changes",)))
        self.do(session.receive())
        while self.connecting:
            self.connecting.pop().result()
        shares = [process.result() for process in self.trainers]
        if self.opened.lands if full else self.opened.lands_changes:
            self.do(session.spread())
        if self.opened.relays:
            self.do(session.pass_on(self.opened.relays))
        full_shares = [
            shares_of([WrittenPart(0, part) for part in (parts if full else [parts])])
            for parts in shares
        ]
        self.do(
            session.audit(
                [packed_shares(share) for share in full_shares],
                self.opened.tensors,
                self.opened.relays,
            )
        )

    def memory(self) -> list[dict[str, np.ndarray]]:
        return [process.call("memory") for process in self.engines]


NEAR = host("a", MOONCAKE if mooncake.imports() else GLOO)
FAR = host("b", MOONCAKE)
POOR = host("c", GLOO)
# one engine on the trainer's host, one behind Mooncake, and one behind gloo
ALL_WAYS = [NEAR, FAR, POOR]


@contextlib.contextmanager
def run(case: str, folder: Any, engines: list[Host] = ALL_WAYS) -> Iterator[DeltaRun]:
    processes: tuple[list[RemoteObject], list[RemoteObject]] = [], []
    with contextlib.ExitStack() as stack:
        for kind, count, group, arguments in (
            (DeltaTrainer, TRAINERS, processes[0], (case, LR[case])),
            (EngineWorker, ENGINES, processes[1], (case,))
        ):  # fmt: skip
            for rank in range(count):
                group.append(RemoteObject(kind, rank, *arguments))
                stack.callback(group[-1].kill)
        run = DeltaRun(
            processes, folder, WeightsConfig(delta="auto"), [NEAR] * TRAINERS, engines, map_of(case)
        )
        stack.callback(run.hub.close)
        run.open()
        yield run
        run.close()


@pytest.mark.parametrize(
    "case, steps",
    [("bfloat16", 5), pytest.param("fp8_block", 3, marks=pytest.mark.long)]
    + [pytest.param(case, 200, marks=pytest.mark.matrix) for case in LR],
)
def test_the_engines_hold_what_a_full_update_writes(case, steps, tmp_path):
    with run(case, tmp_path) as far:
        assert far.opened.kinds == {SHARED_MEMORY, GLOO} | (
            {MOONCAKE} if mooncake.imports() else set()
        )
        changed = []
        far.update(0, full=True, keeps=True)
        for version in range(1, steps + 1):
            for process in far.trainers:
                process.call("step")
            counts = [process.call("find") for process in far.trainers]
            changed.append(sum(count[1] for count in counts) / sum(count[2] for count in counts))
            far.update(version)
            if version % CHECKED_EVERY == 1 or version == steps:
                by_delta = far.memory()
                for process in far.engines:
                    process.call("scramble")
                far.update(version, full=True)
                for by_changes, full in zip(by_delta, far.memory(), strict=True):
                    assert (
                        by_changes.keys() == full.keys()
                        and [
                            name
                            for name in by_changes
                            if not np.array_equal(by_changes[name], full[name])
                        ]
                        == []
                    )
        print(
            f"{case}, lr {LR[case]:g}: {steps} steps, changed bytes {min(changed):.3%} to "
            f"{max(changed):.3%}"
        )
        assert 0 < max(changed) < 0.5


@pytest.mark.long
@pytest.mark.parametrize("engines", [[FAR] * ENGINES, [POOR] * ENGINES], ids=["mooncake", "gloo"])
def test_engines_pass_on_what_came_as_changes(engines, tmp_path):
    """One engine receives the changes for all engines of its host."""
    if engines[0] is FAR and not mooncake.imports():
        pytest.skip("Mooncake does not import")
    with run("bfloat16", tmp_path, engines) as far:
        assert far.opened.relays
        far.update(0, full=True, keeps=True)
        for version in (1, 2):
            for process in far.trainers:
                process.call("step")
            counts = [process.call("find") for process in far.trainers]
            far.update(version)
        of_one_engine = sum(values.nbytes for values in far.memory()[0].values())
        assert (
            sum(count[2] for count in counts)
            == of_one_engine
            > 20 * sum(count[0] for count in counts)
        )
