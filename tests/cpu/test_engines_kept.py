"""Restarts of engines, which small processes play; and a run's stop, with processes that play
trainer ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.base.processes import BEATS
from megarl.generator.server import RESTARTS
from megarl.launch.engines import STILL_S, EngineKeeper
from megarl.launch.launcher import StopOrder
from megarl.launch.meeting import Meeting
from megarl.launch.nodes import Node
from megarl.launch.processes import ProcessFailed, ProcessGroup, ProcessSpec
from megarl.launch.watch import Stopped, watch
from megarl.messaging.rendezvous import free_ports

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer key" else 401); self.end_headers()
    def log_message(self, *_): pass
print("engine starts", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BUSY = """
import os, threading, time
from megarl.base.processes import beating
""" + SERVER.replace(
    "        self.send_response",
    """        if os.path.exists("ASK"):
            with beating(): time.sleep(8)
            os.remove("ASK")
        self.send_response""",
)
WORKER = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("ready", flush=True)
while not (asked and sys.argv[1] == "stops"): time.sleep(0.02)
"""


def until(condition, poll=lambda: None, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        poll()
        time.sleep(0.02)


def keep_engine(
    group: ProcessGroup,
    policy: str,
    max_restarts: int = 2,
    health_s: float = 1.0,
    code=SERVER,
    env=None,
    spare: bool = False,
) -> EngineKeeper:
    (port,) = free_ports(1)
    keeper = EngineKeeper(group, policy, max_restarts, health_s, startup_s=30)
    spec = ProcessSpec("engine.0", [sys.executable, "-c", code, str(port)], env or {})
    group.start(spec)
    keeper.keep(spec, "127.0.0.1", port, "key", spare)
    return keeper


def starts(group: ProcessGroup) -> int:
    return group.log_path("engine.0").read_text().count("engine starts")


def child(group: ProcessGroup):
    return group._children["engine.0"]


def test_a_killed_engine_is_restarted_up_to_its_limit(tmp_path, capsys):
    with ProcessGroup(tmp_path) as group:
        keeper = keep_engine(group, "restart", max_restarts=1)
        until(lambda: keeper._engines["engine.0"].answered, keeper.poll)
        child(group).kill()
        until(lambda: starts(group) == 2 and keeper._engines["engine.0"].answered, keeper.poll)
        assert (
            "engine.0 was killed by SIGKILL; started again (1 of generator.max_restarts=1)"
            in capsys.readouterr().out
        )
        assert psutil.Process(child(group).pid).environ()[RESTARTS] == "1", "its seed depends on it"
        group.check(among=group.names - keeper.names)
        child(group).kill()
        with pytest.raises(
            ProcessFailed, match="(?s)engine.0 was killed by SIGKILL; the end of .*engine starts"
        ):
            until(lambda: False, keeper.poll, seconds=20)


def test_a_run_goes_on_without_a_spare_engine(tmp_path, capsys):
    """An engine has used up its restarts: the run continues without it.

    An engine that never answered ends the run.
    """
    with ProcessGroup(tmp_path) as group:
        keeper = keep_engine(group, "restart", max_restarts=0, spare=True)
        until(lambda: keeper._engines["engine.0"].answered, keeper.poll)
        child(group).kill()
        until(lambda: not group.names, keeper.poll)
        assert (
            "engine.0 is dropped after generator.max_restarts=0; the run goes on without it"
            in capsys.readouterr().out
        )
        keeper = keep_engine(
            group, "restart", max_restarts=0, spare=True, code="raise SystemExit(1)"
        )
        with pytest.raises(ProcessFailed, match="engine.0 exited with status 1"):
            until(lambda: False, keeper.poll, seconds=20)


# So ends an engine whose scheduler crashed, or that was told to end because it lacks a part of the
# weights.
LEAVING = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(1))\n"


@pytest.mark.parametrize(
    ("code", "number", "message"),
    [
        pytest.param(
            LEAVING + SERVER,
            signal.SIGTERM,
            "engine.0 exited with status 1; started again (1 of generator.max_restarts=2)",
            id="exits",
        ),
        pytest.param(SERVER, signal.SIGSTOP, "engine.0 has answered nothing for", id="is silent"),
    ],
)
def test_an_engine_that_served_is_restarted(code, number, message, tmp_path, capsys):
    with ProcessGroup(tmp_path) as group:
        keeper = keep_engine(group, "restart", code=code)
        until(lambda: keeper._engines["engine.0"].answered, keeper.poll)
        child(group).send_signal(number)
        until(lambda: starts(group) == 2 and keeper._engines["engine.0"].answered, keeper.poll)
        assert message in capsys.readouterr().out


