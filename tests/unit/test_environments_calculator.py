"""The calculator against exact arithmetic on random expressions, and against hostile ones."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollouts.environments.calculator import MAX_CHARS, MAX_NESTING, calculate

# text, value by Fraction, binding strength: 0 sum, 1 product, 2 factor
Expression = tuple[str, Fraction, int]


def parenthesised(expression: Expression, strength: int) -> str:
    return expression[0] if expression[2] >= strength else f"({expression[0]})"


def combine(first: Expression, operator: str, second: Expression) -> Expression:
    strength = int(operator in "*/")
    text = f"{parenthesised(first, strength)} {operator}{parenthesised(second, strength + 1)}"
    value = {
        "+": first[1].__add__,
        "-": first[1].__sub__,
        "*": first[1].__mul__,
        "/": first[1].__truediv__,
    }[operator](second[1] or Fraction(1))
    return text, value, strength


integers = st.integers(0, 999).map(lambda i: (str(i), Fraction(i), 2))
numbers = integers | st.decimals(0, 99, places=2).map(lambda d: (f"{d:f}", Fraction(d), 2))
expressions = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/"), inner)
        .filter(lambda t: t[2][1] != 0)
        .map(lambda t: combine(*t))
        | inner.map(lambda e: (f"-{parenthesised(e, 2)}", -e[1], 2))
    ),
    max_leaves=6,
)


@given(expressions)
def test_equals_exact_arithmetic(expression: Expression) -> None:
    text, value, _ = expression
    result = Fraction(calculate(text))
    tolerance = 0 if value.denominator == 1 else Fraction(1, 2 * 10**6)
    assert abs(result - value) <= tolerance


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("347*286", "99242"),
        ("2-3-4", "-5"),
        ("12/3/2", "2"),
        ("2+3*4", "14"),
        ("--2", "2"),
        ("-1/3", "-0.333333"),
        ("-1/9000000", "0"),
    ],
)
def test_precedence_and_form(text: str, result: str) -> None:
    assert calculate(text) == result


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not arithmetic"), ("2**3", "not arithmetic"), ("1 2", "not arithmetic"),
        ("1.", "not arithmetic"), ("1e5", "not arithmetic"),
        ("\u0663+1", "not arithmetic"), ("\u00b2", "not arithmetic"), ("1\n+1", "not arithmetic"),
        ("__import__('os')", "not arithmetic"),
        ("(1", "not closed"), ("1)", "not arithmetic"), ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("1" * (MAX_CHARS + 1), "more than"), ("9" * 150, "too large"),
        ("*".join(["999999999999"] * 12), "too large"),
        ("(" * (MAX_NESTING + 1) + "1" + ")" * (MAX_NESTING + 1), "nested"),
        ("-" * MAX_CHARS, "nested"), ("(" * MAX_CHARS, "nested"),
    ],
)  # fmt: skip
def test_text_that_is_no_arithmetic_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        calculate(text)


@given(st.text(alphabet="0123456789+-*/(). e_\u0661", max_size=MAX_CHARS + 5))
def test_any_text_gives_a_value_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert Fraction(calculate(text)) is not None
