"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """The smallest of three limits: the cores that the kernel lets this process run on (taskset,
    cpusets of containers and of Slurm), the CPU time of its cgroups, rounded up, and
    SLURM_CPUS_PER_TASK. The last two do not bind a process to cores.
    """
    limits = [len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(cgroups, membership))]
    of_slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if of_slurm.isdigit():
        limits.append(int(of_slurm))
    return max(1, min(limits))


def _quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """CPU seconds a second that this process's cgroup and those above it may use, in either version
    of cgroups, where there is a limit.

    A line of /proc/self/cgroup is number:controllers:path; in version 2 there are no controllers.
    In a container the path may be that of the host. Then only the folder of all cgroups is there,
    which is the container's own.
    """
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in {cgroups / controllers, cgroups / ("cpu" if controllers else "")}:
            cgroup = root / path.lstrip("/")
            for folder in (cgroup, *cgroup.parents):
                yield from _quota(folder)
                if folder == root:
                    break


def _quota(folder: Path) -> Iterator[float]:
    try:
        limit = folder / "cpu.max"
        if limit.exists():
            quota, period = limit.read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        if quota != "max" and int(quota) > 0:  # -1 in version 1: no limit
            yield int(quota) / int(period)
    except (OSError, ValueError):  # there is no such cgroup here
        return
