"""Reads an answer's text into its structure: lists, intervals, unions, chains of relations.

The expressions and matrices in it are parsed by the LaTeX grammar of math-verify (0.9.0; latex2sympy2_extended 1.11.0); `_checked` refuses
and `_rewritten` changes what the grammar would read wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from megarl.rewards.limits import Refused, check_value
from megarl.rewards.plain_numbers import plain_number
from megarl.rewards.products import with_signs

FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_MAX_PARTS = 32
_NOTHING = 1e-20  # what is smaller counts as 0 in 0^0
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|boldsymbol|mbox|operatorname)\s*"
_IN_TEXT = re.compile(_TEXT + r"\{([^{}]*)\}")
_WORD = re.compile(rf"\(?(?:{_TEXT}\{{\s*\(?([A-Za-z][A-Za-z '-]*)\)?\.?\s*\}}|([A-Za-z][A-Za-z '-]*))\)?\.?")
_DIFFERENCE = re.compile(r"[A-Za-z](?:-[A-Za-z])+|[A-Za-z]{1,4}(?: +- *[A-Za-z]{1,4})+")  # of variables, or products of them; no word
_SHORT_WORDS = frozenset("yes no none both even odd east west true zero left up down".split())
_LONGEST_PRODUCT = 4  # letters without a command: xyz is a product, east a direction
_NUMBER_IN_FONT = re.compile(rf"(?<=[=<>≈(,;\s])(?<![\d)}}]\s){_TEXT}\{{\s*(-?\d+(?:[.,/]\d+)*)\s*\}}(?=\s*(?:\Z|[=<>≈,;)]))", re.ASCII)
_LAST_SIDE = re.compile(r"=\s*(\d{1,3}(?:,\d{3})+)\s*\Z", re.ASCII)
_ALL_REALS = (r"\mathbb{R}", r"\mathbb R", "\\R", "ℝ")
_DEGREES = r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)"
_RELATION = r"\\(?:leq?|geq?|lt|gt|neq?|approx|leqslant|geqslant)(?![A-Za-z])|[≤≥≠≈]|!=|<=|>=|[<>=]"
_JOIN = r"[,;]|\\text\s*\{\s*(?:and|or)\s*\}|\\(?:quad|qquad)(?![A-Za-z])|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
_OPERATORS = {"le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">", "ne": "!=",
              "neq": "!=", "approx": "~", "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~"}  # fmt: skip
_SYMBOLS = {r"\varnothing": r"\emptyset ", "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "∪": r"\cup ",
            "∈": r"\in ", "−": "-", "–": "-", "±": r"\pm ", "∅": r"\emptyset ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}"}  # fmt: skip
_TIMES = re.compile(r"(?<=\d) x (?=\d)", re.ASCII)  # 9 x 2 = 18
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[A-Za-z]))")


class Items(NamedTuple):
    """Items in brackets: a point, an interval or, in braces, a set; without brackets (opening ""): a list with commas."""

    opening: str
    closing: str
    items: list[Any]


class Union(NamedTuple):
    parts: list[Any]


class Chain(NamedTuple):
    """sides[0] operators[0] sides[1] …"""

    sides: list[Any]
    operators: list[str]


class Word(NamedTuple):
    text: str


@lru_cache(maxsize=1024)
def read_reference(text: str) -> Any:
    return read(text, checked=False)


def read(text: str, checked: bool) -> Any:
    """The structure of an answer; None if it cannot be read. `checked`: it is a model's answer, and Refused is raised outside limits."""
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    text = _TIMES.sub(r" \\times ", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3] or ''}}}", text)
    text = re.sub(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|(?<!\\)\\[,!:; ]|~", " ", text)
    text = _NUMBER_IN_FONT.sub(r"\1", text)
    text = _LAST_SIDE.sub(lambda side: "=" + side[1].replace(",", ""), text)
    return _structure(text.replace("**", "^").replace("\\$", "").replace("$", "").replace("\n", " "), checked)


def _structure(text: str, checked: bool) -> Any:
    text = text.strip().removeprefix("+")
    if text in _ALL_REALS:
        from sympy import oo as infinity

        return Items("(", ")", [-infinity, infinity])
    is_word = (word := word_of(text)) and not _DIFFERENCE.fullmatch(text)
    if is_word and (text.startswith("\\") or len(text) > _LONGEST_PRODUCT or " " in text or word in _SHORT_WORDS):
        return Word(word)

    def parts(pieces: Sequence[str]) -> list[Any]:
        if len(pieces) > _MAX_PARTS:
            raise Refused(f"more than {_MAX_PARTS} parts")
        return [_structure(piece, checked) for piece in pieces]

    pieces, joins = _split(text, _JOIN)
    if len(pieces) > 1 and plain_number(text) is None:
        found = parts([piece for piece in pieces if piece.strip()])
        if all("or" in join for join in joins) and all(map(_is_range, found)):  # x < 2 or x > 3
            return Union(found)
        return Items("", "", found)
    sides, operators = _split(text, _RELATION)
    if operators:
        return _chain(Chain(parts(sides), [_OPERATORS.get(o.removeprefix("\\"), o) for o in operators]))
    members, _ = _split(text, r"\\in(?![A-Za-z])")
    if len(members) == 2:
        return _structure(members[1], checked)
    unions, _ = _split(text, r"\\cup(?![A-Za-z])")
    if len(unions) > 1:
        return Union(parts(unions))
    ratio, _ = _split(text, ":")
    if len(ratio) > 2:  # 3:4:5; the grammar divides, which is right for two
        return Items(":", ":", parts(ratio))
    if inside := _bracketed(text):
        opening, content, closing = inside
        items, _ = _split(content, r"[,;]")
        if len(items) > 1 or opening == "{":
            return Items(opening, closing, parts(items))
    return _expression(text, checked)


def word_of(text: str) -> str:
    """A name or a choice in the form that is compared; empty if the text is not one."""
    match = _WORD.fullmatch(text)
    return " ".join((match[1] or match[2]).casefold().split()) if match else ""


def _is_range(structure: Any) -> bool:
    return isinstance(structure, Items) and len(structure.items) == 2 and structure.opening in ("(", "[")


def _chain(chain: Chain) -> Any:
    """Turns inequalities of one variable between constants into an interval."""
    if all(operator in FLIPPED for operator in chain.operators):
        sides, operators = chain
        if operators[0] in (">", ">="):
            sides, operators = sides[::-1], [FLIPPED[operator] for operator in operators[::-1]]
        if len({operator[0] for operator in operators}) == 1:
            from sympy import oo as infinity  # imported where it is needed: half a second

            names = [is_name(side) for side in sides]
            if names == [False, True, False] and not (symbols(sides[0]) or symbols(sides[2])):
                return Items("(["[operators[0] == "<="], ")]"[operators[1] == "<="], [sides[0], sides[2]])
            if names == [True, False] and not symbols(sides[1]):
                return Items("(", ")]"[operators[0] == "<="], [-infinity, sides[1]])
            if names == [False, True] and not symbols(sides[0]):
                return Items("(["[operators[0] == "<="], ")", [sides[0], infinity])
            return Chain(sides, operators)
    return chain


def _split(text: str, pattern: str) -> tuple[list[str], list[str]]:
    """Pieces of `text` between the matches of `pattern` outside all brackets, and the matches."""
    pieces, found, depth, start, position = [], [], 0, 0, 0
    separator = re.compile(pattern)
    while position < len(text):
        match = separator.match(text, position) if depth == 0 else None
        if match:
            pieces.append(text[start:position])
            found.append(match[0])
            start = position = match.end()
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 1
    return [*pieces, text[start:]], found


def _bracketed(text: str) -> tuple[str, str, str] | None:
    """Opening, content and closing, if one pair of brackets encloses the text."""
    if text.startswith("\\{") and text.endswith("\\}"):
        opening, content, closing = "{", text[2:-2], "}"
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        opening, content, closing = text[0], text[1:-1], text[-1]
    else:
        return None
    depth = 0
    for character in content:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
    return opening, content, closing


def _checked(text: str) -> None:
    """Raises Refused for what the grammar misreads: it takes boxes and texts out of products, and spaces between numbers for sums."""
    if "\\boxed" in text or "\\fbox" in text:
        raise Refused("a box inside the answer")
    if any(re.search(r"\d", inside) for inside in _IN_TEXT.findall(text)):
        raise Refused("digits in words")
    if re.search(r"(?<![_^\d.])\d[\d.]*\s+\.?\d", text):
        raise Refused("numbers side by side")
    if re.search(r"(?<![A-Za-z_\\\d.])[\d.]+\s*_", text):  # the grammar drops the index
        raise Refused("an index of a number")


def _rewritten(text: str) -> str:
    """The text in a form that the grammar reads rightly: signs in products, braces in 10^-2, degrees converted to radians for sin etc."""
    text = with_signs(re.sub(r"\^\s*-\s*(\d+|[A-Za-z](?![A-Za-z]))", r"^{-\1}", text))
    if re.search(r"sin|cos|tan|cot|sec|csc", text):
        text = re.sub(rf"(\d+(?:\.\d+)?)\s*{_DEGREES}", r"(\1\\cdot\\pi/180)", text)
    return re.sub(_DEGREES, "", text)


def _expression(text: str, checked: bool) -> Any:
    """The text as a SymPy object whose sums and powers are not evaluated; None if it does not parse."""
    plain = plain_number(text)
    if plain is not None and not plain.is_decimal:
        from sympy import Rational

        return Rational(plain.value.numerator, plain.value.denominator)
    if checked:
        _checked(text)
    import math_verify  # takes half a second and 50 MiB with SymPy, so only when an answer needs it

    latex = f"${_rewritten(text)}$"
    no_timeout: Any = None  # the documentation allows None, the annotation does not
    found = math_verify.parse(latex, [math_verify.LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=no_timeout)
    if not found:
        return None
    if checked:
        check_value(found[0])
        _check_powers(found[0])
    from sympy import I

    imaginary = [symbol for symbol in getattr(found[0], "free_symbols", ()) if symbol.name == "i"]
    return found[0].subs(dict.fromkeys(imaginary, I)) if imaginary else found[0]


def _check_powers(expression: Any) -> None:
    """Raises Refused for 0^0, which SymPy calls 1. The bounds of check_value hold for what is evaluated here."""
    from sympy import Pow

    for power in getattr(expression, "atoms", lambda _: ())(Pow):
        if not power.free_symbols and all(abs(argument.evalf(30)) < _NOTHING for argument in reversed(power.args)):
            raise Refused("zero to the power of zero")


def is_function(structure: Any) -> bool:
    return type(getattr(structure, "func", None)).__name__ == "UndefinedFunction"


def is_name(structure: Any) -> bool:
    """A variable, a function of variables, or a point of variables."""
    if isinstance(structure, Items):
        return all(map(is_name, structure.items))
    return bool(getattr(structure, "is_Symbol", False)) or is_function(structure)


def symbols(structure: Any) -> set[str]:
    if isinstance(structure, (Items, Union, Chain)):
        return set().union(*map(symbols, structure[-1] if isinstance(structure, Items) else structure[0]))
    return {symbol.name for symbol in getattr(structure, "free_symbols", ())}
