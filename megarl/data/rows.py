"""One row of a dataset, whatever its source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

from megarl.config.errors import ConfigError
from megarl.config.schema import BY_CALLS, OWN_PLACE, DatasetConfig, RunConfig, SuiteConfig
from megarl.config.tasks import task_of, tasks_of
from megarl.generator.completions import Sampling


class RowProblem(Exception):
    """A problem with one row. `kind` is the same for all rows with the same kind of problem."""

    def __init__(self, problem: str, kind: str = ""):
        super().__init__(problem)
        self.kind = kind or problem


@dataclass(frozen=True)
class Row:
    prompt: str  # what the model sees, after the template
    answer: str  # the verifier's reference; empty if none is read
    # for supervised learning; several texts alternate between policy and environment
    demonstration: str | tuple[str, ...]
    location: str  # file and line, for messages
    # the whole row, for a user's own reward function
    record: dict[str, Any] = field(default_factory=dict)
    ended: bool = False  # whether the demonstration has its own end-of-text
    rendered: bool = False  # whether a chat template has made the prompt


Rows = Sequence[Row]
ROW_DIGEST_BYTES = 4


@dataclass(frozen=True)
class Pair:
    """Two responses to a prompt; `chosen` is preferred."""

    prompt: str  # what the model sees, after the template
    chosen: str
    rejected: str
    margin: float  # least wanted difference between the two scores
    location: str  # file and line, for messages
    rendered: bool = False  # whether a chat template has made the prompt


def without_nulls(value: Any) -> Any:
    """The value without the null fields of objects inside it. Items of lists stay."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


@dataclass
class Reading:
    """Checks rows while they are read, and collects findings about them.

    With `drop`, rows with problems are left out (data.bad_rows).
    """

    drop: bool = False
    # counts a prompt's tokens; raises RowProblem for a row that does not fit model or tokenizer
    tokens: Callable[[Any], int] | None = None
    lengths: list[int] = field(default_factory=list)  # the results of `tokens`
    # kind of problem -> the places where it occurs
    dropped: dict[str, list[str]] = field(default_factory=dict)
    # hash of each prompt -> hash of its answer, demonstration or responses
    prompts: dict[int, int] = field(default_factory=dict)
    repeated: int = 0  # rows with the same prompt as an earlier row
    otherwise: int = 0  # how many of the repeated rows have another answer
    remark: str = ""  # a warning about the chat template
    # one of ROW_DIGEST_BYTES for each usable row, in order; None: none is made
    digests: bytearray | None = None

    def note(self, row: Row | Pair) -> None:
        """Counts a usable row."""
        if isinstance(row, Row):
            now = hash(row.answer or row.demonstration)
        else:
            now = hash((row.chosen, row.rejected))
        prompt = hash(row.prompt)
        self.repeated += prompt in self.prompts
        self.otherwise += self.prompts.setdefault(prompt, now) != now
        if self.digests is not None:
            content = {name: value for name, value in vars(row).items() if name != "location"}
            # The same row has the same digest in JSON and in Arrow, which adds nulls and may order
            # columns otherwise.
            text = json.dumps(without_nulls(content), sort_keys=True, default=repr)
            self.digests += blake2b(text.encode(), digest_size=ROW_DIGEST_BYTES).digest()


Answers = Literal[
    "final",
    "instructions",
    "tests",
    "whole",
    "row",
    "unused",
    "none",
    "final, row",
    "instructions, row",
    "tests, row",
]
"""Which part of the answer column becomes the reference. "final": the part marked as final answer.
"instructions" or "tests": IFEval's instructions or a program's tests, checked. "whole": all of it,
for a user's own reward function or a judge. "row": nothing, since an environment or an own rollout
has the whole row. "unused": no score needs a reference. "none": only demonstrations are read.
"final, row": the final answer, for a verifier, beside a user's own function or rollout, which is
given the row.
"""
WITH_ROW: dict[Answers, Answers] = {
    "final": "final, row",
    "instructions": "instructions, row",
    "tests": "tests, row",
    "unused": "row",
}


