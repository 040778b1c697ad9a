"""A rank's work on its own slice of the vocabulary, in Triton. On CUDA these functions replace those of logprobs.py.

The forward pass reads the logits once and keeps nothing of their size; the backward pass reads them again and writes the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FORWARD_BLOCK, BACKWARD_BLOCK = 4096, 2048  # columns


@triton.jit
def _forward_kernel(logits, targets, partial, tokens, real, row_stride, col_stride, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)  # of e^(z - peak)
    for start in range(0, real, BLOCK):
        c = start + tl.arange(0, BLOCK)
        z = tl.load(logits + row * row_stride + c.to(tl.int64) * col_stride, mask=c < real, other=float("-inf")).to(tl.float32)
        z = z / temperature
        higher = tl.maximum(peak, tl.max(z, axis=0))
        # While all logits so far are -inf (masked) there is nothing to scale: e^(-inf - -inf) would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(z - shift), axis=0)
        peak = higher
    target = tl.load(targets + row)
    at_target = tl.load(logits + row * row_stride + target * col_stride, mask=target >= 0, other=0.0).to(tl.float32) / temperature
    tl.store(partial + row, peak + tl.log(total))
    tl.store(partial + tokens + row, at_target)


@triton.jit
def _bf16_bits(x):
    """Rounds float32 to bf16, to nearest even, in integer arithmetic: the interpreter's own cast truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def _backward_kernel(
    logits, targets, log_z, grad, gradient, real, width, row_stride, col_stride, temperature, BF16: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * row_stride + c * col_stride, mask=c < real, other=float("-inf")).to(tl.float32) / temperature
    picked = tl.where(c == tl.load(targets + row), 1.0, 0.0)
    dz = tl.load(grad + row) / temperature * (picked - tl.exp(z - tl.load(log_z + row)))
    rounded = _bf16_bits(dz).to(tl.int16, bitcast=True) if BF16 else dz.to(gradient.dtype.element_ty)
    tl.store(gradient + row * width + c, rounded, mask=c < width)


def local_forward(logits: torch.Tensor, local_targets: torch.Tensor, real: int, temperature: float) -> tuple[torch.Tensor, None]:
    """See logprobs.local_forward. The backward needs only the logits themselves."""
    partial = torch.empty(2, len(logits), device=logits.device)
    if len(logits):
        block = min(FORWARD_BLOCK, triton.next_power_of_2(max(real, 1)))
        _forward_kernel[(len(logits),)](
            logits, local_targets, partial, len(logits), real, *logits.stride(), float(temperature), BLOCK=block, num_warps=8
        )
    return partial, None


def local_backward(
    kept: None, logits: torch.Tensor, targets: torch.Tensor, log_z: torch.Tensor, grad: torch.Tensor, real: int, temperature: float
) -> torch.Tensor:
    """See logprobs.local_backward."""
    rows, width = logits.shape
    gradient = torch.empty((rows, width), dtype=logits.dtype, device=logits.device)
    if gradient.numel():
        block = min(BACKWARD_BLOCK, triton.next_power_of_2(width))
        bf16 = gradient.dtype == torch.bfloat16
        _backward_kernel[(rows, triton.cdiv(width, block))](
            logits, targets, log_z, grad.contiguous(), gradient.view(torch.int16) if bf16 else gradient,
            real, width, *logits.stride(), float(temperature), BF16=bf16, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return gradient
