"""Products that LaTeX writes by placing factors side by side, with the sign that math-verify's grammar needs to take them for products.

The grammar reads a whole number and what follows it as a mixed number: (3)(4) is 7 to it, and e^{0}(4) is 5. It reads 0.5 behind a fraction
as 0 and .5. Here the sign is set wherever a number, a group, a fraction, a power or a binomial coefficient ends and another number, group,
fraction or binomial coefficient begins, except between a number and a fraction that the grammar takes for a mixed number.
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
    """Between one pair of brackets: what was read last there."""

    closing: str = ""
    start: int = 0  # of its content among the tokens written
    is_argument: bool = False  # of a command, or of ^ and _, outside
    wanted: int = 0  # arguments of the last command that are still to come
    is_operand: bool = False  # once they have come, they and the command end a factor
    ended: bool = False  # a factor has ended just now
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
    if level.wanted:  # \frac12 has both of its arguments here, x^12 its only one
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
    elif not level.wanted:  # otherwise the option of a root, whose argument is to come
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
