"""One row of a dataset, whatever its source."""

from __future__ import annotations

import json
import random
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
GPQA = "gpqa"
_LETTERS = "ABCDEFGHIJ"
_BOXED = "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CHOICE = (
    "The following is a multiple choice question about {}. Think step by step and then finish "
    'your answer with "the answer is (X)" where X '
    "is the correct letter choice.\n\nQuestion: {}\nOptions:\n{}"
)
_GRADUATE = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering.\n\n{}\n\n{}"
)
_GRADUATE_OPTIONS = (
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)
_ORDER = "order of the options"  # the column that `in_shuffled_order` adds
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
class Published:
    """How a benchmark is sampled where neither its suite nor `eval` says so.

    A greedy evaluation has one sample and no filter.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1


@dataclass(frozen=True)
class Benchmark:
    """A known benchmark (eval.suites.NAME.benchmark): its place on the hub, its question, and how
    it is sampled in publications.

    The questions are worded as is usual. MATH-500, AIME and GSM8K follow Qwen2.5-Math's evaluation
    (arXiv:2409.12122). MMLU-Pro follows its authors' (arXiv:2406.01574), without their five worked
    examples. GPQA (arXiv:2311.12022) follows OpenAI's simple-evals. IFEval's prompts are used as
    they are. LiveCodeBench (arXiv:2403.07974) uses its own wording for chat models, with the system
    message first. docs/evaluation.md says where the sampling is published.
    """

    source: str  # the dataset's name on the hub
    split: str
    # returns a row's question and reference answer
    question_of: Callable[[Record], tuple[str, Any]]
    published: Published
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


def _graduate(record: Record) -> tuple[str, str]:
    question = _text(record, "Question")
    options = [_text(record, _GRADUATE_OPTIONS[place]) for place in record[_ORDER]]
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip(_LETTERS, options))
    return _GRADUATE.format(question, listed), _LETTERS[record[_ORDER].index(0)]


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


_REASONING = Published(max_tokens=32768, temperature=0.6, top_p=0.95, samples=64)

BENCHMARKS: Mapping[str, Benchmark] = {
    "math500": Benchmark(
        source="HuggingFaceH4/MATH-500",
        split="test",
        question_of=_question(("problem", "answer")),
        published=replace(_REASONING, samples=4),
    ),
    "gsm8k": Benchmark(
        source="openai/gsm8k",
        subset="main",
        split="test",
        question_of=_question(("question", "answer")),
        published=Published(max_tokens=2048),
    ),
    "aime2024": Benchmark(
        source="HuggingFaceH4/aime_2024",
        split="train",
        question_of=_question(("problem", "answer"), ("Problem", "Answer")),
        published=_REASONING,
    ),
    "aime2025": Benchmark(
        source="math-ai/aime25",
        split="test",
        question_of=_question(("problem", "answer"), ("question", "answer")),
        published=_REASONING,
    ),
    "mmlu_pro": Benchmark(
        source="TIGER-Lab/MMLU-Pro",
        split="test",
        question_of=_choice,
        published=Published(max_tokens=2048),
    ),
    GPQA: Benchmark(
        source="Idavidrein/gpqa",
        subset="gpqa_diamond",
        split="train",
        question_of=_graduate,
        published=replace(_REASONING, samples=4),
    ),
    "ifeval": Benchmark(
        source="google/IFEval",
        split="train",
        question_of=_instructed,
        published=Published(max_tokens=1280),
    ),
    LIVECODEBENCH: Benchmark(
        source="livecodebench/code_generation_lite",
        subset="release_v6",
        split="test",
        question_of=_programming,
        published=Published(max_tokens=2000, temperature=0.2, top_p=0.95, samples=10),
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


def in_shuffled_order(
    records: Iterator[tuple[str, Any]], config: object
) -> Iterator[tuple[str, Any]]:
    """The records; those of GPQA with the order of their options. The n-th row has the order that
    simple-evals gives it in the first of its passes, with the same seed.
    """
    if not isinstance(config, SuiteConfig) or config.benchmark != GPQA:
        return records
    draws = random.Random(0)

    def ordered(record: Any) -> Any:
        order = draws.sample(range(len(_GRADUATE_OPTIONS)), len(_GRADUATE_OPTIONS))
        return record | {_ORDER: order} if isinstance(record, dict) else record

    return ((location, ordered(record)) for location, record in records)


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


_SAMPLED_BY = ("samples", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")


def held_out_samples(config: RunConfig, suite: SuiteConfig | None) -> int:
    """The samples per prompt of a held-out set."""
    return _sampled_by(config, suite)["samples"]


def held_out_sampling(config: RunConfig, suite: SuiteConfig | None) -> Sampling:
    """How a held-out set is sampled: as its suite says, otherwise as `eval`, otherwise as its
    benchmark is published, otherwise as the run.

    The temperature is never the run's. A suite with a task has the limits of its source.
    """
    values = _sampled_by(config, suite)
    del values["samples"]
    return Sampling(**{**values, "stop": tuple(values["stop"])})


def _sampled_by(config: RunConfig, suite: SuiteConfig | None) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for name in _SAMPLED_BY:
        value = getattr(config.eval, name)
        if value is not None:
            written[name] = value
        if suite is not None and getattr(suite, name) is not None:
            written[name] = getattr(suite, name)
    rollout = task_of(config, (suite.task if suite else None) or "").rollout
    values = {name: getattr(rollout, name, None) for name in _SAMPLED_BY}
    values |= {"samples": 1, "temperature": 0.0}
    if suite is not None and suite.benchmark:
        published = BENCHMARKS[suite.benchmark].published
        values["max_tokens"] = max(published.max_tokens, rollout.max_tokens)
        values |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        if written.get("temperature") != 0:
            values["samples"] = published.samples
            values["temperature"] = published.temperature
            values["top_p"] = published.top_p
    return values | written


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
