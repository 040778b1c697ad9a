"""Finds a run that another launch has started."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from megarl.config.errors import ConfigError, unreadable
from megarl.launch.launcher import host_name
from megarl.launch.meeting import STOP, is_locked, read_report
from megarl.messaging.host import is_loopback
from megarl.messaging.rendezvous import Rendezvous, rendezvous_path

MET_S = 60.0  # time for the nodes of a starting run to meet
LOOK_S = 0.2


@dataclass(frozen=True)
class RunningRun:
    """A running run, as another command sees it."""

    run_dir: str
    folder: Path  # the folder of its launch
    rendezvous: Rendezvous

    @property
    def is_over(self) -> bool:
        return not is_locked(_lock(self.run_dir))

    @property
    def is_ending(self) -> bool:
        """Whether the run is being stopped, or a part of it has finished or failed.

        Its generator may end before its last launcher.
        """
        return any(
            name in (STOP, "failure") or name.startswith("finished.")
            for name in os.listdir(self.folder)
        )

    def stop(self) -> None:
        """Asks its launchers, as Meeting.ask_to_stop does, to end it once the running step is
        saved.
        """
        (self.folder / STOP).touch()

    @property
    def on_one_host(self) -> bool:
        """Whether the run listens only on loopback.

        Raises ConfigError if it does so on another host.
        """
        if not is_loopback(self.rendezvous.hub_host):
            return False
        host = read_report(self.folder, 0).host
        if host != host_name():
            raise ConfigError(
                f"{self.run_dir}: it runs on {host} alone, and listens only there: start the "
                "engines there, or start the run with launch.interface"
            )
        return True


def find_run(run_dir: str) -> RunningRun:
    """The run in `run_dir`.

    Raises ConfigError if none is running there, or if it is another user's.
    """
    try:
        return _find_launch(run_dir)
    except OSError as error:
        raise unreadable(error) from error


def _find_launch(run_dir: str) -> RunningRun:
    lock = _lock(run_dir)
    deadline = time.monotonic() + MET_S
    if not lock.exists():
        raise ConfigError(f"{run_dir}: megarl train has never run there")
    while is_locked(lock):
        rendezvous_files = list(lock.parent.glob(f"*/{rendezvous_path(Path()).name}"))
        newest = max(rendezvous_files, key=os.path.getmtime, default=None)
        # not of an earlier launch
        if newest is not None and newest.stat().st_mtime >= lock.stat().st_mtime:
            return RunningRun(run_dir, newest.parent, Rendezvous.load(newest.parent))
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{run_dir}: the run there has only begun, and its nodes have not met within "
                f"{MET_S:.0f} s"
            )
        time.sleep(LOOK_S)
    raise ConfigError(
        f"{run_dir}: no run is under way there; megarl train goes on from its last checkpoint"
    )


def _lock(run_dir: str) -> Path:
    return Path(run_dir) / ".launch/train/lock"
