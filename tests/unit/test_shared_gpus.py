"""Trainer ranks and engines on the same GPUs (cluster.share_gpus): placement, devices, order of the
start, memory, time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import one_card
import pytest
import torch

import megarl
from megarl.base import shared_gpu
from megarl.base.shared_gpu import (
    await_trainers,
    for_engine,
    for_trainer,
    high_water_bytes,
    take_peak,
    taken_file,
)
from megarl.config.errors import ConfigError, RunError
from megarl.config.load import load_config
from megarl.config.schema import GeneratorConfig
from megarl.estimate.estimate import estimate, with_kv_caches
from megarl.estimate.hardware import GIB, GPUS
from megarl.estimate.memory import PAGE_SLACK
from megarl.estimate.report import advised_capacity, render, render_sharing
from megarl.estimate.search import remedies
from megarl.estimate.times import update_bytes_per_s
from megarl.generator.completions import Sampling
from megarl.generator.groups import EngineGroup, Purpose
from megarl.launch import commands, launcher, start
from megarl.launch import gpus as launch_gpus
from megarl.launch.gpus import InstalledGpu
from megarl.launch.launcher import placement, too_small_gpus, training_job
from megarl.launch.meeting import NodeReport
from megarl.launch.nodes import place
from megarl.launch.start import NodePart
from megarl.messaging.host import Host
from megarl.messaging.rendezvous import EngineAddress, Rendezvous
from megarl.plan.resolve import RunPlan, resolve
from megarl.plan.topologies import gpus_of_run, with_one_gpu_shared
from megarl.reshard.layout import parameter_count
from megarl.simulation.engines import SimulatedEngine, Speed, Work
from megarl.simulation.run import Attempt
from megarl.simulation.virtual import VirtualLoop
from megarl.weight_sync.transports.choice import transport_between

SMALL_ENGINE = "generator.max_concurrency=32"
CONFIGS = Path(__file__).parents[2] / "configs"
ONE = [
    "trainer.tp=1",
    "trainer.dp=1",
    "trainer.sequence_parallel=false",
    "trainer.recompute=true",
    "generator.engines=1",
    "generator.tp=1",
    "cluster.share_gpus=true",
    "launch.ranks_per_node=null",
]
SMALL = [
    *ONE,
    "model.spec=configs/models/qwen2.5-1.5b/config.json",
    "rollout.max_tokens=1024",
    "trainer.max_tokens_per_microbatch=4096",
]


def planned(*overrides: str, command: str = "plan") -> RunPlan:
    return resolve(load_config(CONFIGS / "8b_aipo.yaml", [*SMALL, *overrides]), command)


@pytest.mark.parametrize(
    ("trainer", "engines", "tp", "slots"),
    [
        (1, 1, 1, [0]),
        (8, 8, 1, [*range(8)]),
        (8, 4, 2, [0, 2, 4, 6]),
        (4, 1, 8, [0]),
        (8, 2, 1, [0, 1]),
    ],
)
def test_engines_are_on_the_trainers_slots(trainer, engines, tp, slots):
    (node,) = place(
        trainer,
        [EngineGroup("", GeneratorConfig(engines=engines, tp=tp))],
        nodes=1,
        slots=max(trainer, engines * tp),
        shared=True,
    )
    assert len(node.trainer_ranks) == trainer
    assert [part.first_slot for part in node.engines] == slots


def test_shared_run_fills_several_nodes_from_the_first():
    placed = place(
        16,
        [
            EngineGroup("", GeneratorConfig(engines=4, tp=4)),
            EngineGroup("", GeneratorConfig(tp=8), purpose=Purpose("judge", "engines of judge")),
        ],
        nodes=3,
        slots=8,
        shared=True,
    )
    assert [len(node.trainer_ranks) for node in placed] == [8, 8, 0]
    assert [node.serves for node in placed] == [(0, 1), (2, 3), ()], (
        "frozen models have GPUs of their own"
    )
    assert [part.fleet for part in placed[2].engines] == ["judge"]


def test_too_few_gpus_name_sharing_as_a_way_out():
    with pytest.raises(
        ConfigError,
        match="need 2 nodes of 1 slots; .* share GPUs .cluster.share_gpus=true., or reduce the sizes",
    ):
        place(1, [EngineGroup("", GeneratorConfig())], nodes=1, slots=1)


def test_engines_without_a_trainer_have_their_gpus_alone():
    """megarl eval and doctor --warm."""
    plan = commands.without_trainer(planned())
    alone = with_kv_caches(plan.config, plan.spec).generator.kv_cache_tokens or 0
    shared = with_kv_caches(planned().config, planned().spec).generator.kv_cache_tokens or 0
    assert alone > 2_000_000 and shared == math.ceil(128 * (128 + 1024) * PAGE_SLACK), (
        "as much as 128 requests of full length need"
    )


@pytest.mark.parametrize(
    ("overrides", "present", "shares"),
    [
        (["cluster.share_gpus=null"], 1, True),
        (["cluster.share_gpus=null"], 2, None),
        (["cluster.share_gpus=null"], 0, None),
        (["cluster.share_gpus=false"], 1, False),
        (["cluster.share_gpus=null", "cluster.gpu=cpu"], 1, None),
        (["cluster.share_gpus=null", "generator.engines=2"], 1, None),
    ],
)
def test_single_gpu_is_shared_by_default(overrides, present, shares):
    assert (
        with_one_gpu_shared(planned(*overrides).config, lambda: present).cluster.share_gpus
        is shares
    )


def specs_of(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, names: list[str], scratch: Path
) -> dict[str, start.ProcessSpec]:
    node_gpus = tuple(InstalledGpu(name, "") for name in names)
    for module in (start, launcher):
        monkeypatch.setattr(module, "gpus", lambda: node_gpus)
    (node,) = placement(plan, training_job(plan), 1, len(names))
    engines = [EngineAddress("ADDRESS", 0, 0)] * len(node.engines)
    rendezvous = Rendezvous(
        hub_host="", hub_ports={}, key_file="KEY", trainer_host="", trainer_port=0,
        engines={"engine": engines},
        engine_key="", engine_admin_key="", start_step=0, checkpoint="",
    )  # fmt: skip
    ports = {part.name: 0 for part in node.engines}
    report = NodeReport(0, "", "ADDRESS", gpus=len(names), ports=ports, versions={}, problems=[])
    part = NodePart(
        plan,
        node,
        report,
        rendezvous,
        scratch / "launch",
        None,
        scratch,
        True,
        scratch / "compiled",
    )
    return {spec.name: spec for spec in [*part.trainers("trainer"), *part.engines("cuda")]}


@pytest.mark.parametrize("name", ["0", "3", "GPU-1aaa", "MIG-77"])
def test_both_sides_are_on_one_device_by_its_name(name, monkeypatch, tmp_path):
    """An index after CUDA_VISIBLE_DEVICES, a UUID, or a MIG instance.

    A trainer rank has the launcher's CUDA_VISIBLE_DEVICES.
    """
    specs = specs_of(planned(), monkeypatch, [name], tmp_path)
    assert specs["engine.0"].env["CUDA_VISIBLE_DEVICES"] == name
    assert specs["trainer.0"].env["LOCAL_RANK"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in specs["trainer.0"].env


def test_eight_gpus_have_a_rank_of_both_sides_each(monkeypatch, tmp_path):
    specs = specs_of(
        planned("trainer.dp=8", "generator.engines=4", "generator.tp=2"),
        monkeypatch,
        [str(i) for i in range(8)],
        tmp_path,
    )
    assert [specs[f"engine.{i}"].env["CUDA_VISIBLE_DEVICES"] for i in range(4)] == [
        "0,1",
        "2,3",
        "4,5",
        "6,7",
    ]
    assert [specs[f"trainer.{i}"].env["LOCAL_RANK"] for i in range(8)] == [str(i) for i in range(8)]
    waits_for = specs["engine.3"].env[shared_gpu.AFTER].split(os.pathsep)
    assert waits_for == [specs[f"trainer.{i}"].env[shared_gpu.TAKEN] for i in range(8)]


def test_trainer_takes_its_plan_without_the_runtime(monkeypatch, tmp_path):
    plan = planned()
    trainer = estimate(plan.config, plan.spec).trainer
    peak_bytes = int(
        specs_of(plan, monkeypatch, ["0"], tmp_path)["trainer.0"].env[shared_gpu.PEAK_BYTES]
    )
    assert peak_bytes == int(trainer.total - trainer.runtime)
    assert peak_bytes > 20 * GIB


def test_separate_gpus_have_no_variables_of_sharing(monkeypatch, tmp_path):
    specs = specs_of(planned("cluster.share_gpus=false"), monkeypatch, ["0", "1"], tmp_path)
    assert specs["engine.0"].env["CUDA_VISIBLE_DEVICES"] == "1"
    assert not any(
        key in spec.env
        for spec in specs.values()
        for key in (shared_gpu.SHARES, shared_gpu.AFTER, shared_gpu.TAKEN)
    )


def test_engine_waits_until_every_trainer_has_taken_its_peak(monkeypatch, tmp_path, capsys):
    for key, value in for_engine(tmp_path, range(2)).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(shared_gpu, "POLL_S", 0.001)
    engine = threading.Thread(target=await_trainers, daemon=True)
    engine.start()
    taken_file(tmp_path, 0).touch()
    engine.join(0.05)
    assert engine.is_alive()
    for key, value in for_trainer(tmp_path, 1, 0).items():
        monkeypatch.setenv(key, value)
    take_peak()
    engine.join(10)
    assert not engine.is_alive()
    assert "trainer.1" in capsys.readouterr().out
    await_trainers()  # an engine that is started again
    assert capsys.readouterr().out == ""


class PretendedGpu:
    """torch.cuda of a GPU that has `free` bytes beside what this process has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reserved: int, free: int):
        self.reserved = reserved
        self.free = free
        replacements = {"empty_cache": lambda: None, "memory_reserved": lambda: self.reserved}
        replacements |= {
            "mem_get_info": lambda: (self.free, 80 * GIB),
            "is_available": lambda: True,
        }
        for name, function in replacements.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch, "empty", self.empty)

    def empty(self, size: int, **kwargs: object) -> None:
        if size > self.free:
            raise torch.OutOfMemoryError("out of memory")
        self.reserved = self.reserved + size
        self.free = self.free - size


