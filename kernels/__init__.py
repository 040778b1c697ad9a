"""The package megarl.kernels: Triton kernels, each with its torch reference.

Some also have a kernel for the CPU, in Numba.

The functions here use the kernel for CUDA tensors and the reference for all others. Both give the
same bits (`quantise_with`, `tile_amax`, `find_changes`) or equal numbers to float32 accuracy
(`linear_logprobs`). Triton is imported by the first call that needs it.
"""

from __future__ import annotations

if __name__ != "megarl.kernels":
    # Transformers and SGLang look for PyPI's package `kernels`, and find this folder if the
    # checkout is on sys.path. They must notice that it is another one, since it has no version and
    # no modules. (An ImportError would end transformers 5.19, which imports it.)
    __path__ = []

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

    from megarl.kernels.chunked_kl import Teacher
    from megarl.kernels.quantise_rules import Rule

__all__ = ["find_changes", "linear_kl", "linear_logprobs", "quantise_with", "tile_amax"]


def find_changes(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The elements in which `new` of each pair differs from `old`, in compact form: see
    `megarl.kernels.changes.find_changes`. All pairs are on one device. The host waits for a GPU
    only once, to learn the number of changes of each pair.
    """
    if pairs and pairs[0][0].is_cuda:
        from megarl.kernels import changes_triton

        return changes_triton.find_changes(pairs)
    from megarl.kernels import changes

    return [changes.find_changes(new, old) for new, old in pairs]


def quantise_with(
    values: torch.Tensor, row_start: int, col_start: int, scales: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """The second pass: the codes of a box, given the scales of the tiles it touches.

    See `megarl.kernels.quantise.quantise_with`.
    """
    return _quantise(values, rule).quantise_with(values, row_start, col_start, scales, rule)


def tile_amax(
    values: torch.Tensor, row_start: int, col_start: int, rule: Rule, name: str
) -> torch.Tensor:
    """The first pass: the largest |x| in each tile that a box touches, float32.

    See `megarl.kernels.quantise.tile_amax`.
    """
    return _quantise(values, rule).tile_amax(values, row_start, col_start, rule, name)


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    weight_grad: torch.Tensor | None = None,
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets`, and the entropy in nats, under softmax(hidden @ weight.T /
    temperature). Logits are computed in chunks.

    hidden:  [t, h] float32 or bfloat16, the same on all ranks of `group`
    weight:  [padded_vocab / tp, h] this rank's slice of the vocabulary, of the same dtype
    targets: [t] global token ids, int64, the same on all ranks of `group`, all below `vocab_size`
    allowed: the sets of tokens that the softmaxes are over, the same on all ranks of `group`; None:
             the whole vocabulary. First the sizes ([t] int64, on the CPU, none 0), then global ids
             (int32, set after set, no id twice in a set). A set contains its target
    returns: [t] and [t] float32, the same on all ranks of `group`

    Both results are differentiable. The gradient of `hidden` is this rank's share, and must be
    summed over `group`. The gradient of `weight` is summed in float32. If `weight_grad` (float32,
    [padded_vocab / tp, h]) is given, it is added to that, and autograd gets zeros instead.

    Every rank of `group` must call this function, with the same shapes. The backward pass has no
    collective.
    """
    from megarl.kernels.chunked_logprobs import LinearLogprobs

    return LinearLogprobs.apply(
        hidden, weight, targets, group, vocab_size, temperature, chunk_tokens, weight_grad, allowed
    )


def linear_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: Teacher,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    weight_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """[t] float32: the reverse KL divergence of softmax(hidden @ weight.T / temperature) from
    `teacher` at each position. Logits are computed in chunks, by the matrix library and torch.

    `teacher` is a chunked_kl.WholeDistribution or LikeliestTokens. All other arguments, the
    gradients and the collective are as in linear_logprobs.
    """
    from megarl.kernels.chunked_kl import LinearKl

    return LinearKl.apply(
        hidden, weight, teacher, group, vocab_size, temperature, chunk_tokens, weight_grad
    )


def _quantise(values: torch.Tensor, rule: Rule):
    """The module that quantises `values` by `rule`.

    The kernels handle only blocks; torch handles rows and whole tensors.
    """
    if (
        values.is_cuda
        and rule.rows
        and rule.cols
        and _power_of_two(rule.rows)
        and _power_of_two(rule.cols)
    ):
        from megarl.kernels import quantise_triton

        return quantise_triton
    from megarl.kernels import quantise

    return quantise


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
