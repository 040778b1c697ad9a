"""`megarl rows`: writes the rows of an environment from a hub to files that runs read."""

from __future__ import annotations

from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.schema import OF_HUBS, RunConfig


def write_environment_rows(config: RunConfig) -> str:
    """Writes data.train.source and data.eval.source.

    Returns a text with their numbers of rows. Raises ConfigError.
    """
    # not at the top: these import aiohttp
    from megarl.agents.hubs import openenv, verifiers
    from megarl.rollouts.environments.loading import find_rollout

    if config.rollout.name not in OF_HUBS:
        raise ConfigError(
            f"rollout.name={config.rollout.name}: only an environment of a hub "
            f"({', '.join(OF_HUBS)}) has rows of its own"
        )
    sources = {"train": config.data.train.source}
    if config.data.eval:
        sources["eval"] = config.data.eval.source
    problems = [
        f"data.{split}.source={source}: must be a .jsonl file, to which the rows are written"
        for split, source in sources.items()
        if not source.endswith(".jsonl")
    ]
    if problems:
        raise ConfigError(problems)
    find_rollout(config)  # checks the arguments
    files = {split: Path(source).expanduser() for split, source in sources.items()}
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
    hub = {"verifiers": verifiers, "openenv": openenv}[config.rollout.name]
    return hub.write_rows(config.rollout.args, files)
