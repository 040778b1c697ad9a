"""The endless stream of training prompts, and the held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.base.rollout_types import Prompt
from megarl.config.errors import ConfigError
from megarl.config.schema import DROP, DatasetConfig, RunConfig
from megarl.config.tasks import task_of
from megarl.data.datasets import answers_of, answers_of_labels, load_rows, responses_in
from megarl.data.order import Mixture, Place, mixed, permute, source_sets, train_mixture
from megarl.data.rows import (
    Answers,
    Reading,
    Row,
    RowProblem,
    Rows,
    held_out,
    held_out_samples,
    held_out_sampling,
)
from megarl.data.tokenizer import Tokenizer
from megarl.generator.completions import Sampling
from megarl.models.spec import ModelSpec

# tokens of context and KV cache that SGLang reserves in every request (0.5.23, tp_worker.py:
# max_req_input_len)
KEPT_BACK = 6
_TRAIN = "data.train"


def row_index(ordinal: int, rows: int, order: str, shuffle: bool) -> int:
    """The row of the `ordinal`-th draw.

    Every epoch has each row once, in an order of its own that depends on `order`.
    """
    epoch, position = divmod(ordinal, rows)
    return permute(position, rows, f"{order}/{epoch}") if shuffle else position


@dataclass(frozen=True)
class Sources:
    """Maps an ordinal to its row; a pure function.

    Each source has its own epochs, which have each row once.
    """

    rows: Sequence[Rows]  # [source] the rows of each source of `mixture`
    order: str  # key of the shuffled orders
    shuffle: bool = True
    mixture: Mixture = field(default_factory=Mixture)

    def __getitem__(self, ordinal: int) -> Row:
        place = self.place(ordinal)
        return self.rows[place.source][place.row]

    def place(self, ordinal: int) -> Place:
        source = self.mixture.source(ordinal)
        draw = self.mixture.draw(ordinal)
        count = len(self.rows[source])
        name = self.mixture.names[source]
        order = f"{self.order}/{name}" if name else self.order
        row = row_index(draw, count, order, self.shuffle)
        return Place(source, draw // count, row)


def prompt_tokens(
    config: RunConfig,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    response_tokens: int,
    most: int | None = None,
    length_key: str = "rollout.max_tokens",
) -> Callable[[Row], int]:
    """Returns a function that counts the tokens of a row's prompt. `length_key`: the setting that
    decides `response_tokens`, for messages.

    It raises RowProblem if the prompt leaves no room for a response, has more than `most` tokens
    (data.max_prompt_tokens), or has unknown characters.

    KEPT_BACK is subtracted because the engine would cut a longer response short, and would then
    refuse to continue it.
    """
    tokens = spec.max_position_embeddings
    of_what = "context"
    for name, engines in config.generator.shapes.items():
        if engines.kv_cache_tokens is not None and engines.kv_cache_tokens < tokens:
            key = f"generator.groups.{name}" if name else "generator"
            tokens = engines.kv_cache_tokens
            of_what = f"{key}.kv_cache_tokens"
    less = f"{response_tokens} for the response and {KEPT_BACK} that SGLang keeps back"
    room = tokens - response_tokens - KEPT_BACK
    reckoned = f"{tokens} tokens of {of_what} less {less}"
    if room < 1:
        reckoned += f"; set a smaller {length_key}"
    if most is not None and most < room:
        room = most
        reckoned = "data.max_prompt_tokens"
    return partial(count_tokens, tokenizer=tokenizer, room=room, reckoned=reckoned)


def count_tokens(row: Row, tokenizer: Tokenizer, room: int, reckoned: str) -> int:
    """The tokens of the row's prompt.

    Raises RowProblem if they are more than `room`, or if the tokenizer lacks some characters.
    """
    ids = tokenizer.encode_prompt(row.prompt, row.rendered)
    begin = tokenizer.bos_token
    if (
        begin
        and not row.rendered
        and row.prompt.startswith(begin)
        and ids[:1] == ids[1:2] == [tokenizer.backend.token_to_id(begin)]
    ):
        reason = f"the prompt begins with {begin}, which the tokenizer adds by itself"
        raise RowProblem(f"{reason}; leave it out of prompt and prompt_template", reason)
    if len(ids) > room:
        problem = f"the prompt has {len(ids)} tokens; there is room for {room} ({reckoned})"
        raise RowProblem(problem, f"a prompt of more than {room} tokens ({reckoned})")
    if tokenizer.unknown_id is not None and tokenizer.unknown_id in ids:
        reason = "the tokenizer does not know some of the characters"
        raise RowProblem(f"{reason} of {row.prompt[:60]!r}", reason)
    return len(ids)


def dropping(config: RunConfig, tokens: Callable[[Any], int]) -> Reading | None:
    """How a run reads rows that its launcher has checked: with data.bad_rows=drop, it leaves out
    the same rows.
    """
    return Reading(drop=True, tokens=tokens) if config.data.bad_rows == DROP else None


def load_sources(
    config: RunConfig,
    dataset: DatasetConfig,
    key: str,
    mixture: Mixture,
    answers: Callable[[str], Answers],
    order: str,
    tokens: Callable[[str], Callable[[Row], int]],
) -> Sources:
    """All rows of a section's sources.

    `answers`, `tokens`: what they give for the name of a source is for its rows. If bad rows are
    dropped, rows for which that of `tokens` raises are left out. Raises ConfigError with all
    mistakes in the data.
    """
    problems = []
    rows = []
    for name, (source_key, source) in zip(mixture.names, source_sets(dataset, key), strict=True):
        reading = dropping(config, tokens(name))
        form = answers(name)
        try:
            rows.append(load_rows(source, source_key, config.seed, form, config.model, reading))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Sources(rows, f"{order}/{config.seed}", config.data.shuffle, mixture)


@dataclass(frozen=True)
class PromptStream:
    """Maps an ordinal to its prompt.

    A pure function, so a run needs only its ledger of ordinals to resume.
    """

    sources: Sources
    tokenizer: Tokenizer

    def __getitem__(self, ordinal: int) -> Prompt:
        mixture = self.sources.mixture
        source = mixture.names[mixture.source(ordinal)]
        return _prompt(ordinal, self.sources[ordinal], self.tokenizer, source)


def train_prompts(config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec) -> PromptStream:
    """The prompts of `data.train`, in the order that `seed` gives.

    Raises ConfigError for mistakes in the data.
    """

    def tokens(source: str) -> Callable[[Row], int]:
        longest = task_of(config, source).rollout.max_tokens
        return prompt_tokens(config, tokenizer, spec, longest, config.data.max_prompt_tokens)

    sources = load_sources(
        config,
        config.data.train,
        _TRAIN,
        train_mixture(config),
        answers=lambda source: answers_of(config, name=source),
        order="prompts",
        tokens=tokens,
    )
    return PromptStream(sources, tokenizer)


def label_data(config: RunConfig, source: str = "") -> tuple[DatasetConfig, str]:
    """The dataset that megarl label reads, and its config section; with the name of a `source`,
    that one of those in data.train.sources.
    """
    if config.label.data:
        return config.label.data, "label.data"
    if source:
        return mixed(config.data.train)[source], f"{_TRAIN}.sources.{source}"
    return config.data.train, _TRAIN


def labelled_prompts(config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec) -> PromptStream:
    """The prompts of `label_data`, in the order of training. Raises ConfigError."""
    dataset, key = label_data(config)
    sources = load_sources(
        config,
        dataset,
        key,
        Mixture() if config.label.data else train_mixture(config),
        answers=lambda _: answers_of_labels(config),
        order="prompts",
        tokens=lambda _: label_tokens(config, tokenizer, spec),
    )
    return PromptStream(sources, tokenizer)


def label_tokens(config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec) -> Callable[[Row], int]:
    """`prompt_tokens` for rows to label, which also checks the responses in `label.columns`."""
    most = config.data.max_prompt_tokens
    tokens = prompt_tokens(config, tokenizer, spec, config.rollout.max_tokens, most)

    def count(row: Row) -> int:
        responses_in(row.record, config.label.columns)
        return tokens(row)

    return count


def reference_of(row: Row) -> str:
    """The row's reference answer as a response: what the policy writes last in it."""
    return row.demonstration if isinstance(row.demonstration, str) else row.demonstration[-1]


