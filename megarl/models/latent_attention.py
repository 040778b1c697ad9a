"""Multi-head latent attention (DeepSeek-V2, section 2.1) with the norm before it.

SGLang derives w_kc and w_vc from kv_b_proj after loading. They are not parameters, so they are not
listed here.
"""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.attention import INPUT_NORM
from megarl.models.parameters import LAYER, LogicalTensor, Parameter, Part, whole
from megarl.models.spec import ModelSpec

_A = "model.layers.{layer}.self_attn."
Q_DOWN, Q_UP, KV_UP, O = (_A + f"{x}_proj.weight" for x in ("q_a", "q_b", "kv_b", "o"))
KV_DOWN = _A + "kv_a_proj_with_mqa.weight"
Q_NORM = _A + "q_a_layernorm.weight"
KV_NORM = _A + "kv_a_layernorm.weight"
SGLANG_DOWN = _A + "fused_qkv_a_proj_with_mqa.weight"
QUANTISED = (SGLANG_DOWN, Q_UP, KV_UP, O)


def logical(spec: ModelSpec) -> list[LogicalTensor]:
    hidden = spec.hidden_size
    heads = spec.num_attention_heads
    shapes = {
        INPUT_NORM: (hidden,),
        Q_DOWN: (spec.q_lora_rank, hidden),
        Q_NORM: (spec.q_lora_rank,),
        Q_UP: (heads * spec.head_dim, spec.q_lora_rank),
        KV_DOWN: (spec.kv_lora_rank + spec.qk_rope_head_dim, hidden),
        KV_NORM: (spec.kv_lora_rank,),
        KV_UP: (heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
        O: (hidden, heads * spec.v_head_dim),
    }
    return [LogicalTensor(name, shape, LAYER) for name, shape in shapes.items()]


def megatron(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
    """The local layer spec shards the down projections by rows.

    Transformer Engine keeps them whole on every tp rank, and fuses the two inner norms into the up
    projections.
    """
    tp = topology.tp
    te = layer_spec == "te"
    heads = (("attention heads", spec.num_attention_heads),)
    down_rows = {"q": spec.q_lora_rank, "kv": spec.kv_lora_rank + spec.qk_rope_head_dim}
    layer = "decoder.layers.{layer}."
    prefix = layer + "self_attention."
    parameters = [whole(layer + "input_layernorm.weight", LAYER, INPUT_NORM)]
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
        parameters.append(
            Parameter(
                f"{prefix}linear_{x}_up_proj.weight",
                LAYER,
                (Part(up),),
                dim=0,
                groups=tp,
                units=heads,
            )
        )
    return parameters + [
        Parameter(prefix + "linear_proj.weight", LAYER, (Part(O),), dim=1, groups=tp)
    ]


def sglang(spec: ModelSpec, topology: GeneratorTopology, device: str) -> list[Parameter]:
    """SGLang's parameters. Every rank has both down projections, whole and fused."""
    tp = topology.attention_tp
    heads = (("attention heads", spec.num_attention_heads),)
    return [
        whole(SGLANG_DOWN, LAYER, Q_DOWN, KV_DOWN),
        whole(Q_NORM, LAYER, Q_NORM),
        Parameter(Q_UP, LAYER, (Part(Q_UP),), dim=0, groups=tp, of_attention=True, units=heads),
        Parameter(KV_UP, LAYER, (Part(KV_UP),), dim=0, groups=tp, of_attention=True),
        Parameter(O, LAYER, (Part(O),), dim=1, groups=tp, of_attention=True),
        whole(KV_NORM, LAYER, KV_NORM),
    ]
