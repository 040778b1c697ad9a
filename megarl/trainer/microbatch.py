"""Distributes sequences over data-parallel ranks and packs them into microbatches of padded [b, s] tensors.

`plan_microbatches` is pure arithmetic and the same on every rank; `build` makes the tensors of one microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.models.routing import RoutingFormat
from megarl.types import TrainSequence


@dataclass(frozen=True)
class MicrobatchPlan:
    """One microbatch: its sequences and the length they are padded to. Without sequences it is one row of masked padding."""

    indices: tuple[int, ...]
    length: int  # s, columns of the tensors

    @property
    def positions(self) -> int:
        """The length that the model runs at: the last token of a sequence is predicted, but predicts nothing."""
        return self.length - 1


@dataclass(frozen=True)
class MicroBatch:
    """The training data of one microbatch. Column i belongs to the prediction of token i; column 0 is always masked."""

    tokens: torch.Tensor  # [b, s] int64, 0 where padded
    loss_mask: torch.Tensor  # [b, s] bool, False where padded
    mu_logprobs: torch.Tensor  # [b, s] float32, 0 where masked
    advantages: torch.Tensor  # [b, s] float32, 0 where masked
    reference_logprobs: torch.Tensor | None  # [b, s] float32, if train_step was given them
    routing: torch.Tensor | None  # [b, s - 1, layers with experts, experts per token] int16, -1 where unknown; None: not replayed
    indices: tuple[int, ...]  # position of each row in train_step's `sequences`; empty when all rows are padding


def plan_microbatches(
    lengths: Sequence[int], dp: int, max_tokens: int, multiple: int, count_multiple: int = 1
) -> list[list[MicrobatchPlan]]:
    """The microbatches of every data-parallel rank: [dp][n], where n is the same positive multiple of `count_multiple` for all ranks.

    Sequences go, longest first, to the rank with the fewest tokens so far. Each rank packs its own in that order, so that sequences of a
    microbatch have similar lengths. A microbatch holds at most `max_tokens` padded tokens, or one sequence longer than that, and its
    number of positions is a multiple of `multiple`. Ranks that need fewer microbatches than others get empty ones: Megatron's pipeline
    schedules need the same number everywhere, and with virtual stages a multiple of the stages. Deterministic.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(dp)]
    tokens = [0] * dp
    for index in order:
        rank = min(range(dp), key=lambda r: (tokens[r], r))
        shares[rank].append(index)
        tokens[rank] += lengths[index]

    plans = [_pack(share, lengths, max_tokens, multiple) for share in shares]
    count = math.ceil(max(1, max(len(plan) for plan in plans)) / count_multiple) * count_multiple
    empty = MicrobatchPlan(indices=(), length=multiple + 1)
    return [plan + [empty] * (count - len(plan)) for plan in plans]


def _pack(order: Sequence[int], lengths: Sequence[int], max_tokens: int, multiple: int) -> list[MicrobatchPlan]:
    plans: list[MicrobatchPlan] = []
    start = 0
    while start < len(order):
        positions = math.ceil(max(lengths[order[start]] - 1, 1) / multiple) * multiple
        size = max(1, max_tokens // positions)
        plans.append(MicrobatchPlan(tuple(order[start : start + size]), positions + 1))
        start += size
    return plans


def build(
    plan: MicrobatchPlan,
    sequences: Sequence[TrainSequence],
    device: torch.device,
    reference_logprobs: Sequence[Sequence[float]] | None = None,
    routing: RoutingFormat | None = None,
) -> MicroBatch:
    """The tensors of one microbatch, on `device`; `routing` is the format of the sequences' routing, if it is to be replayed."""
    chosen = [sequences[i] for i in plan.indices]

    def padded(rows: list[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        flat = [row + [0] * (plan.length - len(row)) for row in map(list, rows)] or [[0] * plan.length]
        return torch.tensor(flat, dtype=dtype, device=device)

    return MicroBatch(
        tokens=padded([s.token_ids for s in chosen], torch.int64),
        loss_mask=padded([s.loss_mask for s in chosen], torch.bool),
        mu_logprobs=padded([s.mu_logprobs for s in chosen], torch.float32),
        advantages=padded([s.advantages for s in chosen], torch.float32),
        reference_logprobs=None if reference_logprobs is None else padded([reference_logprobs[i] for i in plan.indices], torch.float32),
        routing=None if routing is None else _routing(plan, chosen, routing).to(device),
        indices=plan.indices,
    )


def _routing(plan: MicrobatchPlan, chosen: Sequence[TrainSequence], routing: RoutingFormat) -> torch.Tensor:
    ids = np.full((max(1, len(chosen)), plan.positions, *routing.shape), -1, np.int16)
    for row, sequence in zip(ids, chosen):
        known = routing.unpack(sequence.routing)
        if len(known) >= len(sequence.token_ids):
            tokens = len(sequence.token_ids)
            raise ValueError(f"experts of {len(known)} positions in a sequence of {tokens} tokens, the last of which has none")
        row[: len(known)] = known
    return torch.from_numpy(ids)
