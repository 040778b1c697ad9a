"""Whether two answers are mathematically equal.

Both are read into structures (megarl.rewards.structure), whose expressions are compared by value (megarl.rewards.values). The verdict
depends on the two texts alone and takes bounded time.

math-verify's own `verify` (0.9.0) is not used. It takes what stands right of "=" as the answer and drops the left ("7 = 5" is 5). It calls
2^{\\infty} equal to some numbers, which differ between processes, since SymPy's simplification depends on the order of hashes. It rounds
decimals to 6 places whatever their size (0.0000001 is 0.0000002).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megarl.rewards.extract import DENIED
from megarl.rewards.limits import MAX_DIGITS, Refused, check_text
from megarl.rewards.plain_numbers import plain_equal, plain_number
from megarl.rewards.structure import FLIPPED, Chain, Items, Union, Word, is_function, is_name, read, read_reference, symbols, word_of
from megarl.rewards.values import LEAST_POINTS, equal_values, size_of, times, values_of

_NUMERAL = re.compile(r"([0-9A-Z]+)_(?:\{(\d{1,2})\}|(\d{1,2}))", re.ASCII)  # of a base: 1010_2
_BASES = {name: str(base) for base, name in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)}
_BASES |= {"sixteen": "16"}
_BASE_IN_WORDS = re.compile(r"_\s*\{?\s*\\text\w*\s*\{\s*(?:base\s+)?([a-z]+|\d{1,2})\s*\}\s*\}?")
_MODULO = re.compile(r"\s*(?:\\p?mod|\\bmod|\(\\?mod)(?![a-z]).*")
_CHOICE_WITH_TEXT = re.compile(
    r"(?:\\text\w*\s*\{\s*\(?([A-J])\)?[.:]?\s*\}|\(([A-J])\))(?:\\?[ ,;:~]|\\quad)+(?!(?:or|and)\b|[\\({]*[A-J]\b).+"
)
_MEASURED = re.compile(  # AB = 5, \angle ABC = 60, [ABC] = 12: a name of points, which the grammar reads as a product
    r"\A(?:m?\s*\\(?:measured)?angle\s*|\\overline\s*\{|[|\[])?[A-Z]{2,4}[|\]}]?\s*=\s*(?=[^=]+\Z)"
)
_ABOUT = Fraction(1, 100)  # relative difference that \approx allows


def equal(reference: str, candidate: str) -> bool:
    """Mathematical equality of two cleaned answers. Raises Refused if the candidate is outside the limits, or not finite though the
    reference is."""
    if candidate == reference:
        return True
    word = word_of(reference)
    if word and word == (word_of(candidate) or word_of(_CHOICE_WITH_TEXT.sub(r"\1\2", candidate))):
        return True
    if DENIED.search(candidate) and not DENIED.search(reference):  # \text{not } 5, which the grammar reads as a product
        return False
    if "=" not in reference:
        candidate = _MEASURED.sub("", candidate)
    if not _MODULO.search(reference):  # 236 \pmod{1000}
        candidate = _MODULO.sub("", candidate)
    (gold, gold_percent), (found, percent) = _percent(reference), _percent(candidate)
    if gold_percent != percent:  # 50% is 0.5, or 50 if the question asked for percent
        return any(equal(a, b) for a, b in ((gold, found), _hundredth(gold, found, gold_percent)))
    gold, found = _without_base(gold, found)
    decided = plain_equal(plain_number(gold), plain_number(found))
    if decided is not None:
        return decided
    check_text(found)
    return _same(read_reference(gold), read(found, checked=True))


def _percent(answer: str) -> tuple[str, bool]:
    bare = answer.removesuffix("%").removesuffix("\\").rstrip() if answer.endswith("%") else answer
    if bare.endswith("%"):
        raise Refused("percents of percents")
    return bare, bare != answer


def _without_base(gold: str, found: str) -> tuple[str, str]:
    """Both without a numeral's base (1010_2). An answer without one has the reference's, which the question has fixed; a reference without
    one is decimal. Raises Refused if the bases differ."""
    gold, found = (_BASE_IN_WORDS.sub(lambda base: f"_{{{_BASES.get(base[1], base[1])}}}", text) for text in (gold, found))
    numerals = [_NUMERAL.fullmatch(text) for text in (gold, found)]
    base, stated = (int(numeral[2] or numeral[3]) if numeral else 10 for numeral in numerals)
    if numerals[1] and base != stated:
        if numerals[0] or not 2 <= stated <= 36 or any(int(digit, 36) >= stated for digit in numerals[1][1]):
            raise Refused("another base")
        return gold, str(int(numerals[1][1][:MAX_DIGITS], stated))
    gold, found = (numeral[1] if numeral else text for numeral, text in zip(numerals, (gold, found)))
    return gold, found


def _hundredth(gold: str, found: str, gold_percent: bool) -> tuple[str, str]:
    """Both as numbers: divides the one that is a percentage by a hundred."""
    return (rf"\frac{{{gold}}}{{100}}", found) if gold_percent else (gold, rf"\frac{{{found}}}{{100}}")


def _same(gold: Any, found: Any) -> bool:
    """Whether two structures are equal."""
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
    brackets = {gold.opening + gold.closing, found.opening + found.closing}
    point = brackets == {"()", ""} and not _is_interval(gold)  # 2,5 may be the point (2,5), but no interval
    if len(brackets) > 1 and not point and not (gold.opening == "" and brackets == {"", "[]"}):
        return False
    return len(gold.items) == len(found.items) and all(map(_same, gold.items, found.items))


def _is_interval(items: Items) -> bool:
    """Whether items in round brackets cannot be a point: an end is infinite."""
    return any(getattr(item, "is_infinite", False) for item in items.items)


def _as_sequence(structure: Any) -> Items:
    """The items of a set by the grammar (as of ±2), or the structure as a single item."""
    if isinstance(structure, Items):
        return structure
    items = list(structure.args) if getattr(structure, "is_FiniteSet", False) else [structure]
    return Items("", "", items)


def _matched(golds: Sequence[Any], founds: Sequence[Any]) -> bool:
    """Whether the items match one to one, in any order."""
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
    if not isinstance(found, Chain):  # the reference is x = 5, the answer 5
        return gold.operators == ["="] and is_name(gold.sides[0]) and _same(gold.sides[1], found)
    if not isinstance(gold, Chain):
        return _leads_to(gold, found)
    if gold.operators == found.operators and len(gold.sides) == len(found.sides) and all(map(_same, gold.sides, found.sides)):
        return True
    flipped = [FLIPPED.get(operator, operator) for operator in reversed(found.operators)]
    if gold.operators == flipped and len(gold.sides) == len(found.sides) and all(map(_same, gold.sides, reversed(found.sides))):
        return True
    return gold.operators == found.operators == ["="] and _same_equations(gold.sides, found.sides)


def _leads_to(gold: Any, found: Chain) -> bool:
    """Whether a chain of equations ends in the answer, and every side before it names the answer or has its value. It may go on with
    what the answer is about (1/3 ≈ 0.333)."""
    if len(found.sides) > 1 and found.operators[-1] == "~" and not _same(gold, found.sides[-1]) and _about(gold, found.sides[-1]):
        found = Chain(found.sides[:-1], found.operators[:-1])
    if any(operator not in ("=", "~") for operator in found.operators) or not _same(gold, found.sides[-1]):
        return False
    for side, operator in zip(found.sides, found.operators):
        if not (_is_name_of(side, gold) or _same(gold, side) or (operator == "~" and _about(gold, side))):
            return False
    return True


def _is_name_of(name: Any, structure: Any) -> bool:
    """Whether `name` may stand for `structure`: f(x) may be x + 1, but x may not."""
    return (is_name(name) or _joins_names(name)) and (is_function(name) or not symbols(name) & symbols(structure))


def _joins_names(structure: Any) -> bool:
    """Whether it is a sum of variables or a function of some, as in m + n = 371 and \\sin x = 1. (2x = 6 does not say 6.)"""
    if getattr(structure, "is_Add", False):
        return all(argument.is_Symbol for argument in structure.args)
    return bool(getattr(structure, "is_Function", False) and structure.free_symbols)


def _same_equations(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether one equation is the other times a constant."""
    if not _expressions(*gold, *found):
        return False
    values = [(x, y) for x, y in values_of(gold[0] - gold[1], found[0] - found[1]) if size_of(x) and size_of(y)]
    if len(values) < LEAST_POINTS:
        return False
    (first, second), *rest = values
    return all(equal_values(times(x, second), times(first, y), decimals=False) for x, y in rest)


