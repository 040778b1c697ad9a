"""Checks a run's data before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megarl.base.files import HubAway
from megarl.config.errors import ConfigError
from megarl.config.schema import DROP, DatasetConfig, PreferenceConfig, RunConfig, SourceConfig
from megarl.config.tasks import source_of, task_of
from megarl.data.batches import demonstration_tokens, pair_sets, responses_tokens, sft_data
from megarl.data.datasets import answers_of, answers_of_labels, is_local, read_pairs, read_rows
from megarl.data.order import source_sets
from megarl.data.prompts import label_data, label_tokens, prompt_tokens
from megarl.data.rows import (
    ROW_DIGEST_BYTES,
    Answers,
    Pair,
    Reading,
    Row,
    held_out,
    held_out_sampling,
)
from megarl.data.synthetic import PREFIX
from megarl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_problems
from megarl.models.spec import ModelSpec

_SYNTHETIC_ROWS = 64  # how many rows of a synthetic task are checked
_AT_HAND_PROMPTS = 1000
_FIRST = 3  # how many rows are kept for a dry run to score


@dataclass(frozen=True)
class Checked:
    """The result of checking one dataset.

    `rows` is None if the dataset is on the hub and could not be read here.
    """

    key: str
    source: str
    rows: int | None
    reading: Reading = field(default_factory=Reading)
    first: tuple[Row | Pair, ...] = ()  # the first rows
    shared: int = 0  # how many prompts of a held-out set are also in data.train
    absence: str = ""  # why it could not be read

    def __str__(self) -> str:
        if self.rows is None:
            return (
                f"{self.key}: {self.source}, on the hub, is read when the run starts; not "
                f"checked here: {self.absence}"
            )
        lengths = self.reading.lengths
        fit = ["lengths are checked when the run starts"]
        if lengths:
            prompts = "all prompts"
            if len(lengths) < self.rows - self.dropped:
                prompts = f"the first {len(lengths):,} prompts"
            fit = [
                f"{prompts} leave room for a response",
                f"prompts of {fmean(lengths):.0f} tokens on average, {max(lengths)} at most",
            ]
        read = "" if self.source.startswith(PREFIX) else ", all read"
        return "; ".join(
            [f"{self.key}: {self.rows:,} rows of {self.source}{read}", *fit, *self.remarks]
        )

    @property
    def dropped(self) -> int:
        return sum(map(len, self.reading.dropped.values()))

    @property
    def remarks(self) -> Iterator[str]:
        """Facts about the rows that the user may not know."""
        if self.dropped:
            kinds = []
            for kind, locations in self.reading.dropped.items():
                kinds.append(f"{len(locations):,}: {kind} (first: {locations[0]})")
            yield (
                f"rows left out (data.bad_rows=drop): {self.dropped:,}, of them {', '.join(kinds)}"
            )
        if self.reading.repeated:
            otherwise = ""
            if self.reading.otherwise:
                otherwise = f", {self.reading.otherwise:,} of them with another answer"
            yield f"rows with the prompt of an earlier one: {self.reading.repeated:,}{otherwise}"
        if self.reading.remark:
            yield self.reading.remark
        if self.shared:
            yield (
                f"prompts that data.train has too: {self.shared:,} of {len(self.reading.prompts):,}"
            )


def check_data(
    config: RunConfig, spec: ModelSpec | None, command: str, at_hand: bool = False
) -> list[Checked]:
    """Reads what `command` ("train", "sft", "reward-model", "label", "eval") will read, and checks
    it against tokenizer and model. Without `spec`, checks only the rows.

    `at_hand`: goes on without what the hub does not give to this machine, and checks at most a
    thousand prompts per dataset against the model's context. Raises ConfigError with all problems:
    problems in the files (see load_rows), a tokenizer that does not fit the model, characters that
    the tokenizer does not know, prompts that leave no room for a response in the model's context.
    With data.bad_rows=drop, rows with problems are counted instead, unless no row is left.
    """
    problems: list[str] = []
    checked: list[Checked] = []
    tokenizer = None
    absence = ""
    try:
        tokenizer = load_tokenizer(config.model)
    except ConfigError as error:
        absence = _absence(error) if at_hand else ""
        if not absence:
            problems += error.problems
    if tokenizer is not None and spec is not None:
        problems += tokenizer_problems(tokenizer, spec)
    trained: dict[int, int] = {}  # Reading.prompts of all sources of data.train
    for key, dataset, response_tokens in _datasets(config, command):
        # its prompts may need the tokenizer's chat template
        if absence and not is_local(dataset.source):
            checked.append(Checked(key, dataset.source, None, absence=absence))
            continue
        tokens = None
        if tokenizer and spec:
            tokens = _tokens(config, tokenizer, spec, command, key, response_tokens)
        reading = Reading(config.data.bad_rows == DROP, tokens)
        if key.startswith("data.train"):
            reading.prompts = trained
        # else it is not known which rows are dropped
        if _is_learned(key) and not (reading.drop and tokens is None):
            reading.digests = bytearray()
        try:
            rows, count = _read(config, key, dataset, command, reading, at_hand)
        except ConfigError as error:
            away = _absence(error) if at_hand else ""
            if away:
                checked.append(Checked(key, dataset.source, None, absence=away))
            else:
                problems += error.problems
            continue
        is_held_out = command == "train" and not key.startswith("data.train")
        shared = len(reading.prompts.keys() & trained.keys()) if is_held_out else 0
        first = tuple(rows[i] for i in range(min(len(rows), _FIRST)))
        checked.append(Checked(key, dataset.source, count, reading, first, shared))
    if problems:
        raise ConfigError(problems)
    return checked


def _absence(error: ConfigError) -> str:
    """Why the hub does not give this machine what a run elsewhere may have; empty for any other
    error.
    """
    return str(error.__cause__) if isinstance(error.__cause__, HubAway) else ""


def _read(
    config: RunConfig,
    key: str,
    dataset: SourceConfig,
    command: str,
    reading: Reading,
    at_hand: bool,
) -> tuple[Any, int]:
    """(the rows or pairs that are kept, the number of all of them)."""
    if dataset.source.startswith(PREFIX):
        most = _SYNTHETIC_ROWS
    elif at_hand and not reading.drop:
        most = _AT_HAND_PROMPTS
    else:
        most = None
    if isinstance(dataset, PreferenceConfig):
        return read_pairs(dataset, key, config.seed, config.model, reading, most)
    assert isinstance(dataset, DatasetConfig)
    answers: Answers = "none"
    if command == "label":
        answers = answers_of_labels(config)
    elif command != "sft":
        is_evaluated = not key.startswith("data.train")
        name = key.removeprefix("eval.suites.") if is_evaluated else source_of(config, key)
        answers = answers_of(config, is_evaluated, name)
    return read_rows(dataset, key, config.seed, answers, config.model, reading, most)


def _is_learned(key: str) -> bool:
    return key.startswith(("data.train", "sft.data", "label.data"))


def digests_of(checked: Sequence[Checked]) -> dict[str, bytes | None]:
    """Config section of each source that is learned -> the digests of its usable rows; None if it
    could not be read here. A synthetic task has those of its first rows, which show task, split and
    seed, and the number of all its rows.
    """
    digests: dict[str, bytes | None] = {}
    for dataset_check in checked:
        if not _is_learned(dataset_check.key):
            continue
        row_digests = dataset_check.reading.digests
        if dataset_check.rows is None or row_digests is None:
            digests[dataset_check.key] = None
            continue
        count = b""
        if dataset_check.source.startswith(PREFIX):
            count = dataset_check.rows.to_bytes(ROW_DIGEST_BYTES)
        digests[dataset_check.key] = bytes(row_digests) + count
    return digests


def _tokens(
    config: RunConfig,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    command: str,
    key: str,
    response_tokens: int,
) -> Callable[[Any], int] | None:
    if command in ("sft", "reward-model"):
        if not tokenizer.eos_ids:
            return None
        return (demonstration_tokens if command == "sft" else responses_tokens)(tokenizer, spec)
    if command == "label":
        return label_tokens(config, tokenizer, spec)
    most = config.data.max_prompt_tokens if key.startswith("data.train") else None
    length_key = "rollout.max_tokens"
    if key == "data.eval":
        length_key = "eval.max_tokens"
    elif key.startswith("eval.suites."):
        length_key = f"{key}.max_tokens"
    return prompt_tokens(config, tokenizer, spec, response_tokens, most, length_key)


def _datasets(config: RunConfig, command: str) -> Sequence[tuple[str, SourceConfig, int]]:
    """(key, dataset, most tokens of a response) of each dataset that the command reads."""
    if command == "reward-model":
        return [(key, dataset, 0) for key, dataset in pair_sets(config)]
    if command == "sft":
        dataset, key = sft_data(config)
        datasets: list[tuple[str, SourceConfig]] = [*source_sets(dataset, key)]
        if config.sft.eval:
            datasets.append(("sft.eval", config.sft.eval))
        return [(section, source, 0) for section, source in datasets]
    if command == "label":
        return [(section, source, 0) for section, source in source_sets(*label_data(config))]
    evaluation = []
    for _, key, dataset, suite in held_out(config):
        evaluation.append((key, dataset, held_out_sampling(config, suite).max_tokens))
    train = []
    for key, source in source_sets(config.data.train, "data.train"):
        task = task_of(config, source_of(config, key))
        train.append((key, source, task.rollout.max_tokens))
    return evaluation if command == "eval" else [*train, *evaluation]
