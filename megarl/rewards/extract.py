"""Finds the final answer in a text, in time linear in its length, without parsing or evaluating anything."""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 512

_BOXES = ("\\boxed", "\\fbox")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\s${}\\]{0,64}")
_PHRASES = ("answer is", "answer:", "答案是", "答案为", "答案：")
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?\\?%?"
_RUNNING_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:\.\d+)?", re.ASCII)
_MATH_WORDS = r"(?!(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|and|or)\b)"
_NUMBER_WITH_UNIT = re.compile(rf"(-?{_NUMBER})\s+{_MATH_WORDS}[A-Za-z]{{2,}}[A-Za-z .]*", re.ASCII)
# A free-standing number: in a sentence, after "=" or a currency sign, but not part of an expression, a list or a name.
_START = r"(?:^|(?<=[=\s*_\"'`\u3001-\u9fff\uac00-\ud7af\uff0c\uff1a])|(?<=[A-Za-z]:))(?:\\?[$€£]|\\\(|\$\$)?"
_END = r"(?=(?:\\?[$€£]|\\\)|\*\*|[.,;:?\"'`°])*(?:\s|$))"
_FREE_NUMBER = re.compile(rf"{_START}(-?{_NUMBER}){_END}", re.ASCII)
_BEFORE_IT = re.compile(r"(?:[-+*/^×·÷(\[{<>≤≥]|\\[A-Za-z]+|\d\s*[,;]|\b(?:or|and)|(?:^|\s)\d[\d.,]*)\s*\Z")
_BEHIND_IT = re.compile(r"\s*(?:[-+*/^×·÷=<>≤≥]|\\(?!\)|\]|%|\$)|\d)")
_BOLD = re.compile(r"(?<!\w)\*\*([^*]+)\*\*(?!\w)")
_PROSE = re.compile(rf"(?<![\\A-Za-z]){_MATH_WORDS}[^\W\d_]{{2,}}")
_CLOSING = ("$", "\\]", "\\)", "```", "*", "__")
_BEHIND_PHRASE = re.compile(r"[:*_ \t]*(?:(?:[\s*_$:>`]|\\\[|\\\()*\n)?[:*_> \t]*")  # "The answer is" may end its line
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("`", "`"))
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_NUMBER_OF_DEGREES = re.compile(rf"\A(-?{_NUMBER})\s*(?:\^\s*\\circ|\^\s*\{{\s*\\circ\s*\}}|\\degree|°|\u00ba)\Z")
_PRODUCT_WITH_BOX = re.compile(r"[\s$(\[\\]*-?\d[\d\s.,*/^+-]*\Z")


def marked_answer(text: str) -> str | None:
    """The answer that the text marks, cleaned: in its last \\boxed{}, else after its last "####" (GSM8K), else after its last "answer is".

    None if it marks none; empty if the marked answer is empty, too long or never closed.
    """
    start = _last_box(text)
    if start >= 0:
        return clean(_boxed(text, start))
    start = text.rfind("####")
    if start >= 0:
        return clean(_line(text, start + len("####")))
    lower = text.lower()
    start, phrase = max((lower.rfind(phrase), phrase) for phrase in _PHRASES)
    if start >= 0 and len(lower) == len(text):
        behind = _BEHIND_PHRASE.match(text, start + len(phrase))
        assert behind is not None  # it may be empty
        return clean(_line(text, behind.end()).split(". ")[0])
    return None


def last_line(text: str) -> str:
    """The last line that is not blank, or the end of it that is no longer than an answer may be."""
    end = text.rstrip()[-MAX_ANSWER_CHARS:]
    inside = _without_closing(end)
    return (inside if "\n" in end[len(inside) :] else end).rsplit("\n", 1)[-1]


def _without_closing(text: str) -> str:
    """The text without closing delimiters at its end. (A search from the left would take time quadratic in their number.)"""
    while shorter := next((text[: -len(mark)].rstrip() for mark in _CLOSING if text.endswith(mark)), ""):
        text = shorter
    return text


def last_number(text: str) -> str:
    """The last number of the last line, if that is prose. Commas between groups of three digits are thousands separators.

    Empty if the number is part of something, like the 5 of 2^5, (3, 5), 1e5 and \\frac{1}{5}.
    """
    line = _BOLD.sub(r"\1", last_line(text))
    if not _PROSE.search(line):
        return ""
    for match in reversed(list(_FREE_NUMBER.finditer(line))):
        if _BEFORE_IT.search(line, 0, match.start()) or _BEHIND_IT.match(line, match.end()):
            return ""
        return match[1]
    return ""


def last_running_number(text: str) -> str:
    """The last number of the last line, a list such as "7,7,6,7,2" in which every comma separates. Empty if there is none."""
    return _last_match(_RUNNING_NUMBER, text)


def clean(answer: str) -> str:
    """The answer without surrounding blanks, math delimiters, bold marks, final full stop, and a lone number's unit."""
    if len(answer) > MAX_ANSWER_CHARS:
        return ""
    before = None
    while answer != before:
        before = answer
        answer = answer.strip().removesuffix(".").removesuffix("**").removeprefix("**").strip("` \t\r\n")
        for opening, closing in _WRAPPERS:
            if len(answer) >= len(opening + closing) and answer.startswith(opening) and answer.endswith(closing):
                answer = answer[len(opening) : -len(closing)]
    answer = answer.removeprefix("=").lstrip().removeprefix("\\$").removeprefix("$").replace("\N{MINUS SIGN}", "-")
    answer = _NUMBER_OF_DEGREES.sub(r"\1", _THOUSANDS.sub("", answer))
    with_unit = _NUMBER_WITH_UNIT.fullmatch(answer)
    return with_unit[1] if with_unit else answer


def _last_box(text: str) -> int:
    """Where the last box begins, or the box around it; -1 if there is none."""
    last = max(text.rfind(box) for box in _BOXES)
    if last < 0 or not _BOX.match(text, last):  # or \\boxedfoo
        return -1
    around = _BOX.finditer(text, max(0, last - MAX_ANSWER_CHARS), last)
    return next((box.start() for box in around if box.end() + len(_boxed(text, box.start())) > last), last)


def _line(text: str, start: int) -> str:
    """From `start` to the end of its line, cut just beyond the allowed length."""
    return text[start : start + MAX_ANSWER_CHARS + 1].split("\n", 1)[0]


def _boxed(text: str, start: int) -> str:
    """Content of the box that opens at `start`; empty if it is a factor of a product or not closed within the allowed length."""
    line = text[max(0, start - MAX_ANSWER_CHARS) : start].rsplit("\n", 1)[-1]
    box = _BOX.match(text, start)
    assert box is not None
    opening = box.end()
    if _PRODUCT_WITH_BOX.fullmatch(line):
        return ""
    if text[opening : opening + 1] != "{":  # \\boxed 5
        unbraced = _UNBRACED.match(text, opening)
        assert unbraced is not None  # it may be empty
        return unbraced[0]
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
