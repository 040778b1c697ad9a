"""Checks settings against the model. Each check yields problems: the key, its value, what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megarl.config.errors import problems_of
from megarl.config.schema import RunConfig
from megarl.models import ModelSpec
from megarl.models.mlp import SGLANG_CPU_PADDING
from megarl.plan.lora import check_lora
from megarl.plan.quantisation import check_latent_format
from megarl.plan.topologies import generator_topology, trainer_topology
from megarl.reshard.layout import QUANTISATIONS, stage_of_layer
from megarl.reshard.sizes import generator_parameters, trainer_parameters

ModelCheck = Callable[[RunConfig, ModelSpec], Iterable[str]]


def check_experts(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    sizes = {"trainer.ep": config.trainer.ep, "trainer.etp": config.trainer.etp, "generator.ep": config.generator.ep}
    if not spec.num_experts:
        yield from (f"{key}={value}: must be 1: a {spec.family} model has no experts" for key, value in sizes.items() if value > 1)


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


def check_sizes(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """What the layouts of both sides do not cut. Engines on CPUs would pad; they are held to what GPUs take, as are plans for these."""
    t, g = trainer_topology(config.trainer), generator_topology(config.generator)
    yield from problems_of(
        lambda: trainer_parameters(spec, t, "local" if config.cluster.gpu == "cpu" else "te"),
        lambda: generator_parameters(spec, g, "cuda", QUANTISATIONS.get(config.generator.quantization or "")),
        lambda: stage_of_layer(spec.num_layers, t),
    )
    if t.tp > spec.num_kv_heads and t.tp % spec.num_kv_heads == 0 and not spec.kv_lora_rank:
        yield f"trainer.tp={t.tp}: must be at most the model's {spec.num_kv_heads} key-value heads"
    if g.dp_attention > config.generator.max_concurrency:
        yield f"generator.max_concurrency={config.generator.max_concurrency}: must be at least generator.dp_attention={g.dp_attention}"


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
    check_sizes,
    check_lengths,
    check_lora,
)
# Commands that only plan do without these.
RUN_MODEL_CHECKS: tuple[ModelCheck, ...] = (check_rope, check_router, check_latent_format, check_expert_sequences)
