"""Reads the number lists in an engine's JSON answer straight into arrays, in one pass, without a
Python object per number.

Each function takes the whole answer and the position where a list begins. It returns the number of
entries and the position where the list ends. A count of -1 means that the list is not written as
SGLang writes it (no spaces, null as a token's text), or needs a full JSON decoder; the caller then
uses one. Values are float32, equal to a decoder's float64 after rounding. They are computed to
within 3 units in the last place of float64. If that is within 16 units of the middle between two
float32, it is left to the decoder.
"""

from __future__ import annotations

import numba
import numpy as np

_TENS = np.array([float(f"1e{power}") for power in range(46)])
# ten times this plus a digit still fits a uint64
_MOST_MANTISSA = np.uint64(900_000_000_000_000_000)
_TEXT = "Array(uint8, 1, 'C', readonly=True)"
_NEAR = 16


@numba.njit(inline="always")
def _digit(text, at):
    return at < text.size and 48 <= text[at] <= 57


@numba.njit
def _number(text, at):
    """(value, end) of the number at `at`. An end of -1 leaves it to the decoder."""
    negative = at < text.size and text[at] == 45  # -
    if negative:
        at += 1
    mantissa = np.uint64(0)
    power = 0
    start = at
    while _digit(text, at):
        if mantissa > _MOST_MANTISSA:
            return 0.0, -1
        mantissa = mantissa * np.uint64(10) + np.uint64(text[at] - 48)
        at += 1
    if at == start or (at - start > 1 and text[start] == 48):
        return 0.0, -1
    if at < text.size and text[at] == 46:  # .
        at += 1
        start = at
        while _digit(text, at):
            if mantissa > _MOST_MANTISSA:
                return 0.0, -1
            mantissa = mantissa * np.uint64(10) + np.uint64(text[at] - 48)
            at += 1
        if at == start:
            return 0.0, -1
        power = start - at
    if at < text.size and (text[at] | 32) == 101:  # e
        at += 1
        down = at < text.size and text[at] == 45
        if at < text.size and (text[at] == 45 or text[at] == 43):
            at += 1
        start = at
        exponent = 0
        while _digit(text, at) and at - start < 3:
            exponent = exponent * 10 + (text[at] - 48)
            at += 1
        if at == start or _digit(text, at):
            return 0.0, -1
        power += -exponent if down else exponent
    value = np.float64(mantissa)
    if mantissa != 0:
        if not -_TENS.size < power < _TENS.size:
            return 0.0, -1
        value = value / _TENS[-power] if power < 0 else value * _TENS[power]
        if not 1e-30 < value < 1e30:
            return 0.0, -1
        # the bits beyond float32, relative to their middle
        beyond = (np.float64(value).view(np.int64) & ((1 << 29) - 1)) - (1 << 28)
        if -_NEAR < beyond < _NEAR:
            return 0.0, -1
    return (-value if negative else value), at


@numba.njit(f"Tuple((int64, int64))({_TEXT}, int64, float32[::1], int32[::1])", cache=True)
def read_token_logprobs(text, at, values, ids):
    """Reads a list of [log-prob, token id, null].

    `values` and `ids` must have room for all entries that the rest of `text` could have.
    """
    count = 0
    if at + 1 < text.size and text[at] == 91 and text[at + 1] == 93:  # []
        return count, at + 2
    before = 91
    # [[ or ,[
    while at + 1 < text.size and text[at] == before and text[at + 1] == 91 and count < values.size:
        value, at = _number(text, at + 2)
        if at < 0 or at >= text.size or text[at] != 44:
            return -1, at
        start = at + 1
        token = 0
        at = start
        while _digit(text, at) and at - start < 10:
            token = token * 10 + (text[at] - 48)
            at += 1
        if (
            at == start
            or (at - start > 1 and text[start] == 48)
            or token > 0x7FFFFFFF
            or at + 6 >= text.size
        ):
            return -1, at
        # ,null
        if not (
            text[at] == 44
            and text[at + 1] == 110
            and text[at + 2] == 117
            and text[at + 3] == 108
            and text[at + 4] == 108
        ):
            return -1, at
        if text[at + 5] != 93:
            return -1, at
        values[count], ids[count] = value, token
        count += 1
        at += 6
        if text[at] == 93:
            return count, at + 1
        before = 44
    return -1, at


@numba.njit(f"Tuple((int64, int64))({_TEXT}, int64, int32[::1], int32[::1])", cache=True)
def read_id_lists(text, at, ids, sizes):
    """Reads a list of lists of token ids, none of them empty.

    `ids` and `sizes` (the lengths of the lists) must have room for all entries that the rest of
    `text` could have.
    """
    count = 0
    found = 0
    if at + 1 < text.size and text[at] == 91 and text[at + 1] == 93:
        return count, at + 2
    before = 91
    # [[ or ,[
    while at + 1 < text.size and text[at] == before and text[at + 1] == 91 and count < sizes.size:
        at = at + 1
        first = found
        before = 91
        while at < text.size and text[at] == before and found < ids.size:
            at += 1
            start = at
            token = 0
            while _digit(text, at) and at - start < 10:
                token = token * 10 + (text[at] - 48)
                at += 1
            if (
                at == start
                or (at - start > 1 and text[start] == 48)
                or token > 0x7FFFFFFF
                or at + 1 >= text.size
            ):
                return -1, at
            ids[found] = token
            found += 1
            before = 44
        if text[at] != 93:
            return -1, at
        sizes[count] = found - first
        count += 1
        at += 1
        if text[at] == 93:
            return count, at + 1
    return -1, at


@numba.njit(f"Tuple((int64, int64))({_TEXT}, int64, float32[::1])", cache=True)
def read_floats(text, at, values):
    """Reads a list of numbers.

    `values` must have room for all numbers that the rest of `text` could have.
    """
    count = 0
    if at + 1 < text.size and text[at] == 91 and text[at + 1] == 93:
        return count, at + 2
    before = 91
    while at < text.size and text[at] == before and count < values.size:
        value, at = _number(text, at + 1)
        if at < 0 or at >= text.size:
            return -1, at
        values[count] = value
        count += 1
        if text[at] == 93:
            return count, at + 1
        before = 44
    return -1, at