@dataclass(frozen=True)
class HeldOutSet:
    """Prompts that are never trained on, and how they are sampled."""

    name: str  # of the suite; empty for data.eval
    prompts: list[Prompt]
    samples: int  # per prompt
    sampling: Sampling  # without end-of-text
    references: Sequence[str] = ()  # to each prompt, with eval.win_rate


def held_out_sets(config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec) -> list[HeldOutSet]:
    """The first `eval.limit` prompts of `data.eval`, then of each of `eval.suites`.

    Raises ConfigError for mistakes in the data.
    """
    sets = []
    for name, key, dataset, suite in held_out(config):
        sampling = held_out_sampling(config, suite)
        reading = dropping(config, prompt_tokens(config, tokenizer, spec, sampling.max_tokens))
        answers = answers_of(config, True, name)
        rows = load_rows(dataset, key, config.seed, answers, config.model, reading)
        limit = len(rows)
        if config.eval.limit is not None:
            limit = min(config.eval.limit, limit)
        prompts = [_prompt(i, rows[i], tokenizer, name) for i in range(limit)]
        samples = held_out_samples(config, suite)
        references: list[str] = []
        if config.eval.win_rate is not None and not (suite and suite.benchmark):
            references = [reference_of(rows[i]) for i in range(limit)]
        sets.append(HeldOutSet(name, prompts, samples, sampling, references))
    return sets


def _prompt(ordinal: int, row: Row, tokenizer: Tokenizer, source: str) -> Prompt:
    return Prompt(
        ordinal=ordinal,
        token_ids=tokenizer.encode_prompt(row.prompt, row.rendered),
        text=row.prompt,
        answer=row.answer,
        row=row.record,
        source=source,
    )
