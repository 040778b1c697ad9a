"""Sums up, over the tokens of an optimizer step, what the meters of agreement follow from (observe/agreement.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.algorithms.segments import segment_sums
from megarl.observe.agreement import AGES, BINS, EDGES, TOKENS, YOUNGEST, Totals
from megarl.trainer.microbatch import MicroBatch
from megarl.trainer.sending import sent

_MOST = 300.0  # bound of a log-ratio whose exponential is squared, so that float64 holds the square


class Tally:
    """The sums on `device`, of the microbatches of one rank."""

    def __init__(self, device: torch.device):
        zeros = {"dtype": torch.float64, "device": device}
        self._ages = sent(torch.tensor(YOUNGEST[1:]), device)
        self._edges = sent(torch.from_numpy(EDGES), device)
        # Tokens that do not count go into one more row.
        self._sums = torch.zeros((len(AGES) + 1, 6), **zeros)
        self._bins = torch.zeros((len(AGES) + 1) * 2 * BINS, **zeros)
        self._largest = torch.zeros(len(AGES) + 1, **zeros)
        self._sequences = torch.zeros(3, **zeros)

    @torch.no_grad()
    def add(self, logprobs: torch.Tensor, microbatch: MicroBatch) -> None:
        """logprobs: [t] the trainer's. Nothing here waits for a GPU."""
        assert microbatch.ages is not None
        mask = microbatch.loss_mask
        age = torch.where(mask, torch.bucketize(microbatch.ages, self._ages, right=True), len(AGES))
        d = torch.where(mask, logprobs.double() - microbatch.mu_logprobs.double(), 0.0)
        size, bounded = d.abs(), d.clamp(max=_MOST)
        ratio = bounded.exp()
        columns = [torch.ones_like(d), size, d, ratio, ratio.square(), torch.expm1(bounded) - d]
        self._sums.index_add_(0, age, torch.stack(columns, dim=1))
        place = (2 * age + (d < 0)) * BINS + torch.bucketize(size, self._edges, right=True)
        self._bins.index_add_(0, place, columns[TOKENS])
        self._largest.scatter_reduce_(0, age, size, "amax")
        some = segment_sums(mask.double(), microbatch.boundaries) > 0
        whole = torch.where(some, segment_sums(d, microbatch.boundaries).clamp(max=_MOST).exp(), 0.0)
        self._sequences += torch.stack([some.sum(), whole.sum(), whole.square().sum()])

    def totals(self, counts: bool) -> Totals:
        """The sums over all ranks of which `counts` is true: those that together have seen each token once. Collective; the same on every
        rank."""
        rows = len(AGES)
        largest = self._largest[:rows]
        flat = torch.cat([self._sums[:rows].flatten(), self._bins[: 2 * rows * BINS], self._sequences])
        if not counts:
            largest, flat = torch.zeros_like(largest), torch.zeros_like(flat)
        if dist.get_world_size() > 1:
            dist.all_reduce(flat)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        sums, bins, sequences = (part.numpy() for part in flat.cpu().split([6 * rows, 2 * rows * BINS, 3]))
        return Totals(sums.reshape(rows, 6), bins.reshape(rows, 2, BINS), largest.cpu().numpy(), sequences)