@pytest.mark.parametrize(("reserved", "after"), [(10, 30), (40, 40)])
def test_trainer_takes_what_is_missing_from_its_peak(reserved, after, monkeypatch, tmp_path):
    gpu = PretendedGpu(monkeypatch, reserved * GIB, 40 * GIB)
    for key, value in for_trainer(tmp_path, 0, 30 * GIB).items():
        monkeypatch.setenv(key, value)
    take_peak()
    assert gpu.reserved == after * GIB
    assert taken_file(tmp_path, 0).exists()


def test_trainer_that_does_not_fit_starts_no_engine(monkeypatch, tmp_path):
    PretendedGpu(monkeypatch, 10 * GIB, 5 * GIB)
    for key, value in for_trainer(tmp_path, 0, 30 * GIB).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(
        RunError,
        match=r"planned to take 30.0 GiB, 20.0 more than it has now, but the GPU has 80.0 GiB, of "
        r"which 5.0 are fr",
    ):
        take_peak()
    assert not taken_file(tmp_path, 0).exists()


def test_high_water_of_a_process_on_a_cpu_is_its_own():
    before = high_water_bytes()
    allocated = b"\1" * (64 << 20)
    assert high_water_bytes() >= min(before, len(allocated))
    assert before > 10 << 20


def test_nccl_is_not_used_between_sides_that_share_gpus():
    apart = Host("one", "one", "one", cuda=True)
    sharing = Host("one", "one", "one", cuda=True, has=(shared_gpu.SHARES,))
    elsewhere = named(sharing, "two")
    assert transport_between("auto", sharing, sharing) == "cuda_ipc"
    assert transport_between("auto", named(apart, "two"), apart) == "nccl"
    assert transport_between("auto", elsewhere, sharing) == "gloo"
    with pytest.raises(
        ConfigError,
        match="weights.transport=nccl: must be auto, cuda_ipc, mooncake or gloo with "
        "cluster.share_gpus=true",
    ):
        planned("weights.transport=nccl")