LIVECODEBENCH = "livecodebench"
_LETTERS = "ABCDEFGHIJ"
_BOXED = "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CHOICE = (
    "The following is a multiple choice question about {}. Think step by step and then finish "
    'your answer with "the answer is (X)" where X '
    "is the correct letter choice.\n\nQuestion: {}\nOptions:\n{}"
)
_PROGRAM = (
    "You are an expert Python programmer. You will be given a question (problem specification) "
    "and will generate a correct Python program "
    "that matches the specification and passes all tests.\n\n"
    "### Question:\n{}\n\n### Format: {}\n\n"
    "### Answer: (use the provided format with backticks)\n\n"
)
_STARTED = (
    "You will use the following starter code to write the solution to the problem and "
    "enclose your code within delimiters."
)
_FROM_INPUT = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your "
    "code within delimiters as follows. Ensure that when the python program runs, it reads the "
    "inputs, runs the algorithm and writes "
    "output to STDOUT."
)
_RELEASE = re.compile(r"(release_)?v([1-9])")
Record = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A known benchmark (eval.suites.NAME.benchmark): its place on the hub, and its question.

    The questions are worded as is usual. MATH-500, AIME and GSM8K follow Qwen2.5-Math's evaluation
    (arXiv:2409.12122). MMLU-Pro follows its authors' (arXiv:2406.01574), without their five worked
    examples. IFEval's prompts are used as they are. LiveCodeBench (arXiv:2403.07974) uses its own
    wording for chat models, with the system message first.
    """

    source: str  # the dataset's name on the hub
    split: str
    # returns a row's question and reference answer
    question_of: Callable[[Record], tuple[str, Any]]
    subset: str | None = None


def _question(*columns: tuple[str, str]) -> Callable[[Record], tuple[str, Any]]:
    """Reads the first of several (question, answer) pairs of columns that a row has, since mirrors
    on the hub name them differently.
    """

    def read(record: Record) -> tuple[str, Any]:
        for question, answer in columns:
            if question in record and answer in record:
                return _BOXED.format(_text(record, question)), record[answer]
        alternatives = " or ".join(f"{question!r} and {answer!r}" for question, answer in columns)
        raise RowProblem(
            f"must have the columns {alternatives}; its columns are {', '.join(map(repr, record))}"
        )

    return read


def _choice(record: Record) -> tuple[str, str]:
    options = record.get("options")
    answer = record.get("answer")
    if (
        not isinstance(options, list)
        or not all(isinstance(option, str) for option in options)
        or not 2 <= len(options) <= len(_LETTERS)
    ):
        raise RowProblem(f"field 'options' must be a list of 2 to {len(_LETTERS)} texts")
    letters = _LETTERS[: len(options)]
    if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
        raise RowProblem(f"field 'answer' must be one of the letters {letters}, not {answer!r}")
    index = record.get("answer_index")
    if index not in (None, letters.index(answer)):
        raise RowProblem(
            f"field 'answer' is {answer}, field 'answer_index' {index!r}: they must agree"
        )
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options))
    category = record.get("category") or "general knowledge"
    return _CHOICE.format(category, _text(record, "question"), listed), answer


def _instructed(record: Record) -> tuple[str, Record]:
    columns = ("instruction_id_list", "kwargs")
    absent = [repr(column) for column in columns if column not in record]
    if absent:
        raise RowProblem(
            f"must have the columns {' and '.join(absent)}; its columns are "
            f"{', '.join(map(repr, record))}"
        )
    return _text(record, "prompt"), {column: record[column] for column in columns}


def _programming(record: Record) -> tuple[str, Record]:
    if not isinstance(record.get("contest_date"), str):
        raise RowProblem("field 'contest_date' must be a date such as 2024-08-01T00:00:00")
    start = record.get("starter_code")
    form = f"{_FROM_INPUT}\n```python\n# YOUR CODE HERE\n```"
    if start:
        form = f"{_STARTED}\n```python\n{start}\n```"
    columns = ("public_test_cases", "private_test_cases", "metadata")
    tests = {column: record.get(column) for column in columns}
    return _PROGRAM.format(_text(record, "question_content"), form), tests


def _text(record: Record, field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise RowProblem(f"field {field!r} must be a text that is not empty")
    return value


BENCHMARKS: Mapping[str, Benchmark] = {
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", _question(("problem", "answer"))),
    "gsm8k": Benchmark("openai/gsm8k", "test", _question(("question", "answer")), "main"),
    "aime2024": Benchmark(
        "HuggingFaceH4/aime_2024", "train", _question(("problem", "answer"), ("Problem", "Answer"))
    ),
    "aime2025": Benchmark(
        "math-ai/aime25", "test", _question(("problem", "answer"), ("question", "answer"))
    ),
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", "test", _choice),
    "ifeval": Benchmark("google/IFEval", "train", _instructed),
    LIVECODEBENCH: Benchmark(
        "livecodebench/code_generation_lite", "test", _programming, "release_v6"
    ),
}


def located(suite: SuiteConfig) -> SuiteConfig:
    """The suite with its source on the hub, if it is a benchmark from there."""
    benchmark = BENCHMARKS[suite.benchmark] if suite.benchmark else None
    if benchmark is None:
        return suite
    suite = replace(suite, prompt_key="prompt", answer_key="answer")
    if suite.source != OWN_PLACE:
        return suite
    subset = benchmark.subset if suite.subset is None else suite.subset
    return replace(suite, source=benchmark.source, split=benchmark.split, subset=subset)


def with_benchmark_question(record: Record, config: object) -> Record:
    """If `config` names a benchmark, the row with its question and reference. Raises RowProblem."""
    if not isinstance(config, SuiteConfig) or not config.benchmark:
        return record
    prompt, answer = BENCHMARKS[config.benchmark].question_of(record)
    return {"prompt": prompt, "answer": answer}


def files_of(config: object) -> list[str]:
    """The files of the LiveCodeBench release that `subset` names: release_v6 is everything up to
    the sixth release, v6 the sixth alone. Empty for other datasets. Raises ConfigError.
    """
    if not isinstance(config, SuiteConfig) or config.benchmark != LIVECODEBENCH:
        return []
    release = _RELEASE.fullmatch(config.subset or "release_v6")
    if not release:
        raise ConfigError(
            f"subset={config.subset}: must be a release of LiveCodeBench, such as release_v6 or v6"
        )
    last = int(release[2])
    first = 1 if release[1] else last
    return [f"test{number if number > 1 else ''}.jsonl" for number in range(first, last + 1)]


def within_dates(records: Iterator[tuple[str, Any]], config: object) -> Iterator[tuple[str, Any]]:
    """The records within the suite's dates."""
    if not isinstance(config, SuiteConfig) or not (config.since or config.until):
        return records
    since = config.since or ""
    until = config.until or "9"

    def inside(record: Any) -> bool:
        date = record.get("contest_date") if isinstance(record, dict) else None
        # other checks report malformed rows and rows without a date
        return not isinstance(date, str) or since <= date[:10] <= until

    return ((location, record) for location, record in records if inside(record))


