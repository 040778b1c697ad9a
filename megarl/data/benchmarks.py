"""Known benchmarks (eval.suites.NAME.benchmark): where they are on the hub, and what is asked of their rows.

The questions are worded as is usual for each: MATH-500, AIME and GSM8K as Qwen2.5-Math's evaluation asks them (arXiv:2409.12122), MMLU-Pro
as its authors' own (arXiv:2406.01574), without their five worked examples. IFEval's prompts say all themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.schema import OWN_PLACE, SuiteConfig
from megarl.data.rows import RowProblem

_LETTERS = "ABCDEFGHIJ"
_BOXED = "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CHOICE = (
    'The following is a multiple choice question about {}. Think step by step and then finish your answer with "the answer is (X)" where X '
    "is the correct letter choice.\n\nQuestion: {}\nOptions:\n{}"
)
Record = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    source: str  # its name on the hub
    split: str
    asked: Callable[[Record], tuple[str, Any]]  # a row's question and reference answer
    subset: str | None = None


def _question(*columns: tuple[str, str]) -> Callable[[Record], tuple[str, Any]]:
    """The first pair of columns, of question and answer, that a row has: mirrors on the hub name them differently."""

    def asked(record: Record) -> tuple[str, Any]:
        for question, answer in columns:
            if question in record and answer in record:
                return _BOXED.format(_text(record, question)), record[answer]
        wanted = " or ".join(f"{question!r} and {answer!r}" for question, answer in columns)
        raise RowProblem(f"must have the columns {wanted}; its columns are {', '.join(map(repr, record))}")

    return asked


def _choice(record: Record) -> tuple[str, str]:
    options, answer = record.get("options"), record.get("answer")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options) or not 2 <= len(options) <= len(_LETTERS):
        raise RowProblem(f"field 'options' must be a list of 2 to {len(_LETTERS)} texts")
    letters = _LETTERS[: len(options)]
    if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
        raise RowProblem(f"field 'answer' must be one of the letters {letters}, not {answer!r}")
    if (index := record.get("answer_index")) not in (None, letters.index(answer)):
        raise RowProblem(f"field 'answer' is {answer}, field 'answer_index' {index!r}: they must agree")
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options))
    return _CHOICE.format(record.get("category") or "general knowledge", _text(record, "question"), listed), answer


def _instructed(record: Record) -> tuple[str, Record]:
    wanted = ("instruction_id_list", "kwargs")
    if absent := [repr(column) for column in wanted if column not in record]:
        raise RowProblem(f"must have the columns {' and '.join(absent)}; its columns are {', '.join(map(repr, record))}")
    return _text(record, "prompt"), {column: record[column] for column in wanted}


def _text(record: Record, field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise RowProblem(f"field {field!r} must be a text that is not empty")
    return value


BENCHMARKS: Mapping[str, Benchmark] = {
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", _question(("problem", "answer"))),
    "gsm8k": Benchmark("openai/gsm8k", "test", _question(("question", "answer")), "main"),
    "aime2024": Benchmark("HuggingFaceH4/aime_2024", "train", _question(("problem", "answer"), ("Problem", "Answer"))),
    "aime2025": Benchmark("math-ai/aime25", "test", _question(("problem", "answer"), ("question", "answer"))),
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", "test", _choice),
    "ifeval": Benchmark("google/IFEval", "train", _instructed),
}


def located(suite: SuiteConfig) -> SuiteConfig:
    """With the place on the hub, if it is a benchmark from there."""
    found = BENCHMARKS[suite.benchmark] if suite.benchmark else None
    if found is None:
        return suite
    place = {"source": found.source, "subset": found.subset, "split": found.split} if suite.source == OWN_PLACE else {}
    return replace(suite, **place, prompt_key="prompt", answer_key="answer")


def asked(record: Record, config: object) -> Record:
    """The row with what the benchmark asks and the reference, if `config` is of one. Raises RowProblem."""
    if not isinstance(config, SuiteConfig) or not config.benchmark:
        return record
    prompt, answer = BENCHMARKS[config.benchmark].asked(record)
    return {"prompt": prompt, "answer": answer}
