"""Multi-head latent attention (DeepSeek-V2, section 2.1).

SGLang derives w_kc and w_vc from kv_b_proj after loading. They are not parameters, so they are not
listed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.attention import Attention
from megarl.models.block import Sizes
from megarl.models.parameters import LAYER, LogicalTensor, Parameter, Part, whole

_A = "model.layers.{layer}.self_attn."
Q_DOWN, Q_UP, KV_UP, O = (_A + f"{x}_proj.weight" for x in ("q_a", "q_b", "kv_b", "o"))
KV_DOWN = _A + "kv_a_proj_with_mqa.weight"
Q_NORM = _A + "q_a_layernorm.weight"
KV_NORM = _A + "kv_a_layernorm.weight"
SGLANG_DOWN = _A + "fused_qkv_a_proj_with_mqa.weight"
YARN_KEYS = {  # MLATransformerConfig's → those of config.json
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


@dataclass(frozen=True, kw_only=True)
class MultiHeadLatentAttention(Attention):
    """`Sizes.head_dim` is nope_dim + rope_dim."""

    NAME: ClassVar = "latent attention"
    QUANTISED: ClassVar = (SGLANG_DOWN, Q_UP, KV_UP, O)
    INPUT_NORM: ClassVar = dict.fromkeys(("local", "te"), "input_layernorm.weight")
    # SGLang derives tensors from kv_b_proj, and does not expect it to be transposed
    ONLY_FP8_BLOCKS: ClassVar = True
    OWN_ROPE: ClassVar = True  # DeepSeek's YaRN, or a plain one
    ROPE_TYPES: ClassVar = ("default", "yarn")

    q_rank: int
    kv_rank: int
    nope_dim: int  # dims of a query or key that are not rotated
    rope_dim: int
    v_dim: int

    def logical(self, sizes: Sizes) -> list[LogicalTensor]:
        hidden = sizes.hidden_size
        heads = sizes.num_attention_heads
        shapes = {
            Q_DOWN: (self.q_rank, hidden),
            Q_NORM: (self.q_rank,),
            Q_UP: (heads * sizes.head_dim, self.q_rank),
            KV_DOWN: (self.kv_rank + self.rope_dim, hidden),
            KV_NORM: (self.kv_rank,),
            KV_UP: (heads * (self.nope_dim + self.v_dim), self.kv_rank),
            O: (hidden, heads * self.v_dim),
        }
        return [LogicalTensor(name, shape, LAYER) for name, shape in shapes.items()]

    def megatron(self, sizes: Sizes, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
        """The local layer spec shards the down projections by rows.

        Transformer Engine keeps them whole on every tp rank, and fuses the two inner norms into the
        up projections.
        """
        tp = topology.tp
        te = layer_spec == "te"
        heads = (("attention heads", sizes.num_attention_heads),)
        down_rows = {"q": self.q_rank, "kv": self.kv_rank + self.rope_dim}
        prefix = "decoder.layers.{layer}.self_attention."
        parameters = []
        for x, down, norm, up in (("q", Q_DOWN, Q_NORM, Q_UP), ("kv", KV_DOWN, KV_NORM, KV_UP)):
            name = f"{prefix}linear_{x}_down_proj.weight"
            units = ((f"rows of the {x} down projection", down_rows[x]),)
            parameters.append(
                whole(name, LAYER, down)
                if te
                else Parameter(name, LAYER, (Part(down),), dim=0, groups=tp, units=units)
            )
            norm_name = f"linear_{x}_up_proj.layer_norm_weight" if te else f"{x}_layernorm.weight"
            parameters.append(whole(prefix + norm_name, LAYER, norm))
            up_name = f"{prefix}linear_{x}_up_proj.weight"
            parameters.append(Parameter(up_name, LAYER, (Part(up),), dim=0, groups=tp, units=heads))
        return parameters + [
            Parameter(prefix + "linear_proj.weight", LAYER, (Part(O),), dim=1, groups=tp)
        ]

    def sglang(self, sizes: Sizes, topology: GeneratorTopology, device: str) -> list[Parameter]:
        """SGLang's parameters. Every rank has both down projections, whole and fused."""
        heads = (("attention heads", sizes.num_attention_heads),)
        cut = {"groups": topology.attention_tp, "of_attention": True}
        return [
            whole(SGLANG_DOWN, LAYER, Q_DOWN, KV_DOWN),
            whole(Q_NORM, LAYER, Q_NORM),
            Parameter(Q_UP, LAYER, (Part(Q_UP),), dim=0, units=heads, **cut),
            Parameter(KV_UP, LAYER, (Part(KV_UP),), dim=0, **cut),
            Parameter(O, LAYER, (Part(O),), dim=1, **cut),
            whole(KV_NORM, LAYER, KV_NORM),
        ]

    def problems(
        self, sizes: Sizes, trainer: TrainerTopology, generator: GeneratorTopology
    ) -> Iterable[str]:
        return ()  # there are no key-value heads

    def megatron_settings(self, sizes: Sizes) -> dict[str, Any]:
        yarn = sizes.rope_scaling
        scaling = {setting: yarn[key] for setting, key in YARN_KEYS.items()} if yarn else {}
        return (
            super().megatron_settings(sizes)
            | dict(
                qk_layernorm=True,
                apply_rope_fusion=False,  # rope_utils.py:320 ignores mscale
                q_lora_rank=self.q_rank,
                kv_lora_rank=self.kv_rank,
                qk_head_dim=self.nope_dim,
                qk_pos_emb_head_dim=self.rope_dim,
                v_head_dim=self.v_dim,
                rotary_base=sizes.rope_theta,
                rope_type="yarn" if yarn else "rope",
            )
            | scaling
        )

    def value_dim(self, sizes: Sizes) -> int:
        return self.v_dim

    def rotated_dims(self, sizes: Sizes) -> int:
        return self.rope_dim

    def activation_elements(self, sizes: Sizes, tp: int) -> float:
        """Rotated queries, keys, values and the output, and the inputs of the compression."""
        compressed = 2 * (self.q_rank + self.kv_rank + self.rope_dim)
        heads = sizes.num_attention_heads
        return compressed + heads * (3 * sizes.head_dim + 2 * self.v_dim) / tp

    def unfused_elements(self, sizes: Sizes, tp: int) -> float:
        return 0.0

    def cached_elements(self, sizes: Sizes, tp: float) -> float:
        """The latent, on every rank of a replica."""
        return self.kv_rank + self.rope_dim
