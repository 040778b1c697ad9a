"""The work of the generator's event loop for each message of a weight update does not grow with the
number of trainer ranks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_maps import tiny_map

from megarl.messaging.host import Host
from megarl.messaging.messages import Hello, WeightsOffer, WeightsWritten, WorkerReply
from megarl.reshard.forwarding import INSIDE_HOSTS, RelayRule, relayed
from megarl.weight_sync import commands
from megarl.weight_sync.opening import OpenedEngines
from megarl.weight_sync.receiver import Offers, WeightsReceiver
from megarl.weight_sync.transports.base import (
    Endpoint,
    Endpoints,
    GroupMembers,
    Inbox,
    Landing,
    RemoteTensor,
    decode_endpoints,
    forms_of,
    pack,
)
from megarl.weight_sync.transports.choice import AUTO, transport_pairs
from megarl.weight_sync.updates import Writes
from megarl.weight_sync.workers import Workers

AT_ONCE = 4  # messages that arrive together


class Name(str):
    """Counts the look-ups of names."""

    looked_up = 0

    def __hash__(self) -> int:
        Name.looked_up += 1
        return super().__hash__()


class Link:
    """A hub with the messages that have arrived.

    It must not build the text of a timeout in advance, because that names every rank.
    """

    name = "generator.0"

    def __init__(self, messages: list[tuple[str, Any]]):
        self.messages = deque(messages)
        self.texts = 0

    async def arrivals(
        self, kind: type, timeout_s: float | None, awaited: str | Callable[[], str]
    ) -> list[tuple[str, Any]]:
        self.texts += isinstance(awaited, str)
        return [self.messages.popleft() for _ in range(min(AT_ONCE, len(self.messages)))]

    async def arrival(self, kind: type, timeout_s: float | None, awaited: str) -> tuple[str, Any]:
        self.texts += isinstance(awaited, str)
        return self.messages.popleft()


def offers(names: list[str]) -> Link:
    link: Any = Link([(name, WeightsOffer(version)) for version in (0, 1) for name in names])
    collected = Offers(link, names, 5)
    for version in (0, 1):
        assert asyncio.run(collected.next(version - 1)).version == version
    return link


def writes(names: list[str]) -> Link:
    link: Any = Link(
        [(name, WeightsWritten(0, 1, 0.0, more=more)) for more in (True, False) for name in names]
    )
    collected = Writes(link, names, 0, 5)
    asyncio.run(collected.landed())
    asyncio.run(collected.done())
    assert len(collected.parts) == 2 * len(names)
    return link


def meeting(names: list[str]) -> Link:
    link: Any = Link([(name, Hello("same")) for name in names])
    receiver: Any = WeightsReceiver.__new__(WeightsReceiver)
    receiver._link = link
    receiver._trainers = names
    receiver._sessions = SimpleNamespace(map=SimpleNamespace(plan_hash="same"))
    receiver._plan = SimpleNamespace(
        config=SimpleNamespace(timeouts=SimpleNamespace(rendezvous_s=5))
    )
    assert len(asyncio.run(receiver._meet_trainers())) == len(names)
    return link


@pytest.mark.parametrize("collect", [offers, writes, meeting])
def test_look_ups_grow_as_messages_do(collect):
    counts = []
    for ranks in (32, 256):
        Name.looked_up = 0
        link = collect([Name(f"trainer.{rank}") for rank in range(ranks)])
        counts.append(Name.looked_up)
        assert not link.texts
    assert counts[1] <= 2 * 8 * counts[0], counts  # eight times the ranks


def test_answers_of_workers_are_collected_without_a_text_for_each():
    link: Any = Link(
        [(f"engine.{rank}.abcd", WorkerReply(rank, "Recall", "", b"x")) for rank in range(64)]
    )

    class Engine:
        async def command(
            self, encoded: bytes, tp: int, timeout_s: float, empty_cache: bool = False
        ) -> None:
            pass

    engines: Any = [Engine() for _ in range(8)]
    assert (
        asyncio.run(
            Workers(engines, [8] * len(engines), link, 5, connection="abcd").run_all(
                commands.Recall()
            )
        )
        == [b"x"] * 64
    )
    assert not link.texts


def test_transports_are_worked_out_once_for_pairs_that_are_alike(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "megarl.weight_sync.transports.choice.transport_between",
        lambda *pair: asked.append(pair) or "gloo",
    )
    sides = [
        [Host(f"{side}{rank // 8}", f"{side}{rank // 8}", has=("mooncake",)) for rank in range(256)]
        for side in "tg"
    ]
    pairs = transport_pairs(AUTO, *sides)
    assert pairs.table.shape == (256, 256) and pairs.kinds == ("gloo",) and len(asked) == 1
    assert len({id(trainers) for trainers in pairs.trainers("gloo")}) == 1


def opened(
    map: Any, relays: list[Any], whole: Any, members: GroupMembers | None = None
) -> OpenedEngines:
    """Endpoints whose offsets identify rank and tensor."""
    packed = []
    forms = {}
    for rank in range(whole.destination.world_size):
        tensors = [
            RemoteTensor(t.name, t.shape, t.dtype, t.shape, 1000 * rank + n)
            for n, t in enumerate(whole.destination.tensors(rank))
        ]
        landings = [Landing(tensor.name, (0,), rank) for tensor in tensors]
        inboxes = [Inbox(trainer, 0, 8) for trainer in range(whole.source.world_size)]
        packed.append(
            pack(Endpoint(rank, "mooncake", "here", 8, tensors, landings, inboxes, members=members))
        )
        forms[packed[-1].digest] = forms_of(tensors)
    return OpenedEngines(map, Endpoints(packed, forms), None, relays)


@pytest.mark.parametrize("relays", [False, True])
def test_a_trainer_rank_is_told_of_the_tensors_that_it_writes_and_of_no_others(relays):
    whole = map = tiny_map(tp=2, pp=2, dp=2, engines=4)
    passed_on: list[Any] = []
    if relays:
        map, forwarding = relayed(whole, RelayRule(INSIDE_HOSTS, 8))
        passed_on = forwarding.relays
    all_of_it = opened(map, passed_on, whole)
    for trainer in range(map.source.world_size):
        found = decode_endpoints(all_of_it.endpoints_of(trainer))
        told = {(endpoint.rank, tensor.name) for endpoint in found for tensor in endpoint.tensors}
        assert told == {
            (write.destination_rank, write.destination_tensor) for write in map.writes_from(trainer)
        }
        whole_ones = {
            endpoint.rank: {t.name: t for t in endpoint.tensors} for endpoint in all_of_it.endpoints
        }
        for endpoint in found:
            assert all(
                whole_ones[endpoint.rank][tensor.name] == tensor for tensor in endpoint.tensors
            )
            assert {landing.tensor for landing in endpoint.landings} == {
                tensor.name for tensor in endpoint.tensors
            }
            assert [inbox.trainer for inbox in endpoint.inboxes] == [trainer]


def test_a_member_of_a_group_is_told_of_it_though_it_writes_nothing():
    map = tiny_map(tp=1, pp=1, dp=40, engines=1, generator_tp=1)
    members = GroupMembers(tuple(range(40)), (0,), (0,))
    idle = next(rank for rank in range(40) if not map.writes_from(rank))
    [endpoint] = decode_endpoints(opened(map, [], map, members).endpoints_of(idle))
    assert (endpoint.members, endpoint.tensors) == (members, [])


def test_what_all_trainer_ranks_are_told_grows_with_what_they_write():
    """With twice the replicas on both sides, each rank writes the same share: messages have twice
    the bytes, not four times.
    """
    sizes = []
    for replicas in (2, 8):
        map = tiny_map(tp=2, pp=2, dp=replicas, engines=replicas)
        all_of_it = opened(map, [], map)
        sizes.append(
            sum(len(all_of_it.endpoints_of(trainer)) for trainer in range(map.source.world_size))
        )
    assert sizes[1] < 2 * 4 * sizes[0]
    assert np.all(np.diff(sizes) > 0)
