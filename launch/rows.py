"""`megarl rows`: writes the rows of an environment from a hub to files that runs read."""

from __future__ import annotations

from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.schema import OF_HUBS, RunConfig
from megarl.config.tasks import source_of, tasks_of, with_source_keys
from megarl.data.order import source_sets
from megarl.data.rows import held_out


def write_environment_rows(config: RunConfig) -> str:
    """Writes the data sets of each source whose rollout is an environment of a hub: its training
    prompts, and the first held-out set with its task.

    Returns a text with their numbers of rows. Raises ConfigError.
    """
    # not at the top: these import aiohttp
    from megarl.agents.hubs import openenv, verifiers
    from megarl.rollouts.environments.loading import find_rollout

    hubs = {"verifiers": verifiers, "openenv": openenv}
    tasks = {name: task for name, task in tasks_of(config).items() if task.rollout.name in OF_HUBS}
    if not tasks:
        raise ConfigError(
            f"rollout.name={config.rollout.name}: only an environment of a hub "
            f"({', '.join(OF_HUBS)}) has rows of its own"
        )
    texts = []
    for source, task in tasks.items():
        files = _files_of(config, source)
        try:
            find_rollout(task)  # checks the arguments
        except ConfigError as error:
            raise ConfigError(
                [with_source_keys(problem, config, source) for problem in error.problems]
            ) from error
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
        texts.append(hubs[task.rollout.name].write_rows(task.rollout.args, files))
    return "".join(texts)


def _files_of(config: RunConfig, source: str) -> dict[str, Path]:
    """Split -> the file that its rows are written to. Raises ConfigError."""
    datasets = {}
    for key, dataset in source_sets(config.data.train, "data.train"):
        if source_of(config, key) == source:
            datasets["train"] = (key, dataset.source)
    for _, key, dataset, suite in held_out(config):
        if source_of(config, key) == source and (suite is None or suite.task):
            datasets.setdefault("eval", (key, dataset.source))
    problems = [
        f"{key}.source={path}: must be a .jsonl file, to which the rows are written"
        for key, path in datasets.values()
        if not path.endswith(".jsonl")
    ]
    if problems:
        raise ConfigError(problems)
    return {split: Path(path).expanduser() for split, (_, path) in datasets.items()}
