"""Random models and layouts: executing the map equals slicing the full tensors, for trainer → generator, export and import."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_reference import full_tensors, megatron, sglang

from megarl.models import ModelSpec
from megarl.plan.topology import GeneratorTopology, TrainerTopology
from megarl.reshard.audit import MASK, hash_slice, hash_tensor
from megarl.reshard.execute import apply_copy, payload
from megarl.reshard.layout import Layout, generator_layout, hf_layout, trainer_layout
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import prove_copies, prove_exactly_once

torch.set_num_threads(1)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, TrainerTopology, GeneratorTopology, str]:
    tp, pp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2]))
    generator_tp = draw(st.sampled_from([1, 2, 4]))
    # Trainer and GPU engines refuse what does not divide; the CPU engine pads.
    device = draw(st.sampled_from(["cpu", "cuda"]))
    kv = draw(st.sampled_from([tp, 2 * tp, 4 * tp] if device == "cpu" or tp == 3 else [1, 2, 4, 8]))
    if device == "cuda" and (kv % generator_tp and generator_tp % kv or kv % tp and tp % kv):
        kv = tp * generator_tp
    heads = kv * draw(st.sampled_from([1, 2, 3])) * (tp * generator_tp if kv % tp or device == "cuda" else 1)
    spec = ModelSpec(
        family="llama",
        num_layers=pp * draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=tp * draw(st.integers(1, 5)) * (generator_tp if device == "cuda" else 1),
        num_attention_heads=heads,
        num_kv_heads=kv,
        head_dim=4 * draw(st.integers(1, 2)),
        vocab_size=draw(st.integers(2, 200)),
        max_position_embeddings=16,
        tie_word_embeddings=draw(st.booleans()),
        rms_norm_eps=1e-6,
        rope_theta=1e4,
    )
    trainer = TrainerTopology(tp=tp, pp=pp, dp=draw(st.integers(1, 3)), cp=draw(st.integers(1, 2)))
    return spec, trainer, GeneratorTopology(engines=draw(st.integers(1, 3)), tp=generator_tp), device


def tensors_of_trainer(spec: ModelSpec, hf: dict, topology: TrainerTopology, rank: int, fill: float) -> dict[str, torch.Tensor]:
    at = topology.coordinate(rank)
    return megatron(spec, hf, topology.tp, topology.pp, at.tp, at.pp, fill)


def empty(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    return {t.name: torch.full(t.shape, float("nan"), dtype=DTYPES[t.dtype]) for t in layout.tensors(rank)}


def carry_out(map: ReshardMap, sources: list[dict], joined: bool) -> tuple[list[dict], list[Copy]]:
    """Destination tensors after executing every sender's copies (or joined writes)."""
    result = [empty(map.destination, rank) for rank in range(map.destination.world_size)]
    copies = []
    for rank, tensors in enumerate(sources):
        for copy in map.writes_from(rank) if joined else map.copies_from(rank):
            assert copy.source_rank == rank
            apply_copy(copy, tensors.get(copy.source_tensor), result[copy.destination_rank][copy.destination_tensor])
            copies.append(copy)
    return result, copies


def assert_equal(found: list[dict], expected: list[dict]) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]), (rank, name)


@settings(max_examples=25, deadline=None)
@given(case=cases(), wire=st.sampled_from(["float32", "bfloat16"]), joined=st.booleans())
def test_trainer_to_generator_equals_slicing_the_checkpoint(case, wire, joined):
    spec, topology, generator, device = case
    map = ReshardMap.build(trainer_layout(spec, topology, "float32"), generator_layout(spec, generator, wire, device))
    prove_exactly_once(map)
    hf = full_tensors(spec, torch.float32)
    sources = [tensors_of_trainer(spec, hf, topology, rank, fill=7.0) for rank in range(topology.world_size)]
    for rank, tensors in enumerate(sources):  # the layout itself, against the reference
        assert {t.name: t.shape for t in map.source.tensors(rank)} == {name: tuple(t.shape) for name, t in tensors.items()}
    found, copies = carry_out(map, sources, joined)
    cast = {name: tensor.to(DTYPES[wire]) for name, tensor in hf.items()}
    expected = [sglang(spec, cast, generator.tp, rank % generator.tp, device) for rank in range(generator.world_size)]
    assert_equal(found, expected)
    prove_copies(copies, map.source, map.destination)
    received = [c for rank in range(generator.world_size) for c in (map.writes_to(rank) if joined else map.copies_to(rank))]
    assert sorted(map_key(c) for c in received) == sorted(map_key(c) for c in copies)
    assert sum(c.bytes for c in copies) == map.summary().bytes == map.summary().bytes_minimum
    assert len(copies) == (map.summary().writes if joined else map.summary().copies)


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_export_and_import_are_each_others_inverse(case):
    spec, topology, _, _ = case
    trainer, checkpoint = trainer_layout(spec, topology, "float32"), hf_layout(spec, "float32")
    hf = full_tensors(spec, torch.float32)
    ranks = range(topology.world_size)
    out, into = ReshardMap.build(trainer, checkpoint), ReshardMap.build(checkpoint, trainer)
    prove_exactly_once(out)
    prove_exactly_once(into)
    assert_equal(carry_out(out, [tensors_of_trainer(spec, hf, topology, rank, fill=7.0) for rank in ranks], True)[0], [hf])
    filled, copies = carry_out(into, [hf], False)
    assert_equal(filled, [tensors_of_trainer(spec, hf, topology, rank, fill=0.0) for rank in ranks])
    assert sorted(map_key(c) for rank in ranks for c in into.copies_to(rank)) == sorted(map_key(c) for c in copies)


@settings(max_examples=10, deadline=None)
@given(case=cases(), wire=st.sampled_from(["float32", "bfloat16"]))
def test_hashes_of_what_is_sent_add_up_to_the_hash_of_what_arrived(case, wire):
    spec, topology, generator, device = case
    map = ReshardMap.build(trainer_layout(spec, topology, "float32"), generator_layout(spec, generator, wire, device))
    hf = full_tensors(spec, torch.float32)
    sources = [tensors_of_trainer(spec, hf, topology, rank, fill=7.0) for rank in range(topology.world_size)]
    found, copies = carry_out(map, sources, True)
    sums: dict[tuple[int, str], int] = {}
    for copy in copies:
        shape = tuple(found[copy.destination_rank][copy.destination_tensor].shape)
        share = hash_slice(payload(copy, sources[copy.source_rank].get(copy.source_tensor)), copy.destination_box, shape)
        key = copy.destination_rank, copy.destination_tensor
        sums[key] = (sums.get(key, 0) + share) & MASK
    assert sums == {(rank, name): hash_tensor(t) for rank, tensors in enumerate(found) for name, t in tensors.items()}


def test_a_real_copy_without_its_source_is_an_error():
    spec = ModelSpec("llama", 1, 4, 4, 2, 2, 2, 8, 16, False, 1e-6, 1e4)
    copy = ReshardMap.build(hf_layout(spec, "float32"), hf_layout(spec, "float32")).copies_from(0)[0]
    with pytest.raises(ValueError, match="model.embed_tokens.weight"):
        apply_copy(copy, None, torch.zeros(8, 4))


def map_key(copy: Copy) -> tuple:
    return copy.source_rank, copy.destination_rank, copy.destination_tensor, copy.destination_box.start
