"""Packed sequences rotated in one call have the values of sequences rotated one by one, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megarl.trainer import cpu_support

cpu_support.install()
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

LENGTHS = (4, 12, 4, 8, 20)  # multiples of 2 * cp for cp up to 2
FREQUENCIES = torch.rand(max(LENGTHS), 1, 1, 6)


@dataclass
class Group:
    """Stands in for a context-parallel group."""

    ranks: int
    number: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


def rotated_one_by_one(t: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """t [t / cp_size, h, d]. Each sequence is cut into 2 * cp_size chunks; a rank has one from the front and one from the back."""
    parts = []
    for part, length in zip(t.split([length // cp_size for length in LENGTHS]), LENGTHS):
        chunks = FREQUENCIES[:length].chunk(2 * cp_size)
        frequencies = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]) if cp_size > 1 else FREQUENCIES[:length]
        parts.append(rope_utils._apply_rotary_pos_emb_bshd(part.unsqueeze(1), frequencies, mscale=1.25).squeeze(1))
    return torch.cat(parts)


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_rotation_of_packed_sequences_is_bit_equal(cp_size: int, cp_rank: int) -> None:
    boundaries = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)
    results = []
    for rotate in (
        lambda t: rotated_one_by_one(t, cp_size, cp_rank),
        lambda t: rope_utils._apply_rotary_pos_emb_thd(t, boundaries, FREQUENCIES, mscale=1.25, cp_group=Group(cp_size, cp_rank)),
    ):
        torch.manual_seed(0)
        t = torch.randn(sum(LENGTHS) // cp_size, 3, 8, requires_grad=True)
        output = rotate(t)
        output.backward(torch.randn_like(output))
        results.append((output.detach(), t.grad))
    assert rope_utils._apply_rotary_pos_emb_thd is cpu_support.rotate_packed
    for one, other in zip(*results):
        assert torch.equal(one, other)