@pytest.mark.long
def test_a_long_command_of_an_update_is_no_silence(tmp_path, capsys):
    """Its scheduler gives no answer for twice health_s, but sends heartbeats.

    A stopped scheduler sends none. In a run health_s is at least 5 s.
    """
    ask = tmp_path / "ask"
    beats = tmp_path / "beats"
    with ProcessGroup(tmp_path) as group:
        keeper = keep_engine(
            group,
            "restart",
            health_s=4.0,
            code=BUSY.replace("ASK", str(ask)),
            env={BEATS: str(beats)},
        )
        engine = keeper._engines["engine.0"]
        until(lambda: engine.answered, keeper.poll)
        ask.touch()
        until(lambda: not ask.exists(), keeper.poll)
        assert starts(group) == 1, capsys.readouterr().out
        since = time.monotonic()
        until(lambda: engine.answered > since, keeper.poll)
        ask.touch()
        until(lambda: engine.beaten > engine.answered, keeper.poll)
        child(group).send_signal(signal.SIGSTOP)
        until(lambda: starts(group) == 2, keeper.poll)
        assert "engine.0 has answered nothing for" in capsys.readouterr().out


def test_a_dropped_engine_ends_nothing(tmp_path, capsys):
    with ProcessGroup(tmp_path) as group:
        keeper = keep_engine(group, "drop")
        child(group).kill()
        until(lambda: not group.names, keeper.poll)
        assert "engine.0 is dropped" in capsys.readouterr().out


def test_under_fail_no_engine_is_kept(tmp_path):
    with ProcessGroup(tmp_path) as group:
        keeper = keep_engine(group, "fail")
        assert keeper.names == set()


def stopping(
    folder, group: ProcessGroup, node: int = 0, nodes: int = 1, deadline_s: float = 30.0
) -> StopOrder:
    meeting = Meeting(folder / "meeting", Node(node, nodes, "launch"), timeout_s=10, silence_s=10)
    return StopOrder(meeting, group, deadline_s)


def start_worker(group: ProcessGroup, name: str, behaviour: str) -> None:
    group.start(ProcessSpec(name, [sys.executable, "-S", "-c", WORKER, behaviour]))
    until(lambda: "ready" in group.log_path(name).read_text())


def test_a_stop_waits_for_the_trainer_ranks_alone(tmp_path):
    with ProcessGroup(tmp_path) as group:
        start_worker(group, "trainer.0", "stops")
        start_worker(group, "generator.0", "goes on")
        order = stopping(tmp_path, group)
        assert not order.order(), "too early: there is nothing to save"
        order.arm({"trainer.0"})
        assert order.order() and order.is_given
        watch(group, {"trainer.0", "generator.0"}, poll=order.poll, among=order.among)
        assert group.running() == ["generator.0"]
        assert not order.order(), "the second time ends the run at once"


def test_a_stop_reaches_other_nodes_and_has_a_deadline(tmp_path):
    with (
        ProcessGroup(tmp_path / "here") as first_group,
        ProcessGroup(tmp_path / "there") as second_group,
    ):
        start_worker(second_group, "trainer.1", "goes on")
        first = stopping(tmp_path, first_group, 0, 2)
        second = stopping(tmp_path, second_group, 1, 2, deadline_s=0.5)
        first.arm(set())
        second.arm({"trainer.1"})
        second.poll()
        assert not second.is_given
        assert first.order()
        with pytest.raises(
            Stopped,
            match="trainer.1 did not finish and save within checkpoint.on_termination_s=0.5",
        ):
            until(lambda: False, second.poll, seconds=20)
        assert second.is_given


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_engines_kept import keep_engine, starts
from megarl.launch.processes import ProcessGroup
from megarl.launch.watch import termination_as_exit
with termination_as_exit(), ProcessGroup(Path(sys.argv[2])) as group:
    keeper = keep_engine(group, "restart")
    while True:
        keeper.poll()
        if keeper._engines["engine.0"].answered:
            print("answered", starts(group), flush=True)
        time.sleep(0.1)
"""


@pytest.mark.long
def test_a_launcher_that_stood_still_forgives_silent_engines(tmp_path):
    """An engine counts as dead after 1 s of silence."""
    argv = [sys.executable, "-c", LAUNCHER, str(Path(__file__).parent), str(tmp_path)]
    launcher = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        until(lambda: launcher.stdout.readline() == "answered 1\n")
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(STILL_S + 2)
        launcher.send_signal(signal.SIGCONT)
        lines = [launcher.stdout.readline() for _ in range(60)]
    finally:
        launcher.terminate()
        launcher.wait(10)
    assert any("this launcher stood still for" in line for line in lines)
    assert all(line == "answered 1\n" or "stood still" in line for line in lines), lines


def test_an_engine_that_exits_before_its_first_answer_is_fatal(tmp_path, capsys):
    """It would end again. An engine that was killed is started again."""
    with ProcessGroup(tmp_path) as group:
        keeper = EngineKeeper(group, "restart", max_restarts=3, health_s=10, startup_s=30)
        spec = ProcessSpec(
            "engine.0", [sys.executable, "-S", "-c", "raise SystemExit('no such model')"]
        )
        group.start(spec)
        keeper.keep(spec, "127.0.0.1", 1, "key")
        with pytest.raises(
            ProcessFailed, match="(?s)engine.0 exited with status 1; the end of .*no such model"
        ):
            until(lambda: False, keeper.poll, seconds=20)
    assert "started again" not in capsys.readouterr().out
