"""A hub's program in the interpreter that has the hub's packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.rollouts.hubs.worker import variables_for


class Interpreter:
    """Runs `program`, a file of this folder.

    Args: asked: what the program needs, as JSON. key: the setting that messages begin with. folder: of modules that can be imported there.
    variables: its environment, beside PATH and HOME.
    """

    def __init__(
        self, program: str, python: str, key: str, asked: dict[str, Any], folder: str | None, variables: dict[str, str] | None = None
    ):
        """Raises: ConfigError if there is no such interpreter or folder."""
        found = shutil.which(os.path.expanduser(python))
        problems = [] if folder is None or Path(folder).is_dir() else [f"rollout.args.folder={folder}: there is no such folder"]
        problems += [] if found else [f"rollout.args.python={python}: there is no such program"]
        if problems or found is None:
            raise ConfigError(problems)
        self._key, self._python, self._program = key, os.path.abspath(found), str(Path(__file__).with_name(program))
        self._asked, self._folder, self._own = asked, folder, variables or {}

    def command(self, do: str, **more: Any) -> list[str]:
        return [self._python, "-u", self._program, json.dumps({"do": do, **self._asked, **more})]

    def variables(self) -> dict[str, str]:
        paths = [os.path.abspath(self._folder)] if self._folder else []
        paths += [self._own["PYTHONPATH"]] if "PYTHONPATH" in self._own else []
        found = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        return variables_for(self._python, {**self._own, **found})

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
