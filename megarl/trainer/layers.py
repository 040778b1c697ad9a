"""The decoder's modules that Megatron's own local layer spec lacks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megarl.models.routing import RoutingFormat
from megarl.trainer.cpu_support import layer_spec, replace_everywhere
from megarl.trainer.distributed import to_device
from megarl.trainer.microbatch import MicroBatch
from megarl.trainer.parallel import context_group, tensor_group


@lru_cache(maxsize=64)
def rotary_positions(
    boundaries: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device
) -> torch.Tensor:
    """[t / cp_size] int64: the place within its sequence of each token of a packed row, as context
    rank `cp_rank` has them.

    Sequences begin and end at `boundaries`. A rank has chunks `cp_rank` and `2 * cp_size - 1 -
    cp_rank` of each (rope_utils.py:149).
    """
    lengths = torch.tensor(boundaries).diff()
    places = torch.arange(boundaries[-1]) - torch.tensor(boundaries[:-1]).repeat_interleave(lengths)
    if cp_size > 1:
        chunks = places // (lengths // (2 * cp_size)).repeat_interleave(lengths)
        places = places[(chunks == cp_rank) | (chunks == 2 * cp_size - 1 - cp_rank)]
    return to_device(places, device)


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    *,
    cp_group: dist.ProcessGroup,
    **settings: Any,
) -> torch.Tensor:
    """Replaces megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd: the
    same values in one call.

    Megatron rotates packed sequences one after the other, in every layer. Many short sequences then
    take longer to rotate than to attend; on a GPU, which starts a dozen kernels for each, several
    times as long as all the rest.

    t [t, h, d], rotated by freqs [length of the longest sequence, 1, 1, d] -> [t, h, d].
    """
    positions = rotary_positions(
        boundaries=tuple(cu_seqlens.tolist()),
        cp_size=cp_group.size(),
        cp_rank=cp_group.rank(),
        device=freqs.device,
    )
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs[positions], **settings
    ).squeeze(1)


def rotate_packed_sequences_at_once() -> None:
    """Makes Megatron call `rotate_packed`. Repeated calls do nothing."""
    if rope_utils._apply_rotary_pos_emb_thd is not rotate_packed:
        replace_everywhere(rope_utils._apply_rotary_pos_emb_thd, rotate_packed)


def held_positions(boundaries: Sequence[int], ranks: int, rank: int) -> torch.Tensor:
    """[t / ranks] int64: the positions of a row on `rank` of `ranks`, in its order."""
    lengths = np.diff(boundaries)
    within = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], lengths)
    chunk = within // np.repeat(lengths // (2 * ranks), lengths)
    return torch.from_numpy(np.flatnonzero((chunk == rank) | (chunk == 2 * ranks - 1 - rank)))


def all_positions(boundaries: Sequence[int], ranks: int) -> torch.Tensor:
    """[t] int64: the positions on all ranks, rank after rank."""
    return torch.cat([held_positions(boundaries, ranks, rank) for rank in range(ranks)])


def cut(x: torch.Tensor, boundaries: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part, [t / n, ...], of x [t, ...], under context parallelism.

    Every sequence is cut into 2n chunks, and rank r of n has chunks r and 2n - 1 - r: early
    positions, which attend to few tokens, and late ones. Under a causal mask, all ranks have the
    same work. This is the order of Megatron and Transformer Engine for packed sequences
    (thd_get_partitioned_indices), which their rotary embeddings follow.

    `boundaries`: where sequences begin and end in the whole row, from the MicrobatchPlan. All are
    multiples of 2n.
    """
    if group.size() == 1:
        return x
    return x[to_device(held_positions(boundaries, group.size(), group.rank()), x.device)]


