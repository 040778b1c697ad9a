"""The decoder's modules that Megatron's own local layer spec lacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.trainer import context
from megarl.trainer.groups import context_group, tensor_group


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
    """Causal attention with PyTorch's fused kernel, including grouped queries; replaces DotProductAttention.

    Sequences are padded on the right, so the causal mask alone keeps padding out of every real position. Under context
    parallelism every rank gathers all keys and values, and masks by position (context.py).
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
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [s, b, heads, d], key and value [s, b, kv_heads, d] -> [s, b, heads * d]."""
        assert attention_mask is None and attention_bias is None and packed_seq_params is None
        ranks, mask = self.cp_group.size(), None
        if ranks > 1:
            mine = context.held_positions(query.size(0) * ranks, ranks, self.cp_group.rank()).to(query.device)
            mask = mine[:, None] >= context.all_positions(query.size(0) * ranks, ranks).to(query.device)
            key, value = (context.gather(x, self.cp_group) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


class LatentAttention(CausalAttention):
    """Causal attention whose keys end in a part shared by all heads of all tensor ranks (DeepSeek-V2, section 2.1.3).

    Megatron's local spec gives every rank the whole of that part, but its gradient only from the rank's own heads.
    """

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """query and key [s, b, heads, d], value [s, b, heads, v] -> [s, b, heads * v]."""
        assert isinstance(self.config, MLATransformerConfig)
        own, shared = key.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        if shared.requires_grad and self.config.tensor_model_parallel_size > 1:
            # (Megatron's own copy_to_tensor_model_parallel_region sums a copy if a tensor is not contiguous, and returns the unsummed one.)
            shared.register_hook(_summed_over_tensor_ranks)
        return super().forward(query, torch.cat([own, shared], dim=-1), value, *args, **kwargs)


def _summed_over_tensor_ranks(grad: torch.Tensor) -> torch.Tensor:
    total = grad.contiguous()
    dist.all_reduce(total, group=tensor_group())
    return total
