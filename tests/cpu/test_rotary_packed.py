"""Packed sequences rotated in one call have the values of sequences rotated one by one, to the last
bit.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import torch

from megarl.trainer import cpu_support

LENGTHS = (4, 12, 4, 8, 20)  # multiples of 2 * cp for cp up to 2


@dataclass
class OneRankGroup:
    """Stands in for a context-parallel group."""

    ranks: int
    number: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


def test_rotation_of_packed_sequences_is_bit_equal() -> None:
    """In a process of its own, since other tests import Megatron without support for CPUs."""
    completed = subprocess.run([sys.executable, __file__], capture_output=True, encoding="utf-8")
    assert completed.returncode == 0, completed.stderr


def compare(cp_size: int, cp_rank: int) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    from megarl.trainer import layers

    layers.rotate_packed_sequences_at_once()
    frequencies = torch.rand(max(LENGTHS), 1, 1, 6)
    boundaries = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)

    def one_by_one(t: torch.Tensor) -> torch.Tensor:
        """A sequence is cut into 2 * cp_size chunks; a rank has one from the front and one from the
        back.
        """
        parts = []
        for part, length in zip(t.split([length // cp_size for length in LENGTHS]), LENGTHS):
            chunks = frequencies[:length].chunk(2 * cp_size)
            of_rank = (
                torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])
                if cp_size > 1
                else frequencies[:length]
            )
            parts.append(
                rope_utils._apply_rotary_pos_emb_bshd(
                    part.unsqueeze(1), of_rank, mscale=1.25
                ).squeeze(1)
            )
        return torch.cat(parts)

    def together(t: torch.Tensor) -> torch.Tensor:
        group = OneRankGroup(cp_size, cp_rank)
        return rope_utils._apply_rotary_pos_emb_thd(
            t, boundaries, frequencies, mscale=1.25, cp_group=group
        )

    assert rope_utils._apply_rotary_pos_emb_thd is layers.rotate_packed
    t = torch.randn(sum(LENGTHS) // cp_size, 3, 8, requires_grad=True)
    gradient = torch.randn_like(t)
    (expected_gradient,) = torch.autograd.grad(one_by_one(t), t, gradient)
    (its_gradient,) = torch.autograd.grad(together(t), t, gradient)
    assert torch.equal(together(t), one_by_one(t))
    assert torch.equal(its_gradient, expected_gradient)


if __name__ == "__main__":
    cpu_support.install()
    for size, rank in ((1, 0), (2, 0), (2, 1)):
        compare(size, rank)
