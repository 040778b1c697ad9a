"""A rank's work on the logits of a chunk, in Triton.

On CUDA these functions replace those of chunked_logprobs.py.

The forward pass reads the logits once. The backward pass reads them once and writes the gradient,
into the memory of the logits if the dtype allows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FORWARD_BLOCK = 4096
BACKWARD_BLOCK = 2048  # columns


@triton.jit
def _forward_kernel(
    logits, targets, partial, tokens, real, row_stride, temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)  # sum of e^(z - peak)
    weighted = tl.zeros((), tl.float32)  # sum of e^(z - peak) (z - peak)
    for start in range(0, real, BLOCK):
        c = start + tl.arange(0, BLOCK)
        z = (
            tl.load(logits + row * row_stride + c, mask=c < real, other=float("-inf")).to(
                tl.float32
            )
            / temperature
        )
        higher = tl.maximum(peak, tl.max(z, axis=0))
        weights = tl.exp(z - higher)
        rescale = tl.exp(peak - higher)
        lowered = total * tl.where(total > 0, peak - higher, 0.0)  # the initial peak is -inf
        weighted = (weighted + lowered) * rescale + tl.sum(
            weights * tl.where(c < real, z - higher, 0.0), axis=0
        )
        total = total * rescale + tl.sum(weights, axis=0)
        peak = higher
    target = tl.load(targets + row)
    at_target = (
        tl.load(logits + row * row_stride + target, mask=target >= 0, other=0.0).to(tl.float32)
        / temperature
    )
    tl.store(partial + row, peak + tl.log(total))
    tl.store(partial + tokens + row, tl.log(total) - weighted / total)
    tl.store(partial + 2 * tokens + row, at_target)


@triton.jit
def _bf16_bits(x):
    """Rounds float32 to bf16, to nearest even, in integer arithmetic: the interpreter's own cast
    truncates.
    """
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def _backward_kernel(
    logits,
    targets,
    log_z,
    grad,
    entropy_grad,
    entropy,
    gradient,
    real,
    width,
    row_stride,
    temperature,
    ENTROPY: tl.constexpr,
    BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = (
        tl.load(logits + row * row_stride + c, mask=c < real, other=float("-inf")).to(tl.float32)
        / temperature
    )
    log_p = z - tl.load(log_z + row)
    is_target = tl.where(c == tl.load(targets + row), 1.0, 0.0)
    g = tl.load(grad + row)
    factor = tl.zeros_like(z) + g
    if ENTROPY:
        factor += tl.load(entropy_grad + row) * (
            tl.where(c < real, log_p, 0.0) + tl.load(entropy + row)
        )
    dz = (g * is_target - factor * tl.exp(log_p)) / temperature
    rounded = _bf16_bits(dz).to(tl.int16, bitcast=True) if BF16 else dz
    tl.store(gradient + row * width + c, rounded, mask=c < width)


def local_forward(
    logits: torch.Tensor, targets: torch.Tensor, real: int, temperature: float
) -> torch.Tensor:
    """See chunked_logprobs.local_forward. The logits are not overwritten."""
    assert logits.stride(1) == 1
    partial = torch.empty(3, len(logits), device=logits.device)
    if len(logits):
        block = min(FORWARD_BLOCK, triton.next_power_of_2(real))
        _forward_kernel[(len(logits),)](
            logits,
            targets,
            partial,
            len(logits),
            real,
            logits.stride(0),
            float(temperature),
            BLOCK=block,
            num_warps=8,
        )
    return partial


def local_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_z: torch.Tensor,
    grad: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    real: int,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See chunked_logprobs.local_backward."""
    assert logits.is_contiguous() and dtype in (torch.float32, torch.bfloat16)
    rows, width = logits.shape
    gradient = logits
    if logits.dtype != dtype:
        gradient = torch.empty((rows, width), dtype=dtype, device=logits.device)
    if gradient.numel():
        block = min(BACKWARD_BLOCK, triton.next_power_of_2(width))
        bf16 = dtype == torch.bfloat16
        entropy_grad, entropy = (grad, grad) if of_entropy is None else of_entropy
        _backward_kernel[(rows, triton.cdiv(width, block))](
            logits,
            targets,
            log_z,
            grad,
            entropy_grad,
            entropy,
            gradient.view(torch.int16) if bf16 else gradient,
            real,
            width,
            logits.stride(0),
            float(temperature),
            ENTROPY=of_entropy is not None,
            BF16=bf16,
            BLOCK=block,
            num_warps=8,
        )
    return gradient
