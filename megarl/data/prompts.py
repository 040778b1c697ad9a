"""The endless stream of training prompts, and the held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.config.data import MixtureConfig
from megarl.config.errors import ConfigError
from megarl.config.schema import DatasetConfig, RunConfig
from megarl.data.curriculum import Place
from megarl.data.datasets import answers_of, load_rows
from megarl.data.held_out import held_out, held_out_tokens
from megarl.data.mixture import Mixture, source_sets, train_mixture
from megarl.data.permutation import permute
from megarl.data.rows import Answers, Row, Rows
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt


def row_index(ordinal: int, rows: int, order: str, shuffle: bool) -> int:
    """Row of the `ordinal`-th draw: every row once per epoch; each epoch has its own order, which depends on `order`."""
    epoch, position = divmod(ordinal, rows)
    return permute(position, rows, f"{order}/{epoch}") if shuffle else position


@dataclass(frozen=True)
class Sources:
    """ordinal -> row, a pure function. Each source has epochs of its own, none of which repeats a row."""

    rows: Sequence[Rows]  # of each source of `mixture`
    order: str  # what shuffled orders depend on
    shuffle: bool = True
    mixture: Mixture = field(default_factory=Mixture)

    def __getitem__(self, ordinal: int) -> Row:
        place = self.place(ordinal)
        return self.rows[place.source][place.row]

    def place(self, ordinal: int) -> Place:
        source = self.mixture.source(ordinal)
        draw, count, name = self.mixture.draw(ordinal), len(self.rows[source]), self.mixture.names[source]
        row = row_index(draw, count, f"{self.order}/{name}" if name else self.order, self.shuffle)
        return Place(source, draw // count, row)


def load_sources(config: RunConfig, dataset: MixtureConfig, key: str, mixture: Mixture, answers: Answers, order: str) -> Sources:
    """All rows of a section's sources. Raises ConfigError with all mistakes in the data."""
    tokenizer, problems, rows = config.model.tokenizer or config.model.path, [], []
    for own, source in source_sets(dataset, key):
        try:
            rows.append(load_rows(source, own, config.seed, answers, tokenizer))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Sources(rows, f"{order}/{config.seed}", config.data.shuffle, mixture)


@dataclass(frozen=True)
class PromptStream:
    """ordinal -> Prompt, a pure function, so a run resumes by its ledger of prompts alone."""

    sources: Sources
    tokenizer: Tokenizer

    def __getitem__(self, ordinal: int) -> Prompt:
        mixture = self.sources.mixture
        return _prompt(ordinal, self.sources[ordinal], self.tokenizer, mixture.names[mixture.source(ordinal)])


def train_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptStream:
    """The prompts of `data.train`, in the order given by `seed`. Raises ConfigError for mistakes in the data."""
    sources = load_sources(config, config.data.train, "data.train", train_mixture(config), answers_of(config), "prompts")
    return PromptStream(sources, tokenizer)


@dataclass(frozen=True)
class HeldOutSet:
    """Prompts that are never trained on, and how they are sampled."""

    name: str  # "" for data.eval, else the suite's
    prompts: list[Prompt]
    samples: int  # per prompt
    temperature: float  # 0: greedy
    max_tokens: int
    stop: tuple[str, ...] = ()  # rollout.stop


def held_out_sets(config: RunConfig, tokenizer: Tokenizer) -> list[HeldOutSet]:
    """`data.eval`, then `eval.suites`, the first `eval.limit` prompts of each. Raises ConfigError for mistakes in the data."""
    return [
        HeldOutSet(
            name=name,
            prompts=_first_prompts(config, name, key, dataset, tokenizer),
            samples=config.eval.samples if own is None or own.samples is None else own.samples,
            temperature=config.eval.temperature if own is None or own.temperature is None else own.temperature,
            max_tokens=held_out_tokens(config, own),
            stop=tuple(config.rollout.stop),
        )
        for name, key, dataset, own in held_out(config)
    ]


def _first_prompts(config: RunConfig, name: str, key: str, dataset: DatasetConfig, tokenizer: Tokenizer) -> list[Prompt]:
    rows = load_rows(dataset, key, config.seed, answers_of(config, True, name), tokenizer.source)
    limit = len(rows) if config.eval.limit is None else min(config.eval.limit, len(rows))
    return [_prompt(i, rows[i], tokenizer, name) for i in range(limit)]


def _prompt(ordinal: int, row: Row, tokenizer: Tokenizer, source: str) -> Prompt:
    token_ids = tokenizer.encode_prompt(row.prompt)
    return Prompt(ordinal=ordinal, token_ids=token_ids, text=row.prompt, answer=row.answer, row=row.record, source=source)
