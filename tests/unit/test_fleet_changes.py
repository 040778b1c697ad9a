"""Engines that join and leave a fleet, as its client and `megarl engines` see it. The engines are fakes; a real run is in tests/cpu."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loops import DEADLINE_S, settle
from small_maps import tiny_map

from megarl.config.schema import RunConfig
from megarl.executors import fleet_calls
from megarl.executors.fleet_calls import FleetCalls
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import Completion, EngineError, Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.returns import watch_returns
from megarl.launch.engines import EngineKeeper
from megarl.launch.processes import ProcessGroup, ProcessSpec
from megarl.messaging.background import Background
from megarl.messaging.departures import Departures, note_departure
from megarl.messaging.messages import FleetAnswer, FleetCall, WeightsGrant
from megarl.reshard.kinds import LayoutError
from megarl.reshard.relays import INSIDE_HOSTS, RelayRule, relayed
from megarl.rollouts.admission import Admission
from megarl.weight_sync import sessions
from megarl.weight_sync.sender import WeightsSender
from megarl.weight_sync.sessions import EngineSessions


@dataclass
class Engine:
    """Answers by three tokens fewer than it is asked for, cut by an abort, if it gets one; on `finish` by all of them."""

    url: str
    hung: bool = False
    is_fresh: bool = True
    seen: list[tuple[int, int | None]] = field(default_factory=list)  # lengths of inputs, and versions
    closed: bool = False
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    finish: asyncio.Event = field(default_factory=asyncio.Event)

    async def complete(self, inputs, samplings, version):
        self.seen.append((len(inputs[0]), version))
        waits = [asyncio.ensure_future(event.wait()) for event in (self.cut, self.finish)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.closed:
            raise EngineUnreachable(self.url, "closed")
        reason, fewer = ("length", 0) if self.finish.is_set() else ("abort", 3)
        self.cut.clear()
        counts = [sampling.max_tokens - fewer for sampling in samplings]
        return [Completion([7] * count, [-0.5] * count, [version] * count, reason) for count in counts]

    async def abort_all(self, timeout_s):
        if self.hung:
            await asyncio.sleep(timeout_s * 2)
        self.cut.set()

    async def fresh(self):
        return self.is_fresh

    async def close(self):
        self.closed = True
        self.cut.set()


def of(count: int, mode: str = "in_flight") -> tuple[Fleet, list[Engine]]:
    engines = [Engine(f"http://engine-{number}") for number in range(count)]
    fleet = Fleet(engines, mode, elastic=True)
    fleet.release(4)
    return fleet, engines


def run(body) -> None:
    async def within():
        async with asyncio.timeout(DEADLINE_S):
            await body()

    asyncio.run(within())


def test_an_engine_that_joins_serves_when_it_has_started_and_has_the_weights():
    async def body():
        fleet, _ = of(1)
        added = Engine("http://new", is_fresh=False)
        assert fleet.add(added) == 1 and fleet.size == 1 and fleet.describe(1) == "joins: it is starting"
        watching = asyncio.create_task(watch_returns(fleet, Path("logs"), restarted=False, startup_timeout_s=10))
        await settle()
        assert fleet.members == [0]
        added.is_fresh = True
        await fleet.pulse.until(lambda: fleet.members == [0, 1])
        assert fleet.serving == {0} and fleet.describe(1) == "joins, waits for weights"
        fleet.take_back([1], 4)
        assert fleet.serving == {0, 1} and fleet.size == 2
        watching.cancel()

    run(body)


@pytest.mark.parametrize("mode", ["block", "in_flight", "retract", "resume", "abort"])
def test_what_an_engine_that_leaves_had_begun_goes_on_at_others_from_the_tokens_it_had(mode):
    async def body():
        fleet, (first, second) = of(2, mode)
        request = asyncio.create_task(fleet.generate([1, 2], Sampling(max_tokens=10), 2))
        await settle()
        assert (first.seen, second.seen) == ([(2, 4)], [])
        await fleet.leave(0, "by command", 5)
        assert first.closed and fleet.gone == {0: "by command"} and fleet.serving == {1} and fleet.size == 1
        await settle()
        assert second.seen == [(2 + 7, 4)]
        second.finish.set()
        assert [(len(completion.token_ids), completion.finish_reason) for completion in await request] == [(10, "length")] * 2
        assert fleet.add(Engine("http://engine-0")) == 2, "no number is used twice, though the address is"
        fleet.lose(EngineUnreachable("http://engine-0", "gone"))
        assert fleet.lost.keys() == {2} and fleet.describe(0) == "has left: by command"

    run(body)


@pytest.mark.parametrize("mode, from_token", [("block", 1), ("abort", 1), ("in_flight", 8), ("resume", 8)])
def test_a_response_keeps_to_one_version_where_the_mode_says_so(mode, from_token):
    """An engine leaves while an update holds requests: with block and abort what it had is of the version before."""

    async def body():
        fleet, (_, second) = of(2, mode)
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=10), 1))
        await settle()
        leaving = asyncio.create_task(fleet.leave(0, "by command", 5))
        await asyncio.wait([leaving], timeout=0)
        fleet._held = True
        await leaving
        fleet.release(5)
        await settle()
        assert second.seen == [(from_token, 5)]
        second.finish.set()
        versions = (await request)[0].versions.tolist()
        assert versions == [5] * 10 if from_token == 1 else [4] * 7 + [5] * 3

    run(body)


def test_an_engine_leaves_only_when_the_update_that_writes_to_it_is_over():
    async def body():
        fleet, (first, _) = of(2)
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=10), 1))
        await settle()
        await fleet.hold(1)
        fleet.updating = {0, 1}
        leaving = asyncio.create_task(fleet.leave(0, "by command", 5))
        await settle()
        assert not first.cut.is_set() and not leaving.done() and fleet.members == [1]
        fleet.take_back([0, 1], 5)
        fleet.updating = set()
        fleet.release(5)
        await leaving
        assert fleet.serving == {1}
        request.cancel()

    run(body)


def test_an_engine_that_hangs_leaves_at_the_deadline_and_its_requests_begin_again():
    async def body():
        fleet, (first, second) = of(2)
        first.hung = True
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=10), 1))
        await settle()
        await fleet.leave(0, "by command", 0.1)
        second.finish.set()
        assert len((await request)[0].token_ids) == 10 and second.seen == [(1, 4)] and not fleet.lost

    run(body)


def test_an_abort_by_an_engine_that_stays_is_an_error():
    async def body():
        fleet, (_, second) = of(2)
        requests = [asyncio.create_task(fleet.generate([1], Sampling(max_tokens=10), 1)) for _ in range(2)]
        await settle()
        second.cut.set()
        with pytest.raises(EngineError, match="engine-1 aborted a request that nobody told it to"):
            await requests[1]
        requests[0].cancel()

    run(body)


def test_places_for_prompts_follow_the_number_of_engines():
    admission = Admission(prompts_per_step=4, run_ahead=3, max_in_flight=2, end=100)
    admission.generate_from(0, [])
    assert admission.begin(0) == [0, 1] and admission.begin(0) == []
    admission.max_in_flight = 4
    assert admission.begin(0) == [2, 3] and admission.empty_share == 0
    admission.max_in_flight = 1
    admission.finish()
    assert admission.begin(0) == [] and admission.empty_share == 0


class Link:
    """Hands out calls, and notes the answers."""

    def __init__(self):
        self.calls, self.answers = asyncio.Queue(), asyncio.Queue()

    async def arrival(self, kind, timeout_s, awaited):
        return "engines.1", await self.calls.get()

    def send(self, peer, message):
        self.answers.put_nowait(message)

    async def ask(self, call: FleetCall) -> FleetAnswer:
        self.calls.put_nowait(call)
        return await self.answers.get()


def with_calls(body, tmp_path, monkeypatch, on_failure="restart", fixed="", silence_s=60.0) -> None:
    monkeypatch.setattr(fleet_calls, "engine_client", lambda plan, rendezvous, url: Engine(url))
    monkeypatch.setattr(fleet_calls, "LOOK_S", 0.01)
    timeouts, generator = SimpleNamespace(weights_s=1.0, silence_s=silence_s), SimpleNamespace(on_failure=on_failure)
    plan = SimpleNamespace(config=SimpleNamespace(timeouts=timeouts, generator=generator))

    async def within():
        fleet, _ = of(2)
        fleet.elastic = on_failure != "fail"
        background, link = Background(), Link()
        calls = FleetCalls(plan, SimpleNamespace(key_file=str(tmp_path / "key")), link, fleet, background, lambda: fixed)
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
        assert (await link.ask(FleetCall("leave", engines=[0, 1]))).error.startswith("one engine at least must go on serving")
        assert [engine.number for engine in (await link.ask(FleetCall("leave", count=1))).engines] == [3], "the newest"
        assert (await link.ask(FleetCall("leave", engines=[0]))).error == ""
        told = {engine.number: (engine.serving, engine.gone, engine.text) for engine in (await link.ask(FleetCall("list"))).engines}
        assert told[0] == (False, True, "has left: by command") and told[2][2] == "joins: it is starting" and told[1][0]
        departures = Departures(tmp_path)
        while not {"engine.0", "engine.3.1"} <= {name for name in ("engine.0", "engine.1", "engine.3.1") if name in departures}:
            departures = Departures(tmp_path)
            await asyncio.sleep(0.01)
        assert "engine.1" not in departures and "trainer.0" not in departures

    with_calls(body, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "on_failure, fixed, why", [("fail", "", "generator.on_failure=fail"), ("restart", "weights go by gloo", "by gloo")]
)
def test_a_fleet_that_cannot_change_says_so(on_failure, fixed, why, tmp_path, monkeypatch):
    async def body(fleet, link):
        for call in (FleetCall("join", urls=["http://a"]), FleetCall("leave", engines=[1])):
            assert why in (await link.ask(call)).error
        assert not (await link.ask(FleetCall("list"))).error and fleet.members == [0, 1]

    with_calls(body, tmp_path, monkeypatch, on_failure, fixed)


@pytest.mark.parametrize("on_failure, silence_s, why", [("restart", 0.1, "no sign of life"), ("drop", 60.0, "it was lost")])
def test_a_lost_engine_that_nobody_starts_again_has_left(on_failure, silence_s, why, tmp_path, monkeypatch):
    """Its launcher is silent, or drops it. One of the run's own launcher is lost until that ends the run."""

    async def body(fleet, link):
        await link.ask(FleetCall("join", urls=["http://a"]))
        fleet.come_back(2)
        fleet.take_back([2], 4)
        for number in (0, 2):
            fleet.lose(EngineUnreachable(fleet.engines[number].url, "gone"))
        await fleet.pulse.until(lambda: bool(fleet.gone))
        assert fleet.gone.keys() == {2} and why in fleet.gone[2] and fleet.lost.keys() == {0}

    with_calls(body, tmp_path, monkeypatch, on_failure, silence_s=silence_s)


