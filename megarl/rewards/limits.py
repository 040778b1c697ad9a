"""Limits on an answer's text, checked before it is parsed, and on the size of its value, checked before it is evaluated.

Model output is hostile input. These limits make known bombs cheap to refuse; the worker process's limits on time and memory
(megarl.rewards.worker) hold for all others.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

MAX_NESTING = 12
MAX_COMMANDS = 48  # LaTeX commands in one answer
MAX_POWERS = 24  # powers in one answer
MAX_BARS = 8  # each may open or close an absolute value, and the grammar tries both
MAX_SUBSCRIPTS = 12
MAX_DIGITS = 64  # of one number
MAX_EXPONENT_DIGITS = 4
MAX_VALUE_BITS = 10_000  # size of the largest integer that evaluating the answer could produce
MAX_FACTORIAL = 1_000
MAX_EXPANSION = 64  # exponent of a sum with symbols

_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}", re.ASCII)
_LONG_EXPONENT = re.compile(rf"(?:\^|\*\*)[\s{{(+-]*\d{{{MAX_EXPONENT_DIGITS + 1}}}", re.ASCII)
_COUNTING = re.compile(r"!|binom|gcd|lcm")
_LARGE_COUNT = re.compile(r"\d{4}", re.ASCII)
_UNBOUNDED = re.compile(r"\\(?:i?i?int|oint|sum|prod|lim)(?![A-Za-z])|__")


class Refused(Exception):
    """The answer is outside the limits, so it scores 0."""


def check_characters(answer: str) -> None:
    """Raises Refused for control, format (zero-width, bidirectional), private and unassigned characters; blanks are fine."""
    if not answer.isascii() or not answer.isprintable():
        for character in answer:
            if unicodedata.category(character).startswith("C") and character not in " \t\r\n":
                raise Refused(f"character U+{ord(character):04X}")


def check_text(answer: str) -> None:
    """Checks an answer's text before it is parsed. Raises Refused."""
    depth = 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_NESTING:
            raise Refused(f"brackets nested more than {MAX_NESTING} deep")
    if answer.count("\\") > MAX_COMMANDS:
        raise Refused(f"more than {MAX_COMMANDS} commands")
    if answer.count("^") + answer.count("**") > MAX_POWERS:
        raise Refused(f"more than {MAX_POWERS} powers")
    if answer.count("|") > MAX_BARS or answer.count("_") > MAX_SUBSCRIPTS:
        raise Refused(f"more than {MAX_BARS} bars or {MAX_SUBSCRIPTS} subscripts")
    if _LONG_NUMBER.search(answer):
        raise Refused(f"a number of more than {MAX_DIGITS} digits")
    if _LONG_EXPONENT.search(answer):
        raise Refused(f"an exponent of more than {MAX_EXPONENT_DIGITS} digits")
    if _COUNTING.search(answer) and _LARGE_COUNT.search(answer):
        raise Refused("a factorial, binomial, gcd or lcm of large numbers")
    if _UNBOUNDED.search(answer):
        raise Refused("an integral, sum, product, limit or dunder name")


def check_value(expression: Any) -> float:
    """Upper bound of the bits that evaluating a parsed, unevaluated SymPy object can produce. Raises Refused above the limit."""
    name = type(expression).__name__
    if name in ("Integral", "Derivative", "Sum", "Product", "Limit"):
        raise Refused(f"a {name.lower()}")
    if getattr(expression, "is_Rational", False):
        bits = float(max(abs(expression.p).bit_length(), expression.q.bit_length()))
    elif getattr(expression, "is_Pow", False):
        bits = _power_bits(*expression.args)
    elif name in ("factorial", "factorial2", "subfactorial", "binomial", "gamma"):
        if any(check_value(argument) > math.log2(MAX_FACTORIAL) for argument in expression.args):
            raise Refused(f"a factorial of more than {MAX_FACTORIAL}")
        largest = max((2 ** check_value(argument) for argument in expression.args if not argument.is_Integer), default=0.0)
        largest = max([largest, *(float(abs(argument)) for argument in expression.args if argument.is_Integer)])
        bits = math.lgamma(largest + 2) / math.log(2)
    else:
        children = [check_value(argument) for argument in getattr(expression, "args", ())]
        together = sum if getattr(expression, "is_Mul", False) or getattr(expression, "is_Add", False) else max
        bits = together(children) if children else 0.0
    if bits > MAX_VALUE_BITS:
        raise Refused(f"a value of more than {MAX_VALUE_BITS} bits")
    return bits


def _power_bits(base: Any, exponent: Any) -> float:
    base_bits, exponent_bits = check_value(base), check_value(exponent)
    largest_exponent = 2.0 ** min(exponent_bits, 64.0)
    if base.is_Add and base.free_symbols and largest_exponent > MAX_EXPANSION:
        raise Refused(f"a sum to a power above {MAX_EXPANSION}")
    return max(base_bits, 1.0) * largest_exponent
