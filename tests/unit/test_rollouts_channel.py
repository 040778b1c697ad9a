"""Both ends of the rollouts channel over a real link, with trainer rank 0 as the only rank and a
fake executor around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from megarl.algorithms.batches import step_times
from megarl.base.rollout_types import Batch, Group, GroupSummary, GroupTexts, Prompt, Sample
from megarl.bench.overlap_cell import EmulatedSender
from megarl.config.schema import GeneratorConfig, ObserveConfig, RunConfig
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.messaging.messages import (
    GenerateFrom,
    GroupReady,
    GroupsStarted,
    Regenerate,
    WeightsApplied,
    WeightsGrant,
    WeightsOffer,
    WeightsWanted,
    WeightsWritten,
)
from megarl.messaging.process_groups import StopRequest
from megarl.plan.topologies import engine_groups
from megarl.rollouts.buffer import Ledger, RolloutBuffer
from megarl.rollouts.channel import RolloutsReceiver, RolloutsSender, pack, summary_of, texts_of


@dataclass
class FakeTrainer:
    curr_step: int = 0
    rank: int = 0
    device: torch.device = torch.device("cpu")
    replicas = [[0]]
    batches: list[Batch] = field(default_factory=list)
    stopped: bool = False

    def stop(self):
        self.stopped = True

    @property
    def status(self):
        return self

    trace = status

    @contextlib.contextmanager
    def waiting(self, for_whom, for_what):
        yield

    @contextlib.contextmanager
    def span(self, name, **_):
        yield {}

    def assign(self, batch):
        return [[*range(0, len(batch.samples), 2)]]

    def put_batch(self, batch, waited_s):
        self.batches.append(batch)
        self.waited_s = waited_s

    @property
    def version(self):
        return self.curr_step

    def get_model(self):
        return {}

    def put_sync(self, report, applied):
        self.report = report


class OneEngine:
    """The part of a plan that the weights' sending end needs."""

    config = RunConfig(observe=ObserveConfig(probe_every=0))
    groups = engine_groups(GeneratorConfig())
    spec = None  # no adapters, whatever the model


def group(ordinal: int, version: int = 0) -> Group:
    sample = Sample([ordinal, 2, 3], [-0.25, -0.5, -1.0], [version] * 3, "é", 1.0, "stop")
    return Group(Prompt(ordinal, [1, 2], "x", "y"), [sample, sample])


def ready(
    ordinal: int,
    version: int = 0,
    started_s: float = 1.0,
    ended_s: float = 2.0,
    idle_s: float = 0.0,
    scoring_s: tuple[float, float] = (0.0, 0.0),
) -> GroupReady:
    return pack(group(ordinal, version), version, started_s, ended_s, idle_s, scoring_s)


def summaries(*groups: Group) -> list[GroupSummary]:
    return [summary_of(pack(full_group)) for full_group in groups]


@pytest.fixture(scope="module")
def single_rank():
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def link():
    key = RunKey.generate()
    hub = Hub("generator.0", key)
    peer = Peer("trainer.0", key, hub.address)
    yield hub, peer
    peer.close()
    hub.close()


def ends(link, max_staleness=None, ledger=Ledger(), timeout_s=5.0):
    hub, peer = link
    return RolloutsSender(hub), RolloutsReceiver(
        peer, timeout_s, RolloutBuffer(2, max_staleness, ledger)
    )


def until_held(receiver: RolloutsReceiver, ordinals: list[int]) -> Ledger:
    """The ledger, once these groups are in it."""
    deadline = time.monotonic() + 30
    while True:
        ledger = msgspec.msgpack.decode(receiver.ledger(), type=Ledger)
        if sorted(held_group.ordinal for held_group in ledger.groups) == ordinals:
            return ledger
        assert time.monotonic() < deadline, ledger
        time.sleep(0.01)


def test_waiting_for_scores_is_not_generation_time(single_rank, link):
    sender, receiver = ends(link)
    asyncio.run(sender.first(5))
    sender.begun([0, 1], 0)
    sender.finished(ready(1, started_s=1.0, ended_s=7.0, scoring_s=(0.5, 4.0)))
    sender.finished(ready(0, started_s=2.0, ended_s=8.0, scoring_s=(0.5, 4.5)))
    trainer = FakeTrainer()
    receiver.recv(trainer)
    assert (trainer.batches[0].generate_s, trainer.batches[0].reward_s) == (3.0, 4.0)


