"""What the trainer refuses to build, before anything of Megatron is started or even imported."""

from __future__ import annotations

import torch

from megarl.config.errors import ConfigError
from megarl.models.spec import ModelSpec
from megarl.plan.model_checks import rope_type, rope_types, router_problems
from megarl.reshard.layout import trainer_layout
from megarl.topology import TrainerTopology
from megarl.trainer.norm_names import norm_names

DTYPES = ("float32", "bfloat16")


def check_supported(spec: ModelSpec, topology: TrainerTopology, dtype: str, sequence_parallel: bool) -> None:
    """Raises ConfigError, all problems at once, where this trainer cannot build the model on the topology."""
    t = topology
    problems = []
    if t.fsdp is not None:
        problems.append(f"trainer.fsdp={t.fsdp}: only null can be trained")
    if t.zero not in (0, 1):
        problems.append(f"trainer.zero={t.zero}: allowed are 0 (plain data parallel) and 1 (distributed optimizer)")
    if t.vpp > 1 and t.pp == 1:
        problems.append(f"trainer.vpp={t.vpp}: needs trainer.pp of at least 2; it is 1")
    if dtype not in DTYPES:
        problems.append(f"model.dtype={dtype}: allowed are {', '.join(DTYPES)}")
    if spec.num_kv_heads % t.tp:
        problems.append(f"trainer.tp={t.tp}: must divide the model's key/value heads ({spec.num_kv_heads})")
    if rope_type(spec) not in rope_types(spec):
        problems.append(f"model.path: rope_scaling type {rope_type(spec)!r} is not supported; supported are {', '.join(rope_types(spec))}")
    problems += _expert_problems(spec, t, sequence_parallel)
    if torch.cuda.is_available() and norm_names() != "te" and (spec.num_experts or spec.kv_lora_rank):
        # Without it Megatron's router and its latent attention ask for names that they then lack; cpu_support mends that on CPUs.
        problems.append(f"model.path: a {spec.family} model needs Transformer Engine on GPUs, which is not installed: see docs/cluster.md")
    try:
        trainer_layout(spec, t, "float32")
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def _expert_problems(spec: ModelSpec, topology: TrainerTopology, sequence_parallel: bool) -> list[str]:
    problems = []
    if not spec.num_experts:
        sizes = (("ep", topology.ep), ("etp", topology.etp))
        return [f"trainer.{key}={size}: must be 1: a {spec.family} model has no experts" for key, size in sizes if size > 1]
    if topology.tp > 1 and not sequence_parallel:
        # Without it every tensor rank would send the same tokens to the experts.
        problems.append(f"trainer.sequence_parallel=false: must be true for a model with experts at trainer.tp={topology.tp}")
    return problems + [f"model.path: {problem}" for problem in router_problems(spec)]
