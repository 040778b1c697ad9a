"""Which prompts begin, which finished groups make a batch, what is rejected: pure logic, against random schedules."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import chain

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import AsyncConfig
from megarl.data.curriculum import Curriculum
from megarl.data.mixture import Mixture
from megarl.data.prompts import Sources
from megarl.messaging.messages import GroupReady
from megarl.plan.asynchrony import run_ahead
from megarl.rollouts.admission import Admission
from megarl.rollouts.buffer import RolloutBuffer
from megarl.rollouts.ledger import Consumed, Ledger


def ready(ordinal: int, oldest: int = 0, dropped: bool = False, outside: bool = False) -> GroupReady:
    return GroupReady(ordinal, oldest, 0.0, 0.0, 0.0, msgspec.Raw(b"\xc0"), msgspec.Raw(b"\xc0"), [], dropped, outside)


def filled(buffer: RolloutBuffer, *groups: tuple[int, int]) -> RolloutBuffer:
    for ordinal, version in groups:
        buffer.begin([ordinal], version)
        buffer.finish(ready(ordinal, version))
    return buffer


def ordinals(groups: list[GroupReady] | None) -> list[int] | None:
    return None if groups is None else [group.ordinal for group in groups]


def test_a_batch_is_the_lowest_finished_ordinals():
    buffer = filled(RolloutBuffer(2, None), (5, 0), (1, 0), (3, 0))
    buffer.begin([0], 0)
    assert ordinals(buffer.take(9)) == [1, 3]
    assert buffer.take(10) is None and buffer.finished == 1
    buffer.finish(ready(0))
    assert ordinals(buffer.take(10)) == [0, 5]


def test_what_is_too_old_is_rejected_once_and_can_come_again():
    buffer = filled(RolloutBuffer(2, 1), (0, 3), (1, 4), (2, 4), (3, 3))
    assert buffer.reject(4) == []
    assert buffer.reject(5) == [0, 3] and buffer.reject(5) == []
    assert "2 rejected and not begun again" in str(buffer)
    filled(buffer, (0, 5))
    assert ordinals(buffer.take(5)) == [1, 2], "0 is the lowest, but 1 and 2 are due"
    filled(buffer, (3, 5))
    assert ordinals(buffer.take(6)) == [0, 3]


def test_a_batch_waits_for_a_rollout_that_would_become_too_old():
    buffer = RolloutBuffer(2, 2)
    buffer.begin([7], 3)
    filled(buffer, (1, 4), (2, 4), (4, 4))
    assert ordinals(buffer.take(4)) == [1, 2], "7 is not due at step 4"
    filled(buffer, (5, 4))
    assert buffer.full(5) and buffer.take(5) is None, "at step 5 it is"
    buffer.finish(ready(7, 3))
    assert ordinals(buffer.take(5)) == [4, 7]


def test_no_batch_waits_for_due_rollouts_that_it_has_no_room_for():
    buffer = RolloutBuffer(2, 0)
    buffer.begin([9], 3)
    filled(buffer, (1, 3), (2, 3))
    assert ordinals(buffer.take(3)) == [1, 2]


def test_errors_name_the_prompt_and_what_became_of_it():
    buffer = filled(RolloutBuffer(1, None), (0, 0))
    with pytest.raises(RuntimeError, match="prompt 0 was begun a second time; it is finished"):
        buffer.begin([0], 0)
    buffer.take(0)
    with pytest.raises(RuntimeError, match="prompt 0 was begun a second time; it is trained on"):
        buffer.begin([0], 0)
    with pytest.raises(RuntimeError, match="prompt 4 came without having been begun; it is unknown"):
        buffer.finish(ready(4))
    buffer.begin([6, 3], 2)
    buffer.begin([2], 4)
    assert str(buffer) == "0 of 1 groups finished; 3 in flight, the oldest being prompt 3, begun under version 2"


def test_the_ledger_survives_a_file_and_says_what_is_left_to_do(tmp_path):
    buffer = RolloutBuffer(2, None)
    buffer.begin(range(6), 0)
    for ordinal in (0, 3, 2, 5):
        buffer.finish(ready(ordinal))
    assert ordinals(buffer.take(0)) == [0, 2]
    (tmp_path / "ledger.msgpack").write_bytes(buffer.ledger().encode())
    ledger = Ledger.load(tmp_path)
    assert (ledger.consumed_below, ledger.consumed_beyond, sorted(group.ordinal for group in ledger.groups)) == (1, [2], [3, 5])
    again = RolloutBuffer(2, None, ledger)
    assert ordinals(again.take(1)) == [3, 5]
    with pytest.raises(RuntimeError, match="trained on"):
        again.begin([2], 1)


def test_a_broken_ledger_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(RuntimeError, match="ledger.msgpack: no ledger of a run"):
        Ledger.load(tmp_path)
    (tmp_path / "ledger.msgpack").write_bytes(b"\x01")
    with pytest.raises(RuntimeError, match="ledger.msgpack: no ledger of a run"):
        Ledger.load(tmp_path)


def test_what_is_dropped_is_done_and_reported_once_with_what_is_trained_on_around_it():
    buffer = RolloutBuffer(2, None)
    buffer.begin(range(9), 0)
    for ordinal, dropped in ((4, True), (1, True), (0, False), (7, True), (2, True), (3, False), (5, False)):
        buffer.finish(ready(ordinal, 0, dropped))
    assert str(buffer).startswith("3 of 2 groups finished, and 4 dropped; 2 in flight")
    assert ordinals(buffer.take(0)) == [0, 3] and ordinals(buffer.report_dropped()) == [1, 2] and buffer.report_dropped() == []
    with pytest.raises(RuntimeError, match="prompt 4 was begun a second time; it is dropped"):
        buffer.begin([4], 0)
    ledger = buffer.ledger()
    assert (ledger.consumed_below, ledger.consumed_beyond, ledger.dropped) == (5, [7], [1, 2, 4, 7])
    assert (ledger.trained(), ledger.told(), ordinals(ledger.untold)) == ({0, 3}, {1, 2}, [4, 7])
    again = RolloutBuffer(2, None, msgspec.msgpack.decode(ledger.encode(), type=Ledger))
    again.begin([6, 8], 0)
    again.finish(ready(8))
    assert ordinals(again.take(1)) == [5, 8] and ordinals(again.report_dropped()) == [4, 7]


def test_a_late_prompt_that_is_dropped_is_reported_by_whatever_batch_comes_next_also_after_a_resume():
    buffer = RolloutBuffer(1, None)
    buffer.begin(range(4), 0)
    buffer.finish(ready(3))
    assert ordinals(buffer.take(0)) == [3]
    buffer.finish(ready(2, dropped=True))
    again = RolloutBuffer(1, None, buffer.ledger())
    filled(again, (0, 0))
    assert ordinals(again.take(1)) == [0] and ordinals(again.report_dropped()) == [2]


def test_held_groups_are_judged_again_after_a_resume():
    ledger = Ledger(groups=[ready(0), ready(1)])
    buffer = RolloutBuffer(1, None, ledger, lambda group: msgspec.structs.replace(group, dropped=group.ordinal == 0))
    assert ordinals(buffer.take(0)) == [1] and ordinals(buffer.report_dropped()) == [0]


def test_it_gives_up_when_enough_were_generated_for_a_batch_and_too_few_are_left():
    buffer = RolloutBuffer(2, None)
    buffer.begin(range(20), 0)
    for ordinal in range(5):
        buffer.finish(ready(ordinal, dropped=ordinal != 2))
        assert buffer.give_up(0, None) == []
        assert ordinals(buffer.give_up(0, 6)) == []
    buffer.finish(ready(5, dropped=True))
    assert ordinals(buffer.give_up(0, 6)) == [0, 1, 3, 4, 5]
    buffer.finish(ready(6))
    assert buffer.give_up(0, 6) == [], "there is a batch"
    buffer.take(0)
    assert buffer.give_up(0, 1) == [], "the next batch's are counted anew"


@settings(deadline=None)
@given(st.permutations(range(12)))
def test_consumed_is_a_set(order):
    consumed, seen = Consumed(), set()
    for ordinal in order:
        consumed.add(ordinal)
        seen.add(ordinal)
        assert [n in consumed for n in range(13)] == [n in seen for n in range(13)]
    assert consumed.below == 12 and not consumed.beyond


@pytest.mark.parametrize("capacity, staleness, bound", [(1, None, 1), (None, None, None), (4, 2, 2), (None, 3, 3), (0, 8, 0)])
def test_nothing_begins_so_far_ahead_that_it_is_bound_to_be_rejected(capacity, staleness, bound):
    assert run_ahead(AsyncConfig(capacity=capacity, max_staleness=staleness)) == bound


def test_admission_by_depth_and_room():
    admission = Admission(prompts_per_step=4, run_ahead=1, max_in_flight=3, end=100)
    admission.generate_from(0, [])
    assert admission.begin(-1) == [], "the engines have no weights yet"
    assert admission.begin(0) == [0, 1, 2]
    for _ in range(3):
        admission.finish()
    assert admission.begin(0) == [3, 4, 5]
    for _ in range(3):
        admission.finish()
    assert admission.begin(0) == [6, 7]
    admission.finish()
    assert admission.begin(0) == [] and admission.held_back(0) and not admission.held_back(1)
    admission.again([2])
    assert admission.begin(0) == [2], "a rejected prompt makes room for itself, and goes first"
    assert admission.begin(1) == [8]


def test_admission_after_a_resume_leaves_out_what_is_done():
    admission = Admission(prompts_per_step=2, run_ahead=None, max_in_flight=10, end=9)
    admission.generate_from(3, [3, 5, 7])
    assert admission.begun == 6
    assert admission.begin(1) == [4, 6, 8] and admission.exhausted


def test_a_dropped_prompt_is_replaced_at_once_and_the_run_ends_later():
    admission = Admission(prompts_per_step=2, run_ahead=0, max_in_flight=2, end=2)
    admission.generate_from(0, [])
    assert admission.begin(0) == [0, 1] and admission.exhausted
    admission.drop(0)
    assert not admission.exhausted and admission.begin(0) == [2]
    admission.finish()
    admission.drop(2)
    assert admission.begin(0) == [3]
    again = Admission(prompts_per_step=2, run_ahead=0, max_in_flight=2, end=4)
    again.generate_from(2, [3], dropped=[0, 3])
    assert again.begun == 1 and again.begin(0) == [2], "of 0, 1 and 3 two were dropped"
    assert again.begin(1) == [4], "there is one more place"
    again.finish()
    assert again.begin(1) == [5] and again.exhausted


class Simulation:
    """A run without engines: rollouts take random times, the trainer trains, both ends by the real rules. Killed and resumed at will.

    Old weights can live on in a rollout (in flight) or not (block): `mixed` says whether an update waits for running rollouts.
    An `eager` generator also begins what is bound to be rejected. A finished group is dropped with the probability `dropping`. Its prompt
    is of one of the sources of `mixture`; if these have `rows`, it is outside the curriculum's band with the probability `outside`.
    """

    def __init__(
        self, seed, per_step, capacity, max_staleness, in_flight, steps, mixed, eager=False, dropping=0.0,
        mixture=Mixture(), rows=None, rest_epochs=1, outside=0.5,
    ):  # fmt: skip
        self.random, self.dropping = random.Random(seed), dropping
        self.mixture, self.outside, self.rest_epochs = mixture, outside, rest_epochs
        self.sources = Sources([range(count) for count in rows], "order", True, mixture) if rows else None
        self.per_step, self.max_staleness, self.in_flight, self.steps, self.mixed = per_step, max_staleness, in_flight, steps, mixed
        self.capacity = capacity if eager else run_ahead(AsyncConfig(capacity=capacity, max_staleness=max_staleness))
        self.trained, self.dropped, self.ages, self.rejected = [], [], [], 0
        self.start(Ledger(), 0)

    def start(self, ledger: Ledger, step: int) -> None:
        self.now, self.step, self.running = 0.0, step, []
        self.trained, self.dropped = self.trained[:step], self.dropped[:step]
        self.curriculum = Curriculum(self.sources.place, self.rest_epochs) if self.sources else None
        self.buffer = RolloutBuffer(self.per_step, self.max_staleness, ledger, mixture=self.mixture)
        end = self.per_step * self.steps
        self.admission = Admission(self.per_step, self.capacity, self.in_flight, end, self.mixture, self.curriculum)
        held = sorted([*ledger.consumed_beyond, *(g.ordinal for g in ledger.groups)])
        self.admission.generate_from(ledger.consumed_below, held, [*ledger.dropped, *ledger.rested])
        if self.curriculum:
            self.curriculum.resume(ledger.outside, frozenset(ledger.rejected))
        self.saved = (ledger, step)

    def run(self, kill_at: int | None = None) -> None:
        """Until `kill_at` steps, or all. Every wait must end by itself."""
        while self.step < self.steps and self.step != kill_at:
            if not self.mixed:  # block
                while self.running:
                    self.finish_one()
            self.begin()
            while self.random.random() < 0.5 and self.running:
                self.finish_one()
                self.begin()
            self.train()

    def begin(self) -> None:
        ordinals = self.admission.begin(self.step)
        self.buffer.rest(self.admission.take_rested())
        self.buffer.begin(ordinals, self.step)
        for ordinal in ordinals:
            length = self.random.expovariate(1.0) if self.random.random() < 0.8 else 20.0
            heapq.heappush(self.running, (self.now + length, ordinal, self.step))

    def finish_one(self) -> None:
        self.now, ordinal, version = heapq.heappop(self.running)
        dropped = bool(self.dropping) and self.random.random() < self.dropping
        self.admission.drop(ordinal) if dropped else self.admission.finish()
        outside = self.curriculum is not None and self.random.random() < self.outside
        if self.curriculum:
            self.curriculum.finish(ordinal, outside)
        self.buffer.finish(ready(ordinal, version, dropped, outside))

    def train(self) -> None:
        while True:
            if stale := self.buffer.reject(self.step):
                self.rejected += len(stale)
                self.admission.again(stale)
                self.begin()
            batch = self.buffer.take(self.step)
            if batch is not None:
                break
            assert self.running, f"a deadlock: {self.buffer}"
            self.finish_one()
            self.begin()
        assert not any(group.dropped for group in batch)
        self.trained.append([group.ordinal for group in batch])
        self.dropped.append([group.ordinal for group in self.buffer.report_dropped()])
        self.ages += [self.step - group.oldest for group in batch]
        self.step += 1
        if self.random.random() < 0.5:
            self.saved = (msgspec.msgpack.decode(self.buffer.ledger().encode(), type=Ledger), self.step)

    def kill_and_resume(self) -> None:
        self.start(*self.saved)


some_or_none = st.one_of(st.none(), st.integers(0, 5))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 6),
    capacity=some_or_none,
    max_staleness=some_or_none,
    in_flight=st.integers(1, 20),
    mixed=st.booleans(),
    eager=st.booleans(),
    kills=st.lists(st.integers(0, 14), max_size=3),
    dropping=st.sampled_from((0.0, 0.0, 0.1, 0.5, 0.9)),
)
def test_every_prompt_is_trained_on_or_dropped_once_none_too_old_whatever_happens(
    seed, per_step, capacity, max_staleness, in_flight, mixed, eager, kills, dropping
):
    steps = 15
    run = Simulation(seed, per_step, capacity, max_staleness, in_flight, steps, mixed, eager, dropping)
    for kill_at in sorted(kills):
        run.run(kill_at)
        run.kill_and_resume()
    run.run()
    assert [len(batch) for batch in run.trained] == [per_step] * steps
    prompts = per_step * steps + sum(map(len, run.dropped))
    assert Counter(chain(*run.trained, *run.dropped)) == Counter(range(prompts)), "each is trained on or reported as dropped"
    assert run.dropping or prompts == per_step * steps
    assert run.admission.exhausted and not run.running and not run.buffer.ledger().untold, "nothing is left over"
    if max_staleness is not None:
        assert max(run.ages) <= max_staleness
    if not mixed and run.capacity is not None:
        assert max(run.ages) <= run.capacity, "an update that waits for rollouts bounds their age by the capacity"
    if run.capacity == 0:
        in_order = [ordinal for step in zip(run.trained, run.dropped) for ordinal in sorted(chain(*step))]
        assert in_order == list(range(prompts)), "the synchronous loop"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 6),
    capacity=some_or_none,
    max_staleness=st.sampled_from((None, 0, 1, 2)),
    in_flight=st.integers(1, 20),
    mixed=st.booleans(),
    eager=st.booleans(),
    kills=st.lists(st.integers(0, 14), max_size=3),
    dropping=st.sampled_from((0.0, 0.0, 0.5)),
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    rows=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    rest_epochs=st.integers(1, 3),
    outside=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
)
def test_mixtures_and_curricula_lose_and_repeat_nothing_and_rest_what_they_should(
    seed, per_step, capacity, max_staleness, in_flight, mixed, eager, kills, dropping, shares, rows, rest_epochs, outside
):
    """Each step has its share of each source, whatever happens; and which prompts rest follows from the scores alone, as the ledger has
    them at the end, whatever the order of events, and wherever the run was killed."""
    steps, mixture = 15, Mixture(shares, list("abc"[: len(shares)]))
    rows = rows[: len(shares)]
    run = Simulation(seed, per_step, capacity, max_staleness, in_flight, steps, mixed, eager, dropping, mixture, rows, rest_epochs, outside)
    for kill_at in sorted(kills):
        run.run(kill_at)
        run.kill_and_resume()
    run.run()
    for step, batch in enumerate(run.trained):
        found = Counter(mixture.source(ordinal) for ordinal in batch)
        assert [found[source] for source in range(len(shares))] == mixture.counts(step * per_step, (step + 1) * per_step)
    ledger = run.buffer.ledger()
    every = Counter(chain(*run.trained, *run.dropped, ledger.rested))
    assert set(every.values()) == {1} and every.keys() == {*range(ledger.consumed_below), *ledger.consumed_beyond}
    assert ledger.trained() == {*chain(*run.trained)} and not ledger.groups and not ledger.untold
    for source in range(len(shares)):
        draws = sorted(mixture.draw(ordinal) for ordinal in every if mixture.source(ordinal) == source)
        assert draws == list(range(len(draws))), "a source leaves nothing out"
    out = {run.sources.place(ordinal) for ordinal in ledger.outside}
    for ordinal in every:
        source, epoch, row = run.sources.place(ordinal)
        rests = any((source, before, row) in out for before in range(epoch - rest_epochs, epoch))
        assert (ordinal in ledger.rested) == rests


def test_rejection_of_everything_is_no_deadlock():
    """All that a resumed run holds is too old: it is generated again, and the run goes on."""
    run = Simulation(1, 4, 3, 3, 8, 10, True)
    groups = [ready(ordinal, 0) for ordinal in range(20, 32)]
    run.start(Ledger(20, [], groups), 5)
    run.trained = [[] for _ in range(5)]
    run.run()
    assert run.rejected == 12
    assert sorted(ordinal for batch in run.trained for ordinal in batch) == list(range(20, 40))


def test_an_eager_generator_is_rejected_often_and_gets_there():
    run = Simulation(2, 4, 6, 1, 8, 40, False, eager=True)
    run.run()
    assert run.rejected > 100
    assert sorted(ordinal for batch in run.trained for ordinal in batch) == list(range(160))


def test_long_rollouts_are_trained_on_as_often_as_short_ones():
    """One prompt in five takes twenty times as long; none is dropped for it, and none is late beyond the limit."""
    run = Simulation(3, 8, None, 2, 16, 60, True)
    run.run()
    assert run.rejected == 0 and max(run.ages) == 2
    assert sorted(ordinal for batch in run.trained for ordinal in batch) == list(range(480))
