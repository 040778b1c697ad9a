"""The audit hash in Triton.

Bitwise equal to kernels/audit.py, because sums of wrapping 64-bit products do not depend on order.

One program handles some rows of a strip of columns. It keeps one running sum per column and row of
a block, `sum over its rows of mix(bits) * a(row)`, and multiplies it by b(word) once at the end.
Memory is read once: by whole words if the box allows it (audit.as_words), otherwise by elements.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megarl.kernels import audit

BLOCK_ROWS = 16
BLOCK_COLS = 512
STEPS = 8  # blocks of rows per program
UNSIGNED = {
    torch.uint8: torch.uint8,
    torch.int16: torch.uint16,
    torch.int32: torch.uint32,
    torch.int64: torch.uint64,
}


@triton.jit
def _hash_kernel(
    values,
    row_weights,
    word_weights,
    partial,
    rows,
    cols,
    lead,
    row_stride,
    col_stride,
    strips,
    PER_WORD: tl.constexpr,
    MIX_SHIFT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    c = (tl.program_id(0) % strips).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    first = (tl.program_id(0) // strips).to(tl.int64) * (STEPS * BLOCK_ROWS)
    # position of the column in its word, in bits
    place = (((c + lead) % PER_WORD) * (64 // PER_WORD)).to(tl.uint64)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.uint64)
    for step in range(STEPS):
        r = first + step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        word = (
            tl.load(
                values + r[:, None] * row_stride + c[None, :] * col_stride, mask=inside, other=0
            ).to(tl.uint64)
            << place[None, :]
        )
        sums += (word + (word >> MIX_SHIFT)) * tl.load(row_weights + r, mask=r < rows, other=0).to(
            tl.uint64
        )[:, None]
    b = tl.load(word_weights + (c + lead) // PER_WORD, mask=c < cols, other=0).to(tl.uint64)
    tl.store(
        partial + tl.program_id(0), tl.sum(tl.sum((sums * b[None, :]).to(tl.int64), axis=1), axis=0)
    )


def hash_box(values: torch.Tensor, row_start: int, col_start: int) -> int:
    """See megarl.kernels.audit.hash_box."""
    return int(hash_sum(values, row_start, col_start).item()) & audit.MASK


def hash_sum(values: torch.Tensor, row_start: int, col_start: int) -> torch.Tensor:
    """The hash as the bits of an int64 scalar on the device.

    Returns before the device has computed it, so several boxes are hashed at once.
    """
    bits, first_word, lead = audit.as_words(values, col_start)
    rows, cols = bits.shape
    strips = triton.cdiv(cols, BLOCK_COLS)
    partial = torch.empty(
        strips * triton.cdiv(rows, STEPS * BLOCK_ROWS), dtype=torch.int64, device=bits.device
    )
    if partial.numel():
        row_weights = _weights(audit.ROW_SEED, row_start, rows, bits.device)
        words = audit.word_count(bits, lead)
        word_weights = _weights(audit.COL_SEED, first_word, words, bits.device)
        _hash_kernel[(len(partial),)](
            bits.view(UNSIGNED[bits.dtype]),
            row_weights,
            word_weights,
            partial,
            rows,
            cols,
            lead,
            *bits.stride(),
            strips,
            PER_WORD=audit.WORD_BYTES // bits.element_size(),
            MIX_SHIFT=audit.MIX_SHIFT,
            STEPS=STEPS,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLS=BLOCK_COLS,
            num_warps=8,
        )
    return partial.sum()


def _weights(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    return _table(seed, max(1024, 1 << (start + count - 1).bit_length()), device)[
        start : start + count
    ]


@functools.lru_cache(maxsize=64)
def _table(seed: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(audit.weights(seed, 0, size), device=device)
