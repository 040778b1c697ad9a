"""The job scripts: their headers request what the plan needs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.launch.commands import nodes_needed
from megarl.launch.launcher import training_job
from megarl.plan.resolve import resolve

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
GPU_SCRIPTS = [script for script in SCRIPTS if "\n#SBATCH --gpus-per-node" in script.read_text()]


def directive(script: Path, name: str) -> str:
    (value,) = re.findall(rf"^#SBATCH --{name}=(\S+)", script.read_text(), re.MULTILINE)
    return value


@pytest.mark.parametrize("script", GPU_SCRIPTS, ids=lambda script: script.stem)
def test_header_requests_the_nodes_of_the_plan(script):
    (config,) = re.findall(r"megarl_job (\S+)", script.read_text())
    plan = resolve(load_config(config, []), "plan")
    assert plan.config.launch.ranks_per_node == int(directive(script, "gpus-per-node"))
    nodes = nodes_needed(plan, training_job(plan))
    assert nodes == int(directive(script, "nodes"))


@pytest.mark.parametrize("script", GPU_SCRIPTS, ids=lambda script: script.stem)
def test_last_checkpoint_has_the_time_that_slurm_gives(script):
    """At these sizes the default of two minutes is too short to finish a step and save: all since
    the last checkpoint would be lost.
    """
    (config,) = re.findall(r"megarl_job (\S+)", script.read_text())
    (ahead_s,) = re.findall(r"^B:USR1@(\d+)", directive(script, "signal"))
    # a minute to end and to requeue
    assert load_config(ROOT / config, []).checkpoint.on_termination_s == int(ahead_s) - 60


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_one_launcher_per_node_and_valid_shell(script):
    assert directive(script, "ntasks-per-node") == "1"
    for path in (script, ROOT / "slurm/job.sh"):
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_job_submitted_outside_the_checkout_ends_at_once(script, tmp_path):
    environment = os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    completed = subprocess.run(
        ["bash", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 2
    [line] = completed.stderr.splitlines()
    assert line.endswith(f"{tmp_path}/slurm/job.sh: No such file or directory")


def test_quickstart_job_checks_its_settings_before_a_run(tmp_path):
    """With the real megarl, and an srun that only prints its arguments."""
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": os.getcwd(),
    }
    script = ["bash", "slurm/quickstart.sbatch", f"run_dir={tmp_path}/run"]
    completed = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert (completed.returncode, completed.stderr) == (0, "")
    commands = re.findall(r"bin/megarl (\w+) configs/quickstart.yaml ", completed.stdout)
    assert commands == ["sft", "train"]
    assert not (tmp_path / "run").exists()


def own_job(folder: Path, megarl: str) -> subprocess.CompletedProcess[str]:
    """`sbatch slurm/run.sbatch my.yaml trainer.tp=4` in a checkout with another `megarl`, and an
    srun that only prints its arguments.
    """
    for path, script in ((".venv/bin/megarl", megarl), ("bin/srun", 'echo "$@"')):
        program = folder / path
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    (folder / "slurm").symlink_to(ROOT / "slurm")
    environment = os.environ | {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "MEGARL_COMMANDS": "sft train",
    }
    script = ["bash", "slurm/run.sbatch", "my.yaml", "trainer.tp=4"]
    return subprocess.run(
        script, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_own_job_passes_on_file_and_overrides(tmp_path: Path) -> None:
    completed = own_job(tmp_path, "echo a plan")
    assert (completed.returncode, completed.stderr) == (0, "")
    started = [line.partition(".venv/bin/")[2] for line in completed.stdout.splitlines()]
    assert started == ["megarl sft my.yaml trainer.tp=4", "megarl train my.yaml trainer.tp=4"]


def test_job_shows_the_plan_of_a_refused_run(tmp_path: Path) -> None:
    completed = own_job(tmp_path, "echo fits no; exit 1")
    assert (completed.returncode, completed.stdout, completed.stderr) == (1, "fits no\n", "")
