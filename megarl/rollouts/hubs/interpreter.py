"""A hub's program in the interpreter that has the hub's packages."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

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
        """What it prints. Raises ConfigError with the last line of its errors if it fails. What it has started ends with it, and does not
        hold up its end, as it would by holding a pipe open."""
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            status = self._status(self.command(do, **more), limit_s, printed, errors)
            told, wrong = _written(printed), _written(errors)
        if status:
            last = (wrong.strip().splitlines() or [f"it ended with status {status}"])[-1]
            raise ConfigError(f"{self._key}, with {self._python}: {last}")
        return told

    def _status(self, command: list[str], limit_s: float, printed: IO[bytes], errors: IO[bytes]) -> int:
        files = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors}
        try:
            running = subprocess.Popen(command, env=self.variables(), cwd="/", start_new_session=True, **files)
        except (OSError, ValueError) as error:  # of too long arguments, or variables that cannot be
            raise ConfigError(f"{self._key}: {self._python} cannot be started: {error}") from None
        try:
            return running.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{self._key}: {self._python} did not answer within {limit_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def _written(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