def test_groups_go_out_as_they_finish_and_arrive_as_batches(single_rank, link):
    sender, receiver = ends(link)
    assert asyncio.run(sender.first(5)) == GenerateFrom(0, [])
    sender.begun([0, 1, 2, 3], 0)
    for member in (
        ready(2, started_s=1.0, ended_s=4.0),
        ready(0, started_s=1.5, ended_s=3.0, idle_s=0.5),
        ready(3),
    ):
        sender.finished(member)
    trainer = FakeTrainer()
    until_held(receiver, [0, 2, 3])
    receiver.recv(trainer)
    [batch] = trainer.batches
    expected = Batch(
        0, summaries(group(0), group(2)), 3.0, 0.5, 0.0, rejected=0, buffered=1, rollout_s=2.25
    )
    assert replace(batch, numbers={}, texts=[]) == expected
    assert [texts_of(texts) for texts in batch.texts] == [
        GroupTexts("x", "y", [("é", []), ("é", [])])
    ] * 2
    assert {place: (member.prompt_ids.tolist(), member.token_ids.tolist()) for place,
        member in batch.numbers.items()} == {
        0: ([1, 2], [0, 2, 3]), 2: ([1, 2], [2, 2, 3]),
    }, "the numbers of what is trained on"  # fmt: skip
    ledger = until_held(receiver, [3])
    assert (ledger.consumed_below, ledger.consumed_beyond) == (1, [2])
    sender.finished(ready(1))
    until_held(receiver, [1, 3])
    assert b"\xc3\xa9" in receiver.ledger()


def test_ranks_may_wait_longer_for_a_batch_than_for_each_other(single_rank, link):
    _sender, receiver = ends(link, ledger=Ledger(0, [], [ready(0), ready(1)]), timeout_s=3600.0)
    receiver.recv(FakeTrainer())
    limit = receiver._groups.all._get_backend(torch.device("cpu")).options._timeout
    assert limit > timedelta(seconds=3600)


class LinkUnderLoad:
    """Gives at each look the messages so far.

    A prompt begins and finishes between the first look and the second.
    """

    def __init__(self, *arrivals):
        self._arrivals = list(arrivals)
        self._inbox = []

    def drain(self, kind):
        self._inbox += self._arrivals.pop(0) if self._arrivals else []
        drained = [message for message in self._inbox if isinstance(message, kind)]
        self._inbox = [message for message in self._inbox if not isinstance(message, kind)]
        return drained

    def send(self, message):
        pass

    def read_ahead(self):
        pass


def test_starts_are_read_before_the_groups_they_announce():
    arrivals = [[GroupsStarted([0], 0)], [ready(0), GroupsStarted([1], 0), ready(1)], []]
    receiver = RolloutsReceiver(LinkUnderLoad(*arrivals), 5.0, RolloutBuffer(2, None))
    for _ in arrivals:
        ledger = receiver.ledger()
    assert [group.ordinal for group in msgspec.msgpack.decode(ledger, type=Ledger).groups] == [0, 1]


def test_groups_of_the_ledger_are_used_on_resume(single_rank, link):
    ledger = Ledger(4, [6], [ready(5, started_s=0.0, ended_s=0.0)])
    sender, receiver = ends(link, ledger=ledger)
    assert asyncio.run(sender.first(5)) == GenerateFrom(4, [5, 6])
    sender.begun([4, 7], 2)
    sender.finished(ready(7, 2, started_s=8.0, ended_s=9.0))
    trainer = FakeTrainer(curr_step=2)
    receiver.recv(trainer)
    assert trainer.batches[0].groups == summaries(group(5), group(7, 2))
    assert trainer.batches[0].generate_s == 1.0


def test_groups_that_are_too_old_are_rejected_and_counted(single_rank, link):
    sender, receiver = ends(link, max_staleness=1, ledger=Ledger(0, [], [ready(0), ready(1)]))
    asyncio.run(sender.first(5))
    sender.begun([2, 3], 5)
    for ordinal in (2, 3):
        sender.finished(ready(ordinal, 5))
    trainer = FakeTrainer(curr_step=5)
    receiver.recv(trainer)
    assert trainer.batches[0].groups == summaries(group(2, 5), group(3, 5))
    assert trainer.batches[0].rejected == 2
    assert asyncio.run(link[0].arrival(Regenerate, 5, "rejected"))[1].ordinals == [0, 1]


