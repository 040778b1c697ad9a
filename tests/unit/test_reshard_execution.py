"""Random models of all families and random layouts: executing the map equals slicing the full
tensors.

Tests cover trainer to generator, engine to engine, export and import. test_reshard_fp8.py covers
fp8.
"""

from __future__ import annotations

import dataclasses
import random

import hypothesis
import pytest
import torch
from copies_reference import apply_copy
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_cases import DTYPES, RULES, assert_equal, carry_out, cases, check_lists, map_key
from reshard_reference import HF, full_tensors, in_files, megatron, sglang

from megarl.base.geometry import DP_ATTENTION_FAMILIES, GeneratorTopology, TrainerTopology
from megarl.kernels.audit import MASK, hash_slice, hash_tensor
from megarl.models import ModelSpec
from megarl.models.experts import Experts
from megarl.models.latent_attention import MultiHeadLatentAttention
from megarl.reshard.execute import payload
from megarl.reshard.forwarding import passed_on, summary
from megarl.reshard.layout import generator_layout, hf_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once


def trainer_ranks(spec: ModelSpec, hf: HF, topology: TrainerTopology, **settings) -> list[HF]:
    """Every trainer rank's tensors, cut from the checkpoint by the reference."""
    return [megatron(spec, hf, topology, rank, **settings) for rank in range(topology.world_size)]


def engine_ranks(spec: ModelSpec, hf: HF, generator: GeneratorTopology, device: str) -> list[HF]:
    """Every engine rank's tensors, cut from the checkpoint by the reference."""
    ranks = range(generator.world_size)
    return [sglang(spec, hf, generator, rank % generator.tp, device) for rank in ranks]


@pytest.mark.parametrize(("fp8", "device"), [(False, "cpu"), (False, "cuda"), (True, "cuda")])
@pytest.mark.parametrize("divisor", [2, 4])
def test_random_layouts_have_ranks_that_share_a_head(fp8, device, divisor):
    hypothesis.find(
        cases(fp8=fp8),
        lambda case: case[1].tp == divisor * case[0].num_kv_heads and case[3] == device,
        settings=settings(max_examples=2000, phases=[hypothesis.Phase.generate], database=None),
        random=random.Random(1),
    )


@settings(max_examples=25, deadline=None)
@given(
    case=cases(),
    wire=st.sampled_from(["float32", "bfloat16"]),
    joined=st.booleans(),
    norms=st.sampled_from(["local", "te"]),
)
def test_trainer_to_generator_equals_slicing_the_checkpoint(case, wire, joined, norms):
    spec, topology, generator, device = case
    trainer = trainer_layout(spec, topology, "float32", norms)
    map = ReshardMap.build(trainer, generator_layout(spec, generator, wire, device))
    prove_exactly_once(map)
    hf = full_tensors(spec, torch.float32)
    sources = trainer_ranks(spec, hf, topology, fill=7.0, names=norms)
    for rank, tensors in enumerate(sources):  # compares the layout itself with the reference
        assert {t.name: t.shape for t in trainer.tensors(rank)} == {
            name: tuple(t.shape) for name, t in tensors.items()
        }
    received, copies = carry_out(map, sources, joined)
    cast = {name: tensor.to(DTYPES[wire]) for name, tensor in hf.items()}
    for name in cast:
        float32_names = ("e_score_correction_bias", "proj_bias", "A_log")
        if name.endswith(float32_names) or (
            spec.family == "glm4_moe" and name.endswith("mlp.gate.weight")
        ):
            cast[name] = hf[name]  # always float32 in the engine
    assert_equal(received, engine_ranks(spec, cast, generator, device))
    check_lists(map, copies, joined)


@settings(max_examples=10, deadline=None)
@given(case=cases(fp8=True), data=st.data(), rule=st.sampled_from([None, *sorted(RULES)]))
def test_relays_between_engines_fill_all_engines(case, data, rule):
    """For any number of engines that the trainer writes to.

    (The other tests cover writes to all engines.)
    """
    spec, topology, generator, device = case
    engines = data.draw(st.integers(1, 6), "engines")
    generator = dataclasses.replace(generator, engines=engines)
    of_ends = data.draw(st.integers(1, engines), "of_ends")
    of_layers = data.draw(st.integers(1, engines), "of_layers")
    trainer = trainer_layout(spec, topology, "float32")
    full_map = ReshardMap.build(
        trainer, generator_layout(spec, generator, "float32", device, rule and RULES[rule])
    )
    forwarding = passed_on(full_map.destination, generator.tp, of_ends, of_layers)
    forwarding.prove()
    map = dataclasses.replace(full_map, destination=forwarding.leaders)
    prove_exactly_once(map)
    hf = full_tensors(spec, torch.float32)
    sources = trainer_ranks(spec, hf, topology, fill=7.0)
    received, _ = carry_out(map, sources, True)
    given_bytes = [0] * generator.world_size
    taken_bytes = [0] * generator.world_size
    for relay in forwarding.relays:
        assert relay.tensor not in received[relay.destination_rank], "twice"
        received[relay.destination_rank][relay.tensor] = received[relay.source_rank][relay.tensor]
        given_bytes[relay.source_rank] += relay.bytes
        taken_bytes[relay.destination_rank] += received[relay.source_rank][relay.tensor].nbytes
    assert_equal(received, carry_out(full_map, sources, True)[0])
    assert [side.tolist() for side in forwarding.rank_bytes()] == [given_bytes, taken_bytes]
    if rule is None:
        assert_equal(received, engine_ranks(spec, hf, generator, device))
    assert summary(map, forwarding) == dataclasses.replace(
        full_map.summary(), copies=map.summary().copies, writes=map.summary().writes,
        relayed_bytes=sum(given_bytes),
        sender_max_over_mean=map.summary().sender_max_over_mean,
    )  # fmt: skip