def named(host: Host, name: str) -> Host:
    return Host(name, name, name, host.cuda, host.has)


@pytest.mark.parametrize(
    "overrides",
    [[], ["generator.mem_fraction=0.99"], ["trainer.recompute=false", "cluster.gpu=H200"]],
)
def test_both_sides_fit_into_one_gpu(overrides):
    plan = planned(*overrides)
    planned_run = estimate(plan.config, plan.spec)
    (engine,) = planned_run.groups
    assert engine.occupied == planned_run.trainer.total
    assert engine.gpu_total == planned_run.trainer.total + engine.memory.total
    assert engine.gpu_total <= planned_run.cluster.gpu.memory_gib * GIB
    assert not planned_run.overfull
    # when SGLang measures it: the trainer, and its own context
    free = (planned_run.cluster.gpu.memory_gib - 2.5) * GIB - planned_run.trainer.total
    assert engine.memory.static <= plan.config.generator.mem_fraction * free + 1
    assert f"{engine.gpu_total / GIB:.2f}" in "\n".join(render(planned_run, None, ()))


def test_engine_that_the_trainer_leaves_too_little_is_refused():
    plan = planned("cluster.gpu=L40S", "generator.kv_cache_tokens=1000000")
    planned_run = estimate(plan.config, plan.spec)
    assert [*planned_run.overfull] == ["generator"]
    assert planned_run.trainer.total < 44.4 * GIB
    text = "\n".join(render(planned_run, None, remedies(plan.config, plan.spec, planned_run)))
    assert "per GPU too large, beside the trainer" in text
    assert "the generator would fit with any of these" in text
    with pytest.raises(
        ConfigError,
        match="cluster.share_gpus=true: on L40S the generator is .* GiB per GPU too large; megarl "
        "plan proposes",
    ):
        commands.sharing_lines(plan)


