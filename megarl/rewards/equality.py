"""Whether two answers are the same mathematics.

The structure (lists, intervals, unions, chains of relations) is read here, from the text; what stands between, an expression or a matrix,
is parsed by math-verify's LaTeX grammar. Expressions are compared by their values, at 60 digits, those with variables at fixed points:
the verdict is a function of the two texts, in bounded time.

math-verify's own `verify` (0.9.0) is not used: it takes what stands right of "=" for the answer and drops the left ("7 = 5" is 5), calls
2^{\\infty} equal to some numbers, others in each process, as SymPy's simplification follows the order of hashes, and rounds decimals to 6
places whatever their size (0.0000001 is 0.0000002). Of its grammar (latex2sympy2_extended 1.11.0), `_checked` and `_rewritten` keep off
what it reads wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, Optional

from megarl.rewards.limits import MAX_DIGITS, Refused, check_text, check_value

_DIGITS = 60  # of the values compared
_SAME = Fraction(1, 10**45)  # relative, and absolute below 1, of exact values
_SAME_DECIMALS = Fraction(1_000_001, 10**12)  # where one is a decimal: a millionth, and room for binary rounding; relative below 1
_ABOUT = Fraction(1, 100)  # relative: the sides of \approx
_POINTS = 6  # at which expressions with variables are compared
_LEAST_POINTS = 3  # of them at which both have a value
_MAX_PARTS = 32
_MAX_BITS = 50_000  # of a value, and of what is below its point

_PLAIN = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?(?:/(\d+)|[eE]([+-]?\d{1,3}))?", re.ASCII)
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?", re.ASCII)
_MIXED = re.compile(r"(-?)(\d+)\s+(\d+)/(\d+)", re.ASCII)
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|operatorname)\s*"
_IN_TEXT = re.compile(_TEXT + r"\{([^{}]*)\}")
_WORD = re.compile(rf"\(?(?:{_TEXT}\{{\s*\(?([A-Za-z][A-Za-z '-]*)\)?\.?\s*\}}|([A-Za-z][A-Za-z '-]*))\)?\.?")
_LONGEST_PRODUCT = 4  # letters without a command: xyz is a product, east a direction
_DEGREES = r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)"
_RELATION = r"\\(?:leq?|geq?|lt|gt|neq?|approx|leqslant|geqslant)(?![A-Za-z])|[≤≥≠≈]|!=|<=|>=|[<>=]"
_JOIN = r"[,;]|\\text\s*\{\s*(?:and|or)\s*\}|\\(?:quad|qquad)(?![A-Za-z])|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
_OPERATORS = {"le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">", "ne": "!=",
              "neq": "!=", "approx": "~", "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~"}  # fmt: skip
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_SYMBOLS = {"π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "∪": r"\cup ", "∈": r"\in ", "−": "-"}


Value = tuple[Fraction, Fraction]
"""Real and imaginary part."""


class PlainNumber(NamedTuple):
    value: Fraction
    is_decimal: bool


class Items(NamedTuple):
    """Items in brackets: a point, an interval or, in braces, a set; bare (opening "") what is separated by commas."""

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


def equal(reference: str, candidate: str) -> bool:
    """Mathematical equality of two cleaned answers. Raises: Refused if the candidate is outside the limits, or is no finite thing where the
    reference is one."""
    if candidate == reference:
        return True
    if (word := _word(candidate)) and word == _word(reference):
        return True
    (gold, gold_percent), (found, percent) = _percent(reference), _percent(candidate)
    if gold_percent != percent:  # 50% is 0.5, and 50 where percents were asked for
        return any(equal(a, b) for a, b in ((gold, found), _hundredth(gold, found, gold_percent)))
    decided = plain_equal(plain_number(gold), plain_number(found))
    if decided is not None:
        return decided
    check_text(found)
    return _same(_read_reference(gold), _read(found, checked=True))


def plain_number(text: str) -> Optional[PlainNumber]:
    """An integer, decimal or quotient of integers, thousands separated or not, as an exact rational; None for anything else."""
    if len(text) > MAX_DIGITS:
        return None
    if repeating := _REPEATING.fullmatch(text):
        return PlainNumber(_repeating(*repeating.groups()), False)
    if mixed := _MIXED.fullmatch(text):
        sign, whole, over, under = mixed.groups()
        return PlainNumber((int(whole) + Fraction(int(over), int(under))) * (-1 if sign else 1), False) if int(under) else None
    match = _PLAIN.fullmatch(text)
    if match is None or (match[2] is None and match[3] is None):
        return None
    sign, whole, decimals, divisor, exponent = match.groups()
    if divisor is not None and (decimals is not None or int(divisor) == 0):
        return None
    value = Fraction((whole or "0").replace(",", "") + (decimals or "")) / int(divisor or 1) * Fraction(10) ** int(exponent or 0)
    return PlainNumber(-value if sign == "-" else value, decimals is not None)


def plain_equal(a: Optional[PlainNumber], b: Optional[PlainNumber]) -> Optional[bool]:
    """Equality by exact arithmetic, up to the sixth place where one is a decimal; None where one is no plain number."""
    if a is None or b is None:
        return None
    return a.value == b.value or ((a.is_decimal or b.is_decimal) and _near(a.value, b.value, _SAME_DECIMALS))


def _near(a: Fraction, b: Fraction, tolerance: Fraction) -> bool:
    return abs(a - b) <= tolerance * min(1, max(abs(a), abs(b)))


def _repeating(sign: str, whole: str, fixed: str, repeated: str) -> Fraction:
    scale = 10 ** len(fixed)
    value = Fraction(int((whole or "0") + fixed), scale) + Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    return -value if sign else value


def _percent(answer: str) -> tuple[str, bool]:
    bare = answer.removesuffix("%").removesuffix("\\").rstrip() if answer.endswith("%") else answer
    return bare, bare != answer


def _hundredth(gold: str, found: str, gold_percent: bool) -> tuple[str, str]:
    """Both as plain parts of one; the percentage divided by a hundred."""
    return (rf"\frac{{{gold}}}{{100}}", found) if gold_percent else (gold, rf"\frac{{{found}}}{{100}}")


# --- reading ---


@lru_cache(maxsize=1024)
def _read_reference(text: str) -> Any:
    return _read(text, checked=False)


def _read(text: str, checked: bool) -> Any:
    """The structure of an answer; None where it cannot be read. With `checked`, it is a model's: Raises Refused."""
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    text = re.sub(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|(?<!\\)\\[,!:; ]|~", " ", text)
    return _structure(text.replace("**", "^").replace("\\$", "").replace("$", "").replace("\n", " "), checked)


def _structure(text: str, checked: bool) -> Any:
    text = text.strip().removeprefix("+")
    if (word := _word(text)) and (text.startswith("\\") or len(text) > _LONGEST_PRODUCT or " " in text):
        return Word(word)

    def parts(pieces: Sequence[str]) -> list[Any]:
        if len(pieces) > _MAX_PARTS:
            raise Refused(f"more than {_MAX_PARTS} parts")
        return [_structure(piece, checked) for piece in pieces]

    pieces, _ = _split(text, _JOIN)
    if len(pieces) > 1 and plain_number(text) is None:
        return Items("", "", parts([piece for piece in pieces if piece.strip()]))
    sides, operators = _split(text, _RELATION)
    if operators:
        return _chain(Chain(parts(sides), [_OPERATORS.get(o.removeprefix("\\"), o) for o in operators]))
    members, _ = _split(text, r"\\in(?![A-Za-z])")
    if len(members) == 2:
        return _structure(members[1], checked)
    unions, _ = _split(text, r"\\cup(?![A-Za-z])")
    if len(unions) > 1:
        return Union(parts(unions))
    if inside := _bracketed(text):
        opening, content, closing = inside
        items, _ = _split(content, r"[,;]")
        if len(items) > 1 or opening == "{":
            return Items(opening, closing, parts(items))
    return _expression(text, checked)


def _word(text: str) -> str:
    """A name or a choice, as it is compared; empty if the text is none."""
    match = _WORD.fullmatch(text)
    return " ".join((match[1] or match[2]).casefold().split()) if match else ""


def _chain(chain: Chain) -> Any:
    """Inequalities of one variable between constants as the interval that they say."""
    if all(operator in _FLIPPED for operator in chain.operators):
        sides, operators = chain
        if operators[0] in (">", ">="):
            sides, operators = sides[::-1], [_FLIPPED[operator] for operator in operators[::-1]]
        if len({operator[0] for operator in operators}) == 1:
            infinity = _sympy().oo
            names = [_is_name(side) for side in sides]
            if names == [False, True, False] and not (_symbols(sides[0]) or _symbols(sides[2])):
                return Items("(["[operators[0] == "<="], ")]"[operators[1] == "<="], [sides[0], sides[2]])
            if names == [True, False] and not _symbols(sides[1]):
                return Items("(", ")]"[operators[0] == "<="], [-infinity, sides[1]])
            if names == [False, True] and not _symbols(sides[0]):
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


def _bracketed(text: str) -> Optional[tuple[str, str, str]]:
    """Opening, content and closing of a text that one pair of brackets holds together."""
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
    """Raises: Refused for what the grammar reads as something else: it takes a box or a text out of a product, and spaces for sums."""
    if "\\boxed" in text or "\\fbox" in text:
        raise Refused("a box inside the answer")
    if any(re.search(r"\d", inside) for inside in _IN_TEXT.findall(text)):
        raise Refused("digits in words")
    if re.search(r"(?<![_^\d.])\d[\d.]*\s+\.?\d", text):
        raise Refused("numbers side by side")


def _rewritten(text: str) -> str:
    """As the grammar reads it rightly: 3(4) is no mixed number, the degrees of sines are not radians."""
    text = re.sub(r"(?<![\w.^{\\])(\d+(?:\.\d+)?)\s*\(", r"\1\\cdot (", text)
    if re.search(r"sin|cos|tan|cot|sec|csc", text):
        text = re.sub(rf"(\d+(?:\.\d+)?)\s*{_DEGREES}", r"(\1\\cdot\\pi/180)", text)
    return re.sub(_DEGREES, "", text)


def _expression(text: str, checked: bool) -> Any:
    """A SymPy object by the LaTeX grammar alone, sums and powers not evaluated; None if it does not parse."""
    plain = plain_number(text)
    if plain is not None and not plain.is_decimal:
        return _sympy().Rational(plain.value.numerator, plain.value.denominator)
    if checked:
        _checked(text)
    import math_verify  # half a second and 50 MiB: only once an answer needs it

    latex = f"${_rewritten(text)}$"
    found = math_verify.parse(latex, [math_verify.LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        return None
    if checked:
        check_value(found[0])
    sympy = _sympy()
    imaginary = [symbol for symbol in getattr(found[0], "free_symbols", ()) if symbol.name == "i"]
    return found[0].subs({symbol: sympy.I for symbol in imaginary}) if imaginary else found[0]


def _sympy() -> Any:
    import sympy

    return sympy


# --- comparing ---


def _same(gold: Any, found: Any) -> bool:
    """Of two structures."""
    if gold is None or found is None:
        return False
    if isinstance(gold, Word) or isinstance(found, Word):
        return isinstance(gold, Word) and isinstance(found, Word) and gold == found
    if isinstance(found, Chain) or isinstance(gold, Chain):
        return _same_chains(gold, found)
    if isinstance(gold, Union) or isinstance(found, Union):
        return isinstance(gold, Union) and isinstance(found, Union) and _matched(gold.parts, found.parts)
    if isinstance(gold, Items) or isinstance(found, Items):
        return _same_sequences(gold, found)
    return _same_objects(gold, found)


def _same_sequences(gold: Any, found: Any) -> bool:
    gold, found = _as_sequence(gold), _as_sequence(found)
    if "{" in (gold.opening, found.opening) or gold.opening == found.opening == "":
        return gold.opening in ("{", "") and found.opening in ("{", "") and _matched(gold.items, found.items)
    bracketed = gold.opening and found.opening
    if bracketed and (gold.opening, gold.closing) != (found.opening, found.closing):
        return False
    return len(gold.items) == len(found.items) and all(map(_same, gold.items, found.items))


def _as_sequence(structure: Any) -> Items:
    """A set that the grammar gave (of ±2), or one item alone."""
    if isinstance(structure, Items):
        return structure
    items = list(structure.args) if getattr(structure, "is_FiniteSet", False) else [structure]
    return Items("", "", items)


def _matched(golds: Sequence[Any], founds: Sequence[Any]) -> bool:
    """In any order, one to one."""
    left = list(founds)
    if len(golds) != len(left):
        return False
    for gold in golds:
        match = next((index for index, found in enumerate(left) if _same(gold, found)), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_chains(gold: Any, found: Any) -> bool:
    if not isinstance(found, Chain):  # x = 5 was asked for, and 5 was said
        return gold.operators == ["="] and _is_name(gold.sides[0]) and _same(gold.sides[1], found)
    if not isinstance(gold, Chain):
        return _leads_to(gold, found)
    if gold.operators == found.operators and len(gold.sides) == len(found.sides) and all(map(_same, gold.sides, found.sides)):
        return True
    flipped = [{"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(operator, operator) for operator in reversed(found.operators)]
    if gold.operators == flipped and len(gold.sides) == len(found.sides) and all(map(_same, gold.sides, reversed(found.sides))):
        return True
    return gold.operators == found.operators == ["="] and _same_equations(gold.sides, found.sides)


def _leads_to(gold: Any, found: Chain) -> bool:
    """A chain of equations that ends in the answer: every side before it is a name for it, or has its value."""
    if any(operator not in ("=", "~") for operator in found.operators) or not _same(gold, found.sides[-1]):
        return False
    for side, operator in zip(found.sides, found.operators):
        if not (_is_name_of(side, gold) or _same(gold, side) or (operator == "~" and _about(gold, side))):
            return False
    return True


def _is_name_of(name: Any, structure: Any) -> bool:
    """f(x) may be x + 1, but x may not."""
    return _is_name(name) and (_is_function(name) or not _symbols(name) & _symbols(structure))


def _is_function(structure: Any) -> bool:
    return type(getattr(structure, "func", None)).__name__ == "UndefinedFunction"


def _is_name(structure: Any) -> bool:
    """A variable, a function of variables, or a point of variables."""
    if isinstance(structure, Items):
        return all(map(_is_name, structure.items))
    return bool(getattr(structure, "is_Symbol", False)) or _is_function(structure)


def _symbols(structure: Any) -> set[str]:
    if isinstance(structure, (Items, Union, Chain)):
        return set().union(*map(_symbols, structure[-1] if isinstance(structure, Items) else structure[0]))
    return {symbol.name for symbol in getattr(structure, "free_symbols", ())}


def _same_equations(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    """One is the other times a constant."""
    if not _expressions(*gold, *found):
        return False
    values = [(x, y) for x, y in _values(gold[0] - gold[1], found[0] - found[1]) if _size(x) and _size(y)]
    if len(values) < _LEAST_POINTS:
        return False
    (first, second), *rest = values
    return all(_equal_values(_times(x, second), _times(first, y), decimals=False) for x, y in rest)


def _expressions(*structures: Any) -> bool:
    return all(isinstance(structure, _sympy().Expr) for structure in structures)


def _about(gold: Any, found: Any) -> bool:
    if not _expressions(gold, found) or _symbols(gold) or _symbols(found):
        return False
    return all(_size((a[0] - b[0], a[1] - b[1])) <= _ABOUT * _size(a) for a, b in _values(gold, found))


def _same_objects(gold: Any, found: Any) -> bool:
    """Of expressions, by value; of matrices, by element; of what else the grammar knows (ℝ, ∅), by being the same."""
    if getattr(gold, "is_Matrix", False) or getattr(found, "is_Matrix", False):
        both = getattr(gold, "is_Matrix", False) and getattr(found, "is_Matrix", False)
        return both and gold.shape == found.shape and all(map(_same, gold, found))
    if not _expressions(gold, found):
        return type(gold) is type(found) and gold == found
    sympy = _sympy()
    if found.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):  # what is not finite is equal to itself, as it stands, and to nothing else
        return found in (sympy.oo, -sympy.oo) and found == gold
    if found.is_Rational and gold.is_Rational:
        return found == gold
    decimals = gold.has(sympy.Float) or found.has(sympy.Float)
    values = _values(gold, found)
    needed = _LEAST_POINTS if gold.free_symbols or found.free_symbols else 1
    return len(values) >= needed and all(_equal_values(a, b, decimals) for a, b in values)


def _equal_values(a: Value, b: Value, decimals: bool) -> bool:
    """Exact values may be off by rounding, which is absolute below 1; of decimals the sixth place is meant, of small ones too."""
    distance, size = _size((a[0] - b[0], a[1] - b[1])), max(_size(a), _size(b))
    return distance <= (_SAME_DECIMALS * min(1, size) if decimals else _SAME * max(1, size))


def _size(value: Value) -> Fraction:
    return max(abs(value[0]), abs(value[1]))


def _times(a: Value, b: Value) -> Value:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _values(a: Any, b: Any) -> list[tuple[Value, Value]]:
    """Values of two expressions, at fixed points of their variables, where they have any; left out where neither has a value."""
    names = sorted({symbol.name for symbol in a.free_symbols | b.free_symbols})
    found = []
    for point in range(_POINTS if names else 1):
        where = {name: _coordinate(point, number) for number, name in enumerate(names)}
        x, y = _value(a, where), _value(b, where)
        if x is None and y is None:
            continue
        if x is None or y is None:
            return []
        found.append((x, y))
    return found


def _coordinate(point: int, number: int) -> Fraction:
    """Rationals of either sign, from 0.3 to 2.7 in size, with no relation between them."""
    size = Fraction(300 + (7919 * (point + 1) + 104729 * (number + 1) * (point + 2)) % 2400, 1000) + Fraction(1, 1009 + 2 * number)
    return size if (point + number) % 2 == 0 else -size


def _value(expression: Any, where: dict[str, Fraction]) -> Optional[Value]:
    """None where it has no finite value."""
    sympy = _sympy()
    at = {symbol: sympy.Rational(where[symbol.name].numerator, where[symbol.name].denominator) for symbol in expression.free_symbols}
    parts = expression.subs(at).doit().evalf(_DIGITS).as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    found = [_fraction(part) for part in parts]
    return None if None in found else (found[0], found[1])


def _fraction(number: Any) -> Optional[Fraction]:
    if number.is_Rational:
        return Fraction(int(number.p), int(number.q))
    sign, mantissa, exponent, bits = number._mpf_
    if not mantissa and exponent or abs(exponent) + bits > _MAX_BITS:  # infinite or no number; or too large to write down
        return None
    return Fraction(int(-mantissa if sign else mantissa)) * Fraction(2) ** int(exponent)
