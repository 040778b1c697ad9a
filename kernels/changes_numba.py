"""Finds changes and writes them to their positions, compiled for the CPU.

Equal to kernels/changes.py.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from megarl.kernels.changes import BLOCK, Places, blocks


def find_changes(new: torch.Tensor, old: torch.Tensor) -> Places:
    """See megarl.kernels.changes.find_changes. Each of two loops reads memory once."""
    new_array = new.numpy()
    old_array = old.numpy()
    counts = np.zeros(blocks(len(new)), np.int32)
    _count(new_array, old_array, counts, BLOCK)
    offsets = np.empty(int(counts.sum(dtype=np.int64)) + 1, np.int16)  # the last one is scratch
    _write(new_array, old_array, counts, offsets, BLOCK)
    return torch.from_numpy(counts), torch.from_numpy(offsets[:-1])


def put(
    target: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor
) -> bool:
    """See megarl.kernels.changes.put. Returns False for strides that it does not handle."""
    if target.is_contiguous():
        rows = target.view(1, -1)
    elif target.dim() == 2 and target.stride(1) == 1:
        rows = target
    else:
        return False
    _put(rows.numpy(), counts.numpy(), offsets.numpy().view(np.uint16), values.numpy(), BLOCK)
    return True


@numba.njit(cache=True, nogil=True)
def _count(new, old, counts, block):
    for b in range(len(counts)):
        new_block = new[b * block : (b + 1) * block]
        old_block = old[b * block : (b + 1) * block]
        count = 0
        for i in range(len(new_block)):
            count += new_block[i] != old_block[i]
        counts[b] = count


@numba.njit(cache=True, nogil=True)
def _write(new, old, counts, offsets, block):
    position = 0
    for b in range(len(counts)):
        new_block = new[b * block : (b + 1) * block]
        old_block = old[b * block : (b + 1) * block]
        end = position + counts[b]
        for i in range(len(new_block) if counts[b] else 0):
            offsets[position] = np.int16(i)
            position += new_block[i] != old_block[i]
        assert position == end


@numba.njit(cache=True, nogil=True)
def _put(rows, counts, offsets, values, block):
    start = 0
    cols = rows.shape[1]
    for b in range(len(counts)):
        row = (b * block) // cols
        # positions ascend, so the row advances without a division
        first = (b * block) // cols * cols
        for i in range(start, start + counts[b]):
            place = b * block + offsets[i]
            while place >= first + cols:
                row = row + 1
                first = first + cols
            rows[row, place - first] = values[i]
        start += counts[b]
