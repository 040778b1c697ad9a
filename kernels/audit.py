"""A position-dependent, additive hash of tensors.

Each box is hashed where it is, and only sums are compared: nothing is gathered.

A tensor is viewed as [rows, cols] (1-D: one row; leading dims are flattened). The bytes of each
row, padded with zeros, are 64-bit little-endian words x[r, w], and

    H = sum over r, w of  mix(x[r, w]) * a(r) * b(w)   modulo 2^64,     mix(x) = x + (x >> 31)

The odd 64-bit weights a and b are drawn by splitmix64 from the row and word index in the whole
tensor, so there are only rows + words of them. An element counts as the word in which all other
bytes are 0. Since words are sums of their elements, hashes of disjoint boxes add up to the hash of
the whole.

`mix` protects the high bits of a word. Without it, a product modulo 2^64 would keep hardly more
than their parity, and two flipped signs would cancel. A change of one element of up to 4 bytes
always changes H, because `mix` of the difference is not 0 modulo 2^64, and a * b is odd. Zeros
(padding) contribute nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from megarl.base.geometry import Box, whole_box
from megarl.kernels.changes import bits_of

MASK = (1 << 64) - 1
ROW_SEED = 0x6D65676172_6C01
COL_SEED = 0x6D65676172_6C02
WORD_BYTES = 8
MIX_SHIFT = 31
TILE_WORDS = 1 << 14  # with its scratch, a quarter of a 1 MiB cache, so that memory is read once
MOST_LEFT = 4096
# above this size of a box, a compiled loop pays: it runs at memory speed, but loads for about a
# second
COMPILED_BYTES = 1 << 20


def hash_box(values: torch.Tensor, row_start: int, col_start: int) -> int:
    """The share of a box in its tensor's hash.

    `values`: [R, C], any strides; its first element is at (row_start, col_start).
    """
    if values.is_cuda:
        from megarl.kernels import audit_triton

        return audit_triton.hash_box(values, row_start, col_start)
    bits, first_word, lead = as_words(values, col_start)
    a = weights(ROW_SEED, row_start, bits.shape[0]).view(np.uint64)
    b = weights(COL_SEED, first_word, word_count(bits, lead)).view(np.uint64)
    if bits.dtype == torch.int64 and values.nbytes >= COMPILED_BYTES:
        from megarl.kernels import audit_numba

        return audit_numba.hash_words(bits, a, b, MIX_SHIFT) & MASK
    return _hash_tiles(bits, lead, a, b)


def hash_slice(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """The share of `values`, the elements in `box` of a tensor of shape `shape`, with any number of
    dims.
    """
    return sum(hash_box(*part) for part in _matrices(values, box, shape)) & MASK


def _matrices(
    values: torch.Tensor, box: Box, shape: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yields the parts of a box as arguments of `hash_box`."""
    if len(shape) < 2:
        yield values.reshape(1, -1), 0, box.start[0] if box.start else 0
        return
    dims = len(shape) - 1
    # rows continue through the next dim, too
    while dims > 1 and box.shape[dims - 1] == shape[dims - 1]:
        dims -= 1
    for lead in itertools.product(*map(range, box.shape[: dims - 1])):
        row = 0
        for index, extent in zip(
            (*map(sum, zip(lead, box.start)), *box.start[dims - 1 : -1]), shape
        ):
            row = row * extent + index
        yield (
            values[lead].reshape(math.prod(box.shape[dims - 1 : -1]), box.shape[-1]),
            row,
            box.start[-1],
        )


