"""The audit hash in Triton, equal to megarl/reshard/audit.py bit for bit: sums of 64-bit products that wrap do not depend on order.

One program takes a strip of columns and some rows of it, and keeps one running sum per column and row of a block:
`sum over its rows of bits * a(row)`, multiplied by b(col) once at its end. Memory is read once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megarl.reshard import audit

BLOCK_ROWS, BLOCK_COLS = 16, 512
STEPS = 8  # blocks of rows per program


@triton.jit
def _hash_kernel(
    values, row_weights, col_weights, partial, rows, cols, row_stride, col_stride, strips,
    STEPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    c = (tl.program_id(0) % strips).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    first = (tl.program_id(0) // strips).to(tl.int64) * (STEPS * BLOCK_ROWS)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.int64)
    for step in range(STEPS):
        r = first + step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        bits = tl.load(values + r[:, None] * row_stride + c[None, :] * col_stride, mask=inside, other=0)
        sums += bits.to(tl.int64) * tl.load(row_weights + r, mask=r < rows, other=0)[:, None]
    b = tl.load(col_weights + c, mask=c < cols, other=0)
    tl.store(partial + tl.program_id(0), tl.sum(tl.sum(sums * b[None, :], axis=1), axis=0))


def hash_box(values: torch.Tensor, row_start: int, col_start: int) -> int:
    """See megarl.reshard.audit.hash_box."""
    return int(hash_sum(values, row_start, col_start).item()) & audit.MASK


def hash_sum(values: torch.Tensor, row_start: int, col_start: int) -> torch.Tensor:
    """The same as an int64 scalar on the device (its bits are the hash), without waiting for it: for many boxes at once."""
    bits = values.detach().view(audit.BITS[values.element_size()])
    rows, cols = bits.shape
    strips = triton.cdiv(cols, BLOCK_COLS)
    partial = torch.empty(strips * triton.cdiv(rows, STEPS * BLOCK_ROWS), dtype=torch.int64, device=bits.device)
    if partial.numel():
        _hash_kernel[(len(partial),)](
            bits, _weights(audit.ROW_SEED, row_start, rows, bits.device), _weights(audit.COL_SEED, col_start, cols, bits.device), partial,
            rows, cols, *bits.stride(), strips, STEPS=STEPS, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, num_warps=8,
        )  # fmt: skip
    return partial.sum()


def _weights(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    return _table(seed, max(1024, 1 << (start + count - 1).bit_length()), device)[start : start + count]


@functools.lru_cache(maxsize=64)
def _table(seed: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(audit.weights(seed, 0, size), device=device)
