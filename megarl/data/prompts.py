"""The endless stream of training prompts, and the held-out ones."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import RunConfig
from megarl.data.datasets import answers_of, load_rows
from megarl.data.permutation import permute
from megarl.data.rows import Row, Rows
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt


def row_index(ordinal: int, rows: int, order: str, shuffle: bool) -> int:
    """Row of the `ordinal`-th draw: every row once per epoch, each epoch in an order of its own (a function of `order`)."""
    epoch, position = divmod(ordinal, rows)
    return permute(position, rows, f"{order}/{epoch}") if shuffle else position


@dataclass(frozen=True)
class PromptStream:
    """ordinal -> Prompt, a pure function: a run resumes by its number of prompts alone, and no epoch repeats one."""

    rows: Rows
    tokenizer: Tokenizer
    seed: int
    shuffle: bool = True

    def __getitem__(self, ordinal: int) -> Prompt:
        row = self.rows[row_index(ordinal, len(self.rows), f"prompts/{self.seed}", self.shuffle)]
        return _prompt(ordinal, row, self.tokenizer)


def train_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptStream:
    """The prompts of `data.train`, in the order that `seed` gives. Raises: ConfigError for mistakes in the data."""
    rows = load_rows(config.data.train, "data.train", config.seed, answers_of(config), tokenizer.source)
    return PromptStream(rows, tokenizer, config.seed, config.data.shuffle)


def eval_prompts(config: RunConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The held-out prompts of `data.eval`, the first `eval.limit` of them; none without that section. Raises: ConfigError."""
    if config.data.eval is None:
        return []
    rows = load_rows(config.data.eval, "data.eval", config.seed, answers_of(config), tokenizer.source)
    limit = len(rows) if config.eval.limit is None else min(config.eval.limit, len(rows))
    return [_prompt(i, rows[i], tokenizer) for i in range(limit)]


def _prompt(ordinal: int, row: Row, tokenizer: Tokenizer) -> Prompt:
    return Prompt(ordinal=ordinal, token_ids=tokenizer.encode_prompt(row.prompt), text=row.prompt, answer=row.answer)
