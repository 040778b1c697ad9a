"""Exact arithmetic on plain numbers: integers, decimals, quotients, mixed numbers, repeating decimals."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from megarl.rewards.limits import MAX_DIGITS

SAME_DECIMALS = Fraction(1_000_001, 10**12)  # tolerance where one is a decimal: a millionth, plus binary rounding; relative below 1

_PLAIN = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?(?:/(\d+)|[eE]([+-]?\d{1,3}))?", re.ASCII)
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?", re.ASCII)
_MIXED = re.compile(r"(-?)(\d+)\s+(\d+)/(\d+)", re.ASCII)


class PlainNumber(NamedTuple):
    value: Fraction
    is_decimal: bool


def plain_number(text: str) -> PlainNumber | None:
    """A plain number, with or without thousands separators, as an exact rational; None for anything else."""
    if len(text) > MAX_DIGITS:
        return None
    if repeating := _REPEATING.fullmatch(text):
        return PlainNumber(_repeating(*repeating.groups()), False)
    if mixed := _MIXED.fullmatch(text):
        sign, whole, over, under = mixed.groups()
        return PlainNumber((int(whole) + Fraction(int(over), int(under))) * (-1 if sign else 1), False) if int(under) else None
    match = _PLAIN.fullmatch(text)
    if match is None or (match[2] is None and match[3] is None):
        return None
    sign, whole, decimals, divisor, exponent = match.groups()
    if divisor is not None and (decimals is not None or int(divisor) == 0):
        return None
    value = Fraction((whole or "0").replace(",", "") + (decimals or "")) / int(divisor or 1) * Fraction(10) ** int(exponent or 0)
    return PlainNumber(-value if sign == "-" else value, decimals is not None)


def plain_equal(a: PlainNumber | None, b: PlainNumber | None) -> bool | None:
    """Exact equality, or equality to the sixth place if one is a decimal; None if one is not a plain number."""
    if a is None or b is None:
        return None
    return a.value == b.value or ((a.is_decimal or b.is_decimal) and _near(a.value, b.value, SAME_DECIMALS))


def _near(a: Fraction, b: Fraction, tolerance: Fraction) -> bool:
    return abs(a - b) <= tolerance * min(1, max(abs(a), abs(b)))


def _repeating(sign: str, whole: str, fixed: str, repeated: str) -> Fraction:
    scale = 10 ** len(fixed)
    value = Fraction(int((whole or "0") + fixed), scale) + Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    return -value if sign else value
