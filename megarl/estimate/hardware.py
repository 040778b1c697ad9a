"""The machines that can be planned for, from data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import RunConfig

GIB = 2.0**30


@dataclass(frozen=True)
class Gpu:
    """Rates are peaks; `constants` says how much of them is reached."""

    name: str
    memory_gib: float  # what a process can allocate: torch.cuda.get_device_properties().total_memory
    hbm_bytes_per_s: float
    bf16_flops: float  # dense
    fp8_flops: float
    nvlink_bytes_per_s: float  # a direction
    nic_bytes_per_s: float  # one NIC per GPU
    runtime_gib: float = 2.5  # CUDA context, NCCL's buffers, workspaces of cuBLAS and kernels

    @property
    def device(self) -> str:
        """Where engines keep their parameters, for reshard.layout.generator_layout: cuda | cpu."""
        return "cpu" if self.name == "cpu" else "cuda"

    def flops(self, precision: str) -> float:
        return self.fp8_flops if precision == "fp8" else self.bf16_flops


# From NVIDIA's data sheets of L40S, A100 80GB SXM, H100 SXM, H200 SXM and HGX B200, with one 400 Gb/s NIC per GPU (ConnectX-7; with A100,
# which has no fp8 either, 200 Gb/s). L40S has no NVLink: the figure is that of its PCIe 4.0 x16. "cpu" is one core of a small server in
# fp32, in PyTorch over gloo, measured on two-core machines: good only for the quickstart's order of magnitude.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("L40S", 44.4, 864e9, 362e12, 733e12, 32e9, 50e9),
        Gpu("A100", 79.1, 2.039e12, 312e12, 312e12, 300e9, 25e9),
        Gpu("H100", 79.1, 3.35e12, 989e12, 1979e12, 450e9, 50e9),
        Gpu("H200", 139.8, 4.8e12, 989e12, 1979e12, 450e9, 50e9),
        Gpu("B200", 178.3, 8.0e12, 2250e12, 4500e12, 900e9, 50e9),
        Gpu("cpu", 6.0, 8e9, 6e10, 6e10, 1.5e9, 1.5e9, runtime_gib=0.8),
    )
}


@dataclass(frozen=True)
class Cluster:
    gpu: Gpu
    gpus_per_node: int = 8  # joined by NVLink; each GPU has a NIC to other nodes

    @classmethod
    def of(cls, config: RunConfig) -> Cluster:
        return cls(GPUS[config.cluster.gpu], config.launch.ranks_per_node or cls.gpus_per_node)
