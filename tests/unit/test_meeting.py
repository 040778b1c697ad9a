"""Launchers of several nodes: how they are identified, how they meet, and how one failure ends all."""

from __future__ import annotations

import threading
import time

import pytest

from megarl.config.errors import ConfigError
from megarl.launch import meeting as meeting_module
from megarl.launch.launcher import disagreements
from megarl.launch.meeting import Meeting, NodeReport, PeerFailed
from megarl.launch.nodes import Node, address_of, interface_with, speaks, this_node
from megarl.launch.start import network

STEP = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_PROCID": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "r1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
}


@pytest.fixture(autouse=True)
def looks_always(monkeypatch):
    monkeypatch.setattr(meeting_module, "LOOK_S", 0.0)


def report(node: int, **changes) -> NodeReport:
    facts = {
        "node": node,
        "host": f"h{node}",
        "address": "127.0.0.1",
        "gpus": 8,
        "ports": {},
        "versions": {"torch": "2.13.0"},
        "problems": [],
    }
    return NodeReport(**(facts | changes))


def meetings(folder, count=2, timeout_s=5.0, silence_s=5.0) -> list[Meeting]:
    return [Meeting(folder, Node(rank, count, "x"), timeout_s, silence_s) for rank in range(count)]


def test_a_node_knows_its_place_from_srun_torchrun_or_alone():
    assert this_node({}) == Node(0, 1, "local")
    assert this_node(STEP) == Node(2, 4, "slurm.7.1.0")
    assert this_node(STEP | {"SLURM_RESTART_COUNT": "3"}).launch != this_node(STEP).launch
    assert this_node(TORCHRUN) == Node(1, 2, "torchrun.r1.0")
    assert [
        speaks(environment) for environment in ({}, STEP, STEP | {"SLURM_PROCID": "0"}, TORCHRUN)
    ] == [True, False, True, False]


def test_network_interface_is_for_gloo_and_on_request_for_nccl():
    assert interface_with(address_of("lo", 2)) == "lo"
    assert interface_with("192.0.2.1") is None
    assert network("ib0", for_nccl=False) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert network(None, for_nccl=False) == {}
    assert network("ib0", for_nccl=True) == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
    }


def test_components_of_a_heterogeneous_job_share_one_launch():
    components = [STEP | {"SLURM_HET_JOB_ID": "7", "SLURM_JOB_ID": job} for job in ("7", "8")]
    assert len({this_node(environment).launch for environment in components}) == 1


@pytest.mark.parametrize(
    "environment, message",
    [
        (STEP | {"SLURM_STEP_NUM_TASKS": "32"}, "--ntasks-per-node=1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "--nproc-per-node=8: must be 1"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "--rdzv-id"),
    ],
)
def test_several_launchers_on_a_node_are_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        this_node(environment)


def test_nodes_see_each_others_reports(tmp_path):
    first, second = meetings(tmp_path)
    late = threading.Timer(0.3, lambda: second.announce(report(1)))
    late.start()
    first.announce(report(0))
    assert [node_report.host for node_report in first.reports()] == ["h0", "h1"]
    late.join()
    assert [node_report.host for node_report in second.reports()] == ["h0", "h1"]


def test_a_missing_node_is_named(tmp_path):
    first = meetings(tmp_path, count=3, timeout_s=0.3)[0]
    first.announce(report(0))
    with pytest.raises(
        TimeoutError, match="node 0 waited 0 s for node 1, 2 of 3 to announce itself"
    ):
        first.reports()


def test_first_failure_reaches_all_nodes_and_all_waits(tmp_path):
    first, second, third = meetings(tmp_path, count=3)
    second.fail("node 1: trainer.3 was killed")
    third.fail("node 2: lost its peer")
    for waiting in (first.reports, third.await_rendezvous, first.poll):
        with pytest.raises(PeerFailed, match="node 1: trainer.3 was killed"):
            waiting()


def test_a_silent_node_ends_the_run_and_a_finished_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting_module, "BEAT_S", 0.0)
    first, second = meetings(tmp_path, silence_s=0.2)
    first.poll()
    second.poll()
    first.poll()
    second.finish()
    time.sleep(0.3)
    first.poll()
    second._path_of_finished(1).unlink()
    with pytest.raises(PeerFailed, match="node 1 has shown no sign of life"):
        first.poll()


def test_head_watches_all_nodes_and_they_watch_the_head(tmp_path, monkeypatch):
    """Otherwise one file server would serve n * n reads of n nodes' heartbeats every other second."""
    monkeypatch.setattr(meeting_module, "BEAT_S", 0.0)
    head, second, third = meetings(tmp_path, count=3, silence_s=0.2)
    for meeting in (second, third, head, third):
        meeting.poll()
    time.sleep(0.3)
    head._path_of_beats(0).write_text("2")
    third.poll()
    with pytest.raises(PeerFailed, match="node 1 has shown no sign of life"):
        head.poll()
    time.sleep(0.3)
    with pytest.raises(PeerFailed, match="node 0 has shown no sign of life"):
        third.poll()


def test_signs_of_life_are_overwritten_where_they_are(tmp_path, monkeypatch):
    """With a new file, a reader on NFS would get a stale handle, and its launcher would end the
    run.
    """
    monkeypatch.setattr(meeting_module, "BEAT_S", 0.0)
    first, second = meetings(tmp_path, silence_s=0.5)
    second.poll()
    with open(second._path_of_beats(1)) as reader:
        second.poll()
        assert reader.read() == "2"
    second._path_of_beats(1).unlink()
    second._path_of_beats(1).mkdir()  # it cannot be read now
    first.poll()


def test_a_launch_of_a_name_that_was_used_before_is_refused(tmp_path):
    meetings(tmp_path)[1].announce(report(1))
    with pytest.raises(
        ConfigError,
        match="launch x was used before; torchrun needs a new --rdzv-id for every launch",
    ):
        meetings(tmp_path)[1].announce(report(1))


def test_nodes_that_serve_wait_for_those_that_work(tmp_path):
    first, second = meetings(tmp_path)
    assert not second.all_finished([0])
    first.finish()
    assert second.all_finished([0])


def test_differences_between_nodes_are_listed_by_node():
    reports = [
        report(0),
        report(1, versions={"torch": "2.12.0"}),
        report(2, gpus=7),
        report(3, problems=["the disk is full"]),
    ]
    assert disagreements(reports) == [
        "node 1 (h1): torch 2.12.0, but 2.13.0 on node 0 (h0)",
        "node 2 (h2): 7 GPUs, but 8 on node 0 (h0)",
        "node 3 (h3): the disk is full",
    ]
