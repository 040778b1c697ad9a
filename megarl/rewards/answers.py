"""Decides whether two answers are mathematically equal.

In this order: limits, plain numbers, structure, values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from megarl.rewards.extract import DENIED, UPRIGHT, odd_character

MAX_NESTING = 12
MAX_COMMANDS = 48  # LaTeX commands in one answer
MAX_POWERS = 24  # powers in one answer
MAX_BARS = 8  # each may open or close an absolute value, and the grammar tries both
MAX_SUBSCRIPTS = 12
MAX_DIGITS = 64  # digits of one number
MAX_EXPONENT_DIGITS = 4
MAX_VALUE_BITS = 10_000  # size of the largest integer that evaluating the answer could produce
MAX_FACTORIAL = 1_000
MAX_EXPANSION = 64  # largest exponent of a sum with symbols

_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}", re.ASCII)
_LONG_EXPONENT = re.compile(rf"(?:\^|\*\*)[\s{{(+-]*\d{{{MAX_EXPONENT_DIGITS + 1}}}", re.ASCII)
_COUNTING = re.compile(r"!|binom|gcd|lcm")
_LARGE_COUNT = re.compile(r"\d{4}", re.ASCII)
_UNBOUNDED = re.compile(r"\\(?:i?i?int|oint|sum|prod|lim)(?![A-Za-z])|__")


class AnswerRefused(Exception):
    """The answer is outside the limits, so it scores 0.

    Model output is hostile input. The limits above refuse known bombs cheaply: an answer's text is
    checked before it is parsed, the size of its value before it is evaluated. All other bombs meet
    the worker process's limits on time and memory (megarl.rewards.worker).
    """


def check_characters(answer: str) -> None:
    """Raises AnswerRefused for control, format (zero-width, bidirectional), private and unassigned
    characters. Blanks are allowed.
    """
    character = odd_character(answer)
    if character:
        raise AnswerRefused(f"character U+{ord(character):04X}")


def check_text(answer: str) -> None:
    """Checks an answer's text before it is parsed. Raises AnswerRefused."""
    depth = 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_NESTING:
            raise AnswerRefused(f"brackets nested more than {MAX_NESTING} deep")
    if answer.count("\\") > MAX_COMMANDS:
        raise AnswerRefused(f"more than {MAX_COMMANDS} commands")
    if answer.count("^") + answer.count("**") > MAX_POWERS:
        raise AnswerRefused(f"more than {MAX_POWERS} powers")
    if answer.count("|") > MAX_BARS or answer.count("_") > MAX_SUBSCRIPTS:
        raise AnswerRefused(f"more than {MAX_BARS} bars or {MAX_SUBSCRIPTS} subscripts")
    if _LONG_NUMBER.search(answer):
        raise AnswerRefused(f"a number of more than {MAX_DIGITS} digits")
    if _LONG_EXPONENT.search(answer):
        raise AnswerRefused(f"an exponent of more than {MAX_EXPONENT_DIGITS} digits")
    if _COUNTING.search(answer) and _LARGE_COUNT.search(answer):
        raise AnswerRefused("a factorial, binomial, gcd or lcm of large numbers")
    if _UNBOUNDED.search(answer):
        raise AnswerRefused("an integral, sum, product, limit or dunder name")


def check_value(expression: Any) -> float:
    """Upper bound of the bits of any value in the evaluation of `expression` (SymPy, parsed,
    unevaluated). Raises AnswerRefused above the limit.
    """
    name = type(expression).__name__
    if name in ("Integral", "Derivative", "Sum", "Product", "Limit"):
        raise AnswerRefused(f"a {name.lower()}")
    if getattr(expression, "is_Rational", False):
        bits = float(max(abs(expression.p).bit_length(), expression.q.bit_length()))
    elif getattr(expression, "is_Pow", False):
        bits = _power_bits(*expression.args)
    elif name in ("factorial", "factorial2", "subfactorial", "binomial", "gamma"):
        if any(check_value(argument) > math.log2(MAX_FACTORIAL) for argument in expression.args):
            raise AnswerRefused(f"a factorial of more than {MAX_FACTORIAL}")
        largest = 0.0
        for argument in expression.args:
            if argument.is_Integer:
                largest = max(largest, float(abs(argument)))
            else:
                largest = max(largest, 2 ** check_value(argument))
        bits = math.lgamma(largest + 2) / math.log(2)
    else:
        children = list(map(check_value, getattr(expression, "args", ())))
        if getattr(expression, "is_Mul", False) or getattr(expression, "is_Add", False):
            bits = sum(children)
        else:
            bits = max(children, default=0.0)
    if bits > MAX_VALUE_BITS:
        raise AnswerRefused(f"a value of more than {MAX_VALUE_BITS} bits")
    return bits


def _power_bits(base: Any, exponent: Any) -> float:
    base_bits = check_value(base)
    exponent_bits = check_value(exponent)
    largest_exponent = 2.0 ** min(exponent_bits, 64.0)
    # the bound of a sum of roots is far too large
    if exponent.is_number and not exponent.is_Rational:
        size = abs(exponent.evalf(15))
        if size.is_Float:
            largest_exponent = min(largest_exponent, float(size))
    if base.is_Add and base.free_symbols and largest_exponent > MAX_EXPANSION:
        raise AnswerRefused(f"a sum to a power above {MAX_EXPANSION}")
    return max(base_bits, 1.0) * largest_exponent


# tolerance if one is a decimal: 1e-6 plus rounding; relative below 1
SAME_DECIMALS = Fraction(1_000_001, 10**12)

