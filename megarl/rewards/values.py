"""Values of two expressions at 60 digits; expressions with variables are evaluated at fixed points."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from megarl.rewards.plain_numbers import SAME_DECIMALS

LEAST_POINTS = 3  # points at which two expressions with variables must both have a value to be compared
_DIGITS = 60
_SAME = Fraction(1, 10**45)  # tolerance for exact values: relative, below 1 absolute
_POINTS = 6
_MAX_BITS = 50_000  # of a value's integer part, and of its fraction

Value = tuple[Fraction, Fraction]
"""Real and imaginary part."""


def values_of(a: Any, b: Any) -> list[tuple[Value, Value]]:
    """Values of two expressions at fixed points of their variables, if any, without points at which neither has a value.

    Empty if at some point only one of them has a value.
    """
    names = sorted({symbol.name for symbol in a.free_symbols | b.free_symbols})
    found = []
    for point in range(_POINTS if names else 1):
        where = {name: _coordinate(point, number) for number, name in enumerate(names)}
        x, y = _value(a, where), _value(b, where)
        if x is None and y is None:
            continue
        if x is None or y is None:
            return []
        found.append((x, y))
    return found


def equal_values(a: Value, b: Value, decimals: bool) -> bool:
    """Equality of exact values up to rounding (absolute below 1), or of decimals up to the sixth place (relative below 1)."""
    distance, size = size_of((a[0] - b[0], a[1] - b[1])), max(size_of(a), size_of(b))
    return distance <= (SAME_DECIMALS * min(1, size) if decimals else _SAME * max(1, size))


def size_of(value: Value) -> Fraction:
    return max(abs(value[0]), abs(value[1]))


def times(a: Value, b: Value) -> Value:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _coordinate(point: int, number: int) -> Fraction:
    """Rationals of either sign, from 0.3 to 2.7 in size, with no relation between them."""
    size = Fraction(300 + (7919 * (point + 1) + 104729 * (number + 1) * (point + 2)) % 2400, 1000) + Fraction(1, 1009 + 2 * number)
    return size if (point + number) % 2 == 0 else -size


def _value(expression: Any, where: dict[str, Fraction]) -> Value | None:
    """The value, or None if it is not finite."""
    import sympy

    at = {symbol: sympy.Rational(where[symbol.name].numerator, where[symbol.name].denominator) for symbol in expression.free_symbols}
    if any(power.exp.free_symbols for power in expression.atoms(sympy.Pow)):  # SymPy would factor the radicands, for seconds
        at = {symbol: sympy.Float(value, 2 * _DIGITS) for symbol, value in at.items()}
    parts = expression.subs(at).doit().evalf(_DIGITS).as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    real, imaginary = map(_fraction, parts)
    return None if real is None or imaginary is None else (real, imaginary)


def _fraction(number: Any) -> Fraction | None:
    if number.is_Rational:
        return Fraction(int(number.p), int(number.q))
    sign, mantissa, exponent, bits = number._mpf_
    if (not mantissa and exponent) or abs(exponent) + bits > _MAX_BITS:  # infinite, not a number, or too large
        return None
    return Fraction(int(-mantissa if sign else mantissa)) * Fraction(2) ** int(exponent)
