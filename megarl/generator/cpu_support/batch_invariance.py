"""SGLang's `--enable-deterministic-inference` on CPUs: a request's numbers do not depend on the
other requests of its batch.

SGLang refuses `torch_native` attention there, and its batch-invariant kernels are for GPUs. Here
attention is invariant by its padding (attention.py). MKL multiplies one to three rows by other
kernels than more rows, and rounds otherwise. So matrices are cut into tiles of equal shape. Norms
and softmax of torch work row by row.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.library import Library

ROWS = 16  # of a tile


def register_hooks() -> None:
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        enable,
        HookType.REPLACE,
    )


@cache
def enable(enable_bmm: bool = True) -> Library:
    """Replaces the products of matrices in this process, as long as the returned library exists."""
    library = Library("aten", "IMPL")
    library.impl("mm", mm, "CPU")
    library.impl("addmm", addmm, "CPU")
    return library


def mm(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N]"""
    count, inner = rows.shape
    tiles = -(-count // ROWS)
    padded = rows.new_zeros(tiles * ROWS, inner)
    padded[:count] = rows
    product = torch.bmm(padded.view(tiles, ROWS, inner), matrix.expand(tiles, *matrix.shape))
    return product.flatten(0, 1)[:count]


def addmm(
    bias: torch.Tensor,
    rows: torch.Tensor,
    matrix: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    return beta * bias + alpha * mm(rows, matrix)
