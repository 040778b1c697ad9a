"""An engine that is larger than a node: the processes that each of its nodes starts."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.generator.seeds import seed_of
from megarl.generator.server import drawing_anew
from megarl.launch.commands import render_launch
from megarl.launch.launcher import placement, training_job
from megarl.launch.meeting import NodeReport
from megarl.launch.start import NodePart
from megarl.messaging.rendezvous import EngineAddress, Rendezvous
from megarl.plan.resolve import resolve

ROOT = Path(__file__).parents[2]
# 512 trainer ranks, 2 engines of 2 nodes
OVERRIDES = ["generator.engines=2", "generator.tp=16", "launch.ranks_per_node=8"]


def node_part(plan, node, report, rendezvous) -> NodePart:
    return NodePart(
        plan,
        placed=node,
        report=report,
        rendezvous=rendezvous,
        folder=Path("launch"),
        interface=None,
        scratch=Path("tmp"),
        alone=False,
    )


def test_parts_of_an_engine_meet_at_the_port_of_its_first_node():
    """Each part listens on a port of its own."""
    plan = resolve(load_config("configs/405b_aipo.yaml", OVERRIDES), "plan")
    placed = placement(plan, training_job(plan), 68, 8)
    rendezvous = Rendezvous(
        hub_host="h64", hub_ports={}, key_file="KEY", trainer_host="h0", trainer_port=2,
        engines={"engine": [EngineAddress("h64", 3, 5), EngineAddress("h66", 4, 6)]},
        engine_key="", engine_admin_key="", start_step=0, checkpoint="",
    )  # fmt: skip
    started = {}
    for node in placed[64:]:
        ports = {part.name: 100 + node.node for part in node.engines}
        report = NodeReport(
            node.node, "", f"h{node.node}", gpus=8, ports=ports, versions={}, problems=[]
        )
        for spec in node_part(plan, node, report, rendezvous).engines(device="cuda"):
            started[spec.name] = json.loads(spec.argv[-1])
            assert spec.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert list(started) == ["engine.0", "engine.0.1", "engine.1", "engine.1.1"]
    assert {(spec["tp_size"], spec["nnodes"]) for spec in started.values()} == {(16, 2)}
    assert [spec["node_rank"] for spec in started.values()] == [0, 1, 0, 1]
    addresses = [spec["dist_init_addr"] for spec in started.values()]
    assert addresses == ["h64:5", "h64:5", "h66:6", "h66:6"]
    assert [(spec["host"], spec["port"]) for spec in started.values()] == [
        (f"h{n}", 100 + n) for n in range(64, 68)
    ]
    first = seed_of(plan.config.seed, "engine.0", 0, bits=31)
    second = seed_of(plan.config.seed, "engine.1", 0, bits=31)
    seeds = [spec["random_seed"] for spec in started.values()]
    assert seeds == [first, first, second, second], "parts of one draw alike"


def test_every_engine_has_a_different_seed() -> None:
    """Not in one run, nor in a run with the next seed, nor after a resume, nor after the engine's
    restart.
    """
    first = [
        seed_of(seed, f"engine.{number}", step, bits=31)
        for seed in range(8)
        for number in range(8)
        for step in range(0, 80, 10)
    ]
    again = [
        drawing_anew({"random_seed": seed}, restarts)["random_seed"]
        for seed in first
        for restarts in range(3)
    ]
    assert len({*again}) == len(again) == 3 * 512
    assert {*first} < {*again}
    assert all(0 <= seed < 2**31 for seed in again)
    assert first[0] == seed_of(0, "engine.0", 0, bits=31), "a run can be repeated"


@pytest.mark.parametrize(
    ("transport", "environment", "expected"),
    [("nccl", None, "1"), ("nccl", "0", "0"), ("auto", None, None)],
)
def test_nccl_has_one_kind_of_memory_on_both_sides(monkeypatch, transport, environment, expected):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if environment is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", environment)
    plan = resolve(load_config("configs/8b_aipo.yaml", [f"weights.transport={transport}"]), "plan")
    [node] = placement(plan, training_job(plan), 1, 8)
    rendezvous = Rendezvous(
        "h", 1, "KEY", "h", 2, {"engine": [EngineAddress("h", 3, 4)] * 2}, "", "", 0, ""
    )
    report = NodeReport(
        0, "", "h", gpus=8, ports={part.name: 3 for part in node.engines}, versions={}, problems=[]
    )
    part = node_part(plan, node, report, rendezvous)
    specs = part.engines(device="cuda") + part.trainers("trainer")
    assert len(specs) == 2 + 4  # an engine of two GPUs is one process
    assert {spec.env.get("NCCL_CUMEM_ENABLE") for spec in specs} == {expected}


def test_dry_run_shows_the_first_command_of_each_role():
    shown = render_launch(resolve(load_config("configs/405b_aipo.yaml", OVERRIDES), "plan"))
    assert shown.startswith("launch     68 nodes")
    engine = json.loads(shlex.split(shown.splitlines()[-1])[-1])
    assert (engine["device"], engine["nnodes"], engine["node_rank"], engine["dist_init_addr"]) == (
        "cuda",
        2,
        0,
        "ADDRESS:0",
    )


def test_engines_on_the_cores_of_one_node_do_not_share_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    plan = resolve(
        load_config("configs/quickstart.yaml", ["generator.engines=3", "generator.tp=1"]), "plan"
    )
    job = training_job(plan)
    [node] = placement(plan, job, 1, 0)
    rendezvous = Rendezvous(
        "h",
        {},
        "KEY",
        "h",
        2,
        {"engine": [EngineAddress("h", 3 + i, 6 + i) for i in range(3)]},
        "",
        "",
        0,
        "",
    )
    report = NodeReport(
        0, "", "h", gpus=0, ports={part.name: 3 for part in node.engines}, versions={}, problems=[]
    )
    specs = node_part(plan, node, report, rendezvous).engines(device="cpu")
    assert [spec.env["SGLANG_CPU_OMP_THREADS_BIND"] for spec in specs] == ["3", "2", "1"]
