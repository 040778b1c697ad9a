"""Checks settings against each other, and against the model.

Each check is a small function that yields problems: the key, its value, what is allowed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path

from megarl.algorithms import recipes
from megarl.base.files import folder_problems, new_folder_problems
from megarl.config.errors import problems_of
from megarl.config.keys import yaml_text
from megarl.config.limits import did_you_mean, similar_names
from megarl.config.schema import (
    BY_CALLS,
    GRADERS,
    MASK,
    OF_HUBS,
    OWN_PLACE,
    UNQUANTISED,
    UNSCORED,
    EvalConfig,
    GroupConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SuiteConfig,
)
from megarl.config.tasks import by_source, source_of, task_of, tasks_of, with_source_keys
from megarl.data.order import mixed, mixture_problems
from megarl.data.rows import LIVECODEBENCH, held_out, held_out_samples, held_out_sampling
from megarl.lora.plan import check_lora, check_lora_groups
from megarl.models import ModelSpec
from megarl.models.mlp import SGLANG_CPU_PADDING
from megarl.plan.checkpoints import check_best, check_exported, check_resume
from megarl.plan.topologies import (
    gpus_per_node,
    groups_of_run,
    run_ahead,
    trainer_topology,
)
from megarl.plan.vendor_settings import check_megatron_settings, check_server_args
from megarl.plan.weights import WeightsSource, check_begun_warm_start, check_warm_start
from megarl.reshard.forwarding import ENGINES
from megarl.reshard.layout import (
    QUANTISATIONS,
    generator_parameters,
    stage_of_layer,
    trainer_parameters,
)
from megarl.rewards import score
from megarl.rewards.score import parts_of, trained_parts
from megarl.roles.plan import check_reward, check_roles, pairwise
from megarl.simulation.settings import LOGNORMAL, SimulationConfig
from megarl.speculative.plan import check_draft_model, check_speculative
from megarl.speculative.settings import NONE
from megarl.teachers.plan import check_distillation

GROUP_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


def problems_by_group(
    config: RunConfig, checks: Iterable[Callable[[RunConfig], Iterable[str]]]
) -> list[str]:
    """The problems that `checks` find in each group of engines (generator.groups), without
    duplicates, named by the keys to change. Each group is checked as if the run had no other
    engines. WHOLE_CHECKS get the whole config.
    """
    shapes = {}
    for group in groups_of_run(config):
        shapes.setdefault(group.name, group.settings)
    problems: dict[str, None] = {}
    for check in checks:
        if check in WHOLE_CHECKS:
            problems |= dict.fromkeys(check(config))
            continue
        for name, shape in shapes.items():
            for problem in check(replace(config, generator=shape)):
                group = config.generator.groups.get(name)
                problems[_with_group_keys(problem, name, group)] = None
    return list(problems)


def _with_group_keys(problem: str, name: str, group: GroupConfig | None) -> str:
    """`problem`, with generator's keys replaced by those of the group that sets them."""
    if group is None:
        return problem
    keys = [field.name for field in fields(group) if getattr(group, field.name)]
    if not keys:
        return problem
    group_key = f"generator.groups.{name}."
    return re.sub(
        rf"\bgenerator\.({'|'.join(keys)})\b", lambda match: group_key + match[1], problem
    )


def check_groups(config: RunConfig) -> Iterable[str]:
    """Problems between groups.

    Since fp8 values and amax are kept per tensor, all quantised groups must have the same format.
    """
    if not config.generator.has_groups:
        return
    groups = config.generator.shapes
    for name in groups:
        if not GROUP_NAME.fullmatch(name):
            yield (
                f"generator.groups.{name or repr(name)}: its name must be letters, digits, - and _"
            )
    ranks = sum(shape.engines * shape.tp for shape in groups.values())
    if ranks > MAX_RANKS and len(groups) > 1:
        yield f"generator.groups: {ranks} ranks; at most {MAX_RANKS} can be planned"
    if config.weights.relay == ENGINES:
        yield f"weights.relay={ENGINES}: must be auto or off with generator.groups"
    formats = {shape.quantization: name for name, shape in groups.items() if shape.quantization}
    if len(formats) > 1:
        listed = " and ".join(
            f"generator.groups.{name}.quantization={format}" for format, name in formats.items()
        )
        yield f"{listed}: must be one format; other groups may have {UNQUANTISED}"


def check_sharing(config: RunConfig) -> Iterable[str]:
    if config.cluster.share_gpus and config.weights.transport == "nccl":
        yield (
            "weights.transport=nccl: must be auto, cuda_ipc, mooncake or gloo with "
            "cluster.share_gpus=true: NCCL refuses two ranks of a communicator on one GPU"
        )


def check_deterministic(config: RunConfig) -> Iterable[str]:
    """Problems with `deterministic`: what makes the last bits of a response depend on other
    requests, or on which engine answers.
    """
    if not config.deterministic:
        return
    if len(config.generator.shapes) > 1:
        yield (
            "deterministic=true: must be false with several generator.groups: chance decides "
            "which answers, and each rounds otherwise"
        )
    if config.generator.speculative.algorithm != NONE:
        yield (
            "deterministic=true: must be false with generator.speculative: how many tokens a "
            "pass computes changes their last bits"
        )
    if config.lora.rank:
        yield (
            "deterministic=true: must be false with lora.rank: how many requests an adapter "
            "multiplies at once changes their last bits"
        )


