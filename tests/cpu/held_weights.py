"""A trainer rank that only holds weights: the real sending end of the weights channel, with shards
of an HF checkpoint.

It serves to test faults of the transfer, for which the weights' origin does not matter. It runs as
a thread of the test, or as a process that can be killed: `held_weights.py RANK JOB [FAULT]`, where
FAULT is a function of faulty_transports.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import faulty_transports
import msgspec
import torch
from safetensors.torch import load_file
from sglang_writer import shards
from weights_worker import DEADLINE_S, Job

from megarl.messaging.link import Peer, RunKey
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.reshard.layout import Layout, trainer_layout
from megarl.weight_sync.sender import WeightsSender


@dataclass
class HeldWeights:
    """The part of the trainer executor that the channel needs."""

    layout: Layout
    parameters: dict[str, torch.Tensor]
    rank: int
    status: StatusBoard
    trace: TraceWriter
    version: int = 0
    device: torch.device = torch.device("cpu")

    def get_model(self) -> dict[str, torch.Tensor]:
        return self.parameters

    def put_sync(self, report, applied) -> None:
        """Drops the report."""


def hold(rank: int, job: Job, stack: contextlib.ExitStack) -> HeldWeights:
    plan = job.plan()
    layout = trainer_layout(plan.spec, plan.trainer_topology, job.dtype)
    dtype = getattr(torch, job.dtype)
    logical = {
        name: values.to(dtype)
        for name, values in load_file(Path(job.model) / "model.safetensors").items()
    }
    status = stack.enter_context(contextlib.closing(StatusBoard(job.folder, f"trainer.{rank}")))
    trace = stack.enter_context(
        contextlib.closing(TraceWriter(Path(job.folder), f"trainer.{rank}"))
    )
    return HeldWeights(layout, shards(logical, layout, rank), rank, status, trace)


def send(rank: int, job: Job, go: Event) -> None:
    """Sends the job's updates, over one channel if they name one hub.

    All but the first wait for `go`.
    """
    with contextlib.ExitStack() as stack:
        weights = hold(rank, job, stack)
        key = RunKey.load(Path(job.key_file))
        senders: dict[str, WeightsSender] = {}
        for sync in job.syncs:
            if sync.hub not in senders:
                link = stack.enter_context(
                    contextlib.closing(Peer(f"trainer.{rank}", key, sync.hub))
                )
                senders[sync.hub] = WeightsSender(job.plan(sync.transport), link)
            if weights.version != sync.version:
                assert go.wait(2 * DEADLINE_S)  # meanwhile an engine may have to start
            while weights.version != sync.version:
                weights.version += 1
                change(weights, job.changing)
            senders[sync.hub].send(weights)
        for sender in senders.values():
            sender.close()


def change(weights: HeldWeights, share: float) -> None:
    """Makes the next version: flips the lowest bit in a part of the elements, the same on all ranks
    that hold them.
    """
    for name, values in weights.parameters.items():
        generator = torch.Generator().manual_seed(
            weights.version + (sum(map(ord, name)) if "norm" in name else 1000 * weights.rank)
        )
        bits = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
        bits ^= (torch.rand(values.shape, generator=generator) < share).to(bits.dtype)


def as_thread(rank: int, job: Job, go: Event = Event()) -> Future:
    outcome: Future = Future()

    def run() -> None:
        try:
            outcome.set_result(send(rank, job, go))
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name=f"trainer.{rank}", daemon=True).start()
    return outcome


def as_process(rank: int, job: Job, fault: str) -> subprocess.Popen:
    arguments = [sys.executable, __file__, str(rank), msgspec.json.encode(job).decode(), fault]
    return subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulty_transports.before_write = getattr(faulty_transports, sys.argv[3])
    go = Event()
    go.set()
    send(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Job), go)
