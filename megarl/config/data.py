"""The schema's sections on datasets."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from megarl.config.limits import INPUT, above, at_least, between, one_of, setting


@dataclass
class SourceConfig:
    """What all datasets have: where rows come from, and their prompts."""

    source: str = setting(
        MISSING, "synthetic:<task>, a file that ends in .jsonl, .json, .csv, .tsv or .parquet (docs/data.md), or a hub name", path=INPUT
    )
    split: str = setting("train", "which split of the source")
    subset: str | None = setting(None, 'hub configuration name, such as "main" of gsm8k')
    prompt_key: str | None = setting(
        None,
        "column of the prompt, or column.field for a field inside a column; null: question, or what rows in the formats of OpenAI, verl "
        "and slime call it (docs/data.md)",
    )
    prompt_template: str = setting(
        "{prompt}",
        "what the model sees; {prompt} stands for the column. chat: apply the model's chat template to the column, a user's message or a "
        "list of messages; to a list of messages it is applied in any case",
    )
    tools_key: str = setting("tools", "column of the tools that the chat template presents to the model, where rows have one")
    size: int | None = setting(None, "use only so many first rows; null: all", at_least(1))


@dataclass
class DatasetConfig(SourceConfig):
    answer_key: str | None = setting(
        None, "column of the reference answer, written like prompt_key; null: answer, or what rows in a known format call it"
    )
    demonstration_key: str | None = setting(
        None,
        "column that SFT learns: a text, or a list of texts by policy and environment in turn; null: answer_key, or all of a conversation",
    )
    learn: str = setting(
        "all",
        "which of the assistant's turns SFT learns where a row is a conversation; a message with weight=0 or train=false is not learned",
        one_of("all", "last"),
    )


@dataclass
class PreferenceConfig(SourceConfig):
    """Pairs of responses to a prompt, of which one is preferred."""

    prompt_key: str | None = setting(
        None,
        "column of the prompt, or column.field for a field inside a column; null: prompt, or without such a column what both responses "
        "begin with",
    )
    chosen_key: str = setting(
        "chosen",
        "column of the preferred response, written like prompt_key: a text, or a list of messages whose last is the response",
    )
    rejected_key: str = setting("rejected", "column of the other response, as chosen_key")
    margin_key: str | None = setting(
        None, "column with the least difference of the two scores that a pair is to have, which the loss takes off it; null: 0 for all"
    )


@dataclass
class MixedConfig(DatasetConfig):
    """One of several sources."""

    weight: float | None = setting(
        None, "its share of the prompts that no quota takes, in proportion to the other weights; null with a quota, else 1", above(0)
    )
    quota: int | None = setting(None, "instead of a weight: how many prompts of each step are its own", at_least(1))


MIXED = "sources"  # as source


@dataclass
class MixtureConfig(DatasetConfig):
    """One dataset, or several that are mixed."""

    source: str = setting(MIXED, "as that of any dataset (see data.eval.source), and must be set; sources: those of `sources`", path=INPUT)
    sources: dict[str, MixedConfig | None] = field(
        default_factory=dict,
        metadata={"meaning": "several datasets, by name, whose prompts are mixed (docs/data.md); NAME=null removes one"},
    )


FAIL, DROP = "fail", "drop"  # data.bad_rows


@dataclass
class CurriculumConfig:
    """Prompts that are too easy or too hard rest for a while (docs/data.md)."""

    min_pass_rate: float = setting(0.05, "a prompt rests if a smaller share of its samples passes", between(0, 1))
    max_pass_rate: float = setting(0.95, "a prompt rests if a larger share of its samples passes", between(0, 1))
    pass_reward: float = setting(1.0, "the least reward of a sample that passes", between(-1e6, 1e6))
    rest_epochs: int = setting(2, "epochs of its source that such a prompt is left out of; then it comes again", at_least(1))


@dataclass
class DataConfig:
    train: MixtureConfig = field(default_factory=MixtureConfig)
    eval: DatasetConfig | None = setting(None, "the held-out set; null: none")
    curriculum: CurriculumConfig | None = setting(None, "which training prompts rest; null: none")
    bad_rows: str = setting(
        FAIL,
        "what happens with rows of all sets that cannot be used: empty or missing fields, wrong types, prompts that leave no room for a "
        "response. fail: nothing starts, and the first are named; drop: they are left out and counted, unless no other is left",
        one_of(FAIL, DROP),
    )
    shuffle: bool = setting(True, "shuffle the training prompts in every epoch, depending on the seed")
