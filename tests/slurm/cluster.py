"""A real Slurm cluster of several nodes on this host: one slurmctld, one slurmd per node, no
authentication. For tests.

with Cluster(folder, nodes=4) as cluster:
    cluster.run(["sbatch", "job.sh"])
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from megarl.messaging.rendezvous import free_ports

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "sinfo", "setpriv")
START_S = 60
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/none
# A requeued job waits until its old credentials have expired: two minutes if this is not said.
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=20
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
{nodes}
PartitionName=debug Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why no cluster can be started here; empty if one can."""
    absent = [program for program in PROGRAMS if _which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd must run as root"


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    """Nodes n1, n2, …, all on this host, with its network and file system.

    Slurm takes each to have 2 CPUs.
    """

    def __init__(self, folder: Path, nodes: int = 4):
        self.folder = Path(folder)
        self.count = nodes
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Cluster:
        (self.folder / "state").mkdir(parents=True)
        controller_port, *ports = free_ports(1 + self.count)
        host = socket.gethostname().split(".")[0]
        lines = [
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=1000 State=UNKNOWN"
            for n, port in enumerate(ports, 1)
        ]
        text = CONF.format(
            host=host,
            controller_port=controller_port,
            user="root",
            folder=self.folder,
            nodes="\n".join(lines),
            count=self.count,
        )
        (self.folder / "slurm.conf").write_text(text)
        self._start("slurmctld", ["slurmctld", "-D"])
        for n in range(1, self.count + 1):
            self.start_node(f"n{n}")
        self.wait_idle()
        return self

    def __exit__(self, *_: object) -> None:
        """Kills everything at once: nothing of the cluster is needed any more."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        for name in self._daemons:
            self._kill(self._steps(name))
        self._kill(self.tasks())

    @property
    def environment(self) -> dict[str, str]:
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_"))
        }
        return {
            **clean,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def run(self, argv: list[str], timeout_s: float = 60, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=timeout_s, **options
        )

    def start_node(self, name: str) -> None:
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._start(name, ["slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """As if the node lost power: its daemon, its steps and all their processes are killed at
        once, and report nothing.
        """
        self._daemons.pop(name).kill()
        self._kill([*self._steps(name), *self.tasks(name)])

    def tasks(self, node: str | None = None) -> list[psutil.Process]:
        """The running processes of jobs, on `node` or on all nodes."""
        return [process for process in psutil.process_iter() if self._runs_here(process, node)]

    def commands(self) -> list[list[str]]:
        """The command lines of these processes, without those that have just ended."""
        command_lines = []
        for process in self.tasks():
            with contextlib.suppress(psutil.NoSuchProcess):
                command_lines.append(process.cmdline())
        return command_lines

    def environments(self) -> list[dict[str, str]]:
        """The environments of these processes, without those that have just ended."""
        environments_of_ranks = []
        for process in self.tasks():
            with contextlib.suppress(psutil.NoSuchProcess):
                environments_of_ranks.append(process.environ())
        return environments_of_ranks

    def _runs_here(self, process: psutil.Process, node: str | None = None) -> bool:
        """Whether this cluster started the process: Slurm puts the names of cluster and node into
        its environment.
        """
        try:
            environment = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        is_of_cluster = (
            environment.get("SLURM_CONF") == str(self.folder / "slurm.conf")
            and "SLURMD_NODENAME" in environment
        )
        return is_of_cluster and node in (None, environment["SLURMD_NODENAME"])

    def _steps(self, node: str) -> list[psutil.Process]:
        """The daemons of the node's steps, recognised by the log that they hold open."""
        log = str(self.folder / f"slurmd.{node}.log")
        steps = [
            process
            for process in psutil.process_iter(["name", "open_files"])
            if process.info["name"] == "slurmstepd"
        ]
        return [
            step
            for step in steps
            if any(file.path == log for file in step.info["open_files"] or ())
        ]

    def _kill(self, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait_idle(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            states = self.run(["sinfo", "-h", "-N", "-o", "%N %t"]).stdout.split("\n")
            if sum(line.endswith(" idle") for line in states) == self.count:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the Slurm cluster was not up after {START_S} s: {states}\n{self._log()}"
                )
            time.sleep(0.3)

    def submit(
        self,
        script: Path | str,
        *arguments: str,
        options: tuple[str, ...] = (),
        cwd: Path | None = None,
    ) -> int:
        """Submits a job and returns its id."""
        completed = self.run(["sbatch", "--parsable", *options, str(script), *arguments], cwd=cwd)
        assert completed.returncode == 0, completed.stderr
        return int(completed.stdout.split(";")[0])

    def state(self, job: int) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, …"""
        shown = self.run(["scontrol", "show", "job", str(job)]).stdout
        return shown.partition("JobState=")[2].split()[0]

    def exit_code(self, job: int) -> str:
        shown = self.run(["scontrol", "show", "job", str(job)]).stdout
        return shown.partition("ExitCode=")[2].split()[0]

    def wait(self, job: int, states: tuple[str, ...], timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"job {job} is {state} after {timeout_s:.0f} s, not "
                    f"{' or '.join(states)}\n{self._log()}"
                )
            time.sleep(0.3)
        return state

    def _start(self, name: str, argv: list[str]) -> None:
        with open(self.folder / f"{name}.out", "wb") as log:
            # the daemon ends even if the test is killed
            argv = ["setpriv", "--pdeathsig", "KILL", _which(argv[0]) or argv[0], *argv[1:]]
            self._daemons[name] = subprocess.Popen(
                argv,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _log(self) -> str:
        path = self.folder / "slurmctld.log"
        return (
            "\n".join(path.read_text(errors="replace").splitlines()[-20:]) if path.exists() else ""
        )
