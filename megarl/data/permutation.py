"""A shuffled order that is computed, not stored: position -> index, in constant time and memory."""

from __future__ import annotations

import hashlib

_ROUNDS = 6


def permute(position: int, size: int, key: str) -> int:
    """Index at `position` of a pseudo-random permutation of range(size) that depends on `key` alone.

    A Feistel network on the smallest even number of bits that hold `size`, walked until it lands inside the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002: cycle walking).
    Raises IndexError outside 0 <= position < size.
    """
    if not 0 <= position < size:
        raise IndexError(f"position {position} is outside 0..{size - 1}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    index = _feistel(position, half_bits, key)
    while index >= size:
        index = _feistel(index, half_bits, key)
    return index


def _feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_ in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{round_}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right
