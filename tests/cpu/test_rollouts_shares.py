"""Four trainer ranks in processes of their own, two at each data-parallel place.

Every rank gets exactly the samples it trains on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megarl.base.rollout_types import Batch, Group, Prompt, Sample
from megarl.rollouts.buffer import Ledger, RolloutBuffer
from megarl.rollouts.channel import RolloutsReceiver, pack

REPLICAS = [[0, 2], [1, 3]]
PER_STEP = 3
STEPS = 3
TIMEOUT_S = 60


def group(ordinal: int) -> Group:
    """Two samples; one has experts and a token of the environment."""
    plain = Sample(
        [ordinal, 2, 3], [-0.25 * (ordinal + 1), -0.5, -1.0], [0] * 3, "plain", 1.0, "stop"
    )
    turns = Sample(
        [ordinal, 5],
        [-0.75, 0.0],
        [0, 0],
        "turns",
        0.0,
        "stop",
        [True, False],
        routing=bytes([ordinal] * 3),
    )
    return Group(Prompt(ordinal, list(range(ordinal + 1)), "prompt", "answer"), [plain, turns])


def assigned(step: int) -> list[list[int]]:
    """The assignment of samples. In the last step the second place trains on nothing."""
    return [[0, 3, 4], [1, 2]] if step < STEPS - 1 else [[0, 1, 2, 3, 4], []]


class NoLink:
    """A link whose ledger has all groups."""

    def read_ahead(self) -> None: ...

    def send(self, message: Any) -> None: ...

    def poll(self, kind: type) -> None: ...

    def drain(self, kind: type) -> list:
        return []


class Rank:
    device = torch.device("cpu")
    replicas = REPLICAS

    def __init__(self, rank: int):
        self.rank = rank
        self.curr_step = 0
        self.status = self
        self.trace = self

    @contextlib.contextmanager
    def waiting(self, *_: Any):
        yield

    @contextlib.contextmanager
    def span(self, *_: Any):
        yield {}

    def assign(self, batch: Batch) -> list[list[int]]:
        assert not batch.numbers
        return assigned(batch.step)

    def put_batch(self, batch: Batch, waited_s: float) -> None:
        self.batch = batch
        self.curr_step += 1


def work(pipe: Connection, rank: int, store: str) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 4),
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    executor: Any = Rank(rank)
    link: Any = NoLink()
    ledger = Ledger(
        groups=[
            pack(group(ordinal), started_s=1.0, ended_s=2.0) for ordinal in range(PER_STEP * STEPS)
        ]
    )
    receiver = RolloutsReceiver(
        link, TIMEOUT_S, RolloutBuffer(PER_STEP, None, ledger) if rank == 0 else None
    )
    for _ in range(STEPS):
        receiver.recv(executor)
        batch = executor.batch
        numbers = {
            place: (value.prompt_ids.tolist(), value.token_ids.tolist(), value.logprobs.tolist(),
                    None if value.policy_mask is None else value.policy_mask.tolist(), value.routing)
            for place, value in batch.numbers.items()
        }  # fmt: skip
        awaited = [receiver.awaits(batch.step + 1, wanted) for wanted in (rank == 0, rank > 0)]
        pipe.send((batch.groups, len(batch.texts), numbers, awaited))
    pipe.send(receiver.ledger() if rank == 0 else None)
    dist.destroy_process_group()


def test_each_rank_has_its_share_and_no_more(tmp_path):
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = []
    for rank in range(4):
        parent_end, child_end = context.Pipe()
        processes.append(
            context.Process(target=work, args=(child_end, rank, f"{tmp_path}/store"), daemon=True)
        )
        processes[-1].start()
        child_end.close()
        pipes.append(parent_end)
    for step in range(STEPS):
        groups_of_step = [
            group(ordinal) for ordinal in range(PER_STEP * step, PER_STEP * (step + 1))
        ]
        flat = [
            (sample_group.prompt, sample)
            for sample_group in groups_of_step
            for sample in sample_group.samples
        ]
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(2 * TIMEOUT_S), f"rank {rank} says nothing"
            groups, texts, numbers, awaited = pipe.recv()
            assert awaited == [step == STEPS - 1, False], "what rank 0 wants, on every rank"
            assert [
                (sample_group.ordinal, sample_group.prompt_tokens) for sample_group in groups
            ] == [
                (sample_group.prompt.ordinal, sample_group.prompt.ordinal + 1)
                for sample_group in groups_of_step
            ]
            assert [
                [sample.tokens for sample in sample_group.samples] for sample_group in groups
            ] == [[3, 2]] * PER_STEP
            assert texts == (PER_STEP if rank == 0 else 0)
            [share_here] = [
                share for ranks, share in zip(REPLICAS, assigned(step)) if rank in ranks
            ]
            assert numbers == {
                place: (prompt.token_ids, sample.token_ids.tolist(), sample.logprobs.tolist(),
                        [True, False] if sample.policy_mask else None, sample.routing)
                for place, (prompt, sample) in enumerate(flat) if place in share_here
            }  # fmt: skip
    for pipe, process in zip(pipes, processes):
        assert pipe.poll(TIMEOUT_S)
        pipe.recv()
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