def test_shared_run_says_so_with_both_sides_memory():
    plan = planned()
    (line,) = commands.sharing_lines(plan)
    assert line.startswith(
        "Shared GPUs: trainer and engines are on the same GPUs (cluster.share_gpus): "
    )
    assert line.endswith("of 79.1 GiB")
    assert (
        commands.gpus_line(plan)
        == "GPUs       1: 1 for the trainer, 1 for engines; 1 of them for both (cluster.share_gpus)"
    )
    assert commands.sharing_lines(planned("cluster.share_gpus=false")) == []


def test_marks_are_compared_with_the_plan(monkeypatch):
    rows = [
        {"memory/trainer_gib": 20.0, "memory/engine_gib": 10.0},
        {"memory/trainer_gib": 21.5},
        {},
    ]
    monkeypatch.setattr(commands, "read_metrics", lambda path: rows)
    plan = planned()
    planned_run = estimate(plan.config, plan.spec)
    trainer = (planned_run.trainer.total - planned_run.trainer.runtime) / GIB
    engine = (planned_run.generator.total - planned_run.generator.runtime) / GIB
    (line,) = commands.memory_lines(plan)
    assert (
        line.split(None, 5)[-1]
        == f"trainer 21.50 GiB, planned {trainer:.2f}; engine 10.00 GiB, planned {engine:.2f}"
    )


DRIVER = {
    "-L": "GPU 0: NVIDIA H100 (UUID: GPU-1)\n"
    "  MIG 1g.12gb     Device  0: (UUID: MIG-1a)\n"
    "  MIG 3g.40gb+me  Device  1: (UUID: MIG-1b)\n",
    "--query-gpu=pci.bus_id,memory.total": "00000000:1B:00.0, 24564\n00000000:2B:00.0, 81559\n",
}


@pytest.mark.parametrize(
    ("gpu", "kind", "gib"),
    [
        (InstalledGpu("0", "0000:1b:00.0"), "H100", 24.0),
        (InstalledGpu("0", "0000:1b:00.0"), "RTX4090", None),
        (InstalledGpu("1", "0000:2b:00.0"), "H100", None),  # the smaller GPU is not this run's
        (InstalledGpu("MIG-1b", ""), "H100", 40.0),
        (InstalledGpu("MIG-1b", ""), "RTX4090", None),
        (InstalledGpu("MIG-1a", ""), "RTX4090", 12.0),
    ],
)
def test_smaller_gpus_than_planned_are_refused(gpu, kind, gib, monkeypatch):
    monkeypatch.setattr(launch_gpus, "nvidia_smi", lambda option, *_: DRIVER[option])
    monkeypatch.setattr(launch_gpus, "gpus", lambda: (gpu,))
    problems = [*too_small_gpus(kind)]
    assert len(problems) == (gib is not None)
    if problems:
        assert problems[0].startswith(
            f"cluster.gpu={kind}: must be the kind of the GPUs that trainer and engines share, or "
            f"one with less memory: GPU {gpu.name} here has {gib:.1f} GiB"
        )