@pytest.mark.parametrize("name", DP_ATTENTION_FAMILIES)
@pytest.mark.parametrize("dp_attention", [2, 4])
def test_data_parallel_attention(name: str, dp_attention: int):
    """An explicit case, because few random cases have attention that is both replicated and cut."""
    experts = Experts(count=4, per_token=2, intermediate_size=8)
    spec = ModelSpec(name, 2, 8, 16, 8, 2, 8, 150, 16, False, 1e-6, 1e4, experts=experts)
    if name == "deepseek_v3":
        spec = dataclasses.replace(
            spec,
            num_kv_heads=8,
            experts=dataclasses.replace(experts, shared_size=8, router_bias=True, first_layer=1),
            attention=MultiHeadLatentAttention(
                q_rank=8, kv_rank=12, nope_dim=4, rope_dim=4, v_dim=4
            ),
        )
    topology = TrainerTopology(tp=2, ep=2, dp=2)
    generator = GeneratorTopology(2, 4, 2, dp_attention)
    map = ReshardMap.build(
        trainer_layout(spec, topology, "float32"), generator_layout(spec, generator, "float32")
    )
    prove_exactly_once(map)
    hf = full_tensors(spec, torch.float32)
    received, copies = carry_out(map, trainer_ranks(spec, hf, topology, fill=7.0), True)
    assert_equal(received, engine_ranks(spec, hf, generator, "cuda"))
    check_lists(map, copies, True)


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_export_and_import_are_each_others_inverse(case):
    spec, topology, _, _ = case
    trainer = trainer_layout(spec, topology, "float32")
    checkpoint = hf_layout(spec, "float32", fused=True)
    hf = full_tensors(spec, torch.float32)
    files = in_files(spec, hf)
    ranks = range(topology.world_size)
    out = ReshardMap.build(trainer, checkpoint)
    into = ReshardMap.build(checkpoint, trainer)
    prove_exactly_once(out)
    prove_exactly_once(into)
    exported, _ = carry_out(out, trainer_ranks(spec, hf, topology, fill=7.0), True)
    assert_equal(exported, [files])
    filled, copies = carry_out(into, [files], False)
    assert_equal(filled, trainer_ranks(spec, hf, topology, fill=0.0))
    assert sorted(map_key(c) for rank in ranks for c in into.copies_to(rank)) == sorted(
        map_key(c) for c in copies
    )


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_owned_pieces_hold_each_checkpoint_element_once(case):
    spec, topology, _, _ = case
    trainer = trainer_layout(spec, topology, "float32")
    hf = full_tensors(spec, torch.float32)
    counts = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    for rank in range(topology.world_size):
        for _tensor, piece in trainer.owned_pieces(rank):
            assert piece.local.shape == piece.logical.shape
            counts[piece.logical_name][piece.logical.slices()] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


@settings(max_examples=15, deadline=None)
@given(case=cases(), wire=st.sampled_from(["float32", "bfloat16"]))
def test_hashes_of_copies_add_up_to_the_hash_of_the_tensor(case, wire):
    spec, topology, generator, device = case
    trainer = trainer_layout(spec, topology, "float32")
    map = ReshardMap.build(trainer, generator_layout(spec, generator, wire, device))
    hf = full_tensors(spec, torch.float32)
    sources = trainer_ranks(spec, hf, topology, fill=7.0)
    received, copies = carry_out(map, sources, True)
    sums: dict[tuple[int, str], int] = {}
    for copy in copies:
        shape = tuple(received[copy.destination_rank][copy.destination_tensor].shape)
        share = hash_slice(
            payload(copy, sources[copy.source_rank].get(copy.source_tensor)),
            copy.destination_box,
            shape,
        )
        key = copy.destination_rank, copy.destination_tensor
        sums[key] = (sums.get(key, 0) + share) & MASK
    assert sums == {
        (rank, name): hash_tensor(t)
        for rank, tensors in enumerate(received)
        for name, t in tensors.items()
    }


def test_a_real_copy_without_its_source_is_an_error():
    spec = ModelSpec("llama", 1, 4, 4, 2, 2, 2, 8, 16, False, 1e-6, 1e4)
    copy = ReshardMap.build(hf_layout(spec, "float32"), hf_layout(spec, "float32")).copies_from(0)[
        0
    ]
    with pytest.raises(ValueError, match="model.embed_tokens.weight"):
        apply_copy(copy, None, torch.zeros(8, 4))