def join(
    x: torch.Tensor, boundaries: Sequence[int], group: dist.ProcessGroup, summed: bool = False
) -> torch.Tensor:
    """Joins every rank's part x [t / n, ...] to [t, ...] on all ranks; differentiable.

    If all ranks compute the same function of the result, its gradient is the same on all, and each
    rank takes its own part. If each rank computes a different function, pass `summed`: then the
    ranks' gradients are summed.
    """
    if group.size() == 1:
        return x
    parts = _Gather.apply(x, group, summed)
    return torch.empty_like(parts).index_copy(
        0, to_device(all_positions(boundaries, group.size()), x.device), parts
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, summed: bool) -> torch.Tensor:
        ctx.group = group
        ctx.summed = summed
        out = x.new_empty((group.size() * x.size(0), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        if ctx.summed:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's own parameters, and a copy of them on the host, since reading `cu_seqlens_q` would
    wait for a GPU. (Transformer Engine gets only the fields of the parent.)
    """

    boundaries: tuple[int, ...] = ()
    # (number, length) of adjacent sequences with equal lengths
    runs: tuple[tuple[int, int], ...] = ()


def packed_sequences(microbatch: MicroBatch, cp: int) -> PackedSequences:
    lengths = microbatch.plan.lengths
    # Without Transformer Engine, only Megatron's rotary embedding reads them, on the host. On a GPU
    # it would wait twice in every layer.
    if layer_spec() == "te":
        boundaries = microbatch.boundaries
    else:
        boundaries = torch.tensor(microbatch.plan.boundaries, dtype=torch.int32)
    # (The greatest length must be exact. If a table of rotary angles is as long as the whole row,
    # Megatron assumes that it continues from sequence to sequence.) If Transformer Engine cuts
    # sequences, it needs padded boundaries. Here they are the same, since padding is part of
    # sequences. Without them, it would compare boundaries, and wait for the GPU, in every layer.
    padded = boundaries if cp > 1 else None
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=padded,  # type: ignore[arg-type]
        cu_seqlens_kv_padded=padded,  # type: ignore[arg-type]
        pad_between_seqs=False,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        boundaries=microbatch.plan.boundaries,
        runs=tuple((len(list(run)), length) for length, run in groupby(lengths)),
    )


class ScalarHead(torch.nn.Module):
    """The head of reward models and critics: a linear map from hidden states to one number,
    computed in float32. Stands in for GPTModel's output layer, with the same arguments.

    Every tensor rank has the whole head, and applies it to its own positions.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        # finalize_model_grads reads it: each tensor rank saw only its part of the sequence, so
        # gradients are summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """[s, b, 1] float32 from hidden states [s, b, h]."""
        return F.linear(hidden.float(), self.weight.float()), None


def token_values(
    outputs: torch.Tensor, microbatch: MicroBatch, *, sequence_parallel: bool
) -> torch.Tensor:
    """[t] float32: the head's output at each position, 0 where `microbatch.loss_mask` is not set.

    outputs: [t / cp, 1], or [t / cp / tp, 1] if the sequence is also split over tensor ranks. The
    results are the same on all tensor and context ranks, and differentiable if all of them compute
    the same loss from it.
    """
    if sequence_parallel:
        outputs = gather_from_sequence_parallel_region(
            outputs, tensor_parallel_output_grad=False, group=tensor_group()
        )
    values = join(outputs[:, 0], microbatch.plan.boundaries, context_group())
    return torch.where(microbatch.loss_mask, values, 0.0)


class LayerReplay(RouterReplay):
    """Replays the choices of one router.

    It replaces Megatron's own RouterReplay, which needs a recorded choice for every token.

    If activations are recomputed, the backward passes of several microbatches ask again, in the
    order of their forward passes.
    """

    def __init__(self) -> None:
        # (The parent's constructor would put this into a list that outlives the trainer.)
        self._ids: torch.Tensor | None = None
        self._again: deque[torch.Tensor] = deque()
        self.replayed: torch.Tensor | int = 0  # replayed choices
        self.replaced: torch.Tensor | int = 0  # replayed choices that differ from the router's own

    def put(self, ids: torch.Tensor, recomputed: bool) -> None:
        """Sets ids [tokens, experts per token] for the next forward pass, -1 if unknown.

        With `recomputed`, also for its backward pass.
        """
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
        """(scores of the chosen experts, their ids), both [tokens, experts per token], from scores
        [tokens, experts].
        """
        assert default_compute_topk is not None and self._ids is not None
        with torch.no_grad():
            _, own_ids = default_compute_topk(
                scores, topk, num_groups=num_groups, group_topk=group_topk
            )
        # a forward pass that will be recomputed runs without gradients
        is_repeat = torch.is_grad_enabled() and bool(self._again)
        recorded = (self._again.popleft() if is_repeat else self._ids).long()
        is_recorded = recorded[:, :1] >= 0
        ids = torch.where(is_recorded, recorded, own_ids)
        if not is_repeat:
            self.replayed = self.replayed + is_recorded.sum()
            self.replaced = (
                self.replaced + (ids.sort(dim=1)[0] != own_ids.sort(dim=1)[0]).any(dim=1).sum()
            )
        return scores.gather(1, ids), ids


class RoutingReplay:
    """Rollout routing replay (Ma et al. 2025, arXiv 2510.11370) for all routers of this rank:
    tokens go to the same experts as when they were generated.

    Only the choice is replayed. The weights of the chosen experts come from this trainer's own
    scores, so that gradients reach the router. If a choice is unknown (for padding, or at the end
    of a sequence that an environment wrote), the router makes its own.
    """

    def __init__(
        self,
        format: RoutingFormat,
        chunks: Sequence[torch.nn.Module],
        sequence_parallel: bool,
        recompute: bool,
    ):
        """`chunks` are the model's virtual stages."""
        self.format = format
        self._sequence_parallel = sequence_parallel
        self._recompute = recompute
        self._routers: dict[torch.nn.Module, dict[int, LayerReplay]] = {
            chunk: {} for chunk in chunks
        }
        for chunk, layers in self._routers.items():
            for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
                if router.is_mtp_layer:  # engines do not run this layer on sampled tokens
                    continue
                assert router.layer_number is not None
                layers[router.layer_number - 1 - format.dense_layers] = router.router_replay = (
                    LayerReplay()
                )

    def reset(self) -> None:
        """Resets the counters."""
        for replay in self._replays():
            replay.replayed = replay.replaced = 0

    def put(self, chunk: torch.nn.Module, routing: torch.Tensor, boundaries: Sequence[int]) -> None:
        """Sets the experts for the next forward pass of `chunk`: [t, layers with experts, experts
        per token], -1 where unknown.

        Each router gets the tokens of this rank in Megatron's order: this rank's part under context
        and sequence parallelism.
        """
        rank_routing = cut(routing, boundaries, context_group())
        if self._sequence_parallel:
            tp = tensor_group()
            rank_routing = rank_routing.chunk(tp.size())[tp.rank()]
        for layer, replay in self._routers[chunk].items():
            replay.put(rank_routing[:, layer], self._recompute and torch.is_grad_enabled())

    def metrics(self, positions: int, device: torch.device) -> dict[str, float]:
        """The metrics since `reset`, over all ranks, after `positions` positions went through the
        model. Each position and layer has one choice of experts. The metrics are the share of
        choices that were replayed, and the share of these that differ from the trainer's own
        router.

        Collective: the same on every rank.
        """
        totals = [
            sum(replay.replayed for replay in self._replays()),
            sum(replay.replaced for replay in self._replays()),
        ]
        counts = torch.stack(
            [torch.as_tensor(total, dtype=torch.float64, device=device) for total in totals]
        )
        dist.all_reduce(counts)
        replayed, replaced = counts.tolist()
        choices = positions * self.format.shape[0]
        return {
            "router/replayed_fraction": replayed / max(1, choices),
            "router/replaced_fraction": replaced / max(1.0, replayed),
        }

    def _replays(self) -> list[LayerReplay]:
        result: list[LayerReplay] = []
        for layers in self._routers.values():
            result.extend(layers.values())
        return result


class RMSNorm(torch.nn.Module):
    """RMS normalisation over the last dimension; unlike Megatron's WrappedTorchNorm it allows
    sequence parallelism and zero-centred weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.zero_centred = config.layernorm_zero_centered_gamma
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # finalize_model_grads reads it: each tensor rank saw only its part of the sequence, so
        # gradients are summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.zero_centred:
            return F.rms_norm(
                x.float(), (x.size(-1),), 1.0 + self.weight.float(), self.eps
            ).type_as(x)
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class DeltaNet(GatedDeltaNet):
    """Megatron's gated delta net, with decays as Hugging Face and engines compute them.

    Megatron would round the exponential to bf16.
    """

    def _compute_g_and_beta(
        self,
        A_log_local_cp: torch.Tensor,
        dt_bias_local_cp: torch.Tensor,
        alpha: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay = A_log_local_cp.float().exp() * F.softplus(alpha.float() + dt_bias_local_cp.float())
        return -decay, beta.sigmoid()


class NormOfEachHead(RMSNorm):
    """RMS normalisation of the output of each head of a gated delta net, never zero-centred
    (Qwen3-Next).

    All heads share one weight. Its gradient is summed over the tensor ranks here, since Megatron
    (finalize_model_grads) does so only with sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(config, hidden_size, eps)
        self.group = tensor_group()
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d]."""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        return F.rms_norm(x, (x.size(-1),), weight, self.eps)


class NormOfAllHeads(torch.nn.Module):
    """RMS normalisation of queries or keys over all heads of all tensor ranks together.

    Every rank has the weights of all heads, but gradients only for its own heads. Megatron sums
    these gradients over the ranks (finalize_model_grads). If there are more ranks than heads, each
    head is on several ranks in a row.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int):
        """`hidden_size`: of a head; `heads`: of all tensor ranks."""
        super().__init__()
        self.eps = eps
        self.width = heads * hidden_size
        self.group = tensor_group()
        self.repeats = max(1, self.group.size() // heads)  # ranks that have the same head
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(self.width, dtype=config.params_dtype, device=device)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., heads / tp (at least one), d]."""
        values = x.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(
            values.square().sum(-1, keepdim=True), group=self.group
        )
        # its gradient comes from the heads of all ranks
        squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        parts = self.group.size() // self.repeats
        weight = self.weight.chunk(parts)[self.group.rank() // self.repeats]
        mean_square = squares / (self.width * self.repeats)
        return (weight * (values * torch.rsqrt(mean_square + self.eps))).to(x.dtype).view_as(x)


class NormedResidual(torch.nn.Module):
    """Norms the output of attention or an MLP, and adds it to the residual stream.

    Stands in for Megatron's bias-dropout-add.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return self._add

    def _add(
        self,
        output: tuple[torch.Tensor, torch.Tensor | None],
        residual: torch.Tensor,
        dropout: float,
    ) -> torch.Tensor:
        """All tensors are [s, b, h], or this rank's part of s."""
        output_values, bias = output
        assert bias is None and dropout == 0.0
        # Megatron enables gradients for this, even if it has disabled them for the layer (for
        # scoring, or to recompute it later).
        with torch.set_grad_enabled(output_values.requires_grad):
            return residual + self.norm(output_values)


