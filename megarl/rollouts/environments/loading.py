"""Loads the rollout that `rollout.name` and `rollout.args` set, and the user's own reward
functions.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megarl.base.coroutines import run_coroutine
from megarl.config.errors import ConfigError, problems_of
from megarl.config.limits import find_callable
from megarl.config.schema import RolloutConfig, RunConfig
from megarl.config.tasks import played_tasks, with_source_keys
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rewards import code, ifeval
from megarl.rewards.score import RewardPart, all_parts, parameters_of
from megarl.rollouts.environments.base import Rollout, ToolError
from megarl.sandbox.pool import CallFailed, WorkerPool


def check_arguments(
    function: Callable[..., Any], positional: int, arguments: dict[str, Any], setting: str, key: str
) -> dict[str, Any]:
    """Converts `arguments` strictly to the annotated types of the keyword-only parameters of
    `function`.

    Args: positional, how many positional arguments it must take; setting, the "key=value" that
    names it; key, the key of its arguments. Raises: ConfigError with all problems: unknown and
    missing arguments, wrong types, a signature that does not fit.
    """
    parameters = list(inspect.signature(function).parameters.values())
    before = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    if len(before) != positional or len(before) + len(keywords) != len(parameters):
        shape = (
            f"{positional} positional argument{'s' * (positional > 1)}, and all others by "
            "keyword only"
        )
        raise ConfigError(f"{setting}: must take {shape}; see docs/extending.md")
    hints = typing.get_type_hints(
        function.__init__ if inspect.isclass(function) else function, include_extras=True
    )
    problems = []
    for name in keywords:
        if name not in hints:
            problems.append(f"{setting}: its argument {name} has no type annotation")
    for name, value in arguments.items():
        if name not in keywords:
            problems.append(_unknown(str(name), keywords, f"{key}.{name}={value}"))
    for name, p in keywords.items():
        if p.default is p.empty and name not in arguments:
            problems.append(f"{key}.{name}: must be set")
    converted = {}
    for name in keywords.keys() & arguments.keys() & hints.keys():
        try:
            converted[name] = msgspec.convert(arguments[name], hints[name])
        except msgspec.ValidationError as error:
            problems.append(
                f"{key}.{name}={arguments[name]}: {str(error)[:1].lower()}{str(error)[1:]}"
            )
    if problems:
        raise ConfigError(problems)
    return converted


def _unknown(name: str, keywords: Iterable[str], shown: str) -> str:
    near = difflib.get_close_matches(name, list(keywords), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(keywords) or 'none'}"
    return f"{shown}: unknown argument; {hint}"


class UserReward(NamedTuple):
    function: Callable[..., Any]
    parameters: list[str]  # the fields of rewards.score.ScoreRequest that it takes as arguments


BUILT_IN = {
    "single_turn": "megarl.rollouts.environments.single_turn:single_turn",
    "tool_calls": "megarl.rollouts.environments.tool_calls:ToolCalls",
    "program": "megarl.agents.program:Program",
    "verifiers": "megarl.agents.hubs.verifiers:Verifiers",
    "openenv": "megarl.agents.hubs.openenv:OpenEnv",
}


def load_rollout(config: RunConfig, tokenizer: Tokenizer) -> Rollout:
    """The rollout of a run, with `rollout.args` bound. Raises: ConfigError with all problems."""
    return find_rollout(config)(tokenizer)


def find_rollout(config: RunConfig) -> Callable[[Tokenizer], Rollout]:
    """A function that makes the rollout from a tokenizer.

    Imports the user's module only. Raises: ConfigError, as `load_rollout` does.
    """
    name = config.rollout.name
    arguments = config.rollout.args
    setting = f"rollout.name={name}"
    target = find_callable(BUILT_IN.get(name, name), setting, built_in=BUILT_IN)
    make: Callable[..., Any] = target
    if inspect.isclass(target):
        call = getattr(target, "__call__", None)  # noqa: B004  asks whether __call__ is async
        if not inspect.iscoroutinefunction(call):
            raise ConfigError(
                f"{setting}: its objects must be callable by an async __call__; see "
                "docs/extending.md"
            )
        return functools.partial(
            make, **check_arguments(target, 1, arguments, setting, "rollout.args")
        )
    if not inspect.iscoroutinefunction(target):
        raise ConfigError(f"{setting}: must be an async function or a class; see docs/extending.md")
    bound = functools.partial(
        target, **check_arguments(target, 4, arguments, setting, "rollout.args")
    )
    return lambda tokenizer: bound


def load_reward(part: RewardPart) -> UserReward | None:
    """The user's own function that scores `part` of the reward; None if the part is built in or a
    model. Raises: ConfigError, also if a package that it needs is not installed.
    """
    if part.name == ifeval.NAME:
        ifeval.check_installed(part.setting)
    if part.name == code.NAME:
        code.check_sandbox(part.setting)
    if ":" not in part.name:
        return None
    function = find_callable(part.name, part.setting)
    if inspect.isclass(function):
        raise ConfigError(f"{part.setting}: must be a function; see docs/extending.md")
    return UserReward(function, parameters_of(function, part.setting))


def check_rollout(config: RunConfig, at_hand: bool = False) -> None:
    """Checks the rollout of each source, and the user's own reward functions.

    Raises: ConfigError with all problems of both.

    With `at_hand`, if the tokenizer is not on this machine, a rollout that is a class is imported
    but not constructed.
    """
    tokenizer_missing = at_hand and not Path(config.model.tokenizer or config.model.path).is_dir()
    check_of_rollout = find_rollout if tokenizer_missing else _check_constructed
    problems: list[str] = []
    for source, task in played_tasks(config).items():
        for problem in problems_of(functools.partial(check_of_rollout, task)):
            problems.append(with_source_keys(problem, config, source))
    problems += problems_of(*(functools.partial(load_reward, part) for part in all_parts(config)))
    problems = list(dict.fromkeys(problems))
    if problems:
        raise ConfigError(problems)


def _check_constructed(config: RunConfig) -> None:
    """Constructs the rollout, and awaits its `check`, if it has one."""
    rollout = load_rollout(config, load_tokenizer(config.model))
    check = getattr(rollout, "check", None)
    if check:
        run_coroutine(check())


# memory limit of a tool's process: enough for Python with NumPy, and a bound on what one call can
# take
TOOL_MEMORY_MIB = 1024


class ToolProcesses:
    """Runs each function in rollout.tool_workers processes of its own, which start at its first
    call. Use it in one event loop; close it.
    """

    def __init__(self, config: RolloutConfig, log_folder: Path | None = None):
        """What the functions print goes to `log_folder`/<module>.<function>.<number>.log."""
        self._config = config
        self._log_folder = log_folder
        self._pools: dict[str, WorkerPool] = {}

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See RunInWorker.

        Raises: ValueError for a function that is not module-level, RuntimeError if a worker cannot
        import the module.
        """
        path = f"{function.__module__}:{function.__qualname__}"
        if "." in function.__qualname__ or function.__module__ == "__main__":
            raise ValueError(
                f"{path}: only a function of a module can be called in another process"
            )
        if path not in self._pools:
            config = self._config
            self._pools[path] = WorkerPool(
                path,
                "megarl.sandbox.process",
                [path],
                config.tool_workers,
                config.tool_timeout_s,
                TOOL_MEMORY_MIB,
                [folder for folder in sys.path if folder],
                self._log_folder,
            )
            self._pools[path].open()
        try:
            return await self._pools[path].call(*arguments)
        except CallFailed as error:
            raise ToolError(str(error)) from error

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
