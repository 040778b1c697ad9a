"""Facts about a config that need no estimate: both sides' layouts, ranks, parameters and bytes of weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megarl.estimate.hardware import Cluster
from megarl.estimate.memory import rank_bytes
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import engines_layout, generator_ranks
from megarl.reshard.layout import Layout, parameter_count, trainer_layout


def layouts(plan: RunPlan) -> tuple[Layout, Layout]:
    """The layouts of trainer and generator, on machines with cluster.gpu."""
    dtype, device = plan.config.model.dtype, Cluster.of(plan.config).gpu.device
    return trainer_layout(plan.spec, plan.trainer_topology, dtype), engines_layout(plan.spec, plan.groups, dtype, device)


def gpus(plan: RunPlan) -> int:
    return plan.trainer_topology.world_size + generator_ranks(plan.groups)


def evaluating(plan: RunPlan) -> int:
    """The GPUs of the engines that only evaluate."""
    return plan.config.eval.engines * plan.config.generator.tp


def describe(plan: RunPlan) -> dict[str, Any]:
    """Parallel sizes of the roles, parameters, and bytes of weights per rank, as plain values."""
    trainer, generator = layouts(plan)
    return {
        "family": plan.spec.family,
        "dtype": plan.config.model.dtype,
        "parameters": parameter_count(plan.spec),
        "trainer": {"ranks": trainer.world_size, **asdict(plan.trainer_topology), **_weight_bytes(trainer)},
        "generator": {"ranks": generator.world_size, **_engines(plan), **_weight_bytes(generator)},
        **({"evaluation": {"ranks": evaluating(plan), "engines": plan.config.eval.engines}} if plan.config.eval.engines else {}),
        "steps": plan.steps,
        "sequences_per_step": plan.sequences_per_step,
    }


def _engines(plan: RunPlan) -> dict[str, Any]:
    """The sizes of the engines, or of each group with its weights."""
    if not plan.groups[0].name:
        return asdict(plan.groups[0].topology)
    dtype, device, found = plan.config.model.dtype, Cluster.of(plan.config).gpu.device, {}
    for group in plan.groups:
        layout = engines_layout(plan.spec, [group], dtype, device)
        own = {"quantization": group.settings.quantization, **_weight_bytes(layout)}
        found[group.name] = {"ranks": layout.world_size, **asdict(group.topology), **own}
    return {"engines": plan.engines, "groups": found}


def sizes(role: dict[str, Any]) -> str:
    """The parallel sizes of a role, such as `tp 8, pp 16, dp 4`."""
    if "groups" in role:
        return "; ".join(f"{name}: {sizes(group)}" for name, group in role["groups"].items())
    shown = {key: role[key] for key in ("engines", "tp", "pp", "dp") if key in role}
    shown |= {key: role[key] for key in ("vpp", "cp", "ep", "etp", "dp_attention") if role.get(key, 1) > 1}
    return ", ".join(f"{key} {size}" for key, size in shown.items())


def gib_range(role: dict[str, Any]) -> str:
    low, high = (f"{role[key] / 2**30:.3f}" for key in ("weight_bytes_min", "weight_bytes_max"))
    return f"{high} GiB" if low == high else f"{low} to {high} GiB"


def _weight_bytes(layout: Layout) -> dict[str, int]:
    """Bytes on the ranks with the least and the most (pipeline stages differ), including padding."""
    found = rank_bytes(layout)
    return {"weight_bytes_min": min(found), "weight_bytes_max": max(found)}
