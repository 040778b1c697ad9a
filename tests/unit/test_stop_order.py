"""SIGTERM and Ctrl-C at the launchers, of several nodes too."""

from __future__ import annotations

import os
import signal

import pytest

from megarl.launch import meeting
from megarl.launch.meeting import Meeting
from megarl.launch.node import Node
from megarl.launch.stopping import StopOrder, Stopped
from megarl.launch.watch import termination_as_exit


@pytest.fixture(autouse=True)
def looks_always(monkeypatch):
    monkeypatch.setattr(meeting, "LOOK_S", 0.0)


class Processes:
    """Notes who was asked to stop."""

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
    return StopOrder(Meeting(folder, Node(rank, 2, "x"), 5.0, 5.0), processes, deadline_s), processes


def test_a_signal_before_there_is_anything_to_save_ends_all_at_once(tmp_path):
    early, processes = order(tmp_path, 0)
    assert not early.order() and not early.given and processes.asked == []


def test_a_signal_reaches_the_trainer_ranks_of_all_nodes_once(tmp_path):
    (first, of_first), (second, of_second) = order(tmp_path, 0), order(tmp_path, 1)
    first.arm({"trainer.0"}), second.arm({"trainer.1"})
    second.poll()
    assert second.among() is None
    assert first.order()
    second.poll()
    assert (of_first.asked, of_second.asked) == ([{"trainer.0"}], [{"trainer.1"}])
    assert (first.among(), second.among()) == ({"trainer.0"}, {"trainer.1"})


def test_the_nodes_own_signal_after_the_news_of_anothers_is_the_same_order_and_only_the_next_a_second(tmp_path):
    (first, _), (second, of_second) = order(tmp_path, 0), order(tmp_path, 1)
    first.arm({"trainer.0"}), second.arm({"trainer.1"})
    assert first.order()
    second.poll()
    assert second.order(), "Slurm signals every node"
    assert of_second.asked == [{"trainer.1"}]
    assert not second.order() and not first.order()


def test_a_stop_is_told_once_by_the_name_of_its_signal(tmp_path, capsys):
    stopped, _ = order(tmp_path, 0)
    stopped.poll()
    stopped.arm({"trainer.0"})
    assert stopped.order(signal.SIGINT)
    stopped.poll(), stopped.poll()
    told = "the running step is finished and saved, within 60 s (checkpoint.on_termination_s). Once more ends everything at once."
    assert capsys.readouterr().out == f"Ctrl-C: {told}\n"
    assert (Stopped(number=stopped.signal).by, Stopped(number=stopped.signal).exit_status) == ("Ctrl-C", 130)


@pytest.mark.parametrize("number, ends_by", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_both_signals_ask_first_and_end_the_launcher_otherwise(number, ends_by):
    heard = []
    with termination_as_exit(first=lambda number: heard.append(number) or len(heard) == 1):
        os.kill(os.getpid(), number)
        with pytest.raises(ends_by):
            os.kill(os.getpid(), number)
    assert heard == [number, number] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_past_the_deadline_those_that_did_not_stop_are_named(tmp_path):
    late, _ = order(tmp_path, 0, deadline_s=-1.0)
    late.arm({"trainer.0"})
    assert late.order()
    with pytest.raises(Stopped) as stopped:
        late.poll()
    assert stopped.value.problem.startswith("trainer.0 did not finish and save within checkpoint.on_termination_s=")
