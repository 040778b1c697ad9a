"""Different engines in one run (generator.groups): their map, the engine for each request, and
refused settings.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from fake_fleets import Engine, numbers, run
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import settle
from reshard_cases import RULES, assert_equal, carry_out, cases, check_lists
from reshard_reference import full_tensors, megatron, sglang
from resolving import config, problems_of
from small_maps import LLAMA_405B

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.schema import GeneratorConfig, GroupConfig
from megarl.estimate.estimate import estimate
from megarl.evaluation.scores import evaluation_plan
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.groups import EngineGroup
from megarl.launch.launcher import training_job
from megarl.launch.nodes import place
from megarl.plan.checkpoints import differences
from megarl.plan.resolve import RunPlan, resolve
from megarl.reshard.layout import Layout, generator_layout, side_by_side, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import ProofError, prove_exactly_once
from megarl.reshard.schedule import depth_bytes
from megarl.simulation.run import simulate
from megarl.weight_sync.content import weights_map

pytestmark = pytest.mark.usefixtures("hub_offline")

BIG = (
    "generator.groups.big.engines=2 generator.groups.big.tp=4 "
    "generator.groups.big.quantization=fp8_block"
)
TWO = f"{BIG} generator.groups.small.engines=3"


def two(tmp_path: Path, *overrides: str) -> RunPlan:
    return resolve(config(tmp_path, *TWO.split(), *overrides))


@settings(max_examples=8, deadline=None)
@given(
    case=cases(fp8=True), data=st.data(), joined=st.booleans(), rule=st.sampled_from(sorted(RULES))
)
def test_each_group_gets_what_it_would_get_alone(case, data, joined, rule):
    """Engines in float32 are compared with plain slicing.

    Engines in fp8 are compared with a map to them alone, which test_reshard_fp8.py compares with
    slicing.
    """
    spec, topology, largest, device = case
    fewer = data.draw(
        st.sampled_from([n for n in (1, 2, 4) if largest.tp % n == 0 and n % largest.ep == 0]), "tp"
    )
    plain = dataclasses.replace(
        largest, tp=fewer, dp_attention=1, engines=data.draw(st.integers(1, 2), "engines")
    )
    trainer = trainer_layout(spec, topology, "float32")
    alone = [
        generator_layout(spec, plain, "float32", device),
        generator_layout(spec, largest, "bfloat16", device, RULES[rule]),
    ]
    if data.draw(st.booleans(), "exchanged"):
        alone.reverse()
    map = ReshardMap.build(trainer, side_by_side(alone))
    prove_exactly_once(map)
    hf = full_tensors(spec, torch.float32)
    sources = [megatron(spec, hf, topology, rank, fill=7.0) for rank in range(topology.world_size)]
    result, copies = carry_out(map, sources, joined)
    check_lists(map, copies, joined)
    first = 0
    for layout in alone:
        group_tensors = result[first : first + layout.world_size]
        first += layout.world_size
        assert_equal(
            group_tensors, carry_out(ReshardMap.build(trainer, layout), sources, joined)[0]
        )
        if layout.world_size == plain.world_size and not any(kind.rule for kind in layout.kinds):
            assert_equal(
                group_tensors,
                [
                    sglang(spec, hf, plain, rank % plain.tp, device)
                    for rank in range(plain.world_size)
                ],
            )
    assert first == len(result) == map.destination.world_size


def groups_of_405b(*sizes: tuple[int, int, str | None]) -> list[Layout]:
    return [
        generator_layout(LLAMA_405B, GeneratorTopology(engines, tp), "bfloat16", "cuda", fp8)
        for engines, tp, fp8 in sizes
    ]


def test_one_schedule_shares_the_sending_over_all_groups():
    trainer = trainer_layout(LLAMA_405B, TrainerTopology(tp=8, pp=7, dp=4), "bfloat16")
    layouts = groups_of_405b((12, 8, "fp8_block"), (5, 16, None))
    map = ReshardMap.build(trainer, side_by_side(layouts))
    prove_exactly_once(map)
    summary = map.summary()
    alone = [ReshardMap.build(trainer, layout).summary() for layout in layouts]
    assert summary.bytes == summary.bytes_minimum == sum(single.bytes for single in alone)
    assert summary.tensors == sum(single.tensors for single in alone)
    assert summary.sender_max_over_mean < 1.25, "pipeline stages are not equally large"
    assert depth_bytes(map) == [
        max(pair)
        for pair in zip(*(depth_bytes(ReshardMap.build(trainer, single)) for single in layouts))
    ]


def test_the_hash_is_of_all_groups():
    trainer = trainer_layout(LLAMA_405B, TrainerTopology(tp=8, pp=7), "bfloat16")
    plain = (4, 8, None)
    fp8 = (2, 8, "fp8_block")
    cases = [(plain,), (plain, (2, 8, None)), ((6, 8, None),), ((2, 8, None), plain), (plain, fp8)]
    hashes = [
        ReshardMap.build(trainer, side_by_side(groups_of_405b(*sizes))).plan_hash for sizes in cases
    ]
    assert len(set(hashes)) == len(cases)
    assert ReshardMap.build(trainer, groups_of_405b((4, 8, None))[0]).plan_hash == hashes[0], (
        "of one group it is as without groups"
    )


def test_two_tensors_of_one_name_on_one_rank_are_refused():
    trainer = trainer_layout(LLAMA_405B, TrainerTopology(tp=8), "bfloat16")
    layout = side_by_side(groups_of_405b((1, 8, None), (1, 8, None)))
    kinds = tuple(dataclasses.replace(kind, ranks=kind.ranks % 8) for kind in layout.kinds)
    with pytest.raises(ProofError, match="two kinds have one name"):
        prove_exactly_once(ReshardMap.build(trainer, dataclasses.replace(layout, kinds=kinds)))


def test_a_plan_has_groups(tmp_path):
    plan = two(
        tmp_path,
        "generator.max_concurrency=64",
        "generator.groups.small.max_concurrency=16",
        "model.dtype=float32",
    )
    big, small = plan.groups
    assert (big.name, big.first, big.topology, big.dtype("float32")) == (
        "big",
        0,
        GeneratorTopology(2, 4),
        "bfloat16",
    )
    assert (small.name, small.first, small.topology, small.dtype("float32")) == (
        "small",
        2,
        GeneratorTopology(3, 1),
        "float32",
    )
    assert [topology.tp for topology in plan.topologies] == [4, 4, 1, 1, 1]
    assert [group.settings.max_concurrency for group in plan.groups] == [64, 16]
    source = trainer_layout(plan.spec, plan.trainer_topology, "float32")
    assert [
        weights_map(plan.with_engines(counts), source).destination.world_size
        for counts in ((2, 3), (1, 0), (0, 2))
    ] == [11, 4, 2]
    assert [group.topology for group in evaluation_plan(plan).groups] == [
        GeneratorTopology(plan.config.eval.engines, 1)
    ]
    alone = plan.group_alone("big")
    assert [(group.name, group.topology) for group in alone.groups] == [("", big.topology)]


def test_none_is_a_format_and_arguments_add_up():
    generator = GeneratorConfig(quantization="fp8_block", server_args={"a": 1, "b": 2})
    groups = {
        "plain": GroupConfig(quantization="none", server_args={"b": 3}),
        "gone": None,
        "as_it_is": GroupConfig(),
    }
    shapes = dataclasses.replace(generator, groups=groups).shapes
    assert shapes["plain"] == GeneratorConfig(quantization=None, server_args={"a": 1, "b": 3})
    assert shapes.keys() == {"plain", "as_it_is"} and shapes["as_it_is"] == generator
    assert generator.shapes == {"": generator}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("generator.groups.a.engines=0", "generator.groups.a.engines=0: must be at least 1"),
        (
            "generator.groups.a.tp=3",
            "generator.groups.a.tp=3: must divide the model's 32 attention heads",
        ),
        (
            "generator.groups.a.engines=1 generator.tp=3",
            "generator.tp=3: must divide the model's 32 attention heads",
        ),
        ("generator.groups.a.b.tp=1", "generator.groups.a.b.tp=1: unknown key"),
        ("generator.groups.a.pp=1", "generator.groups.a.pp=1: unknown key"),
        (
            "generator.groups.a.quantization=int4",
            "generator.groups.a.quantization=int4: must be one of none, fp8_block",
        ),
        (
            "generator.groups.a_b!.engines=1",
            "generator.groups.a_b!: its name must be letters, digits, - and _",
        ),
        ("generator.groups.a\\d.tp=3", "generator.groups.a\\d: its name must be letters"),
        ('generator.groups={"":{"tp":2}}', "generator.groups.'': its name must be letters"),
        (
            "generator.groups.a.engines=60000 generator.groups.b.engines=60000",
            "generator.groups: 120000 ranks; at most 100000 can be planned",
        ),
        (
            "generator.groups.a.quantization=fp8_block generator.groups.b.quantization=fp8_channel",
            "generator.groups.a.quantization=fp8_block and "
            "generator.groups.b.quantization=fp8_channel: must be one format",
        ),
        (
            "generator.groups.a.engines=1 weights.relay=engines",
            "weights.relay=engines: must be auto or off with generator.groups",
        ),
        (
            "generator.groups.a.server_args.tp=2",
            "generator.groups.a.server_args.tp=2: must be set by generator.tp",
        ),
        ("generator.groups.a.server_args.no_such=2", "generator.groups.a.server_args.no_such=2: "),
        (
            "generator.groups.a.engines=1 lora.rank=4 lora.sync=adapter",
            "lora.sync=adapter: must be merge or auto with generator.groups",
        ),
        (
            "generator.groups.a.kv_cache_tokens=8 rollout.max_tokens=64",
            "rollout.max_tokens=64: must be less than generator.groups.a.kv_cache_tokens = 8",
        ),
    ],
)
def test_bad_groups_are_refused_by_key(overrides, problem, tmp_path):
    assert any(
        result.startswith(problem) for result in problems_of(tmp_path, *overrides.split())
    ), problems_of(tmp_path, *overrides.split())


def test_groups_may_change_between_starts(tmp_path):
    plan = two(tmp_path)
    later = two(tmp_path, "generator.groups.small.tp=2", "generator.groups.more.engines=1")
    before = {
        "generator.groups.small.tp": None,
        "generator.groups.more.engines": None,
        "generator.groups.small.engines": 3,
    }
    changed = differences(before, later.config)
    assert {
        "generator.groups.small.tp",
        "generator.groups.more.engines",
    } <= changed.keys() and plan.engines == 5


def test_engines_of_a_group_get_whole_nodes_where_they_need_them(tmp_path):
    plan = two(
        tmp_path,
        "generator.groups.big.tp=16",
        "generator.groups.big.quantization=none",
        "generator.groups.small.tp=4",
    )
    groups = training_job(plan).groups
    placed = place(plan.trainer_topology.world_size, groups, nodes=7, slots=8)
    assert [(part.engine, part.part, part.ranks) for node in placed for part in node.engines] == [
        (0, 0, 8), (0, 1, 8), (1, 0, 8), (1, 1, 8), (2, 0, 4), (3, 0, 4), (4, 0, 4)
    ]  # fmt: skip
    assert [engine for node in placed for engine in node.serves] == [0, 1, 2, 3, 4]


def test_requests_go_to_groups_by_what_their_engines_may_run():
    async def body():
        engines = [Engine(f"http://{number}") for number in range(3)]
        fleet = Fleet(
            engines,
            "in_flight",
            elastic=True,
            groups=[
                EngineGroup("big", GeneratorConfig(engines=1, max_concurrency=6)),
                EngineGroup("small", GeneratorConfig(engines=2, max_concurrency=3)),
            ],
        )
        fleet.release(0)
        requests = [
            asyncio.create_task(fleet.generate([1], Sampling(max_tokens=4), 1)) for _ in range(24)
        ]
        await settle()
        assert [len(engine.requests) for engine in engines] == [12, 6, 6]
        probe = asyncio.create_task(fleet.generate([1, 2], Sampling(max_tokens=4), 1, group=1))
        await settle()
        assert Counter(length for engine in engines[1:] for length, _ in engine.requests)[2] == 1
        joined = fleet.add(Engine("http://3"), group=0)
        assert fleet.counts(fleet.counted) == (1, 2), "one that joins is not counted on yet"
        fleet.come_back(joined)
        assert numbers(fleet.members) == [0, 3, 1, 2]
        assert fleet.counts([*fleet.engines[:2], joined]) == (2, 1)
        for engine in engines:
            engine.finish.set()
        await asyncio.gather(*requests, probe)
        assert fleet.sampled == [48, 52] and fleet.by_name(fleet.sampled) == {
            "big": 48,
            "small": 52,
        }

    run(body)


def test_a_probe_of_a_group_that_is_lost_goes_to_others():
    async def body():
        fleet = Fleet(
            [Engine("http://0"), Engine("http://1")],
            elastic=True,
            groups=[EngineGroup(name, GeneratorConfig()) for name in ("a", "b")],
        )
        fleet.lose(EngineUnreachable("http://1", "gone"))
        for group in (0, 1, None):
            assert numbers(fleet._among(group)) == [0]

    run(body)


GPUS = (
    *("model.dtype=bfloat16", "rollout.max_tokens=2048", "rollout.prompts_per_step=512"),
    *("generator.max_concurrency=64", "cluster.gpu=H100"),
)


@pytest.mark.parametrize("mode", ["in_flight", "block"])
def test_a_plan_counts_each_group(mode, tmp_path):
    plan = two(tmp_path, *GPUS, f"async.partial_rollout={mode}", "async.capacity=1", "trainer.dp=8")
    result = estimate(plan.config, plan.spec)
    big, small = result.groups
    alone = [estimate(plan.group_alone(name).config, plan.spec) for name in ("big", "small")]
    assert [(group.engines, group.gpus) for group in result.groups] == [(2, 8), (3, 3)]
    assert [group.memory for group in result.groups] == [single.generator for single in alone]
    assert big.share + small.share == pytest.approx(1) and result.generate.total == max(
        big.time.total, small.time.total
    )
    if mode == "in_flight":  # all work for the same time, so their rates add up
        assert big.time.total == pytest.approx(small.time.total, rel=0.01)
        rates = sum(1 / single.generate.total for single in alone)
        assert result.generate.total == pytest.approx(1 / rates, rel=0.01)
        assert result.generate.total < min(single.generate.total for single in alone)
    else:  # all begin together, and are divided by the engines' max_concurrency
        assert big.share == pytest.approx(2 / 5)
    assert result.control_s < sum(single.control_s for single in alone)


def test_a_group_that_does_not_fit_is_named(tmp_path):
    plan = two(tmp_path, *GPUS, "generator.groups.small.kv_cache_tokens=1000000")
    result = estimate(plan.config, plan.spec)
    assert (
        result.overfull.keys() - {"trainer"} == {"generator.groups.small"}
        and result.generator is result.groups[1].memory
    )


def test_simulated_engines_are_of_their_groups(tmp_path):
    overrides = (
        "async.capacity=2",
        "async.partial_rollout=in_flight",
        "trainer.dp=8",
        "max_steps=12",
        "plan.simulation.steps=12",
    )
    plan = two(tmp_path, *GPUS, *overrides, "rollout.prompts_per_step=64")
    slow = resolve(
        config(tmp_path, *GPUS, *overrides, "rollout.prompts_per_step=64", "generator.engines=3")
    )
    end_s = [simulate(single).end_s for single in (plan, slow)]
    assert end_s[0] < end_s[1], "the big ones come on top"
