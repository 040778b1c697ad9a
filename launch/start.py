"""The processes that a node starts: engines, trainer ranks, and the engines' driver."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.base import shared_gpu
from megarl.base.files import write_problem
from megarl.base.kept_sets import MOST_KEPT
from megarl.base.processes import BEATS
from megarl.config.errors import ConfigError
from megarl.config.schema import GeneratorConfig, RunConfig
from megarl.data.rows import held_out_samplings, stops_on_text
from megarl.estimate.estimate import training_memory
from megarl.estimate.hardware import GPUS
from megarl.generator.seeds import seed_of
from megarl.generator.server import ENGINE_SEED_BITS, EngineKeys, EngineSettings, server_command
from megarl.launch import doctor
from megarl.launch.gpus import VISIBLE, cores_near, gpus
from megarl.launch.meeting import NodeReport
from megarl.launch.nodes import EnginePart, NodePlan
from megarl.launch.processes import ProcessSpec
from megarl.launch.worker import CORES, PARENT
from megarl.messaging.host import with_port
from megarl.messaging.rendezvous import ROLLOUTS, Rendezvous
from megarl.plan.resolve import RunPlan
from megarl.roles.plan import ServedRole
from megarl.roles.settings import REWARD_MODEL
from megarl.speculative import plan as speculative

CUMEM = "NCCL_CUMEM_ENABLE"
HOME_CACHE = "~/.cache/megarl/compiled"


def trainer_environment(
    plan: RunPlan, rank: int, local_rank: int, address: str, port: int, store: Path | None
) -> dict[str, str]:
    """torchrun's variables, so that the trainer does not depend on how it was launched, and
    variables that Megatron-core needs. `store`: the file through which ranks meet if all of them
    are on this node.
    """
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.trainer_topology.world_size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # Megatron requires 1, to order communication kernels after the computation they wait for.
        # But for FSDP2 it requires more: with one queue, gathers wait for earlier computation.
        "CUDA_DEVICE_MAX_CONNECTIONS": "8" if plan.trainer_topology.zero == 3 else "1",
    }
    if store:
        environment["MEGARL_TRAINER_STORE"] = str(store)
    return environment | one_thread() | binding(local_rank)


def one_thread() -> dict[str, str]:
    """One compute thread per process, which waits passively.

    Processes share the cores, and spinning threads cost a factor of 7.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def binding(slot: int) -> dict[str, str]:
    """The cores of the rank, near its GPU.

    The worker binds to them before it imports anything (launch/worker.py).
    """
    node_gpus = gpus()
    if slot >= len(node_gpus) or not node_gpus[slot].address:
        return {}
    cores = cores_near(node_gpus[slot].address)
    if cores:
        return {CORES: ",".join(map(str, cores))}
    return {}


def network(interface: str | None, for_nccl: bool, address: str = "") -> dict[str, str]:
    """Sets the network interface at which this node is reached, at `address`.

    `for_nccl` sets it for NCCL too.

    By default, gloo uses the address that the host's name resolves to, often 127.0.1.1. NCCL looks
    at the interfaces itself. NCCL needs the setting only if launch.interface is set, or on a single
    node, where it should not listen on the network. Mooncake assumes IPv4 addresses unless it is
    told otherwise before it is imported.
    """
    environment = {}
    if ":" in address:
        environment["MC_USE_IPV6"] = "1"
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
        if for_nccl:
            environment["NCCL_SOCKET_IFNAME"] = interface
    return environment


def scratch(folder: Path) -> dict[str, str]:
    """Sets TMPDIR to `folder`."""
    return {"TMPDIR": str(folder)}


def compiled_folder(folder: str | None, scratch: Path) -> Path:
    """Where this host keeps compiled kernels: in `folder` (launch.compile_cache), in ~/.cache, or,
    if this user has no home that can be written to, in `scratch`, which goes with the launch. Each
    host has its own subfolder, since all nodes compile at the same time, and homes are often
    shared. Raises ConfigError if `folder`, or a folder that the environment names, cannot be
    written to.
    """
    for name in _CACHE_FOLDERS:
        cache = os.environ.get(name)
        problem = _unwritable(Path(cache)) if cache else ""
        if problem:
            raise ConfigError(f"{name}={cache}: must be a folder that can be written to: {problem}")
    try:
        base = Path(folder or HOME_CACHE).expanduser() / socket.gethostname()
    except RuntimeError:  # HOME is not set, and the user has no account here
        return scratch / "compiled"
    problem = _unwritable(base)
    if not problem:
        return base
    if folder:
        raise ConfigError(
            f"launch.compile_cache={folder}: must be a folder that can be written to: {problem}"
        )
    return scratch / "compiled"


