"""Rule-based rewards: 1.0 for a right answer, 0.0 for any other.

Runs only in the worker processes of megarl.rewards.pool, which limit its time and memory. Answers reach SymPy only through
math-verify's LaTeX grammar, never through `sympify` or `parse_expr`, which evaluate Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.rewards.choice import choice_reward
from megarl.rewards.equality import equal
from megarl.rewards.extract import boxed_answers, clean, last_expression, last_line, last_number, last_running_number, marked_answer
from megarl.rewards.ifeval import ifeval_reward
from megarl.rewards.limits import Refused, check_characters

MAX_TEXT_CHARS = 1 << 18


def math_reward(text: str, answer: str) -> float:
    """Whether the final answer of `text` equals `answer` mathematically (megarl.rewards.equality).

    The final answer is the one that the text marks (\\boxed{}, "####", "answer is"), else its last line or last number.
    """
    if len(text) > MAX_TEXT_CHARS:
        return 0.0
    marked = marked_answer(text)
    if marked is not None:
        reference, boxes = clean(answer), boxed_answers(text)
        same = len(boxes) > 1 and all(_equal_or_refused(reference, box) for box in boxes)  # \boxed{\frac12} or \boxed{0.5}
        return float(same or _equal_or_refused(reference, marked))
    return float(any(_equal_or_refused(clean(answer), candidate) for candidate in _unmarked_answers(text)))


def last_number_reward(text: str, answer: str) -> float:
    """Whether the last number of a list, such as the running totals "7,7,6,7,2", equals `answer`. Every comma separates."""
    if len(text) > MAX_TEXT_CHARS or not _clean_characters(last_line(text)):
        return 0.0
    return float(_equal_or_refused(clean(answer), last_running_number(text)))


VERIFIERS: dict[str, Callable[[str, str], Any]] = {  # as a user's own function they give a number, or a dict with "score"
    "math": math_reward,
    "last_number": last_number_reward,
    "choice": choice_reward,
    "ifeval": ifeval_reward,
}


def _unmarked_answers(text: str) -> list[str]:
    """The last line if it is an expression; the number or expression at its end if it is prose."""
    line = last_line(text)
    return list(dict.fromkeys((clean(line), last_number(text), last_expression(text)))) if _clean_characters(line) else []


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
        check_characters(candidate)
        return equal(reference, candidate)
    except Refused:
        return False
