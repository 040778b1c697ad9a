"""The order of the loop, with fake executors as threads. (tests/cpu has the real ones.)"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import pytest

from megarl.controller import Controller


@dataclass
class RecordingTrainer:
    """Records each batch, the version that sampled it, and the version being trained."""

    curr_step: int = 0
    stopped: bool = False
    log: list = field(default_factory=list)

    def init(self):
        self.log.append("init")

    def set_step(self, step):
        assert step == self.curr_step

    def step(self):
        self.log.append((self.batch, self.curr_step))
        self.curr_step += 1

    def save_checkpoint(self):
        self.log.append("save")

    def shutdown(self):
        self.log.append("shutdown")


@dataclass
class PushingGenerator:
    """Its groups leave while it makes them, as with the real generator.

    The real one takes weights at any time.
    """

    wire: queue.Queue
    curr_step: int = 0
    stopped: bool = False
    version: int = -1

    def init(self):
        pass

    def set_step(self, step):
        pass

    def step(self):
        self.wire.put((self.curr_step, self.version))
        self.curr_step += 1

    def save_checkpoint(self):
        pass

    def shutdown(self):
        self.wire.put(None)


@dataclass
class BatchQueue:
    """The trainer's end of the rollouts channel."""

    wire: queue.Queue
    stops_before: int | None = None

    def recv(self, executor):
        if executor.curr_step == self.stops_before:
            executor.stopped = True
        else:
            executor.batch = self.wire.get(timeout=5)


@dataclass
class FakeWeights:
    """A rendezvous like the real one: the trainer waits until its version is taken.

    The generator takes the versions that it must, and those on offer.
    """

    offers: queue.Queue
    acknowledgements: queue.Queue
    run_ahead: int = 0
    closed: bool = False

    def send(self, executor):
        self.offers.put(executor.curr_step)
        self.acknowledgements.get(timeout=5)

    def recv(self, executor):
        while executor.version < executor.curr_step - self.run_ahead or not self.offers.empty():
            executor.version = self.offers.get(timeout=5)
            self.acknowledgements.put(True)

    def close(self):
        self.closed = True


def run(run_ahead: int, steps: int, start: int = 0):
    offers = queue.Queue()
    acknowledgements = queue.Queue()
    wire = queue.Queue()
    trainer = RecordingTrainer(curr_step=start)
    generator = PushingGenerator(wire, curr_step=start)
    weights = FakeWeights(offers, acknowledgements, run_ahead)
    initial = FakeWeights(offers, acknowledgements)
    sides = [
        Controller(trainer, incoming=[BatchQueue(wire)], outgoing=[weights], max_steps=steps),
        Controller(generator, incoming=[weights], outgoing=[], max_steps=steps, initial=[initial]),
    ]
    threads = [threading.Thread(target=side.run, daemon=True) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "the loop hangs"
    assert weights.closed and trainer.log[0] == "init" and trainer.log[-1] == "shutdown"
    return trainer, generator


def training_steps(trainer: RecordingTrainer) -> list:
    return [entry for entry in trainer.log if isinstance(entry, tuple)]


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
def test_batches_are_trained_once_in_order_within_run_ahead(run_ahead):
    trainer, generator = run(run_ahead, steps=12)
    assert [batch for (batch, _), _ in training_steps(trainer)] == list(range(12))
    assert all(
        0 <= version - sampled <= run_ahead for (_, sampled), version in training_steps(trainer)
    )
    assert generator.version == 12, "the last weights must reach the generator"
    assert trainer.log.count("save") == 12


def test_run_ahead_of_0_is_on_policy():
    trainer, _ = run(0, steps=5)
    versions = [(sampled, version) for (_, sampled), version in training_steps(trainer)]
    assert versions == [(step, step) for step in range(5)]


def test_resumed_run_starts_at_its_last_step():
    trainer, _ = run(1, steps=9, start=6)
    assert [batch for (batch, _), _ in training_steps(trainer)] == [6, 7, 8]


def test_stopping_trainer_saves_and_steps_no_more():
    wire = queue.Queue()
    weights = FakeWeights(queue.Queue(), queue.Queue())
    for step in range(3):
        weights.acknowledgements.put(True)
        wire.put((step, step))
    trainer = RecordingTrainer()
    Controller(trainer, [BatchQueue(wire, stops_before=2)], [weights], max_steps=9).run()
    assert trainer.log == ["init", ((0, 0), 0), "save", ((1, 1), 1), "save", "save", "shutdown"]
    assert list(weights.offers.queue) == [0, 1, 2]
