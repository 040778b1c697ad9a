"""The folder of a launch in TMPDIR, and folders that no other user can use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.base.files import make_private_folder
from megarl.launch.meeting import scratch_folder

KILLED = """
import os
from megarl.launch.meeting import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def temporary(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_it_is_private_and_goes_with_the_launch(temporary):
    with scratch_folder() as folder:
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        (folder / "socket").touch()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_launcher_left_goes_with_the_next_and_what_another_holds_stays(temporary):
    left = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True
    ).stdout.strip()
    assert os.path.isdir(left)
    with scratch_folder() as held:
        assert not os.path.exists(left)
        with scratch_folder() as other:
            assert held.exists() and other != held
        assert held.exists()


def test_where_tmpdir_is_too_long_for_sockets_it_is_elsewhere(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / ("x" * 80)))
    with scratch_folder() as folder:
        assert str(folder).startswith("/tmp/megarl-")


def test_a_private_folder_is_this_users_alone_unless_somebody_has_made_it_otherwise(tmp_path):
    made = tmp_path / "runs" / "new"
    found = tmp_path / "found"
    found.mkdir()
    found.chmod(0o750)
    for path in (made, found):
        make_private_folder(path)
    assert made.stat().st_mode & 0o777 == 0o700 and found.stat().st_mode & 0o777 == 0o750
