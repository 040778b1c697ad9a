"""A position-dependent additive hash of tensors: boxes are hashed where they lie, and the sums compared. Nothing is gathered.

A tensor is viewed as [rows, cols] (1-D: one row; leading dims flattened), and

    H = sum over r, c of  bits(x[r, c]) * a(r) * b(c)   modulo 2^64

with odd 64-bit weights a, b drawn by splitmix64 from the absolute row and column. The weights separate, so only rows + cols of
them exist. Hashes of disjoint boxes add up to the hash of the whole. Changing one element always changes H: an odd number
times a difference below 2^32 is not 0 modulo 2^64. Zeros (padding) contribute nothing.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

from megarl.reshard.box import Box, whole_box

MASK = (1 << 64) - 1
ROW_SEED, COL_SEED = 0x6D65676172_6C01, 0x6D65676172_6C02
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = 1 << 22  # of the int64 temporary on devices other than the CPU


def hash_box(values: torch.Tensor, row_start: int, col_start: int) -> int:
    """Share of a box in its tensor's hash. `values`: [R, C], any strides; its first element lies at row_start, col_start."""
    bits = values.detach().view(BITS[values.element_size()])
    rows, cols = bits.shape
    a = weights(ROW_SEED, row_start, rows)
    b = weights(COL_SEED, col_start, cols)
    return (_hash_numpy if bits.device.type == "cpu" else _hash_torch)(bits, a, b)


def hash_slice(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Share of `values`, the elements in `box` of a tensor of shape `shape`, any number of dims."""
    if len(shape) < 2:
        start = box.start[0] if box.start else 0
        return hash_box(values.reshape(1, -1), 0, start)
    total = 0
    for lead in itertools.product(*(range(n) for n in box.shape[:-2])):
        row = 0
        for offset, start, extent in zip(lead, box.start, shape):
            row = row * extent + start + offset
        total += hash_box(values[lead], row * shape[-2] + box.start[-2], box.start[-1])
    return total & MASK


def hash_tensor(values: torch.Tensor) -> int:
    """Hash of a whole tensor."""
    shape = tuple(values.shape)
    return hash_slice(values, whole_box(shape), shape)


def _hash_numpy(bits: torch.Tensor, a: np.ndarray, b: np.ndarray) -> int:
    # einsum widens the integers block by block: 2.5 times as fast as torch's int64 product, which needs a widened copy.
    sums = np.einsum("rc,c->r", bits.numpy(), b)
    return int((sums * a).sum()) & MASK


def _hash_torch(bits: torch.Tensor, a: np.ndarray, b: np.ndarray) -> int:
    row_weights, col_weights = (torch.tensor(weights, device=bits.device) for weights in (a, b))
    step = max(1, _CHUNK_ELEMENTS // max(1, bits.shape[1]))
    sums = torch.cat([(chunk * col_weights).sum(1) for chunk in bits.split(step)])
    return int((sums * row_weights).sum().item()) & MASK


def weights(seed: int, start: int, count: int) -> np.ndarray:
    """Odd weights of positions start .. start + count, as int64 (the products wrap modulo 2^64)."""
    table = _table(seed, max(1024, 1 << (start + count - 1).bit_length()))
    return table[start : start + count]


@functools.lru_cache(maxsize=64)
def _table(seed: int, size: int) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014, figure 9) of seed and position, made odd."""
    z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    table = ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    table.flags.writeable = False
    return table
