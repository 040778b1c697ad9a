"""The rollout stream and its background tasks, with fake rollouts and a fake channel.

(tests/cpu has real engines.)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from loops import DEADLINE_S, settle
from msgspec.structs import replace

from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.messaging.messages import GenerateFrom, GroupReady
from megarl.messaging.waiting import Background, Pulse
from megarl.rollouts.channel import summary_of
from megarl.rollouts.stream import Admission, RolloutStream


@dataclass
class FakeChannel:
    """Records what is sent, and rejects what is put into `again`."""

    start: GenerateFrom = GenerateFrom(0, [])
    started: list = field(default_factory=list)
    ready: list[GroupReady] = field(default_factory=list)
    again: asyncio.Queue = field(default_factory=asyncio.Queue)

    async def first(self, timeout_s):
        return self.start

    async def rejected(self):
        return await self.again.get()

    def begun(self, ordinals, version):
        self.started.append((version, ordinals))

    def finished(self, group):
        self.ready.append(group)


class FakeRollouts:
    """Groups that finish when a test says so."""

    def __init__(self):
        self.running: dict[int, asyncio.Future] = {}

    async def __call__(self, ordinal: int) -> Group:
        self.running[ordinal] = asyncio.get_running_loop().create_future()
        versions = await self.running[ordinal]
        samples = [Sample([1], [0.0], [version], "", 0.0, "stop") for version in versions]
        return Group(Prompt(ordinal, [1], "", ""), samples)

    def finish(self, ordinal: int, *versions: int) -> None:
        self.running.pop(ordinal).set_result(versions or [0])


def with_stream(
    body,
    run_ahead=1,
    max_in_flight=3,
    start=GenerateFrom(0, []),
    judge=lambda group: group,
    further=None,
    max_staleness=None,
):
    async def run():
        background = Background()
        channel = FakeChannel(start)
        rollouts = FakeRollouts()
        pulse = Pulse()
        admission = Admission(
            prompts_per_step=2, run_ahead=run_ahead, max_in_flight=max_in_flight, end=12
        )
        stream = RolloutStream(
            admission,
            rollouts,
            channel,
            background,
            pulse,
            judge,
            further=further,
            max_staleness=max_staleness,
        )

        async def main():
            background.start(stream.run(DEADLINE_S), "rollout stream")
            await settle()
            await body(stream, channel, rollouts)

        try:
            async with asyncio.timeout(DEADLINE_S):
                await background.beside(main())
        finally:
            await background.close()

    asyncio.run(run())


def test_prompts_begin_as_others_finish_and_as_weights_come():
    async def body(stream, channel, rollouts):
        assert channel.started == [], "no weights yet"
        stream.put_version(0)
        await settle()
        assert channel.started == [(0, [0, 1, 2])]
        rollouts.finish(1)
        await settle()
        assert channel.started[1:] == [(0, [3])]
        assert [group.ordinal for group in channel.ready] == [1]
        rollouts.finish(0)
        await settle()
        assert len(channel.started) == 2 and set(rollouts.running) == {2, 3}, (
            "one step ahead, and no further"
        )
        stream.put_version(1)
        await settle()
        assert channel.started[2:] == [(1, [4])]
        channel.again.put_nowait([0])
        rollouts.finish(2)
        await settle()
        assert channel.started[3:] == [(1, [0])], "a rejected prompt goes first"
        assert stream.finished == 2
        assert stream.sent == 3

    with_stream(body)


def test_a_group_is_as_old_as_its_oldest_token():
    async def body(stream, channel, rollouts):
        stream.put_version(3)
        await settle()
        rollouts.finish(0, 5, 4, 6)
        await settle()
        assert channel.ready[0].oldest == 4
        assert summary_of(channel.ready[0]).ordinal == 0

    with_stream(body)


def test_draining_lets_what_runs_finish_and_begins_nothing():
    async def body(stream, channel, rollouts):
        stream.put_version(0)
        await settle()
        drained = asyncio.create_task(stream.drain())
        for ordinal in (0, 1, 2):
            await settle()
            assert not drained.done()
            rollouts.finish(ordinal)
        await drained
        assert channel.started == [(0, [0, 1, 2])]
        stream.put_version(1)
        await settle()
        assert channel.started[1:] == [(1, [3, 4, 5])]

    with_stream(body)


def test_idle_places_count_only_while_they_wait_for_weights():
    async def body(stream, channel, rollouts):
        stream.put_version(0)
        await settle()
        assert stream._share_idle() == 0, "all three places are taken"
        rollouts.finish(0)
        rollouts.finish(1)
        await settle()
        assert stream._share_idle() == pytest.approx(1 / 3), (
            "two run, and no more may begin under version 0"
        )
        stream.stand_still()
        assert stream._share_idle() == 1
        stream.put_version(5)
        await settle()
        assert stream._share_idle() == 0
        for ordinal in (2, 3, 4, *range(5, 12)):
            rollouts.finish(ordinal)
            await settle()
        assert stream.admission.exhausted and stream._share_idle() == 0, (
            "there is nothing left to begin"
        )

    with_stream(body)


def test_a_resumed_stream_leaves_out_what_the_ledger_has():
    async def body(stream, channel, rollouts):
        stream.put_version(2)
        await settle()
        assert channel.started == [(2, [4, 6, 7])]
        assert stream.finished == 5, "4 are trained on, and 5 is held by the trainer"

    with_stream(body, start=GenerateFrom(4, [5]))


def test_dropped_prompt_is_sent_and_replaced_by_the_next():
    """Under the same weights."""

    async def body(stream, channel, rollouts):
        stream.put_version(0)
        await settle()
        assert channel.started == [(0, [0, 1])]
        rollouts.finish(0)
        rollouts.finish(1)
        await settle()
        assert [(group.ordinal, group.dropped) for group in channel.ready] == [
            (0, False),
            (1, True),
        ]
        assert channel.started[1:] == [(0, [2])]
        assert (stream.finished, stream.sent) == (1, 2)
        drained = asyncio.create_task(stream.drain())
        rollouts.finish(2)
        await settle()
        assert drained.done()
        assert stream.finished == 2
        assert stream.held_back

    with_stream(body, run_ahead=0, judge=lambda group: replace(group, dropped=group.ordinal == 1))


def test_error_of_a_rollout_ends_the_running_wait():
    async def body(stream, channel, rollouts):
        stream.put_version(0)
        await settle()
        rollouts.running[1].set_exception(ValueError("the verifier is gone"))
        await asyncio.sleep(DEADLINE_S)

    with pytest.raises(ValueError, match="the verifier is gone") as failure:
        with_stream(body)
    assert failure.value.__notes__ == ["in the background task: rollout of prompt 1"]


async def test_error_without_a_waiter_is_raised_by_the_next_wait():
    async def dies():
        raise ValueError("first")

    async def ends(ended):
        try:
            await asyncio.sleep(DEADLINE_S)
        finally:
            ended.set()

    background = Background()
    second_ended = asyncio.Event()
    background.start(dies(), "a task")
    background.start(ends(second_ended), "another")
    await settle()
    with pytest.raises(ValueError, match="first"):
        await background.beside(asyncio.sleep(DEADLINE_S))
    assert second_ended.is_set(), "the other tasks are ended"


async def until_not_idle(group, is_idle, pulse):
    """Stands in for FurtherSamples."""
    await pulse.until(lambda: not is_idle())
    return group


def test_further_samples_end_when_an_update_begins():
    """They are sampled while prompts need newer weights, and the trainer has its batch."""

    async def body(stream, channel, rollouts):
        stream.put_version(0)
        await settle()
        for ordinal in (0, 1):  # the first batch is sent at once
            rollouts.finish(ordinal)
            await settle()
        assert [group.ordinal for group in channel.ready] == [0, 1]
        rollouts.finish(2)
        await settle()
        assert len(channel.ready) == 2 and stream.admission.in_flight == 2, "2 gets more samples"
        stream.stand_still()
        await settle()
        assert [group.ordinal for group in channel.ready] == [0, 1, 2]
        stream.put_version(1)
        await settle()
        rollouts.finish(3)
        await settle()
        assert [group.ordinal for group in channel.ready] == [0, 1, 2, 3]

    with_stream(body, further=until_not_idle)


def test_prompt_that_the_trainer_waits_for_is_sent_at_once():
    """It is due: it would be too old for the batch after the next."""

    async def body(stream, channel, rollouts):
        stream.put_version(0)
        await settle()
        for ordinal in (0, 1):
            rollouts.finish(ordinal)
            await settle()
        stream.put_version(1)
        await settle()
        for ordinal in (3, 4):
            rollouts.finish(ordinal)
            await settle()
        assert [group.ordinal for group in channel.ready] == [0, 1, 3, 4]
        rollouts.finish(2)
        await settle()
        assert [group.ordinal for group in channel.ready] == [0, 1, 3, 4, 2]

    with_stream(body, max_in_flight=6, further=until_not_idle, max_staleness=1)
