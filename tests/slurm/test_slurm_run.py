"""The job scripts on a real Slurm cluster of four nodes on this host, with real trainers and engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import cluster as clusters
import pytest
from cluster import Cluster
from run_tools import OVERRIDES, ROOT, make_model, rows

from megarl.plan.checkpoints import complete_checkpoints

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


def submit(cluster: Cluster, log: Path, *overrides: str, options: str = "") -> int:
    """As docs/cluster.md says it: `sbatch slurm/quickstart.sbatch` in the checkout, overrides after it."""
    return cluster.submit("slurm/quickstart.sbatch", *overrides, options=("--output", str(log), *options.split()), cwd=ROOT)


def test_a_typo_in_an_override_ends_the_job_before_anything_starts(cluster, tmp_path):
    job = submit(cluster, tmp_path / "log", "trainer.tpp=2", f"run_dir={tmp_path / 'run'}")
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


@pytest.mark.long
def test_the_quickstarts_job_outlives_the_loss_of_a_node(cluster, tmp_path):
    """In a fresh folder, so with its warm start; the second time that is there."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    sizes = ["trainer.tp=2", "generator.engines=1", "generator.tp=2"]  # a rank on every node, so the engine spans two
    overrides = [f"run_dir={run_dir}", "sft.steps=2", *OVERRIDES, *sizes]
    job = submit(cluster, log, *overrides, "checkpoint.every=1", "timeouts.silence_s=6")
    wait_until(lambda: len(rows(run_dir)) >= 2 and complete_checkpoints(run_dir), "the second step and a checkpoint", START_S)
    assert len(list((run_dir / ".launch/train").glob("slurm.*/node.*.json"))) == 4
    cluster.kill_node("n4")
    cluster.wait(job, ("PENDING",), 90)  # Slurm has requeued it
    cluster.start_node("n4")
    assert cluster.wait(job, ENDED, START_S) == "COMPLETED", log.read_text()
    after = rows(run_dir)
    assert [row["step"] for row in after] == list(range(6))
    assert all(row["sync/audit_ok"] for row in after)
    said = log.read_text()
    assert "6 steps from the start" in said and "6 steps from the checkpoint of step" in said
    assert f"Supervised weights are in {run_dir}/sft/hf" in said and f"{run_dir}/sft/hf is there already: nothing to do" in said
    assert {path.name for path in (run_dir / "logs").glob("engine*")} == {"engine.0.log", "engine.0.1.log"}


@pytest.mark.long
def test_scancel_of_a_heterogeneous_job_leaves_nothing_behind(cluster, tmp_path):
    warm_start = make_model(tmp_path / "hf")  # as if it had been made by another run
    overrides = [f"run_dir={tmp_path / 'run'}", f"sft.output={warm_start}", *OVERRIDES]
    job = submit(cluster, tmp_path / "log", *overrides, options=TWO_COMPONENTS)
    wait_until(lambda: sum("megarl.generator.server" in task.cmdline() for task in cluster.tasks()) >= 2, "two engines", 90)
    cluster.run(["scancel", str(job)])
    assert cluster.wait(job, ENDED, 60) == "CANCELLED"
    wait_until(lambda: not cluster.tasks(), "the end of all processes", 40)


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s"
        time.sleep(0.1)