def test_dropped_groups_come_with_a_batch_or_in_its_place(single_rank, link):
    """Seven groups are dropped before the first batch, and three more in place of the second."""
    hub, peer = link
    dropped = [replace(ready(ordinal), dropped=True, pieces=[]) for ordinal in range(7)]
    ledger = Ledger(1, [], [], dropped=[0], untold=[dropped[0]])
    sender = RolloutsSender(hub)
    receiver = RolloutsReceiver(peer, 5.0, RolloutBuffer(2, None, ledger), max_generated=4)
    assert asyncio.run(sender.first(5)) == GenerateFrom(1, [], [0])
    sender.begun(list(range(1, 8)), 0)
    for ready_group in (
        ready(1),
        dropped[2],
        ready(3),
        dropped[4],
        dropped[5],
        ready(7),
        dropped[6],
    ):
        sender.finished(ready_group)
    trainer = FakeTrainer()
    until_held(receiver, [1, 3, 7])
    receiver.recv(trainer)
    [batch] = trainer.batches
    assert [group.ordinal for group in batch.groups] == [1, 3]
    assert batch.dropped == summaries(group(0), group(2))
    assert [texts_of(texts) for texts in batch.dropped_texts] == [
        GroupTexts("x", "y", [("é", []), ("é", [])])
    ] * 2
    later_drops = [replace(ready(ordinal), dropped=True, pieces=[]) for ordinal in (8, 9, 10)]
    sender.begun([8, 9, 10], 0)
    for ready_group in later_drops:
        sender.finished(ready_group)
    trainer.curr_step = 1
    receiver.recv(trainer)
    given_up = trainer.batches[1]
    assert given_up.groups == given_up.texts == []
    assert given_up.numbers == {}
    assert [group.ordinal for group in given_up.dropped] == [4, 5, 6, 8, 9, 10]
    assert len(given_up.dropped_texts) == 6


def test_a_deadline_names_both_sides_and_says_how_things_stand(single_rank, link):
    sender, receiver = ends(link, max_staleness=1, ledger=Ledger(0, [], [ready(0)]), timeout_s=0.3)
    asyncio.run(sender.first(5))
    sender.begun([3, 2], 4)
    sender.begun([1], 5)
    sender.finished(ready(3, 5))
    with pytest.raises(TimeoutError) as failure:
        receiver.recv(FakeTrainer(curr_step=5))
    assert str(failure.value) == (
        "trainer.0 waited 0 s for batch 5 from generator.0; 1 of 2 groups finished; "
        "2 in flight, the oldest being prompt 2, begun under version 4; 1 rejected and not begun again"
    )


def receiver_and_hub(link, **settings):
    hub, peer = link
    receiver = RolloutsReceiver(peer, 30.0, RolloutBuffer(2, None), **settings)
    assert hub.receive(GenerateFrom, 10, "the ledger")[1].first == 0
    return hub, receiver


def test_stopping_run_gets_no_batch_that_it_waits_for(single_rank, link):
    stop = StopRequest()
    trainer = FakeTrainer()
    _, receiver = receiver_and_hub(link, stop=stop)
    asking = threading.Timer(0.5, stop.ask)
    asking.start()
    receiver.recv(trainer)
    asking.join()
    assert trainer.stopped
    assert not trainer.batches


def test_weights_are_sent_again_while_waiting_for_a_batch(single_rank, link):
    """Requests for older versions are passed over."""
    sent = []
    stop = StopRequest()
    trainer = FakeTrainer(curr_step=3)

    def resend(executor):
        sent.append(executor.curr_step)
        stop.ask()

    hub, receiver = receiver_and_hub(link, stop=stop, resend=resend)
    hub.send("trainer.0", WeightsWanted(2))
    hub.send("trainer.0", WeightsWanted(3))
    receiver.recv(trainer)
    assert sent == [3]
    assert trainer.stopped


class Sender(EmulatedSender):
    write_s = 0.05


def test_repeated_sending_counts_once_in_the_times_of_a_step(single_rank, link):
    """The generator grants the weights after 0.2 s, and asks for them again.

    Then it takes 0.3 s, and delays the batch by 0.1 s.
    """
    hub, peer = link
    weights = Sender(OneEngine(), peer)
    receiver = RolloutsReceiver(
        peer, 5.0, RolloutBuffer(2, None), resend=partial(weights.send, repeat=True)
    )
    sender = RolloutsSender(hub)

    def generator() -> None:
        for delay_s in (0.2, 0.3):
            offer = hub.receive(WeightsOffer, 10, "an offer")[1]
            time.sleep(delay_s)
            hub.send("trainer.0", WeightsGrant(offer.version))
            hub.receive(WeightsWritten, 10, "the writes")
            hub.send("trainer.0", WeightsApplied(offer.version, True, 0.0, 0))
            if delay_s == 0.2:
                hub.send("trainer.0", WeightsWanted(offer.version))
        time.sleep(0.1)
        sender.begun([0, 1], 0)
        for ready_group in (ready(0), ready(1)):
            sender.finished(ready_group)

    trainer = FakeTrainer()
    generating = threading.Thread(target=generator)
    generating.start()
    start_s = time.monotonic()
    weights.send(trainer)
    receiver.recv(trainer)
    step_s = time.monotonic() - start_s
    generating.join(10)
    times = step_times(
        trainer.batches[0],
        step_s,
        0.0,
        trainer.waited_s,
        trainer.report.wait_s,
        trainer.report.sync_s,
        0.0,
    )
    assert times["time/weights_wait_s"] >= 0.45 and times["time/sync_s"] >= 2 * Sender.write_s, (
        "both times"
    )
    assert times["time/trainer_wait_s"] >= 0.6
    assert times["time/trainer_wait_s"] + times["time/sync_s"] <= step_s
