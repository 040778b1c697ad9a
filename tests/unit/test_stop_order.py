"""SIGTERM and Ctrl-C at the launchers, also of several nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from loops import settle

from megarl.config.errors import RunError
from megarl.config.schema import RunConfig
from megarl.launch import meeting
from megarl.launch.meeting import Meeting
from megarl.launch.nodes import Node
from megarl.launch.watch import StopOrder, Stopped, termination_as_exit
from megarl.messaging.messages import LookAgain, LookedAgain
from megarl.messaging.process_groups import StopRequest
from megarl.messaging.waiting import Pulse
from megarl.plan.topologies import engine_groups
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.receiver import WeightsReceiver
from megarl.weight_sync.sender import WeightsSender


@pytest.fixture(autouse=True)
def looks_always(monkeypatch):
    monkeypatch.setattr(meeting, "LOOK_S", 0.0)


class Processes:
    """Records which processes were asked to stop."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    def ask_to_stop(self, names: set[str]) -> None:
        self.asked.append(names)

    def running(self) -> list[str]:
        return ["trainer.0"]

    def dump_stacks(self) -> None:
        """Nothing to dump."""


def order(folder, rank: int, deadline_s: float = 60.0) -> tuple[StopOrder, Processes]:
    processes = Processes()
    return StopOrder(
        Meeting(folder, Node(rank, 2, "x"), 5.0, 5.0), processes, deadline_s
    ), processes


def test_signal_before_anything_can_be_saved_ends_at_once(tmp_path):
    early, processes = order(tmp_path, 0)
    assert not early.order()
    assert not early.is_given
    assert processes.asked == []


def test_a_signal_reaches_the_trainer_ranks_of_all_nodes_once(tmp_path):
    first, of_first = order(tmp_path, 0)
    second, of_second = order(tmp_path, 1)
    first.arm({"trainer.0"})
    second.arm({"trainer.1"})
    second.poll()
    assert second.among() is None
    assert first.order()
    second.poll()
    assert (of_first.asked, of_second.asked) == ([{"trainer.0"}], [{"trainer.1"}])
    assert (first.among(), second.among()) == ({"trainer.0"}, {"trainer.1"})


def test_signal_of_another_node_first_is_the_same_order(tmp_path):
    """Slurm signals every node. Only the next signal is a second order."""
    first, _ = order(tmp_path, 0)
    second, of_second = order(tmp_path, 1)
    first.arm({"trainer.0"})
    second.arm({"trainer.1"})
    assert first.order()
    second.poll()
    assert second.order(), "Slurm signals every node"
    assert of_second.asked == [{"trainer.1"}]
    assert not second.order()
    assert not first.order()


def test_stop_is_printed_once_with_the_name_of_its_signal(tmp_path, capsys):
    stopped, _ = order(tmp_path, 0)
    stopped.poll()
    stopped.arm({"trainer.0"})
    assert stopped.order(signal.SIGINT)
    stopped.poll()
    stopped.poll()
    message = (
        "the running step is finished and saved, within 60 s (checkpoint.on_termination_s). A "
        "second one ends everything at once."
    )
    assert capsys.readouterr().out == f"Ctrl-C: {message}\n"
    assert (Stopped(number=stopped.signal).by, Stopped(number=stopped.signal).exit_status) == (
        "Ctrl-C",
        130,
    )


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_warning_stops_a_run_as_sigterm_does(tmp_path, number):
    """The SIGTERM that Slurm sends at the limit is then no second order, but two of them are."""
    stopped, _ = order(tmp_path, 0)
    assert not stopped.order(number), "there is nothing to save yet"
    stopped.arm({"trainer.0"})
    answers = [
        stopped.order(signal_number)
        for signal_number in (number, number, signal.SIGTERM, number, signal.SIGTERM)
    ]
    assert answers == [True, True, True, True, False]
    assert Stopped(number=stopped.signal).exit_status == 128 + number
    assert stopped.is_given


def test_a_lost_terminal_takes_no_more_text(tmp_path):
    """A launcher whose terminal has gone goes on printing, to nowhere, until it has saved."""
    code = """if True:
        import os, signal, sys
        from megarl.launch.watch import termination_as_exit
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        with termination_as_exit(first=lambda number: True):
            os.kill(os.getpid(), signal.SIGHUP)
            print("still here", flush=True)
            open(sys.argv[1], "w").write("saved")
    """
    terminal, worker = pty.openpty()
    errors = tmp_path / "errors"
    with open(errors, "wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "file"], stdout=worker, stderr=file
        )
    os.close(worker)
    os.close(terminal)
    assert child.wait(60) == 0, errors.read_text(encoding="utf-8")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "saved"


def test_an_ignored_hangup_stays_ignored():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with termination_as_exit():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)