@pytest.mark.parametrize(
    ("names", "overrides", "trains", "refused"),
    [
        (["MIG-1", "MIG-2"], ["cluster.share_gpus=false"], True, True),
        (["MIG-1", "MIG-2"], ["generator.tp=2", "trainer.dp=2"], False, True),
        (["MIG-1", "MIG-2"], [], False, False),  # engines alone, each on its own
        (["MIG-1"], [], True, False),
        (["0", "1"], ["cluster.share_gpus=false"], True, False),
    ],
)
def test_several_mig_instances_are_refused(names, overrides, trains, refused, monkeypatch):
    monkeypatch.setattr(launcher, "gpus", lambda: tuple(InstalledGpu(name, "") for name in names))
    problems = [*launcher.inseparable_instances(planned(*overrides), trains)]
    assert bool(problems) is refused
    if problems:
        assert problems[0].startswith(
            "CUDA_VISIBLE_DEVICES=MIG-1,MIG-2: must name one MIG instance"
        )


def test_kernels_of_both_sides_take_turns():
    plan = planned("async.capacity=1")
    apart = planned("async.capacity=1", "cluster.share_gpus=false")
    sharing = estimate(plan.config, plan.spec)
    separate = estimate(apart.config, apart.spec)
    assert sharing.step_s == pytest.approx(
        sharing.train.total + sharing.scored_s + sharing.sync_s + sharing.glue_s
    )
    assert separate.step_s < sharing.step_s
    assert gpus_of_run(plan.config) == 1
    assert gpus_of_run(apart.config) == 2


@pytest.mark.parametrize(
    ("overrides", "capacity"),
    [
        ([], 0),  # engines are faster than the trainer, and wait for it
        (["async.partial_rollout=block"], 0),
        (["plan.response_tokens=900", "rollout.max_tokens=4000", SMALL_ENGINE], 1),
    ],
)
def test_plan_and_simulation_advise_the_same_capacity(overrides, capacity):
    """The simulation is the run's own scheduler."""
    config = CONFIGS / "one_gpu.yaml"
    planned_s = megarl.plan(config, *overrides).share_gpus
    simulated = megarl.simulate(
        config, *overrides, "plan.simulation.steps=20", sweep=["async.capacity=0,1"]
    )
    assert planned_s["capacity"] == capacity
    assert simulated.take == [f"async.capacity={capacity}"]
    assert [row["step_p50_s"] for row in simulated.rows] == pytest.approx(
        list(planned_s["step_s"].values()), rel=0.07
    )


def test_plan_advises_no_capacity_within_its_error():
    assert advised_capacity({0: 10.0, 1: 9.9}) == 0, "tokens of the newest weights"
    assert advised_capacity({0: 10.0, 1: 9.3}) is None
    assert render_sharing({0: 10.0, 1: 9.3}).endswith("--sweep async.capacity=0,1 says")
    assert render_sharing({0: 10.0, 1: 8.0}).endswith("take 1")


def test_engines_faster_than_the_trainer_end_each_step_alone():
    """Their longest responses count beside training, as in turns, at any capacity."""
    plans = [planned(f"async.capacity={capacity}") for capacity in (0, 1, 2)]
    in_turns, *at_once = (estimate(plan.config, plan.spec) for plan in plans)
    for estimated in at_once:
        assert estimated.generate.total < estimated.train.total + estimated.glue_s
        assert estimated.step_s == pytest.approx(in_turns.step_s)
    apart = planned("cluster.share_gpus=false")
    assert estimate(apart.config, apart.spec).generate.tail == 0


