"""Where values differ from what they were, in Triton; equal to kernels/changes.py. One pass counts the changes of each piece; the
other, after a sum over the pieces, writes each piece's places to where they belong."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megarl.kernels.changes import BLOCK, Places, blocks

PIECE = 4096  # elements of a program; divides BLOCK


@triton.jit
def _changes_kernel(new, old, counts, ends, offsets, elements, PIECE: tl.constexpr, BLOCK: tl.constexpr, WRITES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = place < elements
    changed = (tl.load(new + place, mask=inside, other=0) != tl.load(old + place, mask=inside, other=0)).to(tl.int32)
    count = tl.sum(changed, axis=0)
    if WRITES:
        first = tl.load(ends + tl.program_id(0)) - count
        before = tl.cumsum(changed, axis=0) - changed
        tl.store(offsets + first + before, (place % BLOCK).to(tl.int16), mask=changed != 0)
    else:
        tl.store(counts + tl.program_id(0), count)


def find_changes(new: torch.Tensor, old: torch.Tensor) -> Places:
    """See megarl.kernels.changes.find_changes."""
    per_block = BLOCK // PIECE
    counts = torch.zeros(blocks(len(new)) * per_block, dtype=torch.int32, device=new.device)
    used = triton.cdiv(len(new), PIECE)
    if not used:
        return counts, torch.empty(0, dtype=torch.int16, device=new.device)
    _changes_kernel[(used,)](new, old, counts, counts, counts, len(new), PIECE=PIECE, BLOCK=BLOCK, WRITES=False)
    ends = counts.cumsum(0)
    offsets = torch.empty(int(ends[-1]), dtype=torch.int16, device=new.device)
    if len(offsets):
        _changes_kernel[(used,)](new, old, counts, ends, offsets, len(new), PIECE=PIECE, BLOCK=BLOCK, WRITES=True)
    return counts.view(-1, per_block).sum(1, dtype=torch.int32), offsets
