"""The endless stream of training prompts, and the held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import DatasetConfig, RunConfig
from megarl.data.datasets import answers_of, load_rows
from megarl.data.held_out import held_out, held_out_tokens
from megarl.data.permutation import permute
from megarl.data.rows import Row, Rows
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt


def row_index(ordinal: int, rows: int, order: str, shuffle: bool) -> int:
    """Row of the `ordinal`-th draw: every row once per epoch; each epoch has its own order, which depends on `order`."""
    epoch, position = divmod(ordinal, rows)
    return permute(position, rows, f"{order}/{epoch}") if shuffle else position


@dataclass(frozen=True)
class PromptStream:
    """ordinal -> Prompt, a pure function, so a run resumes by its number of prompts alone. No epoch repeats a prompt."""

    rows: Rows
    tokenizer: Tokenizer
    seed: int
    shuffle: bool = True

    def __getitem__(self, ordinal: int) -> Prompt:
        row = self.rows[row_index(ordinal, len(self.rows), f"prompts/{self.seed}", self.shuffle)]
        return _prompt(ordinal, row, self.tokenizer)


def train_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptStream:
    """The prompts of `data.train`, in the order given by `seed`. Raises ConfigError for mistakes in the data."""
    rows = load_rows(config.data.train, "data.train", config.seed, answers_of(config), tokenizer.source)
    return PromptStream(rows, tokenizer, config.seed, config.data.shuffle)


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
            prompts=_first_prompts(config, key, dataset, tokenizer),
            samples=config.eval.samples if own is None or own.samples is None else own.samples,
            temperature=config.eval.temperature if own is None or own.temperature is None else own.temperature,
            max_tokens=held_out_tokens(config, own),
            stop=tuple(config.rollout.stop),
        )
        for name, key, dataset, own in held_out(config)
    ]


def _first_prompts(config: RunConfig, key: str, dataset: DatasetConfig, tokenizer: Tokenizer) -> list[Prompt]:
    rows = load_rows(dataset, key, config.seed, answers_of(config, evaluated=True), tokenizer.source)
    limit = len(rows) if config.eval.limit is None else min(config.eval.limit, len(rows))
    return [_prompt(i, rows[i], tokenizer) for i in range(limit)]


def _prompt(ordinal: int, row: Row, tokenizer: Tokenizer) -> Prompt:
    token_ids = tokenizer.encode_prompt(row.prompt)
    return Prompt(ordinal=ordinal, token_ids=token_ids, text=row.prompt, answer=row.answer, row=row.record)
