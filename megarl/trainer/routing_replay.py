"""Rollout routing replay (Ma et al. 2025, arXiv 2510.11370): tokens go to the experts that they went to when they were generated.

Only the choice is replayed. The weights of the chosen experts come from this trainer's own scores, so that gradients reach the router.
Where no choice is known (for padding, or the end of a sequence that an environment wrote) the router makes its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from megarl.models.routing import RoutingFormat
from megarl.trainer import context
from megarl.trainer.groups import context_group, tensor_group


class LayerReplay(RouterReplay):
    """Gives one router its choices. It replaces Megatron's own RouterReplay, which needs a recorded choice for every token.

    If activations are recomputed, the backward passes of several microbatches ask again, in the order of their forward passes.
    """

    def __init__(self) -> None:
        # (The parent's constructor would put this into a list that outlives the trainer.)
        self._ids: torch.Tensor | None = None
        self._again: deque[torch.Tensor] = deque()
        self.replayed: torch.Tensor | int = 0  # tokens
        self.replaced: torch.Tensor | int = 0  # those of them whose experts differ from the router's own choice

    def put(self, ids: torch.Tensor, recomputed: bool) -> None:
        """Sets ids [tokens, experts per token] for the next forward pass, -1 where unknown; with `recomputed` for its backward pass too."""
        self._ids = ids
        if recomputed:
            self._again.append(ids)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores of the chosen experts, their ids), both [tokens, experts per token], from scores [tokens, experts]."""
        assert default_compute_topk is not None and self._ids is not None
        with torch.no_grad():
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        again = torch.is_grad_enabled() and bool(self._again)  # a forward pass that will be recomputed runs without gradients
        recorded = (self._again.popleft() if again else self._ids).long()
        known = recorded[:, :1] >= 0
        chosen = torch.where(known, recorded, own)
        if not again:
            self.replayed = self.replayed + known.sum()
            self.replaced = self.replaced + (chosen.sort(dim=1)[0] != own.sort(dim=1)[0]).any(dim=1).sum()
        return scores.gather(1, chosen), chosen


class RoutingReplay:
    """The replay for all routers of this rank."""

    def __init__(self, format: RoutingFormat, chunks: Sequence[torch.nn.Module], sequence_parallel: bool, recompute: bool):
        """`chunks` are the model's virtual stages."""
        self.format = format
        self._sequence_parallel, self._recompute = sequence_parallel, recompute
        self._routers: dict[torch.nn.Module, dict[int, LayerReplay]] = {chunk: {} for chunk in chunks}
        for chunk, layers in self._routers.items():
            for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
                assert router.layer_number is not None
                layers[router.layer_number - 1 - format.dense_layers] = router.router_replay = LayerReplay()

    def reset(self) -> None:
        """Resets the counters."""
        for replay in self._replays():
            replay.replayed = replay.replaced = 0

    def put(self, chunk: torch.nn.Module, routing: torch.Tensor, boundaries: Sequence[int]) -> None:
        """Sets the experts for the next forward pass of `chunk`: [t, layers with experts, experts per token], -1 where unknown.

        Each router gets the tokens of this rank, in Megatron's order: cut by context, and the part by sequence parallelism.
        """
        mine = context.cut(routing, boundaries, context_group())
        if self._sequence_parallel:
            tp = tensor_group()
            mine = mine.chunk(tp.size())[tp.rank()]
        for layer, replay in self._routers[chunk].items():
            replay.put(mine[:, layer], self._recompute and torch.is_grad_enabled())

    def metrics(self, positions: int, device: torch.device) -> dict[str, float]:
        """The metrics since `reset`, over all ranks, after `positions` positions went through the model. There is one choice of experts for
        each position and layer: the share of choices replayed, and of those the share that this trainer's router would have made otherwise.

        Collective: the same on every rank.
        """
        totals = [sum(replay.replayed for replay in self._replays()), sum(replay.replaced for replay in self._replays())]
        counts = torch.stack([torch.as_tensor(total, dtype=torch.float64, device=device) for total in totals])
        dist.all_reduce(counts)
        replayed, replaced = counts.tolist()
        choices = positions * self.format.shape[0]
        return {"router/replayed_fraction": replayed / max(1, choices), "router/replaced_fraction": replaced / max(1.0, replayed)}

    def _replays(self) -> list[LayerReplay]:
        return [replay for layers in self._routers.values() for replay in layers.values()]