_PLAIN = re.compile(
    r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?(?:/(\d+)|[eE]([+-]?\d{1,3}))?", re.ASCII
)
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?", re.ASCII)
_MIXED = re.compile(r"(-?)(\d+)\s+(\d+)/(\d+)", re.ASCII)


class PlainNumber(NamedTuple):
    """An integer, a decimal, a quotient, a mixed number or a repeating decimal."""

    value: Fraction
    is_decimal: bool


def plain_number(text: str) -> PlainNumber | None:
    """A plain number, with or without thousands separators, as an exact rational; None for anything
    else.
    """
    if len(text) > MAX_DIGITS:
        return None
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        return PlainNumber(_repeating(*repeating.groups()), False)
    mixed = _MIXED.fullmatch(text)
    if mixed:
        sign, integer, numerator, denominator = mixed.groups()
        if int(denominator) == 0:
            return None
        size = int(integer) + Fraction(int(numerator), int(denominator))
        return PlainNumber(-size if sign else size, False)
    match = _PLAIN.fullmatch(text)
    if match is None or (match[2] is None and match[3] is None):
        return None
    sign, integer, decimals, divisor, exponent = match.groups()
    if divisor is not None and (decimals is not None or int(divisor) == 0):
        return None
    value = (
        Fraction((integer or "0").replace(",", "") + (decimals or ""))
        / int(divisor or 1)
        * Fraction(10) ** int(exponent or 0)
    )
    return PlainNumber(-value if sign == "-" else value, decimals is not None)


def plain_equal(a: PlainNumber | None, b: PlainNumber | None) -> bool | None:
    """Whether both are equal: exactly, or to the sixth decimal place if one is a decimal.

    None if one is not a plain number.
    """
    if a is None or b is None:
        return None
    if a.is_decimal or b.is_decimal:
        size = max(abs(a.value), abs(b.value))
        return abs(a.value - b.value) <= SAME_DECIMALS * min(1, size)
    return a.value == b.value


def _repeating(sign: str, integer: str, fixed: str, repeated: str) -> Fraction:
    scale = 10 ** len(fixed)
    value = Fraction(int((integer or "0") + fixed), scale) + Fraction(
        int(repeated), scale * (10 ** len(repeated) - 1)
    )
    return -value if sign else value


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|\s+|.", re.DOTALL)
_SIGN = "\\cdot "
_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_BINOMIALS = ("\\binom", "\\dbinom", "\\tbinom")
_PRODUCT_OPERATORS = ("\\cdot", "\\times", "\\div", "\\pm", "\\mp")
_DERIVATIVE = ("d", "\\partial")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass
class _Level:
    """What has been read so far inside one pair of brackets."""

    closing: str = ""
    start: int = 0  # index of its content in the tokens written
    is_argument: bool = False  # the brackets hold an argument of a command, ^ or _
    pending_arguments: int = 0  # arguments that the last command still expects
    is_operand: bool = False  # the command and its arguments will end a factor
    ended: bool = False  # a factor has just ended
    last: str = ""  # "number", "fraction", "name", …, or the token itself

    def expect(self, command: str, arguments: int, is_operand: bool) -> None:
        self.pending_arguments = arguments
        self.is_operand = is_operand
        self.ended = False
        self.last = command

    def read_arguments(self, count: int) -> None:
        self.pending_arguments = max(0, self.pending_arguments - count)
        self.ended = self.is_operand and not self.pending_arguments


def with_signs(text: str) -> str:
    """`text` with \\cdot between factors that stand side by side, as math-verify's grammar needs.

    The grammar reads a whole number and what follows it as a mixed number: (3)(4) as 7, e^{0}(4) as
    5. It reads 0.5 after a fraction as 0 and .5. So a sign is inserted wherever one factor ends and
    another begins; a factor is a number, group, fraction, power or binomial coefficient. The
    exception is a number before a fraction that the grammar rightly reads as a mixed number.
    """
    written: list[str] = []
    levels = [_Level()]
    for token in _TOKEN.findall(text):
        level = levels[-1]
        if token.isspace():
            written.append(token)
        elif token[0].isdigit() or token[0] == ".":
            _read_number(token, level, written)
        elif token in _CLOSING:
            if level.pending_arguments == 0 and level.ended:
                written.append(_SIGN)
            written.append(token)
            inner = _Level(_CLOSING[token], len(written))
            if level.pending_arguments and token == "[":
                inner.last = "option"
            elif level.pending_arguments:
                inner.is_argument = True
            levels.append(inner)
        elif token == level.closing:
            content = "".join(written[level.start :]).strip()
            levels.pop()
            written.append(token)
            _close_brackets(level, content, levels[-1])
        else:
            _read_command(token, level, written)
    return "".join(written)


def _read_number(token: str, level: _Level, written: list[str]) -> None:
    if level.pending_arguments:  # \frac12 has both arguments in 12, x^12 its only one
        if level.last != "fraction":
            level.pending_arguments = 0
        level.read_arguments(len(token))
    else:
        if level.ended and level.last != "number":
            written.append(_SIGN)
        level.ended = True
        level.last = "number"
    written.append(token)


def _close_brackets(inner: _Level, content: str, level: _Level) -> None:
    if inner.is_argument:
        if level.last == "fraction" and content in _DERIVATIVE:
            level.is_operand = False
        level.read_arguments(1)
    elif inner.closing != ")" and level.last.startswith("\\"):  # \text{…}, \begin{pmatrix}
        level.ended = False
    elif not level.pending_arguments:  # not the degree of a root, whose argument follows
        level.ended = True
        level.last = "group"


