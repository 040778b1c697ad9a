"""What is said of a process that was killed."""

import resource
import signal
import subprocess
import sys

from megarl.base import processes


def test_exit_statuses_in_words():
    assert processes.ending(3) == "exited with status 3"
    assert processes.ending(-9) == "was killed by SIGKILL"
    assert (
        processes.ending(128 + 7)
        == "exited with status 135: one of its processes was killed by SIGBUS"
    )
    assert processes.ending(255) == "exited with status 255"


def test_kernel_is_named_for_a_kill_only_if_memory_was_short(tmp_path, monkeypatch):
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 5\noom_kill 3\n")
    monkeypatch.setattr(processes, "KERNEL_COUNTS", counts)
    assert processes.ended_for_memory() == 3
    assert "lack of memory" not in processes.cause(-signal.SIGKILL, 3)
    assert (
        "the kernel has ended 1 of this host's processes for lack of memory meanwhile; "
        in processes.cause(-signal.SIGKILL, 2)
    )
    assert "lack of memory" in processes.cause(128 + signal.SIGKILL, 2)
    assert "lack of memory" not in processes.cause(1, 2)
    counts.unlink()
    assert processes.ended_for_memory() == 0


def test_full_shared_memory_gives_its_free_space(tmp_path):
    """A real SIGBUS: the mapped file is truncated."""
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'w+b'); f.truncate(9000); m = "
        "mmap.mmap(f.fileno(), 0); f.truncate(0); m[5000] = 1"
    )
    cut = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    )
    assert cut.returncode == -signal.SIGBUS
    cause = processes.cause(cut.returncode, 0)
    assert "/dev/shm is " in cause and " MiB are free" in cause