def dates_of(config: object) -> str:
    """The dates that `within_dates` keeps, in words; empty if it keeps all."""
    if not isinstance(config, SuiteConfig):
        return ""
    since = f" since {config.since}" if config.since else ""
    until = f" until {config.until}" if config.until else ""
    return since + until


def held_out(config: RunConfig) -> list[tuple[str, str, DatasetConfig, SuiteConfig | None]]:
    """(name, config key, dataset, suite or None) of every held-out set: data.eval, eval.suites.

    A suite is a dataset with its own sampling.
    """
    sets: list[tuple[str, str, DatasetConfig, SuiteConfig | None]] = []
    if config.data.eval:
        sets.append(("", "data.eval", config.data.eval, None))
    for name, suite in config.eval.suites.items():
        if suite is not None:
            sets.append((name, f"eval.suites.{name}", located(suite), suite))
    return sets


_SAMPLED_BY = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")


def held_out_sampling(config: RunConfig, suite: SuiteConfig | None) -> Sampling:
    """How a held-out set is sampled: as its suite says, otherwise as `eval`, otherwise as the run.

    The temperature is never the run's. A suite with a task has the limits of its source.
    """
    rollout = task_of(config, (suite.task if suite else None) or "").rollout
    values = {name: getattr(rollout, name) for name in _SAMPLED_BY}
    for name in _SAMPLED_BY:
        value = getattr(config.eval, name)
        if value is not None:
            values[name] = value
        if suite is not None and getattr(suite, name) is not None:
            values[name] = getattr(suite, name)
    return Sampling(**{**values, "stop": tuple(values["stop"])})


def held_out_samplings(config: RunConfig) -> list[Sampling]:
    return [held_out_sampling(config, suite) for *_, suite in held_out(config)]


def stops_on_text(config: RunConfig) -> bool:
    """Whether requests may have stop strings, so that engines need the tokenizer: the run's, a
    source's, an evaluation's, or a program's calls'.
    """
    rollouts = [config.rollout, *(task.rollout for task in tasks_of(config).values())]
    return any(rollout.name in BY_CALLS or rollout.stop for rollout in rollouts) or any(
        sampling.stop for sampling in held_out_samplings(config)
    )
