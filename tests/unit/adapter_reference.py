"""Adapters as SGLang's own loader slices them for a rank."""

from __future__ import annotations

import re

import torch

from megarl.base.geometry import GeneratorTopology

SHARED = ("mlp.experts.w13.lora_A", "mlp.experts.w2.lora_B")  # the outer factors


def rows(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return tensor.chunk(ranks)[rank]


def columns(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return tensor.chunk(ranks, dim=-1)[rank]


def expected_on(
    rank: int, full: dict[str, torch.Tensor], sizes: GeneratorTopology, layer: int, experts: int
) -> dict[str, torch.Tensor]:
    """By the rules of SGLang's layers (slice_lora_a_weights, slice_lora_b_weights) and of its pool
    of experts.
    """
    tp = sizes.tp
    sliced = {}

    def factors(module: str, letter: str) -> torch.Tensor:
        hf_name = f"model.layers.{layer}.{module}.lora_{letter}.weight"
        if hf_name not in full:  # a factor that all experts share
            hf_name = re.sub(r"experts\.\d+", "experts", hf_name)
        return full[hf_name]

    def fused(name: str, modules: list[str], part: int, parts: int) -> None:
        sliced[f"{name}.lora_A"] = torch.cat([factors(module, "A") for module in modules])
        sliced[f"{name}.lora_B"] = torch.cat(
            [rows(factors(module, "B"), part, parts) for module in modules]
        )

    def inner(name: str, module: str, part: int, parts: int) -> None:
        sliced[f"{name}.lora_A"] = columns(factors(module, "A"), part, parts)
        sliced[f"{name}.lora_B"] = factors(module, "B")

    fused("self_attn.qkv_proj", [f"self_attn.{x}_proj" for x in "qkv"], rank, tp)
    inner("self_attn.o_proj", "self_attn.o_proj", rank, tp)
    if not experts:
        fused("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"], rank, tp)
        inner("mlp.down_proj", "mlp.down_proj", rank, tp)
    elif any(".experts." in name for name in full):
        rank_experts = experts // sizes.ep
        moe_tp = tp // sizes.ep
        stacked: dict[str, list[torch.Tensor]] = {}
        first = rank // moe_tp * rank_experts
        for expert in range(first, first + rank_experts):
            module = f"mlp.experts.{expert}."
            fused("w13", [module + "gate_proj", module + "up_proj"], rank % moe_tp, moe_tp)
            inner("w2", module + "down_proj", rank % moe_tp, moe_tp)
            for stack in ("w13", "w2"):
                for letter in "AB":
                    stacked.setdefault(f"mlp.experts.{stack}.lora_{letter}", []).append(
                        sliced.pop(f"{stack}.lora_{letter}")
                    )
        shared = (
            SHARED if f"model.layers.{layer}.mlp.experts.gate_proj.lora_A.weight" in full else ()
        )
        sliced |= {
            name: tensors[0] if (name in shared) else torch.stack(tensors)
            for name, tensors in stacked.items()
        }
    return {f"model.layers.{layer}.{name}": values for name, values in sliced.items()}
