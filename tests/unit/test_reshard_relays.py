"""Relays between engines: they balance the senders, and wrong lists are detected."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from small_maps import LLAMA_405B, tiny_map

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import load_spec
from megarl.reshard.forwarding import busiest_bytes, passed_on, planned_relays, summary
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import ProofError, prove_exactly_once

CONFIGS = Path(__file__).parents[2] / "configs"


def test_405b_in_fp8_with_relays_is_even():
    """Embedding and output layer stay in bf16.

    Without relays, first and last stage send 3.5 % more than the mean.
    """
    topology = TrainerTopology(tp=8, pp=16, dp=4, first_stage_layers=7, last_stage_layers=7)
    generator = generator_layout(
        LLAMA_405B, GeneratorTopology(64, 8), "bfloat16", quantization="fp8_block"
    )
    full_map = ReshardMap.build(trainer_layout(LLAMA_405B, topology, "bfloat16"), generator)
    map, forwarding = planned_relays(full_map, "engines", 8)
    prove_exactly_once(map)
    with_relays = summary(map, forwarding)
    alone = full_map.summary()
    assert alone.sender_max_over_mean == pytest.approx(1.0356, abs=1e-4)
    assert with_relays.sender_max_over_mean < 1.001
    assert with_relays.receiver_max_over_mean == 1.0
    assert with_relays.bytes == with_relays.bytes_minimum == alone.bytes
    assert with_relays.relayed_bytes < 0.01 * with_relays.bytes
    assert busiest_bytes(map, forwarding) < 0.98 * busiest_bytes(full_map, None)


def test_many_engines_beside_few_trainer_ranks():
    """One node of 8 trains, and 16 nodes generate.

    Without relays its ranks would send all weights 16 times.
    """
    generator = generator_layout(LLAMA_405B, GeneratorTopology(16, 8), "bfloat16")
    full_map = ReshardMap.build(
        trainer_layout(LLAMA_405B, TrainerTopology(tp=8), "bfloat16"), generator
    )
    map, forwarding = planned_relays(full_map, "engines", 8)
    prove_exactly_once(map)
    of_one_engine_rank = full_map.rank_bytes()[1].max()
    assert busiest_bytes(full_map, None) > 15.9 * of_one_engine_rank
    assert busiest_bytes(map, forwarding) < 2.1 * of_one_engine_rank
    passed_bytes, received_bytes = forwarding.rank_bytes()
    # layers take turns, so no engine passes on more than it holds
    assert max(passed_bytes.max(), received_bytes.max()) < of_one_engine_rank


def test_nothing_is_passed_on_where_that_gains_nothing():
    map, forwarding = planned_relays(tiny_map(dp=4, engines=2), "engines", 4)
    assert forwarding.relays == []
    assert map.plan_hash == tiny_map(dp=4, engines=2).plan_hash
    assert planned_relays(tiny_map(), "auto", 4)[1] is None


def tamper_leaves_one_out(leader_of):
    leader_of[0, 0, 1] = leader_of[0, 0, 0] = 0


def tamper_from_one_without(leader_of):
    followers = np.argwhere(leader_of[0, 0] != np.unique(leader_of[0, 0])[0]).ravel()
    leader_of[0, 0, followers[0]] = 999


@pytest.mark.parametrize("tamper", [tamper_leaves_one_out, tamper_from_one_without])
def test_a_wrong_forwarding_is_found(tamper):
    forwarding = passed_on(tiny_map(engines=4).destination, 4, of_ends=2, of_layers=2)
    forwarding.prove()
    tables = [table.copy() for table in forwarding.leader_of]
    tamper(tables[1])
    with pytest.raises(ProofError):
        dataclasses.replace(forwarding, leader_of=tuple(tables)).prove()


@pytest.mark.parametrize("layers, engines, tp, trainer", [
    (2, 64, 1, TrainerTopology(tp=4, dp=8)), (8, 64, 4, TrainerTopology(tp=4, pp=2, dp=8)),
    (2, 32, 4, TrainerTopology(tp=4, dp=16)),
    (8, 32, 1, TrainerTopology(dp=16)), (8, 16, 2, TrainerTopology(tp=2)),
    (2, 2, 1, TrainerTopology(pp=2)),
])  # fmt: skip
def test_relays_never_make_the_busiest_rank_busier(layers, engines, tp, trainer):
    """If there are more engines than layers, some pass on a layer and others none."""
    spec = dataclasses.replace(load_spec(CONFIGS / "models/llama-3.1-8b"), num_layers=layers)
    source = trainer_layout(spec, trainer, "bfloat16")
    destination = generator_layout(spec, GeneratorTopology(engines, tp), "bfloat16")
    map = ReshardMap.build(source, destination)
    assert busiest_bytes(*planned_relays(map, "engines", tp)) <= busiest_bytes(map, None)
