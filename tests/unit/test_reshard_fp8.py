"""Quantising on the way equals gathering, quantising and slicing, bit for bit, for random models
and layouts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_cases import DTYPES, FP8_FAMILIES, RULES, carry_out, cases, check_lists
from reshard_reference import HF, full_tensors, megatron, sglang

from megarl.base.geometry import GeneratorTopology
from megarl.config.errors import ConfigError
from megarl.kernels.quantise import quantise
from megarl.kernels.quantise_rules import Rule
from megarl.models import ModelSpec, load_spec
from megarl.models.registry import logical_tensors, quantised_parameters, sglang_parameters
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once


@settings(max_examples=15, deadline=None)
@given(
    case=cases(fp8=True),
    rule=st.sampled_from(sorted(RULES)),
    joined=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_fp8_equals_gathering_quantising_and_slicing(case, rule, joined, dtype):
    spec, topology, generator, device = case
    trainer = trainer_layout(spec, topology, dtype)
    map = ReshardMap.build(
        trainer, generator_layout(spec, generator, "bfloat16", device, RULES[rule])
    )
    prove_exactly_once(map)
    hf = full_tensors(spec, DTYPES[dtype])
    sources = [megatron(spec, hf, topology, rank, fill=7.0) for rank in range(topology.world_size)]
    received, copies = carry_out(map, sources, joined)
    codes, scales = quantised_checkpoint(spec, hf, RULES[rule])
    for rank in range(generator.world_size):
        expected = sglang(spec, codes, generator, rank % generator.tp, device)
        spreads = sglang(spec, scales, generator, rank % generator.tp, device)
        for tensor in map.destination.tensors(rank):
            actual = received[rank][tensor.name]
            name = tensor.name
            if name.endswith(("_scale", "_scale_inv")):
                every = RULES[rule].rows, RULES[rule].cols
                spread = spreads[name.removesuffix("_scale_inv").removesuffix("_scale")]
                expected_scales = spread[
                    ..., :: every[0] or spread.shape[-2], :: every[1] or spread.shape[-1]
                ]
                assert actual.dtype == torch.float32 and torch.equal(actual, expected_scales), (
                    rank,
                    name,
                )
            elif tensor.dtype == "float8_e4m3fn":
                assert torch.equal(actual.view(torch.uint8).float(), expected[name].float()), (
                    rank,
                    name,
                )
            else:
                assert torch.equal(actual, expected[name].to(actual.dtype)), (rank, name)
    check_lists(map, copies, joined)


def quantised_checkpoint(spec: ModelSpec, hf: HF, rule: Rule) -> tuple[HF, HF]:
    """The checkpoint with each quantised weight's codes, and one with the scale in the place of
    every element.

    This file has its own list of the HF tensors: the linear layers of attention, MLP and experts,
    as fused by SGLang.
    """
    codes = dict(hf)
    scales = dict(hf)
    for group in fused_groups(spec, hf):
        if rule.rows is None:
            quantised = quantise(
                torch.cat([hf[name].flatten() for name in group])[None], rule, group[0]
            )
            parts = (
                quantised[0].view(torch.uint8).flatten().split([hf[name].numel() for name in group])
            )
            for name, part in zip(group, parts):
                codes[name] = part.view(hf[name].shape)
                scales[name] = quantised[1].expand(hf[name].shape)
            continue
        for name in group:
            code, scale = quantise(hf[name], rule, name)
            rows, cols = hf[name].shape
            codes[name] = code.view(torch.uint8)
            wide = scale.repeat_interleave(rule.rows, 0)[:rows]
            scales[name] = wide.repeat_interleave(rule.cols or cols, 1)[:, :cols].contiguous()
    return codes, scales


def fused_groups(spec: ModelSpec, hf: HF) -> list[tuple[str, ...]]:
    fused = [
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("w1", "w3"),
        ("in_proj_qkv", "in_proj_z"),
    ]
    fused += [
        (name,)
        for name in (
            "o_proj",
            "down_proj",
            "q_b_proj",
            "kv_b_proj",
            "w2",
            "in_proj_qkvz",
            "out_proj",
        )
    ]
    groups = []
    for name in hf:
        for group in fused:
            if name.endswith(f".{group[0]}.weight"):
                groups.append(tuple(name.replace(group[0], part) for part in group))
    return groups


MODELS = Path(__file__).parents[2] / "configs" / "models"
SPECS = {folder.name: load_spec(folder) for folder in sorted(MODELS.iterdir())}
# matrices that stay in bf16: the router, gates and decays of few rows, the vocabulary's
NOT_QUANTISED = ("gate", "shared_expert_gate", "in_proj_ba", "embed_tokens", "lm_head")


@pytest.mark.parametrize("model", [m for m, spec in SPECS.items() if spec.family in FP8_FAMILIES])
def test_family_quantises_its_linear_layers(model):
    spec = SPECS[model]
    shapes = {tensor.name: tensor.shape for tensor in logical_tensors(spec)}
    linear = set()
    for parameter in sglang_parameters(spec, GeneratorTopology(), "cuda"):
        is_matrix = len(shapes[parameter.parts[0].logical_name]) == 2
        if is_matrix and parameter.name.split(".")[-2] not in NOT_QUANTISED:
            linear.add(parameter.name)
    assert {*quantised_parameters(spec)} == linear


def test_every_family_is_asked_for_its_quantised_parameters():
    assert {spec.family for spec in SPECS.values()} == {*FP8_FAMILIES, "gpt_oss"}
    with pytest.raises(ConfigError, match="must be null for a gpt_oss model"):
        quantised_parameters(SPECS["gpt-oss-20b"])
