"""A run that is under way, as another command finds it and speaks to it: its generator answers (megarl.executors.fleet_calls)."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.errors import ConfigError, unreadable
from megarl.config.load import load_config
from megarl.launch.lock import is_held
from megarl.launch.meeting import read_report
from megarl.launch.preflight import host_name
from megarl.messaging.host import is_loopback
from megarl.messaging.link import Peer
from megarl.messaging.messages import FleetAnswer, FleetCall
from megarl.messaging.rendezvous import Rendezvous, rendezvous_path
from megarl.plan.resolve import RunPlan

ANSWER_S = 60.0  # beyond the time that what is asked for may take
MET_S = 60.0  # for the nodes of a run that is starting to meet
LOOK_S = 0.2
OWN_SETTINGS = (  # of engines that join: nothing of them changes where weights are, or what is sampled
    "launch.interface",
    "launch.ranks_per_node",
    *(f"generator.{name}" for name in ("kv_cache_tokens", "mem_fraction", "health_s", "max_restarts", "startup_timeout_s")),
)


@dataclass(frozen=True)
class RunningRun:
    run_dir: str
    folder: Path  # of its launch
    rendezvous: Rendezvous

    @property
    def is_over(self) -> bool:
        return not is_held(_lock(self.run_dir))

    @property
    def is_ending(self) -> bool:
        """Whether it is being stopped, or part of it has finished or failed: its generator may be gone before the last launcher is."""
        return any(name in ("stop", "failure") or name.startswith("finished.") for name in os.listdir(self.folder))

    @property
    def on_one_host(self) -> bool:
        """Whether it listens on loopback alone. Raises ConfigError if that is another host's."""
        if not is_loopback(self.rendezvous.hub_host):
            return False
        host = read_report(self.folder, 0).host
        if host != host_name():
            said = f"it runs on {host} alone, and listens only there: start engines there, or the run with launch.interface"
            raise ConfigError(f"{self.run_dir}: {said}")
        return True

    def plan(self, overrides: Sequence[str]) -> RunPlan:
        """The plan of the run, with other settings of engines that join. Raises ConfigError for settings that must be the run's."""
        from megarl.launch.roles import load_plan

        for override in overrides:
            if (key := override.partition("=")[0]) not in OWN_SETTINGS:
                raise ConfigError(f"{override}: {key} is the run's own; engines that join may differ in {', '.join(OWN_SETTINGS)}")
        return load_plan(self.folder, "train", [*overrides, f"run_dir={self.run_dir}"])

    def ask(self, call: FleetCall) -> FleetAnswer:
        """Raises ConfigError if it is refused or the run has ended, TimeoutError."""
        peer, timeouts = self.connect(), load_config(self.folder / "config.yaml").timeouts
        try:
            peer.send(call)
            awaited = f"the generator of {self.run_dir} to answer"
            found = peer.receive_unless(lambda: self.is_over, FleetAnswer, 2 * timeouts.weights_s + ANSWER_S, awaited)
        finally:
            peer.close()
        if found is None:
            raise ConfigError(f"{self.run_dir}: the run has ended")
        return accepted(found[1])

    def connect(self) -> Peer:
        return Peer(f"engines.{secrets.token_hex(4)}", self.rendezvous.key, self.rendezvous.hub_address)


def accepted(answer: FleetAnswer) -> FleetAnswer:
    """Raises ConfigError if what was asked for is refused."""
    if answer.error:
        raise ConfigError(answer.error)
    return answer


def find_run(run_dir: str) -> RunningRun:
    """Raises ConfigError if no run is under way in `run_dir`, or it is another user's."""
    try:
        return _found(run_dir)
    except OSError as error:
        raise unreadable(error) from error


def _found(run_dir: str) -> RunningRun:
    lock, deadline = _lock(run_dir), time.monotonic() + MET_S
    if not lock.exists():
        raise ConfigError(f"{run_dir}: megarl train has never run there")
    while is_held(lock):
        found = [path for path in lock.parent.glob(f"*/{rendezvous_path(Path()).name}") if path.stat().st_mtime >= lock.stat().st_mtime]
        if found:
            folder = max(found, key=os.path.getmtime).parent
            return RunningRun(run_dir, folder, Rendezvous.load(folder))
        if time.monotonic() > deadline:
            raise ConfigError(f"{run_dir}: the run there has only begun, and its nodes have not met within {MET_S:.0f} s")
        time.sleep(LOOK_S)
    raise ConfigError(f"{run_dir}: no run is under way there; megarl train goes on from its last checkpoint")


def _lock(run_dir: str) -> Path:
    return Path(run_dir) / ".launch/train/lock"
