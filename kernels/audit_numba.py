"""The audit hash compiled for the CPU: one loop that reads memory once.

Bitwise equal to kernels/audit.py.
"""

from __future__ import annotations

import numba
import numpy as np
import torch


def hash_words(
    words: torch.Tensor, row_weights: np.ndarray, word_weights: np.ndarray, shift: int
) -> int:
    """The sum of mix(x[r, w]) * a(r) * b(w). words: [R, W] int64 with adjacent columns; weights:
    [R] and [W] uint64.
    """
    stride = words.stride(0)
    flat = (
        words.as_strided(((len(words) - 1) * stride + words.shape[1],), (1,))
        .numpy()
        .view(np.uint64)
    )
    return int(_hash(flat, stride, row_weights, word_weights, np.uint64(shift)))


_WEIGHTS = "Array(uint64, 1, 'C', readonly=True)"


@numba.njit(f"uint64(uint64[::1], int64, {_WEIGHTS}, {_WEIGHTS}, uint64)", cache=True, nogil=True)
# the row stride is separate, so that the inner loop runs over adjacent words
def _hash(flat, stride, row_weights, word_weights, shift):
    total = np.uint64(0)
    for r in range(len(row_weights)):
        row = flat[r * stride : r * stride + len(word_weights)]
        part = np.uint64(0)
        for w in range(len(word_weights)):
            part += (row[w] + (row[w] >> shift)) * word_weights[w]
        total += part * row_weights[r]
    return total
