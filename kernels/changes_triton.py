"""Finds where values differ from earlier values, in Triton.

Equal to kernels/changes.py. One pass counts the changes of each piece. After a sum over the pieces,
a second pass writes the positions of each piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megarl.kernels.changes import BLOCK, Places, blocks

PIECE = 4096  # elements of a program; divides BLOCK


@triton.jit
def _changes_kernel(
    new,
    old,
    counts,
    ends,
    offsets,
    elements,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = place < elements
    changed = (
        tl.load(new + place, mask=inside, other=0) != tl.load(old + place, mask=inside, other=0)
    ).to(tl.int32)
    count = tl.sum(changed, axis=0)
    if WRITES:
        first = tl.load(ends + tl.program_id(0)) - count
        earlier_changes = tl.cumsum(changed, axis=0) - changed
        tl.store(offsets + first + earlier_changes, (place % BLOCK).to(tl.int16), mask=changed != 0)
    else:
        tl.store(counts + tl.program_id(0), count)


def find_changes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Places]:
    """See megarl.kernels.find_changes."""
    counts = [_counted(new, old) for new, old in pairs]
    return [
        _placed(new, old, piece_counts, total)
        for (new, old), piece_counts, total in zip(pairs, counts, totals_of(counts))
    ]


def totals_of(counts: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each tensor. The host waits for the GPU only once."""
    if not counts:
        return []
    return torch.stack([piece_counts.sum() for piece_counts in counts]).tolist()


def _counted(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The number of changed elements in each piece, int32 [pieces of whole blocks]."""
    counts = torch.zeros(blocks(len(new)) * (BLOCK // PIECE), dtype=torch.int32, device=new.device)
    programs = triton.cdiv(len(new), PIECE)
    if programs:
        _changes_kernel[(programs,)](
            new, old, counts, counts, counts, len(new), PIECE=PIECE, BLOCK=BLOCK, WRITES=False
        )
    return counts


def _placed(new: torch.Tensor, old: torch.Tensor, counts: torch.Tensor, changed: int) -> Places:
    offsets = torch.empty(changed, dtype=torch.int16, device=new.device)
    if changed:
        ends = counts.cumsum(0)
        programs = triton.cdiv(len(new), PIECE)
        _changes_kernel[(programs,)](
            new, old, counts, ends, offsets, len(new), PIECE=PIECE, BLOCK=BLOCK, WRITES=True
        )
    return counts.view(-1, BLOCK // PIECE).sum(1, dtype=torch.int32), offsets
