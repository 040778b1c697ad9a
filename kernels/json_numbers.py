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
def _digit(text, position):
    return position < text.size and 48 <= text[position] <= 57


@numba.njit(inline="always")
def _is_empty_list(text, position):
    return position + 1 < text.size and text[position] == 91 and text[position + 1] == 93


@numba.njit
def _digits(text, position, mantissa):
    """(`mantissa` continued by the digits at `position`, end). An end of -1: there are none, or too
    many.
    """
    start = position
    while _digit(text, position):
        if mantissa > _MOST_MANTISSA:
            return mantissa, -1
        mantissa = mantissa * np.uint64(10) + np.uint64(text[position] - 48)
        position += 1
    return mantissa, position if position > start else -1


@numba.njit
def _token_id(text, position):
    """(token id, end) of the number at `position`. A token id of -1: there is none."""
    start = position
    token = 0
    while _digit(text, position) and position - start < 10:
        token = token * 10 + (text[position] - 48)
        position += 1
    leading_zero = position - start > 1 and text[start] == 48
    if position == start or leading_zero or token > 0x7FFFFFFF:
        return -1, position
    return token, position


@numba.njit
def _number(text, position):
    """(value, end) of the number at `position`. An end of -1 leaves it to the decoder."""
    negative = position < text.size and text[position] == 45  # -
    if negative:
        position += 1
    power = 0
    start = position
    mantissa, position = _digits(text, position, np.uint64(0))
    if position < 0 or (position - start > 1 and text[start] == 48):
        return 0.0, -1
    if position < text.size and text[position] == 46:  # .
        start = position + 1
        mantissa, position = _digits(text, start, mantissa)
        if position < 0:
            return 0.0, -1
        power = start - position
    if position < text.size and (text[position] | 32) == 101:  # e
        position += 1
        down = position < text.size and text[position] == 45
        if position < text.size and (text[position] == 45 or text[position] == 43):
            position += 1
        start = position
        exponent = 0
        while _digit(text, position) and position - start < 3:
            exponent = exponent * 10 + (text[position] - 48)
            position += 1
        if position == start or _digit(text, position):
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
    return (-value if negative else value), position


@numba.njit(f"Tuple((int64, int64))({_TEXT}, int64, float32[::1], int32[::1])", cache=True)
def read_token_logprobs(text, position, values, ids):
    """Reads a list of [log-prob, token id, null].

    `values` and `ids` must have room for all entries that the rest of `text` could have.
    """
    count = 0
    if _is_empty_list(text, position):
        return count, position + 2
    separator = 91
    # [[ or ,[
    while (
        position + 1 < text.size
        and text[position] == separator
        and text[position + 1] == 91
        and count < values.size
    ):
        value, position = _number(text, position + 2)
        if position < 0 or position >= text.size or text[position] != 44:
            return -1, position
        token, position = _token_id(text, position + 1)
        if token < 0 or position + 6 >= text.size:
            return -1, position
        # ,null]
        if not (
            text[position] == 44
            and text[position + 1] == 110
            and text[position + 2] == 117
            and text[position + 3] == 108
            and text[position + 4] == 108
            and text[position + 5] == 93
        ):
            return -1, position
        values[count], ids[count] = value, token
        count += 1
        position += 6
        if text[position] == 93:
            return count, position + 1
        separator = 44
    return -1, position


@numba.njit(f"Tuple((int64, int64))({_TEXT}, int64, int32[::1], int32[::1])", cache=True)
def read_id_lists(text, position, ids, sizes):
    """Reads a list of lists of token ids, none of them empty.

    `ids` and `sizes` (the lengths of the lists) must have room for all entries that the rest of
    `text` could have.
    """
    count = 0
    id_count = 0
    if _is_empty_list(text, position):
        return count, position + 2
    separator = 91
    # [[ or ,[
    while (
        position + 1 < text.size
        and text[position] == separator
        and text[position + 1] == 91
        and count < sizes.size
    ):
        position = position + 1
        first = id_count
        separator = 91
        while position < text.size and text[position] == separator and id_count < ids.size:
            token, position = _token_id(text, position + 1)
            if token < 0 or position + 1 >= text.size:
                return -1, position
            ids[id_count] = token
            id_count += 1
            separator = 44
        if text[position] != 93:
            return -1, position
        sizes[count] = id_count - first
        count += 1
        position += 1
        if text[position] == 93:
            return count, position + 1
    return -1, position


@numba.njit(f"Tuple((int64, int64))({_TEXT}, int64, float32[::1])", cache=True)
def read_floats(text, position, values):
    """Reads a list of numbers.

    `values` must have room for all numbers that the rest of `text` could have.
    """
    count = 0
    if _is_empty_list(text, position):
        return count, position + 2
    separator = 91
    while position < text.size and text[position] == separator and count < values.size:
        value, position = _number(text, position + 1)
        if position < 0 or position >= text.size:
            return -1, position
        values[count] = value
        count += 1
        if text[position] == 93:
            return count, position + 1
        separator = 44
    return -1, position
