"""A second implementation of fp8 quantisation, in float64 and integers, without torch arithmetic or
float8 casts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megarl.kernels.quantise_rules import BLOCK, Rule

# Value of each non-negative e4m3 code: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7F is NaN
# (OCP 8-bit floating point, section 5).
E4M3 = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)]
)
_MIDDLES = (E4M3[:-1] + E4M3[1:]) / 2


def bf16_values(x: torch.Tensor) -> np.ndarray:
    """The float64 values of a bf16 or float32 tensor. float32 is rounded to bf16 (nearest even) by
    its bits.
    """
    if x.dtype == torch.bfloat16:
        bits = x.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint64) << 16
    else:
        bits = x.contiguous().view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """The nearest codes of float64 values within +-448. A tie goes to the even code."""
    magnitude = np.abs(x)
    code = np.searchsorted(_MIDDLES, magnitude, side="left")  # at a tie this is the lower code
    tie = np.isin(magnitude, _MIDDLES)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return (code | (np.signbit(x).astype(np.int64) << 7)).astype(np.uint8)


def float32(x: np.ndarray) -> np.ndarray:
    """Rounds to float32, in a float64.

    A float64 quotient or product of float32 numbers rounds to the exact float32 one: 53 >= 2 * 24 +
    2 bits.
    """
    return x.astype(np.float32).astype(np.float64)


def quantise(x: torch.Tensor, rows: int, cols: int, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 [R, C], scales float32) of a 2-D tensor, one tile after the other."""
    values = bf16_values(x)
    codes = np.empty(values.shape, np.uint8)
    scales = np.empty((-(-values.shape[0] // rows), -(-values.shape[1] // cols)), np.float32)
    for i, j in np.ndindex(scales.shape):
        tile = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
        scale = float32(np.maximum(np.abs(values[tile]).max(), float(np.float32(floor))) / 448.0)
        scaled = values[tile] / scale
        codes[tile] = e4m3_codes(np.clip(float32(scaled), -448.0, 448.0))
        scales[i, j] = scale
    return codes, scales


def block_rule(rows: int, cols: int) -> Rule:
    """BLOCK with tiles of another size."""
    return replace(BLOCK, name=f"block{rows}x{cols}", rows=rows, cols=cols)
