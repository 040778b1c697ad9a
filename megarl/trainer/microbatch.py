"""Distributes sequences over data-parallel ranks, and packs them into microbatches, in which
sequences follow each other in one row.

A sequence of n tokens has n - 1 positions. Position i reads token i and predicts token i + 1, so
the last token is only predicted. So a sequence of one token has no position and is ignored. All
per-position values of a microbatch are about the predicted token.

With sequence or context parallelism, there is also padding (`Alignment`). It is masked and follows
the end of a sequence, where causal attention hides it from all positions that count.

`plan_microbatches` computes only with numbers and gives the same result on every rank. `build`
makes the tensors of one microbatch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from megarl.base.geometry import TrainerTopology
from megarl.base.rollout_types import RemoteSequence, TrainSequence
from megarl.models.routing import RoutingFormat
from megarl.teachers.loss import TeacherTokens
from megarl.trainer.distributed import to_device


@dataclass(frozen=True)
class Alignment:
    """Numbers of positions are padded to multiples of these numbers."""

    sequence: int = 1  # for each sequence: context parallelism cuts it into 2 cp chunks
    # for the microbatch: sequence parallelism cuts each context rank's part into tp. A multiple of
    # `sequence`
    microbatch: int = 1

    @classmethod
    def of(cls, topology: TrainerTopology, sequence_parallel: bool) -> Alignment:
        sequence = 2 * topology.cp if topology.cp > 1 else 1
        return cls(
            sequence, math.lcm(sequence, topology.cp * (topology.tp if sequence_parallel else 1))
        )


@dataclass(frozen=True)
class MicrobatchPlan:
    """One microbatch: its sequences, longest first, and their beginnings and ends.

    Without sequences, it is only padding.
    """

    indices: tuple[int, ...]
    # from 0 to the number of positions; padding belongs to the sequence before it
    boundaries: tuple[int, ...]

    @property
    def positions(self) -> int:
        return self.boundaries[-1]

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.boundaries, self.boundaries[1:])]


@dataclass(frozen=True)
class KeptRows:
    """For each position, the set of tokens from which its predicted token was drawn.

    On the host.
    """

    sizes: np.ndarray  # [t] int64, 0 where nothing is predicted or the environment wrote the token
    ids: np.ndarray  # [sum of sizes] int32, position by position

    def of(self, positions: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The sizes, on the host, and ids of these positions, as linear_logprobs expects them."""
        sizes = self.sizes[positions]
        begins = (np.cumsum(self.sizes) - self.sizes)[positions]
        places = np.arange(sizes.sum()) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
        return torch.from_numpy(sizes), to_device(torch.from_numpy(self.ids[places]), device)


@dataclass(frozen=True)
class MicroBatch:
    """The training data of one microbatch of t positions."""

    inputs: torch.Tensor  # [t] int64, 0 on padding
    targets: torch.Tensor  # [t] int64, the token that each position predicts; 0 on padding
    boundaries: torch.Tensor  # [sequences + 1] int32, as in `plan`
    loss_mask: torch.Tensor  # [t] bool, False on padding
    # [t] bool: loss_mask on the host. Log-probs are computed only for these positions
    scored: np.ndarray
    mu_logprobs: torch.Tensor  # [t] float32, 0 where masked
    advantages: torch.Tensor  # [t] float32, 0 where masked
    reference_logprobs: torch.Tensor | None  # [t] float32, if passed to train_step
    proximal_logprobs: torch.Tensor | None  # the same
    old_values: torch.Tensor | None  # the same
    returns: torch.Tensor | None  # the same
    # [t] int32, weight versions since each predicted token was sampled, if passed to train_step
    ages: torch.Tensor | None
    # [t, layers with experts, experts per token] int16, -1 where unknown; None: not replayed
    routing: torch.Tensor | None
    kept: KeptRows | None  # None: log-probs are over the whole vocabulary
    plan: MicrobatchPlan
    entropy: torch.Tensor | None = None  # [t] float32 with its gradient, once outputs are computed
    teachers: tuple[TeacherTokens, ...] = ()  # the outputs of each teacher passed to train_step


