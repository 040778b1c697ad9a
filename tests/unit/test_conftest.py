"""The guards of tests/conftest.py, tested by separate pytest sessions that break the rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SLEEP = "import time; time.sleep(60)"


def start_sleeper(folder: Path) -> str:
    return (
        f"p = subprocess.Popen([sys.executable, '-c', '{SLEEP}']); open('{folder}/pid', "
        "'w').write(str(p.pid))"
    )


def run_session(folder: Path, body: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(
        f"import subprocess, sys, time\ndef test_it():\n    {body}\n"
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "--linger=0.5",
        "-o",
        f"timeout={timeout_s}",
        "-o",
        "timeout_method=thread",
        str(folder),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=folder, env=environment
    )


def test_leftover_process_fails_the_session_and_is_ended(tmp_path: Path) -> None:
    # The test's own child ends at once. Its grandchild stays, as an orphan.
    result = run_session(
        tmp_path,
        "subprocess.run([sys.executable, '-c', "
        f"{'import subprocess, sys; ' + start_sleeper(tmp_path)!r}])",
        timeout_s=60,
    )
    assert result.returncode == 1, result.stdout
    assert "1 passed" in result.stdout and "left behind" in result.stdout
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_hanging_test_ends_with_all_stacks_and_no_child(tmp_path: Path) -> None:
    result = run_session(tmp_path, f"{start_sleeper(tmp_path)}; time.sleep(60)", timeout_s=1)
    assert result.returncode == 1
    assert "test_it ran for more than 1 s" in result.stderr
    # the stacks of the test and of its child
    assert "test_it.py" in result.stderr and 'File "<string>", line 1' in result.stderr
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_tests_see_no_outputs_of_the_checkout(checkout: Path) -> None:
    assert Path.cwd() == checkout and (checkout / "configs/quickstart.yaml").exists()
    assert not (checkout / "runs").exists()
