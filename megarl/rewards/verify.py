"""Rule-based rewards: 1.0 for a right answer, 0.0 for any other.

Runs only inside the worker processes of megarl.rewards.pool, which bound its time and memory. Answers reach SymPy by
math-verify's LaTeX grammar only; `sympify` and `parse_expr`, which evaluate Python, are never called on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, Optional

from megarl.rewards.extract import clean, last_line, last_number, last_running_number, marked_answer
from megarl.rewards.limits import MAX_DIGITS, Refused, check_characters, check_text, check_value

MAX_TEXT_CHARS = 1 << 18

_PLAIN = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?(?:/(\d+))?", re.ASCII)
_FLOAT_TOLERANCE = Fraction(1, 10**6)  # math-verify compares decimals rounded to 6 places


class PlainNumber(NamedTuple):
    value: Fraction
    is_decimal: bool


def math_reward(text: str, answer: str) -> float:
    """Whether the final answer of `text` equals `answer` mathematically (math-verify's rules).

    The final answer is the one that the text marks (\\boxed{}, "####", "answer is"), else its last line or last number.
    """
    if len(text) > MAX_TEXT_CHARS:
        return 0.0
    marked = marked_answer(text)
    if marked is not None:
        return float(_equal_or_refused(clean(answer), marked))
    return float(any(_equal_or_refused(clean(answer), candidate) for candidate in _unmarked_answers(text)))


def last_number_reward(text: str, answer: str) -> float:
    """Whether the last number of a list such as running totals "7,7,6,7,2" equals `answer`. Every comma separates."""
    if len(text) > MAX_TEXT_CHARS or not _clean_characters(last_line(text)):
        return 0.0
    return float(_equal_or_refused(clean(answer), last_running_number(text)))


VERIFIERS: dict[str, Callable[[str, str], float]] = {"math": math_reward, "last_number": last_number_reward}


def _unmarked_answers(text: str) -> list[str]:
    line = last_line(text)
    return list(dict.fromkeys((last_number(text), clean(line)))) if _clean_characters(line) else []


def _clean_characters(text: str) -> bool:
    try:
        check_characters(text)
    except Refused:
        return False
    return True


def _equal_or_refused(reference: str, candidate: str) -> bool:
    if not candidate:
        return False
    try:
        return equal(reference, candidate)
    except Refused:
        return False


def equal(reference: str, candidate: str) -> bool:
    """Mathematical equality of two cleaned answers. Raises: Refused if the candidate is outside the limits."""
    check_characters(candidate)
    if candidate == reference:
        return True
    decided = plain_equal(plain_number(reference), plain_number(candidate))
    return sympy_equal(reference, candidate) if decided is None else decided


def plain_number(text: str) -> Optional[PlainNumber]:
    """An integer, decimal or quotient of integers, thousands separated or not, as an exact rational; None for anything else."""
    match = _PLAIN.fullmatch(text) if len(text) <= MAX_DIGITS else None
    if match is None or (match[2] is None and match[3] is None):
        return None
    sign, whole, decimals, divisor = match.groups()
    if divisor is not None and (decimals is not None or int(divisor) == 0):
        return None
    value = Fraction((whole or "0").replace(",", "") + (decimals or "")) / int(divisor or 1)
    return PlainNumber(-value if sign == "-" else value, decimals is not None)


def plain_equal(a: Optional[PlainNumber], b: Optional[PlainNumber]) -> Optional[bool]:
    """Equality as math-verify has it, by exact arithmetic; None where it takes SymPy: no plain number, or a matter of rounding."""
    if a is None or b is None:
        return None
    if a.value == b.value:
        return True
    if (a.is_decimal or b.is_decimal) and abs(a.value - b.value) <= _FLOAT_TOLERANCE:
        return None
    return False


def sympy_equal(reference: str, candidate: str) -> bool:
    """Equality by math-verify on SymPy objects. Raises: Refused."""
    check_text(candidate)
    expression = _parse(candidate)
    gold = _parse_reference(reference)
    if expression is None or gold is None:
        return False
    check_value(expression)
    return bool(_math_verify().verify(gold, expression, timeout_seconds=None))


def _math_verify() -> Any:
    import math_verify  # half a second and 50 MiB: only once an answer needs it

    return math_verify


def _parse(answer: str) -> Any:
    """SymPy object by the LaTeX grammar alone, sums and powers not evaluated; None if it does not parse."""
    mv = _math_verify()
    latex = answer.replace("**", "^").replace("\n", " ").replace("\\$", "").replace("$", "")
    found = mv.parse(f"${latex}$", [mv.LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


@lru_cache(maxsize=1024)
def _parse_reference(reference: str) -> Any:
    return _parse(reference)
