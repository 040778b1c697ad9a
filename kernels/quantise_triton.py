"""Block quantisation in Triton.

Bitwise equal to kernels/quantise.py, on the GPU and in Triton's interpreter.

One program handles one tile, or some of its rows. It finds the amax, or writes the codes for a
given scale. All rounding is explicit. Division is correctly rounded (Triton's `/` is not). The cast
to e4m3 uses integer arithmetic (the interpreter's own cast is wrong if rounding carries into the
next power of two). The amax is a maximum over integers: bit patterns of non-negative numbers are
ordered like the numbers, with infinity and then NaN on top, so no NaN is lost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megarl.kernels.quantise import FP8, require_finite, touched_tiles
from megarl.kernels.quantise_rules import Rule

# parts of a tile whose codes cannot be vectorised: one program for it would run out of registers
PARTS = 4


@triton.jit
def _e4m3(scaled, sign):
    """The code of |scaled|, clamped to 448 and rounded to nearest even, with the sign bit of
    `sign`: the division turns -0 into 0.
    """
    # bits of 448
    magnitude = tl.minimum(scaled.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, 0x43E00000)
    # Keep 3 of 23 mantissa bits, move the exponent's bias from 127 to 7.
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Below 2^-6, codes are multiples of 2^-9, which is the unit in the last place of 2^14. So
    # adding 2^14 rounds to such a multiple, and the lowest byte of the sum is the code.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(
        tl.uint32, bitcast=True
    ) & 0xFF
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (code | ((sign.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _fma(a, b, c, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter's tl.fma also rounds the product
        result = (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        result = tl.fma(a, b, c)
    return result


@triton.jit
def _divide(x, scale, INTERPRETED: tl.constexpr):
    """x / scale, correctly rounded.

    It takes one reciprocal per tile and three instructions per element instead of about twenty.

    Markstein, IBM J. Res. Dev. 34 (1990), theorem 7: take the quotient from the correctly rounded
    reciprocal, and correct it once by its exact remainder. A test covers all pairs of significands
    of a bf16 number and a scale. Below 2^-10 (code 0) it may be inexact.
    """
    reciprocal = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    across = tl.zeros_like(x)
    quotient = x * reciprocal
    remainder = _fma(quotient, across - scale, x, INTERPRETED)
    return _fma(remainder, across + reciprocal, quotient, INTERPRETED)


@triton.jit
def _tile_kernel(
    # bf16 as int16 | uint8, contiguous, written | float32, read; with AMAX: no codes, and the amax
    # is written
    values,
    codes,
    scales,
    rows,
    cols,
    top,
    left,  # extent of the box; its offset in its first tile
    value_lead,
    value_row,
    value_col,
    scale_lead,
    scale_row,
    scale_col,  # strides
    tiles_across,
    AMAX: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tile_row = tl.program_id(0) // PARTS // tiles_across
    tile_col = tl.program_id(0) // PARTS % tiles_across
    lead = tl.program_id(1).to(tl.int64)
    part_row = tl.program_id(0) % PARTS * (TILE_ROWS // PARTS)
    r = (tile_row * TILE_ROWS - top + part_row + tl.arange(0, TILE_ROWS // PARTS)).to(tl.int64)[
        :, None
    ]
    c = (tile_col * TILE_COLS - left + tl.arange(0, TILE_COLS)).to(tl.int64)[None, :]
    inside = (r >= 0) & (r < rows) & (c >= 0) & (c < cols)
    bits = (
        tl.load(
            values + lead * value_lead + r * value_row + c * value_col, mask=inside, other=0
        ).to(tl.int32)
        << 16
    )
    at = (
        scales
        + lead * scale_lead
        + tile_row.to(tl.int64) * scale_row
        + tile_col.to(tl.int64) * scale_col
    )

    if AMAX:
        amax_bits = tl.max(tl.max(bits & 0x7FFFFFFF, axis=1), axis=0)
        tl.store(at, amax_bits.to(tl.float32, bitcast=True))
    else:
        scaled = _divide(bits.to(tl.float32, bitcast=True), tl.load(at), INTERPRETED)
        tl.store(codes + (lead * rows + r) * cols + c, _e4m3(scaled, bits), mask=inside)


def quantise_with(
    values: torch.Tensor, row_start: int, col_start: int, scales: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """See megarl.kernels.quantise_with."""
    tiles = touched_tiles(values, row_start, col_start, rule)
    if tuple(scales.shape) != tiles.shape:
        raise ValueError(
            f"values {tuple(values.shape)} at ({row_start}, {col_start}) need scales "
            f"{tiles.shape}, got {tuple(scales.shape)}"
        )
    codes = torch.empty(values.shape, dtype=FP8, device=values.device)
    _launch(values, codes.view(torch.uint8), scales, row_start, col_start, rule)
    return codes


def tile_amax(
    values: torch.Tensor, row_start: int, col_start: int, rule: Rule, name: str
) -> torch.Tensor:
    """See megarl.kernels.tile_amax."""
    tiles = touched_tiles(values, row_start, col_start, rule)
    amax = torch.empty(tiles.shape, device=values.device)
    _launch(values, None, amax, row_start, col_start, rule)
    require_finite(amax, name, tiles)
    return amax


def _launch(
    values: torch.Tensor,
    codes: torch.Tensor | None,
    scales: torch.Tensor,
    row_start: int,
    col_start: int,
    rule: Rule,
) -> None:
    """Launches the kernel. Without `codes` it writes the amax to `scales`."""
    source = _three_dims(values.detach().to(torch.bfloat16).view(torch.int16))
    scales = _three_dims(scales)
    lead, down, across = scales.shape
    _, rows, cols = source.shape
    lead_stride, row_stride, col_stride = source.stride()
    scale_lead, scale_row, scale_col = scales.stride()
    top = row_start % rule.rows
    left = col_start % rule.cols
    ragged = any(number % 16 for number in (rows, cols, top, left, *source.stride()[:2]))
    parts = min(PARTS, rule.rows) if ragged and codes is not None else 1
    _tile_kernel[(down * across * parts, lead)](
        source,
        source if codes is None else codes,
        scales,
        rows,
        cols,
        top,
        left,
        lead_stride,
        row_stride,
        col_stride,
        scale_lead,
        scale_row,
        scale_col,
        tiles_across=across,
        AMAX=codes is None,
        TILE_ROWS=rule.rows,
        TILE_COLS=rule.cols,
        PARTS=parts,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=8,
    )


def _three_dims(tensor: torch.Tensor) -> torch.Tensor:
    """A view [lead, rows, cols].

    Raises RuntimeError if leading dims cannot be joined without a copy.
    """
    if tensor.dim() == 2:
        return tensor.unsqueeze(0)
    if tensor.dim() > 3:
        return tensor.view(-1, *tensor.shape[-2:])
    return tensor