def test_launchers_end_an_engine_that_has_left_and_do_not_start_it_again(tmp_path, capsys):
    with ProcessGroup(tmp_path) as group:
        keeper = EngineKeeper(group, "restart", 3, 60, 60, Departures(tmp_path))
        for name in ("engine.1", "engine.1.1", "engine.10"):
            group.start(ProcessSpec(name, ["sleep", "60"]))
        assert not keeper.names, "the death of any would end the run"
        note_departure(tmp_path, "engine.1")
        keeper._departures = Departures(tmp_path)
        assert keeper.names == {"engine.1", "engine.1.1"}
        keeper.poll()
        assert group.names == {"engine.10"} and "engine.1.1 has left the run, and is ended" in capsys.readouterr().out


def test_trainer_ranks_make_a_map_with_relays_from_the_whole_one_each_time(monkeypatch):
    """One engine has left and another joined: as many as before, whose memory is opened anew, with or without relays."""
    whole, rule = tiny_map(tp=1, pp=1, dp=1, engines=4, generator_tp=1), RelayRule(INSIDE_HOSTS, 2)
    written, forwarding = relayed(whole, rule)
    assert forwarding.relays
    with pytest.raises(ValueError, match="not spread alike"):
        relayed(written, rule)
    plan: Any = SimpleNamespace(config=RunConfig(), generator_topology=SimpleNamespace(engines=4))
    link: Any = None
    executor: Any = SimpleNamespace(rank=0, layout=whole.source)
    sender: Any = WeightsSender(plan, link)
    sender._transport, sender._whole = SimpleNamespace(close=lambda: None, connect=lambda endpoints: None), whole
    sender._use(whole, 0)
    ways = [(rule, written), (rule, written), (None, whole)]
    changes = [sender._connect(executor, WeightsGrant(1, [], 4, way, map.plan_hash)) for way, map in ways]
    assert changes == [True, False, True]


