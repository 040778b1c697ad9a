"""Llama 3, 3.1 and 3.2: its logical tensors, and where Megatron-core 0.16 and SGLang 0.5.21 keep them."""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.models.parameters import FIRST, LAST, LAYER, LogicalTensor, Parameter, Part, padded_vocab_size, round_up, whole
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_L = "model.layers.{layer}."
Q, K, V, O = (_L + f"self_attn.{x}_proj.weight" for x in "qkvo")
GATE, UP, DOWN = (_L + f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
INPUT_NORM, POST_NORM = _L + "input_layernorm.weight", _L + "post_attention_layernorm.weight"

# Where Megatron keeps the norms: own modules in the local layer spec, fused into the linear layers by Transformer Engine.
MEGATRON_NORMS = {
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    "te": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
}

SGLANG_VOCAB_PADDING = 64
SGLANG_CPU_FFN_PADDING = 32  # times tp; sglang/srt/configs/update_config.py


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError for a missing key, and for variants whose tensors this file does not state (biases)."""
    for key, allowed in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        reader.expect(key, allowed, allowed)
    heads = reader.integer("num_attention_heads")
    hidden = reader.integer("hidden_size")
    kv_heads = reader.integer("num_key_value_heads", heads)
    problems = []
    if heads % kv_heads:
        problems.append(f"{reader.source}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    if reader.values.get("head_dim") is None and hidden % heads:
        problems.append(f"{reader.source}: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}")
    if problems:
        raise ConfigError(problems)
    theta, scaling = reader.rope()
    return ModelSpec(
        family="llama",
        num_layers=reader.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=reader.integer("head_dim", hidden // heads),
        vocab_size=reader.integer("vocab_size"),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def logical_tensors(spec: ModelSpec) -> tuple[LogicalTensor, ...]:
    """The tensors of the HF checkpoint; a tied model has no `lm_head.weight`."""
    hidden, ffn, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    q_rows, kv_rows = spec.num_attention_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors = [
        LogicalTensor(EMBED, (vocab, hidden), FIRST),
        LogicalTensor(INPUT_NORM, (hidden,), LAYER),
        LogicalTensor(Q, (q_rows, hidden), LAYER),
        LogicalTensor(K, (kv_rows, hidden), LAYER),
        LogicalTensor(V, (kv_rows, hidden), LAYER),
        LogicalTensor(O, (hidden, q_rows), LAYER),
        LogicalTensor(POST_NORM, (hidden,), LAYER),
        LogicalTensor(GATE, (ffn, hidden), LAYER),
        LogicalTensor(UP, (ffn, hidden), LAYER),
        LogicalTensor(DOWN, (hidden, ffn), LAYER),
        LogicalTensor(NORM, (hidden,), LAST),
    ]
    if not spec.tie_word_embeddings:
        tensors.append(LogicalTensor(HEAD, (vocab, hidden), LAST))
    return tuple(tensors)


def megatron_parameters(spec: ModelSpec, tp: int, pp: int, norm_names: str) -> tuple[Parameter, ...]:
    """Parameters of GPTModel with global layer numbers. `norm_names`: "local" | "te" (which layer spec).

    With tied embeddings and pp > 1 the last stage keeps its own copy of the embedding as `output_layer.weight`.
    Raises ConfigError when `tp` does not divide the model.
    """
    if norm_names not in MEGATRON_NORMS:
        raise ConfigError(f"norm_names = {norm_names!r} is not one of {', '.join(MEGATRON_NORMS)}")
    kv = spec.num_kv_heads
    problems = _indivisible("trainer.tp", tp, num_attention_heads=spec.num_attention_heads, intermediate_size=spec.intermediate_size)
    if kv % tp and tp % kv:
        problems.append(f"trainer.tp = {tp} is neither a divisor nor a multiple of num_key_value_heads = {kv}")
    if problems:
        raise ConfigError(problems)
    vocab = padded_vocab_size(spec.vocab_size, tp)
    input_norm, mlp_norm = MEGATRON_NORMS[norm_names]
    layer = "decoder.layers.{layer}."
    parameters = [
        Parameter("embedding.word_embeddings.weight", FIRST, (Part(EMBED, vocab),), dim=0, groups=tp),
        whole(layer + input_norm, LAYER, INPUT_NORM),
        Parameter(layer + "self_attention.linear_qkv.weight", LAYER, (Part(Q), Part(K), Part(V)), dim=0, groups=kv),
        Parameter(layer + "self_attention.linear_proj.weight", LAYER, (Part(O),), dim=1, groups=tp),
        whole(layer + mlp_norm, LAYER, POST_NORM),
        Parameter(layer + "mlp.linear_fc1.weight", LAYER, (Part(GATE), Part(UP)), dim=0, groups=tp),
        Parameter(layer + "mlp.linear_fc2.weight", LAYER, (Part(DOWN),), dim=1, groups=tp),
        whole("decoder.final_layernorm.weight", LAST, NORM),
    ]
    if not spec.tie_word_embeddings or pp > 1:
        output = EMBED if spec.tie_word_embeddings else HEAD
        parameters.append(Parameter("output_layer.weight", LAST, (Part(output, vocab),), dim=0, groups=tp))
    return tuple(parameters)


def sglang_parameters(spec: ModelSpec, tp: int, device: str) -> tuple[Parameter, ...]:
    """Parameters of SGLang's LlamaForCausalLM on one engine of `tp` ranks. `device`: "cpu" | "cuda".

    SGLang shards alike on both but for what does not divide by tp: on the CPU it pads heads, ffn and vocabulary with zeros, on
    GPUs it replicates kv heads and refuses the rest. Raises ConfigError where SGLang itself would stop.
    """
    heads, kv, replicas = spec.num_attention_heads, spec.num_kv_heads, 1
    ffn, vocab = spec.intermediate_size, round_up(spec.vocab_size, SGLANG_VOCAB_PADDING)
    if device == "cpu":
        if heads % tp or kv % tp:
            heads, kv = round_up(kv, tp) * (heads // kv), round_up(kv, tp)
        ffn = round_up(ffn, tp * SGLANG_CPU_FFN_PADDING)
        vocab = vocab if vocab % tp == 0 else round_up(spec.vocab_size, SGLANG_VOCAB_PADDING * tp)
    elif device == "cuda":
        problems = _indivisible("generator.tp", tp, num_attention_heads=heads, intermediate_size=ffn, padded_vocab_size=vocab)
        if kv % tp and tp % kv:
            problems.append(f"generator.tp = {tp} is neither a divisor nor a multiple of num_key_value_heads = {kv}")
        if problems:
            raise ConfigError(problems)
        replicas = max(1, tp // kv)
    else:
        raise ConfigError(f"device = {device!r} is not one of cpu, cuda")
    q_rows, kv_rows = heads * spec.head_dim, kv * spec.head_dim
    qkv = (Part(Q, q_rows), Part(K, kv_rows, replicas), Part(V, kv_rows, replicas))
    parameters = [
        Parameter(EMBED, FIRST, (Part(EMBED, vocab),), dim=0, groups=tp),
        Parameter(_L + "self_attn.qkv_proj.weight", LAYER, qkv, dim=0, groups=tp),
        Parameter(O, LAYER, (Part(O, q_rows),), dim=1, groups=tp),
        Parameter(_L + "mlp.gate_up_proj.weight", LAYER, (Part(GATE, ffn), Part(UP, ffn)), dim=0, groups=tp),
        Parameter(DOWN, LAYER, (Part(DOWN, ffn),), dim=1, groups=tp),
        whole(INPUT_NORM, LAYER, INPUT_NORM),
        whole(POST_NORM, LAYER, POST_NORM),
        whole(NORM, LAST, NORM),
    ]
    if not spec.tie_word_embeddings:  # tied: lm_head is embed_tokens, one parameter under its first name
        parameters.append(Parameter(HEAD, LAST, (Part(HEAD, vocab),), dim=0, groups=tp))
    return tuple(parameters)


def _indivisible(key: str, tp: int, **sizes: int) -> list[str]:
    return [f"{key} = {tp} does not divide {name} = {size}" for name, size in sizes.items() if size % tp]
