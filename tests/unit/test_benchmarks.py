"""Benchmarks: rows in the data sets' own formats, and graders on 300 right and wrong pairs in the
style of each.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from json_files import write_json_lines
from msgspec.structs import replace
from scripted_policy import SAMPLING, TOKENIZER, VOCABULARY, ScriptedPolicy, prompt

from megarl.config.errors import ConfigError
from megarl.config.schema import (
    GRADERS,
    OWN_PLACE,
    DatasetConfig,
    ModelConfig,
    RunConfig,
    SuiteConfig,
)
from megarl.data.datasets import answers_of, load_rows
from megarl.data.rows import BENCHMARKS, held_out
from megarl.plan.checks import check_eval
from megarl.rewards.extract import chosen_letter
from megarl.rewards.score import parts_in_evaluation
from megarl.rewards.verify import VERIFIERS
from megarl.rollouts.rollout import open_rollouts

MATH = {
    "problem": "What is $\\frac12+\\frac12$?",
    "solution": "It is $\\boxed{1}$.",
    "answer": "1",
    "subject": "Prealgebra",
    "level": 1,
    "unique_id": "test/prealgebra/1.json",
}
OPTIONS = ["60", "61", "62", "63", "64", "65", "66", "67", "68", "69"]
ROWS: dict[str, list[dict]] = {
    "math500": [MATH],
    "gsm8k": [
        {
            "question": "Jo has 1,200 eggs and buys 34. How many?",
            "answer": "She has 1200+34=<<1200+34=1234>>1234.\n#### 1,234",
        }
    ],
    "aime2024": [
        {
            "id": 60,
            "problem": "Find it.",
            "solution": "\\boxed{204}",
            "answer": "025",
            "url": "https://…",
            "year": "2024",
        },
        {"ID": "2024-II-4", "Problem": "Find it.", "Solution": "…", "Answer": 33},
    ],
    "aime2025": [
        {"problem": "Find it.", "answer": "70", "id": "0"},
        {"question": "Find it.", "answer": "588"},
    ],
    "mmlu_pro": [
        {
            "question_id": 70,
            "question": "Which one?",
            "options": OPTIONS,
            "answer": "I",
            "answer_index": 8,
            "cot_content": "",
            "category": "business",
            "src": "ori_mmlu-business_ethics",
        },
        {
            "question_id": 71,
            "question": "Which one?",
            "options": OPTIONS[:3],
            "answer": "C",
            "answer_index": 2,
            "category": "law",
        },
    ],
    "gpqa": [
        {
            "Record ID": f"rec{number}",
            "Question": f"Which one?\n{number}\n",
            "Correct Answer": "right",
            "Incorrect Answer 1": "wrong 1",
            "Incorrect Answer 2": "wrong 2",
            "Incorrect Answer 3": "wrong 3",
        }
        for number in range(3)
    ],
}


def config_of(name: str, path: Path | str = OWN_PLACE, **settings) -> RunConfig:
    config = RunConfig(model=ModelConfig(path="none"))
    config.eval.suites = {"own": SuiteConfig(benchmark=name, source=str(path), **settings)}
    return config


def rows_of(name: str, rows: list[dict], folder: Path) -> list:
    path = folder / "rows.jsonl"
    write_json_lines(path, rows)
    config = config_of(name, path)
    ((_, key, dataset, _),) = [suite for suite in held_out(config) if suite[0] == "own"]
    return list(load_rows(dataset, key, 0, answers_of(config, True, "own")))


@pytest.mark.parametrize("name", ROWS)
def test_benchmark_rows_become_prompts_and_answers(name: str, tmp_path: Path) -> None:
    rows = rows_of(name, ROWS[name], tmp_path)
    answers = {
        "math500": ["1"],
        "gsm8k": ["1,234"],
        "aime2024": ["025", "33"],
        "aime2025": ["70", "588"],
        "mmlu_pro": ["I", "C"],
        "gpqa": ["C", "D", "C"],
    }
    assert [row.answer for row in rows] == answers[name]
    grade = VERIFIERS[GRADERS[name]]
    form = "So it is \\boxed{{{}}}."
    form_in_prompt = "\\boxed{}"
    wrong_answer = "7"
    if name == "mmlu_pro":
        form = "So the answer is ({})."
        form_in_prompt = "the answer is (X)"
        wrong_answer = "A"
    if name == "gpqa":
        form = "They react.\n\nAnswer: {}"
        form_in_prompt = "'Answer: $LETTER' (without quotes)"
    for row, record in zip(rows, ROWS[name]):
        columns = ("problem", "Problem", "question", "Question")
        assert next(record[column] for column in columns if column in record) in row.prompt
        response = form.format(row.answer)
        assert grade(response, row.answer) == 1.0
        assert grade(response, wrong_answer) == 0.0
    assert form_in_prompt in rows[0].prompt
    (part,) = parts_in_evaluation(config_of(name), "own")
    assert (part.name, part.failed_score) == (GRADERS[name], 0.0)
    assert parts_in_evaluation(config_of(name))[0].name == "math"


def test_gpqa_options_are_shuffled_as_in_simple_evals(tmp_path: Path) -> None:
    """The orders that random.Random(0).sample(range(4), 4) gives, one after the other."""
    options = ["right", "wrong 1", "wrong 2", "wrong 3"]
    draws = random.Random(0)
    for number, row in enumerate(rows_of("gpqa", ROWS["gpqa"], tmp_path)):
        listed = [options[place] for place in draws.sample(range(4), 4)]
        assert row.prompt.endswith(
            "Think step by step before answering.\n\nWhich one?\n"
            f"{number}\n\n\nA) {listed[0]}\nB) {listed[1]}\nC) {listed[2]}\nD) {listed[3]}"
        )
        assert row.answer == "ABCD"[listed.index("right")]


def test_options_are_lettered_under_the_question(tmp_path: Path) -> None:
    prompt = rows_of("mmlu_pro", ROWS["mmlu_pro"], tmp_path)[1].prompt
    assert "about law." in prompt
    assert prompt.endswith("Question: Which one?\nOptions:\nA. 60\nB. 61\nC. 62")


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        (
            "math500",
            {"question": "?", "answer": "1"},
            "must have the columns 'problem' and 'answer'; its columns are 'question', 'answer'",
        ),
        (
            "mmlu_pro",
            {"question": "?", "options": "60", "answer": "A"},
            "field 'options' must be a list of 2 to 10 texts",
        ),
        (
            "mmlu_pro",
            {"question": "?", "options": ["1", "2"], "answer": "C"},
            "must be one of the letters AB, not 'C'",
        ),
        (
            "mmlu_pro",
            {"question": "?", "options": ["1", "2"], "answer": "A", "answer_index": 1},
            "they must agree",
        ),
        (
            "gpqa",
            {"Question": " ", "Correct Answer": "1"},
            "field 'Question' must be a text that is not empty",
        ),
    ],
)
def test_row_of_another_format_is_refused(
    name: str, row: dict, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        rows_of(name, [row], tmp_path)


def test_benchmark_without_a_source_comes_from_the_hub() -> None:
    assert set(BENCHMARKS) == set(GRADERS)
    [dataset] = [dataset for name, _, dataset, _ in held_out(config_of("gsm8k")) if name]
    assert (dataset.source, dataset.subset, dataset.split) == ("openai/gsm8k", "main", "test")
    config = config_of("gsm8k")
    config.eval.suites = {"own": SuiteConfig()}
    assert any(
        "eval.suites.own.source: must be set, or eval.suites.own.benchmark" in problem
        for problem in check_eval(config)
    )


Pair = tuple[str, str, bool]  # response, reference, whether it is right
BEFORE = (
    "First, we compute. 3 + 4 = 7, so x = 7.\n\n",
    "",
    "Let me think. The answer is not obvious.\n",
    "\\[ y = \\frac{2}{3} \\]\n",
)
MARKS = (
    "Thus the answer is $\\boxed{{{}}}$.",
    "\\boxed{{{}}}",
    "**Answer:** $\\boxed{{{}}}$",
    "\\[\\boxed{{{}}}\\]\nI hope this helps.",
)


def math_forms(rng: random.Random) -> tuple[str, list[str], list[str]]:
    """A reference, other forms of it, and wrong answers."""
    a = rng.randint(2, 40)
    b = rng.randint(2, 40)
    c = rng.randint(2, 9)
    while Fraction(a, b).denominator == 1:
        b += 1
    value = Fraction(a, b)
    letter = rng.choice("xtn")
    n = value.numerator
    d = value.denominator
    return rng.choice(
        [
            (
                str(a * 137),
                [f"{a * 137:,}", f"{a * 137}.0", f"x = {a * 137}"],
                [str(a * 137 + 1), str(-a * 137), f"{a * 137}.5"],
            ),
            (
                f"\\frac{{{n}}}{{{d}}}",
                [f"\\dfrac{{{n}}}{{{d}}}", f"{n}/{d}", f"\\frac{{{2 * n}}}{{{2 * d}}}"],
                [f"\\frac{{{d}}}{{{n}}}", f"-\\frac{{{n}}}{{{d}}}", f"\\frac{{{n}}}{{{d + 1}}}"],
            ),
            (
                f"{a}\\sqrt{{{c * c + 1}}}",
                [f"\\sqrt{{{c * c + 1}}}\\cdot {a}", f"\\sqrt{{{a * a * (c * c + 1)}}}"],
                [
                    f"\\sqrt{{{a * (c * c + 1)}}}",
                    f"{a + 1}\\sqrt{{{c * c + 1}}}",
                    f"{a}\\sqrt{{{c * c + 2}}}",
                ],
            ),
            (
                f"\\left( {a}, \\frac{{\\pi}}{{{c}}} \\right)",
                [f"({a}, \\pi/{c})", f"\\left({a},\\frac{{1}}{{{c}}}\\pi\\right)"],
                [
                    f"(\\frac{{\\pi}}{{{c}}}, {a})",
                    f"({a}, \\frac{{\\pi}}{{{c + 1}}})",
                    f"[{a}, \\frac{{\\pi}}{{{c}}}]",
                ],
            ),
            (
                f"[{-a},{b})",
                [f"{letter} \\in [{-a}, {b})", f"-{a} \\le {letter} < {b}"],
                [f"[{-a},{b}]", f"({-a},{b})", f"[{-b - 1},{a})"],
            ),
            (
                f"{a}{letter}^2 - {b}{letter} + {c}",
                [f"{c} - {b}{letter} + {a}{letter}^{{2}}", f"{letter}({a}{letter} - {b}) + {c}"],
                [
                    f"{a}{letter}^2 + {b}{letter} + {c}",
                    f"{a}{letter}^2 - {b}{letter}",
                    f"{a}{letter}^3 - {b}{letter} + {c}",
                ],
            ),
            (
                f"{a} - {b}i",
                [f"-{b}i + {a}", f"{a}-{b}i"],
                [f"{a} + {b}i", f"{b} - {a + 1}i", str(a)],
            ),
            ("p - q", ["p-q", "-q + p", "-(q-p)"], ["q - p", "p + q", "p"]),
            (f"{a}^\\circ", [str(a), f"{a}^{{\\circ}}"], [str(a + 1), f"{a + 90}^\\circ"]),
            (
                f"\\text{{{rng.choice(['Evelyn', 'Navin', 'Maren'])}}}",
                [],
                ["\\text{Olaf}", "Briana", "7"],
            ),
            (
                f"{a}, {a + b}, {a + 2 * b}",
                [f"{a + b},{a},{a + 2 * b}", f"\\{{{a}, {a + b}, {a + 2 * b}\\}}"],
                [f"{a}, {a + b}", f"{a}", f"{a}, {a}, {a + b}"],
            ),
            (
                f"\\begin{{pmatrix}} {a} \\\\ {-b} \\end{{pmatrix}}",
                [f"\\begin{{pmatrix}}{a}\\\\-{b}\\end{{pmatrix}}"],
                [
                    f"\\begin{{pmatrix}} {a} \\\\ {b} \\end{{pmatrix}}",
                    f"\\begin{{pmatrix}} {a} & {-b} \\end{{pmatrix}}",
                ],
            ),
        ]
    )


def math_pairs(rng: random.Random) -> Iterator[Pair]:
    reference, same, wrong = math_forms(rng)
    for right, answer in ((True, rng.choice([reference, *same])), (False, rng.choice(wrong))):
        yield rng.choice(BEFORE) + rng.choice(MARKS).format(answer), reference, right


def gsm8k_pairs(rng: random.Random) -> Iterator[Pair]:
    answer = rng.choice([rng.randint(1, 300), rng.randint(1000, 2_000_000)])
    ends = (
        *MARKS,
        "#### {}",
        "The answer is {}.",
        "So she pays {} dollars in all.",
        "**Final answer: {}**",
        "He earns ${}.",
    )
    for right, value in ((True, answer), (False, answer + rng.choice([-1, 1, 10, answer]))):
        form = rng.choice([f"{value:,}", str(value), f"{value}.00"])
        yield rng.choice(BEFORE) + rng.choice(ends).format(form), f"{answer:,}", right


def aime_pairs(rng: random.Random) -> Iterator[Pair]:
    answer = rng.randint(0, 999)
    for right, value in ((True, answer), (False, (answer + rng.choice([1, 10, 100, 500])) % 1000)):
        yield (
            rng.choice(BEFORE) + rng.choice(MARKS).format(rng.choice([str(value), f"{value:03d}"])),
            f"{answer:03d}",
            right,
        )


def choice_pairs(rng: random.Random) -> Iterator[Pair]:
    answer, wrong_letter = rng.sample("ABCDEFGHIJ", 2)
    ends = (
        "the answer is ({}).",
        "The answer is {}",
        "Answer: {}",
        "**Answer: {}**",
        "the answer is **({})**.",
        "$\\boxed{{{}}}$",
        "({})",
        "Therefore, the best answer is {}.",
        "the answer is \\boxed{{\\text{{{}}}}}.",
        "Answer: $\\boxed{{{}}}$",
        "**{}**",
        "the answer is ({}). I am sure of it.",
        "The correct answer is: {}. 61",
        "the answer is ({}) because A and B are false.",
    )
    thought = rng.choice(
        [
            "",
            f"At first the answer is ({wrong_letter}) to me. ",
            f"Option {wrong_letter} is tempting, I think. ",
            "A cat, a dog, B-sides. ",
        ]
    )
    for right, letter in ((True, answer), (False, wrong_letter)):
        text = thought if right else thought.replace(f"({wrong_letter})", f"({answer})")
        yield f"{text}So\n{rng.choice(ends).format(letter)}", answer, right


PAIRS: dict[str, Callable[[random.Random], Iterator[Pair]]] = {
    "math500": math_pairs,
    "gsm8k": gsm8k_pairs,
    "aime2024": aime_pairs,
    "aime2025": aime_pairs,
    "mmlu_pro": choice_pairs,
}


@pytest.mark.parametrize("name", PAIRS)
def test_300_pairs_of_each_benchmark_are_graded(name: str) -> None:
    rng = random.Random(f"{name}/7")
    grade = VERIFIERS[GRADERS[name]]
    pairs = [pair for _ in range(150) for pair in PAIRS[name](rng)]
    accepted = [pair for pair in pairs if not pair[2] and grade(pair[0], pair[1])]
    refused = [pair for pair in pairs if pair[2] and not grade(pair[0], pair[1])]
    assert len(pairs) == 300 and sum(right for *_, right in pairs) == 150
    assert accepted == []
    # "The answer is not obvious" counts as an answer if no marked answer follows it
    assert len(refused) == (8 if name == "gsm8k" else 0)
    assert all("not obvious" in text and "\\boxed" not in text for text, *_ in refused)


@pytest.mark.parametrize(
    "text",
    [
        "Answer: A, B, C, D",
        "The answer is A or B.",
        "the answer is (A) and (B)",
        "\\boxed{A, B}",
        "\\boxed{ABCDEFGHIJ}",
        "A B C D E F G H I J",
        "The answer is not A",
        "A",
        "the answer is (A)\nthe answer is (B)",
        "answer" * 900,
        "answer is " + " " * 9000 + "A!" * 9000,
        "((((((((A" * 400,
        "the answer is \\boxed{\\text{(A) and (C)}}",
        "Answer: Apple",
        "Answer: A's",
        "\u0410",
        "The answer is \uff21",
        "",
        "\\boxed{" * 3000,
        "Answer: AB",
    ],
)
def test_hostile_choices_choose_nothing_or_one_letter(text: str) -> None:
    letters = {"A": "A", "the answer is (A)\nthe answer is (B)": "B"}
    assert chosen_letter(text) == letters.get(text, "")


def test_suites_are_graded_by_their_own_rules(tmp_path: Path) -> None:
    """Real workers grade the same response to prompts of three sets.

    Its last number is 5, and its mathematical answer is the pair (1, 5).
    """
    config = config_of("gsm8k")
    config.eval.suites["other"] = SuiteConfig(source="rows.jsonl")
    config.data.eval = DatasetConfig(source="rows.jsonl")
    config.run_dir = str(tmp_path)
    config.reward.name = "none"
    config.eval.reward = "last_number"
    plan: Any = SimpleNamespace(config=config, spec=SimpleNamespace(vocab_size=VOCABULARY))

    async def rewards() -> list[float]:
        async with AsyncExitStack() as resources:
            fleet: Any = ScriptedPolicy(*["1,5$"] * 3)
            rollouts = await open_rollouts(plan, fleet, {}, TOKENIZER, resources, training=False)
            groups = [
                await rollouts.held_out(replace(prompt(answer="5"), source=source), SAMPLING, 1)
                for source in ("own", "other", "")
            ]
            return [group.samples[0].reward for group in groups]

    assert asyncio.run(rewards()) == [0.0, 1.0, 1.0]
