"""The decoder's modules that Megatron's own local layer spec lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.trainer import context
from megarl.trainer.groups import context_group
from megarl.trainer.packing import PackedSequences
from megarl.trainer.sending import sent


class RMSNorm(torch.nn.Module):
    """RMS normalisation over the last dimension; unlike Megatron's WrappedTorchNorm it allows sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # finalize_model_grads reads it: each tensor rank saw only its part of the sequence, so gradients are summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class CausalAttention(MegatronModule):
    """Causal attention of packed sequences, each by itself, with PyTorch's fused kernel; replaces DotProductAttention.

    Sequences of equal length that stand side by side are one call, so that many short ones cost little. Under context parallelism every
    rank gathers all keys and values, and masks by position (context.py).
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
        group, runs = self.cp_group, packed_seq_params.runs
        ranks, grouped = group.size(), query.size(1) != key.size(1)
        key, value = (context.join(x, packed_seq_params.boundaries, group, summed=True) for x in (key, value))
        queries = query.split([count * length // ranks for count, length in runs])
        keys, values = (x.split([count * length for count, length in runs]) for x in (key, value))
        outs = []
        for (count, length), parts in zip(runs, zip(queries, keys, values)):
            mask = None
            if ranks > 1:
                mine = sent(context.held_positions((0, length), ranks, group.rank()), query.device)
                mask = mine[:, None] >= torch.arange(length, device=query.device)
            q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in parts)  # [count, heads, length, d]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped
            )
            outs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outs)


class LatentAttention(CausalAttention):
    """Causal attention whose keys end in a part shared by all heads of all tensor ranks (DeepSeek-V2, section 2.1.3).

    Megatron's local spec (0.19.2) gives every rank the whole of that part, but its gradient only from the rank's own heads.
    """

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """query and key [t / cp, heads, d], value [t / cp, heads, v] -> [t / cp, heads * v]."""
        assert isinstance(self.config, MLATransformerConfig)
        own, shared = key.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        shared = copy_to_tensor_model_parallel_region(shared)  # whose gradient is summed over the tensor ranks
        return super().forward(query, torch.cat([own, shared], dim=-1), value, *args, **kwargs)