def _expressions(*structures: Any) -> bool:
    from sympy import Expr

    return all(isinstance(structure, Expr) for structure in structures)


def _about(gold: Any, found: Any) -> bool:
    if not _expressions(gold, found) or symbols(gold) or symbols(found):
        return False
    return all(size_of((a[0] - b[0], a[1] - b[1])) <= _ABOUT * size_of(a) for a, b in values_of(gold, found))


def _same_objects(gold: Any, found: Any) -> bool:
    """Compares expressions by value, matrices by element, and other objects of the grammar (ℝ, ∅) by identity."""
    if getattr(gold, "is_Matrix", False) or getattr(found, "is_Matrix", False):
        both = getattr(gold, "is_Matrix", False) and getattr(found, "is_Matrix", False)
        return both and gold.shape == found.shape and all(map(_same, gold, found))
    if not _expressions(gold, found):
        return type(gold) is type(found) and gold == found
    if is_function(gold) and gold == found:  # f(x), which has no value
        return True
    import sympy

    if found.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):  # an infinity equals itself and nothing else
        return found in (sympy.oo, -sympy.oo) and found == gold
    if found.is_Rational and gold.is_Rational:
        return found == gold
    decimals = gold.has(sympy.Float) or found.has(sympy.Float)
    values = values_of(gold, found)
    needed = LEAST_POINTS if gold.free_symbols or found.free_symbols else 1
    return len(values) >= needed and all(equal_values(a, b, decimals) for a, b in values)
