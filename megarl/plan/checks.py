"""What no key can be judged by alone: the model against the parallel sizes, and the roles against each other.

Each check is a small function that yields problems: the key, its value, what is allowed.
"""

from __future__ import annotations

from typing import Callable, Iterable

from megarl.algorithms import recipes
from megarl.config.schema import RunConfig
from megarl.models import ModelSpec
from megarl.models.parameters import round_up
from megarl.plan.quantisation import check_blocks, check_evaluated_format, check_format_arguments, check_latent_format
from megarl.plan.resume import check_resume
from megarl.topology import DP_ATTENTION_FAMILIES

ConfigCheck = Callable[[RunConfig], Iterable[str]]
ModelCheck = Callable[[RunConfig, ModelSpec], Iterable[str]]

SGLANG_VOCAB_PADDING = 64
SERVER_ARGS_BY_KEY = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "tp": "generator.tp",
    "tp_size": "generator.tp",
    "ep_size": "generator.ep",
    "dp_size": "generator.dp_attention",
    "enable_dp_attention": "generator.dp_attention",
    "quantization": "generator.quantization",
    "max_total_tokens": "generator.kv_cache_tokens",
    "max_running_requests": "generator.max_concurrency",
    "mem_fraction_static": "generator.mem_fraction",
    "random_seed": "seed",
}
SERVER_ARGS_KEPT = frozenset(
    "host port api_key admin_api_key base_gpu_id custom_weight_loader weight_version skip_tokenizer_init sampling_defaults".split()
)


def check_trainer_features(config: RunConfig) -> Iterable[str]:
    """What can be planned and resharded, but not trained yet."""
    if config.trainer.fsdp is not None:
        yield f"trainer.fsdp={config.trainer.fsdp}: only null can be trained"


def check_generator_features(config: RunConfig) -> Iterable[str]:
    """What can be planned and resharded, but not generated with yet."""
    if config.generator.dp_attention != 1:
        yield f"generator.dp_attention={config.generator.dp_attention}: only 1 can run"


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


