"""maj@k: whether the answer that most of k samples give is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean

from megarl.rewards.choice import chosen_letter
from megarl.rewards.extract import boxed_answers, clean, last_line, last_number, last_running_number, marked_answer
from megarl.rewards.plain_numbers import plain_number
from megarl.rewards.verify import MAX_TEXT_CHARS

Vote = Hashable  # an answer; True: the right one; None: the sample gives none


def _final_answer(text: str) -> str:
    if boxes := boxed_answers(text):
        return boxes[-1]
    marked = marked_answer(text)
    return marked if marked is not None else last_number(text) or clean(last_line(text))


ANSWERS: dict[str, Callable[[str], str]] = {"math": _final_answer, "last_number": last_running_number, "choice": chosen_letter}


def vote(grader: str, text: str, right: bool) -> Vote:
    """What a response to a prompt votes for. Right answers are one, however they are written; wrong ones are one if their numbers or their
    texts are equal."""
    if right:
        return True
    answer = ANSWERS[grader](text) if len(text) <= MAX_TEXT_CHARS else ""
    number = plain_number(answer)
    return str(number.value) if number else "".join(answer.split()) or None


def majority(votes: Sequence[Vote]) -> float:
    """The chance that the answer with the most votes, drawn by lot from those with equally many, is right."""
    counts = Counter(vote for vote in votes if vote is not None)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return (True in first) / len(first) if first else 0.0


def majority_at(k: int, votes: Sequence[Vote]) -> float:
    """The mean of `majority` over as many draws of k votes as there are without using one twice."""
    return fmean(majority(votes[first : first + k]) for first in range(0, len(votes) - k + 1, k))
