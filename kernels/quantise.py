"""Reference of quantise_triton.py in torch: the rules themselves are in megarl/reshard/quantise.py. Works on any device."""

from __future__ import annotations

import torch

from megarl.reshard import quantise as rules
from megarl.reshard.quantise import quantise_with, tile_amax
from megarl.reshard.quantise_rules import Rule

__all__ = ["quantise_block", "quantise_block_with", "quantise_with", "tile_amax"]


def quantise_block(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, rule: Rule, name: str) -> None:
    found, found_scales = rules.quantise(values, rule, name)
    if found.shape != codes.shape or found_scales.shape != scales.shape:
        raise ValueError(f"{name}: values {tuple(values.shape)} need codes of that shape and scales {tuple(found_scales.shape)}; "
                         f"got {tuple(codes.shape)} and {tuple(scales.shape)}")  # fmt: skip
    codes.copy_(found)
    scales.copy_(found_scales)


def quantise_block_with(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, row_start: int, col_start: int, rule: Rule
) -> None:
    codes.copy_(quantise_with(values, row_start, col_start, scales, rule))
