"""Runs over several hosts: trainer and engines are in network namespaces of their own, on shaped
links, and started as by torchrun.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from namespaces import INTERFACE, Hosts, missing
from run_tools import ROOT, command, quickstart, rows

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
NOTICED_S = 15


def start(hosts: Hosts, arguments: list[str], folder: Path) -> list[subprocess.Popen]:
    """One launcher per host."""
    launchers = []
    for host in range(hosts.count):
        overrides = {
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(hosts.count),
            "LOCAL_WORLD_SIZE": "1",
        }
        environment = (
            os.environ
            | overrides
            | {"TORCHELASTIC_RUN_ID": folder.name, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        )
        with open(folder / f"launcher.{host}.log", "wb") as log:
            argv = hosts.command(host, command(*arguments))
            launchers.append(
                subprocess.Popen(
                    argv, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            )
    return launchers


def stop(launchers: list[subprocess.Popen]) -> None:
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGKILL)  # its processes die with it
        launcher.wait(30)


@pytest.mark.long
@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.sample), "gloo"])
def test_cut_link_between_hosts_is_reported(transport, model, tmp_path):
    """Weights and rollouts cross the link before that."""
    run_dir = tmp_path / "run"
    places = [
        "trainer.tp=1",
        "launch.ranks_per_node=1",
        f"launch.interface={INTERFACE}",
        f"weights.transport={transport}",
    ]
    deadlines = [f"timeouts.{key}={NOTICED_S}" for key in ("weights_s", "request_s", "rollouts_s")]
    arguments = quickstart(model, run_dir, *places, *deadlines)
    with Hosts() as hosts:
        launchers = start(
            hosts,
            [*arguments, "max_steps=100000", "observe.probe_every=0", "eval.limit=2"],
            tmp_path,
        )
        try:
            wait_for_steps(run_dir, 2, launchers, tmp_path)
            before = hosts.sent_bytes(0)
            steps = len(rows(run_dir))
            wait_for_steps(run_dir, steps + 3, launchers, tmp_path)
            # a row follows its update: bytes of the first may have been counted before
            whole_updates = len(rows(run_dir)) - steps - 1
            sent = hosts.sent_bytes(0) - before
            hosts.cut()
            assert launchers[0].wait(3 * NOTICED_S) == 1
        finally:
            stop(launchers)
    # Mooncake's own output may come after this
    end_of_log = (tmp_path / "launcher.0.log").read_text().partition("megarl: ")[2]
    messages = [
        line
        for line in end_of_log.splitlines()
        if re.search(r"waited \d+ s for|not through within|could not write", line)
    ]
    assert any(
        re.search(r"trainer(\.| rank )0", line) and re.search(r"generator(\.| rank )0", line)
        for line in messages
    ), end_of_log
    finished = rows(run_dir)
    assert all(row["sync/audit_ok"] for row in finished)
    assert sent >= whole_updates * finished[-1]["sync/bytes"] > 0, "every update crosses the link"
    addresses = [
        json.loads(path.read_text())["address"]
        for path in sorted((run_dir / ".launch/train").glob("*/node.*.json"))
    ]
    assert addresses == ["10.77.0.1", "10.77.0.2"]


@pytest.mark.long
@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.sample), "gloo"])
def test_hosts_without_ipv4(transport, model, tmp_path):
    run_dir = tmp_path / "run"
    places = [
        "trainer.tp=1",
        "launch.ranks_per_node=1",
        f"launch.interface={INTERFACE}",
        f"weights.transport={transport}",
    ]
    arguments = quickstart(model, run_dir, *places, "max_steps=3")
    with Hosts(ipv6=True) as hosts:
        launchers = start(hosts, arguments, tmp_path)
        try:
            assert launchers[0].wait(240) == 0, (tmp_path / "launcher.0.log").read_text()
        finally:
            stop(launchers)
    assert [row["sync/audit_ok"] for row in rows(run_dir)] == [True] * 3
    assert (
        f"weights go by {'mooncake' if transport == 'auto' else transport}"
        in (run_dir / "logs/generator.0.log").read_text()
    )
    addresses = [
        json.loads(path.read_text())["address"]
        for path in sorted((run_dir / ".launch/train").glob("*/node.*.json"))
    ]
    assert addresses == ["fd77::1", "fd77::2"]


@pytest.mark.parametrize("relay", ["engines", "off"])
def test_engines_pass_on_what_the_trainers_link_need_not_carry(relay, model, tmp_path):
    """Three engines and one trainer rank. Prints the time of an update, for docs/transports.md."""
    run_dir = tmp_path / "run"
    places = [
        "trainer.tp=1",
        "generator.engines=3",
        "launch.ranks_per_node=1",
        f"launch.interface={INTERFACE}",
    ]
    arguments = quickstart(model, run_dir, *places, "max_steps=100000")
    with Hosts(4, rate="20mbit") as hosts:
        launchers = start(
            hosts,
            [*arguments, f"weights.relay={relay}", "observe.probe_every=0", "eval.limit=2"],
            tmp_path,
        )
        try:
            wait_for_steps(run_dir, 2, launchers, tmp_path)
            before = [hosts.sent_bytes(host) for host in range(4)]
            steps = len(rows(run_dir))
            wait_for_steps(run_dir, steps + 6, launchers, tmp_path)
            sent = [hosts.sent_bytes(host) - sent for host, sent in enumerate(before)]
        finally:
            stop(launchers)
    finished = rows(run_dir)
    per_step = [sent_bytes / (len(finished) - steps) for sent_bytes in sent]
    pause_s = statistics.median(row["time/sync_pause_s"] for row in finished[2:])
    print(
        f"weights.relay={relay}: {finished[-1]['sync/bytes']} bytes of weights a step; hosts send "
        f"{per_step}; {pause_s=:.2f}"
    )
    assert all(row["sync/audit_ok"] for row in finished)
    full_bytes = (
        finished[-1]["sync/bytes"]
        if relay == "off"
        else 3 * (model / "model.safetensors").stat().st_size
    )
    assert (finished[-1]["sync/bytes"] < 0.6 * full_bytes) == (relay == "engines")
    assert (min(per_step[1:]) > 0.1 * full_bytes) == (relay == "engines")


def wait_for_steps(
    run_dir: Path,
    count: int,
    launchers: list[subprocess.Popen],
    folder: Path,
    timeout_s: float = 240,
) -> None:
    deadline = time.monotonic() + timeout_s
    while len(rows(run_dir)) < count:
        logs = [(folder / f"launcher.{host}.log").read_text() for host in range(len(launchers))]
        assert all(launcher.poll() is None for launcher in launchers), logs
        assert time.monotonic() < deadline, logs
        time.sleep(0.1)
