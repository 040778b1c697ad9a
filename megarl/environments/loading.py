"""From `rollout.name` and `rollout.args` to the rollout."""

from __future__ import annotations

import functools
import inspect

from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.environments.base import Rollout
from megarl.environments.functions import check_arguments, find_callable

BUILT_IN = {
    "single_turn": "megarl.environments.single_turn:single_turn",
    "tool_calls": "megarl.environments.tool_calls:ToolCalls",
}


def load_rollout(config: RunConfig, tokenizer: Tokenizer) -> Rollout:
    """The rollout of a run, its arguments bound. Raises: ConfigError with all that is wrong with it."""
    name, arguments = config.rollout.name, config.rollout.args
    setting = f"rollout.name={name}"
    found = find_callable(BUILT_IN.get(name, name), setting, built_in=BUILT_IN)
    if inspect.isclass(found):
        rollout = found(tokenizer, **check_arguments(found, 1, arguments, setting, "rollout.args"))
        if not inspect.iscoroutinefunction(getattr(rollout, "__call__", None)):
            raise ConfigError(f"{setting}: its objects must be callable by an async __call__; see docs/environments.md")
        return rollout
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"{setting}: must be an async function or a class; see docs/environments.md")
    return functools.partial(found, **check_arguments(found, 4, arguments, setting, "rollout.args"))


def check_rollout(config: RunConfig) -> None:
    """Also the reward function, if it is the user's own. Raises: ConfigError. Nothing is started."""
    load_rollout(config, load_tokenizer(config.model))
    if ":" in config.reward.name:
        setting = f"reward.name={config.reward.name}"
        function = find_callable(config.reward.name, setting)
        if inspect.isclass(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"{setting}: must be a plain function; see docs/own_run.md")
        try:
            inspect.signature(function).bind("text", "answer")
        except TypeError as error:
            raise ConfigError(f"{setting}: must take two arguments, the response's text and the reference answer: {error}") from error
