"""Random models of all families and random layouts: executing the map equals slicing the full tensors.

Trainer to generator, in bf16, fp32 and fp8; export and import.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from copies_reference import apply_copy, prove_copies
from hypothesis import given, settings
from hypothesis import strategies as st
from quantise_reference import block_rule
from reshard_reference import HF, full_tensors, megatron, sglang

from megarl.kernels.audit import MASK, hash_slice, hash_tensor
from megarl.kernels.quantise import quantise
from megarl.kernels.quantise_rules import CHANNEL, TENSOR, Rule
from megarl.models import ModelSpec
from megarl.models.registry import family
from megarl.reshard.amax import amax_parts, peers
from megarl.reshard.execute import AmaxTable, payload
from megarl.reshard.fleet import passed_on
from megarl.reshard.layout import Layout, generator_layout, hf_layout, trainer_layout
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.relays import summary
from megarl.reshard.schedule import batches_from
from megarl.topology import DP_ATTENTION_FAMILIES, GeneratorTopology, TrainerTopology

torch.set_num_threads(1)
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float8_e4m3fn")}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
RULES = {"block": block_rule(4, 4), "channel": CHANNEL, "tensor": TENSOR}
Case = tuple[ModelSpec, TrainerTopology, GeneratorTopology, str]


@st.composite
def cases(draw: st.DrawFn, fp8: bool = False) -> Case:
    """fp8: sizes in which no engine cuts a block of 4 or pads."""
    name = draw(st.sampled_from(FAMILIES))
    latent, sparse = name == "deepseek_v3", name in ("qwen3_moe", "mixtral", "deepseek_v3")
    tp = draw(st.sampled_from([1, 2, 4] if fp8 or latent else [1, 2, 3, 4]))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]))
    etp, ep = (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))) if sparse else (1, 1)
    cp = draw(st.integers(1, 2))
    dp = draw(st.integers(1, 2)) * (etp * ep // math.gcd(etp * ep, tp * cp))
    generator_tp = draw(st.sampled_from([1, 2, 4]))
    generator_ep = draw(st.sampled_from([n for n in (1, 2, 4) if generator_tp % n == 0])) if sparse else 1
    device = "cuda" if fp8 or latent else draw(st.sampled_from(["cpu", "cuda"]))  # trainer and GPU engines refuse what does not divide
    dp_attention = 1
    if device == "cuda" and name in DP_ATTENTION_FAMILIES:
        dp_attention = draw(st.sampled_from([n for n in (1, 2, 4) if generator_tp % n == 0]))
    kv = draw(st.sampled_from([tp, 2 * tp, 4 * tp] if device == "cpu" or tp == 3 else [1, 2, 4, 8]))
    if device == "cuda" and ((kv % generator_tp and generator_tp % kv) or (kv % tp and tp % kv)):
        kv = tp * generator_tp
    heads = kv * draw(st.sampled_from([1, 2, 3])) * (tp * generator_tp if kv % tp or device == "cuda" else 1)
    unit = 16 if fp8 else tp * (generator_tp if device == "cuda" else 1)
    first = draw(st.sampled_from([None, vpp])) if pp > 1 else None
    last = draw(st.sampled_from([None, 2 * vpp])) if pp > 1 and (first is None or vpp == 1 or pp > 2) else None
    told = [n for n in (first, last) if n is not None]
    spec = ModelSpec(
        family=name,
        num_layers=sum(told) + (pp - len(told)) * vpp * draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 9)) + (3 if fp8 else 0),
        intermediate_size=unit * draw(st.integers(1, 3)),
        num_attention_heads=4 * generator_tp if latent else heads,
        num_kv_heads=4 * generator_tp if latent else kv,
        head_dim=4 * draw(st.integers(1, 2)),
        vocab_size=draw(st.integers(2, 200)),
        max_position_embeddings=16,
        tie_word_embeddings=draw(st.booleans()) if name in ("llama", "qwen2", "qwen3") else False,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        qkv_bias=name == "qwen2",
        qk_norm=name in ("qwen3", "qwen3_moe"),
    )
    if sparse:
        spec = dataclasses.replace(spec, num_experts=4 * draw(st.integers(1, 2)), expert_intermediate_size=etp * unit)
    if latent:
        spec = dataclasses.replace(spec, shared_intermediate_size=2 * unit * tp, router_bias=True, head_dim=8, qk_nope_head_dim=4)
        spec = dataclasses.replace(spec, qk_rope_head_dim=4, v_head_dim=4, q_lora_rank=4 * tp, kv_lora_rank=8 * tp - 4)
        spec = dataclasses.replace(spec, first_dense_layers=draw(st.integers(0, 1)))
    trainer = TrainerTopology(
        tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, dp=dp, first_stage_layers=first, last_stage_layers=last,
    )  # fmt: skip
    return spec, trainer, GeneratorTopology(draw(st.integers(1, 3)), generator_tp, generator_ep, dp_attention), device


def empty(layout: Layout, rank: int) -> HF:
    return {t.name: torch.full(t.shape, float("nan")).to(DTYPES[t.dtype]) for t in layout.tensors(rank)}


def exchanged(map: ReshardMap, sources: list[HF]) -> list[AmaxTable]:
    """Every rank's table after the exchange with its peers."""
    parts = [amax_parts(map, rank) for rank in range(map.source.world_size)]
    tables = [AmaxTable.measure(own, tensors) for own, tensors in zip(parts, sources)]
    sent = [list(table.entries) for table in tables]
    for rank, table in enumerate(tables):
        for peer in peers(parts[rank]):
            assert rank in peers(parts[peer])
            table.merge(sent[peer])
    return tables


