"""Another user of the host can do nothing to a run. Needs root, to act as a second user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from run_tools import (
    descendants,
    make_model,
    quickstart,
    rows,
    start,
    title,
    wait_for_steps,
    wait_until,
)

STRANGER = 54_321  # a user id is enough: no account need exist
GROWTH_BYTES = 64 << 20

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root: it takes a second user"),
]


def as_stranger(job: dict) -> dict:
    argv = [sys.executable, str(Path(__file__).with_name("stranger.py"))]
    completed = subprocess.run(
        argv,
        input=json.dumps({**job, "user": STRANGER}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that every user can look into, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_another_user_reaches_nothing(open_folder, monkeypatch):
    """A trainer of two ranks, and an engine with data-parallel attention, whose processes
    communicate over TCP.
    """
    run_dir = open_folder / "run"
    log = open_folder / "log"
    temporary = open_folder / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(temporary))
    shape = [
        "trainer.tp=2",
        "trainer.sequence_parallel=true",
        "generator.tp=2",
        "generator.ep=2",
        "generator.dp_attention=2",
    ]
    model = make_model(open_folder / "model", "qwen3_moe")
    overrides = ["max_steps=100000", "checkpoint.every=0", "eval.limit=4", *shape]
    run = start(quickstart(model, run_dir, *overrides), log)
    try:
        wait_for_steps(run, run_dir, 1)
        processes = [psutil.Process(run.pid), *descendants(run)]
        [scratch] = temporary.glob("megarl-*")
        listeners = {
            connection.laddr
            for process in processes
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert {address.ip for address in listeners} == {"127.0.0.1"}, listeners
        keys = secrets_of(run_dir)
        assert not any(key in title(process) for process in processes for key in keys), (
            "every user sees command lines"
        )
        memory = {process: process.memory_info().rss for process in processes}
        marker = open_folder / "marks"
        marker.mkdir()
        marker.chmod(0o777)
        run_files = files_of(run_dir, scratch, processes)
        assert len(run_files) > 50 and not [
            path for path in run_files if path.startswith("/dev/shm")
        ], "what lies there would outlive the run"
        reachable = as_stranger(
            {
                "ports": [address.port for address in listeners],
                "marker": str(marker / "mark"),
                "files": run_files,
                "sockets": sockets_of(processes),
            }
        )

        assert reachable["user"] == STRANGER
        assert reachable["readable"] == [] and reachable["sockets"] == []
        through = [port for port in reachable["ports"] if port["open"]]
        refusing = [port for port in through if port["zmq"] == "CURVE" or port["http"] == "401"]
        silent = [port for port in through if not (port["zmq"] or port["http"] or port["store"])]
        assert len(refusing) + len(silent) == len(through), [
            port for port in through if port not in refusing
        ]
        assert {port["port"] for port in silent} <= handshakes_of(run_dir), silent
        assert list(marker.iterdir()) == [], "something that it sent was unpickled"
        steps = len(rows(run_dir))
        wait_until(lambda: len(rows(run_dir)) > steps + 1, run, "a step after that", 120)
        grown = {
            process.pid: process.memory_info().rss - before
            for process, before in memory.items()
            if process.is_running()
        }
        assert grown.keys() == {process.pid for process in memory}, "all of them live"
        assert max(grown.values()) < GROWTH_BYTES, grown
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 128 + signal.SIGTERM, log.read_text()
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    assert not scratch.exists()
    texts = [
        log.read_text(),
        *(path.read_text(errors="replace") for path in (run_dir / "logs").iterdir()),
    ]
    assert not any(key in text for text in texts for key in keys), "a key in a log"


def secrets_of(run_dir: Path) -> list[str]:
    [folder] = (run_dir / ".launch" / "train").glob("local")
    rendezvous, message_key = (
        json.loads((folder / name).read_text()) for name in ("rendezvous.json", "message_key.json")
    )
    return [rendezvous["engine_key"], rendezvous["engine_admin_key"], *message_key.values()]


def handshakes_of(run_dir: Path) -> set[int]:
    """The port at which SGLang tells an engine's other nodes its ports
    (DP_ATTENTION_HANDSHAKE_PORT_DELTA). Without other nodes it closes the port at once. Processes
    that were forked before still listen there, but accept nothing.
    """
    [path] = (run_dir / ".launch" / "train").glob("local/rendezvous.json")
    return {
        port + 13
        for port in [engine["port"] for engine in json.loads(path.read_text())["engines"]["engine"]]
    }


def files_of(run_dir: Path, scratch: Path, processes: list[psutil.Process]) -> list[str]:
    """All files of the run's folder, all files of its processes in /tmp and /dev/shm, and their
    files in /proc.
    """
    paths = [str(path) for folder in (run_dir, scratch) for path in [folder, *folder.rglob("*")]]
    for process in processes:
        mapped = {entry.path for entry in process.memory_maps()} | {
            file.path for file in process.open_files()
        }
        paths += [
            path
            for path in mapped
            if path.startswith(("/dev/shm/", f"{scratch}/")) and os.path.exists(path)
        ]
        paths += [
            f"/proc/{process.pid}/{name}"
            for name in ("environ", "mem", "maps", "fd", "auxv", "stack")
        ]
    return sorted(set(paths))


def sockets_of(processes: list[psutil.Process]) -> list[str]:
    """Paths of Unix sockets. The names of sockets without a path begin with a zero byte."""
    inodes = {
        os.stat(f"/proc/{member.pid}/fd/{name}").st_ino
        for member in processes
        for name in os.listdir(f"/proc/{member.pid}/fd")
    }
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = [line[7] for line in lines if len(line) > 7 and int(line[6]) in inodes]
    return ["\0" + name[1:] if name.startswith("@") else name for name in names]
