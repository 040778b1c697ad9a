"""Puts multiplication signs between factors that LaTeX places side by side, since math-verify's grammar needs them.

The grammar reads a whole number and what follows it as a mixed number: (3)(4) as 7, e^{0}(4) as 5. It reads 0.5 after a fraction
as 0 and .5. The sign goes wherever a number, group, fraction, power or binomial coefficient ends and another number, group, fraction or
binomial coefficient begins, except between a number and a fraction that the grammar rightly reads as a mixed number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|\s+|.", re.DOTALL)
_SIGN = "\\cdot "
_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_BINOMIALS = ("\\binom", "\\dbinom", "\\tbinom")
_OPERATORS = ("\\cdot", "\\times", "\\div", "\\pm", "\\mp")
_DERIVATIVE = ("d", "\\partial")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass
class _Level:
    """What was read last inside one pair of brackets."""

    closing: str = ""
    start: int = 0  # index of its content in the tokens written
    is_argument: bool = False  # the brackets hold an argument of a command, ^ or _
    wanted: int = 0  # arguments that the last command still expects
    is_operand: bool = False  # the command and its arguments will end a factor
    ended: bool = False  # a factor has just ended
    last: str = ""  # "number", "fraction", "name", …, or the token itself


def with_signs(text: str) -> str:
    """`text` with \\cdot between factors."""
    written: list[str] = []
    levels = [_Level()]
    for token in _TOKEN.findall(text):
        level = levels[-1]
        if token.isspace():
            written.append(token)
        elif token[0].isdigit() or token[0] == ".":
            _number(token, level, written)
        elif token in _CLOSING:
            is_option = token == "[" and level.wanted > 0
            if level.wanted == 0 and level.ended:
                written.append(_SIGN)
            written.append(token)
            levels.append(_Level(_CLOSING[token], len(written), level.wanted > 0 and not is_option, last="option" if is_option else ""))
        elif token == level.closing:
            content = "".join(written[level.start :]).strip()
            levels.pop()
            written.append(token)
            _closed(level, content, levels[-1])
        else:
            _other(token, level, written)
    return "".join(written)


def _number(token: str, level: _Level, written: list[str]) -> None:
    if level.wanted:  # \frac12 holds both arguments, x^12 its only one
        level.wanted = max(0, level.wanted - len(token)) if level.last == "fraction" else 0
        level.ended = level.is_operand and not level.wanted
    else:
        if level.ended and level.last != "number":
            written.append(_SIGN)
        level.ended, level.last = True, "number"
    written.append(token)


def _closed(inner: _Level, content: str, level: _Level) -> None:
    if inner.is_argument:
        if level.last == "fraction" and content in _DERIVATIVE:
            level.is_operand = False
        level.wanted -= 1
        level.ended = level.is_operand and not level.wanted
    elif inner.closing != ")" and level.last.startswith("\\"):  # \text{…}, \begin{pmatrix}
        level.ended = False
    elif not level.wanted:  # else it is a root's option, and the argument follows
        level.ended, level.last = True, "group"


def _other(token: str, level: _Level, written: list[str]) -> None:
    if level.wanted and token.startswith("\\") and token not in (*_FRACTIONS, *_BINOMIALS, "\\sqrt"):  # 90^\circ
        level.wanted -= 1
        level.ended = level.is_operand and not level.wanted
    elif token in _FRACTIONS or token in _BINOMIALS:
        if level.ended and (token in _BINOMIALS or level.last != "number"):
            written.append(_SIGN)
        level.wanted, level.is_operand, level.ended, level.last = 2, True, False, "fraction"
    elif token == "\\sqrt":
        level.wanted, level.is_operand, level.ended, level.last = 1, True, False, "root"
    elif token == "^":  # \sin^2(x) and f^{-1}(x) are functions of x
        level.wanted, level.is_operand, level.ended, level.last = 1, level.ended or level.last == "e", False, "power"
    elif token == "_":
        level.wanted, level.is_operand, level.ended, level.last = 1, False, False, "index"
    elif token == "!":
        level.last = "factorial"
    elif token == "\\pi":
        level.ended, level.last = True, "name"
    elif token.startswith("\\") and token[1:].isalpha() and token not in _OPERATORS:
        level.wanted, level.is_operand, level.ended, level.last = 0, False, False, token
    else:
        level.wanted, level.ended, level.last = 0, False, token
    written.append(token)
