"""The task of each source: how its prompts are played and scored, and how they are learned from.

A source of data.train.sources may have sections `reward`, `rollout` and `algorithm` of its own. Laid
over the run's sections, they give a RunConfig. So whatever reads these sections of a RunConfig works
for a source too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from megarl.config.schema import (
    OF_HUBS,
    MixedConfig,
    RewardConfig,
    RunConfig,
    SourceAlgorithmConfig,
    SourceRewardConfig,
    SourceRolloutConfig,
)

_SOURCES = "data.train.sources."
_SUITES = "eval.suites."


def task_of(config: RunConfig, source: str) -> RunConfig:
    """`config` with what the source of this name sets laid over the run's own sections.

    For any other name, such as the empty one, it is `config` itself.
    """
    overrides = _overrides(config.data.train.sources.get(source))
    if not any(overrides.values()):
        return config
    reward = overrides["reward"]
    rollout = overrides["rollout"]
    if "parts" not in reward and ("name" in reward or rollout.get("name") in OF_HUBS):
        # an environment of a hub has a reward of its own, instead of the run's
        reward = {"name": RewardConfig.name, "parts": {}, **reward}
    if "name" not in rollout:
        rollout = {**rollout, "args": config.rollout.args | rollout.get("args", {})}
    return replace(
        config,
        reward=replace(config.reward, **reward),
        rollout=replace(config.rollout, **rollout),
        algorithm=replace(config.algorithm, **overrides["algorithm"]),
    )


def _overrides(source: MixedConfig | None) -> dict[str, dict[str, Any]]:
    """Section -> the settings that the source itself has there."""
    overrides: dict[str, dict[str, Any]] = {"reward": {}, "rollout": {}, "algorithm": {}}
    if source is None:
        return overrides
    for section, settings in overrides.items():
        source_section: SourceRewardConfig | SourceRolloutConfig | SourceAlgorithmConfig
        source_section = getattr(source, section)
        for field in fields(source_section):
            value = getattr(source_section, field.name)
            if field.name == "parts":
                value = {name: part for name, part in value.items() if part is not None}
            if value not in (None, {}):
                settings[field.name] = value
    if "name" in overrides["rollout"]:
        overrides["rollout"].setdefault("args", {})  # the run's are another rollout's
    return overrides


def tasks_of(config: RunConfig) -> dict[str, RunConfig]:
    """The task of each source of training prompts, by its name in data.train.sources.

    Without these, all prompts have the run's own, under the empty name.
    """
    sources = config.data.train.sources
    names = [name for name, source in sources.items() if source is not None]
    return {name: task_of(config, name) for name in names or [""]}


def sources_of_each_task(config: RunConfig) -> list[list[str]]:
    """The names of the sources of training prompts, in one list if their tasks have the same reward
    and the same rollouts.
    """
    tasks = tasks_of(config)
    lists: list[list[str]] = []
    for source, task in tasks.items():
        for names in lists:
            first = tasks[names[0]]
            if (first.reward, first.rollout) == (task.reward, task.rollout):
                names.append(source)
                break
        else:
            lists.append([source])
    return lists


def played_tasks(config: RunConfig) -> dict[str, RunConfig]:
    """The tasks with rollouts of their own, by a source that has them: those of training prompts,
    and under the empty name the run's own, if a held-out set has that.
    """
    tasks = tasks_of(config)
    suites = [suite for suite in config.eval.suites.values() if suite is not None]
    if config.data.eval or any(suite.task is None for suite in suites):
        tasks.setdefault("", config)
    played: dict[str, RunConfig] = {}
    for source, task in tasks.items():
        if all(task.rollout != other.rollout for other in played.values()):
            played[source] = task
    return played


def source_of(config: RunConfig, dataset: str) -> str:
    """The name of the source whose task a dataset has; empty: it has the run's own.

    `dataset`: the section of the dataset, such as eval.suites.NAME or data.train.sources.NAME.
    """
    if dataset.startswith(_SOURCES):
        return dataset.removeprefix(_SOURCES)
    suite = config.eval.suites.get(dataset.removeprefix(_SUITES))
    return (suite.task if suite else None) or ""


def with_source_keys(text: str, config: RunConfig, source: str) -> str:
    """`text`, with keys of the run's sections replaced by those of the source that sets them."""
    keys = []
    for section, settings in _overrides(config.data.train.sources.get(source)).items():
        keys += [re.escape(f"{section}.{name}") for name in settings]
    if not keys:
        return text
    return re.sub(
        rf"(?<![\w.])({'|'.join(keys)})\b", lambda match: f"{_SOURCES}{source}.{match[1]}", text
    )


def by_source(check: Callable[[RunConfig], Iterable[str]]) -> Callable[[RunConfig], Iterable[str]]:
    """The check of every source's task. Its problems name the keys to change, each once."""

    @functools.wraps(check)
    def check_tasks(config: RunConfig) -> Iterable[str]:
        problems: dict[str, None] = {}
        for source, task in tasks_of(config).items():
            for problem in check(task):
                problems[with_source_keys(problem, config, source)] = None
        return list(problems)

    return check_tasks