def _read_command(token: str, level: _Level, written: list[str]) -> None:
    # 90^\circ
    if (
        level.pending_arguments
        and token.startswith("\\")
        and token not in (*_FRACTIONS, *_BINOMIALS, "\\sqrt")
    ):
        level.read_arguments(1)
    elif token in _FRACTIONS or token in _BINOMIALS:
        if level.ended and (token in _BINOMIALS or level.last != "number"):
            written.append(_SIGN)
        level.expect("fraction", 2, is_operand=True)
    elif token == "\\sqrt":
        level.expect("root", 1, is_operand=True)
    elif token == "^":  # \sin^2(x) and f^{-1}(x) are functions of x
        level.expect("power", 1, is_operand=level.ended or level.last == "e")
    elif token == "_":
        level.expect("index", 1, is_operand=False)
    elif token == "!":
        level.last = "factorial"
    elif token == "\\pi":
        level.ended = True
        level.last = "name"
    elif token.startswith("\\") and token[1:].isalpha() and token not in _PRODUCT_OPERATORS:
        level.expect(token, 0, is_operand=False)
    else:
        level.expect(token, 0, level.is_operand)
    written.append(token)


FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_MAX_PARTS = 32
_NOTHING = 1e-20  # a smaller number counts as 0 in 0^0
_TEXT = UPRIGHT + r"\s*"
_IN_TEXT = re.compile(_TEXT + r"\{([^{}]*)\}")
_WORD = re.compile(
    rf"\(?(?:{_TEXT}\{{\s*\(?([A-Za-z][A-Za-z '-]*)\)?\.?\s*\}}|([A-Za-z][A-Za-z '-]*))\)?\.?"
)
# of variables or products, not a word
_DIFFERENCE = re.compile(r"[A-Za-z](?:-[A-Za-z])+|[A-Za-z]{1,4}(?: +- *[A-Za-z]{1,4})+")
_SHORT_WORDS = frozenset("yes no none both even odd east west true zero left up down".split())
_LONGEST_PRODUCT = 4  # most letters of a product without a command: xyz, but not east
_FUNCTION_IN_FONT = re.compile(
    _TEXT
    + r"\{\s*(ln|log|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|arccot|sinh|cosh|tanh|coth"
    r"|gcd|lcm|min|max|tg|ctg|cotg|arctg|arcctg|arccotg|lg|sh|ch|th|cth)\s*\}"
)
_OTHER_NAMES = {"tg": "tan", "ctg": "cot", "cotg": "cot", "arctg": "arctan", "arcctg": "arccot",
                "arccotg": "arccot", "cosec": "csc", "lg": "log_{10}", "sh": "sinh", "ch": "cosh",
                "th": "tanh", "cth": "coth"}  # fmt: skip
_OTHER_NAME = re.compile(
    rf"(?:\\({'|'.join(_OTHER_NAMES)})|(?<![A-Za-z\\])(arctg|(?:arc)?co?tg))(?![A-Za-z])"
)
_CONSTANT_IN_FONT = re.compile(_TEXT + r"\{\s*([ei]|\\pi)\s*\}")
# An upright letter may be a unit or a variable.
_UPRIGHT_LETTER = re.compile(_TEXT + r"\{\s*([A-Za-z])\s*\}")
# \frac 1 2, \frac{1} x, \binom 5 2: each argument may be one character.
_ARGUMENT = r"\s*([0-9A-Za-z]|\\pi(?![A-Za-z]))"
_FIRST_ARGUMENT = re.compile(
    rf"(\\(?:[cdt]?frac|[dt]?binom|vec|hat|tilde)(?![A-Za-z])|\\sqrt\s*\[[^\[\]]*\]){_ARGUMENT}"
)
_SECOND_ARGUMENT = re.compile(rf"(\\(?:[cdt]?frac|[dt]?binom)\s*\{{[^{{}}]*\}}){_ARGUMENT}")
# TeX would draw the root of \sqrt12 over the 1 alone; who writes it means 12.
_ROOT_OF_NUMBER = re.compile(
    r"\\(?:sqrt|surd)(?![A-Za-z])\s*(\[[^\[\]]*\])?\s*(\d+(?:\.\d+)?)", re.ASCII
)
# 1,234 and 5: in a list with blanks, a comma between digits is no separator.
_IS_LIST = re.compile(r",\s|;|\b(?:and|or)\b")
_THOUSANDS = re.compile(r"(?<![\d,.(\[{])\d{1,3}(?:,\d{3})+(?!,?\d|[)\]}])", re.ASCII)
_LAST_SIDE = re.compile(r"=\s*(\d{1,3}(?:,\d{3})+)\s*\Z", re.ASCII)
_ALL_REALS = (r"\mathbb{R}", r"\mathbb R", "\\R", "ℝ")
_DEGREES = r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)"
_RELATION = r"\\(?:leq?|geq?|lt|gt|neq?|approx|leqslant|geqslant)(?![A-Za-z])|[≤≥≠≈]|!=|<=|>=|[<>=]"
_JOIN = (
    r"[,;]|\\text\s*\{\s*(?:and|or)\s*\}|\\(?:quad|qquad)(?![A-Za-z])"
    r"|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
)
_RELATIONS = {"le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=",
    "lt": "<", "gt": ">", "ne": "!=",
              "neq": "!=", "approx": "~", "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~"}  # fmt: skip
