"""The loop's order, shown with fake executors that run as threads (the real ones are in tests/cpu)."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import pytest

from megarl.controller import Controller
from megarl.protocols import ChannelType


@dataclass
class FakeExecutor:
    """Counts steps; holds a version (trainer: of its weights; generator: of the weights it was sent)."""

    name: str
    curr_step: int = 0
    rank: int = 0
    version: int = -1
    stopped: bool = False
    log: list = field(default_factory=list)

    def init(self):
        self.log.append("init")

    def set_step(self, step):
        pass

    def step(self):
        self.curr_step += 1
        if self.name == "trainer":
            self.log.append((self.batch, self.version))
            self.version = self.curr_step
        else:
            self.batch = (self.curr_step - 1, self.version)

    def save_checkpoint(self):
        pass

    def get_model(self):
        return self.version

    def shutdown(self):
        self.log.append("shutdown")


@dataclass
class FakeRollouts:
    wire: queue.Queue
    name: str = "rollouts"
    outbound: str = "generator"
    inbound: str = "trainer"
    type: ChannelType = ChannelType.BROADCAST
    capacity: int = 0

    def send(self, executor):
        self.wire.put(executor.batch)

    def recv(self, executor):
        executor.batch = self.wire.get(timeout=5)

    def close(self):
        pass


@dataclass
class FakeWeights:
    """Rendezvous like the real one: the trainer waits until its version is taken; the generator takes what it must, and what is there."""

    offers: queue.Queue
    taken: queue.Queue
    capacity: int
    name: str = "weights"
    outbound: str = "trainer"
    inbound: str = "generator"
    type: ChannelType = ChannelType.DDMA_WEIGHTS_UPDATE

    def send(self, executor):
        self.offers.put(executor.get_model())
        self.taken.get(timeout=5)

    def recv(self, executor):
        while executor.version < executor.curr_step - self.capacity or not self.offers.empty():
            executor.version = self.offers.get(timeout=5)
            self.taken.put(True)

    def close(self):
        pass


def run(capacity: int, steps: int, start: int = 0):
    offers, taken, wire = queue.Queue(), queue.Queue(), queue.Queue()
    weights = FakeWeights(offers, taken, capacity)
    initial = FakeWeights(offers, taken, 0)
    trainer = FakeExecutor("trainer", curr_step=start, version=start)
    generator = FakeExecutor("generator", curr_step=start)
    threads = [
        threading.Thread(target=Controller(each, [weights, FakeRollouts(wire)], [initial], steps).run, daemon=True)
        for each in (trainer, generator)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "the loop hangs"
    return trainer, generator


@pytest.mark.parametrize("capacity", [0, 1, 4])
def test_every_batch_is_trained_once_in_order_and_no_staler_than_the_capacity(capacity):
    trainer, generator = run(capacity, steps=12)
    consumed = [entry for entry in trainer.log if isinstance(entry, tuple)]
    assert [batch for (batch, _), _ in consumed] == list(range(12))
    assert all(0 <= trained - sampled <= capacity for (_, sampled), trained in consumed)
    assert generator.version == 12, "the last weights must reach the generator"


def test_capacity_zero_is_on_policy():
    trainer, _ = run(0, steps=5)
    assert [(sampled, trained) for (_, sampled), trained in trainer.log[1:-1]] == [(s, s) for s in range(5)]


def test_a_resumed_run_starts_where_it_stopped():
    trainer, _ = run(1, steps=9, start=6)
    assert [batch for (batch, _), _ in trainer.log[1:-1]] == [6, 7, 8]