def test_update_on_one_gpu_is_a_copy_in_its_memory():
    plan = planned()
    cluster = SimpleNamespace(gpu=GPUS["H100"], gpus_per_node=8)
    assert update_bytes_per_s(plan.config, cluster) == pytest.approx(0.8 * 3.35e12 / 2)
    assert (
        update_bytes_per_s(planned("trainer.dp=8", "generator.engines=8").config, cluster) == 450e9
    )


def test_driver_is_not_asked_for_gpus_where_the_answer_is_known():
    for overrides in (["trainer.dp=2"], ["cluster.gpu=cpu"]):
        config = planned("cluster.share_gpus=null", *overrides).config
        assert with_one_gpu_shared(config, lambda: pytest.fail("asked")) == config


def test_engines_and_trainer_share_the_time_in_a_simulated_run():
    """A step's training and its generation take what they take alone, one after the other or both
    at once.
    """

    async def both(shared: bool) -> float:
        engine = SimulatedEngine(
            "simulated.0", Speed(lambda running, context: 0.01, lambda *_: 0.0, 1e9, 64), 1, {}
        )
        config = SimpleNamespace(cluster=SimpleNamespace(share_gpus=shared))
        attempt = SimpleNamespace(plan=SimpleNamespace(config=config), engines=[engine])
        engine._work[7] = Work(1, [100], 0, 100)
        start_s = asyncio.get_running_loop().time()
        await asyncio.gather(
            engine.complete([[7]], [Sampling(max_tokens=100)]), Attempt._compute(attempt, 1.0)
        )
        return asyncio.get_running_loop().time() - start_s

    for shared, seconds in ((False, 1.0), (True, 2.0)):
        with contextlib.closing(VirtualLoop()) as loop:
            assert loop.run_until_complete(both(shared)) == pytest.approx(seconds, rel=0.05)


def test_offloaded_optimizer_takes_no_gpu_memory():
    plan = planned("trainer.optimizer.offload=true")
    on_gpu = planned()
    offloaded = estimate(plan.config, plan.spec)
    resident = estimate(on_gpu.config, on_gpu.spec)
    parameters = parameter_count(plan.spec)
    assert offloaded.trainer.optimizer == 0
    assert resident.trainer.optimizer == 12 * parameters
    assert offloaded.offloaded == 16 * parameters
    assert resident.offloaded == 0
    assert offloaded.train.optimizer > resident.train.optimizer, (
        "the host's link and memory are slower"
    )
    assert (
        f"the optimizer takes {16 * parameters / GIB:.1f} GiB of a trainer node's memory"
        in "\n".join(render(offloaded, None, ()))
    )


def test_plan_proposes_the_offload_that_makes_a_run_fit():
    plan = planned(
        "cluster.gpu=RTX4090",
        "rollout.max_tokens=512",
        "trainer.max_tokens_per_microbatch=1024",
        "generator.max_concurrency=32",
    )
    planned_run = estimate(plan.config, plan.spec)
    proposed = [remedy.settings for remedy in remedies(plan.config, plan.spec, planned_run)]
    assert {"trainer.optimizer.offload": True} in proposed


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["trainer.zero=0"], "trainer.optimizer.offload=true: needs trainer.zero=1"),
        (
            ["model.dtype=float32"],
            "trainer.optimizer.offload=true: needs model.dtype=bfloat16; it is float32",
        ),
        (
            ["trainer.optimizer.megatron.optimizer_cpu_offload=true"],
            "must be set by trainer.optimizer.offload",
        ),
    ],
)
def test_offload_is_refused_where_it_cannot_be(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        planned("trainer.optimizer.offload=true", *overrides)


def test_table_of_largest_models_is_the_planners():
    """The row of one card. `python tests/tools/one_card.py` prints all."""
    table = (CONFIGS.parent / "docs/gpu.md").read_text(encoding="utf-8")
    cells = [one_card.largest("L40S", 1024, overrides) for overrides in one_card.WAYS.values()]
    (row,) = [line.split(" | ")[1::2] for line in table.splitlines() if line.startswith("| 48 GB")]
    assert cells == row
    sizes = [one_card.parameters(folder) for folder in one_card.MODELS]
    assert sizes == sorted(sizes)
