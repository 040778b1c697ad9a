"""Engines that join and leave a fleet. The engines are fakes; tests/cpu has a real run."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_fleets import Engine, numbers, of, run
from loops import settle
from small_maps import Discard, tiny_map

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.schema import GeneratorConfig, RunConfig
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import EngineError, Sampling
from megarl.generator.engine_state import EngineState
from megarl.generator.fleet import watch_returns
from megarl.messaging.messages import WeightsGrant
from megarl.models import ModelSpec
from megarl.plan.topologies import engine_groups
from megarl.reshard.forwarding import INSIDE_HOSTS, RelayRule, relayed
from megarl.reshard.layout import LayoutError, generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.rollouts.stream import Admission
from megarl.weight_sync import sessions
from megarl.weight_sync.sender import WeightsSender
from megarl.weight_sync.sessions import EngineSessions
from megarl.weight_sync.transports.choice import Pairs
from megarl.weight_sync.writing import FullUpdates


def test_a_joining_engine_serves_once_it_has_the_weights():
    async def body():
        fleet, _ = of(1)
        added = Engine("http://new", is_fresh=False)
        engine = fleet.add(added)
        assert engine.number == 1
        assert len(fleet.counted) == 1
        assert fleet.describe(engine) == "joins: it is starting"
        watching = asyncio.create_task(
            watch_returns(fleet, "", GeneratorConfig(on_failure="drop", startup_timeout_s=10))
        )
        await settle()
        assert numbers(fleet.members) == [0]
        added.is_fresh = True
        await fleet.pulse.until(lambda: numbers(fleet.members) == [0, 1])
        assert numbers(fleet.serving) == [0]
        assert fleet.describe(engine) == "joins, waits for weights"
        fleet.take_back([engine], 4)
        assert numbers(fleet.serving) == [0, 1]
        assert len(fleet.counted) == 2
        watching.cancel()

    run(body)


@pytest.mark.parametrize("mode", ["block", "in_flight", "retract", "resume", "abort"])
def test_requests_of_a_leaving_engine_continue_elsewhere(mode):
    async def body():
        fleet, (first, second) = of(2, mode)
        request = asyncio.create_task(fleet.generate([1, 2], Sampling(max_tokens=10), 2))
        await settle()
        assert (first.requests, second.requests) == ([(2, 4)], [])
        leaver = fleet.engines[0]
        await fleet.leave(leaver, "by command", 5)
        assert first.closed
        assert leaver.state is EngineState.LEFT
        assert numbers(fleet.serving) == [1]
        assert len(fleet.counted) == 1
        await settle()
        assert second.requests == [(2 + 7, 4)]
        second.finish.set()
        assert [
            (len(completion.token_ids), completion.finish_reason) for completion in await request
        ] == [(10, "length")] * 2
        newcomer = fleet.add(Engine("http://engine-0"))
        assert newcomer.number == 2, "no number is used twice, though the address is"
        fleet.lose(EngineUnreachable("http://engine-0", "gone"))
        assert newcomer.reason == "gone"
        assert fleet.describe(leaver) == "has left: by command"

    run(body)


@pytest.mark.parametrize(
    "mode, from_token", [("block", 1), ("abort", 1), ("in_flight", 8), ("resume", 8)]
)
def test_a_response_keeps_to_one_version_where_the_mode_says_so(mode, from_token):
    """An engine leaves while an update holds requests.

    With block and abort, its tokens are of the previous version.
    """

    async def body():
        fleet, (_, second) = of(2, mode)
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=10), 1))
        await settle()
        leaving = asyncio.create_task(fleet.leave(fleet.engines[0], "by command", 5))
        await asyncio.wait([leaving], timeout=0)
        fleet._is_held = True
        await leaving
        fleet.release(5)
        await settle()
        assert second.requests == [(from_token, 5)]
        second.finish.set()
        versions = (await request)[0].versions.tolist()
        assert versions == [5] * 10 if from_token == 1 else [4] * 7 + [5] * 3

    run(body)


def test_an_engine_leaves_after_the_update_that_writes_to_it():
    async def body():
        fleet, (first, _) = of(2)
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=10), 1))
        await settle()
        await fleet.hold(1)
        fleet.updating = fleet.members
        leaving = asyncio.create_task(fleet.leave(fleet.engines[0], "by command", 5))
        await settle()
        assert not first.cut.is_set() and not leaving.done()
        assert numbers(fleet.members) == [1]
        fleet.take_back(fleet.updating, 5)
        fleet.updating = ()
        fleet.release(5)
        await leaving
        assert numbers(fleet.serving) == [1]
        request.cancel()

    run(body)


def test_a_hanging_engine_leaves_at_the_deadline():
    async def body():
        fleet, (first, second) = of(2)
        first.hung = True
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=10), 1))
        await settle()
        await fleet.leave(fleet.engines[0], "by command", 0.1)
        second.finish.set()
        assert len((await request)[0].token_ids) == 10
        assert second.requests == [(1, 4)]
        assert not fleet.down

    run(body)


def test_an_abort_by_an_engine_that_stays_is_an_error():
    async def body():
        fleet, (_, second) = of(2)
        requests = [
            asyncio.create_task(fleet.generate([1], Sampling(max_tokens=10), 1)) for _ in range(2)
        ]
        await settle()
        second.cut.set()
        with pytest.raises(EngineError, match="engine-1 aborted a request without being asked to"):
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
    admission.finish(0)
    assert admission.begin(0) == [] and admission.empty_share == 0


def test_trainer_ranks_make_relays_from_the_map_without_relays(monkeypatch):
    """One engine has left and another joined: their number is the same, and their memory is opened
    again, with or without relays.
    """
    plain_map = tiny_map(tp=1, pp=1, dp=1, engines=4, generator_tp=1)
    rule = RelayRule(INSIDE_HOSTS, 2)
    written, forwarding = relayed(plain_map, rule)
    assert forwarding.relays
    with pytest.raises(ValueError, match="do not hold equally many replicas"):
        relayed(written, rule)
    plan: Any = SimpleNamespace(
        config=RunConfig(), groups=engine_groups(GeneratorConfig(engines=4)), spec=None
    )
    plan.with_engines = lambda counts: plan
    link: Any = None
    trace = SimpleNamespace(mark=lambda *_, **__: None)
    executor: Any = SimpleNamespace(rank=0, layout=plain_map.source, trace=trace, get_model=dict)
    sender = WeightsSender(plan, link)
    transport = Discard()
    sender._whole_map = plain_map
    updates = FullUpdates(transport, plain_map, 0, plan.config)
    connections = []
    for way, map in [(rule, written), (rule, written), (None, plain_map)]:
        sender._connect(executor, updates, WeightsGrant(1, b"", (4,), way, map.plan_hash))
        connections.append(
            (updates._exchange, Counter(copy.destination_rank for copy in updates.copies))
        )
        assert sum(copy.bytes for copy in updates.copies) == sum(
            copy.bytes for copy in map.copies_from(0)
        )
    # only a different map is proven again
    assert connections[0] == connections[1] and connections[2][0] is not connections[0][0]


def test_successive_maps_share_a_process_group_for_amax(monkeypatch):
    """A new group of all trainer ranks for every change of the fleet would exhaust file
    descriptors.
    """
    process_groups: list[Any] = []

    def new_group(**_: Any) -> Any:
        process_groups.append(torch.distributed.ProcessGroup(0, 2))
        return process_groups[-1]

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    # at tp 2: 64 rows of k and v
    spec = ModelSpec("llama", 2, 192, 384, 4, 2, 64, 100, 64, False, 1e-6, 1e4)
    source, transport = trainer_layout(spec, TrainerTopology(tp=2), "float32"), Discard()

    def map_to(engines: int) -> ReshardMap:
        return ReshardMap.build(
            source,
            generator_layout(spec, GeneratorTopology(engines), "bfloat16", "cpu", "fp8_block"),
        )

    updates = FullUpdates(transport, map_to(1), 0, RunConfig())
    for engines in (2, 1):
        before = updates._exchange
        updates._use(map_to(engines))
        assert (
            updates._exchange is not before
            and updates._exchange._group is process_groups[0]
            and len(process_groups) == 1
        )


@pytest.mark.parametrize("ways, left", [("mooncake", [2]), ("gloo", [1, 2, 3])])
def test_an_engine_that_cannot_join_leaves_and_others_join(ways, left, monkeypatch):
    """First they are tried together.

    Engine 2 has another layout; engine 3 is lost again during the trial.
    """
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

    async def check(workers, map, engines):
        if any(engine.url == "http://2" for engine in workers):
            raise LayoutError("generator rank 0 has no lm_head")
        return []

    async def opened(*arguments):
        pass

    async def body():
        fleet, _ = of(1)
        for number in (1, 2, 3):
            fleet.come_back(fleet.add(Engine(f"http://{number}")))
        weights = SimpleNamespace(transport="auto")
        timeouts = SimpleNamespace(weights_s=1.0)
        tried: Any = EngineSessions.__new__(EngineSessions)
        tried._plan = SimpleNamespace(config=SimpleNamespace(weights=weights, timeouts=timeouts))
        tried._opened = None
        tried.map = SimpleNamespace(source=None)
        tried._check = check
        tried._plan_of = lambda *_: None
        tried._workers_for = lambda members, fleet: [engine.client for engine in members]
        for name, fake in {
            "WeightUpdate": Trial,
            "open_engines": opened,
            "weights_map": lambda *_: None,
        }.items():
            monkeypatch.setattr(sessions, name, fake)
        monkeypatch.setattr(sessions, "transport_pairs", lambda *_: Pairs.of([[ways]]))
        _, first, second, third = fleet.engines
        await tried._try_joining(fleet, [first, second, third], [])
        assert numbers(fleet.engines_in(EngineState.LEFT)) == left
        assert not fleet.updating
        assert numbers(fleet.serving) == [0]
        assert "it cannot join: generator rank 0 has no lm_head" in second.reason
        if ways == "gloo":
            refusal = "it cannot join: weights go by gloo, whose process groups cannot change"
            assert first.reason == refusal
        else:
            assert first.state is EngineState.JOINING
            assert third.state is EngineState.STARTING and lost

    run(body)
