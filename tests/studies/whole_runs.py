"""Runs of the shipped program, for benchmarks that compare whole runs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.base.files import folder_problems, write_whole
from megarl.config.errors import ConfigError
from megarl.config.keys import keys_of, value_at, yaml_text
from megarl.config.load import dump_config, load_config
from megarl.config.schema import RunConfig
from megarl.plan.checkpoints import differences

PROGRAM = ["-P", "-m", "megarl"]  # what Python runs
SETTINGS = "settings.yaml"
_WITHOUT_EFFECT = ("run_dir", "sft.output", "reward_model.output", "checkpoint.", "observe.", "timeouts.", "launch.", "plan.")  # on results
_running: set[subprocess.Popen[bytes]] = set()


def check_settings(runs: Path, config: RunConfig) -> None:
    """Raises ConfigError if the runs in the folder `runs` were made with other settings, since complete ones are not repeated, or if it
    cannot be written."""
    if problems := list(folder_problems("--runs ", str(runs))):
        raise ConfigError(problems)
    if not (runs / SETTINGS).is_file():
        return
    earlier = load_config(runs / SETTINGS)
    found = differences({key: value_at(earlier, key) for key in keys_of(earlier)}, config)
    changed = [f"{key}={yaml_text(value)}" for key, value in found.items() if not key.startswith(_WITHOUT_EFFECT)]
    if changed:
        raise ConfigError(f"--runs {runs}: the runs there were made with {', '.join(changed)}; name another folder")


def note_settings(runs: Path, config: RunConfig) -> None:
    """Writes down, for `check_settings`, what the runs in the folder are made with."""
    runs.mkdir(parents=True, exist_ok=True)
    write_whole(runs / SETTINGS, dump_config(config))


def run_megarl(command: str, config: str, overrides: Sequence[str], run_dir: Path) -> None:
    """Runs `megarl COMMAND CONFIG …`; what it prints goes to `run_dir`/COMMAND.log. Raises RuntimeError if it fails. Left by another
    exception, it ends the command first."""
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / f"{command}.log"
    arguments = [sys.executable, *PROGRAM, command, config, *overrides]
    # In a group of its own it does not get Ctrl-C from the terminal, but one SIGTERM from here: a second signal would keep it from saving.
    with open(log, "ab") as output, subprocess.Popen(arguments, stdout=output, stderr=output, process_group=0) as process:
        _running.add(process)
        try:
            with ending_runs():
                status = process.wait()
        finally:
            _running.discard(process)
    if status != 0:
        raise RuntimeError(f"megarl {command} {config} {' '.join(overrides)} ended with exit status {status}; see {log}")


@contextlib.contextmanager
def ending_runs() -> Iterator[None]:
    """If the block is left by an exception, all runs are told to end. A run of megarl train saves first, unless it is told again."""
    try:
        yield
    except BaseException:
        for process in list(_running):
            process.terminate()
        raise
