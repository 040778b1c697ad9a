"""The cores that a process may use: limits of cgroups, in files like the kernel's, of the kernel's
scheduler, and of Slurm.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.base.cores import usable_cores

V1 = "3:cpuset:/job\n2:cpu,cpuacct:/job\n0::/\n"


@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        ({"cpu.max": "max 100000"}, "0::/\n", 16),
        ({"cpu.max": "400000 100000"}, "0::/\n", 4),
        ({"cpu.max": "150000 100000"}, "0::/\n", 2),
        ({"cpu.max": "1000 100000"}, "0::/\n", 1),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 3),
        ({"a/cpu.max": "max 100000", "a/b/cpu.max": "200000 50000"}, "0::/a/b\n", 4),
        ({"cpu.max": "200000 100000"}, "0::/docker/0123\n", 2),
        (
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "600000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            V1,
            6,
        ),
        ({"cpu/job/cpu.cfs_quota_us": "600000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, V1, 6),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, V1, 16),
        ({"cpuset/job/cpu.max": "100000 100000"}, V1, 16),
        ({"cpu.max": "garbage"}, "0::/\n", 16),
        ({}, "0::/\n", 16),
    ],
)
def test_cpu_time_of_cgroups_counts_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict, membership: str, cores: int
):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    for name, text in files.items():
        path = tmp_path / "cgroups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "self").write_text(membership, encoding="utf-8")
    assert usable_cores(tmp_path / "cgroups", tmp_path / "self") == cores


def test_smallest_limit_of_cores_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cpu.max").write_text("800000 100000", encoding="utf-8")
    (tmp_path / "self").write_text("0::/\n", encoding="utf-8")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    for of_slurm, cores in (("4", 4), ("32", 8), ("", 8), ("2(x3)", 8)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", of_slurm)
        assert usable_cores(tmp_path, tmp_path / "self") == cores
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {5})
    assert usable_cores(tmp_path, tmp_path / "self") == 1
    assert usable_cores(tmp_path, tmp_path / "missing") == 1
