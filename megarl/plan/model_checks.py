"""Checks settings against the model. Each check yields problems: the key, its value, what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megarl.config.errors import problems_of
from megarl.config.schema import RunConfig
from megarl.models import ModelSpec
from megarl.models.mlp import SGLANG_CPU_PADDING
from megarl.models.parameters import round_up
from megarl.plan.quantisation import check_blocks, check_latent_format
from megarl.reshard.layout import stage_of_layer
from megarl.topology import DP_ATTENTION_FAMILIES, TrainerTopology

ModelCheck = Callable[[RunConfig, ModelSpec], Iterable[str]]

SGLANG_VOCAB_PADDING = 64


def check_experts(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    trainer, generator = config.trainer, config.generator
    sizes = (("trainer.ep", trainer.ep), ("trainer.etp", trainer.etp), ("generator.ep", generator.ep))
    if not spec.num_experts:
        yield from (f"{key}={value}: must be 1: a {spec.family} model has no experts" for key, value in sizes if value > 1)
        return
    ranks = trainer.tp * trainer.cp * trainer.dp
    if ranks % (trainer.ep * trainer.etp):
        product = f"trainer.ep={trainer.ep} * trainer.etp={trainer.etp}"
        yield f"{product}: must divide trainer.tp * trainer.cp * trainer.dp = {ranks}"
    yield from _indivisible("trainer.ep", trainer.ep, {"experts": spec.num_experts})
    yield from _indivisible("trainer.etp", trainer.etp, {"ffn rows of an expert": spec.expert_intermediate_size})
    yield from _indivisible("generator.ep", generator.ep, {"experts": spec.num_experts})
    if generator.tp % generator.ep:
        yield f"generator.ep={generator.ep}: must divide generator.tp={generator.tp}"


def check_shared_experts(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """On a CPU, SGLang pads the rows of one expert and multiplies that for shared experts; no layout here covers several of them."""
    rows, tp = spec.expert_intermediate_size, config.generator.tp
    shared = spec.shared_intermediate_size // rows if rows else 0
    if config.cluster.gpu == "cpu" and shared > 1 and rows % (SGLANG_CPU_PADDING * tp):
        needed = f"{SGLANG_CPU_PADDING} * generator.tp={tp}, which the {rows} ffn rows of an expert are no multiple of"
        fit = [n for n in range(1, tp) if tp % n == 0 and rows % (SGLANG_CPU_PADDING * n) == 0]
        advice = f"generator.tp={fit[-1]} would do" if fit else "they cannot serve it"
        yield f"model.path={config.model.path}: its {shared} shared experts are padded on CPUs to multiples of {needed}; {advice}"


def check_routing_replay(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    if config.trainer.routing_replay and not spec.num_experts:
        yield f"trainer.routing_replay=true: must be false: a {spec.family} model has no experts"


def check_expert_sequences(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Without sequence parallelism every tensor rank would send the same tokens to the experts, which Megatron refuses."""
    if spec.num_experts and config.trainer.tp > 1 and not config.trainer.sequence_parallel:
        yield f"trainer.sequence_parallel=false: must be true for a model with experts at trainer.tp={config.trainer.tp}"