def carry_out(map: ReshardMap, sources: list[HF], joined: bool) -> tuple[list[HF], list[Copy]]:
    """Destination tensors after executing every sender's copies (or joined writes)."""
    result = [empty(map.destination, rank) for rank in range(map.destination.world_size)]
    copies = []
    for rank, (tensors, table) in enumerate(zip(sources, exchanged(map, sources))):
        for copy in map.writes_from(rank) if joined else map.copies_from(rank):
            assert copy.source_rank == rank
            apply_copy(copy, tensors.get(copy.source_tensor), result[copy.destination_rank][copy.destination_tensor], table)
            copies.append(copy)
    return result, copies


def assert_equal(found: list[HF], expected: list[HF]) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert mine[name].dtype == theirs[name].dtype and torch.equal(bits(mine[name]), bits(theirs[name])), (rank, name)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


@settings(max_examples=25, deadline=None)
@given(case=cases(), wire=st.sampled_from(["float32", "bfloat16"]), joined=st.booleans(), norms=st.sampled_from(["local", "te"]))
def test_trainer_to_generator_equals_slicing_the_checkpoint(case, wire, joined, norms):
    spec, topology, generator, device = case
    trainer = trainer_layout(spec, topology, "float32", norms)
    map = ReshardMap.build(trainer, generator_layout(spec, generator, wire, device))
    prove_exactly_once(map)
    hf = full_tensors(spec, torch.float32)
    whole = [megatron(spec, hf, topology, rank, fill=7.0, names=norms) for rank in range(topology.world_size)]
    for rank, tensors in enumerate(whole):  # the layout itself, against the reference
        assert {t.name: t.shape for t in trainer.tensors(rank)} == {name: tuple(t.shape) for name, t in tensors.items()}
    found, copies = carry_out(map, whole, joined)
    cast = {name: tensor.to(DTYPES[wire]) for name, tensor in hf.items()}
    for name in cast:
        if name.endswith("e_score_correction_bias"):
            cast[name] = hf[name]  # float32 on both sides
    expected = [sglang(spec, cast, generator, rank % generator.tp, device) for rank in range(generator.world_size)]
    assert_equal(found, expected)
    check_lists(map, copies, joined)


@settings(max_examples=10, deadline=None)
@given(case=cases(fp8=True), data=st.data(), rule=st.sampled_from([None, *sorted(RULES)]))
def test_what_engines_pass_on_fills_the_rest(case, data, rule):
    """Of any numbers of engines that are written to. (What the trainer would write to all of them: the tests around this one.)"""
    spec, topology, generator, device = case
    engines = data.draw(st.integers(1, 6), "engines")
    generator = dataclasses.replace(generator, engines=engines)
    of_ends, of_layers = (data.draw(st.integers(1, engines), name) for name in ("of_ends", "of_layers"))
    trainer = trainer_layout(spec, topology, "float32")
    whole = ReshardMap.build(trainer, generator_layout(spec, generator, "float32", device, rule and RULES[rule]))
    forwarding = passed_on(whole.destination, generator.tp, of_ends, of_layers)
    forwarding.prove()
    map = dataclasses.replace(whole, destination=forwarding.leaders)
    prove_exactly_once(map)
    hf = full_tensors(spec, torch.float32)
    sources = [megatron(spec, hf, topology, rank, fill=7.0) for rank in range(topology.world_size)]
    found, _ = carry_out(map, sources, True)
    given_bytes, taken_bytes = ([0] * generator.world_size for _ in range(2))
    for relay in forwarding.relays:
        assert relay.tensor not in found[relay.destination_rank], "twice"
        found[relay.destination_rank][relay.tensor] = found[relay.source_rank][relay.tensor]
        given_bytes[relay.source_rank] += relay.bytes
        taken_bytes[relay.destination_rank] += found[relay.source_rank][relay.tensor].nbytes
    assert_equal(found, carry_out(whole, sources, True)[0])
    assert [side.tolist() for side in forwarding.rank_bytes()] == [given_bytes, taken_bytes]
    if rule is None:
        assert_equal(found, [sglang(spec, hf, generator, rank % generator.tp, device) for rank in range(generator.world_size)])
    assert summary(map, forwarding) == dataclasses.replace(
        whole.summary(), copies=map.summary().copies, writes=map.summary().writes, relayed_bytes=sum(given_bytes),
        sender_max_over_mean=map.summary().sender_max_over_mean,
    )  # fmt: skip


