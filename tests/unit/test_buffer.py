"""Which prompts begin, which groups form a batch, and which are rejected, without processes.

(Random schedules: test_buffer_schedules.py.)
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_schedules import ready

from megarl.config.schema import AsyncConfig
from megarl.messaging.messages import GroupReady
from megarl.plan.topologies import run_ahead
from megarl.rollouts.buffer import Consumed, Ledger, RolloutBuffer
from megarl.rollouts.stream import Admission


def filled(buffer: RolloutBuffer, *groups: tuple[int, int]) -> RolloutBuffer:
    for ordinal, version in groups:
        buffer.begin([ordinal], version)
        buffer.finish(ready(ordinal, version))
    return buffer


def ordinals(groups: list[GroupReady] | None) -> list[int] | None:
    return None if groups is None else [group.ordinal for group in groups]


def test_batch_is_the_lowest_finished_ordinals():
    buffer = filled(RolloutBuffer(2, None), (5, 0), (1, 0), (3, 0))
    buffer.begin([0], 0)
    assert ordinals(buffer.take(9)) == [1, 3]
    assert buffer.take(10) is None and buffer.finished == 1
    buffer.finish(ready(0))
    assert ordinals(buffer.take(10)) == [0, 5]


def test_old_group_is_rejected_once_and_may_be_begun_again():
    buffer = filled(RolloutBuffer(2, 1), (0, 3), (1, 4), (2, 4), (3, 3))
    assert buffer.reject(4) == []
    assert buffer.reject(5) == [0, 3] and buffer.reject(5) == []
    assert "2 rejected and not begun again" in str(buffer)
    filled(buffer, (0, 5))
    assert ordinals(buffer.take(5)) == [1, 2], "0 is the lowest, but 1 and 2 are due"
    filled(buffer, (3, 5))
    assert ordinals(buffer.take(6)) == [0, 3]


def test_batch_waits_for_a_rollout_that_is_due():
    buffer = RolloutBuffer(2, 2)
    buffer.begin([7], 3)
    filled(buffer, (1, 4), (2, 4), (4, 4))
    assert ordinals(buffer.take(4)) == [1, 2], "7 is not due at step 4"
    filled(buffer, (5, 4))
    assert buffer.full(5) and buffer.take(5) is None, "at step 5 it is"
    buffer.finish(ready(7, 3))
    assert ordinals(buffer.take(5)) == [4, 7]


def test_full_batch_does_not_wait_for_due_rollouts():
    buffer = RolloutBuffer(2, 0)
    buffer.begin([9], 3)
    filled(buffer, (1, 3), (2, 3))
    assert ordinals(buffer.take(3)) == [1, 2]


def test_errors_name_the_prompt_and_its_state():
    buffer = filled(RolloutBuffer(1, None), (0, 0))
    with pytest.raises(RuntimeError, match="prompt 0 was begun a second time; it is finished"):
        buffer.begin([0], 0)
    buffer.take(0)
    with pytest.raises(RuntimeError, match="prompt 0 was begun a second time; it is trained on"):
        buffer.begin([0], 0)
    with pytest.raises(
        RuntimeError, match="prompt 4 came without having been begun; it is unknown"
    ):
        buffer.finish(ready(4))
    buffer.begin([6, 3], 2)
    buffer.begin([2], 4)
    assert (
        str(buffer)
        == "0 of 1 groups finished; 3 in flight, the oldest being prompt 3, begun under version 2"
    )


def test_ledger_in_a_file_says_which_prompts_remain(tmp_path):
    buffer = RolloutBuffer(2, None)
    buffer.begin(range(6), 0)
    for ordinal in (0, 3, 2, 5):
        buffer.finish(ready(ordinal))
    assert ordinals(buffer.take(0)) == [0, 2]
    (tmp_path / "ledger.msgpack").write_bytes(buffer.ledger().encode())
    ledger = Ledger.load(tmp_path)
    assert (ledger.consumed_below, ledger.consumed_beyond) == (1, [2])
    assert sorted(group.ordinal for group in ledger.groups) == [3, 5]
    again = RolloutBuffer(2, None, ledger)
    assert ordinals(again.take(1)) == [3, 5]
    with pytest.raises(RuntimeError, match="trained on"):
        again.begin([2], 1)


def test_broken_ledger_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(RuntimeError, match="ledger.msgpack: no ledger of a run"):
        Ledger.load(tmp_path)
    (tmp_path / "ledger.msgpack").write_bytes(b"\x01")
    with pytest.raises(RuntimeError, match="ledger.msgpack: no ledger of a run"):
        Ledger.load(tmp_path)


def test_buffer_reports_dropped_groups_once():
    buffer = RolloutBuffer(2, None)
    buffer.begin(range(9), 0)
    for ordinal in (4, 1, 0, 7, 2, 3, 5):
        buffer.finish(ready(ordinal, 0, dropped=ordinal in (1, 2, 4, 7)))
    assert str(buffer).startswith("3 of 2 groups finished, and 4 dropped; 2 in flight")
    assert ordinals(buffer.take(0)) == [0, 3]
    assert ordinals(buffer.report_dropped()) == [1, 2]
    assert buffer.report_dropped() == []
    with pytest.raises(RuntimeError, match="prompt 4 was begun a second time; it is dropped"):
        buffer.begin([4], 0)
    ledger = buffer.ledger()
    assert (ledger.consumed_below, ledger.consumed_beyond, ledger.dropped) == (5, [7], [1, 2, 4, 7])
    assert ledger.trained() == {0, 3}
    assert ledger.reported_drops() == {1, 2}
    assert ordinals(ledger.untold) == [4, 7]
    again = RolloutBuffer(2, None, msgspec.msgpack.decode(ledger.encode(), type=Ledger))
    again.begin([6, 8], 0)
    again.finish(ready(8))
    assert ordinals(again.take(1)) == [5, 8] and ordinals(again.report_dropped()) == [4, 7]


def test_late_drop_is_reported_after_a_resume():
    buffer = RolloutBuffer(1, None)
    buffer.begin(range(4), 0)
    buffer.finish(ready(3))
    assert ordinals(buffer.take(0)) == [3]
    buffer.finish(ready(2, dropped=True))
    again = RolloutBuffer(1, None, buffer.ledger())
    filled(again, (0, 0))
    assert ordinals(again.take(1)) == [0] and ordinals(again.report_dropped()) == [2]


def test_finished_groups_are_judged_again_after_a_resume():
    ledger = Ledger(groups=[ready(0), ready(1)])
    buffer = RolloutBuffer(
        1, None, ledger, lambda group: msgspec.structs.replace(group, dropped=group.ordinal == 0)
    )
    assert ordinals(buffer.take(0)) == [1] and ordinals(buffer.report_dropped()) == [0]


def test_buffer_gives_up_after_too_many_drops():
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
    consumed = Consumed()
    expected = set()
    for ordinal in order:
        consumed.add(ordinal)
        expected.add(ordinal)
        assert [n in consumed for n in range(13)] == [n in expected for n in range(13)]
    assert consumed.below == 12 and not consumed.beyond


@pytest.mark.parametrize(
    "capacity, staleness, bound",
    [(1, None, 1), (None, None, None), (4, 2, 2), (None, 3, 3), (0, 8, 0)],
)
def test_run_ahead_is_bounded_by_staleness(capacity, staleness, bound):
    assert run_ahead(AsyncConfig(capacity=capacity, max_staleness=staleness)) == bound


def test_admission_by_depth_and_room():
    admission = Admission(prompts_per_step=4, run_ahead=1, max_in_flight=3, end=100)
    admission.generate_from(0, [])
    assert admission.begin(-1) == [], "the engines have no weights yet"
    assert admission.begin(0) == [0, 1, 2]
    for ordinal in (0, 1, 2):
        admission.finish(ordinal)
    assert admission.begin(0) == [3, 4, 5]
    for ordinal in (3, 4, 5):
        admission.finish(ordinal)
    assert admission.begin(0) == [6, 7]
    admission.finish(6)
    assert admission.begin(0) == [] and admission.held_back(0) and not admission.held_back(1)
    admission.again([2])
    assert admission.begin(0) == [2], "a rejected prompt makes room for itself, and goes first"
    assert admission.begin(1) == [8]


def test_resumed_admission_skips_finished_prompts():
    admission = Admission(prompts_per_step=2, run_ahead=None, max_in_flight=10, end=9)
    admission.generate_from(3, [3, 5, 7])
    assert admission.begun == 6
    assert admission.begin(1) == [4, 6, 8] and admission.exhausted


def test_dropped_prompt_is_replaced_at_once():
    admission = Admission(prompts_per_step=2, run_ahead=0, max_in_flight=2, end=2)
    admission.generate_from(0, [])
    assert admission.begin(0) == [0, 1] and admission.exhausted
    admission.finish(0, dropped=True)
    assert not admission.exhausted and admission.begin(0) == [2]
    admission.finish(1)
    admission.finish(2, dropped=True)
    assert admission.begin(0) == [3]
    again = Admission(prompts_per_step=2, run_ahead=0, max_in_flight=2, end=4)
    again.generate_from(2, [3], dropped=[0, 3])
    assert again.begun == 1 and again.begin(0) == [2], "of 0, 1 and 3 two were dropped"
    assert again.begin(1) == [4], "there is one more place"
    again.finish(2)
    assert again.begin(1) == [5] and again.exhausted