def _unwritable(folder: Path) -> str:
    """The reason why nothing can be written to `folder`, which is made if it is missing; empty if
    it can be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return write_problem(folder)


def compiling(base: Path) -> dict[str, str]:
    """The variables that keep compiled kernels below `base` (`compiled_folder`), so that the next
    launch finds them. On GPUs, also adds compilers to PATH, since jobs often call an environment's
    programs without activating it.
    """
    environment = {
        name: os.environ.get(name, str(base / folder)) for name, folder in _CACHE_FOLDERS.items()
    }
    # otherwise Numba keeps its kernels beside their source
    if not os.access(Path(__file__).parent, os.W_OK):
        environment["NUMBA_CACHE_DIR"] = os.environ.get("NUMBA_CACHE_DIR", str(base / "numba"))
    if not doctor.has_driver():
        return environment
    nvcc = doctor.find_nvcc()
    if nvcc and not os.environ.get("CUDA_HOME"):
        environment["CUDA_HOME"] = str(nvcc.parents[1])
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep):
        environment["PATH"] = f"{programs}{os.pathsep}{path}"
    return environment


_CACHE_FOLDERS = {
    "SGLANG_CACHE_DIR": "sglang",  # also for kernels of DeepGEMM, CUTLASS, TileLang and CUDA
    "SGLANG_JIT_CACHE_DIR": "sglang-jit",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def weight_group(transport: str) -> dict[str, str]:
    """Settings for trainer ranks and engines that `transport` (weights.transport) joins in an NCCL
    group.

    SGLang turns cuMem off in its engines by default; elsewhere it is on. Ranks with different
    settings cannot open each other's buffers. Without cuMem, sends from several ranks of a node to
    one rank of another may hang (NVIDIA/nccl issue 1721).
    """
    if transport == "nccl":
        return {CUMEM: os.environ.get(CUMEM, "1")}
    return {}


def engine_devices(part: EnginePart) -> dict[str, str]:
    """The GPUs of an engine part, by their names in this launch's CUDA_VISIBLE_DEVICES."""
    slots = range(part.first_slot, part.first_slot + part.ranks)
    names = list(map(str, slots))
    for index, gpu in enumerate(gpus()[slots.start : slots.stop]):
        names[index] = gpu.name
    return {VISIBLE: ",".join(names)}


