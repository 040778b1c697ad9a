"""Loads the rollout that `rollout.name` and `rollout.args` name, and the user's own reward functions."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError, problems_of
from megarl.config.named import find_callable
from megarl.config.schema import RunConfig
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rewards import code, ifeval
from megarl.rewards.parts import Part, all_parts
from megarl.rewards.score import parameters_of
from megarl.rollouts.environments.base import Rollout
from megarl.rollouts.environments.functions import check_arguments


class OwnReward(NamedTuple):
    function: Callable[..., Any]
    parameters: list[str]  # the fields of rewards.score.ScoreRequest that it takes


BUILT_IN = {
    "single_turn": "megarl.rollouts.environments.single_turn:single_turn",
    "tool_calls": "megarl.rollouts.environments.tool_calls:ToolCalls",
    "program": "megarl.rollouts.agents.program:Program",
    "verifiers": "megarl.rollouts.hubs.verifiers:Verifiers",
    "openenv": "megarl.rollouts.hubs.openenv:OpenEnv",
}


def load_rollout(config: RunConfig, tokenizer: Tokenizer) -> Rollout:
    """The rollout of a run, with its arguments bound. Raises: ConfigError with all problems."""
    return find_rollout(config)(tokenizer)


def find_rollout(config: RunConfig) -> Callable[[Tokenizer], Rollout]:
    """A function that makes the rollout. So far only the user's module was imported. Raises: ConfigError as `load_rollout` does."""
    name, arguments = config.rollout.name, config.rollout.args
    setting = f"rollout.name={name}"
    found = find_callable(BUILT_IN.get(name, name), setting, built_in=BUILT_IN)
    make: Callable[..., Any] = found
    if inspect.isclass(found):
        if not inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004  it is whether that is async
            raise ConfigError(f"{setting}: its objects must be callable by an async __call__; see docs/environments.md")
        return functools.partial(make, **check_arguments(found, 1, arguments, setting, "rollout.args"))
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"{setting}: must be an async function or a class; see docs/environments.md")
    bound = functools.partial(found, **check_arguments(found, 4, arguments, setting, "rollout.args"))
    return lambda tokenizer: bound


def load_reward(part: Part) -> OwnReward | None:
    """The user's own function of that part of the reward; None if something else scores it. Raises: ConfigError, also if that is not
    installed."""
    if part.name == ifeval.NAME:
        ifeval.check_installed(part.setting)
    if part.name == code.NAME:
        code.check_sandbox(part.setting)
    if ":" not in part.name:
        return None
    function = find_callable(part.name, part.setting)
    if inspect.isclass(function):
        raise ConfigError(f"{part.setting}: must be a function; see docs/own_run.md")
    return OwnReward(function, parameters_of(function, part.setting))


def check_rollout(config: RunConfig, at_hand: bool = False) -> None:
    """Checks the rollout, and the user's own reward functions. Raises: ConfigError with all problems of both.

    With `at_hand` the tokenizer may be missing on this machine; a rollout that is a class is then found, but not constructed.
    """
    without = at_hand and not Path(config.model.tokenizer or config.model.path).is_dir()
    rollout = functools.partial(find_rollout, config) if without else functools.partial(_tried, config)
    rewards = [functools.partial(load_reward, part) for part in all_parts(config)]
    if problems := problems_of(rollout, *rewards):
        raise ConfigError(problems)


def _tried(config: RunConfig) -> None:
    """Constructs the rollout, and awaits its `check`, if it has one."""
    rollout = load_rollout(config, load_tokenizer(config.model))
    if check := getattr(rollout, "check", None):
        asyncio.run(check())
