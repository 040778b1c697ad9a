"""The job scripts on a real Slurm cluster of four nodes on this host, with real trainers and
engines.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import cluster as clusters
import pytest
from cluster import Cluster
from run_tools import OVERRIDES, PROMPTS, ROOT, make_model, rows

from megarl.base.processes import BEATS
from megarl.plan.checkpoints import complete_checkpoints

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(clusters.missing()),
        reason=f"no Slurm cluster can be started here: {clusters.missing()}",
    ),
]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
START_S = 240  # until a run trains; engines start first
# a heterogeneous job: trainer ranks on one part, engines on the other
TWO_COMPONENTS = "--nodes=2 : --nodes=2 --ntasks-per-node=1"
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
    """As in docs/cluster.md: `sbatch slurm/quickstart.sbatch` in the checkout, followed by
    overrides.
    """
    return cluster.submit(
        "slurm/quickstart.sbatch",
        *overrides,
        options=("--output", str(log), *options.split()),
        cwd=ROOT,
    )


def test_override_typo_ends_the_job_before_anything_starts(cluster, tmp_path):
    job = submit(cluster, tmp_path / "log", "trainer.tpp=2", f"run_dir={tmp_path / 'run'}")
    assert cluster.wait(job, ENDED, 60) == "FAILED"
    assert cluster.exit_code(job) == "2:0"
    assert (
        tmp_path / "log"
    ).read_text() == "megarl: trainer.tpp=2: unknown key; did you mean trainer.tp?\n"
    assert not (tmp_path / "run").exists()


def submit_own(cluster: Cluster, tmp_path: Path, *overrides: str, options: str) -> int:
    """`sbatch OPTIONS slurm/run.sbatch my.yaml key=value …`, as in README.md."""
    config = tmp_path / "my.yaml"
    shutil.copy(ROOT / "configs/quickstart.yaml", config)
    settings = [
        f"run_dir={tmp_path / 'run'}",
        f"sft.output={make_model(tmp_path / 'hf')}",
        *OVERRIDES,
        *overrides,
    ]
    options = ("--output", str(tmp_path / "log"), *options.split())
    return cluster.submit("slurm/run.sbatch", str(config), *settings, options=options, cwd=ROOT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["cluster.gpu=H100", "model.dtype=bfloat16"],
            "cluster.gpu=H100: this job has no GPUs: ask for them (sbatch --gpus-per-node=N), or "
            "set cluster.gpu=cpu",
        ),
        (
            ["launch.ranks_per_node=1", "trainer.tp=2"],
            "2 trainer ranks and 1 engines of generator.tp=1 need 3 nodes of 1 slots; the "
            "allocation has 2: "
            "ask for more (sbatch --nodes=3), share GPUs (cluster.share_gpus=true), or reduce the sizes",
        ),
    ],
    ids=["gpus", "nodes"],
)
def test_a_job_too_small_for_its_run_says_what_it_needs(
    settings: list[str], message: str, cluster: Cluster, tmp_path: Path
) -> None:
    job = submit_own(cluster, tmp_path, "generator.engines=1", *settings, options="--nodes=2")
    assert cluster.wait(job, ENDED, 240) == "FAILED"
    log = (tmp_path / "log").read_text()
    assert f"megarl: {message}\n" in log
    assert cluster.exit_code(job) == "2:0", log
    assert not (tmp_path / "run/logs").exists(), "nothing was started"


@pytest.mark.long
def test_a_run_of_ones_own_trains_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """On two of three nodes, since it has two ranks."""
    job = submit_own(
        cluster,
        tmp_path,
        "trainer.tp=1",
        "generator.engines=1",
        "launch.ranks_per_node=1",
        options="--nodes=3",
    )
    assert cluster.wait(job, ENDED, START_S) == "COMPLETED", (tmp_path / "log").read_text()
    assert "1 of 3 nodes have nothing to do: the run needs 2\n" in (tmp_path / "log").read_text()
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(6))


@pytest.mark.parametrize(
    "nodes",
    [pytest.param("--nodes=4", marks=pytest.mark.long), TWO_COMPONENTS],
    ids=["plain", "heterogeneous"],
)
def test_job_out_of_time_stops_its_launchers_and_goes_on(nodes, cluster, tmp_path):
    """Tests only the job script. tests/cpu/test_run_stopping.py tests that a launcher saves on
    SIGTERM.
    """
    checkout = tmp_path / "checkout"
    log = tmp_path / "log"
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / "slurm").symlink_to(ROOT / "slurm")
    (checkout / ".venv/bin/megarl").write_text(LAUNCHER)
    (checkout / ".venv/bin/megarl").chmod(0o755)
    job = cluster.submit(
        ROOT / "slurm/quickstart.sbatch",
        options=("--output", str(log), *nodes.split()),
        cwd=checkout,
    )
    wait_until(lambda: log.exists() and log.read_text().count("started") == 4, "four launchers", 60)
    # Slurm sends this before the time limit
    cluster.run(["scancel", "--batch", "--signal=USR1", str(job)])
    assert cluster.wait(job, ENDED, 60) == "COMPLETED", log.read_text()
    lines = log.read_text().splitlines()
    for node in ("n1", "n2", "n3", "n4"):
        assert lines.count(f"stopped sft on {node}") == 1
        assert (
            lines.count(f"finished sft on {node}") == lines.count(f"finished train on {node}") == 1
        )


@pytest.mark.long
def test_the_quickstarts_job_outlives_the_loss_of_a_node(cluster, tmp_path):
    """In a fresh folder, so the first job makes the warm start; the requeued job finds it."""
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    # a rank on every node, so the engine spans two
    sizes = ["trainer.tp=2", "generator.engines=1", "generator.tp=2"]
    overrides = [f"run_dir={run_dir}", "sft.steps=2", *OVERRIDES, *sizes]
    job = submit(cluster, log, *overrides, "checkpoint.every=1", "timeouts.silence_s=6")
    wait_until(
        lambda: len(rows(run_dir)) >= 2 and complete_checkpoints(run_dir),
        "the second step and a checkpoint",
        START_S,
    )
    assert len(list((run_dir / ".launch/train").glob("slurm.*/node.*.json"))) == 4
    cluster.kill_node("n4")
    cluster.wait(job, ("PENDING",), 90)  # Slurm has requeued it
    cluster.start_node("n4")
    assert cluster.wait(job, ENDED, START_S) == "COMPLETED", log.read_text()
    after = rows(run_dir)
    assert [row["step"] for row in after] == list(range(6))
    assert all(row["sync/audit_ok"] for row in after)
    log_text = log.read_text()
    assert (
        "6 steps from the start" in log_text and "6 steps from the checkpoint of step" in log_text
    )
    assert (
        f"Supervised weights are in {run_dir}/sft/hf" in log_text
        and f"{run_dir}/sft/hf is there already: nothing to do" in log_text
    )
    assert {path.name for path in (run_dir / "logs").glob("engine*")} == {
        "engine.0.log",
        "engine.0.1.log",
    }


@pytest.mark.long
def test_scancel_of_a_heterogeneous_job_leaves_nothing_behind(cluster, tmp_path):
    warm_start = make_model(tmp_path / "hf")  # as if another run had made it
    overrides = [f"run_dir={tmp_path / 'run'}", f"sft.output={warm_start}", *OVERRIDES]
    job = submit(cluster, tmp_path / "log", *overrides, options=TWO_COMPONENTS)
    wait_until(
        lambda: sum("megarl.generator.server" in command for command in cluster.commands()) >= 2,
        "two engines",
        90,
    )
    cluster.run(["scancel", str(job)])
    assert cluster.wait(job, ENDED, 60) == "CANCELLED"
    wait_until(lambda: not cluster.tasks(), "the end of all processes", 40)


@pytest.mark.long
def test_a_second_job_adds_engines_to_a_run_and_takes_them_away(cluster, tmp_path):
    """Two more engines join, on two nodes.

    One leaves by command, and the other's node loses power. The job is requeued, and they join
    again.
    """
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    joins = tmp_path / "joins"
    model = make_model(tmp_path / "hf")
    sizes = [
        "trainer.tp=1",
        "generator.engines=1",
        "max_steps=100000",
        "checkpoint.every=0",
        "timeouts.silence_s=10",
    ]
    extra_overrides = ["async.partial_rollout=in_flight", "eval.limit=1", "observe.probe_every=0"]
    overrides = [f"run_dir={run_dir}", f"sft.output={model}", *OVERRIDES, *sizes, *extra_overrides]
    driver_log = run_dir / "logs/generator.0.log"
    phases: dict[str, list[dict]] = {}

    def steps(phase: str, engines: int, count: int = 8) -> None:
        def of_phase() -> list[dict]:
            return [
                row
                for row in rows(run_dir)[finished_steps:]
                if row.get("engines/serving") == engines
            ]

        finished_steps = len(rows(run_dir))
        wait_until(
            lambda: len(of_phase()) >= count, f"{count} steps with {engines} engines", START_S
        )
        phases[phase] = of_phase()

    def log_has(text: str) -> Callable[[], bool]:
        return lambda: text in driver_log.read_text()

    job = submit(cluster, log, *overrides, options="--nodes=2 --exclusive")
    wait_until(lambda: len(rows(run_dir)) >= 4, "the fourth step", START_S)
    steps("one engine", 1)
    second = cluster.submit(
        "slurm/engines.sbatch",
        f"run_dir={run_dir}",
        options=("--output", str(joins), "--nodes=2", "--exclusive"),
        cwd=ROOT,
    )
    wait_until(log_has("engine 2 at"), "two engines that start", START_S)
    steps("three engines", 3)
    assert (
        cluster.run([".venv/bin/megarl", "engines", "remove", str(run_dir), "1"], cwd=ROOT).stdout
        == "engine 1 has left: by command\n"
    )
    steps("two engines", 2)
    (node,) = {
        task["SLURMD_NODENAME"]
        for task in cluster.environments()
        if task.get(BEATS, "").endswith("/engine.2.beats")
    }
    cluster.kill_node(node)
    steps("one again", 1)
    wait_until(log_has("engine 2 has left"), "notice that it will not come back", START_S)
    wait_until(lambda: cluster.state(second) == "PENDING", "the second job in the queue again", 90)
    cluster.start_node(node)
    steps("three again", 3)
    listed = json.loads(
        cluster.run(
            [".venv/bin/megarl", "engines", "list", str(run_dir), "--json"], cwd=ROOT
        ).stdout
    )["engines"]
    assert [engine["number"] for engine in listed if engine["serving"]] == [0, 3, 4], listed
    cluster.run(["scancel", str(job)])
    assert cluster.wait(job, ENDED, 90) == "CANCELLED", log.read_text()
    assert cluster.wait(second, ENDED, 60) == "COMPLETED", joins.read_text()
    wait_until(lambda: not cluster.tasks(), "the end of all processes", 40)
    after = rows(run_dir)
    assert [row["step"] for row in after] == list(range(len(after)))
    assert all(row["sync/audit_ok"] for row in after if "sync/audit_ok" in row)
    trained = [
        ordinal
        for line in (run_dir / "rollouts/ordinals.jsonl").read_text().splitlines()
        for ordinal in json.loads(line)["ordinals"]
    ]
    assert len(trained) == len(set(trained)) == len(after) * PROMPTS and set(
        range(len(trained) - 6 * PROMPTS)
    ) <= set(trained)
    for phase, table in phases.items():
        print(
            f"{phase:<14} {len(table):>3} steps, median "
            f"{statistics.median(row['time/step_s'] for row in table):.2f} s"
        )


def wait_until(holds: Callable[[], bool], awaited: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"no {awaited} within {timeout_s:.0f} s"
        time.sleep(0.1)
