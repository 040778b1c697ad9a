"""A calculator for model output: exact arithmetic on integers and decimals with + - * / and
parentheses.

It has its own parser and never calls Python's eval. Its limits bound the work: the length of the
text bounds the number of operations and their nesting, and the size of every intermediate value is
checked.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 200
MAX_NESTING = 20
MAX_VALUE_BITS = 256  # most bits of a numerator or denominator
DECIMALS = 6  # most decimal places of a result

_TOKEN = re.compile(r" *(?:(\d+(?:\.\d+)?)|([-+*/()]))", re.ASCII)


def calculate(text: str) -> str:
    """The value of an arithmetic expression: "12*(3-5)" gives "-24", "10/4" gives "2.5".

    Raises: ValueError with the reason.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"more than {MAX_CHARS} characters")
    parser = _ExpressionParser(_tokens(text.rstrip(" ")))
    value = parser.sum(0)
    if parser.peek():
        raise ValueError("not arithmetic")
    return _written(value)


def _tokens(text: str) -> list[str]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError("not arithmetic")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _ExpressionParser:
    """Recursive descent. sum: product (+|- product)*; product: factor (*|/ factor)*; factor: number
    | -factor | (sum).
    """

    def __init__(self, tokens: list[str]):
        self._tokens = tokens
        self._next = 0

    def peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self._next += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = _bounded(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            multiply = self.take() == "*"
            factor = self.factor(depth)
            if not multiply and not factor:
                raise ValueError("division by zero")
            value = _bounded(value * factor if multiply else value / factor)
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_NESTING:
            raise ValueError(f"nested more than {MAX_NESTING} deep")
        token = self.take()
        if token == "-":
            return -self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not token or not token[0].isdigit():
            raise ValueError("not arithmetic")
        return _bounded(Fraction(token))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > MAX_VALUE_BITS:
        raise ValueError("the numbers are too large")
    return value


def _written(value: Fraction) -> str:
    """Formats the value with up to DECIMALS places, rounding ties to even; never in scientific
    notation.
    """
    if value.denominator == 1:
        return str(value.numerator)
    scaled = abs(round(value * 10**DECIMALS))
    digits = f"{scaled // 10**DECIMALS}.{scaled % 10**DECIMALS:0{DECIMALS}d}".rstrip("0").rstrip(
        "."
    )
    return f"-{digits}" if value < 0 and scaled else digits
