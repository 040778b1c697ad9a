"""The generator's answers to `megarl engines`, and engines that have left.

The engines are fakes; tests/cpu has a real run.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace

import pytest
from fake_fleets import Engine, numbers, of, run

from megarl.executors import engine_calls
from megarl.executors.engine_calls import FleetCalls
from megarl.generator.client import EngineUnreachable
from megarl.generator.engine_state import EngineState
from megarl.launch.engines import EngineKeeper
from megarl.launch.joining import Membership
from megarl.launch.processes import ProcessGroup, ProcessSpec
from megarl.launch.running import RunningRun
from megarl.messaging.messages import FleetAnswer, FleetCall
from megarl.messaging.rendezvous import Departures, note_departure
from megarl.messaging.waiting import Background


class Link:
    """Hands out calls, and records the answers."""

    def __init__(self):
        self.calls = asyncio.Queue()
        self.answers = asyncio.Queue()

    async def arrival(self, kind, timeout_s, awaited):
        return "engines.1", await self.calls.get()

    def send(self, peer, message):
        self.answers.put_nowait(message)

    async def ask(self, call: FleetCall) -> FleetAnswer:
        self.calls.put_nowait(call)
        return await self.answers.get()


def with_calls(body, tmp_path, monkeypatch, on_failure="restart", fixed="", silence_s=60.0) -> None:
    monkeypatch.setattr(engine_calls, "engine_client", lambda plan, rendezvous, url: Engine(url))
    monkeypatch.setattr(engine_calls, "LOOK_S", 0.01)
    timeouts = SimpleNamespace(weights_s=1.0, silence_s=silence_s)
    settings = SimpleNamespace(on_failure=on_failure)
    plan = SimpleNamespace(config=SimpleNamespace(timeouts=timeouts, generator=settings))

    async def within():
        fleet, _ = of(2)
        fleet.elastic = on_failure != "fail"
        background = Background()
        link = Link()
        calls = FleetCalls(
            plan,
            SimpleNamespace(key_file=str(tmp_path / "key")),
            link,
            fleet,
            background,
            lambda: fixed,
        )
        background.start(calls.serve(), "calls")
        background.start(calls.watch(), "watch")
        await background.beside(body(fleet, link))
        await background.close()

    run(within)


def test_engines_are_added_listed_and_removed_by_calls(tmp_path, monkeypatch):
    async def body(fleet, link):
        joined = await link.ask(FleetCall("join", urls=["http://a", "http://b"]))
        assert [engine.number for engine in joined.engines] == [2, 3]
        absent = await link.ask(FleetCall("leave", engines=[1, 4]))
        assert absent.error == "engine 4: there is none; there are 0, 1, 2, 3"
        assert (await link.ask(FleetCall("leave", engines=[0, 1]))).error.startswith(
            "one engine at least must go on serving"
        )
        assert [
            engine.number for engine in (await link.ask(FleetCall("leave", count=1))).engines
        ] == [3], "the newest"
        assert (await link.ask(FleetCall("leave", engines=[0]))).error == ""
        rows = {
            engine.number: (engine.serving, engine.gone, engine.text)
            for engine in (await link.ask(FleetCall("list"))).engines
        }
        assert (
            rows[0] == (False, True, "has left: by command")
            and rows[2][2] == "joins: it is starting"
            and rows[1][0]
        )
        departures = Departures(tmp_path)
        while not {"engine.0", "engine.3.1"} <= {
            name for name in ("engine.0", "engine.1", "engine.3.1") if name in departures
        }:
            departures = Departures(tmp_path)
            await asyncio.sleep(0.01)
        assert "engine.1" not in departures and "trainer.0" not in departures

    with_calls(body, tmp_path, monkeypatch)


def test_two_calls_at_once_do_not_remove_all_engines(tmp_path, monkeypatch):
    async def body(fleet, link):
        for engine in (0, 1):
            link.calls.put_nowait(FleetCall("leave", engines=[engine]))
        answers = [await link.answers.get() for _ in range(2)]
        assert sorted(answer.error for answer in answers) == [
            "",
            "one engine at least must go on serving, and engine 1 would be gone",
        ]
        assert numbers(fleet.serving) == [1]

    with_calls(body, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "on_failure, fixed, reason",
    [("fail", "", "generator.on_failure=fail"), ("restart", "weights go by gloo", "by gloo")],
)
def test_a_fleet_that_cannot_change_says_so(on_failure, fixed, reason, tmp_path, monkeypatch):
    async def body(fleet, link):
        for call in (FleetCall("join", urls=["http://a"]), FleetCall("leave", engines=[1])):
            assert reason in (await link.ask(call)).error
        assert not (await link.ask(FleetCall("list"))).error
        assert numbers(fleet.members) == [0, 1]

    with_calls(body, tmp_path, monkeypatch, on_failure, fixed)


@pytest.mark.parametrize(
    "on_failure, silence_s, reason",
    [("restart", 0.1, "no sign of life"), ("drop", 60.0, "it was lost")],
)
def test_a_lost_engine_that_nobody_starts_again_has_left(
    on_failure, silence_s, reason, tmp_path, monkeypatch
):
    """Its launcher is silent, or drops it.

    But a lost engine of the run's own launcher stays lost, until the launcher ends the run.
    """

    async def body(fleet, link):
        await link.ask(FleetCall("join", urls=["http://a"]))
        joined = fleet.engines[2]
        fleet.come_back(joined)
        fleet.take_back([joined], 4)
        for number in (0, 2):
            fleet.lose(EngineUnreachable(fleet.engines[number].url, "gone"))
        await fleet.pulse.until(lambda: joined.state is EngineState.LEFT)
        assert reason in joined.reason
        assert numbers(fleet.down) == [0]

    with_calls(body, tmp_path, monkeypatch, on_failure, silence_s=silence_s)


def test_launchers_end_an_engine_that_has_left_for_good(tmp_path, capsys):
    with ProcessGroup(tmp_path) as group:
        keeper = EngineKeeper(group, "restart", 3, 60, 60, Departures(tmp_path))
        for name in ("engine.1", "engine.1.1", "engine.10"):
            group.start(ProcessSpec(name, ["sleep", "60"]))
        assert not keeper.names, "the death of any would end the run"
        note_departure(tmp_path, "engine.1")
        keeper._departures = Departures(tmp_path)
        assert keeper.names == {"engine.1", "engine.1.1"}
        keeper.poll()
        assert (
            group.names == {"engine.10"}
            and "engine.1.1 has left the run, and is ended" in capsys.readouterr().out
        )


def test_joined_engines_outlast_the_generator_of_an_ending_run(tmp_path):
    """The run's last launcher may take longer than the generator: it saves, ends processes, and
    writes the summary.
    """
    ending, silent = (
        RunningRun("run", tmp_path, rendezvous=SimpleNamespace()),
        SimpleNamespace(drain=lambda kind: []),
    )

    def membership(leave_s: float) -> Membership:
        result = Membership(ending, silent, [1], 0.0, leave_s)
        result._beat_at = math.inf
        result._answered_at = time.monotonic() - 1  # it asks nothing, and hears nothing
        return result

    with pytest.raises(RuntimeError, match="no sign of life"):
        membership(60.0).is_over(leaving=False)
    for mark in ("stop", "finished.1", "failure"):
        (tmp_path / mark).touch()
        assert not membership(60.0).is_over(leaving=False)
        with pytest.raises(RuntimeError, match="no sign of life"):
            membership(0.0).is_over(leaving=False)
        (tmp_path / mark).unlink()
