"""The schema's sections on datasets."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from megarl.config.limits import at_least, setting


@dataclass
class SourceConfig:
    """What all datasets have: where rows come from, and their prompts."""

    source: str = setting(MISSING, "synthetic:<task>, a .jsonl or .parquet file, or a hub name")
    split: str = setting("train", "which split of the source")
    subset: str | None = setting(None, 'hub configuration name, such as "main" of gsm8k')
    prompt_key: str = setting("question", "column of the prompt, or column.field for a field inside a column")
    prompt_template: str = setting(
        "{prompt}",
        "what the model sees; {prompt} stands for the column. chat: apply the model's chat template to the column, a user's message or a "
        "list of messages",
    )
    size: int | None = setting(None, "use only so many first rows; null: all", at_least(1))


@dataclass
class DatasetConfig(SourceConfig):
    answer_key: str = setting("answer", "column of the reference answer, written like prompt_key")
    demonstration_key: str | None = setting(
        None, "column that SFT learns: a text, or a list of texts by policy and environment in turn; null: answer_key"
    )


@dataclass
class PreferenceConfig(SourceConfig):
    """Pairs of responses to a prompt, of which one is preferred."""

    prompt_key: str = setting("prompt", "column of the prompt, or column.field for a field inside a column")
    chosen_key: str = setting(
        "chosen",
        "column of the preferred response, written like prompt_key: a text, or a list of messages whose last is the response",
    )
    rejected_key: str = setting("rejected", "column of the other response, as chosen_key")
    margin_key: str | None = setting(
        None, "column with the least difference of the two scores that a pair is to have, which the loss takes off it; null: 0 for all"
    )


@dataclass
class DataConfig:
    train: DatasetConfig = field(default_factory=DatasetConfig)
    eval: DatasetConfig | None = setting(None, "the held-out set; null: none")
    shuffle: bool = setting(True, "shuffle the training prompts in every epoch, depending on the seed")