class PairedRows(ColumnParallelLinear):
    """The first layer of an expert whose gate and up rows alternate.

    Its output has the gates first, as Megatron's MLP expects them.

    Transformer Engine's grouped layers do this themselves (`moe_mlp_glu_interleave_size`).
    """

    def forward(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, bias = super().forward(*arguments, **named)
        assert bias is not None
        return _gates_first(output), _gates_first(bias)


def _gates_first(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class OwnOutput(RowParallelLinear):
    """The second layer of an expert with a bias.

    Megatron's MLP adds the bias in place, which PyTorch refuses for a view as output.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        # Megatron would sum its gradient over tensor ranks. But these ranks have other experts, or
        # have already summed it as data-parallel ranks.
        self.bias.sequence_parallel = False  # type: ignore[union-attr]

    def forward(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, bias = super().forward(*arguments, **named)
        return output.clone(), bias


class CausalAttention(MegatronModule):
    """Causal attention of packed sequences, separate for each, with PyTorch's fused kernel.

    Replaces DotProductAttention.

    Adjacent sequences of equal length are one call, so that many short ones cost little. Under
    context parallelism, every rank gathers all keys and values, and masks by position.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ):
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.cp_group = context_group()
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq or 1, layer_number
        )
        # number of earlier tokens that a token sees
        self.reach = config.window_size[0] if windowed and config.window_size else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            sinks = torch.zeros(
                config.num_attention_heads // tensor_group().size(),
                dtype=config.params_dtype,
                device=device,
            )
            self.softmax_offset = torch.nn.Parameter(sinks)
            self.softmax_scale = softmax_scale or config.kv_channels**-0.5  # type: ignore[operator]
            set_tensor_model_parallel_attributes(
                self.softmax_offset, is_parallel=True, dim=0, stride=1
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        """query [t / cp, heads, d], key and value [t / cp, kv_heads, d] -> [t / cp, heads * d]."""
        assert attention_mask is None and attention_bias is None and packed_seq_params is not None
        group = self.cp_group
        runs = packed_seq_params.runs
        ranks = group.size()
        grouped = query.size(1) != key.size(1)
        key, value = (
            join(x, packed_seq_params.boundaries, group, summed=True) for x in (key, value)
        )
        queries = query.split([count * length // ranks for count, length in runs])
        keys, values = (x.split([count * length for count, length in runs]) for x in (key, value))
        outs = []
        for (count, length), parts in zip(runs, zip(queries, keys, values)):
            mask = self._mask(length, query.device)
            # [count, heads, length, d]
            q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in parts)
            if self.softmax_offset is not None:
                q, k, v, mask = self._with_sinks(q, k, v, mask)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=grouped,
            )
            outs.append(
                out[..., -length // ranks :, : value.size(-1)]
                .transpose(1, 2)
                .flatten(2)
                .flatten(0, 1)
            )
        return torch.cat(outs)

    def _with_sinks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Adds a token with value zero before all others.

        An additional dim of its key gives each head its sink as the score.
        """
        assert self.softmax_offset is not None and self.softmax_scale is not None
        scores = (
            (self.softmax_offset / self.softmax_scale)
            .view(1, -1, 1, 1)
            .expand(len(q), -1, q.size(2), 1)
        )
        q = torch.cat([q, scores.to(q.dtype)], -1)
        k = F.pad(k, (0, 1, 1, 0))
        v = F.pad(v, (0, 1, 1, 0))
        k[:, :, 0, -1] = 1.0
        if mask is None:
            return (F.pad(q, (0, 0, 1, 0)), k, v, None)
        return (q, k, v, F.pad(mask, (1, 0), value=True))

    def _mask(self, length: int, device: torch.device) -> torch.Tensor | None:
        """[length / cp, length] for this rank's positions of a sequence; None if it is the plain
        causal mask of all positions.
        """
        ranks = self.cp_group.size()
        reach = length if self.reach is None else self.reach
        if ranks == 1 and reach >= length - 1:
            return None
        if ranks > 1:
            positions = held_positions((0, length), ranks, self.cp_group.rank())
        else:
            positions = torch.arange(length)
        distance = to_device(positions, device)[:, None] - torch.arange(length, device=device)
        return (distance >= 0) & (distance <= reach)


class LatentAttention(CausalAttention):
    """Causal attention whose keys end in a part shared by all heads of all tensor ranks
    (DeepSeek-V2, section 2.1.3).

    In Megatron's local spec (0.19.2), every rank has that whole part, but computes its gradient
    only from the rank's own heads.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """query and key [t / cp, heads, d], value [t / cp, heads, v] -> [t / cp, heads * v]."""
        assert isinstance(self.config, MLATransformerConfig)
        head_keys, shared_keys = key.split(
            [self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1
        )
        # its gradient is summed over the tensor ranks
        shared_keys = copy_to_tensor_model_parallel_region(shared_keys)
        return super().forward(
            query, torch.cat([head_keys, shared_keys], dim=-1), value, *args, **kwargs
        )
