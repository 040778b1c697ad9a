"""Measures the cost of the rollouts channel per sample, with 1,000 to 100,000 samples in the
trainer's buffer (`python tests/benchmarks channels`).

Three processes use the real parts: hub and peer over encrypted loopback, messages, the buffer with
bounded staleness, and a broadcast over gloo to a second trainer rank. Groups have the quickstart's
size: 4 samples of 10 tokens. In every step the generator sends as many groups as the trainer uses,
so the number of buffered groups stays the same.

Costs are CPU times of whole processes, so other work on the machine hardly counts. The generator
encodes and sends. Trainer rank 0 receives, buffers, and makes and broadcasts a batch. `held up` is
wall time: how long the trainer's loop stays in `recv` after everything it asks for has been sent.
The quickstart's step takes 0.35 s for 128 samples.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megarl.base.rollout_types import Batch, Group, Prompt, Sample, typed
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.rollouts.buffer import RolloutBuffer
from megarl.rollouts.channel import RolloutsReceiver, RolloutsSender, pack

BUFFERED = (1_000, 10_000, 100_000)  # samples
PROMPTS_PER_STEP = 32
N = 4
TOKENS = 10
PROMPT_TOKENS = 11
SAMPLES_PER_STEP = PROMPTS_PER_STEP * N
STEP_S = 0.35  # the quickstart's, on two cores
STEPS = 40
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ChannelCost:
    """Medians over the steps, with `buffered` samples in the buffer."""

    buffered: int
    send_us: float  # per sample
    receive_us: float  # per sample
    share_of_step: float  # both together, as a share of the step
    held_up_ms: float  # per step
    held_up_share: float
    ledger_ms: float  # encoding the ledger for a checkpoint


class Trainer:
    """A trainer's executor, as far as the channel needs one."""

    device = torch.device("cpu")

    def __init__(self, rank: int, step: int):
        self.rank = rank
        self.curr_step = step
        self.status = self.trace = self

    @contextlib.contextmanager
    def waiting(self, for_whom: str, for_what: str) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield

    @property
    def replicas(self) -> list[list[int]]:
        return [[0], [1]]

    def assign(self, batch: Batch) -> list[list[int]]:
        places = range(SAMPLES_PER_STEP)
        return [[*places[::2]], [*places[1::2]]]

    def put_batch(self, batch: Batch, waited_s: float) -> None:
        assert len(batch.groups) == PROMPTS_PER_STEP and batch.step == self.curr_step
        self.curr_step += 1


