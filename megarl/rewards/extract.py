"""Finding the final answer in a text. Linear in the text's length, and nothing is parsed or evaluated here."""

from __future__ import annotations

import re
from typing import Optional

MAX_ANSWER_CHARS = 512

_BOXES = ("\\boxed", "\\fbox")
_PHRASES = ("answer is", "answer:")
_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?%?"
_LAST_NUMBER = re.compile(rf"(?:(?<![\w)])-)?(?<![\d.]){_NUMBER[2:]}", re.ASCII)
_RUNNING_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:\.\d+)?", re.ASCII)
_MATH_WORDS = r"(?!(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp)\b)"
_NUMBER_WITH_UNIT = re.compile(rf"({_NUMBER})\s+{_MATH_WORDS}[A-Za-z]{{2,}}[A-Za-z .]*", re.ASCII)
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))


def marked_answer(text: str) -> Optional[str]:
    """The answer that the text marks as such, cleaned: in its last \\boxed{}, after its last "####" (GSM8K), or after its last
    "answer is", in this order of precedence. None if it marks none; empty if what it marks is empty, too long or never closed."""
    start = max(text.rfind(box) for box in _BOXES)
    if start >= 0:
        return clean(_boxed(text, start))
    start = text.rfind("####")
    if start >= 0:
        return clean(_line(text, start + len("####")))
    lower = text.lower()
    start, phrase = max((lower.rfind(phrase), phrase) for phrase in _PHRASES)
    if start >= 0 and len(lower) == len(text):
        return clean(_line(text, start + len(phrase)).lstrip(":* ").split(". ")[0])
    return None


def last_line(text: str) -> str:
    """The last line that is not blank, or as much of its end as an answer may have characters."""
    return text.rstrip()[-MAX_ANSWER_CHARS:].rsplit("\n", 1)[-1]


def last_number(text: str) -> str:
    """The last number of the last line, commas between groups of three digits read as thousands separators. Empty if none."""
    return _last_match(_LAST_NUMBER, text)


def last_running_number(text: str) -> str:
    """The last number of the last line, a list such as "7,7,6,7,2": every comma separates. Empty if there is none."""
    return _last_match(_RUNNING_NUMBER, text)


def clean(answer: str) -> str:
    """Without surrounding blanks, math delimiters, bold marks, a final full stop, and the unit after a lone number."""
    if len(answer) > MAX_ANSWER_CHARS:
        return ""
    answer = answer.strip().removesuffix(".").strip()
    for opening, closing in _WRAPPERS:
        if len(answer) >= len(opening + closing) and answer.startswith(opening) and answer.endswith(closing):
            answer = answer[len(opening) : -len(closing)].strip().removesuffix(".")
    answer = answer.removeprefix("\\$").removeprefix("$").replace("\N{MINUS SIGN}", "-")
    with_unit = _NUMBER_WITH_UNIT.fullmatch(answer)
    return with_unit[1] if with_unit else answer


def _line(text: str, start: int) -> str:
    """From `start` to the end of its line, cut just beyond the allowed length."""
    return text[start : start + MAX_ANSWER_CHARS + 1].split("\n", 1)[0]


def _boxed(text: str, start: int) -> str:
    """Content of the box that opens at `start`; empty if it is not closed within the allowed length."""
    opening = text.find("{", start, start + 8)
    if opening < 0:
        return ""
    depth = 0
    for i in range(opening, min(len(text), opening + MAX_ANSWER_CHARS)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : i]
    return ""


def _last_match(pattern: re.Pattern[str], text: str) -> str:
    matches = pattern.findall(last_line(text))
    return matches[-1] if matches else ""
