"""What a node starts: engines, trainer ranks, the driver of the engines."""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.launch.environment import engine_devices, network, one_thread, trainer_environment
from megarl.launch.meeting import NodeReport
from megarl.launch.placement import EnginePart, NodePlan
from megarl.launch.processes import ProcessSpec
from megarl.launch.rendezvous import Rendezvous
from megarl.plan.resolve import RunPlan


def engine_specs(
    plan: RunPlan, mine: NodePlan, rendezvous: Rendezvous, report: NodeReport, interface: str | None, device: str | None = None
) -> list[ProcessSpec]:
    """One process per engine, or part of one, on this node. `report` is this node's own. `device`: cuda | cpu; None: what it has."""
    keys = EngineKeys(api=rendezvous.engine_key, admin=rendezvous.engine_admin_key)
    specs = []
    for part in mine.engines:
        argv, environment = server_command(engine_settings(plan, part, rendezvous, report, device), keys, plan.config.generator.server_args)
        specs.append(ProcessSpec(part.name, argv, {**environment, **engine_devices(part), **network(interface)}))
    return specs


def engine_settings(plan: RunPlan, part: EnginePart, rendezvous: Rendezvous, report: NodeReport, device: str | None) -> EngineSettings:
    config, engine = plan.config, part.engine
    return EngineSettings(
        model_path=plan.weights_path,
        dtype=plan.engine_dtype,
        port=report.ports[part.name],
        context_length=plan.spec.max_position_embeddings,
        max_running_requests=config.generator.max_concurrency,
        tp=config.generator.tp,
        ep=config.generator.ep,
        host=report.address,
        quantization=config.generator.quantization,
        kv_cache_tokens=config.generator.kv_cache_tokens,
        mem_fraction=config.generator.mem_fraction,
        device=device,
        seed=config.seed + engine,
        parts=part.parts,
        part=part.part,
        group_address=f"{rendezvous.engine_hosts[engine]}:{rendezvous.engine_group_ports[engine]}",
    )


def trainer_specs(
    plan: RunPlan, mine: NodePlan, role: str, rendezvous: Rendezvous, launch_dir: Path, interface: str | None
) -> list[ProcessSpec]:
    """One process per trainer rank on this node, in the given role."""
    specs = []
    for local_rank, rank in enumerate(mine.trainer_ranks):
        environment = trainer_environment(plan, rank, local_rank, rendezvous.trainer_host, rendezvous.trainer_port)
        specs.append(worker_spec(role, rank, launch_dir, {**environment, **network(interface)}))
    return specs


def worker_spec(role: str, rank: int, launch_dir: Path, environment: dict[str, str] | None = None) -> ProcessSpec:
    argv = [sys.executable, "-m", "megarl.launch.worker", role, str(rank), str(launch_dir)]
    return ProcessSpec(f"{role}.{rank}", argv, environment or one_thread(), dumps_stacks=True)