def measure(buffered: int, steps: int = STEPS) -> ChannelCost:
    """Starts processes for the generator and trainer rank 1; this process is trainer rank 0."""
    depth = -(-buffered // SAMPLES_PER_STEP)  # steps' worth of groups in the buffer
    context = multiprocessing.get_context("spawn")
    key = RunKey.generate()
    with (
        tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        generator, child_end = context.Pipe()
        jobs = [(_generate, (child_end, key)), (_follow, (f"{folder}/store", depth, steps))]
        for target, arguments in jobs:
            process = context.Process(target=target, args=arguments, daemon=True)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(process.kill)
        child_end.close()
        with joined_ranks(f"{folder}/store", 0):
            receiver = _receiver(key, next_message(generator), depth)
            stack.callback(receiver.link.close)
            sent_s = [_send(generator, step) for step in range(depth)]
            held_up_s = []
            receive_s = []
            trainer: Any = Trainer(0, depth)
            receiver.ledger()  # receives the groups that fill the buffer
            for step in range(depth, depth + steps):
                sent_s.append(_send(generator, step))
                wall = time.monotonic()
                cpu = time.process_time()
                receiver.recv(trainer)
                held_up_s.append(time.monotonic() - wall)
                receive_s.append(time.process_time() - cpu)
            ledger = time.process_time()
            receiver.ledger()
            ledger_s = time.process_time() - ledger
    send_us = statistics.median(sent_s[depth:]) / SAMPLES_PER_STEP * 1e6
    receive_us = statistics.median(receive_s) / SAMPLES_PER_STEP * 1e6
    held_up = statistics.median(held_up_s)
    share = (send_us + receive_us) * SAMPLES_PER_STEP / 1e6 / STEP_S
    return ChannelCost(
        buffered, send_us, receive_us, share, held_up * 1e3, held_up / STEP_S, ledger_s * 1e3
    )


def _receiver(key: RunKey, address: str, depth: int) -> RolloutsReceiver:
    buffer = RolloutBuffer(PROMPTS_PER_STEP, max_staleness=depth + 1)
    return RolloutsReceiver(Peer("trainer.0", key, address), TIMEOUT_S, buffer)


@contextlib.contextmanager
def joined_ranks(store: str, rank: int) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _send(generator: Connection, step: int) -> float:
    """Makes the generator send the groups of one step, of version `step`.

    Returns its CPU seconds.
    """
    generator.send(step)
    return next_message(generator)


def next_message(process: Connection) -> Any:
    """The next message from another process of the benchmark."""
    if not process.poll(TIMEOUT_S):
        raise TimeoutError(f"a process of the benchmark did not answer within {TIMEOUT_S:.0f} s")
    try:
        return process.recv()
    except EOFError as error:
        raise RuntimeError("a process of the benchmark has ended") from error


def _generate(pipe: Connection, key: RunKey) -> None:
    """The generator's process: sends a step's groups for each step number that it reads from
    `pipe`.
    """
    hub = Hub("generator.0", key)
    channel = RolloutsSender(hub)
    pipe.send(hub.address)
    hub.wait(TIMEOUT_S)  # for the trainer's GenerateFrom
    with contextlib.suppress(EOFError):
        while True:
            step = pipe.recv()
            ordinals = range(step * PROMPTS_PER_STEP, (step + 1) * PROMPTS_PER_STEP)
            groups = [_group(ordinal, step) for ordinal in ordinals]
            started = time.process_time()
            channel.begun(list(ordinals), step)
            for group in groups:
                channel.finished(pack(group, started_s=1.0, ended_s=2.0))
            pipe.send(time.process_time() - started)
    hub.close()


def _group(ordinal: int, version: int) -> Group:
    ids = typed(range(TOKENS), "i")
    logprobs = typed([-0.25] * TOKENS, "f")
    versions = typed([version] * TOKENS, "i")
    sample = Sample(ids, logprobs, versions, "7,7,6,7,2", 1.0, "stop")
    return Group(
        Prompt(ordinal, list(range(PROMPT_TOKENS)), "7+0+9+1+5=", "7,7,6,7,2"), [sample] * N
    )


def _follow(store: str, first_step: int, steps: int) -> None:
    """Trainer rank 1: receives every batch."""
    with joined_ranks(store, 1):
        trainer: Any = Trainer(1, first_step)
        no_link: Any = None  # only rank 0 speaks with the generator
        receiver = RolloutsReceiver(no_link, TIMEOUT_S)
        for _ in range(steps):
            receiver.recv(trainer)


def render(facts: dict[str, Any]) -> str:
    header = [
        "samples buffered",
        "send us",
        "receive us",
        "of a step",
        "held up ms",
        "of a step",
        "ledger ms",
    ]
    rows = [header]
    for cost in facts["costs"]:
        rows.append(
            [
                f"{cost['buffered']:,}",
                f"{cost['send_us']:.1f}",
                f"{cost['receive_us']:.1f}",
                f"{cost['share_of_step']:.2%}",
                f"{cost['held_up_ms']:.2f}",
                f"{cost['held_up_share']:.2%}",
                f"{cost['ledger_ms']:.1f}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    head = (
        f"rollouts channel, CPU time per sample; a step is {facts['step_s']:g} s with "
        f"{facts['samples_per_step']} samples; "
        f"{facts['hardware']}"
    )
    return "\n".join(
        [head, *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)]
    )
