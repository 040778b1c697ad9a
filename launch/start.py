"""The processes that a node starts: engines, trainer ranks, the driver of the engines."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.config.roles import REWARD_MODEL
from megarl.generator.server import EngineKeys, EngineSettings, ServedAdapter, seed_of, server_command
from megarl.kept_sets import MOST_KEPT
from megarl.launch.environment import compiling, engine_devices, network, one_thread, scratch, trainer_environment, weight_group
from megarl.launch.meeting import NodeReport
from megarl.launch.placement import EnginePart, NodePlan
from megarl.launch.processes import ProcessSpec
from megarl.launch.worker import PARENT
from megarl.messaging.host import with_port
from megarl.messaging.rendezvous import Rendezvous
from megarl.models.adapters import Lora
from megarl.plan.lora import sends_adapters
from megarl.plan.resolve import RunPlan
from megarl.plan.roles import ServedRole
from megarl.trainer.peft_files import empty_adapter
from megarl.weight_sync.engine.beats import BEATS


@dataclass(frozen=True)
class NodePart:
    """One node's part of a launch: which processes of the plan run here, and what all nodes have agreed on."""

    plan: RunPlan
    placed: NodePlan
    report: NodeReport
    rendezvous: Rendezvous
    folder: Path  # of the launch
    interface: str | None  # by which processes reach each other
    scratch: Path  # the TMPDIR of this node's processes
    alone: bool  # whether this is the only node

    def engines(self, device: str | None = None) -> list[ProcessSpec]:
        """One process per engine, or per part of one, in the order of `placed.engines`. `device`: cuda | cpu | None (what the node has)."""
        keys, specs = EngineKeys(api=self.rendezvous.engine_key, admin=self.rendezvous.engine_admin_key), []
        roles = {role.name: role for role in self.plan.served}
        for part in self.placed.engines:
            role, name = roles.get(part.fleet), self.numbered(part).name
            settings = self._settings(part, device) if role is None else self._frozen_settings(part, device, role)
            server_args = self.plan.config.generator.server_args if role is None else role.settings.server_args
            argv, environment = server_command(settings, keys, server_args)
            environment[BEATS] = str(self.folder / f"{name}.beats")
            specs.append(ProcessSpec(name, argv, {**environment, **engine_devices(part), **self._environment()}))
        return specs

    def numbered(self, part: EnginePart) -> EnginePart:
        """By the number that the engine has in the run, which others may have begun."""
        return replace(part, engine=part.engine + self.rendezvous.first_engine)

    def trainers(self, role: str) -> list[ProcessSpec]:
        """One process per trainer rank, in the given role."""
        specs, where = [], self.rendezvous
        store = self.scratch / "trainers" if self.alone else None
        for local_rank, rank in enumerate(self.placed.trainer_ranks):
            environment = trainer_environment(self.plan, rank, local_rank, where.trainer_host, where.trainer_port, store)
            specs.append(self._worker(role, rank, {**environment, **self._environment()}))
        return specs

    def driver(self, role: str) -> ProcessSpec:
        """The driver of the engines, in the given role."""
        return self._worker(role, 0, one_thread())

    def _environment(self) -> dict[str, str]:
        """That of all which computes: trainer ranks and engines."""
        config = self.plan.config
        wanted = config.launch.interface is not None or self.alone
        joined = {**network(self.interface, wanted, self.report.address), **weight_group(config.weights.transport)}
        return {**joined, **scratch(self.scratch), **compiling(config.launch.compile_cache)}

    def _worker(self, role: str, rank: int, environment: dict[str, str]) -> ProcessSpec:
        argv = [sys.executable, "-P", "-m", "megarl.launch.worker", role, str(rank), str(self.folder)]
        return ProcessSpec(f"{role}.{rank}", argv, {**environment, **scratch(self.scratch), PARENT: str(os.getpid())}, dumps_stacks=True)

    def _settings(self, part: EnginePart, device: str | None) -> EngineSettings:
        config = self.plan.config
        return EngineSettings(
            model_path=self.plan.weights_path,
            holds_weights=not self.plan.weights.are_gone,
            dtype=self.plan.engine_dtype,
            context_length=self.plan.spec.max_position_embeddings,
            max_running_requests=config.generator.max_concurrency,
            tp=config.generator.tp,
            ep=config.generator.ep,
            dp_attention=config.generator.dp_attention,
            quantization=config.generator.quantization,
            kv_cache_tokens=config.generator.kv_cache_tokens,
            mem_fraction=config.generator.mem_fraction,
            device=device,
            return_routing=config.trainer.routing_replay,
            most_kept=config.rollout.top_k if config.rollout.top_k > 0 else MOST_KEPT,
            tokenizer=(config.model.tokenizer or config.model.path) if config.rollout.stops_on_text else None,
            adapter=self._adapter(device),
            **self._place(part),
        )

    def write_adapter(self) -> None:
        """Writes the adapter that the policy's engines start with, if they serve one, to the folder of the launch."""
        lora = Lora.of(self.plan.config.lora)
        if lora is not None and (adapter := self._adapter(None)):
            empty_adapter(Path(adapter.folder), lora, adapter.targets)

    def _adapter(self, device: str | None) -> ServedAdapter | None:
        config, lora = self.plan.config, Lora.of(self.plan.config.lora)
        if lora is None or not sends_adapters(config, self.plan.spec, device):
            return None
        return ServedAdapter(str(self.folder / "adapter"), lora.rank, lora.names(self.plan.spec), lora.shared)

    def _frozen_settings(self, part: EnginePart, device: str | None, role: ServedRole) -> EngineSettings:
        own = role.settings
        return EngineSettings(
            model_path=own.path,
            dtype=role.dtype,
            context_length=role.spec.max_position_embeddings,
            max_running_requests=own.max_concurrency,
            tp=own.tp,
            ep=own.ep,
            kv_cache_tokens=own.kv_cache_tokens,
            mem_fraction=own.mem_fraction,
            device=device,
            frozen=True,
            classifies=role.role == REWARD_MODEL,
            **self._place(part),
        )

    def _place(self, part: EnginePart) -> dict[str, Any]:
        """What follows from where the part is."""
        engine = self.rendezvous.engines[part.fleet][part.engine]
        return {
            "host": self.report.address,
            "port": self.report.ports[part.name],
            "seed": seed_of(self.plan.config.seed, self.numbered(part).whole, self.rendezvous.start_step),
            "parts": part.parts,
            "part": part.part,
            "cores_taken": part.first_slot - len(self.placed.trainer_ranks) + self.rendezvous.first_engine * part.ranks,
            "group_address": with_port(engine.host, engine.group_port),
        }
