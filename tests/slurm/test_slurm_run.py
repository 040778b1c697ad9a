"""The job scripts on a real Slurm cluster of four nodes on this host, with real trainers and engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cluster as clusters
from cluster import Cluster
from run_tools import OVERRIDES, ROOT, make_model, rows

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(clusters.missing()), reason=f"no Slurm cluster can be started here: {clusters.missing()}"),
]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
START_S = 240  # until a run trains; engines start first
TWO_COMPONENTS = "--nodes=2 : --nodes=2 --ntasks-per-node=1"  # of a heterogeneous job: trainer ranks on one, engines on the other
LAUNCHER = """\
#!/bin/bash
case "$*" in *--dry-run*) exit ;; esac
trap 'echo stopped $1 on $SLURMD_NODENAME; exit 143' TERM
echo started
while [ -z "$SLURM_RESTART_COUNT" ]; do sleep 0.1; done
echo finished $1 on $SLURMD_NODENAME
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture(scope="module")
def job_script(tmp_path_factory):
    """slurm/quickstart.sbatch without its warm start."""
    text = (ROOT / "slurm/quickstart.sbatch").read_text()
    assert 'MEGARL_COMMANDS="sft train"' in text
    script = tmp_path_factory.mktemp("job") / "quickstart.sbatch"
    script.write_text(text.replace('"sft train"', '"train"'))
    return script


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("run") / "model")


def submit(cluster: Cluster, script: Path, log: Path, *overrides: str, nodes: str = "--nodes=4") -> int:
    return cluster.submit(script, *overrides, options=("--output", str(log), *nodes.split()), cwd=ROOT)


def test_a_typo_in_an_override_ends_the_job_before_anything_starts(cluster, tmp_path):
    job = submit(cluster, ROOT / "slurm/quickstart.sbatch", tmp_path / "log", "trainer.tpp=2", f"run_dir={tmp_path / 'run'}")
    assert cluster.wait(job, ENDED, 60) == "FAILED"
    assert cluster.exit_code(job) == "2:0"
    assert (tmp_path / "log").read_text() == "megarl: trainer.tpp=2: unknown key; did you mean trainer.tp?\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("nodes", ["--nodes=4", TWO_COMPONENTS], ids=["plain", "heterogeneous"])
def test_a_job_whose_time_is_up_stops_its_launchers_and_goes_on_later(nodes, cluster, tmp_path):
    """The job script alone; that a launcher saves on SIGTERM is tested in tests/cpu/test_run_stopping.py."""
    checkout, log = tmp_path / "checkout", tmp_path / "log"
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / "slurm").symlink_to(ROOT / "slurm")
    (checkout / ".venv/bin/megarl").write_text(LAUNCHER)
    (checkout / ".venv/bin/megarl").chmod(0o755)
    job = cluster.submit(ROOT / "slurm/quickstart.sbatch", options=("--output", str(log), *nodes.split()), cwd=checkout)
    wait_until(lambda: log.exists() and log.read_text().count("started") == 4, "four launchers", 60)
    cluster.run(["scancel", "--batch", "--signal=USR1", str(job)])  # what Slurm sends ahead of the time limit
    assert cluster.wait(job, ENDED, 60) == "COMPLETED", log.read_text()
    lines = log.read_text().splitlines()
    for node in ("n1", "n2", "n3", "n4"):
        assert lines.count(f"stopped sft on {node}") == 1
        assert lines.count(f"finished sft on {node}") == lines.count(f"finished train on {node}") == 1


def test_a_run_over_four_nodes_outlives_the_loss_of_one(cluster, job_script, model, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    sizes = ["trainer.tp=2", "generator.engines=1", "generator.tp=2"]  # a rank on every node, so the engine spans two
    overrides = [f"model.path={model}", f"run_dir={run_dir}", *OVERRIDES, *sizes]
    job = submit(cluster, job_script, log, *overrides, "checkpoint.every=1", "timeouts.silence_s=6")
    wait_until(lambda: len(rows(run_dir)) >= 2, "the second step", START_S)
    assert len(list((run_dir / ".launch/train").glob("slurm.*/node.*.json"))) == 4
    cluster.kill_node("n4")
    cluster.wait(job, ("PENDING",), 90)  # Slurm has requeued it
    cluster.start_node("n4")
    assert cluster.wait(job, ENDED, START_S) == "COMPLETED", log.read_text()
    after = rows(run_dir)
    assert [row["step"] for row in after] == list(range(6))
    assert all(row["sync/audit_ok"] for row in after)
    assert "6 steps from the start" in log.read_text() and "6 steps from the checkpoint of step" in log.read_text()
    assert {path.name for path in (run_dir / "logs").glob("engine*")} == {"engine.0.log", "engine.0.1.log"}


def test_scancel_of_a_heterogeneous_job_leaves_nothing_behind(cluster, job_script, model, tmp_path):
    overrides = [f"model.path={model}", f"run_dir={tmp_path / 'run'}", *OVERRIDES]
    job = submit(cluster, job_script, tmp_path / "log", *overrides, nodes=TWO_COMPONENTS)
    wait_until(lambda: sum("megarl.generator.server" in task.cmdline() for task in cluster.tasks()) >= 2, "two engines", 90)
    cluster.run(["scancel", str(job)])
    assert cluster.wait(job, ENDED, 60) == "CANCELLED"
    wait_until(lambda: not cluster.tasks(), "the end of all processes", 40)


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s"
        time.sleep(0.1)
