"""What is reached of the hardware's peaks. What is fitted comes from the fitted half of the published rows and from nowhere else:
`python tests/tools/planner_validation.py --fit` prints it, and a test compares. Everything else was set once, from the named source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    # Fitted.
    gemm_efficiency: float = 0.7912  # of the peak, of an endless matrix product
    expert_pass_s: float = 0.001184  # per layer of experts and pass: routing, permuting, launches that no product hides
    decode_layer_s: float = 2.652e-05  # per layer and decoding step: small kernels
    node_latency_s: float = 0.0001469  # of a collective that leaves the node, per doubling of the nodes
    glue_s: float = 3.657  # per step of any RL run: rewards, advantages, batches, logs, what hides behind nothing

    # Set, not fitted.
    hbm_efficiency: float = 0.8  # of streaming kernels on H100 (STREAM-like copies reach 0.9, attention over pages less)
    link_efficiency: float = 0.75  # bus bandwidth of NCCL over the wire's, large messages (nccl-tests)
    latency_s: float = 10e-6  # of a collective over NVLink: one-shot kernels; NCCL takes twice that (nccl-tests, 8 H100)
    decode_step_s: float = 2e-3  # per decoding step: scheduler and sampler
    half_rows: float = 256.0  # rows at which a product reaches half its efficiency: two tiles of 128
    half_width: float = 256.0  # columns, the same
    decode_gemm_efficiency: float = 0.5  # of the peak, of the thin products of decoding and prefill
    elementwise_passes: float = 8.0  # reads and writes of a layer's activations beside its products, forward
    step_s: float = 0.5  # optimizer launch, logging, batch building: per training step


CONSTANTS = Constants()
# Of two cores that run the quickstart: set by hand from its own measured steps, good for the order of magnitude.
CPU_CONSTANTS = Constants(
    gemm_efficiency=0.5, half_rows=16, half_width=16, expert_pass_s=5e-3, decode_layer_s=1.2e-3, node_latency_s=1e-3,
    glue_s=0.03, latency_s=0.3e-3, decode_step_s=4e-3, decode_gemm_efficiency=0.2, step_s=0.05,
)  # fmt: skip


def constants_of(gpu: str) -> Constants:
    return CPU_CONSTANTS if gpu == "cpu" else CONSTANTS
