"""Draws of the likeliest tokens under Gumbel noise, compiled for the CPU.

Equal to the reference in generator/seeds.py.

With log-prob l and uniform u, the value of a token is l - log(-log u). It beats the best value so
far, b, only if 1 - u < e^(l - b), since 1 - u <= -log u. This test needs no logarithm, and few
tokens of a row pass it.
"""

from __future__ import annotations

import math

import numba
import numpy as np

_SLACK = 1.0001  # for the rounding of exponentials
_MOST = 2.0**32 - 1


@numba.njit(inline="always")
def _mixed(h, block):
    k = np.uint32(block * np.uint32(0xCC9E2D51))
    k = np.uint32(np.uint32(k << np.uint32(15)) | (k >> np.uint32(17)))
    h = np.uint32(h ^ np.uint32(k * np.uint32(0x1B873593)))
    h = np.uint32(np.uint32(h << np.uint32(13)) | (h >> np.uint32(19)))
    return np.uint32(np.uint32(h * np.uint32(5)) + np.uint32(0xE6546B64))


@numba.njit(inline="always")
def _finished(h):
    h = np.uint32(h ^ np.uint32(16))
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


_SIGNATURE = "void({0}[:, ::1], {0}[:, ::1], int64[:], int64[:], int64[::1])"


@numba.njit([_SIGNATURE.format("float32"), _SIGNATURE.format("float64")], cache=True, nogil=True)
def draw(logprobs, probs, seeds, positions, tokens):
    """Writes the token of each row into `tokens` [n]. logprobs, probs: [n, m], where `probs` are
    the exponentials.
    """
    rows, columns = logprobs.shape
    hashes = np.empty(columns, np.uint32)
    for row in range(rows):
        start = _mixed(np.uint32(0), np.uint32(seeds[row]))
        start = _mixed(start, np.uint32(seeds[row] >> 32))
        start = _mixed(start, np.uint32(positions[row]))
        for column in range(columns):
            hashes[column] = _finished(_mixed(start, np.uint32(column)))
        best = -np.inf
        weight = np.inf
        token = 0
        for column in range(columns):
            uniform = hashes[column] / _MOST
            if 1.0 - uniform < probs[row, column] * weight and uniform > 0.0:
                value = logprobs[row, column] - math.log(-min(math.log(uniform), -(2.0**-32)))
                if value > best:
                    best = value
                    weight = math.exp(-best) * _SLACK
                    token = column
        tokens[row] = token
