"""Changing settings of a config, and checking the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.config.keys import field_path, yaml_text
from megarl.config.schema import RunConfig
from megarl.models import ModelSpec
from megarl.plan.checks import CONFIG_CHECKS
from megarl.plan.model_checks import MODEL_CHECKS, check_expert_sequences

Settings = Mapping[str, Any]  # by dotted key


def turned(config: RunConfig, settings: Settings) -> RunConfig:
    """`config` with these settings, whose keys are section.name."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, name = field_path(key).split(".")
        sections.setdefault(section, {})[name] = value
    return replace(config, **{section: replace(getattr(config, section), **values) for section, values in sections.items()})


def problems(config: RunConfig, spec: ModelSpec) -> list[str]:
    """What `megarl plan` and `megarl train` would object to in the sizes; empty if the config can be planned."""
    found = [problem for check in CONFIG_CHECKS for problem in check(config)]
    return found + [problem for check in (*MODEL_CHECKS, check_expert_sequences) for problem in check(config, spec)]


def written(settings: Settings) -> str:
    """The settings as overrides on a command line."""
    return " ".join(f"{key}={yaml_text(value)}" for key, value in settings.items())
