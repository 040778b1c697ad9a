"""Finds where values differ bitwise from earlier values, in compact form.

Values are cut into blocks of 65,536, so that a position within its block takes 16 bits.
"""

from __future__ import annotations

import torch

BLOCK = 1 << 16
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPILED_BYTES = 1 << 20  # above this size of values, a compiled loop pays, as for audits
PUT_BYTES = 1 << 12  # the same for changed values to write

# (number of changes in each block, int32 [blocks]; position of each change within its block, 16
# bits as int16 [count])
Places = tuple[torch.Tensor, torch.Tensor]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaN and -0.0 compare as bits."""
    return values.view(BITS[values.element_size()])


def blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def find_changes(new: torch.Tensor, old: torch.Tensor) -> Places:
    """The positions where `new` differs from `old`, in ascending order.

    Both: [n], integers of one dtype, contiguous.
    """
    if not new.is_cuda and new.nbytes >= COMPILED_BYTES:
        from megarl.kernels import changes_numba

        return changes_numba.find_changes(new, old)
    return compact(torch.nonzero(new != old).view(-1), len(new))


def compact(positions: torch.Tensor, elements: int) -> Places:
    """`positions`: ascending, int64."""
    counts = torch.bincount(positions >> 16, minlength=blocks(elements))
    return counts.to(torch.int32), positions.to(torch.int16)


def put(
    target: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor
) -> None:
    """Writes `values` to these positions of `target`, which has integers and any strides."""
    if not target.is_cuda and values.nbytes >= PUT_BYTES:
        from megarl.kernels import changes_numba

        if changes_numba.put(target, counts, offsets, values):
            return
    put_at(target, positions_of(counts, offsets), values)


def put_at(target: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    if target.is_contiguous():
        target.view(-1).index_copy_(0, positions, values)
    else:
        target[torch.unravel_index(positions, target.shape)] = values


def positions_of(counts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The positions from their compact form: the inverse of `compact`."""
    starts = torch.arange(len(counts), device=counts.device) * BLOCK
    block_starts = torch.repeat_interleave(starts, counts, output_size=len(offsets))
    return block_starts + (offsets.long() & (BLOCK - 1))
