"""Multiple choice: the letter that a response chooses."""

from __future__ import annotations

import re

from megarl.rewards.extract import last_line, marked_answer

_LETTER = r"\(?([A-J])(?![A-Za-z0-9'])"
_HEDGED = r"\)?\s*(?:,|/|&|or\b|and\b)\s*\(?(?-i:[A-HJ]|I(?!\s+[a-z]))(?![A-Za-z])"  # several letters choose nothing
_SAID = re.compile(
    rf"answer(?:\s{{1,8}}is)?\s{{0,8}}:?[\s*_$]{{0,16}}(?:\\boxed\{{)?(?:\\text(?:bf)?\{{)?\s{{0,8}}{_LETTER}(?!{_HEDGED})", re.IGNORECASE
)
_PRONOUN = re.compile(r"\s+[a-z]")
_BOXED = re.compile(rf"(?:\\text(?:bf)?\{{)?\s*{_LETTER}\s*\)?[.:]?\s*\}}?")
_ALONE = re.compile(r"[\s*_$`(\[{]*([A-J])[\s*_$`)\]}.:]*")
_END = 4096  # characters from the end in which the choice must be


def chosen_letter(text: str) -> str:
    """The letter that is all of the last line, else in the last \\boxed{}, else after the last "answer is" or "Answer:"; empty if there is
    none.

    MMLU-Pro's own extraction takes the first "answer is", then any capital letter that stands alone ("I" among them), then a random one.
    """
    end = text[-_END:]
    if alone := _ALONE.fullmatch(last_line(end)):
        return alone[1]
    if "\\boxed" in end and (box := _BOXED.fullmatch(marked_answer(end) or "")):
        return box[1]
    for said in reversed(list(_SAID.finditer(end))):
        if said[1].isupper() and not (said[1] == "I" and _PRONOUN.match(end, said.end())):
            return said[1]
    return ""


def choice_reward(text: str, answer: str) -> float:
    return float(chosen_letter(text) == answer.strip())