def check_expert_sequences(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Without sequence parallelism every tensor rank would send the same tokens to the experts, which Megatron refuses."""
    if spec.num_experts and config.trainer.tp > 1 and not config.trainer.sequence_parallel:
        yield f"trainer.sequence_parallel=false: must be true for a model with experts at trainer.tp={config.trainer.tp}"


def check_truncated_sampling(config: RunConfig) -> Iterable[str]:
    """The importance ratio needs mu under the distribution really sampled from; the trainer scores the untruncated one."""
    if config.rollout.top_p != 1:
        yield f"rollout.top_p={config.rollout.top_p}: only 1 is supported: the trainer scores the untruncated distribution"
    if config.rollout.top_k != -1:
        yield f"rollout.top_k={config.rollout.top_k}: only -1 is supported: the trainer scores the untruncated distribution"


def check_server_args(config: RunConfig) -> Iterable[str]:
    """Arguments that the run decides by other keys, or must decide itself to stay closed to strangers and right about mu."""
    for name, value in config.generator.server_args.items():
        if name in SERVER_ARGS_BY_KEY:
            yield f"generator.server_args.{name}={value}: must be set by {SERVER_ARGS_BY_KEY[name]}"
        elif name in SERVER_ARGS_KEPT:
            yield f"generator.server_args.{name}={value}: must be left out; the launcher decides it"


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


def _indivisible(key: str, tp: int, sizes: dict[str, int]) -> Iterable[str]:
    uneven = [f"{size} {name}" for name, size in sizes.items() if size % tp]
    if uneven:
        yield f"{key}={tp}: must divide the model's {' and '.join(uneven)}"


def check_pipeline(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """As megarl.reshard.layout.stage_of_layer. Every stage holds trainer.vpp chunks of equal size."""
    trainer = config.trainer
    sizes = f"trainer.pp={trainer.pp}" + (f" * trainer.vpp={trainer.vpp}" if trainer.vpp > 1 else "")
    told = [n for n in (trainer.first_stage_layers, trainer.last_stage_layers) if n is not None]
    if not told:
        if spec.num_layers % (trainer.pp * trainer.vpp):
            yield f"{sizes}: must divide the model's {spec.num_layers} layers"
        return
    keys = ("first_stage_layers", "last_stage_layers")
    said = ", ".join(f"trainer.{key}={getattr(trainer, key)}" for key in keys if getattr(trainer, key) is not None)
    if trainer.pp == 1:
        yield f"{said}: needs trainer.pp of at least 2; it is 1"
        return
    others, rest = trainer.pp - len(told), spec.num_layers - sum(told)
    shared = rest // others if others else 0
    if not others and trainer.vpp > 1:
        yield f"{said}: with {sizes} there must be a stage between the first and the last"
    if rest < others or rest != shared * others or any(n % trainer.vpp for n in (*told, shared)):
        yield f"{said}: must leave layers that the other {others} of {sizes} stages can share evenly; {rest} of {spec.num_layers} are left"


def check_virtual_stages(config: RunConfig) -> Iterable[str]:
    if config.trainer.vpp > 1 and config.trainer.pp == 1:
        yield f"trainer.vpp={config.trainer.vpp}: needs trainer.pp of at least 2; it is 1"


def check_sequence_parallel(config: RunConfig) -> Iterable[str]:
    if config.trainer.sequence_parallel and config.trainer.tp == 1:
        yield "trainer.sequence_parallel=true: needs trainer.tp of at least 2; it is 1"


def check_batch(config: RunConfig) -> Iterable[str]:
    rollout, dp = config.rollout, config.trainer.dp
    sequences = rollout.prompts_per_step * rollout.n
    if rollout.n < 2:
        yield f"rollout.n={rollout.n}: must be at least 2: the baseline of {config.algorithm.name} is the mean over a prompt's samples"
    if sequences < dp:
        product = f"rollout.prompts_per_step={rollout.prompts_per_step} * rollout.n={rollout.n}"
        yield f"{product}: {sequences} sequences a step must be at least trainer.dp={dp}"


def check_rope(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    if rope_type(spec) not in rope_types(spec):
        yield f"model.path={config.model.path}: its rope_scaling of type {rope_type(spec)} must be one of {', '.join(rope_types(spec))}"


def rope_type(spec: ModelSpec) -> str:
    scaling = spec.rope_scaling or {}
    return scaling.get("rope_type") or scaling.get("type") or "default"


def rope_types(spec: ModelSpec) -> tuple[str, ...]:
    """That can be trained: latent attention has rotary embeddings of its own."""
    return ("default", "yarn") if spec.kv_lora_rank else ("default", "linear", "llama3")


def check_router(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    yield from (f"model.path={config.model.path}: {problem}" for problem in router_problems(spec))


def router_problems(spec: ModelSpec) -> Iterable[str]:
    """Routers that Megatron computes otherwise than Hugging Face and SGLang, or cannot train."""
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
        room["generator.kv_cache_tokens ="] = config.generator.kv_cache_tokens
    for key, length, limits in (
        ("rollout.max_tokens", config.rollout.max_tokens, room | train_room),
        ("eval.max_tokens", config.eval.max_tokens or 0, room),
    ):
        for name, limit in limits.items():
            if length >= limit:
                yield f"{key}={length}: must be less than {name} {limit}, prompt and response together"


def check_partial_rollout(config: RunConfig) -> Iterable[str]:
    """A cut that no response is long enough for cuts nothing."""
    tokens = config.async_.chunk_tokens
    if config.async_.partial_rollout != "resume" and tokens is not None:
        yield f"async.chunk_tokens={tokens}: only async.partial_rollout=resume cuts; it is {config.async_.partial_rollout}"
    elif tokens is not None and tokens >= config.rollout.max_tokens:
        yield f"async.chunk_tokens={tokens}: must be below rollout.max_tokens={config.rollout.max_tokens}, or nothing is ever cut"


def check_apply(config: RunConfig) -> Iterable[str]:
    """Between groups of layers requests go on with the keys and values they have, and with what has just been written."""
    mode = config.async_.partial_rollout
    if config.weights.apply == "in_flight" and mode != "in_flight":
        yield f"weights.apply=in_flight: needs async.partial_rollout=in_flight, which lets requests keep their KV cache; it is {mode}"
    if config.weights.apply == "in_flight" and not config.weights.audit:
        yield "weights.audit=false: must be true with weights.apply=in_flight, which uses each group of layers as soon as it is written"


def check_algorithm(config: RunConfig) -> Iterable[str]:
    return recipes.problems(config.algorithm)


def check_eval(config: RunConfig) -> Iterable[str]:
    if config.eval.every and config.data.eval is None:
        yield f"eval.every={config.eval.every}: needs a held-out set: set data.eval.source"


def check_sft_command(config: RunConfig) -> Iterable[str]:
    if config.sft.steps < 1:
        yield f"sft.steps={config.sft.steps}: must be at least 1 for megarl sft"
    if config.sft.batch_size < config.trainer.dp:
        yield f"sft.batch_size={config.sft.batch_size}: must be at least trainer.dp={config.trainer.dp}"


def check_eval_command(config: RunConfig) -> Iterable[str]:
    if config.data.eval is None:
        yield "data.eval=null: megarl eval needs a held-out set: set data.eval.source"


CONFIG_CHECKS: tuple[ConfigCheck, ...] = (
    check_virtual_stages,
    check_truncated_sampling,
    check_server_args,
    check_format_arguments,
    check_sequence_parallel,
    check_batch,
    check_partial_rollout,
    check_apply,
    check_algorithm,
    check_eval,
)
MODEL_CHECKS: tuple[ModelCheck, ...] = (check_experts, check_tensor_parallel, check_blocks, check_pipeline, check_lengths)
# Not of commands that only plan.
RUN_MODEL_CHECKS: tuple[ModelCheck, ...] = (check_rope, check_router, check_latent_format, check_expert_sequences)
PLANNING_COMMANDS = ("plan", "reshard")
COMMAND_CHECKS: dict[str, tuple[ConfigCheck, ...]] = {
    "sft": (check_trainer_features, check_sft_command),
    "train": (check_trainer_features, check_generator_features, check_resume),
    "eval": (check_generator_features, check_evaluated_format, check_eval_command),
    "export": (check_trainer_features,),
}
