"""Environment variables of a run's processes, all in one place, with the reason for each."""

from __future__ import annotations

from megarl.plan.resolve import RunPlan


def trainer_environment(plan: RunPlan, rank: int, address: str, port: int) -> dict[str, str]:
    """torchrun's variables, so that the trainer does not care who launched it, and what Megatron-core wants set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.trainer_topology.world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron: keeps communication kernels behind the compute they wait for
        **one_thread(),
    }


def one_thread() -> dict[str, str]:
    """One compute thread per process, waiting passively: processes share the cores, and spinning threads cost 7x."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def engine_devices(plan: RunPlan, engine: int) -> dict[str, str]:
    """GPUs of one engine on a single host: they come after the trainer's."""
    first = plan.trainer_topology.world_size + engine * plan.generator_topology.tp
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(first + i) for i in range(plan.generator_topology.tp))}
