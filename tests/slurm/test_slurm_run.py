"""The job scripts on a real Slurm cluster of four nodes on this host, with real trainers and engines."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import cluster as clusters
from cluster import Cluster
from run_tools import OVERRIDES, ROOT, make_model, rows

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(clusters.missing()), reason=f"no Slurm cluster can be started here: {clusters.missing()}"),
]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


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


def submit(cluster: Cluster, script: Path, log: Path, *overrides: str) -> int:
    return cluster.submit(script, *overrides, options=("--output", str(log)), cwd=ROOT)


def wait_for_steps(run_dir: Path, count: int, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while len(rows(run_dir)) < count:
        assert time.monotonic() < deadline, f"fewer than {count} steps in {run_dir} after {timeout_s:.0f} s"
        time.sleep(0.1)


def test_a_typo_in_an_override_ends_the_job_before_anything_starts(cluster, tmp_path):
    job = submit(cluster, ROOT / "slurm/quickstart.sbatch", tmp_path / "log", "trainer.tpp=2", f"run_dir={tmp_path / 'run'}")
    assert cluster.wait(job, ENDED, 60) == "FAILED"
    assert cluster.exit_code(job) == "2:0"
    assert (tmp_path / "log").read_text() == "megarl: trainer.tpp=2: unknown key; did you mean trainer.tp?\n"
    assert not (tmp_path / "run").exists()


def test_a_run_over_four_nodes_outlives_a_requeue_and_the_loss_of_a_node(cluster, job_script, model, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    overrides = [f"model.path={model}", f"run_dir={run_dir}", *OVERRIDES, "checkpoint.every=1", "max_steps=12", "timeouts.silence_s=10"]
    job = submit(cluster, job_script, log, *overrides)
    wait_for_steps(run_dir, 2)
    assert {part["address"] for part in node_reports(run_dir)} and len(node_reports(run_dir)) == 4
    cluster.run(["scontrol", "requeue", str(job)])
    wait_for_steps(run_dir, 5)
    cluster.kill_node("n4")
    cluster.wait(job, ("PENDING", *ENDED), 90)
    cluster.start_node("n4")
    cluster.wait_idle()
    if cluster.state(job) in ENDED:
        job = submit(cluster, job_script, log, *overrides)
    assert cluster.wait(job, ENDED, 200) == "COMPLETED", log.read_text()
    after = rows(run_dir)
    assert [row["step"] for row in after] == list(range(12))
    assert all(row["sync/audit_ok"] for row in after)
    assert "on 4 nodes" in log.read_text()


def test_scancel_leaves_nothing_behind(cluster, job_script, model, tmp_path):
    run_dir = tmp_path / "run"
    job = submit(cluster, job_script, tmp_path / "log", f"model.path={model}", f"run_dir={run_dir}", *OVERRIDES, "max_steps=1000")
    wait_for_steps(run_dir, 1)
    cluster.run(["scancel", str(job)])
    assert cluster.wait(job, ENDED, 60) == "CANCELLED"
    deadline = time.monotonic() + 40
    while cluster.tasks():
        assert time.monotonic() < deadline, [task.cmdline() for task in cluster.tasks()]
        time.sleep(0.2)


def node_reports(run_dir: Path) -> list[dict]:
    (launch,) = (run_dir / ".launch" / "train").glob("slurm.*.0")
    return [json.loads(path.read_text()) for path in sorted(launch.glob("node.*.json"))]