_SYMBOLS = {r"\varnothing": r"\emptyset ", "π": r"\pi ", "∞": r"\infty ", "×": r"\times ",
    "·": r"\cdot ", "÷": "/", "∪": r"\cup ",
            "∈": r"\in ", "−": "-", "–": "-", "±": r"\pm ", "∅": r"\emptyset ", "²": "^{2}",
            "³": "^{3}", "½": r"\frac{1}{2}", "\u00a0": " ", "\u2009": " ", "\u202f": " "}  # fmt: skip
_TIMES = re.compile(r"(?<=\d) x (?=\d)", re.ASCII)  # 9 x 2 = 18
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")


class Items(NamedTuple):
    """Items in brackets: a point, an interval or, in braces, a set.

    Without brackets (opening ""), a list with commas.
    """

    opening: str
    closing: str
    items: list[Any]


class Union(NamedTuple):
    parts: list[Any]


class RelationChain(NamedTuple):
    """sides[0] operators[0] sides[1] …"""

    sides: list[Any]
    operators: list[str]


class Word(NamedTuple):
    text: str


@lru_cache(maxsize=1024)
def read_reference(text: str) -> Any:
    return read(text, checked=False)


def read(text: str, checked: bool) -> Any:
    """The structure of an answer: lists, intervals, unions, chains of relations; None if it cannot
    be read.

    math-verify's LaTeX grammar (0.9.0; latex2sympy2_extended 1.11.0) parses the expressions and
    matrices in it. Where the grammar would misread a text, `_checked` refuses it or `_rewritten`
    changes it. `checked`: raises AnswerRefused outside the limits, for a model's answer.
    """
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    text = _TIMES.sub(r" \\times ", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3] or ''}}}", text)
    text = re.sub(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|(?<!\\)\\[,!:; ]|~", " ", text)
    text = _FUNCTION_IN_FONT.sub(r"\\\1 ", text)
    text = _OTHER_NAME.sub(lambda name: rf"\{_OTHER_NAMES[name[1] or name[2]]} ", text)
    text = _CONSTANT_IN_FONT.sub(r"{\1}", text)
    text = re.sub(r"\\(?:nice|s|x)frac(?![A-Za-z])", r"\\frac", text)
    text = _ROOT_OF_NUMBER.sub(r"\\sqrt\1{\2}", text)
    text = _SECOND_ARGUMENT.sub(r"\1{\2}", _FIRST_ARGUMENT.sub(r"\1{\2}", text))
    text = re.sub(r"\\quad(?=[a-z])", r"\\quad ", text)
    if _IS_LIST.search(text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = _LAST_SIDE.sub(lambda side: "=" + side[1].replace(",", ""), text)
    return _structure(
        text.replace("**", "^").replace("\\$", "").replace("$", "").replace("\n", " "), checked
    )


def _structure(text: str, checked: bool) -> Any:
    text = text.strip().removeprefix("+")
    if text in _ALL_REALS:
        from sympy import oo as infinity

        return Items("(", ")", [-infinity, infinity])
    word = word_of(text)
    is_word = word and not _DIFFERENCE.fullmatch(text)
    if is_word and (
        text.startswith("\\") or len(text) > _LONGEST_PRODUCT or " " in text or word in _SHORT_WORDS
    ):
        return Word(word)

    def parts(pieces: Sequence[str]) -> list[Any]:
        if len(pieces) > _MAX_PARTS:
            raise AnswerRefused(f"more than {_MAX_PARTS} parts")
        return [_structure(piece, checked) for piece in pieces]

    pieces, joins = _split(text, ";")  # p = 5, q = 2; p = 7, q = 2
    if len(pieces) == 1 or not any("," in piece for piece in pieces):
        pieces, joins = _split(text, _JOIN)
    if len(pieces) > 1 and plain_number(text) is None:
        structures = parts([piece for piece in pieces if piece.strip()])
        ranges = all(map(_is_range, structures)) and not all(map(_may_be_point, structures))
        # x < 2 or x > 3, but not (2, 3) or (3, 2)
        if all("or" in join for join in joins) and ranges:
            return Union(structures)
        return Items("", "", structures)
    sides, operators = _split(text, _RELATION)
    if operators:
        relations = [_RELATIONS.get(o.removeprefix("\\"), o) for o in operators]
        return _chain(RelationChain(parts(sides), relations))
    members, _ = _split(text, r"\\in(?![A-Za-z])")
    if len(members) == 2:
        return _structure(members[1], checked)
    unions, _ = _split(text, r"\\cup(?![A-Za-z])")
    if len(unions) > 1:
        return Union(parts(unions))
    ratio, _ = _split(text, ":")
    if len(ratio) > 2:  # 3:4:5; for two numbers the grammar rightly divides
        return Items(":", ":", parts(ratio))
    inside = _bracketed(text)
    if inside:
        opening, content, closing = inside
        items, _ = _split(content, r"[,;]")
        if len(items) > 1 or opening == "{":
            return Items(opening, closing, parts(items))
    return _expression(text, checked)


def word_of(text: str) -> str:
    """The text in the form in which names and choices are compared; empty if it is neither."""
    match = _WORD.fullmatch(text)
    if match is None:
        return ""
    return " ".join((match[1] or match[2]).casefold().split())


def _may_be_point(items: Items) -> bool:
    """Whether parentheses may hold coordinates, since it can be no interval."""
    return items.opening + items.closing == "()" and not _is_interval(items)


def _is_range(structure: Any) -> bool:
    return (
        isinstance(structure, Items)
        and len(structure.items) == 2
        and structure.opening in ("(", "[")
    )


def _chain(chain: RelationChain) -> Any:
    """Turns inequalities of one variable between constants into an interval."""
    sides, operators = chain
    if not all(operator in FLIPPED for operator in operators):
        return chain
    if operators[0] in (">", ">="):
        sides = sides[::-1]
        operators = [FLIPPED[operator] for operator in operators[::-1]]
    if len({operator[0] for operator in operators}) > 1:
        return chain
    from sympy import oo as infinity  # imported only here, since it takes half a second

    if _expressions(*sides) and any((-side).is_Symbol for side in sides):  # -1 < -x
        sides = [-side for side in reversed(sides)]
        operators = operators[::-1]
    names = list(map(is_name, sides))
    opening = "(["[operators[0] == "<="]
    closing = ")]"[operators[-1] == "<="]
    if names == [False, True, False] and not (symbols(sides[0]) or symbols(sides[2])):
        return Items(opening, closing, [sides[0], sides[2]])
    if names == [True, False] and not symbols(sides[1]):
        return Items("(", closing, [-infinity, sides[1]])
    if names == [False, True] and not symbols(sides[0]):
        return Items(opening, ")", [sides[0], infinity])
    return RelationChain(sides, operators)


def _split(text: str, pattern: str) -> tuple[list[str], list[str]]:
    """Splits `text` at the matches of `pattern` outside all brackets.

    Returns the pieces and the matches.
    """
    pieces = []
    separators = []
    depth = 0
    start = 0
    position = 0
    separator = re.compile(pattern)
    while position < len(text):
        match = separator.match(text, position) if depth == 0 else None
        if match:
            pieces.append(text[start:position])
            separators.append(match[0])
            position = match.end()
            start = position
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 1
    return [*pieces, text[start:]], separators


def _bracketed(text: str) -> tuple[str, str, str] | None:
    """Opening, content and closing, if one pair of brackets encloses the text."""
    if text.startswith("\\{") and text.endswith("\\}"):
        opening = "{"
        content = text[2:-2]
        closing = "}"
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        opening = text[0]
        content = text[1:-1]
        closing = text[-1]
    else:
        return None
    depth = 0
    for character in content:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
    return opening, content, closing


def _checked(text: str) -> None:
    """Raises AnswerRefused for texts that the grammar misreads.

    It omits boxes and texts in products, and reads numbers side by side as a sum.
    """
    if "\\boxed" in text or "\\fbox" in text:
        raise AnswerRefused("a box inside the answer")
    if any(re.search(r"\d", inside) for inside in _IN_TEXT.findall(text)):
        raise AnswerRefused("digits in words")
    if re.search(r"(?<![_^\d.])\d[\d.]*\s+\.?\d", text):
        raise AnswerRefused("numbers side by side")
    if re.search(r"(?<![A-Za-z_\\\d.])[\d.]+\s*_", text):  # the grammar ignores the index
        raise AnswerRefused("an index of a number")


def _rewritten(text: str) -> str:
    """The text in a form that the grammar reads rightly: signs in products, braces in 10^-2,
    radians for degrees in sin etc.
    """
    text = with_signs(re.sub(r"\^\s*-\s*(\d+|[A-Za-z](?![A-Za-z]))", r"^{-\1}", text))
    if re.search(r"sin|cos|tan|cot|sec|csc", text):
        text = re.sub(rf"(\d+(?:\.\d+)?)\s*{_DEGREES}", r"(\1\\cdot\\pi/180)", text)
    return re.sub(_DEGREES, "", text)


def _expression(text: str, checked: bool) -> Any:
    """The text as a SymPy object with unevaluated sums and powers; None if it does not parse."""
    plain = plain_number(text)
    if plain is not None and not plain.is_decimal:
        from sympy import Rational

        return Rational(plain.value.numerator, plain.value.denominator)
    if checked:
        _checked(text)
    import math_verify  # only when an answer needs it: with SymPy it takes half a second and 50 MiB

    latex = f"${_rewritten(text)}$"
    no_timeout: Any = None  # documented to accept None, but not annotated so
    parsed = math_verify.parse(
        latex,
        [math_verify.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=no_timeout,
    )
    if not parsed:
        return None
    if checked:
        check_value(parsed[0])
        _check_powers(parsed[0])
    from sympy import I

    imaginary = [symbol for symbol in getattr(parsed[0], "free_symbols", ()) if symbol.name == "i"]
    return parsed[0].subs(dict.fromkeys(imaginary, I)) if imaginary else parsed[0]


def _check_powers(expression: Any) -> None:
    """Raises AnswerRefused for 0^0, which SymPy evaluates to 1. check_value has bounded everything that
    is evaluated here.
    """
    from sympy import Pow

    for power in getattr(expression, "atoms", lambda _: ())(Pow):
        sizes = (abs(argument.evalf(30)) for argument in reversed(power.args))
        if not power.free_symbols and all(size < _NOTHING for size in sizes):
            raise AnswerRefused("zero to the power of zero")


def is_function(structure: Any) -> bool:
    return type(getattr(structure, "func", None)).__name__ == "UndefinedFunction"


def is_name(structure: Any) -> bool:
    """Whether it is a variable, a function of variables, or a point of variables."""
    if isinstance(structure, Items):
        return all(map(is_name, structure.items))
    return (
        bool(getattr(structure, "is_Symbol", False))
        or is_function(structure)
        or _is_measure(structure)
    )


def _is_measure(structure: Any) -> bool:
    """Whether it is a product or ratio of names alone, as of lengths in a figure: AB, |AB|,
    \\frac{NO}{BO}, S_{ABC}:S.
    """
    if not (
        getattr(structure, "is_Mul", False)
        or getattr(structure, "is_Pow", False)
        or type(structure).__name__ == "Abs"
    ):
        return False
    return all(part.is_Symbol or part == -1 for part in structure.atoms()) and not getattr(
        -structure, "is_Symbol", False
    )


def symbols(structure: Any) -> set[str]:
    if isinstance(structure, Items):
        return set().union(*map(symbols, structure.items))
    if isinstance(structure, (Union, RelationChain)):
        return set().union(*map(symbols, structure[0]))
    return {symbol.name for symbol in getattr(structure, "free_symbols", ())}


# two expressions with variables must both have a value at this many points to be compared
LEAST_POINTS = 3
_DIGITS = 60
_SAME = Fraction(1, 10**45)  # tolerance for exact values: relative, below 1 absolute
_POINTS = 6
_MAX_BITS = 50_000  # most bits of a value's integer part, and of its fraction

Value = tuple[Fraction, Fraction]
"""Real and imaginary part."""


def values_of(a: Any, b: Any) -> list[tuple[Value, Value]]:
    """Values of two expressions with 60 digits, at fixed points if they have variables.

    Leaves out points at which neither has a value.

    Empty if only one of them has a value at some point.
    """
    names = sorted({symbol.name for symbol in a.free_symbols | b.free_symbols})
    values = []
    for point in range(_POINTS if names else 1):
        coordinates = {name: _coordinate(point, number) for number, name in enumerate(names)}
        x = _value(a, coordinates)
        y = _value(b, coordinates)
        if x is None and y is None:
            continue
        if x is None or y is None:
            return []
        values.append((x, y))
    return values


def equal_values(a: Value, b: Value, decimals: bool) -> bool:
    """Whether exact values are equal up to rounding (absolute below 1), or decimals up to the sixth
    place (relative below 1).
    """
    distance = size_of((a[0] - b[0], a[1] - b[1]))
    size = max(size_of(a), size_of(b))
    if decimals:
        return distance <= SAME_DECIMALS * min(1, size)
    return distance <= _SAME * max(1, size)


def size_of(value: Value) -> Fraction:
    return max(abs(value[0]), abs(value[1]))


def times(a: Value, b: Value) -> Value:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _coordinate(point: int, number: int) -> Fraction:
    """The coordinate of variable `number` at `point`: an unsystematic rational of either sign,
    between 0.3 and 2.7 in absolute value.
    """
    thousandths = 300 + (7919 * (point + 1) + 104729 * (number + 1) * (point + 2)) % 2400
    size = Fraction(thousandths, 1000) + Fraction(1, 1009 + 2 * number)
    return size * (-1) ** (point + number)


def _value(expression: Any, coordinates: dict[str, Fraction]) -> Value | None:
    """The value, or None if it is not finite."""
    import sympy

    # SymPy would factor the radicands of exact numbers, for seconds
    needs_floats = any(power.exp.free_symbols for power in expression.atoms(sympy.Pow))
    substitutions = {}
    for symbol in expression.free_symbols:
        value = sympy.Rational(coordinates[symbol.name])
        if needs_floats:
            value = sympy.Float(value, 2 * _DIGITS)
        substitutions[symbol] = value
    parts = expression.subs(substitutions).doit().evalf(_DIGITS).as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    real, imaginary = map(_fraction, parts)
    return None if real is None or imaginary is None else (real, imaginary)


def _fraction(number: Any) -> Fraction | None:
    if number.is_Rational:
        return Fraction(int(number.p), int(number.q))
    sign, mantissa, exponent, bits = number._mpf_
    # infinite, not a number, or too large
    if (not mantissa and exponent) or abs(exponent) + bits > _MAX_BITS:
        return None
    return Fraction(int(-mantissa if sign else mantissa)) * Fraction(2) ** int(exponent)


# a number in another base: 1010_2
_NUMERAL = re.compile(r"([0-9A-Z]+)_(?:\{(\d{1,2})\}|(\d{1,2}))", re.ASCII)
_BASES = {
    name: str(base)
    for base, name in enumerate(
        "two three four five six seven eight nine ten eleven twelve".split(), 2
    )
}
_BASES |= {"sixteen": "16"}
_BASE_IN_WORDS = re.compile(r"_\s*\{?\s*\\text\w*\s*\{\s*(?:base\s+)?([a-z]+|\d{1,2})\s*\}\s*\}?")
_MODULO = re.compile(r"\s*(?:\\p?mod|\\bmod|\(\\?mod)(?![a-z]).*")
_CHOICE_WITH_TEXT = re.compile(
    r"(?:\\text\w*\s*\{\s*\(?([A-J])\)?[.:]?\s*\}|\(([A-J])\))(?:\\?[ "
    r",;:~]|\\quad)+(?!(?:or|and)\b|[\\({]*[A-J]\b).+"
)
# AB = 5, \angle ABC = 60, [ABC] = 12: the grammar reads the names of points as products
_MEASURED = re.compile(
    r"\A(?:m?\s*\\(?:measured)?angle\s*|\\overline\s*\{|[|\[])?[A-Z]{2,4}[|\]}]?\s*=\s*(?=[^=]+\Z)"
)
_DECIMAL = re.compile(r"-?(?:0[.,]\d{3}|\d+[.,](?:\d{1,2}|\d{4,}))", re.ASCII)
_ABOUT = Fraction(1, 100)  # relative difference that \approx allows


def equal(reference: str, candidate: str) -> bool:
    r"""Whether two cleaned answers are mathematically equal.

    Both are read into structures, whose expressions are compared by value. The verdict depends on
    the two texts alone and takes bounded time.

    math-verify's own `verify` (0.9.0) is not used, for three reasons. It takes the right side of
    "=" as the answer and drops the left ("7 = 5" is 5). It calls 2^{\infty} equal to some numbers;
    these differ between processes, since SymPy's simplification depends on the order of hashes. It
    rounds decimals to 6 places whatever their size (0.0000001 equals 0.0000002).

    Raises AnswerRefused if the candidate is outside the limits, or if it is infinite and the reference is
    finite.
    """
    if candidate == reference:
        return True
    word = word_of(reference)
    if word and word == (word_of(candidate) or word_of(_CHOICE_WITH_TEXT.sub(r"\1\2", candidate))):
        return True
    # \text{not } 5, which the grammar reads as a product
    if DENIED.search(candidate) and not DENIED.search(reference):
        return False
    if "=" not in reference:
        candidate = _MEASURED.sub("", candidate)
    if not _MODULO.search(reference):  # 236 \pmod{1000}
        candidate = _MODULO.sub("", candidate)
    gold, gold_percent = _percent(reference)
    answer, percent = _percent(candidate)
    if gold_percent != percent:  # 50% is 0.5; it is 50 if the question asked for percent
        return equal(gold, answer) or equal(*_hundredth(gold, answer, gold_percent))
    gold, answer = _without_base(gold, answer)
    # 1,5 and 1.5, but not 1,234 and 1.234; 1,5 and 5,1 are lists
    if _DECIMAL.fullmatch(gold) and _DECIMAL.fullmatch(answer) and ("," in gold) != ("," in answer):
        gold = gold.replace(",", ".")
        answer = answer.replace(",", ".")
    decided = plain_equal(plain_number(gold), plain_number(answer))
    if decided is not None:
        return decided
    check_text(answer)
    if _same(read_reference(gold), read(answer, checked=True)):
        return True
    as_variables = [_UPRIGHT_LETTER.sub(r"{\1}", text) for text in (gold, answer)]
    if as_variables == [gold, answer]:
        return False
    return _same(read_reference(as_variables[0]), read(as_variables[1], checked=True))


def _percent(answer: str) -> tuple[str, bool]:
    if not answer.endswith("%"):
        return answer, False
    bare = answer.removesuffix("%").removesuffix("\\").rstrip()
    if bare.endswith("%"):
        raise AnswerRefused("percents of percents")
    return bare, True


def _without_base(gold: str, candidate: str) -> tuple[str, str]:
    """Both answers without the base of a numeral (1010_2).

    A candidate without a base has the reference's, which the question has fixed. A reference
    without a base is decimal. Raises AnswerRefused if the bases differ.
    """
    gold_digits, gold_base = _digits_and_base(gold)
    digits, base = _digits_and_base(candidate)
    if base is None or base == (10 if gold_base is None else gold_base):
        return gold_digits, digits
    is_numeral = 2 <= base <= 36 and all(int(digit, 36) < base for digit in digits)
    if gold_base is not None or not is_numeral:
        raise AnswerRefused("another base")
    return gold_digits, str(int(digits[:MAX_DIGITS], base))


def _digits_and_base(text: str) -> tuple[str, int | None]:
    """The digits and the base of a numeral; the text and None if it has no base."""
    text = _BASE_IN_WORDS.sub(lambda base: f"_{{{_BASES.get(base[1], base[1])}}}", text)
    numeral = _NUMERAL.fullmatch(text)
    if numeral is None:
        return text, None
    return numeral[1], int(numeral[2] or numeral[3])


def _hundredth(gold: str, candidate: str, gold_percent: bool) -> tuple[str, str]:
    """Both answers, with the one in percent divided by a hundred."""
    if gold_percent:
        return rf"\frac{{{gold}}}{{100}}", candidate
    return gold, rf"\frac{{{candidate}}}{{100}}"


def _same(gold: Any, candidate: Any) -> bool:
    """Whether two structures are equal."""
    if gold is None or candidate is None:
        return False
    if isinstance(gold, Word) or isinstance(candidate, Word):
        return type(gold) is type(candidate) and gold == candidate
    if isinstance(candidate, RelationChain) or isinstance(gold, RelationChain):
        return _same_chains(gold, candidate)
    if isinstance(gold, Union) or isinstance(candidate, Union):
        return type(gold) is type(candidate) and _matched(gold.parts, candidate.parts)
    if isinstance(gold, Items) or isinstance(candidate, Items):
        return _same_sequences(gold, candidate)
    return _same_objects(gold, candidate)


def _same_sequences(gold: Any, candidate: Any) -> bool:
    gold = _as_sequence(gold)
    candidate = _as_sequence(candidate)
    if "{" in (gold.opening, candidate.opening) or gold.opening == candidate.opening == "":
        return (
            gold.opening in ("{", "")
            and candidate.opening in ("{", "")
            and _matched(gold.items, candidate.items)
        )
    brackets = {gold.opening + gold.closing, candidate.opening + candidate.closing}
    # 2,5 may be the point (2,5), but not an interval
    point = brackets == {"()", ""} and not _is_interval(gold)
    if len(brackets) > 1 and not point and not (gold.opening == "" and brackets == {"", "[]"}):
        return False
    return len(gold.items) == len(candidate.items) and all(map(_same, gold.items, candidate.items))


def _is_interval(items: Items) -> bool:
    """Whether items in round brackets must be an interval, because an end is infinite."""
    return any(getattr(item, "is_infinite", False) for item in items.items)


def _as_sequence(structure: Any) -> Items:
    """The items of a set that the grammar has made (±2 is one), or the structure as a single item."""
    if isinstance(structure, Items):
        return structure
    items = list(structure.args) if getattr(structure, "is_FiniteSet", False) else [structure]
    return Items("", "", items)


def _matched(golds: Sequence[Any], candidates: Sequence[Any]) -> bool:
    """Whether the items match one to one, in any order. A point may be named twice."""
    unmatched = []
    for number, candidate in enumerate(candidates):
        if not (isinstance(candidate, Items) and candidate in candidates[:number]):
            unmatched.append(candidate)
    if len(golds) != len(unmatched):
        return False
    for gold in golds:
        for index, candidate in enumerate(unmatched):
            if _same(gold, candidate):
                del unmatched[index]
                break
        else:
            return False
    return True


def _same_chains(gold: Any, candidate: Any) -> bool:
    if not isinstance(candidate, RelationChain):  # the reference is x = 5 and the answer is 5
        return (
            gold.operators == ["="] and is_name(gold.sides[0]) and _same(gold.sides[1], candidate)
        )
    if not isinstance(gold, RelationChain):
        return _leads_to(gold, candidate)
    flipped = [FLIPPED.get(operator, operator) for operator in reversed(candidate.operators)]
    for form in (candidate, RelationChain(candidate.sides[::-1], flipped)):
        # as many operators, so as many sides
        if gold.operators == form.operators and all(map(_same, gold.sides, form.sides)):
            return True
    return gold.operators == candidate.operators == ["="] and _same_equations(
        gold.sides, candidate.sides
    )


def _leads_to(gold: Any, candidate: RelationChain) -> bool:
    """Whether a chain of equations ends in the answer `gold`, and every side before it names the
    answer or has its value. The chain may go on with an approximation (1/3 ≈ 0.333).
    """
    if (
        len(candidate.sides) > 1
        and candidate.operators[-1] == "~"
        and not _same(gold, candidate.sides[-1])
        and _about(gold, candidate.sides[-1])
    ):
        candidate = RelationChain(candidate.sides[:-1], candidate.operators[:-1])
    if any(operator not in ("=", "~") for operator in candidate.operators) or not _same(
        gold, candidate.sides[-1]
    ):
        return False
    for side, operator in zip(candidate.sides, candidate.operators):
        if _is_name_of(side, gold) or _same(gold, side):
            continue
        if operator != "~" or not _about(gold, side):
            return False
    return True


def _is_name_of(name: Any, structure: Any) -> bool:
    """Whether `name` may stand for `structure`: f(x) may be x + 1, but x may not."""
    return (is_name(name) or _joins_names(name)) and (
        is_function(name) or not symbols(name) & symbols(structure)
    )


def _joins_names(structure: Any) -> bool:
    """Whether it is a sum of variables or a function of some, as in m + n = 371 and \\sin x = 1.

    (2x is neither: 2x = 6 does not state 6.)
    """
    if getattr(structure, "is_Add", False):
        return all(argument.is_Symbol for argument in structure.args)
    return bool(getattr(structure, "is_Function", False) and structure.free_symbols)


def _same_equations(gold: Sequence[Any], candidate: Sequence[Any]) -> bool:
    """Whether one equation is the other times a constant."""
    if not _expressions(*gold, *candidate):
        return False
    values = []
    for x, y in values_of(gold[0] - gold[1], candidate[0] - candidate[1]):
        if size_of(x) and size_of(y):
            values.append((x, y))
    if len(values) < LEAST_POINTS:
        return False
    first, second = values[0]
    return all(
        equal_values(times(x, second), times(first, y), decimals=False) for x, y in values[1:]
    )


def _expressions(*structures: Any) -> bool:
    from sympy import Expr

    return all(isinstance(structure, Expr) for structure in structures)


def _about(gold: Any, candidate: Any) -> bool:
    if not _expressions(gold, candidate) or symbols(gold) or symbols(candidate):
        return False
    return all(
        size_of((a[0] - b[0], a[1] - b[1])) <= _ABOUT * size_of(a)
        for a, b in values_of(gold, candidate)
    )


def _same_objects(gold: Any, candidate: Any) -> bool:
    """Compares expressions by value, matrices by element, and other objects of the grammar (ℝ, ∅)
    by identity.
    """
    are_matrices = [getattr(structure, "is_Matrix", False) for structure in (gold, candidate)]
    if any(are_matrices):
        return (
            all(are_matrices) and gold.shape == candidate.shape and all(map(_same, gold, candidate))
        )
    if not _expressions(gold, candidate):
        return type(gold) is type(candidate) and gold == candidate
    if is_function(gold) and gold == candidate:  # f(x), which has no value
        return True
    import sympy

    if candidate.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):  # an infinity equals only itself
        return candidate in (sympy.oo, -sympy.oo) and candidate == gold
    if candidate.is_Rational and gold.is_Rational:
        return candidate == gold
    decimals = gold.has(sympy.Float) or candidate.has(sympy.Float)
    values = values_of(gold, candidate)
    needed = LEAST_POINTS if gold.free_symbols or candidate.free_symbols else 1
    return len(values) >= needed and all(equal_values(a, b, decimals) for a, b in values)
