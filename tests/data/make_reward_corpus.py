"""Makes reward_corpus.jsonl: pairs of a reference and a response, right or wrong, of many kinds.

Run it again only to add to it.

Each pair is right or wrong by construction, in exact arithmetic of Python's integers and fractions.
Neither the verifier nor math-verify nor SymPy decides it. A wrong pair is a right one with another
value, order, bracket or sign that changes its meaning.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

Pair = tuple[str, str, bool]  # reference, response, right
CORPUS = Path(__file__).with_name("reward_corpus.jsonl")
KINDS: dict[str, Callable[[random.Random], Iterator[Pair]]] = {}


def kind(
    function: Callable[[random.Random], Iterator[Pair]],
) -> Callable[[random.Random], Iterator[Pair]]:
    KINDS[function.__name__] = function
    return function


def boxed(text: object) -> str:
    return rf"\boxed{{{text}}}"


def frac(value: Fraction, command: str = "frac") -> str:
    return (
        "-" if value < 0 else ""
    ) + rf"\{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def proper(rng: random.Random) -> Fraction:
    while True:
        value = Fraction(rng.randint(-30, 30), rng.randint(2, 13))
        if value.denominator > 1:
            return value


def other(rng: random.Random, value: int) -> int:
    return value + rng.choice([-10, -2, -1, 1, 2, 10])


@kind
def integers(rng):
    for _ in range(25):
        n = rng.randint(-999, 9999)
        for wrapped in (boxed(n), f"so\n#### {n}", f"Hence ${boxed(n)}$."):
            yield str(n), wrapped, True
        yield str(n), boxed(other(rng, n)), False
        yield str(n), boxed(-n) if n else boxed(1), False


@kind
def thousands(rng):
    for _ in range(15):
        n = rng.randint(1000, 9_999_999)
        for written in (
            f"{n:,}",
            f"{n:,}".replace(",", r"\,"),
            f"{n:,}".replace(",", "{,}"),
            rf"\${n:,}",
        ):
            yield str(n), boxed(written), True
        yield str(n), boxed(f"{n:,}"[:-1]), False
        yield str(n), boxed(f"{n * 10:,}"), False


@kind
def decimals(rng):
    for _ in range(25):
        cents = rng.randint(1, 99_999)
        value = f"{cents / 100:.2f}"
        yield value, boxed(value + "0"), True
        yield value, boxed(frac(Fraction(cents, 100))) if cents % 100 else boxed(cents // 100), True
        yield value, boxed(f"{(cents + 1) / 100:.2f}"), False
    for exponent in range(3, 13):
        yield f"0.{'0' * exponent}1", boxed(f"0.{'0' * exponent}2"), False
        yield f"0.{'0' * exponent}1", boxed("0"), False
        yield f"0.{'0' * exponent}1", boxed(rf"10^{{-{exponent + 1}}}"), True


@kind
def fractions(rng):
    for _ in range(25):
        value = proper(rng)
        k = rng.randint(2, 7)
        sign = "-" if value < 0 else ""
        unreduced = rf"{sign}\frac{{{abs(value.numerator) * k}}}{{{value.denominator * k}}}"
        for written in (frac(value, "dfrac"), unreduced, f"{value.numerator}/{value.denominator}"):
            yield frac(value), boxed(written), True
        yield frac(value), boxed(frac(-value)), False
        yield frac(value), boxed(frac(1 / value)) if abs(value) != 1 else boxed(2), False
        yield frac(value), boxed(value.numerator), False


@kind
def mixed_numbers(rng):
    for _ in range(15):
        integer = rng.randint(1, 9)
        part = abs(proper(rng)) % 1
        value = integer + part
        yield frac(value), boxed(integer) + " ", False
        yield frac(value), boxed(f"{integer}{frac(part)}"), True
        yield frac(value), boxed(f"{integer} {part.numerator}/{part.denominator}"), True
        yield (
            frac(value),
            boxed(frac(integer * part)) if (integer * part).denominator > 1 else boxed(0),
            False,
        )


@kind
def percentages(rng):
    for n in rng.sample(range(2, 99), 15):
        yield str(n), boxed(rf"{n}\%"), True
        yield f"{n / 100}", boxed(rf"{n}\%"), True
        yield rf"{n}\%", boxed(f"{n}%"), True
        yield str(n), boxed(f"{n / 10}%"), False
        yield f"{n / 10}", boxed(rf"{n}\%"), False


@kind
def powers(rng):
    for _ in range(20):
        base = rng.randint(2, 9)
        exponent = rng.randint(2, 6)
        value = base**exponent
        yield str(value), boxed(rf"{base}^{{{exponent}}}"), True
        yield rf"{base}^{{{exponent}}}", boxed(value), True
        yield str(exponent), f"{base}^{exponent}", False
        yield str(base), boxed(rf"{base}^{{{exponent}}}"), False
        yield frac(Fraction(1, value)), boxed(rf"{base}^{{-{exponent}}}"), True


@kind
def roots(rng):
    for _ in range(20):
        k = rng.randint(2, 9)
        n = rng.choice([2, 3, 5, 6, 7, 10, 11])
        yield rf"{k}\sqrt{{{n}}}", boxed(rf"\sqrt{{{k * k * n}}}"), True
        yield rf"\frac{{\sqrt{{{n}}}}}{{{n}}}", boxed(rf"\frac{{1}}{{\sqrt{{{n}}}}}"), True
        yield rf"{k}\sqrt{{{n}}}", boxed(rf"\sqrt{{{k * n}}}"), False
        yield rf"{k}\sqrt{{{n}}}", boxed(rf"-\sqrt{{{k * k * n}}}"), False
        yield str(n), boxed(rf"\sqrt{{{n}}}"), False
        yield str(k), boxed(rf"\sqrt[3]{{{k**3}}}"), True


@kind
def factorials_and_binomials(rng):
    for n in range(3, 10):
        k = rng.randint(2, n - 1)
        yield str(math.factorial(n)), boxed(f"{n}!"), True
        yield str(n), boxed(f"{n}!"), False
        yield str(n), f"{n}!", False
        yield str(math.comb(n, k)), boxed(rf"\binom{{{n}}}{{{k}}}"), True
        yield str(math.comb(n, k) + 1), boxed(rf"\binom{{{n}}}{{{k}}}"), False
        yield str(math.factorial(n)), boxed(f"-{n}!"), False


@kind
def polynomials(rng):
    for _ in range(20):
        a = rng.randint(1, 5)
        b = rng.choice([-4, -3, -1, 2, 3, 5])
        c = rng.choice([-7, -2, 1, 4, 6])
        product = f"({a}x{b:+d})(x{c:+d})"
        middle = a * c + b
        last = b * c
        expanded = f"{a}x^2{middle:+d}x{last:+d}"
        yield expanded, boxed(product), True
        yield expanded, boxed(f"{last}{middle:+d}x+{a}x^2"), True
        yield expanded, boxed(f"{a}x^2{middle:+d}x{last + 1:+d}"), False
        yield expanded, boxed(f"{a}y^2{middle:+d}y{last:+d}"), False
        yield expanded, boxed(f"({a}x{b:+d})(x{-c:+d})"), False


@kind
def rational_functions(rng):
    for _ in range(15):
        a, b = rng.sample(range(1, 10), 2)
        value = rf"\frac{{x+{a}}}{{x-{b}}}"
        yield value, boxed(rf"1+\frac{{{a + b}}}{{x-{b}}}"), True
        yield value, boxed(rf"\frac{{x-{b}}}{{x+{a}}}"), False
        yield value, boxed(rf"\frac{{-x-{a}}}{{{b}-x}}"), True
        yield value, boxed(rf"\frac{{x+{a}}}{{{b}-x}}"), False
        yield value, boxed(frac(Fraction(a, b))), False


@kind
def intervals(rng):
    for _ in range(15):
        a = rng.randint(-20, 20)
        b = a + rng.randint(1, 20)
        opening = rng.choice("([")
        closing = rng.choice(")]")
        flipped = {"(": "[", "[": "("}[opening]
        reference = f"{opening}{a},{b}{closing}"
        yield reference, boxed(rf"\left{opening}{a}, {b}\right{closing}"), True
        yield reference, boxed(rf"x \in {opening}{a}, {b}{closing}"), True
        yield reference, boxed(f"{flipped}{a},{b}{closing}"), False
        yield reference, boxed(f"{opening}{a},{b + 1}{closing}"), False
        yield reference, boxed(f"{opening}{a},\\infty)"), False
        yield f"({b},{a})", boxed(f"({b + 1},{a - 1})"), False


@kind
def inequalities(rng):
    for _ in range(12):
        a = rng.randint(-20, 20)
        b = a + rng.randint(1, 20)
        yield rf"({a},\infty)", boxed(f"x > {a}"), True
        yield rf"(-\infty,{a}]", boxed(rf"x \leq {a}"), True
        yield f"[{a},{b}]", boxed(rf"{a} \le x \le {b}"), True
        yield f"[{a},{b})", boxed(rf"{b} > x \ge {a}"), True
        yield f"x<{a}", boxed(f"{a}>x"), True
        yield rf"({a},\infty)", boxed(rf"x \ge {a}"), False
        yield rf"({a},\infty)", boxed(f"x < {a}"), False
        yield f"[{a},{b}]", boxed(f"{a} < x < {b}"), False
        yield str(a), boxed(f"x > {a}"), False
        yield str(a), boxed(rf"x \ne {a}"), False


@kind
def unions(rng):
    for _ in range(12):
        a, b, c = sorted(rng.sample(range(-20, 20), 3))
        reference = rf"(-\infty,{a})\cup({b},{c}]"
        yield reference, boxed(rf"({b}, {c}] \cup (-\infty, {a})"), True
        yield reference, boxed(rf"\left(-\infty,{a}\right)\cup\left({b},{c}\right]"), True
        yield reference, boxed(rf"(-\infty,{a}]\cup({b},{c}]"), False
        yield reference, boxed(rf"(-\infty,{a})"), False
        yield reference, boxed(rf"(-\infty,{a})\cup({b},\infty)"), False


@kind
def points(rng):
    for _ in range(15):
        a, b, c = rng.sample(range(-20, 20), 3)
        yield f"({a},{b},{c})", boxed(f"({a}, {b}, {c})"), True
        yield f"({a},{b})", boxed(f"(x,y)=({a},{b})"), True
        yield f"({a},{b},{c})", boxed(f"({b}, {a}, {c})"), False
        yield f"({a},{b})", boxed(f"({b},{a})"), False
        yield f"({a},{b})", boxed(f"({a},{b},{c})"), False
        yield str(b), f"({a},{b})", False
        yield str(b), f"({a}, {b})", False


@kind
def sets_and_lists(rng):
    for _ in range(15):
        a, b, c = rng.sample(range(-20, 20), 3)
        yield f"{a},{b}", boxed(f"{b}, {a}"), True
        yield rf"\{{{a},{b},{c}\}}", boxed(rf"\{{{c}, {a}, {b}\}}"), True
        yield f"{a},{b}", boxed(f"x={a}, x={b}"), True
        yield f"{a},{b}", boxed(rf"x={b} \text{{ or }} x={a}"), True
        yield f"{a},{b}", boxed(f"{a},{c}"), False
        yield f"{a},{b}", boxed(str(a)), False
        yield f"{a},{b}", boxed(f"{a},{b},{c}"), False
        yield rf"\{{{a},{b},{c}\}}", boxed(rf"\{{{a},{b},{b}\}}"), False
        yield str(a), boxed(f"{a},{b}"), False
        yield str(a), boxed(f"{a},{a}"), False
        yield str(b), f"{a}, {b}", False


@kind
def equations(rng):
    for _ in range(15):
        a = rng.randint(2, 9)
        b = rng.choice([-5, -1, 3, 8])
        yield f"y={a}x{b:+d}", boxed(f"y = {b}{a:+d}x"), True
        yield f"y={a}x{b:+d}", boxed(f"{a}x-y{b:+d}=0"), True
        yield f"x={a}", boxed(str(a)), True
        yield str(a), boxed(f"x = {a}"), True
        yield f"{a}x{b:+d}", boxed(f"f(x)={a}x{b:+d}"), True
        yield f"y={a}x{b:+d}", boxed(f"y={a}x{-b:+d}"), False
        yield f"y={a}x{b:+d}", boxed(f"x={a}y{b:+d}"), False
        yield f"x={a}", boxed(f"y={a}"), False
        yield f"y={a}x{b:+d}", boxed(f"{a}"), False


@kind
def chains(rng):
    for _ in range(15):
        a, b = rng.sample(range(2, 30), 2)
        yield str(a * b), boxed(rf"{a}\cdot {b}={a * b}"), True
        yield str(a * b), boxed(f"x={a}({b})={a * b}"), True
        yield str(a + b), f"{a} + {b} = {a + b}", True
        yield str(a), boxed(f"{b} = {a}"), False
        yield str(a), f"{b} = {a}", False
        yield str(a + b), boxed(f"{a + b} = {a + b + 1}"), False
        yield str(a + b + 1), boxed(f"{a + b} = {a + b + 1}"), False
        yield str(2 * b), boxed(rf"{2 * b} \approx {4 * b}"), False
        yield str(4 * b), boxed(rf"{2 * b} \approx {4 * b}"), False
    for n in (2, 3, 5, 7):
        yield f"{math.sqrt(n):.6f}", boxed(rf"\sqrt{{{n}}} \approx {math.sqrt(n):.6f}"), True


@kind
def products_and_neighbours(rng):
    """Two numbers side by side equal neither number nor their sum."""
    for _ in range(15):
        a, b = rng.sample(range(2, 30), 2)
        for reference in (a, b, a + b):
            yield str(reference), boxed(rf"{a}\text{{{b}}}"), False
            yield str(reference), boxed(rf"{a} \boxed{{{b}}}"), False
            yield str(reference), boxed(f"{a} {b}"), False
        yield str(a * b), boxed(f"{a}({b})"), True
        yield str(a + b), boxed(f"{a}({b})") if a * b != a + b else boxed("0"), False
        yield str(b), rf"{a} \boxed{{{b}}}", False


@kind
def matrices(rng):
    for _ in range(10):
        a, b, c, d = rng.sample(range(-9, 10), 4)
        reference = rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}"
        yield reference, boxed(rf"\begin{{bmatrix}} {a} & {b} \\ {c} & {d} \end{{bmatrix}}"), True
        yield reference, boxed(rf"\begin{{pmatrix}} {a} & {c} \\ {b} & {d} \end{{pmatrix}}"), False
        yield reference, boxed(rf"\begin{{pmatrix}} {a} & {b} \end{{pmatrix}}"), False
        yield (
            rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}",
            boxed(rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}"),
            True,
        )
        yield (
            rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}",
            boxed(rf"\begin{{pmatrix}}{b}\\{a}\end{{pmatrix}}"),
            False,
        )


@kind
def complex_numbers(rng):
    for _ in range(15):
        a = rng.choice([-7, -2, 3, 4])
        b = rng.choice([-5, 2, 6, 9])
        yield f"{a}{b:+d}i", boxed(f"{b}i{a:+d}"), True
        yield f"{a * a - b * b}{2 * a * b:+d}i", boxed(f"({a}{b:+d}i)^2"), True
        yield f"{a}{b:+d}i", boxed(f"{a}{-b:+d}i"), False
        yield f"{a}{b:+d}i", boxed(f"{a}"), False
        yield f"{a * a + b * b}", boxed(f"({a}{b:+d}i)({a}{-b:+d}i)"), True


@kind
def trigonometry(rng):
    exact = {("sin", 30): "1/2", ("cos", 60): "1/2", ("tan", 45): "1",
        ("sin", 45): r"\frac{\sqrt{2}}{2}",
             ("cos", 30): r"\frac{\sqrt{3}}{2}", ("sin", 90): "1", ("cos", 180): "-1",
             ("tan", 60): r"\sqrt{3}"}  # fmt: skip
    for (name, degrees), value in exact.items():
        turn = Fraction(degrees, 180)
        radians = rf"\frac{{{turn.numerator}\pi}}{{{turn.denominator}}}"
        yield value, boxed(rf"\{name} {degrees}^\circ"), True
        yield value, boxed(rf"\{name}\left({radians}\right)"), True
        yield value, boxed(rf"\{name} {degrees}"), False
        yield value, boxed(rf"-\{name} {degrees}^\circ"), False
    yield "1", boxed(r"\sin^2 x+\cos^2 x"), True
    yield "1", boxed(r"\sin^2 x-\cos^2 x"), False
    yield r"2\sin x\cos x", boxed(r"\sin(2x)"), True
    yield r"2\sin x\cos x", boxed(r"\cos(2x)"), False


@kind
def logarithms(rng):
    for base in (2, 3, 5, 7):
        for exponent in (2, 3, 4):
            yield str(exponent), boxed(rf"\log_{{{base}}} {base**exponent}"), True
            yield str(exponent), boxed(rf"\log_{base} {base**exponent}"), True
            yield str(exponent + 1), boxed(rf"\log_{{{base}}} {base**exponent}"), False
            yield rf"{exponent}\ln {base}", boxed(rf"\ln {base**exponent}"), True
            yield str(base**exponent), boxed(rf"\log_{{{base}}} {base**exponent}"), False


@kind
def multiples_of_pi(rng):
    for n in range(2, 12):
        yield rf"{n}\pi", boxed(rf"\pi\cdot {n}"), True
        yield rf"\frac{{\pi}}{{{n}}}", boxed(rf"\frac{{1}}{{{n}}}\pi"), True
        yield rf"{n}\pi", boxed(f"{n * math.pi:.8f}"), True
        yield rf"{n}\pi", boxed(f"{n * 3.14:.2f}"), False
        yield rf"{n}\pi", boxed(str(n)), False
        yield str(n), boxed(rf"{n}\pi"), False


@kind
def words_and_choices(rng):
    for letter in "ABCDE":
        wrong = chr((ord(letter) - 64) % 5 + 65)
        for written in (f"({letter})", rf"\text{{{letter}}}", rf"\textbf{{({letter})}}", letter):
            yield letter, boxed(written), True
        yield letter, boxed(wrong), False
        yield letter, boxed(rf"\text{{({wrong})}}"), False
    names = ["Evelyn", "Monday", "no", "yes", "north east", "ellipse", "Tuesday", "even"]
    for name in names:
        wrong = rng.choice([choice for choice in names if choice != name])
        yield rf"\text{{{name}}}", boxed(name), True
        yield name, boxed(rf"\text{{{name.upper()}}}"), True
        yield name, boxed(rf"\text{{{wrong}}}"), False
        yield name, boxed(rf"\text{{not {name}}}"), False


@kind
def units(rng):
    for n in rng.sample(range(2, 500), 12):
        for written in (
            rf"{n}^\circ",
            f"{n}°",
            rf"{n}\text{{ cm}}",
            rf"\${n}",
            f"{n} apples",
            rf"{n}\,\text{{m}}^2",
        ):
            yield str(n), boxed(written), True
        yield rf"{n}^\circ", boxed(str(n)), True
        yield str(n), f"#### {n} dollars", True
        yield str(n), boxed(rf"{n + 1}^\circ"), False
        yield str(n), boxed(rf"{n + 1}\text{{ cm}}"), False


@kind
def marked_in_prose(rng):
    forms = ["The answer is **{}**", "**Answer: {}**", "**The answer is {}.**", "The answer "
                                                                                "is\n\n{}",
                                                                                    "The answer is ${}$.", "Answer: {}",
             "**Answer:** {}", "So the final answer is: {}. I hope it is correct.", "\\boxed {}",
             "First \\boxed{{1}}, then \\boxed{{{}}}",
             "The answer is\n$$\n{}\n$$", "#### {}", "Final answer: `{}`", "The answer is {} "
                                                                           "dollars."]  # fmt: skip
    for form in forms:
        for n in rng.sample(range(12, 900), 3):
            yield str(n), form.format(n), True
            yield str(n), form.format(other(rng, n)), False
        yield "17", f"17 is the number we want.\n{form.format(18)}", False


@kind
def unmarked(rng):
    forms = ["{}", "$$\n{}\n$$", "\\[\n{}\n\\]", "So we get {}.", "It costs ${}", "Thus x = {}.",
        "The total is **{}**.", "**{}**", "= {}",
             "He pays {} dollars.", "Adding 3 and 4 and the rest makes {}",
             "6 * 7 is not it, but {}", "The result: {}"]  # fmt: skip
    for form in forms:
        for n in rng.sample(range(12, 900), 4):
            yield str(n), form.format(n), True
            yield str(n), form.format(other(rng, n)), False


@kind
def parts_of_what_is_unmarked(rng):
    forms = ["2^{}", "(3,{})", "1e{}", "\\frac{{1}}{{{}}}", "2 + {}", "2*{}", "3/{}", "x^{}",
        "\\sqrt {}", "sqrt({})", "{}x", "{}!",
             "x > {}", "x_{}", "[1, {})", "3, {}", "3 {}", "12:{}", "{}/7", "{}^2", "\\log_2 {}",
             "|x-{}|", "3.{}", "-{}", "{}e2",
             "2-{}"]  # fmt: skip
    for form in forms:
        for n in (5, 7, 31):
            yield str(n), form.format(n), False
            yield str(n), f"${form.format(n)}$", False


@kind
def repeating_decimals(rng):
    for _ in range(12):
        digits = rng.choice(["3", "6", "27", "142857", "09"])
        integer = rng.randint(0, 9)
        value = integer + Fraction(int(digits), 10 ** len(digits) - 1)
        yield frac(value), boxed(rf"{integer}.\overline{{{digits}}}"), True
        yield rf"{integer}.\overline{{{digits}}}", boxed(frac(value)), True
        yield frac(value), boxed(f"{integer}.{digits[:4]}"), False
        yield frac(value + 1), boxed(rf"{integer}.\overline{{{digits}}}"), False


@kind
def scientific(rng):
    for _ in range(15):
        mantissa = rng.randint(11, 99)
        exponent = rng.randint(3, 8)
        value = mantissa * 10 ** (exponent - 1)
        yield str(value), boxed(rf"{mantissa / 10}\times 10^{{{exponent}}}"), True
        yield str(value), boxed(f"{mantissa / 10}e{exponent}"), True
        yield str(value), boxed(rf"{mantissa / 10}\times 10^{{{exponent + 1}}}"), False
        yield str(value), boxed(f"{mantissa / 10}e{exponent - 1}"), False
        yield f"{mantissa / 10}", boxed(rf"{mantissa / 10}\times 10^{{{exponent}}}"), False


@kind
def what_is_not_finite(rng):
    forms = [
        r"2^{\infty}",
        r"\infty^{\infty}",
        r"\pi^{\infty}",
        r"|\infty|",
        r"0\cdot\infty",
        r"\infty-\infty",
        r"\frac{1}{0}",
        r"0^{-1}",
        r"\frac{\infty}{\infty}",
        r"1^{\infty}",
        r"\tan\left(\frac{\pi}{2}\right)",
        r"\log 0",
        r"\frac{0}{0}",
        r"\infty!",
        r"e^{\infty}",
    ]
    for form in forms:
        for reference in ("0", "1", "2", "10", r"\frac{1}{2}", r"\pi", "x", r"-\infty", "(1,2)"):
            yield reference, boxed(form), False
    for reference in ("1", "x", "(1,2)"):
        yield reference, boxed(r"\infty"), False
    yield r"\infty", boxed(r"\infty"), True
    yield r"-\infty", boxed(r"- \infty"), True
    yield r"\infty", boxed(r"+\infty"), True
    yield r"\infty", boxed(r"-\infty"), False
    yield r"\infty", boxed("1"), False


@kind
def nearly_equal(rng):
    """Numbers that agree to many digits, but differ."""
    yield "262537412640768744", boxed(r"e^{\pi\sqrt{163}}"), False
    yield "884736744", boxed(r"e^{\pi\sqrt{43}}"), False
    yield r"\pi", boxed(r"\frac{355}{113}"), False
    yield r"\pi", boxed(r"\sqrt[4]{\frac{2143}{22}}"), False
    yield r"\sqrt{2}", boxed(r"\frac{665857}{470832}"), False
    yield "1", boxed(r"1-10^{-30}"), False
    yield r"\frac{1}{3}", boxed("0.333"), False
    yield "0", boxed(r"10^{-40}"), False
    for n in range(2, 12):
        value = 10**n
        yield str(value), boxed(f"{value}.4"), False
        yield str(value), boxed(f"{value}.0"), True
        yield str(value), boxed(value + 1), False
        yield f"x+{value}", boxed(f"x+{value + 1}"), False


@kind
def nothing_of_use(rng):
    for response in ["", " ", "\\boxed{}", "\\boxed{", "#### ", "The answer is", "I do not know.",
        "?", "$$", "\\boxed{?}",
                     "\\boxed{\\text{}}", "\\boxed{\\boxed{}}", "...", "\\boxed{=}", "\\boxed{,}",
                     "\\boxed{()}",
                     "\\boxed{\\frac{}{}}", "answer:"]:  # fmt: skip
        for reference in ("5", "x", "(1,2)"):
            yield reference, response, False


@kind
def thousands_of_references(rng):
    for _ in range(10):
        n = rng.randint(10_000, 9_999_999)
        reference = f"{n:,}".replace(",", r",\!")
        yield reference, boxed(n), True
        yield reference, boxed(f"{n:,}"), True
        yield reference, boxed(reference), True
        yield reference, boxed(other(rng, n)), False
        yield reference, boxed("(" + f"{n:,}".replace(",", ", ") + ")"), False


@kind
def fonts(rng):
    for font in (r"\textbf", r"\mathbf", r"\text", r"\mathrm", r"\boldsymbol", r"\underline", ""):
        for n in rng.sample(range(100, 999), 3):
            yield str(n), boxed(f"{font}{{{n}}}"), True
            yield str(n), boxed(f"{font}{{{other(rng, n)}}}"), False
            yield str(n), boxed(f"{font}{{not {n}}}"), False
            yield str(n), boxed(rf"{font}{{at most }} {n}"), False


@kind
def closing_prose(rng):
    forms = ["The value is ${}$.", "**The probability is ${}$**",
        "Hence the area is ${}$ square units.", r"Therefore it is \({}\).",
             "So the result is ${}$, as required."]  # fmt: skip
    for form in forms:
        value = proper(rng)
        k = rng.choice([2, 3, 5, 7])
        wrong = frac(1 / value) if abs(value) != 1 else "7"
        yield frac(value), "Some steps.\n" + form.format(frac(value)), True
        yield frac(value), "Some steps.\n" + form.format(wrong), False
        yield frac(value), form.format(frac(value)).replace(" is ", " is not "), False
        yield rf"{k}\sqrt{{11}}", form.format(rf"{k}\sqrt{{11}}"), True
        yield rf"{k}\sqrt{{11}}", form.format(rf"{k}+\sqrt{{11}}"), False
        yield rf"{k}\sqrt{{11}}", form.format(rf"{k}\sqrt{{11}}$ or $5"), False


@kind
def denied(rng):
    forms = ["I think it's not {}", "It can't be {}.", "It isn't {}.", "The answer is not {}.",
        "I doubt that the answer is {}.",
             "At least {}.",
             "There are fewer than {}.", "It is either {} or 7.", "{} is too large.", "{} is not "
                                                                                      "the answer",
                                                                                          r"\boxed{{\text{{not }} {}}}",
             "That would be {}, which is wrong.", "The value is neither 7 nor {}."]  # fmt: skip
    for form in forms:
        for n in (0, *rng.sample(range(12, 900), 2)):
            yield str(n), form.format(n), False
    for n in rng.sample(range(12, 900), 4):
        for form in (
            "It is not 7 but {}.",
            "It can't be negative, so it is {}.",
            "I am not sure, but the answer is {}.",
            "The answer is {}, not 7.",
        ):
            yield str(n), form.format(n), True


@kind
def intervals_without_brackets(rng):
    for _ in range(8):
        a = rng.randint(-20, 20)
        b = a + rng.randint(1, 20)
        for reference in (f"[{a},{b})", f"({a},{b}]", f"[{a},{b}]"):
            yield reference, boxed(f"{a},{b}"), False
            yield reference, boxed(reference), True
        yield rf"(-\infty,{a}]", boxed(rf"-\infty,{a}"), False
        yield rf"(-\infty,{a})", boxed(rf"-\infty,{a}"), False
        yield rf"(-\infty,{a})\cup({b},\infty)", boxed(rf"x<{a} \text{{ or }} x>{b}"), True


@kind
def bases(rng):
    for base, n in ((16, 15), (8, 15), (7, 25), (2, 101), (9, 88)):
        yield str(n), boxed(f"{n}_{{{base}}}"), False
        yield str(n), boxed(f"{n}_{{10}}"), True
        yield f"{n}_{{{base}}}", boxed(f"{n}_{{{base}}}"), True
        yield f"{n}_{{{base}}}", boxed(n), True
        yield f"{n}_{{{base}}}", boxed(f"{n}_{{{base + 1}}}"), False
    yield "2516_8", boxed(r"2516_{\text{eight}}"), True


@kind
def zero_to_the_zero(rng):
    for form in (
        "0^0",
        "0^{0}",
        "(1-1)^0",
        "0.0^{0}",
        r"(2-\sqrt{4})^{0}",
        r"(\sin 0)^{0}",
        "0^{3-3}",
        "1+0^0-1",
    ):
        yield "1", boxed(form), False
        yield "0", boxed(form), False
    for form in ("5^0", "x^0", r"\pi^0", "(-3)^0", "0!"):
        yield "1", boxed(form), True


@kind
def several_boxes(rng):
    for _ in range(6):
        a, b = rng.sample(range(-20, 20), 2)
        yield f"{a},{b}", rf"$x = \boxed{{{a}}}$ or $x = \boxed{{{b}}}$", True
        yield f"{a},{b}", rf"\boxed{{{a}}} and \boxed{{{b}}}", True
        yield str(b), rf"\boxed{{{a}}} or \boxed{{{b}}}", False
        yield str(b), rf"I had \boxed{{{a}}}, but it is \boxed{{{b}}}.", True


def corpus() -> list[dict[str, object]]:
    kind_of: dict[Pair, str] = {}
    for name, function in KINDS.items():
        for pair in function(random.Random(name)):
            kind_of.setdefault(pair, name)
    return [
        {"kind": name, "reference": pair[0], "response": pair[1], "right": pair[2]}
        for pair, name in kind_of.items()
    ]


if __name__ == "__main__":
    CORPUS.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in corpus()), encoding="utf-8"
    )
