"""Frozen models on engines: the memory of their ranks, and the seconds in which they score a step's responses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.config.roles import JUDGE, PAIRWISE
from megarl.config.schema import GeneratorConfig, RunConfig
from megarl.estimate.constants import constants_of
from megarl.estimate.generate_time import GenerateModel
from megarl.estimate.generator_memory import GeneratorMemory, generator_memory, usable_static
from megarl.estimate.hardware import GIB, Cluster
from megarl.estimate.workload import Workload
from megarl.models.spec import LM
from megarl.plan.roles import ServedRole, find_served, pairs


@dataclass(frozen=True)
class Served:
    """`score_s`: of the slowest engine; scores are asked for while other responses are generated."""

    gpus: int
    memory: GeneratorMemory
    over_gib: float  # by which a rank is too large; negative: to spare
    score_s: float


def served(config: RunConfig) -> dict[str, Served]:
    """By the names of the roles. Raises ConfigError if sizes do not divide a model."""
    cluster = Cluster.of(config)
    return {role.name: _served(config, role, cluster) for role in find_served(config, "plan")}


def _served(config: RunConfig, role: ServedRole, cluster: Cluster) -> Served:
    own, spec, gpu = role.settings, replace(role.spec, head=LM), cluster.gpu  # a head of one number takes no less than is estimated
    shape = GeneratorConfig(
        engines=own.engines,
        tp=own.tp,
        ep=own.ep,
        max_concurrency=own.max_concurrency,
        kv_cache_tokens=own.kv_cache_tokens,
        mem_fraction=own.mem_fraction,
        server_args=own.server_args,
    )
    work = _workload(config, role)
    memory = generator_memory(spec, shape, role.dtype, work, gpu)
    over = max(memory.total / GIB - gpu.memory_gib, (memory.static - usable_static(shape, gpu)) / GIB)
    time = GenerateModel(spec, shape, role.dtype, cluster, constants_of(gpu.name)).seconds(work)
    return Served(own.engines * own.tp, memory, over, time.total if role.role == JUDGE else time.prefill)


def _workload(config: RunConfig, role: ServedRole) -> Workload:
    """What the model reads of a step, and what it writes. A template's own text is not counted."""
    policy, own = Workload.generated(config), role.settings
    read, longest = policy.tokens_per_sequence, policy.longest
    if role.role != JUDGE:
        return Workload(policy.sequences, policy.sequences, read, 1, 1 + longest - read)
    sequences = policy.sequences
    if own.mode == PAIRWISE:
        sequences = policy.prompts * 2 * len(pairs(config.rollout.n, own.opponents))
        read, longest = read + policy.response_tokens, longest + policy.max_response_tokens
    return Workload(sequences, sequences, read, own.max_tokens / 2, own.max_tokens + longest - read)