BLOCK = 128  # rows and columns of fp8_block
# argument of SGLang: (its default on Blackwell, a value that keeps blocks unchanged)
_KEEP_BLOCKS = {
    "fp8_gemm_runner_backend": ("auto", ("flashinfer_trtllm", "triton")),
    "moe_runner_backend": ("triton", ("triton",)),
}
_FORMAT_ARGUMENTS = ("json_model_override_args", "load_format")  # they tell SGLang the format


def check_format_arguments(config: RunConfig) -> Iterable[str]:
    quantization = config.generator.quantization
    for name in _FORMAT_ARGUMENTS:
        if quantization and name in config.generator.server_args:
            yield (
                f"generator.server_args.{name}: must be left out with "
                f"generator.quantization={quantization}, which decides it"
            )


def check_ampere(config: RunConfig) -> Iterable[str]:
    if config.cluster.gpu == "A100" and config.generator.quantization is not None:
        yield (
            f"generator.quantization={config.generator.quantization}: must be null with "
            "cluster.gpu=A100, which has no fp8"
        )


BLACKWELL = ("B200", "B300", "GB200", "GB300")


def check_blackwell_blocks(config: RunConfig) -> Iterable[str]:
    if config.cluster.gpu in BLACKWELL:
        yield from repacked_blocks(config, f"cluster.gpu={config.cluster.gpu}")


def repacked_blocks(config: RunConfig, context: str) -> Iterable[str]:
    """Refuses DeepGEMM on GPUs of compute capability 10, `context`.

    There SGLang (0.5.23) quantises weights again after loading, with scales that are powers of two,
    and packs these (requant_block_scale_ue8m0_for_deepgemm). Direct writes do neither.
    """
    if config.generator.quantization != "fp8_block":
        return
    for name, (default, safe_backends) in _KEEP_BLOCKS.items():
        backend = config.generator.server_args.get(name, default)
        if backend not in safe_backends:
            yield (
                f"generator.quantization=fp8_block: with {context} needs "
                f"generator.server_args.{name} of {' or '.join(safe_backends)}; it is "
                f"{backend}, which repacks the scales"
            )


def check_dtype_of_gpus(config: RunConfig) -> Iterable[str]:
    """As generator.server refuses it on the GPUs themselves."""
    if (
        config.cluster.gpu != "cpu"
        and config.model.dtype == "float32"
        and "attention_backend" not in config.generator.server_args
    ):
        yield (
            f"model.dtype=float32: must be bfloat16 for engines on {config.cluster.gpu}: "
            "SGLang's kernels there compute in 16 bits"
        )


def check_whole_nodes(config: RunConfig) -> Iterable[str]:
    """As the launcher refuses it when it places the engines (launch/nodes.py)."""
    if config.cluster.gpu == "cpu" and not config.launch.ranks_per_node:
        return
    slots = gpus_per_node(config)
    sizes = {"generator": config.generator.tp}
    sizes |= {f"roles.{name}": role.tp for name, role in config.roles.items() if role is not None}
    for section, tp in sizes.items():
        if tp > slots and tp % slots:
            yield (
                f"{section}.tp={tp}: an engine larger than a node must fill whole nodes of "
                f"{slots} slots"
            )


def check_served_format(config: RunConfig, command: str) -> Iterable[str]:
    """Refuses quantised and dummy weights for a command without a trainer to write them."""
    if config.generator.quantization is not None:
        quantization = f"generator.quantization={config.generator.quantization}"
        yield f"{quantization}: must be null for {command}, which serves the checkpoint as it is"
    if config.generator.server_args.get("load_format") == "dummy":
        yield (
            f"generator.server_args.load_format=dummy: must be left out for {command}: no "
            "update would write the weights"
        )


def check_evaluated_format(config: RunConfig) -> Iterable[str]:
    return check_served_format(config, "megarl eval")