@pytest.mark.parametrize("name", DP_ATTENTION_FAMILIES)
@pytest.mark.parametrize("dp_attention", [2, 4])
def test_data_parallel_attention(name: str, dp_attention: int):
    """Stated, because few random cases have attention both replicated and cut."""
    spec = dataclasses.replace(
        ModelSpec(name, 2, 8, 16, 8, 2, 8, 150, 16, False, 1e-6, 1e4), num_experts=4, expert_intermediate_size=8,
        shared_intermediate_size=8 * (name == "deepseek_v3"), router_bias=name == "deepseek_v3",
    )  # fmt: skip
    if name == "deepseek_v3":
        latent = {
            "first_dense_layers": 1,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 12,
        }
        spec = dataclasses.replace(spec, num_kv_heads=8, **latent)
    topology, generator = TrainerTopology(tp=2, ep=2, dp=2), GeneratorTopology(2, 4, 2, dp_attention)
    map = ReshardMap.build(trainer_layout(spec, topology, "float32"), generator_layout(spec, generator, "float32"))
    prove_exactly_once(map)
    hf = full_tensors(spec, torch.float32)
    found, copies = carry_out(map, [megatron(spec, hf, topology, rank, fill=7.0) for rank in range(4)], True)
    assert_equal(found, [sglang(spec, hf, generator, rank % 4, "cuda") for rank in range(8)])
    check_lists(map, copies, True)


def check_lists(map: ReshardMap, copies: list[Copy], joined: bool) -> None:
    """Both ends write out the same lists, the proof accepts them, and the summary counts them."""
    prove_copies(copies, map.source, map.destination)
    ranks = range(map.destination.world_size)
    received = [c for rank in ranks for c in (map.writes_to(rank) if joined else map.copies_to(rank))]
    assert sorted(map_key(c) for c in received) == sorted(map_key(c) for c in copies)
    summary = map.summary()
    assert sum(c.bytes for c in copies) == summary.bytes == summary.bytes_minimum
    assert len(copies) == (summary.writes if joined else summary.copies)
    assert summary.tensors == sum(len(map.destination.tensors(rank)) for rank in ranks)
    if joined:
        scheduled = [w for rank in range(map.source.world_size) for batch in batches_from(map, rank, 900) for w in batch.writes]
        assert sorted(map_key(c) for c in scheduled) == sorted(map_key(c) for c in copies)


