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


def run_session(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
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
        "timeout=1",
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
    )
    assert result.returncode == 1, result.stdout
    assert "1 passed" in result.stdout and "left behind" in result.stdout
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_hanging_test_ends_with_all_stacks_and_no_child(tmp_path: Path) -> None:
    result = run_session(tmp_path, f"{start_sleeper(tmp_path)}; time.sleep(60)")
    assert result.returncode == 1
    assert "test_it ran for more than 1 s" in result.stderr
    # the stacks of the test and of its child
    assert "test_it.py" in result.stderr and 'File "<string>", line 1' in result.stderr
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_tests_see_no_outputs_of_the_checkout(checkout: Path) -> None:
    assert Path.cwd() == checkout and (checkout / "configs/quickstart.yaml").exists()
    assert not (checkout / "runs").exists()


def test_sessions_that_meet_run_each_file_once(tmp_path: Path) -> None:
    """The second of two sessions begins in the middle, and skips files that the first has begun,
    also in the next folder.
    """
    (tmp_path / "begun").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    for name in ("a/test_1", "a/test_2", "b/test_3", "b/test_4", "b/test_5", "c/test_6"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("def test_1(): pass\n\n\ndef test_2(): pass\n")
    for name in ("a/test_1", "b/test_5"):  # as if the other session had begun them
        (tmp_path / "begun" / str(tmp_path / f"{name}.py").replace("/", "_")).touch()
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-v",
        "--meet",
        str(tmp_path / "begun"),
        "--share=2/2",
        str(tmp_path),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    ran = [line.split()[0] for line in completed.stdout.splitlines() if " PASSED " in line]
    assert ran == [
        f"{name}.py::test_{number}"
        for name in ("b/test_4", "c/test_6", "a/test_2", "b/test_3")
        for number in (1, 2)
    ]
    assert completed.returncode == 0, completed.stdout