@pytest.mark.parametrize(
    "number, ends_by",
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, SystemExit),
        (signal.SIGUSR1, SystemExit),
    ],
)
def test_both_signals_ask_first_and_end_the_launcher_otherwise(number, ends_by):
    signals = []
    with termination_as_exit(first=lambda number: signals.append(number) or len(signals) == 1):
        os.kill(os.getpid(), number)
        with pytest.raises(ends_by):
            os.kill(os.getpid(), number)
    assert signals == [number, number]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_past_the_deadline_those_that_did_not_stop_are_named(tmp_path):
    late, _ = order(tmp_path, 0, deadline_s=-1.0)
    late.arm({"trainer.0"})
    assert late.order()
    with pytest.raises(Stopped) as stopped:
        late.poll()
    assert stopped.value.problem.startswith(
        "trainer.0 did not finish and save within checkpoint.on_termination_s="
    )


@dataclass
class Link:
    """A link to the generator, which answers with `answer`, or not at all."""

    name: str
    answer: LookedAgain | None
    sent: list = field(default_factory=list)
    waited_s: float = 0.0

    def send(self, message):
        self.sent.append(message)

    def receive(self, kind, timeout_s, awaited):
        self.waited_s = timeout_s
        if self.answer is None:
            raise TimeoutError(f"{self.name} waited for {awaited}")
        return "generator.0", self.answer


def stopped(
    link: Link,
    *,
    offered: int = 3,
    written: int = 3,
    stop_requested: bool = True,
    since_s: float = 20,
    **settings,
) -> None:
    """A trainer rank that closes the weights channel, because its run stops."""
    config = RunConfig(max_steps=9)
    stop = StopRequest()
    config.weights.audit = settings.get("audit", "strict")
    sender = WeightsSender(
        SimpleNamespace(config=config, groups=engine_groups(config.generator), spec=None),
        link,
        stop,
    )
    if stop_requested:
        stop.ask()
        stop.since -= since_s
    sender._offered = offered
    sender._written = written
    sender.close()


def test_engines_are_audited_once_more_when_a_run_stops(capsys):
    """A tensor that changed since the last audit is named, and ends the run in failure.

    If the generator cannot look, the run does not fail.
    """
    link = Link("trainer.0", LookedAgain())
    stopped(link)
    assert link.sent == [LookAgain()] and 45 < link.waited_s <= 50, (
        "half of the 100 s that are left"
    )
    with pytest.raises(RunError, match="lm_head.weight on generator rank 0 has changed"):
        stopped(
            Link("trainer.0", LookedAgain(problem="lm_head.weight on generator rank 0 has changed"))
        )
    for answer, obstacle in (
        (None, "trainer.0 waited for generator.0 to look at the engines again"),
        (LookedAgain(obstacle="gone"), "gone"),
    ):
        stopped(Link("trainer.0", answer))
        assert f"not compared with the last audit again: {obstacle}" in capsys.readouterr().out
    not_written: list[dict] = [
        {"offered": 4},
        {"offered": 9, "written": 9},
        {"offered": -1, "written": -1},
        {"stop_requested": False},
    ]
    for left_out in (*not_written, {"since_s": 121}, {"audit": "on"}):
        link = Link("trainer.0", None)
        stopped(link, **left_out)
        assert not link.sent, left_out
    link = Link("trainer.1", None)
    stopped(link)
    assert not link.sent, "one rank asks"


def test_generator_audits_engines_after_a_running_update():
    """It answers with its findings."""

    async def answers(outcome: Exception | None, busy: bool = False) -> list[LookedAgain]:
        sent: list[LookedAgain] = []

        async def arrival(*_):
            return "trainer.0", LookAgain()

        async def look_again(fleet, version):
            if outcome is not None:
                raise outcome
            return [0]

        receiver = object.__new__(WeightsReceiver)
        pulse = Pulse()
        receiver._link = SimpleNamespace(
            arrival=arrival, send=lambda to, message: sent.append(message)
        )
        receiver._plan = SimpleNamespace(config=RunConfig())
        receiver._sessions = SimpleNamespace(look_again=look_again)
        receiver._busy = busy
        receiver._updates = 0
        trace = SimpleNamespace(span=lambda *_, **__: contextlib.nullcontext({}))
        executor = SimpleNamespace(
            fleet=SimpleNamespace(pulse=pulse, updating=set()), trace=trace, version=3
        )
        answering = asyncio.create_task(receiver._answer(executor))
        await settle()
        assert bool(sent) != busy
        receiver._busy = False
        pulse.beat()
        await answering
        return sent

    assert asyncio.run(answers(None)) == asyncio.run(answers(None, busy=True)) == [LookedAgain()]
    assert asyncio.run(answers(AuditError("it has changed"))) == [
        LookedAgain(problem="it has changed")
    ]
    assert asyncio.run(answers(RuntimeError("engine 0 is gone"))) == [
        LookedAgain(obstacle="engine 0 is gone")
    ]