def plan_microbatches(
    lengths: Sequence[int],
    dp: int,
    max_tokens: int,
    alignment: Alignment = Alignment(),
    squares: float = 0.0,
    count_multiple: int = 1,
) -> list[list[MicrobatchPlan]]:
    """The microbatches of every data-parallel rank: [dp][n], where n is a multiple of
    `count_multiple`, positive and the same for all ranks.

    A sequence of p positions costs p + squares p^2, where the second term is for attention.
    Sequences go, longest first, to the rank with the least cost so far, and there to the cheapest
    microbatch that has room. A microbatch has at most `max_tokens` positions, or a single sequence
    that is longer. There are as many microbatches as first-fit decreasing needs on the fullest
    rank. Every rank has this number, because Megatron's pipeline schedules need the same number
    everywhere (with virtual stages, a multiple of the stages). Microbatches that get no sequence
    are padding. Deterministic.
    """
    sizes = []
    for length in lengths:
        sizes.append(math.ceil((length - 1) / alignment.sequence) * alignment.sequence)
    costs = [size + squares * size * size for size in sizes]
    capacity = max(1, max_tokens // alignment.microbatch) * alignment.microbatch
    shares: list[list[int]] = [[] for _ in range(dp)]
    ranks = [(0.0, rank) for rank in range(dp)]
    for index in sorted((i for i, size in enumerate(sizes) if size), key=lambda i: (-sizes[i], i)):
        cost, rank = ranks[0]
        shares[rank].append(index)
        heapq.heapreplace(ranks, (cost + costs[index], rank))

    firsts = [_first_fit(share, sizes, capacity) for share in shares]
    count = math.ceil(max(1, max(map(len, firsts))) / count_multiple) * count_multiple
    plans = []
    for share, first in zip(shares, firsts):
        parts = _even(share, sizes, costs, capacity, count) or first + [[]] * (count - len(first))
        plans.append([_laid_out(indices, sizes, alignment) for indices in parts])
    return plans


def _first_fit(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts each sequence into the first microbatch that has room.

    `order` has decreasing sizes. A sequence larger than `capacity` is alone.
    """
    packed: list[list[int]] = []
    room = np.full(len(order), capacity)
    for index in order:
        place = int((room >= min(sizes[index], capacity)).argmax())
        if place == len(packed):
            packed.append([])
        packed[place].append(index)
        room[place] -= sizes[index]
    return packed


def _even(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], capacity: int, count: int
) -> list[list[int]] | None:
    """Puts each sequence into the cheapest of `count` microbatches that has room; None if there is
    no room for one.
    """
    packed: list[list[int]] = [[] for _ in range(count)]
    room = np.full(count, capacity)
    loads = np.zeros(count)
    for index in order:
        place = int(np.where(room >= min(sizes[index], capacity), loads, np.inf).argmin())
        if room[place] < min(sizes[index], capacity):
            return None
        packed[place].append(index)
        room[place] -= sizes[index]
        loads[place] += costs[index]
    return packed


def _laid_out(indices: Sequence[int], sizes: Sequence[int], alignment: Alignment) -> MicrobatchPlan:
    ends = list(accumulate(sizes[i] for i in indices)) or [1]
    ends[-1] = math.ceil(ends[-1] / alignment.microbatch) * alignment.microbatch
    return MicrobatchPlan(tuple(indices), (0, *ends))


def build(
    plan: MicrobatchPlan,
    sequences: Sequence[TrainSequence | RemoteSequence],
    device: torch.device,
    reference_logprobs: Sequence[np.ndarray] | None = None,
    proximal_logprobs: Sequence[np.ndarray] | None = None,
    old_values: Sequence[np.ndarray] | None = None,
    returns: Sequence[np.ndarray] | None = None,
    ages: Sequence[np.ndarray] | None = None,
    routing: RoutingFormat | None = None,
) -> MicroBatch:
    """The tensors of one microbatch, on `device`.

    `routing`: the format of the sequences' routing, if it is to be replayed.
    """
    sequences_here = {index: _held(sequences[index]) for index in plan.indices}

    def laid(
        values: Callable[[int], np.ndarray], dtype: type, part: slice = slice(1, None)
    ) -> torch.Tensor:
        return to_device(torch.from_numpy(lay(plan, values, dtype, part=part)), device)

    def laid_or_none(rows: Sequence[np.ndarray] | None) -> torch.Tensor | None:
        if rows is None:
            return None
        return laid(lambda i: rows[i], np.float32)

    scored = lay(plan, lambda i: sequences_here[i].loss_mask, np.bool_)
    return MicroBatch(
        inputs=laid(lambda i: sequences_here[i].token_ids, np.int64, slice(-1)),
        targets=laid(lambda i: sequences_here[i].token_ids, np.int64),
        boundaries=to_device(torch.tensor(plan.boundaries, dtype=torch.int32), device),
        loss_mask=to_device(torch.from_numpy(scored), device),
        scored=scored,
        mu_logprobs=laid(lambda i: sequences_here[i].mu_logprobs, np.float32),
        advantages=laid(lambda i: sequences_here[i].advantages, np.float32),
        reference_logprobs=laid_or_none(reference_logprobs),
        proximal_logprobs=laid_or_none(proximal_logprobs),
        old_values=laid_or_none(old_values),
        returns=laid_or_none(returns),
        ages=None if ages is None else laid(lambda i: ages[i], np.int32),
        routing=None
        if routing is None
        else to_device(_routing(plan, sequences_here, routing), device),
        kept=_kept(plan, sequences_here, scored),
        plan=plan,
    )


def lay(
    plan: MicrobatchPlan,
    values: Callable[[int], np.ndarray],
    dtype: type,
    shape: tuple[int, ...] = (),
    part: slice = slice(1, None),
) -> np.ndarray:
    """[t, *shape]: the `values` of the tokens in `part` of each sequence, by default the predicted
    tokens; 0 on padding.
    """
    row = np.zeros((plan.positions, *shape), dtype)
    for start, index in zip(plan.boundaries, plan.indices):
        row_values = values(index)[part]
        row[start : start + len(row_values)] = row_values
    return row


def _held(sequence: TrainSequence | RemoteSequence) -> TrainSequence:
    if isinstance(sequence, RemoteSequence):
        raise RuntimeError(
            f"a sequence of {len(sequence)} tokens is in this rank's plan, but another "
            "data-parallel rank has its numbers"
        )
    return sequence


def _routing(
    plan: MicrobatchPlan, sequences: Mapping[int, TrainSequence], routing: RoutingFormat
) -> torch.Tensor:
    ids = np.full((plan.positions, *routing.shape), -1, np.int16)
    for start, index in zip(plan.boundaries, plan.indices):
        expert_ids = routing.unpack(sequences[index].routing)
        tokens = len(sequences[index])
        if len(expert_ids) >= tokens:
            raise ValueError(
                f"experts of {len(expert_ids)} positions in a sequence of {tokens} tokens, the "
                "last of which has none"
            )
        ids[start : start + len(expert_ids)] = expert_ids
    return torch.from_numpy(ids)


def _kept(
    plan: MicrobatchPlan, sequences: Mapping[int, TrainSequence], scored: np.ndarray
) -> KeptRows | None:
    if all(sequence.kept is None for sequence in sequences.values()):
        return None
    sizes = np.zeros(plan.positions, np.int64)
    ids = []
    for start, index in zip(plan.boundaries, plan.indices):
        sequence = sequences[index]
        kept_sets = sequences[index].kept
        if kept_sets is not None:
            of_tokens = kept_sets.checked_ids(sequence.token_ids[len(sequence) - len(kept_sets) :])
            counts = np.concatenate(
                [np.zeros(len(sequence) - len(kept_sets), np.int64), kept_sets.counts]
            )
            sizes[start : start + len(counts) - 1] = counts[1:]
            ids.append(of_tokens[counts[0] :])
    missing = int((scored & (sizes == 0)).sum())
    if missing:
        raise ValueError(
            f"{missing} of {int(scored.sum())} tokens of the loss lack the sets they were drawn "
            "from (rollout.replay_mask)"
        )
    return KeptRows(sizes, np.concatenate(ids))


def predicting(microbatch: MicroBatch) -> MicroBatch:
    """The targets of the layer: each position gets the token that the next position predicts.

    The end of a sequence has none.
    """
    ends = np.array(microbatch.plan.boundaries[1:]) - 1
    scored = np.append(microbatch.scored[1:], False)
    scored[ends] = False
    mask = torch.from_numpy(scored).to(microbatch.loss_mask.device, non_blocking=True)
    return replace(
        microbatch, targets=microbatch.targets.roll(-1), loss_mask=mask, scored=scored, kept=None
    )


def predicted_tokens(sequences: Iterable[TrainSequence]) -> int:
    """The number of tokens of these sequences that the layer predicts."""
    return sum(int(np.asarray(sequence.loss_mask)[2:].sum()) for sequence in sequences)
