"""Search and remedies: their settings are legal, fit when they are planned again, and no searched
settings are faster.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path

import colocation
import pytest

from megarl.config.errors import ConfigError
from megarl.config.keys import with_settings
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.estimate.baseline import best_baseline
from megarl.estimate.estimate import estimate
from megarl.estimate.hardware import GIB
from megarl.estimate.search import (
    Search,
    SearchResult,
    as_overrides,
    even_stages,
    problems,
    remedies,
    search,
)
from megarl.models import load_spec
from megarl.plan.topologies import gpus_of_run

CONFIGS = Path(__file__).parents[2] / "configs"


@functools.cache
def found_for(name: str, gpus: int) -> tuple[SearchResult, RunConfig]:
    """The results of a search for the shipped config, which several tests use."""
    return search(*load(name), gpus)


def load(name: str, *overrides: str) -> tuple[RunConfig, object]:
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    return config, load_spec(config.model.spec or config.model.path)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("8b_aipo", 8),
        ("8b_aipo", 64),
        ("70b_aipo", 256),
        ("70b_32k_aipo", 256),
        ("405b_aipo", 1024),
        ("qwen3_30b_a3b_aipo", 32),
        ("qwen3_235b_a22b_aipo", 256),
        ("qwen3_next_80b_a3b_aipo", 64),
    ],
)
def test_proposal_fits_and_is_legal(name: str, gpus: int) -> None:
    _, spec = load(name)
    result, proposal = found_for(name, gpus)
    assert problems(proposal, spec) == []
    planned = estimate(proposal, spec)
    assert planned.overfull == {}
    trainer = proposal.trainer
    generator = proposal.generator
    assert (
        trainer.tp * trainer.pp * trainer.cp * trainer.dp + generator.engines * generator.tp <= gpus
    )
    assert planned.train.total == pytest.approx(result.trainer.seconds)
    assert 0 < result.theta < 1
    assert 0 < result.balanced_theta < 1


@pytest.mark.parametrize(
    ("name", "overrides", "gpus"),
    [
        ("8b_aipo", ("lora.rank=16",), 2),
        ("8b_aipo", ("lora.rank=256", "lora.sync=merge"), 3),
        ("qwen3_30b_a3b_aipo", ("lora.rank=64",), 4),
        ("8b_aipo", ("weights.delta=auto", "weights.delta_shadow=device"), 8),
        ("8b_aipo", ("cluster.gpu=A100",), 8),
    ],
)
def test_proposal_fits_by_its_own_plan(name: str, overrides: tuple[str, ...], gpus: int) -> None:
    """Also where one side's memory depends on the other side: with adapters, which may be merged,
    and with shadows on the GPU.
    """
    config, spec = load(name, *overrides)
    _, proposal = search(config, spec, gpus)
    assert estimate(proposal, spec).overfull == {}
    assert problems(proposal, spec) == []


@pytest.mark.parametrize(
    "overrides",
    [(), ("generator.kv_cache_tokens=20000",), ("generator.server_args.kv_cache_dtype=fp8_e4m3",)],
)
def test_memory_to_spare_is_that_of_the_proposal(overrides: tuple[str, ...]) -> None:
    config, spec = load("8b_aipo", *overrides)
    result, proposal = search(config, spec, 8)
    planned = estimate(proposal, spec)
    assert result.generator.over_gib == pytest.approx(
        planned.groups[0].over_gib(planned.cluster.gpu), abs=1e-6
    )
    assert result.trainer.over_gib == pytest.approx(
        planned.trainer.total / GIB - planned.cluster.gpu.memory_gib
    )


@pytest.mark.parametrize(
    "name",
    [
        "8b_aipo_256",
        "70b_aipo",
        "70b_32k_aipo",
        "405b_aipo",
        "qwen3_30b_a3b_aipo",
        "qwen3_235b_a22b_aipo",
    ],
)
def test_proposal_is_no_slower_than_the_shipped_config(name: str) -> None:
    config, spec = load(name)
    trainer = config.trainer
    generator = config.generator
    shipped = estimate(config, spec)
    _, proposal = found_for(
        name, trainer.tp * trainer.pp * trainer.cp * trainer.dp + generator.engines * generator.tp
    )
    assert estimate(proposal, spec).step_s <= 1.02 * shipped.step_s


@pytest.mark.parametrize(("capacity", "gpus"), [(1, 20), (1, 16), (0, 16), (1, 12)])
def test_bisection_finds_what_trying_every_split_finds(capacity: int, gpus: int) -> None:
    config, spec = load(
        "8b_aipo",
        f"async.capacity={capacity}",
        "launch.ranks_per_node=4",
        "trainer.sequence_parallel=false",
    )
    exhaustive = Search(config, spec, gpus)
    unit = 4 if gpus > 16 else 1  # whole nodes
    step_s_by_split = {split: exhaustive._step_s(split) for split in range(unit, gpus, unit)}
    result = Search(config, spec, gpus).run()
    assert step_s_by_split[round(result.theta * gpus)] == pytest.approx(
        min(step_s_by_split.values()), rel=1e-3
    )


def test_sides_get_no_slower_with_more_gpus() -> None:
    """Bisection depends on this."""
    config, spec = load("70b_aipo")
    planner = Search(config, spec, 256)
    for best_side in (planner.trainer, planner.generator):
        sides = [best_side(gpus) for gpus in range(8, 256, 8)]
        times = [side.seconds if side else math.inf for side in sides]
        # except for sizes that do not divide
        assert [(a, b) for a, b in itertools.pairwise(times) if b > a * 1.02] == []


def test_nothing_fits_says_who_is_too_large() -> None:
    config, spec = load("405b_aipo")
    with pytest.raises(
        ConfigError,
        match="--gpus 16: nothing fits on 16 H100; not even all of them hold the trainer",
    ):
        search(config, spec, 16)
    small, spec_8b = load("8b_aipo")
    with pytest.raises(ConfigError, match="each side fits alone, but not both together"):
        search(small, spec_8b, 2)
    with pytest.raises(ConfigError, match="--gpus 1: must be at least 2"):
        search(config, spec, 1)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("papers/llamarl_70b_math", ("trainer.tp=4", "trainer.dp=34")),
        ("70b_aipo", ("generator.tp=1", "generator.max_concurrency=128")),
        ("8b_aipo", ("trainer.tp=1", "trainer.dp=4", "trainer.recompute=false")),
        ("qwen3_30b_a3b_aipo", ("trainer.ep=2",)),
    ],
)
def test_remedies_make_a_config_fit(name: str, overrides: tuple[str, ...]) -> None:
    config, spec = load(name, *overrides)
    before = estimate(config, spec)
    assert before.overfull
    proposed = remedies(config, spec, before)
    assert {remedy.side for remedy in proposed} == set(before.overfull)
    for remedy in proposed:
        # with exactly the printed words
        remedied, _ = load(name, *overrides, *as_overrides(remedy.settings).split())
        assert remedied == with_settings(config, remedy.settings)
        assert problems(remedied, spec) == []
        assert remedy.side not in estimate(remedied, spec).overfull, as_overrides(remedy.settings)


def test_config_that_fits_has_no_remedy() -> None:
    config, spec = load("8b_aipo")
    assert remedies(config, spec, estimate(config, spec)) == []


@pytest.mark.parametrize(
    "name",
    [
        "8b_aipo",
        pytest.param("405b_aipo", marks=pytest.mark.long),
        pytest.param("qwen3_30b_a3b_aipo", marks=pytest.mark.long),
    ],
)
def test_the_baseline_does_not_depend_on_the_config_sizes(name: str) -> None:
    """Neither on concurrency and microbatches, nor on parallel sizes and precision."""
    config, spec = load(name)
    gpus = gpus_of_run(config)
    baseline = best_baseline(config, spec, gpus)
    assert baseline is not None
    other = [
        "generator.max_concurrency=8",
        "generator.quantization=null",
        "generator.tp=8",
        "trainer.max_tokens_per_microbatch=8192",
        "trainer.recompute=true",
        "async.capacity=3",
    ]
    changed, _ = load(name, *other)
    assert best_baseline(changed, spec, gpus) == baseline


def test_the_baseline_is_the_least_of_what_can_be_planned() -> None:
    """Its own sizes, planned on shared GPUs without any lag, take as long; others take longer."""
    config, spec = load("8b_aipo")
    baseline = best_baseline(config, spec, 8)
    assert baseline is not None and baseline.shared
    plan = replace(
        config,
        trainer=baseline.trainer,
        generator=baseline.generator,
        cluster=replace(config.cluster, share_gpus=True),
        async_=replace(config.async_, capacity=0),
    )
    planned = estimate(plan, spec)
    assert planned.step_s - planned.sync_s == pytest.approx(baseline.step_s, rel=0.02)
    for other in (
        replace(plan, generator=replace(plan.generator, tp=8, engines=1)),
        replace(plan, generator=replace(plan.generator, quantization=None)),
        replace(plan, trainer=replace(plan.trainer, recompute=not plan.trainer.recompute)),
    ):
        slower = estimate(other, spec)
        assert slower.overfull or slower.step_s >= planned.step_s


def test_the_baseline_needs_memory_for_both_sides() -> None:
    config, spec = load("405b_aipo")
    assert best_baseline(config, spec, 8) is None


@pytest.mark.parametrize(("layers", "pp"), [(126, 16), (61, 16), (94, 8), (80, 4), (32, 1), (7, 2)])
def test_uneven_stages_have_all_layers(layers: int, pp: int) -> None:
    first, last = even_stages(layers, pp)
    if first is None or last is None:
        assert layers % pp == 0
        return
    inner = (layers - first - last) // max(1, pp - 2)
    assert first + last + inner * (pp - 2) == layers
    assert 0 < first <= max(inner, last)
    assert 0 < last <= max(inner, layers - first)


def test_a_search_of_the_largest_budget_is_a_matter_of_seconds() -> None:
    """The test counts the calls to the two sides, and measures no time."""
    config, spec = load("405b_aipo")
    one = Search(config, spec, 1024)
    one.run()
    assert len(one.trainers) <= 24
    assert len(one.generators) <= 24


def test_the_document_says_what_taking_turns_would_gain() -> None:
    text = (CONFIGS.parent / "docs/planner.md").read_text()
    assert f"{colocation.ASSUMED}\n\n{colocation.table()}\n" in text, (
        "put what tests/tools/colocation.py prints there"
    )
