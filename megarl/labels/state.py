"""What the labels in a folder depend on: a second `megarl label` goes on only with the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.base.files import write_whole
from megarl.config.errors import ConfigError
from megarl.config.keys import keys_of, value_at, yaml_text
from megarl.config.schema import AlgorithmConfig, RunConfig
from megarl.data.check import Checked, digests_of
from megarl.data.contents import Contents, compare_contents, contents_of, read_contents
from megarl.data.order import mixed
from megarl.labels.pairs import SCORED_FILE, read_scored
from megarl.plan.resolve import RunPlan
from megarl.plan.weights import LABEL_SETTINGS
from megarl.roles.plan import ENGINE_KEYS
from megarl.trainer.hf_files import fingerprint

COMPLETE_FILE = "complete.json"  # in label.output, once all prompts are labelled
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
_MADE_BY = (
    "label.n",
    "label.reference",
    "label.columns",
    "model.chat_template.date",
    "seed",
    "data.shuffle",
    *(f"rollout.{name}" for name in _SAMPLING),
)
_NOT_OF_SCORES = ("path", "sft", *ENGINE_KEYS)  # of a role; its weights are compared instead


def settings_of(plan: RunPlan) -> dict[str, Any]:
    """Every setting that labels depend on, and fingerprints of the weights in local folders.

    Rows, tokenizer and own code are compared by contents instead (`contents_in`).
    """
    config = plan.config
    keys = list(_MADE_BY)
    sources = [] if config.label.data else [*mixed(config.data.train)]
    if sources:
        keys.append("rollout.prompts_per_step")  # quotas are shares of it
    for key in keys_of(config):
        if sources and key.startswith("data.train.sources."):
            keys += [key] * key.endswith((".weight", ".quota"))
        if config.label.reward is None and key.startswith("reward.parts."):
            keys += [key] * key.endswith(".weight")
    record = {key: value_at(config, key) for key in keys}
    if sources:
        record["data.train.sources"] = sources
    paths = {"model.path": plan.weights_path}
    for role in plan.served:
        for name, value in asdict(role.settings).items():
            if name == "chat_template":
                value = {**value, "date": None}
            if name not in _NOT_OF_SCORES:
                record[f"roles.{role.name}.{name}"] = value
        paths[f"roles.{role.name}.path"] = role.settings.path
    for key, path in paths.items():
        record[key] = fingerprint(Path(path)) if Path(path).is_dir() else path
    return json.loads(json.dumps(record))  # tuples as lists


def contents_in(config: RunConfig, datasets: Sequence[Checked]) -> Contents:
    """What labels are made from: rows, tokenizer, chat template, and the code that scores."""
    reward = config.reward
    if config.label.reward is not None:
        reward = replace(reward, name=config.label.reward, parts={})
    labelling = replace(config, reward=reward, algorithm=AlgorithmConfig())
    return contents_of(labelling, digests_of(datasets), rewarded=True)


def begin(plan: RunPlan, datasets: Sequence[Checked]) -> list[str]:
    """Notes what the labels are made with, or compares it with what they were begun with.

    Returns lines for the user. Raises ConfigError with all differences.
    """
    config = plan.config
    folder = Path(config.label.output)
    made_with = settings_of(plan)
    contents = contents_in(config, datasets)
    settings_path = folder / LABEL_SETTINGS
    labels = f"the labels in label.output={folder}"
    if not settings_path.exists():
        if (folder / SCORED_FILE).exists():
            raise ConfigError(
                f"label.output={folder}: has {SCORED_FILE} without {LABEL_SETTINGS}, which says "
                "what it was made with; remove it, or name another folder"
            )
        contents.write(folder)
        write_whole(settings_path, json.dumps(made_with, indent=2))
        return []
    instead = "keep that, or set another label.output"
    problems = []
    before = json.loads(settings_path.read_text(encoding="utf-8"))
    for key in dict.fromkeys((*made_with, *before)):
        if made_with.get(key) != before.get(key):
            problems.append(_difference(key, made_with.get(key), before.get(key), labels, instead))
    if problems:
        raise ConfigError(problems)
    return compare_contents(
        read_contents(folder),
        contents,
        config.checkpoint.accept_changed_data,
        first_job=labels,
        instead=instead,
    )


def _difference(key: str, now: Any, before: Any, labels: str, instead: str) -> str:
    if key.endswith(".path"):
        return f"{key}: other weights than {labels} were made with; {instead}"
    return f"{key}={yaml_text(now)}: {labels} were made with {yaml_text(before)}; {instead}"


def note_complete(folder: Path, prompts: int, wanted: int | None) -> None:
    """Notes that `prompts` prompts are labelled, of the `wanted` ones (None: all rows)."""
    is_all = wanted is None or prompts < wanted
    write_whole(folder / COMPLETE_FILE, json.dumps({"prompts": prompts, "all_rows": is_all}))


def is_complete(folder: Path, wanted: int | None) -> bool:
    """Whether all `wanted` prompts are labelled (None: all rows), as `note_complete` noted.

    Not if lines of scored.jsonl have been removed meanwhile.
    """
    try:
        noted = json.loads((folder / COMPLETE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if len(read_scored(folder, noted["prompts"])) < noted["prompts"]:
        return False
    return noted["all_rows"] or (wanted is not None and wanted <= noted["prompts"])