def check_tensor_parallel(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Both sides cut heads and ffn rows evenly. Engines also cut the vocabulary, and replicate kv heads for a tp that is a multiple.
    Latent attention has no kv heads to cut."""
    ffn = {"ffn rows": spec.intermediate_size} if spec.intermediate_size else {}
    sizes = {"attention heads": spec.num_attention_heads} | ffn
    padded_vocab = {"vocabulary rows, padded": round_up(spec.vocab_size, SGLANG_VOCAB_PADDING)}
    kv_heads = {} if spec.kv_lora_rank else {"key-value heads": spec.num_kv_heads}
    yield from _indivisible("trainer.tp", config.trainer.tp, sizes | kv_heads)
    tp, key, attention_tp = config.generator.tp, "generator.tp", config.generator.tp
    if config.generator.dp_attention > 1:
        key, attention_tp = "generator.tp / generator.dp_attention", max(1, tp // config.generator.dp_attention)
        yield from _indivisible(key, attention_tp, {"attention heads": spec.num_attention_heads})
        sizes = ffn
    yield from _indivisible("generator.tp", tp, sizes | padded_vocab)
    if kv_heads and spec.num_kv_heads % attention_tp and attention_tp % spec.num_kv_heads:
        yield f"{key}={attention_tp}: must be a divisor or a multiple of the model's {spec.num_kv_heads} key-value heads"
    yield from _check_dp_attention(config, spec)
    per_expert = config.generator.tp // max(1, config.generator.ep)
    if spec.num_experts and per_expert and spec.expert_intermediate_size % per_expert:
        product = f"generator.tp={tp} / generator.ep={config.generator.ep}"
        yield f"{product}: must divide the {spec.expert_intermediate_size} ffn rows of an expert"


def _check_dp_attention(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    tp, replicas = config.generator.tp, config.generator.dp_attention
    if replicas == 1:
        return
    if spec.family not in DP_ATTENTION_FAMILIES:
        allowed = ", ".join(DP_ATTENTION_FAMILIES)
        yield f"generator.dp_attention={replicas}: must be 1 for a {spec.family} model; others are for {allowed}"
    elif tp % replicas:
        yield f"generator.dp_attention={replicas}: must divide generator.tp={tp}"
    elif config.generator.max_concurrency < replicas:
        yield f"generator.max_concurrency={config.generator.max_concurrency}: must be at least generator.dp_attention={replicas}"


def _indivisible(key: str, tp: int, sizes: dict[str, int]) -> Iterable[str]:
    uneven = [f"{size} {name}" for name, size in sizes.items() if size % tp]
    if uneven:
        yield f"{key}={tp}: must divide the model's {' and '.join(uneven)}"


def check_pipeline(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    t = config.trainer
    stages = TrainerTopology(pp=t.pp, vpp=t.vpp, first_stage_layers=t.first_stage_layers, last_stage_layers=t.last_stage_layers)
    return problems_of(lambda: stage_of_layer(spec.num_layers, stages))


def check_rope(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Latent attention has its own rotary embeddings."""
    allowed = ("default", "yarn") if spec.kv_lora_rank else ("default", "linear", "llama3")
    if spec.rope_type not in allowed:
        yield f"model.path={config.model.path}: its rope_scaling of type {spec.rope_type} must be one of {', '.join(allowed)}"


def check_router(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    yield from (f"model.path={config.model.path}: {problem}" for problem in _router_problems(spec))


def _router_problems(spec: ModelSpec) -> Iterable[str]:
    """Finds routers that Megatron cannot train, or computes differently from Hugging Face and SGLang."""
    if spec.topk_groups < spec.num_expert_groups and spec.experts_per_token != 2 * spec.topk_groups:
        # Megatron scores a group by num_experts_per_tok // topk_group of its experts, the others by two.
        yield f"num_experts_per_tok = {spec.experts_per_token} must be twice topk_group = {spec.topk_groups}"
    if spec.score_function == "sigmoid" and not spec.norm_topk_prob:
        yield "norm_topk_prob must be true for a router of sigmoid scores"
    if spec.num_experts and spec.experts_per_token == 1 and spec.norm_topk_prob:
        yield "norm_topk_prob=true with one expert per token: the router would never learn"


def check_lengths(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """A response and at least one prompt token must fit wherever they go. Prompts themselves are checked with the data."""
    room = {"the model's context of": spec.max_position_embeddings}
    train_room = {"trainer.max_tokens_per_microbatch =": config.trainer.max_tokens_per_microbatch}
    if config.generator.kv_cache_tokens is not None:
        key = "generator.kv_cache_tokens" + " / generator.dp_attention" * (config.generator.dp_attention > 1)
        room[f"{key} ="] = config.generator.kv_cache_tokens // max(1, config.generator.dp_attention)
    for key, length, limits in (
        ("rollout.max_tokens", config.rollout.max_tokens, room | train_room),
        ("eval.max_tokens", config.eval.max_tokens or 0, room),
    ):
        for name, limit in limits.items():
            if length >= limit:
                yield f"{key}={length}: must be less than {name} {limit}, prompt and response together"


MODEL_CHECKS: tuple[ModelCheck, ...] = (
    check_experts,
    check_shared_experts,
    check_routing_replay,
    check_tensor_parallel,
    check_blocks,
    check_pipeline,
    check_lengths,
)
# Commands that only plan do without these.
RUN_MODEL_CHECKS: tuple[ModelCheck, ...] = (check_rope, check_router, check_latent_format, check_expert_sequences)