@pytest.mark.parametrize("ways, left", [("mooncake", {2}), ("gloo", {1, 2, 3})])
def test_an_engine_that_cannot_join_must_leave_and_others_join_all_the_same(ways, left, monkeypatch):
    """They are tried together first. Engine 2 is laid out otherwise; engine 3 is lost once more while it is tried."""
    lost: list[str] = []

    class Trial:
        def __init__(self, workers, version):
            self.engines = workers

        async def open(self, serving):
            assert serving == -1
            if [engine.url for engine in self.engines] == ["http://3"] and ways == "mooncake":
                lost.append("http://3")
                raise EngineUnreachable("http://3", "gone")

        async def cancel(self):
            pass

    async def check(workers, map):
        if any(engine.url == "http://2" for engine in workers):
            raise LayoutError("generator rank 0 has no lm_head")
        return []

    async def opened(*arguments):
        pass

    async def body():
        fleet, _ = of(1)
        for number in (1, 2, 3):
            fleet.add(Engine(f"http://{number}"))
            fleet.come_back(number)
        weights, timeouts = SimpleNamespace(transport="auto"), SimpleNamespace(weights_s=1.0)
        tried: Any = EngineSessions.__new__(EngineSessions)
        tried._plan, tried._opened = SimpleNamespace(config=SimpleNamespace(weights=weights, timeouts=timeouts)), None
        tried.map, tried._check = SimpleNamespace(source=None), check
        tried._workers_for = lambda members, fleet: [fleet.engines[index] for index in members]
        for name, fake in {"WeightUpdate": Trial, "open_engines": opened, "weights_map": lambda *_: None}.items():
            monkeypatch.setattr(sessions, name, fake)
        monkeypatch.setattr(sessions, "transport_pairs", lambda *_: [[ways]])
        await tried._try_joining(fleet, [1, 2, 3], [])
        assert fleet.gone.keys() == left and not fleet.updating and fleet.serving == {0}
        assert "it cannot join: generator rank 0 has no lm_head" in fleet.gone[2]
        if ways == "gloo":
            assert fleet.gone[1] == "it cannot join: weights go by gloo, whose process groups cannot change"
        else:
            assert fleet.returned == {1} and fleet.lost.keys() == {3} and lost

    run(body)
