import asyncio
from contextlib import ExitStack, closing

import pytest

from megarl.base.geometry import Box
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.messaging.messages import WeightsWritten
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import Endpoint, Landing
from megarl.weight_sync.updates import Writes
from megarl.weight_sync.writing import landing_first

NAMES = ["trainer.0", "trainer.1"]
VERSION = 7


@pytest.fixture
def ends():
    """The generator's end, and the trainer ranks' ends."""
    key = RunKey.generate()
    with ExitStack() as stack:
        hub = stack.enter_context(closing(Hub("generator.0", key)))
        yield hub, [stack.enter_context(closing(Peer(name, key, hub.address))) for name in NAMES]


def part(continues: bool = False, version: int = VERSION, error: str = "") -> WeightsWritten:
    return WeightsWritten(version, 10, 0.1, error=error, more=continues)


def test_landing_parts_arrive_before_all_writes_end(ends):
    """A rank without landing boxes reports only the end."""
    hub, (first, second) = ends

    async def take() -> list[tuple[str, bool]]:
        writes = Writes(hub, NAMES, VERSION, 5)
        first.send(part(continues=True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writes.landed(), 0.2)
        second.send(part())
        await writes.landed()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writes.done(), 0.2)
        first.send(part())
        await writes.done()
        return [(name, message.more) for name, message in writes.parts]

    assert asyncio.run(take()) == [("trainer.0", True), ("trainer.1", False), ("trainer.0", False)]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (
            [part(continues=True), part(error="no route")],
            "trainer.0 could not write weights version 7: no route",
        ),
        (
            [part(), part()],
            "waited for trainer.1 to write weights version 7, but trainer.0 has written version 7",
        ),
        (
            [part(version=8)],
            "waited for trainer.0, trainer.1 to write weights version 7, but trainer.0 has "
            "written version 8",
        ),
    ],
    ids=["that fails after the first part", "that has finished before", "that is ahead"],
)
def test_a_rank(ends, messages, error):
    hub, (first, _) = ends
    for message in messages:
        first.send(message)
    with pytest.raises(RuntimeError, match=error):
        asyncio.run(Writes(hub, NAMES, VERSION, 5).done())


def test_a_rank_that_says_nothing_is_named(ends):
    hub, (first, _) = ends
    first.send(part())
    with pytest.raises(
        TimeoutError, match="generator.0 waited 0 s for trainer.1 to write weights version 7"
    ):
        asyncio.run(Writes(hub, NAMES, VERSION, 0.1).done())


def test_landing_copies_are_written_first():
    """A box lands at its place in its own rank's endpoint, and all keep their order."""

    def copy(rank: int, row: int) -> Copy:
        box = Box((row, 0), (1, 4))
        return Copy(0, "a", box, rank, "w", box, "identity", "float32", 0)

    copies = [copy(rank, row) for row in range(3) for rank in range(2)]
    endpoints = [
        Endpoint(0, "mooncake", "", 0, [], [Landing("w", (start, 0), 0) for start in (2, 1)]),
        Endpoint(1, "mooncake", "", 0, []),
    ]
    landing, direct = landing_first(copies, endpoints)
    assert landing == [copy(0, 1), copy(0, 2)]
    assert direct == [copy(0, 0), copy(1, 0), copy(1, 1), copy(1, 2)]
