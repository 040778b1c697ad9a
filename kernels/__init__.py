"""Triton kernels, each beside its torch reference: the package megarl.kernels. (The audit hash: also one for the CPU, by Numba.)

These functions choose: the kernel for CUDA tensors, the reference for others. Both give the same bits (`quantise_*`, `tile_amax`)
or the same numbers to float32 accuracy (`vocab_parallel_logprobs`). Triton is imported by the first call that needs it.
"""

from __future__ import annotations

if __name__ != "megarl.kernels":  # SGLang means a PyPI package by `kernels`, not this folder in the current directory
    raise ImportError("the folder kernels/ of MegaRL is the package megarl.kernels; start Python with -P to keep it off sys.path")

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megarl.reshard.quantise_rules import Rule

__all__ = ["quantise_block", "quantise_block_with", "quantise_with", "tile_amax", "vocab_parallel_entropy", "vocab_parallel_logprobs"]


def quantise_block(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, rule: Rule, name: str) -> None:
    """Quantises a box of whole tiles and puts it in place, reading `values` once.

    values: [..., R, C] bf16 (float32 is rounded to it first), any strides; starts and ends on edges of tiles or of the tensor
    codes:  [..., R, C] float8_e4m3fn, any strides: written
    scales: `rule.scale_shape(values.shape)` float32, any strides: written
    Raises RuntimeError, with `name`, on NaN or infinity: the destination is then already written.
    """
    _quantise(values, rule).quantise_block(values, codes, scales, rule, name)


def quantise_block_with(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, row_start: int, col_start: int, rule: Rule
) -> None:
    """Quantises a box by given scales and puts it in place: the second pass where tiles are cut across senders.

    values, codes: as of `quantise_block`, but may start anywhere: their first element is (row_start, col_start) of the tensor
    scales: of the tiles touched, shape as of `tile_amax`
    """
    _quantise(values, rule).quantise_block_with(values, codes, scales, row_start, col_start, rule)


def quantise_with(values: torch.Tensor, row_start: int, col_start: int, scales: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The same into new memory. As `megarl.reshard.quantise.quantise_with`."""
    return _quantise(values, rule).quantise_with(values, row_start, col_start, scales, rule)


def tile_amax(values: torch.Tensor, row_start: int, col_start: int, rule: Rule, name: str) -> torch.Tensor:
    """Largest |x| of each tile a box touches, float32: the first pass. As `megarl.reshard.quantise.tile_amax`."""
    return _quantise(values, rule).tile_amax(values, row_start, col_start, rule, name)


def vocab_parallel_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float = 1.0
) -> torch.Tensor:
    """log softmax(logits / temperature) at `targets`, computed in float32; differentiable in `logits`.

    logits:  [..., padded_vocab / tp] this rank's slice of the vocabulary, any float dtype
    targets: [...] global token ids, int64, the same on all ranks of `group`, all below `vocab_size`
    returns: [...] float32, the same on all ranks of `group`

    Every rank of `group` must call it, with the same shapes.
    """
    from megarl.kernels import logprobs

    return logprobs.VocabParallelLogprobs.apply(logits, targets, group, vocab_size, temperature)


def vocab_parallel_entropy(logits: torch.Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float = 1.0) -> torch.Tensor:
    """Entropy of softmax(logits / temperature), in nats, computed in float32; no gradient. In torch on all devices.

    logits:  [..., padded_vocab / tp] this rank's slice of the vocabulary, any float dtype
    returns: [...] float32, the same on all ranks of `group`

    Every rank of `group` must call it, with the same shapes.
    """
    from megarl.kernels import entropy

    return entropy.vocab_parallel_entropy(logits, group, vocab_size, temperature)


def _quantise(values: torch.Tensor, rule: Rule):
    """The module that quantises `values` by `rule`. Kernels exist for blocks; rows and whole tensors are left to torch."""
    if values.is_cuda and rule.rows and rule.cols and _power_of_two(rule.rows) and _power_of_two(rule.cols) and not rule.reciprocal:
        from megarl.kernels import quantise_triton

        return quantise_triton
    from megarl.kernels import quantise

    return quantise


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
