"""Rule-based rewards: 1.0 for a right answer, 0.0 for any other.

Runs only in the worker processes of megarl.rewards.pool, which limit its time and memory. Answers
reach SymPy only through math-verify's LaTeX grammar, never through `sympify` or `parse_expr`, which
evaluate Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean
from typing import Any

from megarl.rewards.answers import AnswerRefused, check_characters, equal, plain_number
from megarl.rewards.extract import (
    answers,
    boxed_answers,
    choice_reward,
    chosen_letter,
    clean,
    final_part,
    last_line,
    last_running_number,
    marked_answer,
    odd_character,
    plain,
)
from megarl.rewards.ifeval import ifeval_reward


def math_reward(text: str, answer: str) -> float:
    """Whether the final answer of `text` equals `answer` mathematically (megarl.rewards.answers).

    The final answer is the one that the text marks after its thinking (<answer>, \\boxed{}, "####",
    "answer is"), else its last line or last number.
    """
    text = final_part(text)
    reference = clean(plain(answer))
    boxes = boxed_answers(text)
    # \boxed{\frac12} or \boxed{0.5}
    if len(boxes) > 1 and all(_equal_or_refused(reference, box) for box in boxes):
        return 1.0
    return float(any(_equal_or_refused(reference, candidate) for candidate in answers(text)))


def last_number_reward(text: str, answer: str) -> float:
    """Whether the last number of a list, such as the running totals "7,7,6,7,2", equals `answer`.

    Every comma separates.
    """
    text = final_part(text)
    marked = marked_answer(text)
    line = last_line(text) if marked is None else marked
    return float(
        not odd_character(line)
        and _equal_or_refused(clean(plain(answer)), last_running_number(line))
    )


# each returns a number, or a dict with "score", as a user's own function does
VERIFIERS: dict[str, Callable[[str, str], Any]] = {
    "math": math_reward,
    "last_number": last_number_reward,
    "choice": choice_reward,
    "ifeval": ifeval_reward,
}


def _equal_or_refused(reference: str, candidate: str) -> bool:
    if not candidate:
        return False
    try:
        check_characters(candidate)
        return equal(reference, candidate)
    except AnswerRefused:
        return False


Vote = Hashable  # an answer; True: the right answer; None: the sample gives no answer


def _final_answer(text: str) -> str:
    return next(iter(boxed_answers(text)[-1:] or answers(text)), "")


ANSWERS: dict[str, Callable[[str], str]] = {
    "math": _final_answer,
    "last_number": last_running_number,
    "choice": chosen_letter,
}


def vote(grader: str, text: str, right: bool) -> Vote:
    """The answer that a response votes for.

    All right answers are one vote, however they are written. Wrong answers are the same vote if
    their numbers or their texts are equal.
    """
    if right:
        return True
    answer = ANSWERS[grader](final_part(text))
    number = plain_number(answer)
    return str(number.value) if number else "".join(answer.split()) or None


def majority(votes: Sequence[Vote]) -> float:
    """The probability that the answer with the most votes is right. Ties are broken at random."""
    counts = Counter(vote for vote in votes if vote is not None)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return (True in first) / len(first) if first else 0.0


def majority_at(k: int, votes: Sequence[Vote]) -> float:
    """The mean of `majority` over disjoint groups of k votes, as many as there are."""
    return fmean(majority(votes[first : first + k]) for first in range(0, len(votes) - k + 1, k))
