"""Environments of PrimeIntellect's package `verifiers`, in an interpreter that has their packages (docs/agents.md)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from megarl.config.errors import ConfigError
from megarl.config.schema import MAX_REWARD
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import Tokenizer
from megarl.generator.completions import Sampling
from megarl.generator.tool_parsers import find_parser
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.hubs.player import Player
from megarl.rollouts.hubs.worker import Worker, variables_for
from megarl.types import Group, Prompt

_INSIDE = str(Path(__file__).with_name("inside_verifiers.py"))
_LOOK_S = 120.0
_Positive = Annotated[int, Meta(ge=1)]


class Verifiers:
    """Rows, turns, tools, state and rubric are the environment's own. It is loaded once, by one process, which plays all episodes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        environment: str,
        args: dict[str, Any] = {},  # noqa: B006  it is never changed
        python: str = "python",
        folder: str | None = None,
        variables: dict[str, str] = {},  # noqa: B006
        on_crash: float = 0.0,
        deadline_s: Annotated[float, Meta(gt=0)] = 600.0,
        start_s: Annotated[float, Meta(gt=0)] = 300.0,
        memory_mib: _Positive = 8192,
        tool_parser: str = "json",
        max_calls: _Positive = 256,
        at_once: _Positive = 256,
        retries: Annotated[int, Meta(ge=0)] = 2,
        max_unanswered: Annotated[float, Meta(ge=0, le=1)] = 0.1,
    ):
        """Raises: ConfigError with all problems of the arguments, also where the interpreter lacks the environment."""
        problems = [] if folder is None or Path(folder).is_dir() else [f"rollout.args.folder={folder}: there is no such folder"]
        if not abs(on_crash) <= MAX_REWARD:
            problems.append(f"rollout.args.on_crash={on_crash}: must be a finite number of absolute value at most {MAX_REWARD:g}")
        if problems:
            raise ConfigError(problems)
        inside = _Inside(python, environment, args, folder, variables)
        inside.run("look", _LOOK_S)
        self.player = Player(
            name=f"the environment {environment}",
            tokenizer=tokenizer,
            template=load_chat_template(tokenizer.source, "rollout.name=verifiers", "conversations cannot be rendered without one"),
            parser=find_parser(tool_parser, "rollout.args.tool_parser"),
            worker=Worker(inside.command("serve"), inside.variables(), memory_mib, start_s),
            deadline_s=deadline_s,
            on_crash=on_crash,
            max_calls=max_calls,
            retries=retries,
            at_once=at_once,
            max_unanswered=max_unanswered,
        )

    async def __call__(self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int) -> Group:
        return await self.player.play(context, prompt, sampling, n)

    async def close(self) -> None:
        await self.player.close()


def write_rows(arguments: dict[str, Any], files: dict[str, Path]) -> str:
    """Writes the environment's rows, split ("train", "eval") → file, and says how many. Raises ConfigError.

    Args: arguments: rollout.args.
    """
    own = {name: arguments[name] for name in ("python", "environment", "args", "folder", "variables", "start_s") if name in arguments}
    limit_s = own.pop("start_s", 300.0)
    inside = _Inside(**{"python": "python", "args": {}, "folder": None, "variables": {}, **own})
    return inside.run("rows", limit_s, files={split: str(path.absolute()) for split, path in files.items()})


class _Inside:
    """The program that runs in the other interpreter."""

    def __init__(self, python: str, environment: str, args: dict[str, Any], folder: str | None, variables: dict[str, str]):
        found = shutil.which(os.path.expanduser(python))
        if found is None:
            raise ConfigError(f"rollout.args.python={python}: there is no such program")
        self._key, self._python = f"rollout.args.environment={environment}", os.path.abspath(found)
        self._asked, self._folder, self._own = {"environment": environment, "args": args}, folder, variables

    def command(self, do: str, **more: Any) -> list[str]:
        return [self._python, "-u", _INSIDE, json.dumps({"do": do, **self._asked, **more})]

    def variables(self) -> dict[str, str]:
        paths = [os.path.abspath(self._folder)] if self._folder else []
        paths += [self._own["PYTHONPATH"]] if "PYTHONPATH" in self._own else []
        found = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        return variables_for(self._python, {"VF_LOG_LEVEL": "ERROR", **self._own, **found})

    def run(self, do: str, limit_s: float, **more: Any) -> str:
        """What it prints. Raises ConfigError with the last line of its errors if it fails."""
        try:
            ran = subprocess.run(
                self.command(do, **more),
                env=self.variables(),
                cwd="/",
                capture_output=True,
                text=True,
                timeout=limit_s,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{self._key}: {self._python} did not answer within {limit_s:g} s") from None
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"])[-1]
            raise ConfigError(f"{self._key}, with {self._python}: {last}")
        return ran.stdout
