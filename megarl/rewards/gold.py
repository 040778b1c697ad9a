"""The gold scorer of synthetic:summary: the preferences that a reward model is to learn there, known exactly.

As a reward it is named by import path: `eval.reward=megarl.rewards.gold:score`.
"""

from __future__ import annotations

WORST = -2.0
_MISTAKE = 0.25


def score(response: str, answer: str) -> float:
    """How well any text summarises a post of six letters, from -2 to 1. Args: answer: the post's letters.

    It is -1, plus 1/3 for each letter of the post at the first place where it stands, minus 1/4 for each mistake: a character that is
    not a letter of the post, a letter that stood there before, a letter that alphabetically belongs before the last new one. So the post's
    six letters in alphabetical order score 1, an empty text scores -1.
    """
    seen, found, mistakes, last = set[str](), 0, 0, ""
    for character in response:
        if character in answer and character not in seen:
            found += 1
            mistakes += character < last
            last = character
        else:
            mistakes += 1
        seen.add(character)
    return max(2 * found / len(answer) - 1 - _MISTAKE * mistakes, WORST)
