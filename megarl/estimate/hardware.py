"""The machines that can be planned for, from data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import RunConfig
from megarl.plan.topologies import GPUS_PER_NODE, gpus_per_node

GIB = 2.0**30


@dataclass(frozen=True)
class Gpu:
    """Rates are peaks. `Constants` has the share of each that is reached."""

    name: str
    # memory that a process can allocate: torch.cuda.get_device_properties().total_memory
    memory_gib: float
    hbm_bytes_per_s: float
    bf16_flops: float  # without sparsity
    fp8_flops: float
    nvlink_bytes_per_s: float  # in each direction
    nic_bytes_per_s: float  # one NIC per GPU
    runtime_gib: float = 2.5  # CUDA context, NCCL's buffers, workspaces of cuBLAS and kernels
    # GPUs of a rack that NVLink connects across nodes; 0: only those of a node
    nvlink_domain: int = 0

    @property
    def device(self) -> str:
        """The device of engines' parameters, for reshard.layout.generator_layout: cuda | cpu."""
        return "cpu" if self.name == "cpu" else "cuda"

    def flops(self, precision: str) -> float:
        return self.fp8_flops if precision == "fp8" else self.bf16_flops


# From NVIDIA's data sheets of RTX 4090, L40S, A100 80GB SXM, H100 SXM, H200 SXM, HGX B200, HGX
# B300, GB200 NVL72 and GB300 NVL72, with one NIC per GPU: 400 Gb/s (ConnectX-7), except for A100
# with 200 Gb/s, and B300 and GB300 with 800 Gb/s (ConnectX-8). A100 has no fp8. RTX 4090 and L40S
# have no NVLink; their number is that of PCIe 4.0 x16. "cpu" is one core of a small server in fp32,
# in PyTorch over gloo. It was measured on machines with two cores, and is good only for the
# quickstart's order of magnitude.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("RTX4090", 23.6, 1.008e12, 165e12, 330e12, 32e9, 50e9),
        Gpu("L40S", 44.4, 864e9, 362e12, 733e12, 32e9, 50e9),
        Gpu("A100", 79.1, 2.039e12, 312e12, 312e12, 300e9, 25e9),
        Gpu("H100", 79.1, 3.35e12, 989e12, 1979e12, 450e9, 50e9),
        Gpu("H200", 139.8, 4.8e12, 989e12, 1979e12, 450e9, 50e9),
        Gpu("B200", 178.3, 8.0e12, 2250e12, 4500e12, 900e9, 50e9),
        Gpu("B300", 267.9, 8.0e12, 2250e12, 4500e12, 900e9, 100e9),
        Gpu("GB200", 184.3, 8.0e12, 2500e12, 5000e12, 900e9, 50e9, nvlink_domain=72),
        Gpu("GB300", 276.8, 8.0e12, 2500e12, 5000e12, 900e9, 100e9, nvlink_domain=72),
        Gpu("cpu", 6.0, 8e9, 6e10, 6e10, 1.5e9, 1.5e9, runtime_gib=0.8),
    )
}


@dataclass(frozen=True)
class Cluster:
    gpu: Gpu
    gpus_per_node: int = GPUS_PER_NODE  # connected by NVLink; each GPU has a NIC to other nodes

    @property
    def nvlinked(self) -> int:
        """GPUs whose collectives use NVLink.

        Weight updates leave a node over its NICs in any case.
        """
        return max(self.gpus_per_node, self.gpu.nvlink_domain)

    @classmethod
    def of(cls, config: RunConfig) -> Cluster:
        return cls(GPUS[config.cluster.gpu], gpus_per_node(config))


@dataclass(frozen=True)
class Constants:
    """The shares of the hardware's peak rates that are reached.

    Fitted constants are derived only from the fitted half of the published rows. `python
    tests/tools/planner_validation.py --fit` prints them, and a test compares them. All others were
    set once, from the named source.
    """

    # Fitted.
    # share of the peak that an infinitely large matrix product reaches
    gemm_efficiency: float = 0.7816
    # per layer of experts and pass: routing, permuting and launches that no product hides
    expert_pass_s: float = 0.000779
    decode_layer_s: float = 2.4e-05  # per layer and decoding step: small kernels
    node_latency_s: float = 0.0001234  # per collective across nodes and doubling of the nodes
    # per RL step: rewards, advantages, batches, logs and all else that does not overlap
    glue_s: float = 3.4

    # Set, not fitted.
    # streaming kernels on H100 (STREAM-like copies reach 0.9, attention over pages less)
    hbm_efficiency: float = 0.8
    link_efficiency: float = 0.75  # NCCL's bus bandwidth / the wire's, large messages (nccl-tests)
    # per collective over NVLink by one-shot kernels; NCCL takes twice that (nccl-tests, 8 H100)
    latency_s: float = 10e-6
    decode_step_s: float = 2e-3  # per decoding step, for the engine's scheduler
    # the same per request and step (SGLang 0.5.21 on a CPU, one tiny layer: 28e-6 with attention)
    decode_request_s: float = 20e-6
    # rows at which a product reaches half its efficiency: two tiles of 128
    half_rows: float = 256.0
    half_width: float = 256.0  # columns at which a product reaches half its efficiency
    # share of fp8's peak in training, relative to bf16's: scales, and operations not in fp8
    fp8_gemm_gain: float = 0.75
    # share of the peak that the thin products of decoding and prefill reach
    decode_gemm_efficiency: float = 0.5
    # number of times that a forward pass reads or writes a layer's activations outside its products
    elementwise_passes: float = 8.0
    # per trainer rank, while engines are paused: its grant and its report (python tests/benchmarks fleet)
    trainer_message_s: float = 60e-6
    # per engine worker: its part of answers, and its audit (python tests/benchmarks fleet)
    worker_message_s: float = 100e-6
    # per engine: the HTTP calls of an update (python tests/benchmarks driver, 256 engines)
    engine_calls_s: float = 1.4e-3
    # of a GPU to and from pinned host memory: PCIe 4.0 x16 in practice
    host_link_bytes_per_s: float = 25e9
    # to a GPU from memory that is not pinned, as that of rounded master weights
    pageable_bytes_per_s: float = 8e9
    host_adam_bytes_per_s: float = 100e9  # of a node's memory in AdamW's step on its cores
    step_s: float = 0.5  # per optimizer step: its launch, logging, batch building


CONSTANTS = Constants()
# Two cores that run the quickstart, set by hand from its measured steps. They give only the order
# of magnitude.
CPU_CONSTANTS = Constants(
    gemm_efficiency=0.5,
    half_rows=16,
    half_width=16,
    expert_pass_s=5e-3,
    decode_layer_s=1.2e-3,
    node_latency_s=1e-3,
    glue_s=0.03,
    latency_s=0.3e-3,
    decode_step_s=4e-3,
    decode_request_s=0.0,
    decode_gemm_efficiency=0.2,
    step_s=0.05,
)


def constants_of(gpu: str) -> Constants:
    return CPU_CONSTANTS if gpu == "cpu" else CONSTANTS
