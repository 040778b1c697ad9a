"""Two-sided transports over gloo between threads: the code shared with NCCL, also with NCCL's way
to start a wave at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megarl.base.geometry import Box
from megarl.messaging.host import Host
from megarl.messaging.process_groups import open_store
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import (
    Endpoint,
    GroupMembers,
    Incoming,
    LiveParameters,
    Offer,
    RemoteTensor,
)
from megarl.weight_sync.transports.gloo import GlooGroup, GlooMemory, GlooTransport
from megarl.weight_sync.transports.two_sided import TwoSidedTransport
from megarl.weight_sync.writing import send, shapes_of

TENSORS = [RemoteTensor("a", (6, 5), "float32", (5, 1)), RemoteTensor("b", (7,), "bfloat16", (1,))]
MEMBERS = GroupMembers(trainers=(1, 4), generators=(3,), waves=(0, 0, 1, 2))
SOURCES = {1: torch.arange(40.0).view(5, 8), 4: torch.linspace(-3, 3, 7)}
COPIES = {
    1: [
        Copy(1, "x", Box((2, 0), (1, 3)), 3, "a", Box((5, 1), (1, 3)), "identity", "float32", 0),
        # a column slice, which is staged
        Copy(1, "x", Box((0, 3), (4, 2)), 3, "a", Box((1, 0), (4, 2)), "identity", "float32", 1),
        Copy(1, None, None, 3, "a", Box((0, 0), (1, 5)), "zeros", "float32", 3),
    ],
    4: [Copy(4, "x", Box((0,), (7,)), 3, "b", Box((0,), (7,)), "cast", "bfloat16", 2)],
}


class Counting(GlooGroup):
    """Records how many messages start together."""

    started: list[int] = []

    def send(self, messages):
        self.started.append(len(messages))
        return super().send(messages)


class WaveByWave(TwoSidedTransport):
    """Starts messages like NCCL."""

    open_group = Counting
    coalesces = True


@contextlib.contextmanager
def store() -> Iterator[str]:
    server, address = open_store("127.0.0.1")
    yield address
    del server


def incoming(order: list[int]) -> list[Incoming]:
    copies = sorted((copy for rank in order for copy in COPIES[rank]), key=lambda copy: copy.depth)
    return [
        Incoming(
            copy.source_rank,
            copy.destination_tensor,
            copy.destination_box,
            MEMBERS.waves[copy.depth],
        )
        for copy in copies
    ]


def receiver_of(offer: Offer) -> GlooMemory:
    receiver = GlooMemory()
    receiver.open(LiveParameters(3, "gloo", Host(), "", {}, dict), offer)
    return receiver


@pytest.mark.parametrize("transport_class", [GlooTransport, WaveByWave])
def test_boxes_arrive_in_place(transport_class):
    Counting.started.clear()
    with store() as address, ThreadPoolExecutor(2) as pool:
        endpoint = Endpoint(3, "gloo", address, 0, TENSORS, members=MEMBERS)
        tensors = {"a": torch.full((6, 5), -1.0), "b": torch.zeros(7, dtype=torch.bfloat16)}

        def trainer(rank: int) -> None:
            transport = transport_class(rank, 20)
            transport.connect([Endpoint.decode(endpoint.encode())])
            for update in range(3):
                send(
                    transport,
                    COPIES[rank],
                    {"x": SOURCES[rank] + update},
                    shapes_of([endpoint]),
                    audit=False,
                )
            transport.close()

        writing = [pool.submit(trainer, rank) for rank in MEMBERS.trainers]
        receiver = receiver_of(
            Offer(address=address, members=MEMBERS, incoming=incoming([1, 4]), timeout_s=20)
        )
        for update in range(3):
            receiver.receive(tensors)
            expected = torch.full((6, 5), -1.0)
            expected[1:5, 0:2] = SOURCES[1][:4, 3:5] + update
            expected[5, 1:4] = SOURCES[1][2, :3] + update
            expected[0] = 0
            assert torch.equal(tensors["a"], expected)
            assert torch.equal(tensors["b"], (SOURCES[4] + update).bfloat16())
        for future in writing:
            future.result(20)
    if transport_class is WaveByWave:
        # waves of the two ranks, three times
        assert sorted(Counting.started) == [1, 1, 1] + [1, 1, 1] + [2, 2, 2]


def test_rank_missing_from_the_group_is_named():
    with store() as address:
        transport = GlooTransport(1, 0.3)
        absent = (
            "trainer rank 1 did not meet the others .*trainer rank 4, generator rank 3 did "
            "not come within 0 s"
        )
        with pytest.raises(RuntimeError, match=absent):
            transport.connect([Endpoint(3, "gloo", address, 0, TENSORS, members=MEMBERS)])


def test_a_message_that_is_late_is_named_with_both_ranks():
    pair = GroupMembers((1,), (3,), (0,))
    with store() as address, ThreadPoolExecutor(1) as pool:
        transport = GlooTransport(1, 5)
        joining = pool.submit(
            transport.connect, [Endpoint(3, "gloo", address, 0, TENSORS, members=pair)]
        )
        receiver = receiver_of(
            Offer(
                address=address,
                members=pair,
                incoming=[Incoming(1, "b", Box((0,), (7,)), 0)],
                timeout_s=1,
            )
        )
        with pytest.raises(
            TimeoutError, match="trainer rank 1 to generator rank 3, b: not through within 1 s"
        ):
            receiver.receive({"b": torch.zeros(7)})
        joining.result(20)
        transport.close()