@dataclass(frozen=True)
class NodePart:
    """One node's part of a launch: the processes of the plan that run here, and the values that all
    nodes have agreed on.
    """

    plan: RunPlan
    placed: NodePlan
    report: NodeReport
    rendezvous: Rendezvous
    folder: Path  # folder of the launch
    interface: str | None  # network interface through which processes reach each other
    scratch: Path  # TMPDIR of this node's processes
    alone: bool  # whether this is the only node
    compiled: Path = Path(HOME_CACHE)  # where kernels are kept

    def engines(self, device: str | None = None) -> list[ProcessSpec]:
        """One process per engine, or per part of one, in the order of `placed.engines`.

        `device`: cuda | cpu | None (what the node has).
        """
        keys = EngineKeys(api=self.rendezvous.engine_key, admin=self.rendezvous.engine_admin_key)
        specs = []
        roles = {role.name: role for role in self.plan.served}
        for part in self.placed.engines:
            role = roles.get(part.fleet)
            name = self.numbered(part).name
            if role:
                settings = self._frozen_settings(part, device, role)
            else:
                settings = self._settings(part, device)
            group: GeneratorConfig = part.group.settings
            argv, environment = server_command(settings, keys, group.server_args)
            environment[BEATS] = str(self.folder / f"{name}.beats")
            environment |= engine_devices(part) | self._environment()
            if self.shares and part.group.purpose == ROLLOUTS:
                environment |= shared_gpu.for_engine(self.scratch, self.placed.trainer_ranks)
            specs.append(ProcessSpec(name, argv, environment))
        return specs

    def numbered(self, part: EnginePart) -> EnginePart:
        """The part with the engine's number in the run.

        It differs if engines join a run of other launchers.
        """
        return replace(part, engine=part.engine + self.rendezvous.first_engine)

    def trainers(self, role: str) -> list[ProcessSpec]:
        """One process per trainer rank, in the given role."""
        specs = []
        host = self.rendezvous.trainer_host
        port = self.rendezvous.trainer_port
        store = self.scratch / "trainers" if self.alone else None
        for local_rank, rank in enumerate(self.placed.trainer_ranks):
            environment = trainer_environment(self.plan, rank, local_rank, host, port, store)
            if self.shares:
                environment |= shared_gpu.for_trainer(self.scratch, rank, self._peak_bytes)
            specs.append(self._worker(role, rank, {**environment, **self._environment()}))
        return specs

    @property
    def shares(self) -> bool:
        """Whether engines share GPUs with trainer ranks, on this node too."""
        return bool(self.plan.config.cluster.share_gpus) and bool(self.placed.trainer_ranks)

    @cached_property
    def _peak_bytes(self) -> float:
        """The planned bytes of a trainer rank on its GPU, without context and libraries."""
        config = self.plan.config
        memory = training_memory(config, self.plan.spec, config.trainer, GPUS[config.cluster.gpu])
        return memory.total - memory.runtime

    def driver(self, role: str) -> ProcessSpec:
        """The driver of the engines, in the given role."""
        return self._worker(role, 0, one_thread())

    def _environment(self) -> dict[str, str]:
        """The environment of all computing processes: trainer ranks and engines."""
        config = self.plan.config
        for_nccl = config.launch.interface is not None or self.alone
        return {
            **network(self.interface, for_nccl, self.report.address),
            **weight_group(config.weights.transport),
            **scratch(self.scratch),
            **compiling(self.compiled),
        }

    def _worker(self, role: str, rank: int, environment: dict[str, str]) -> ProcessSpec:
        argv = [
            sys.executable,
            "-P",
            "-m",
            "megarl.launch.worker",
            role,
            str(rank),
            str(self.folder),
        ]
        return ProcessSpec(
            f"{role}.{rank}",
            argv,
            {**environment, **scratch(self.scratch), PARENT: str(os.getpid())},
            dumps_stacks=True,
        )

    def _settings(self, part: EnginePart, device: str | None) -> EngineSettings:
        config = self.plan.config
        tokenizer = None
        if stops_on_text(config):
            tokenizer = config.model.tokenizer or config.model.path
        return EngineSettings(
            model_path=self.plan.weights_path,
            holds_weights=not self.plan.weights.are_gone,
            dtype=part.group.dtype(config.model.dtype),
            context_length=self.plan.spec.max_position_embeddings,
            family=self.plan.spec.family,
            text_only=self.plan.spec.vision_tower,
            device=device,
            return_routing=bool(config.trainer.routing_replay),
            most_kept=most_kept(config),
            tokenizer=tokenizer,
            adapter=self.plan.adapters and self.plan.adapters.served(self._adapter, device),
            speculative=speculative.arguments(config),
            **_shape(part.group.settings),
            **self._place(part),
        )

    def write_adapter(self) -> None:
        """Writes the adapter that the policy's engines start with, if they serve one, to the folder
        of the launch.
        """
        if self.plan.adapters is not None:
            self.plan.adapters.write(self._adapter)

    @property
    def _adapter(self) -> Path:
        return self.folder / "adapter"

    def _frozen_settings(
        self, part: EnginePart, device: str | None, role: ServedRole
    ) -> EngineSettings:
        return EngineSettings(
            model_path=role.settings.path,
            dtype=role.dtype,
            context_length=role.spec.max_position_embeddings,
            family=role.spec.family,
            text_only=role.spec.vision_tower,
            device=device,
            frozen=True,
            classifies=role.role == REWARD_MODEL,
            **_shape(part.group.settings),
            **self._place(part),
        )

    def _place(self, part: EnginePart) -> dict[str, Any]:
        """The settings that depend on where the part runs."""
        engine = self.rendezvous.engines[part.fleet][part.engine]
        slots_of_trainer = 0 if self.shares else len(self.placed.trainer_ranks)
        return {
            "host": self.report.address,
            "port": self.report.ports[part.name],
            "seed": seed_of(
                self.plan.config.seed,
                self.numbered(part).engine_name,
                self.rendezvous.start_step,
                bits=ENGINE_SEED_BITS,
            ),
            "deterministic": self.plan.config.deterministic,
            "parts": part.parts,
            "part": part.part,
            "cores_taken": part.first_slot
            - slots_of_trainer
            + self.rendezvous.first_engine * part.ranks,
            "group_address": with_port(engine.host, engine.group_port),
        }


def most_kept(config: RunConfig) -> int:
    """The most tokens that an engine keeps of a distribution, in rollouts and in evaluations."""
    limits = [sampling.kept_limit for sampling in held_out_samplings(config) if sampling.truncated]
    limits.append(config.rollout.top_k if config.rollout.top_k > 0 else MOST_KEPT)
    return max(limits)


def _shape(settings: GeneratorConfig) -> dict[str, Any]:
    """The engine settings that a group may set."""
    return {
        "max_running_requests": settings.max_concurrency,
        "tp": settings.tp,
        "ep": settings.ep,
        "dp_attention": settings.dp_attention,
        "quantization": settings.quantization,
        "kv_cache_tokens": settings.kv_cache_tokens,
        "mem_fraction": settings.mem_fraction,
    }
