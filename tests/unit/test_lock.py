"""Of two launches of one run the second is refused, however earlier ones have ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.launch.meeting import is_locked, locked

HOLD = """
import sys, time
from pathlib import Path
from megarl.launch.meeting import locked
with locked(Path(sys.argv[1]), "refused"):
    print("held", flush=True)
    time.sleep(60)
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `megarl sft` in tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / ".launch/sft/lock")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)


def test_a_second_launch_is_refused_before_anything_starts(holder, tmp_path, refusal):
    message = refusal("sft", str(ROOT / "configs/quickstart.yaml"), f"run_dir={tmp_path}")
    assert message.startswith(f"megarl: run_dir={tmp_path}: megarl sft is running there already")
    assert len(message.splitlines()) == 1
    assert f"already, process {holder.pid} on " in message
    assert message.endswith("; end it first\n")
    assert [path.name for path in tmp_path.iterdir()] == [".launch"]


def test_a_killed_holder_holds_nothing(holder, tmp_path):
    path = tmp_path / ".launch/sft/lock"
    with pytest.raises(ConfigError, match="another command"), locked(path, "another command"):
        raise AssertionError("held twice")
    holder.kill()
    holder.wait(10)
    with locked(path, "refused"):
        assert f"process {holder.pid} on " not in path.read_text()


def test_a_launch_in_another_thread_is_seen_and_stays_locked(tmp_path):
    """A record lock belongs to the process, which loses it as soon as any of its threads closes the
    file.
    """
    path = tmp_path / ".launch/sft/lock"
    with locked(path, "refused"):
        assert is_locked(path)
        with (
            pytest.raises(
                ConfigError, match="refused, in another thread of this program; end it first"
            ),
            locked(path, "refused"),
        ):
            raise AssertionError("held twice")
        code = (
            "import sys; from pathlib import Path; from megarl.launch.meeting import is_locked; "
            "print(is_locked(Path(sys.argv[1])))"
        )
        assert (
            subprocess.run(
                [sys.executable, "-c", code, path], capture_output=True, text=True
            ).stdout
            == "True\n"
        )
    assert not is_locked(path)


def test_launch_without_file_locks_continues_with_a_warning(tmp_path, monkeypatch, capsys):
    import errno
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with locked(tmp_path / "lock", "refused"):
        pass
    assert "no locks on this file system" in capsys.readouterr().err
