"""All environment variables of a run's processes, with the reason for each."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.launch import doctor
from megarl.launch.binding import VISIBLE, cores_near, gpus
from megarl.launch.placement import EnginePart
from megarl.launch.worker import CORES
from megarl.plan.resolve import RunPlan

CUMEM = "NCCL_CUMEM_ENABLE"


def trainer_environment(plan: RunPlan, rank: int, local_rank: int, address: str, port: int, store: Path | None) -> dict[str, str]:
    """torchrun's variables, so that the trainer need not care who launched it, and those that Megatron-core asks for. `store` is the file
    through which ranks meet if all of them are on this node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.trainer_topology.world_size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **({"MEGARL_TRAINER_STORE": str(store)} if store else {}),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it, to order communication kernels after the compute they wait for
        **one_thread(),
        **binding(local_rank),
    }


def one_thread() -> dict[str, str]:
    """One compute thread per process, which waits passively: processes share the cores, and spinning threads cost a factor of 7."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def binding(slot: int) -> dict[str, str]:
    """The cores of the rank, near its GPU; the worker moves to them before it imports anything (launch/worker.py)."""
    here = gpus()
    cores = cores_near(here[slot].address) if slot < len(here) and here[slot].address else ()
    return {CORES: ",".join(map(str, cores))} if cores else {}


def network(interface: str | None, wanted: bool, address: str = "") -> dict[str, str]:
    """Sets the network interface at which this node is reached, at `address`; `wanted` sets it for NCCL too.

    By default gloo uses the address that the host's name resolves to, often 127.0.1.1; NCCL looks at the interfaces itself. NCCL needs the
    setting only if launch.interface is set, or on a single node, where it should not listen on the network. Mooncake takes addresses for
    IPv4 unless it is told otherwise, before it is imported.
    """
    ipv6 = {"MC_USE_IPV6": "1"} if ":" in address else {}
    if interface is None:
        return ipv6
    return {**ipv6, "GLOO_SOCKET_IFNAME": interface, **({"NCCL_SOCKET_IFNAME": interface} if wanted else {})}


def scratch(folder: Path) -> dict[str, str]:
    """Makes `folder` the TMPDIR."""
    return {"TMPDIR": str(folder)}


def compiling(folder: str | None) -> dict[str, str]:
    """Where compiled kernels are kept, so that the next launch finds them: in `folder` (launch.compile_cache), or in ~/.cache. Each host
    has its own, since all nodes compile at the same time, and a home is often shared. On GPUs also where compilers are: jobs call an
    environment's programs without activating it. Raises ConfigError where a user without a home has not said where."""
    try:
        base = Path(folder or "~/.cache/megarl/compiled").expanduser() / socket.gethostname()
    except RuntimeError as error:
        raise ConfigError(
            f"launch.compile_cache={folder or 'null'}: must be a folder, since this user has no home: set it, or HOME"
        ) from error
    caches = {name: os.environ.get(name, str(base / kind)) for name, kind in _COMPILED.items()}
    if not doctor.has_driver():
        return caches
    programs, nvcc = str(Path(sys.executable).parent), doctor.find_nvcc()
    path = os.environ.get("PATH", os.defpath)
    home = {"CUDA_HOME": str(nvcc.parents[1])} if nvcc and not os.environ.get("CUDA_HOME") else {}
    return caches | home | ({} if programs in path.split(os.pathsep) else {"PATH": f"{programs}{os.pathsep}{path}"})


_COMPILED = {
    "SGLANG_CACHE_DIR": "sglang",  # also where it keeps DeepGEMM's kernels, CUTLASS's, TileLang's and CUDA's
    "SGLANG_JIT_CACHE_DIR": "sglang-jit",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def weight_group(transport: str) -> dict[str, str]:
    """Settings for trainer ranks and engines that `transport` (weights.transport) joins in an NCCL group.

    SGLang turns cuMem off in its engines by default; elsewhere it is on. Ranks that differ in it cannot open each other's buffers, and
    without it, sends from several ranks of a node to one of another may hang (NVIDIA/nccl issue 1721).
    """
    return {CUMEM: os.environ.get(CUMEM, "1")} if transport == "nccl" else {}


def engine_devices(part: EnginePart) -> dict[str, str]:
    """The part's GPUs, by the names under which this launch was given them."""
    names = [gpu.name for gpu in gpus()]
    slots = range(part.first_slot, part.first_slot + part.ranks)
    return {VISIBLE: ",".join(names[slot] if slot < len(names) else str(slot) for slot in slots)}
