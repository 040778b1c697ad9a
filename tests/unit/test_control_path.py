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


class CountedName(str):
    """Counts the look-ups of names."""

    look_ups = 0

    def __hash__(self) -> int:
        CountedName.look_ups += 1
        return super().__hash__()


class MailboxLink:
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


def offers(names: list[str]) -> MailboxLink:
    link: Any = MailboxLink([(name, WeightsOffer(version)) for version in (0, 1) for name in names])
    collected = Offers(link, names, 5)
    for version in (0, 1):
        assert asyncio.run(collected.next(version - 1)).version == version
    return link


def writes(names: list[str]) -> MailboxLink:
    landed = WeightsWritten(0, 1, 0.0, more=True)
    finished = WeightsWritten(0, 1, 0.0, more=False)
    link: Any = MailboxLink([(name, part) for part in (landed, finished) for name in names])
    collected = Writes(link, names, 0, 5)
    asyncio.run(collected.landed())
    asyncio.run(collected.done())
    assert len(collected.parts) == 2 * len(names)
    return link


def meeting(names: list[str]) -> MailboxLink:
    link: Any = MailboxLink([(name, Hello("same")) for name in names])
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
def test_name_look_ups_are_linear_in_messages(collect):
    counts = []
    for ranks in (32, 256):
        CountedName.look_ups = 0
        link = collect([CountedName(f"trainer.{rank}") for rank in range(ranks)])
        counts.append(CountedName.look_ups)
        assert not link.texts
    assert counts[1] <= 2 * 8 * counts[0], counts  # eight times the ranks


def test_worker_answers_build_no_timeout_texts():
    link: Any = MailboxLink(
        [(f"engine.{rank}.abcd", WorkerReply(rank, "Recall", "", b"x")) for rank in range(64)]
    )

    class SilentEngine:
        async def command(
            self, encoded: bytes, tp: int, timeout_s: float, empty_cache: bool = False
        ) -> None:
            pass

    engines: Any = [SilentEngine() for _ in range(8)]
    workers = Workers(engines, [8] * len(engines), link, 5, connection="abcd")
    assert asyncio.run(workers.run_all(commands.Recall())) == [b"x"] * 64
    assert not link.texts


def hosts_of_eight(name: str, ranks: int) -> list[Host]:
    hosts = [f"{name}{rank // 8}" for rank in range(ranks)]
    return [Host(host, host, has=("mooncake",)) for host in hosts]


def test_transport_is_chosen_once_for_equal_pairs(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "megarl.weight_sync.transports.choice.transport_between",
        lambda *pair: compared.append(pair) or "gloo",
    )
    pairs = transport_pairs(AUTO, hosts_of_eight("t", 256), hosts_of_eight("g", 256))
    assert pairs.table.shape == (256, 256) and pairs.kinds == ("gloo",) and len(compared) == 1
    assert len({id(trainers) for trainers in pairs.trainers("gloo")}) == 1


def opened(
    map: Any, relays: list[Any], full_map: Any, members: GroupMembers | None = None
) -> OpenedEngines:
    """Endpoints whose offsets identify rank and tensor."""
    packed = []
    forms = {}
    for rank in range(full_map.destination.world_size):
        tensors = [
            RemoteTensor(t.name, t.shape, t.dtype, t.shape, 1000 * rank + n)
            for n, t in enumerate(full_map.destination.tensors(rank))
        ]
        landings = [Landing(tensor.name, (0,), rank) for tensor in tensors]
        inboxes = [Inbox(trainer, 0, 8) for trainer in range(full_map.source.world_size)]
        packed.append(
            pack(Endpoint(rank, "mooncake", "here", 8, tensors, landings, inboxes, members=members))
        )
        forms[packed[-1].digest] = forms_of(tensors)
    return OpenedEngines(map, Endpoints(packed, forms), None, relays)


@pytest.mark.parametrize("relays", [False, True])
def test_trainer_rank_gets_only_the_tensors_that_it_writes(relays):
    full_map = map = tiny_map(tp=2, pp=2, dp=2, engines=4)
    forwards: list[Any] = []
    if relays:
        map, forwarding = relayed(full_map, RelayRule(INSIDE_HOSTS, 8))
        forwards = forwarding.relays
    engines = opened(map, forwards, full_map)
    all_tensors = {
        endpoint.rank: {tensor.name: tensor for tensor in endpoint.tensors}
        for endpoint in engines.endpoints
    }
    for trainer in range(map.source.world_size):
        endpoints = decode_endpoints(engines.endpoints_of(trainer))
        sent = {
            (endpoint.rank, tensor.name) for endpoint in endpoints for tensor in endpoint.tensors
        }
        assert sent == {
            (write.destination_rank, write.destination_tensor) for write in map.writes_from(trainer)
        }
        for endpoint in endpoints:
            for tensor in endpoint.tensors:
                assert tensor == all_tensors[endpoint.rank][tensor.name]
            assert {landing.tensor for landing in endpoint.landings} == {
                tensor.name for tensor in endpoint.tensors
            }
            assert [inbox.trainer for inbox in endpoint.inboxes] == [trainer]


def test_idle_member_of_a_group_gets_its_endpoint():
    map = tiny_map(tp=1, pp=1, dp=40, engines=1, generator_tp=1)
    members = GroupMembers(tuple(range(40)), (0,), (0,))
    idle = next(rank for rank in range(40) if not map.writes_from(rank))
    [endpoint] = decode_endpoints(opened(map, [], map, members).endpoints_of(idle))
    assert (endpoint.members, endpoint.tensors) == (members, [])


def test_endpoint_messages_grow_with_the_writes():
    """With twice the replicas on both sides, each rank writes the same share: messages have twice
    the bytes, not four times.
    """
    sizes = []
    for replicas in (2, 8):
        map = tiny_map(tp=2, pp=2, dp=replicas, engines=replicas)
        engines = opened(map, [], map)
        messages = [engines.endpoints_of(trainer) for trainer in range(map.source.world_size)]
        sizes.append(sum(len(message) for message in messages))
    assert sizes[1] < 2 * 4 * sizes[0]
    assert np.all(np.diff(sizes) > 0)