class Hashes:
    """The hashes of many tensors, each the sum of its boxes' shares.

    The host waits for a GPU only once in 4,096 boxes.
    """

    def __init__(self) -> None:
        self._totals: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []
        self._left: list[torch.Tensor] = []  # the shares of `_keys`: int64 scalars on a device

    def add(self, key: Hashable, values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> None:
        self._totals.setdefault(key, 0)
        if not values.is_cuda:
            self._totals[key] = (self._totals[key] + hash_slice(values, box, shape)) & MASK
            return
        from megarl.kernels import audit_triton

        self.defer(key, (audit_triton.hash_sum(*part) for part in _matrices(values, box, shape)))

    def defer(self, key: Hashable, shares: Iterable[torch.Tensor]) -> None:
        """Adds shares that are on a device, as the bits of int64 scalars."""
        for share in shares:
            self._keys.append(key)
            self._left.append(share)
            if len(self._left) >= MOST_LEFT:
                self._read()

    def totals(self) -> dict[Any, int]:
        self._read()
        return self._totals

    def _read(self) -> None:
        shares = torch.stack(self._left).tolist() if self._left else []
        for key, share in zip(self._keys, shares):
            self._totals[key] = (self._totals.get(key, 0) + share) & MASK
        self._keys = []
        self._left = []


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The hash of each of the whole tensors."""
    hashes = Hashes()
    for name, values in tensors.items():
        hashes.add(name, values, whole_box(tuple(values.shape)), tuple(values.shape))
    return hashes.totals()


def hash_tensor(values: torch.Tensor) -> int:
    """The hash of a whole tensor."""
    shape = tuple(values.shape)
    return hash_slice(values, whole_box(shape), shape)


def as_words(values: torch.Tensor, col_start: int) -> tuple[torch.Tensor, int, int]:
    """Returns (integers [R, C], index of the first word touched, number of its integers that come
    before the first column).

    The integers are words (int64) if columns, strides and address allow it; otherwise there is one
    per element, of the element's size.
    """
    bits = bits_of(values.detach())
    if len(bits) == 1:
        bits = bits[0].unsqueeze(0)  # one row, so that the row stride does not matter
    item = bits.element_size()
    first_word, lead = divmod(col_start * item, WORD_BYTES)
    places = (lead, bits.shape[1] * item, bits.stride(0) * item, bits.data_ptr())
    if bits.stride(1) == 1 and bits.numel() and not any(place % WORD_BYTES for place in places):
        bits = bits.view(torch.int64)
        item = WORD_BYTES
    return bits, first_word, lead // item


def word_count(bits: torch.Tensor, lead: int) -> int:
    """The number of words that a row of `bits` touches. Arguments: as `as_words` returns them."""
    return -(-(lead + bits.shape[1]) * bits.element_size() // WORD_BYTES)


def _hash_tiles(bits: torch.Tensor, lead: int, a: np.ndarray, b: np.ndarray) -> int:
    rows = len(a)
    words = len(b)
    all_words = bits.numpy().view(np.uint64) if bits.dtype == torch.int64 else None
    wide = min(words, TILE_WORDS)
    high = max(1, TILE_WORDS // max(1, words))
    scratch = np.empty(min(high, rows) * wide, np.uint64)
    total = 0
    for r, w in itertools.product(range(0, rows, high), range(0, words, wide)):
        r_end = min(r + high, rows)
        w_end = min(w + wide, words)
        if all_words is None:
            tile = _filled_up(bits[r:r_end], lead, w, w_end)
        else:
            tile = all_words[r:r_end, w:w_end]
        mixed = scratch[: tile.size].reshape(tile.shape)
        np.right_shift(tile, np.uint64(MIX_SHIFT), out=mixed)
        np.add(tile, mixed, out=mixed)
        total += int((np.einsum("rw,w->r", mixed, b[w:w_end]) * a[r:r_end]).sum())
    return total & MASK


def _filled_up(bits: torch.Tensor, lead: int, first: int, end: int) -> np.ndarray:
    """The words from `first` to `end` of each row.

    The `lead` missing elements before a row, and elements after its end, are zeros.
    """
    per_word = WORD_BYTES // bits.element_size()
    words = np.zeros((len(bits), end - first), np.uint64)
    low = max(0, first * per_word - lead)
    high = min(bits.shape[1], end * per_word - lead)
    place = low + lead - first * per_word
    elements = torch.from_numpy(words.view(np.int64)).view(bits.dtype)
    elements[:, place : place + high - low].copy_(bits[:, low:high])
    return words


def weights(seed: int, start: int, count: int) -> np.ndarray:
    """The odd weights of `count` positions from `start` on, as int64: products wrap modulo 2^64."""
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