def check_format(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Refuses formats other than blocks for models that need blocks.

    SGLang's GLM-4.5 (models/glm4_moe.py) reads the block size from the format of fp8 shared
    experts.
    """
    quantization = config.generator.quantization
    needs_blocks = any(mixer.ONLY_FP8_BLOCKS for mixer, _ in spec.mixers)
    if (needs_blocks or spec.family == "glm4_moe") and quantization not in (None, "fp8_block"):
        yield (
            f"generator.quantization={quantization}: must be null or fp8_block for a "
            f"{spec.family} model"
        )


ModelCheck = Callable[[RunConfig, ModelSpec], Iterable[str]]


def check_experts(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    sizes = {
        "trainer.ep": config.trainer.ep,
        "trainer.etp": config.trainer.etp,
        "generator.ep": config.generator.ep,
    }
    if not spec.experts:
        yield from (
            f"{key}={value}: must be 1: a {spec.family} model has no experts"
            for key, value in sizes.items()
            if value > 1
        )


def check_expert_biases(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Refuses etp for experts with biases, as Megatron does (transformer_config.py:2280): each rank
    with a part would add the bias.
    """
    if spec.experts and spec.experts.BIASES and config.trainer.etp > 1:
        yield (
            f"trainer.etp={config.trainer.etp}: must be 1: the experts of a {spec.family} model "
            "have biases"
        )


def check_shared_experts(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """On a CPU, SGLang pads the rows of each shared expert separately.

    The layouts here do not support that for several of them.
    """
    if not spec.experts:
        return
    rows = spec.experts.intermediate_size
    tp = config.generator.tp
    shared = spec.experts.shared_size // rows
    if config.cluster.gpu == "cpu" and shared > 1 and rows % (SGLANG_CPU_PADDING * tp):
        fit = [n for n in range(1, tp) if tp % n == 0 and rows % (SGLANG_CPU_PADDING * n) == 0]
        advice = f"generator.tp={fit[-1]} would do" if fit else "they cannot serve it"
        needed = (
            f"must be a multiple of {SGLANG_CPU_PADDING} * generator.tp={tp} on CPUs, or its "
            f"{shared} shared experts are padded"
        )
        yield f"model.path={config.model.path}: the {rows} ffn rows of an expert {needed}; {advice}"


def check_routing_replay(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    if config.trainer.routing_replay and not spec.experts:
        yield f"trainer.routing_replay=true: must be false: a {spec.family} model has no experts"


def check_expert_sequences(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Requires sequence parallelism, as Megatron does: otherwise every tensor rank would send the
    same tokens to the experts.
    """
    if spec.experts and config.trainer.tp > 1 and not config.trainer.sequence_parallel:
        yield (
            "trainer.sequence_parallel=false: must be true for a model with experts at "
            f"trainer.tp={config.trainer.tp}"
        )


def check_sizes(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Refuses sizes that the layouts cannot cut.

    CPU engines could pad, but GPU engines do not, so the rules for GPUs hold for both.
    """
    trainer = trainer_topology(config.trainer)
    generator = config.generator.topology
    layer_spec = "local" if config.cluster.gpu == "cpu" else "te"
    quantisation = QUANTISATIONS.get(config.generator.quantization or "")
    yield from problems_of(
        lambda: trainer_parameters(spec, trainer, layer_spec),
        lambda: generator_parameters(spec, generator, "cuda", quantisation),
        lambda: stage_of_layer(spec.num_layers, trainer),
    )
    for mixer, _ in spec.mixers:
        yield from mixer.problems(spec, trainer, generator)
    if generator.dp_attention > config.generator.max_concurrency:
        yield (
            f"generator.max_concurrency={config.generator.max_concurrency}: must be at least "
            f"generator.dp_attention={generator.dp_attention}"
        )


def check_rope(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Refuses unsupported types of rotary scaling."""
    allowed = {"gpt_oss": ("yarn",)}.get(spec.family, spec.attention.ROPE_TYPES)
    if spec.rope_type not in allowed:
        yield (
            f"model.path={config.model.path}: its rope_scaling of type {spec.rope_type} must be "
            f"one of {', '.join(allowed)}"
        )


def check_sinks(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Refuses backends that do not support sinks as needed: in Transformer Engine
    (attention/dot_product_attention/utils.py:746) and SGLang.
    """
    if not spec.attention.sinks or config.cluster.gpu == "cpu":
        return
    if config.trainer.cp > 1 and config.trainer.megatron.get("cp_comm_type") != "a2a":
        yield (
            f"trainer.megatron.cp_comm_type: must be a2a with trainer.cp={config.trainer.cp}: a "
            f"{spec.family} model has sinks"
        )
    if config.cluster.gpu == "B200" and config.generator.server_args.get("attention_backend") in (
        None,
        "trtllm_mha",
    ):
        yield (
            "generator.server_args.attention_backend: must be triton: trtllm_mha keeps sinks in "
            "float32 (models/gpt_oss.py:428)"
        )


def check_router(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    for problem in spec.experts.problems() if spec.experts else ():
        yield f"model.path={config.model.path}: {problem}"


def check_lengths(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Requires room for a response and at least one prompt token.

    The prompts are checked with the data.
    """
    room = {"the model's context of": spec.max_position_embeddings}
    train_room = {"trainer.max_tokens_per_microbatch =": config.trainer.max_tokens_per_microbatch}
    if config.generator.kv_cache_tokens is not None:
        key = "generator.kv_cache_tokens"
        if config.generator.dp_attention > 1:
            key += " / generator.dp_attention"
        room[f"{key} ="] = config.generator.kv_cache_tokens // max(1, config.generator.dp_attention)
    for key, length, limits in (
        ("rollout.max_tokens", config.rollout.max_tokens, room | train_room),
        ("eval.max_tokens", config.eval.max_tokens or 0, room),
    ):
        for name, limit in limits.items():
            if length >= limit:
                yield (
                    f"{key}={length}: must be less than {name} {limit}, prompt and response "
                    "together"
                )


# SGLang keeps MXFP4 in its own forms (quantization/mxfp4.py:1046), which updates cannot write. With
# these arguments, an engine of such a checkpoint has its weights in the model's dtype, and serves
# after the first update.
DEQUANTISED = {"json_model_override_args": '{"quantization_config": null}', "load_format": "dummy"}


def check_fp8_checkpoint(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Refuses quantised checkpoints whose format engines would keep, while updates have another."""
    path = Path(config.model.path, "config.json")
    if not path.is_file():
        return
    quantised = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    if quantised and quantised.get("quant_method") == "mxfp4":
        if not DEQUANTISED.items() <= config.generator.server_args.items():
            yield (
                f"generator.server_args: must have {yaml_text(DEQUANTISED)}, since "
                f"model.path={config.model.path} is in MXFP4"
            )
    elif quantised and config.generator.quantization is None:
        way_out = "if its tensors are not, remove quantization_config from its config.json"
        quantised_path = f"model.path={config.model.path} is quantised (quantization_config)"
        yield f"generator.quantization=null: must be fp8_block, since {quantised_path}; {way_out}"


def check_vision_tower(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Exports copy the vision tower from the checkpoint, and engines are told to leave it out."""
    if (
        spec.vision_tower
        and config.model.random_init
        and not WeightsSource(config.model.path).are_there
    ):
        yield (
            "model.random_init=true: must be false for a model with a vision tower: exports "
            "have that of the checkpoint in model.path"
        )
    if spec.vision_tower and "json_model_override_args" in config.generator.server_args:
        yield (
            "generator.server_args.json_model_override_args: must be left out for a model with "
            "a vision tower, by which engines are told to serve the language model alone"
        )


MODEL_CHECKS: tuple[ModelCheck, ...] = (
    check_vision_tower,
    check_experts,
    check_expert_biases,
    check_shared_experts,
    check_routing_replay,
    check_sizes,
    check_lengths,
    check_lora,
    check_speculative,
)
# Checks that are left out by commands that only plan.
RUN_MODEL_CHECKS: tuple[ModelCheck, ...] = (
    check_rope,
    check_sinks,
    check_router,
    check_format,
    check_fp8_checkpoint,
    check_expert_sequences,
)


SUITE_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
MAX_RANKS = 100_000
# with these, Megatron computes gradients of weights after or beside autograd
WITHOUT_AUTOGRAD = (
    "gradient_accumulation_fusion",
    "delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad",
)
# metrics such as eval/reward/mean are data.eval's
TAKEN_NAMES = ("reward", "response_tokens", "version", "ci95")

ConfigCheck = Callable[[RunConfig], Iterable[str]]


def check_ranks(config: RunConfig) -> Iterable[str]:
    """Refuses huge numbers of ranks, which must be typing errors.

    Their layouts would fill the memory.
    """
    trainer = config.trainer
    tp = {"generator.tp": config.generator.tp}
    sizes_of_each = [
        {f"trainer.{axis}": getattr(trainer, axis) for axis in ("tp", "pp", "cp", "dp")},
        {"generator.engines": config.generator.engines, **tp},
        {"eval.engines": config.eval.engines, **tp},
    ]
    for name, role in config.roles.items():
        if role is not None:
            sizes_of_each.append(
                {f"roles.{name}.engines": role.engines, f"roles.{name}.tp": role.tp}
            )
    for sizes in sizes_of_each:
        ranks = math.prod(sizes.values())
        if ranks > MAX_RANKS:
            product = " * ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
            yield f"{product}: {ranks} ranks; at most {MAX_RANKS} can be planned"


def check_virtual_stages(config: RunConfig) -> Iterable[str]:
    if config.trainer.vpp > 1 and config.trainer.pp == 1:
        yield f"trainer.vpp={config.trainer.vpp}: needs trainer.pp of at least 2; it is 1"


def check_offload(config: RunConfig) -> Iterable[str]:
    if config.trainer.optimizer.offload and config.trainer.zero != 1:
        yield (
            "trainer.optimizer.offload=true: needs trainer.zero=1, Megatron's distributed optimizer"
        )
    if config.trainer.optimizer.offload and config.model.dtype != "bfloat16":
        yield (
            "trainer.optimizer.offload=true: needs model.dtype=bfloat16; it is "
            f"{config.model.dtype}"
        )


def check_sharded(config: RunConfig) -> Iterable[str]:
    if config.trainer.zero == 3 and config.trainer.ddp:
        yield (
            f"trainer.ddp={yaml_text(config.trainer.ddp)}: has no effect with trainer.zero=3, whose "
            "parameters are PyTorch's FSDP2's"
        )
    if config.trainer.zero == 3:
        for name in WITHOUT_AUTOGRAD:
            if config.trainer.megatron.get(name):
                yield (
                    f"trainer.megatron.{name}=true: must be left out with trainer.zero=3, which "
                    "reduces the gradients of weights as soon as autograd has them"
                )


def check_sequence_parallel(config: RunConfig) -> Iterable[str]:
    if config.trainer.sequence_parallel and config.trainer.tp == 1:
        yield "trainer.sequence_parallel=true: needs trainer.tp of at least 2; it is 1"


def check_batch(config: RunConfig) -> Iterable[str]:
    rollout = config.rollout
    dp = config.trainer.dp
    cuts = config.trainer.minibatches
    if (
        rollout.n < 2
        and not recipes.has_critic(config.algorithm)
        and recipes.needs_reward(config.algorithm)
    ):
        yield (
            f"rollout.n={rollout.n}: must be at least 2: {config.algorithm.name} compares a "
            "prompt's samples"
        )
    sequences = rollout.prompts_per_step * rollout.n // cuts
    if rollout.prompts_per_step % cuts:
        yield (
            f"trainer.minibatches={cuts}: must divide "
            f"rollout.prompts_per_step={rollout.prompts_per_step}"
        )
    elif sequences < dp:
        product = f"rollout.prompts_per_step={rollout.prompts_per_step} * rollout.n={rollout.n}"
        if cuts > 1:
            product += f" / trainer.minibatches={cuts}"
        yield f"{product}: {sequences} sequences an optimizer step must be at least trainer.dp={dp}"


def check_partial_rollout(config: RunConfig) -> Iterable[str]:
    """Refuses a chunk size that no response can reach."""
    tokens = config.async_.chunk_tokens
    if config.async_.partial_rollout != "resume" and tokens is not None:
        yield (
            f"async.chunk_tokens={tokens}: only async.partial_rollout=resume cuts responses; it "
            f"is {config.async_.partial_rollout}"
        )
    elif tokens is not None and tokens >= config.rollout.max_tokens:
        yield (
            f"async.chunk_tokens={tokens}: must be below "
            f"rollout.max_tokens={config.rollout.max_tokens}, or nothing is ever cut"
        )


def check_kept_cache(config: RunConfig) -> Iterable[str]:
    if not config.async_.keep_kv_cache:
        return
    setting = "async.keep_kv_cache=true"
    mode = config.async_.partial_rollout
    if mode != "in_flight":
        yield (
            f"{setting}: must be false with async.partial_rollout={mode}: only in_flight keeps keys "
            "and values at an update"
        )
    if run_ahead(config.async_) == 0:
        yield (
            f"{setting}: must be false where no episode goes on through an update: "
            "async.capacity or async.max_staleness is 0"
        )
    if {task.rollout.name for task in tasks_of(config).values()} == {RolloutConfig.name}:
        yield (
            f"{setting}: must be false with rollout.name={RolloutConfig.name}, whose episodes have "
            "no later turns"
        )
    if config.deterministic:
        yield f"{setting}: must be false with deterministic=true, which has no prefix cache"
    if config.generator.server_args.get("disable_radix_cache"):
        yield (
            f"{setting}: must be false with generator.server_args.disable_radix_cache=true, with "
            "which engines have no prefix cache"
        )


def check_too_old(config: RunConfig) -> Iterable[str]:
    if config.async_.too_old != MASK:
        return
    setting = f"async.too_old={MASK}"
    if config.async_.max_staleness is None:
        yield f"{setting}: needs async.max_staleness; it is null, and nothing is ever too old"
    elif run_ahead(config.async_) == 0 or config.async_.partial_rollout == "block":
        yield (
            f"{setting}: must be reject where all tokens of a group have one version: with "
            "async.partial_rollout=block, or if async.capacity or async.max_staleness is 0"
        )
    whole = recipes.needs_one_sequence(config.algorithm)
    if whole:
        yield f"{setting}: must be reject with {whole}, which needs all tokens of a response"


def check_idle(config: RunConfig) -> Iterable[str]:
    async_ = config.async_
    for mode, key in (("updates", "max_updates"), ("samples", "max_samples")):
        value = getattr(async_, key)
        if async_.idle != mode and value is not None:
            yield f"async.{key}={value}: must be left out with async.idle={async_.idle}"
    if async_.idle == "off":
        return
    setting = f"async.idle={async_.idle}"
    if run_ahead(async_) == 0:
        yield (
            f"{setting}: must be off where the sides take turns: async.capacity or "
            "async.max_staleness is 0"
        )
    if recipes.has_critic(config.algorithm):
        yield f"{setting}: must be off with a critic"
    yield from (
        _idle_updates_problems(config)
        if async_.idle == "updates"
        else _idle_samples_problems(config)
    )


def _idle_updates_problems(config: RunConfig) -> Iterable[str]:
    most = config.async_.max_updates
    if run_ahead(config.async_) == 1:
        yield (
            "async.idle=updates: needs async.capacity and async.max_staleness of at least 2: one step "
            "behind, the generator waits for the weights that further passes hold up"
        )
    if most is not None and most <= config.trainer.epochs:
        yield (
            f"async.max_updates={most}: must be more than trainer.epochs={config.trainer.epochs}, "
            "the passes that are made anyway"
        )


def _idle_samples_problems(config: RunConfig) -> Iterable[str]:
    setting = "async.idle=samples"
    rollout = config.rollout
    most = config.async_.max_samples
    if most is not None and most <= rollout.n:
        yield f"async.max_samples={most}: must be more than rollout.n={rollout.n}"
    if run_ahead(config.async_) is None:
        yield (
            f"{setting}: must be off where the generator never waits: async.capacity and "
            "async.max_staleness are null"
        )
    if not recipes.needs_reward(config.algorithm):
        yield f"{setting}: must be off where rewards make no advantages"
    for source, task in tasks_of(config).items():
        if task.rollout.name in BY_CALLS:
            key = with_source_keys("rollout.name", config, source)
            yield (
                f"{setting}: must be off with {key}={task.rollout.name}: its episodes may begin with "
                "different tokens"
            )
    if config.data.curriculum is not None:
        yield f"{setting}: must be off with data.curriculum, which needs all rewards of a prompt"
    for part in trained_parts(config):
        if pairwise(config, part):
            yield f"{setting}: must be off with {part.setting}, which compares a prompt's responses"


@by_source
def check_algorithm(config: RunConfig) -> Iterable[str]:
    return recipes.problems(config.algorithm)


def check_dynamic_sampling(config: RunConfig) -> Iterable[str]:
    batches = config.rollout.max_num_gen_batches
    unless_set = RolloutConfig().max_num_gen_batches
    if not config.rollout.dynamic_sampling and batches != unless_set:
        shown = "null" if batches is None else batches
        yield (
            f"rollout.max_num_gen_batches={shown}: must be left out ({unless_set}) without "
            "rollout.dynamic_sampling"
        )
    if config.rollout.dynamic_sampling and config.rollout.n < 2:
        yield (
            f"rollout.dynamic_sampling=true: with rollout.n={config.rollout.n} all samples of a "
            "prompt have the same reward"
        )
    if config.rollout.dynamic_sampling and recipes.recipe_of(config.algorithm).advantage == "best":
        name = config.algorithm.name
        yield (
            f"rollout.dynamic_sampling=true: {name} trains on the best sample of every prompt, "
            "also where all have the same reward"
        )


@by_source
def check_program(config: RunConfig) -> Iterable[str]:
    """Programs make episodes with branches.

    (rollouts/environments/loading.py checks their arguments.)
    """
    name = config.rollout.name
    if name not in BY_CALLS:
        return
    setting = recipes.needs_one_sequence(config.algorithm)
    if setting:
        yield (
            f"{setting}: needs episodes of one sequence; those of rollout.name={name} may have "
            "branches (docs/agents.md)"
        )
    pairwise_parts = [part for part in parts_of(config.reward) if pairwise(config, part)]
    if pairwise_parts:
        yield (
            f"{pairwise_parts[0].setting}: compares responses; episodes of rollout.name={name} "
            "may have several (docs/agents.md)"
        )
    if name in OF_HUBS and (config.reward.parts or config.reward.name != RewardConfig().name):
        yield (
            f"{parts_of(config.reward)[0].setting}: must be left out with rollout.name={name}: "
            "the environment has a reward of its own"
        )
    args = config.rollout.args
    most_s = config.timeouts.samples_s
    attempts = args.get("retries", 2) + 1 if isinstance(args.get("retries", 2), int) else 1
    deadline_s = args.get("deadline_s", 600.0)
    if isinstance(deadline_s, (int, float)) and deadline_s * attempts >= most_s:
        yield (
            f"rollout.args.deadline_s={deadline_s:g}: {attempts} attempts (rollout.args.retries) "
            "must take less than "
            f"timeouts.samples_s={most_s:g}"
        )


def check_mixtures(config: RunConfig) -> Iterable[str]:
    yield from mixture_problems(config.data.train, config.rollout.prompts_per_step)


def check_sources(config: RunConfig) -> Iterable[str]:
    """Problems between the run and its sources' own settings."""
    longest = config.rollout.max_tokens
    has_critic = recipes.has_critic(config.algorithm)
    for name, source in mixed(config.data.train).items():
        key = f"data.train.sources.{name}"
        tokens = source.rollout.max_tokens
        if tokens is not None and tokens > longest:
            yield f"{key}.rollout.max_tokens={tokens}: must be at most rollout.max_tokens={longest}"
        if has_critic and source.algorithm.advantage is not None:
            yield (
                f"{key}.algorithm.advantage={source.algorithm.advantage}: must be null: the run's "
                "critic gives the advantages of all sources"
            )
    for name, suite in config.eval.suites.items():
        if suite and suite.task is not None and suite.task not in mixed(config.data.train):
            names = [*mixed(config.data.train)]
            yield (
                f"eval.suites.{name}.task={suite.task}: must be a source in data.train.sources: "
                f"{', '.join(names) or 'there is none'}"
                f"{did_you_mean(similar_names(suite.task, names))}"
            )


def check_curriculum(config: RunConfig) -> Iterable[str]:
    band = config.data.curriculum
    if band and band.min_pass_rate >= band.max_pass_rate:
        yield (
            f"data.curriculum.min_pass_rate={band.min_pass_rate:g}: must be below "
            f"max_pass_rate={band.max_pass_rate:g}"
        )
    if band and not recipes.needs_reward(config.algorithm):
        yield (
            f"data.curriculum: needs rewards; algorithm.name={config.algorithm.name} learns "
            "from none"
        )


def check_shaping(config: RunConfig) -> Iterable[str]:
    return score.problems(config)


def check_eval(config: RunConfig) -> Iterable[str]:
    if config.eval.every and not held_out(config):
        yield f"eval.every={config.eval.every}: needs a held-out set: set data.eval.source"
    yield from _win_rate_problems(config)
    yield from _idle_filters(config)
    if _repeats_all(config):
        yield (
            f"eval.samples={config.eval.samples}: with eval.temperature=0 all samples of a "
            "prompt are the same; set eval.temperature"
        )
    for name, suite in config.eval.suites.items():
        if suite and suite.source == OWN_PLACE and suite.benchmark is None:
            yield (
                f"eval.suites.{name}.source: must be set, or eval.suites.{name}.benchmark to "
                f"one of {', '.join(GRADERS)}"
            )
        if not SUITE_NAME.fullmatch(name) or name in TAKEN_NAMES:
            yield (
                f"eval.suites.{name}: its name must be letters, digits, - and _, and none of "
                f"{', '.join(TAKEN_NAMES)}"
            )
        elif suite and _repeats(suite, config):
            samples = f"eval.samples={config.eval.samples}"
            if suite.samples:
                samples = f"eval.suites.{name}.samples={suite.samples}"
            yield (
                f"{samples}: at temperature 0 they are all the same; set "
                f"eval.suites.{name}.temperature"
            )
        if suite and suite.benchmark != LIVECODEBENCH:
            dates = {"since": suite.since, "until": suite.until}
            yield from (
                f"eval.suites.{name}.{key}={date}: only benchmark={LIVECODEBENCH} has dates"
                for key, date in dates.items()
                if date
            )


def _win_rate_problems(config: RunConfig) -> Iterable[str]:
    if config.eval.win_rate is None:
        return
    setting = f"eval.win_rate={config.eval.win_rate}"
    compared = []
    for _, key, _, suite in held_out(config):
        if not (suite and suite.benchmark):
            compared.append(source_of(config, key))
    if not compared:
        yield f"{setting}: needs held-out prompts of no benchmark: set data.eval.source"
    for source in dict.fromkeys(compared):
        rollout = task_of(config, source).rollout.name
        if rollout in OF_HUBS:
            key = with_source_keys("rollout.name", config, source)
            yield f"{setting}: must be null with {key}={rollout}, whose rows have no reference answers"


def _repeats_all(config: RunConfig) -> bool:
    """Whether data.eval, or without it a set that is sampled as `eval` says, is sampled greedily
    more than once.
    """
    alone = config.data.eval is None and bool(config.eval.suites)
    return not alone and _is_repeated(config, None)


def _repeats(suite: SuiteConfig, config: RunConfig) -> bool:
    """Whether a set is sampled greedily more than once. eval.samples with eval.temperature has its
    own message.
    """
    inherits = suite.samples is None and suite.temperature is None
    return _is_repeated(config, suite) and not (inherits and _repeats_all(config))


def _is_repeated(config: RunConfig, suite: SuiteConfig | None) -> bool:
    greedy = held_out_sampling(config, suite).temperature == 0
    return greedy and held_out_samples(config, suite) > 1


def _idle_filters(config: RunConfig) -> Iterable[str]:
    """Filters of an evaluation that is greedy, so that they change nothing."""
    sections: list[tuple[str, EvalConfig | SuiteConfig, list[SuiteConfig | None]]] = [
        ("eval", config.eval, [suite for *_, suite in held_out(config)] or [None])
    ]
    for name, suite in config.eval.suites.items():
        if suite:
            sections.append((f"eval.suites.{name}", suite, [suite]))
    for key, section, suites in sections:
        if any(held_out_sampling(config, suite).temperature for suite in suites):
            continue
        for name, off in (("top_p", 1), ("top_k", -1), ("min_p", 0)):
            value = getattr(section, name)
            if value not in (None, off):
                yield (
                    f"{key}.{name}={value:g}: needs a {key}.temperature above 0: the likeliest "
                    "token is taken now"
                )


def check_eval_engines(config: RunConfig) -> Iterable[str]:
    engines = config.eval.engines
    transport = config.weights.transport
    if not engines:
        return
    if not held_out(config):
        yield f"eval.engines={engines}: needs a held-out set: set data.eval.source"
    if transport in ("gloo", "nccl"):
        yield (
            f"weights.transport={transport}: with eval.engines={engines} it must be neither "
            "gloo nor nccl, whose process groups cannot change: the loss of one of these engines "
            "would end the run"
        )


def check_sft_command(config: RunConfig) -> Iterable[str]:
    if config.sft.every and config.sft.eval is None:
        yield f"sft.every={config.sft.every}: needs held-out demonstrations: set sft.eval.source"
    if config.sft.score_every and not held_out(config):
        yield (
            f"sft.score_every={config.sft.score_every}: needs a held-out set: set data.eval.source"
        )
    if config.sft.steps < 1:
        yield f"sft.steps={config.sft.steps}: must be at least 1 for megarl sft"
    if config.sft.batch_size < config.trainer.dp:
        yield (
            f"sft.batch_size={config.sft.batch_size}: must be at least "
            f"trainer.dp={config.trainer.dp}"
        )
    if (Path(config.sft.output) / "config.json").exists():  # it exists: there is nothing to do
        yield from check_warm_start(config)
    else:
        yield from new_folder_problems("sft.output=", config.sft.output)
        yield from check_begun_warm_start(config)


def check_reward_model_command(config: RunConfig) -> Iterable[str]:
    settings = config.reward_model
    if settings.data is None:
        yield (
            "reward_model.data=null: megarl reward-model needs pairs of responses: set "
            "reward_model.data.source"
        )
    sequences = 2 * settings.batch_size
    if sequences < config.trainer.dp:
        yield (
            f"reward_model.batch_size={settings.batch_size}: its {sequences} sequences must be "
            f"at least trainer.dp={config.trainer.dp}"
        )
    if settings.every and settings.eval is None:
        yield (
            f"reward_model.every={settings.every}: needs held-out pairs: set "
            "reward_model.eval.source"
        )
    if config.trainer.routing_replay:
        yield (
            "trainer.routing_replay=true: must be false for megarl reward-model: its pairs were "
            "not sampled from a router"
        )
    yield from new_folder_problems("reward_model.output=", settings.output)


def check_label_command(config: RunConfig) -> Iterable[str]:
    label = config.label
    if label.n + label.reference < 2 and not label.columns:
        yield (
            f"label.n={label.n}: must be at least {2 - label.reference}: a pair has two responses; "
            "label.reference=true and label.columns give more"
        )
    if label.reward is None and any(part.name == UNSCORED for part in parts_of(config.reward)):
        yield f"label.reward=null: must be set: reward.name={UNSCORED} scores nothing"
    if config.rollout.name != RolloutConfig().name:
        yield (
            f"rollout.name={config.rollout.name}: must be {RolloutConfig().name} for megarl label: "
            "a pair has two texts of the policy alone"
        )
    for name in mixed(config.data.train) if label.data is None else ():
        task = task_of(config, name)
        if task.rollout != config.rollout or task.reward != config.reward:
            yield (
                f"data.train.sources.{name}: must have no rollout or reward of its own for megarl "
                "label, which samples and scores all prompts alike; or set label.data"
            )
    if label.prompts is None and label.data is None and mixed(config.data.train):
        yield "label.prompts=null: must be set with data.train.sources: each has its own epochs"
    if label.prompts is not None and label.held_out >= label.prompts:
        yield (
            f"label.held_out={label.held_out}: must be less than label.prompts={label.prompts}, or "
            "no pairs are left to learn from"
        )
    yield from check_served_format(config, "megarl label")
    yield from folder_problems("label.output=", label.output)


def check_run_dir(config: RunConfig) -> Iterable[str]:
    return folder_problems("run_dir=", config.run_dir)


def check_run_dir_here(config: RunConfig) -> Iterable[str]:
    """Like `check_run_dir`, unless run_dir is on a disk that this machine lacks, since a dry run
    may be for other machines.
    """
    top = Path(config.run_dir).absolute().parents[-2:-1]
    return check_run_dir(config) if not top or top[0].exists() else ()


def check_eval_command(config: RunConfig) -> Iterable[str]:
    if not held_out(config):
        yield "data.eval=null: megarl eval needs a held-out set: set data.eval.source"


def check_simulation(config: RunConfig) -> Iterable[str]:
    """Settings of the simulation that its other settings leave unread."""
    simulation = config.plan.simulation
    assumed = SimulationConfig()
    if simulation.sigma != assumed.sigma and simulation.lengths != LOGNORMAL:
        yield (
            f"plan.simulation.sigma={simulation.sigma:g}: has no effect with "
            f"plan.simulation.lengths={simulation.lengths}: set it to {LOGNORMAL}"
        )
    if simulation.tool_s != assumed.tool_s and simulation.turns == 1:
        yield (
            f"plan.simulation.tool_s={simulation.tool_s:g}: has no effect with "
            "plan.simulation.turns=1, which has no tool calls"
        )
    if simulation.correlation != assumed.correlation and config.rollout.n == 1:
        yield (
            f"plan.simulation.correlation={simulation.correlation:g}: has no effect with "
            "rollout.n=1, which makes one response to a prompt"
        )
    if simulation.checkpoint_s is not None and not config.checkpoint.every:
        yield (
            f"plan.simulation.checkpoint_s={simulation.checkpoint_s:g}: has no effect with "
            "checkpoint.every=0, which writes none between steps"
        )
    for name in ("restart_s", "engine_restart_s"):
        value = getattr(simulation, name)
        if value != getattr(assumed, name) and simulation.gpu_mtbf_h is None:
            yield (
                f"plan.simulation.{name}={value:g}: has no effect with "
                "plan.simulation.gpu_mtbf_h=null, with which nothing fails"
            )


WHOLE_CHECKS: tuple[ConfigCheck, ...] = (
    check_groups,
    check_deterministic,
    check_lora_groups,
    check_resume,
)  # of all groups of engines together
CONFIG_CHECKS: tuple[ConfigCheck, ...] = (
    check_simulation,
    check_groups,
    check_sharing,
    check_deterministic,
    check_lora_groups,
    check_ranks,
    check_virtual_stages,
    check_server_args,
    check_megatron_settings,
    check_format_arguments,
    check_sequence_parallel,
    check_offload,
    check_sharded,
    check_batch,
    check_partial_rollout,
    check_kept_cache,
    check_too_old,
    check_idle,
    check_algorithm,
    check_dynamic_sampling,
    check_program,
    check_mixtures,
    check_sources,
    check_curriculum,
    check_shaping,
    check_eval,
    check_eval_engines,
    check_best,
    check_roles,
    check_reward,
    check_distillation,
)
PLANNING_COMMANDS = ("plan", "reshard")
_TRAIN_CHECKS: tuple[ConfigCheck, ...] = (
    check_ampere,
    check_blackwell_blocks,
    check_resume,
    check_draft_model,
)
COMMAND_CHECKS: dict[str, tuple[ConfigCheck, ...]] = {
    "sft": (check_run_dir, check_sft_command),
    "reward-model": (check_run_dir, check_reward_model_command),
    "train": (check_run_dir, *_TRAIN_CHECKS),
    "dry-run": (check_run_dir_here, *_TRAIN_CHECKS),
    "label": (check_run_dir, check_label_command, check_draft_model),
    "eval": (check_run_dir, check_evaluated_format, check_eval_command, check_draft_model),
    "export": (check_run_dir, check_exported),
}


def with_model(check: ModelCheck, spec: ModelSpec) -> ConfigCheck:
    return lambda config: check(config, spec)


def refused_by_train(config: RunConfig, spec: ModelSpec) -> list[str]:
    """What megarl train would refuse before it starts anything, on the machines that are planned
    for. A plan reports it and goes on.
    """
    checks = (
        *_TRAIN_CHECKS,
        check_dtype_of_gpus,
        check_whole_nodes,
        *(with_model(check, spec) for check in RUN_MODEL_CHECKS),
    )
    return problems_by_group(config, checks)
