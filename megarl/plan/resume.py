"""Checks that a run directory with checkpoints may be continued with this config, and lists changed settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.config.data import DROP
from megarl.config.errors import ConfigError
from megarl.config.keys import general, keys_of, settings, value_at, yaml_text
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.plan.checkpoints import check_names, complete_checkpoints

# Checkpoints, the order of prompts and the meaning of the reward depend on these settings. Parallel sizes may change.
FIXED_KEYS = (
    "model.path",
    "model.tokenizer",
    "model.dtype",
    *(f"lora.{key}" for key in ("rank", "alpha", "targets", "experts", "init")),
    *(key for key in settings() if key.startswith(("data.train.", "data.curriculum."))),
    "data.shuffle",
    "data.bad_rows",
    "algorithm.name",
    "algorithm.distill.over",
    "algorithm.distill.top_k",
    "rollout.prompts_per_step",
    "rollout.n",
    "reward.name",
    "reward.parts.NAME.name",
    "reward.parts.NAME.weight",
    "roles.NAME.role",
    "roles.NAME.path",
    "roles.NAME.on",
    "seed",
)
# With data.bad_rows=drop, which rows are left out depends on these too, and so does the order of the others.
_ROOM_KEYS = ("rollout.max_tokens", "generator.kv_cache_tokens")


def check_resume(config: RunConfig) -> Iterable[str]:
    """Problems with resuming from `config.run_dir`; none if it has no checkpoint yet."""
    yield from check_names(config.run_dir)
    try:
        before = _earlier(config)
    except ConfigError as error:
        yield f"run_dir={config.run_dir}: its config.yaml cannot be read ({error.problems[0]}); use another run_dir"
        return
    fixed = (*FIXED_KEYS, *_ROOM_KEYS) if config.data.bad_rows == DROP else FIXED_KEYS
    for key, value in differences(before, config).items():
        if general(key) in fixed:
            now = yaml_text(value_at(config, key))
            yield f"{key}={now}: the run in run_dir={config.run_dir} began with {yaml_text(value)}; keep that, or use another run_dir"


def changes(config: RunConfig) -> list[str]:
    """One line for each setting of a resumed run that has changed since its last start."""
    if not _settings_before(config).is_file():
        return [f"what, if anything, cannot be said: {_settings_before(config)} is gone"]
    return [
        f"{key}={yaml_text(value_at(config, key))}, was {yaml_text(value)}" for key, value in differences(_earlier(config), config).items()
    ]


def differences(before: Mapping[str, Any], now: RunConfig) -> dict[str, Any]:
    """The settings that have other values than in `before`, with their values before; None for those under names that are new."""
    keys = dict.fromkeys((*before, *keys_of(now))) if before else ()
    return {key: before.get(key) for key in keys if before.get(key) != value_at(now, key)}


def _earlier(config: RunConfig) -> Mapping[str, Any]:
    """Every setting of the run in `config.run_dir`; empty if there is no checkpoint to resume from. Raises ConfigError."""
    written = _settings_before(config)
    if not written.is_file() or not complete_checkpoints(config.run_dir):
        return {}
    earlier = load_config(written)
    return {key: value_at(earlier, key) for key in keys_of(earlier)}


def _settings_before(config: RunConfig) -> Path:
    return Path(config.run_dir) / "config.yaml"
