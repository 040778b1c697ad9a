"""Runs the shipped program, for studies that compare whole runs."""

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

PROGRAM = ["-P", "-m", "megarl"]  # arguments of Python
SETTINGS = "settings.yaml"
# on results
_WITHOUT_EFFECT = (
    "run_dir",
    "sft.output",
    "reward_model.output",
    "label.output",
    "checkpoint.",
    "observe.",
    "timeouts.",
    "launch.",
    "plan.",
)
_running: set[subprocess.Popen[bytes]] = set()


def check_settings(runs: Path, config: RunConfig) -> None:
    """Raises ConfigError if the folder `runs` cannot be written, or if its runs were made with
    other settings, since complete runs are not repeated.
    """
    problems = list(folder_problems("--runs ", str(runs)))
    if problems:
        raise ConfigError(problems)
    if not (runs / SETTINGS).is_file():
        return
    earlier = load_config(runs / SETTINGS)
    changes = differences({key: value_at(earlier, key) for key in keys_of(earlier)}, config)
    changed = [
        f"{key}={yaml_text(value)}"
        for key, value in changes.items()
        if not key.startswith(_WITHOUT_EFFECT)
    ]
    if changed:
        raise ConfigError(
            f"--runs {runs}: the runs there were made with {', '.join(changed)}; name another folder"
        )


def note_settings(runs: Path, config: RunConfig) -> None:
    """Writes down the settings of the folder's runs, for `check_settings`."""
    runs.mkdir(parents=True, exist_ok=True)
    write_whole(runs / SETTINGS, dump_config(config))


def run_megarl(command: str, config: str, overrides: Sequence[str], run_dir: Path) -> None:
    """Runs `megarl COMMAND CONFIG …`, with its output in `run_dir`/COMMAND.log.

    Raises RuntimeError if it fails. Any other exception first ends the command.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / f"{command}.log"
    arguments = [sys.executable, *PROGRAM, command, config, *overrides]
    # In a process group of its own it does not get the terminal's Ctrl-C, but one SIGTERM from
    # here. A second signal would keep it from saving.
    with (
        open(log, "ab") as output,
        subprocess.Popen(arguments, stdout=output, stderr=output, process_group=0) as process,
    ):
        _running.add(process)
        try:
            with ending_runs():
                status = process.wait()
        finally:
            _running.discard(process)
    if status != 0:
        raise RuntimeError(
            f"megarl {command} {config} {' '.join(overrides)} ended with exit status {status}; "
            f"see {log}"
        )


@contextlib.contextmanager
def ending_runs() -> Iterator[None]:
    """If an exception leaves the block, all runs get a signal to end.

    A run of megarl train first saves, unless a second signal comes.
    """
    try:
        yield
    except BaseException:
        for process in list(_running):
            process.terminate()
        raise
