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


def test_scratch_is_private_and_removed_with_the_launch(temporary):
    with scratch_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "socket").touch()
    assert list(temporary.iterdir()) == []


def test_scratch_of_a_killed_launcher_is_removed_by_the_next(temporary):
    """Folders that a running launcher holds stay."""
    abandoned = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True
    ).stdout.strip()
    assert os.path.isdir(abandoned)
    with scratch_folder() as first:
        assert not os.path.exists(abandoned)
        with scratch_folder() as second:
            assert first.exists()
            assert second != first
        assert first.exists()


def test_scratch_avoids_a_tmpdir_too_long_for_sockets(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / ("x" * 80)))
    with scratch_folder() as folder:
        assert str(folder).startswith("/tmp/megarl-")


def test_private_folder_is_the_users_alone_if_it_is_new(tmp_path):
    new = tmp_path / "runs" / "new"
    existing = tmp_path / "found"
    existing.mkdir()
    existing.chmod(0o750)
    for path in (new, existing):
        make_private_folder(path)
    assert new.stat().st_mode & 0o777 == 0o700
    assert existing.stat().st_mode & 0o777 == 0o750