@settings(max_examples=15, deadline=None)
@given(case=cases(fp8=True), rule=st.sampled_from(sorted(RULES)), joined=st.booleans(), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_fp8_equals_gathering_quantising_and_slicing(case, rule, joined, dtype):
    spec, topology, generator, device = case
    trainer = trainer_layout(spec, topology, dtype)
    map = ReshardMap.build(trainer, generator_layout(spec, generator, "bfloat16", device, RULES[rule]))
    prove_exactly_once(map)
    hf = full_tensors(spec, DTYPES[dtype])
    sources = [megatron(spec, hf, topology, rank, fill=7.0) for rank in range(topology.world_size)]
    found, copies = carry_out(map, sources, joined)
    codes, scales = quantised_checkpoint(spec, hf, RULES[rule])
    for rank in range(generator.world_size):
        wanted = sglang(spec, codes, generator, rank % generator.tp, device)
        spreads = sglang(spec, scales, generator, rank % generator.tp, device)
        for tensor in map.destination.tensors(rank):
            mine, name = found[rank][tensor.name], tensor.name
            if name.endswith(("_scale", "_scale_inv")):
                every = RULES[rule].rows, RULES[rule].cols
                of = spreads[name.removesuffix("_scale_inv").removesuffix("_scale")]
                theirs = of[..., :: every[0] or of.shape[-2], :: every[1] or of.shape[-1]]
                assert mine.dtype == torch.float32 and torch.equal(mine, theirs), (rank, name)
            elif tensor.dtype == "float8_e4m3fn":
                assert torch.equal(mine.view(torch.uint8).float(), wanted[name].float()), (rank, name)
            else:
                assert torch.equal(mine, wanted[name].to(mine.dtype)), (rank, name)
    check_lists(map, copies, joined)


def quantised_checkpoint(spec: ModelSpec, hf: HF, rule: Rule) -> tuple[HF, HF]:
    """The checkpoint with the codes of each quantised weight, and with each weight's scale in the place of every element.

    Which HF tensors these are is stated here anew: the linear layers of attention, MLP and experts, as SGLang fuses them.
    """
    codes, scales = dict(hf), dict(hf)
    for group in fused_groups(spec, hf):
        if rule.rows is None:
            both = quantise(torch.cat([hf[name].flatten() for name in group])[None], rule, group[0])
            parts = both[0].view(torch.uint8).flatten().split([hf[name].numel() for name in group])
            for name, part in zip(group, parts):
                codes[name], scales[name] = part.view(hf[name].shape), both[1].expand(hf[name].shape)
            continue
        for name in group:
            code, scale = quantise(hf[name], rule, name)
            rows, cols = hf[name].shape
            codes[name] = code.view(torch.uint8)
            wide = scale.repeat_interleave(rule.rows, 0)[:rows]
            scales[name] = wide.repeat_interleave(rule.cols or cols, 1)[:, :cols].contiguous()
    return codes, scales


def fused_groups(spec: ModelSpec, hf: HF) -> list[tuple[str, ...]]:
    fused = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3")]
    fused += [(name,) for name in ("o_proj", "down_proj", "q_b_proj", "kv_b_proj", "w2")]
    groups = []
    for name in hf:
        for group in fused:
            if name.endswith(f".{group[0]}.weight"):
                groups.append(tuple(name.replace(group[0], other) for other in group))
    return groups


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
    assert_equal(carry_out(out, [megatron(spec, hf, topology, rank, fill=7.0) for rank in ranks], True)[0], [hf])
    filled, copies = carry_out(into, [hf], False)
    assert_equal(filled, [megatron(spec, hf, topology, rank, fill=0.0) for rank in ranks])
    assert sorted(map_key(c) for rank in ranks for c in into.copies_to(rank)) == sorted(map_key(c) for c in copies)


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_owned_pieces_hold_every_element_of_the_checkpoint_once(case):
    spec, topology, _, _ = case
    trainer = trainer_layout(spec, topology, "float32")
    hf = full_tensors(spec, torch.float32)
    seen = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    for rank in range(topology.world_size):
        for _tensor, piece in trainer.owned_pieces(rank):
            assert piece.local.shape == piece.logical.shape
            seen[piece.logical_name][piece.logical.slices()] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


@settings(max_examples=15, deadline=None)
@given(case=cases(), wire=st.sampled_from(["float32", "bfloat16"]))
def test_hashes_of_what_is_sent_add_up_to_the_hash_of_what_arrived(case, wire):
    spec, topology, generator, device = case
    trainer = trainer_layout(spec, topology, "float32")
    map = ReshardMap.build(trainer, generator_layout(spec, generator, wire, device))
    hf = full_tensors(spec, torch.float32)
    sources = [megatron(spec, hf, topology, rank, fill=7.0) for rank in range(topology.world_size)]
    found, copies = carry_out(map, sources, True)
    sums: dict[tuple[int, str], int] = {}
    for copy in copies:
        shape = tuple(found[copy.destination_rank][copy.destination_tensor].shape)
        share = hash_slice(payload(copy, sources[copy.source_rank].get(copy.source_tensor)), copy.destination_box, shape)
        key = copy.destination_rank, copy.destination_tensor
        sums[key] = (sums.get(key, 0) + share) & MASK
    assert sums == {(rank, name): hash_tensor(t) for rank, tensors in enumerate(found) for name, t in tensors.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_quantised_is_a_list_of_the_familys_own_parameters(name):
    assert len(set(family(dataclasses.replace(BASE, family=name)).quantised_parameters(BASE))) >= 4


BASE = ModelSpec("llama", 1, 4, 4, 2, 2, 2, 8, 16, False, 1e-6, 1e4)


def test_a_real_copy_without_its_source_is_an_error():
    spec = ModelSpec("llama", 1, 4, 4, 2, 2, 2, 8, 16, False, 1e-6, 1e4)
    copy = ReshardMap.build(hf_layout(spec, "float32"), hf_layout(spec, "float32")).copies_from(0)[0]
    with pytest.raises(ValueError, match="model.embed_tokens.weight"):
        apply_copy(copy, None, torch.zeros(8, 4))


def map_key(copy: Copy) -> tuple:
    return copy.source_rank, copy.destination_rank, copy.destination_tensor, copy.destination_box.start
