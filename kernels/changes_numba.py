"""Where values differ from what they were, compiled for the CPU: two loops that read memory once each. Equal to kernels/changes.py."""

from __future__ import annotations

import numba
import numpy as np
import torch

from megarl.kernels.changes import BLOCK, Places, blocks


def find_changes(new: torch.Tensor, old: torch.Tensor) -> Places:
    """See megarl.kernels.changes.find_changes."""
    arrays, counts = (new.numpy(), old.numpy()), np.zeros(blocks(len(new)), np.int32)
    _count(*arrays, counts, BLOCK)
    offsets = np.empty(int(counts.sum(dtype=np.int64)) + 1, np.int16)  # the last one is written to, but means nothing
    _write(*arrays, counts, offsets, BLOCK)
    return torch.from_numpy(counts), torch.from_numpy(offsets[:-1])


@numba.njit(cache=True, nogil=True)
def _count(new, old, counts, block):
    for b in range(len(counts)):
        now, before = new[b * block : (b + 1) * block], old[b * block : (b + 1) * block]
        count = 0
        for i in range(len(now)):
            count += now[i] != before[i]
        counts[b] = count


@numba.njit(cache=True, nogil=True)
def _write(new, old, counts, offsets, block):
    at = 0
    for b in range(len(counts)):
        now, before = new[b * block : (b + 1) * block], old[b * block : (b + 1) * block]
        end = at + counts[b]
        for i in range(len(now) if counts[b] else 0):
            offsets[at] = np.int16(i)
            at += now[i] != before[i]
        assert at == end
