"""Engines that only evaluate: when a run has them, which versions they get, and what becomes of the
other versions.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import fake_fleets
import pytest
from resolving import CONFIGS, config, problems_of

from megarl.base.rollout_types import Version
from megarl.cli import main
from megarl.config.load import load_config
from megarl.evaluation import engines
from megarl.evaluation.engines import EvaluationReceiver
from megarl.evaluation.scores import (
    BEGUN,
    FAILED,
    LOST,
    SKIPPED,
    NewEvaluations,
    complete_metrics,
    evaluation_plan,
    forget_after,
    is_due,
    missed,
    note,
    note_lost,
    read_journal,
    spared_steps,
    write_result,
)
from megarl.generator.client import EngineUnreachable
from megarl.launch.commands import render_launch, unscored
from megarl.launch.launcher import generating_job, placement, training_job
from megarl.lora.plan import sends_adapters
from megarl.messaging.messages import WeightsGrant
from megarl.observe.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megarl.observe.progress import missed_lines
from megarl.observe.status import TraceWriter
from megarl.plan.checkpoints import checkpoint_path
from megarl.plan.resolve import resolve
from megarl.report.reading import RunReader
from megarl.weight_sync.receiver import UpdateCost

HELD_OUT = "data.eval.source=eval.jsonl"


def test_first_last_and_every_nth_version_are_due(tmp_path: Path) -> None:
    settings = config(tmp_path, HELD_OUT, "eval.every=4", "max_steps=10")
    assert [version for version in range(11) if is_due(settings, version)] == [0, 4, 8, 10]
    settings.eval.every = 0
    assert [version for version in range(11) if is_due(settings, version)] == [0, 10]


def test_evaluation_engines_are_like_generator_engines(tmp_path: Path) -> None:
    """But they are written in full, without deltas and probes."""
    overrides = [
        "generator.tp=2",
        "generator.engines=3",
        "generator.quantization=fp8_block",
        "weights.delta=auto",
        "observe.probe_every=5",
    ]
    plan = resolve(
        config(tmp_path, HELD_OUT, "eval.engines=2", "async.partial_rollout=in_flight", *overrides)
    )
    derived = evaluation_plan(plan)
    assert (derived.engines, derived.groups[0].topology.tp) == (2, 2)
    assert derived.groups[0].dtype("float32") == plan.groups[0].dtype("float32")
    assert derived.config.generator.quantization == "fp8_block"
    assert derived.config.generator.engines == 2
    assert derived.config.weights.delta == "off"
    assert derived.config.observe.probe_every == 0
    assert derived.config.async_.partial_rollout == "block"
    assert plan.engines == 3 and plan.config.weights.delta == "auto", "the run's own plan stays"


@pytest.mark.parametrize("delta, sends_alone", [("off", True), ("auto", False)])
def test_adapters_reach_evaluation_engines_as_generators(
    tmp_path: Path, delta: str, sends_alone: bool
) -> None:
    """From their start, engines serve either adapters or merged weights, and evaluating engines do
    the same as others.
    """
    plan = resolve(
        config(tmp_path, HELD_OUT, "eval.engines=1", "lora.rank=8", f"weights.delta={delta}")
    )
    derived = evaluation_plan(plan)
    assert sends_adapters(plan.config, plan.spec) == sends_alone
    assert sends_adapters(derived.config, derived.spec) == sends_alone


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (["eval.engines=1"], "eval.engines=1: needs a held-out set: set data.eval.source"),
        (
            [HELD_OUT, "eval.engines=1", "weights.transport=gloo"],
            "weights.transport=gloo: with eval.engines=1 it must be neither gloo nor nccl, whose "
            "process groups cannot change: the loss of "
            "one of these engines would end the run",
        ),
    ],
)
def test_impossible_evaluation_engines_are_refused(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    assert problems_of(tmp_path, *overrides) == [problem]


def test_evaluation_engines_have_slots_in_a_run_only(tmp_path: Path) -> None:
    plan = resolve(
        config(
            tmp_path,
            HELD_OUT,
            "eval.engines=1",
            "generator.tp=2",
            "generator.engines=2",
            "trainer.dp=4",
        )
    )
    [node] = placement(plan, training_job(plan), 1, 0)
    assert [(part.name, part.first_slot, part.ranks) for part in node.engines] == [
        ("engine.0", 4, 2),
        ("engine.1", 6, 2),
        ("eval_engine.0", 8, 2),
    ]
    assert node.serves == (0, 1), "the driver of the generator is beside its own engines"
    [node] = placement(plan, generating_job(plan, "eval", tmp_path, "evaluate"), 1, 0)
    assert [part.name for part in node.engines] == ["engine.0", "engine.1"]
    shown = render_launch(plan)  # nodes of 8 GPUs, as megarl plan counts them
    assert "launch     2 nodes" in shown
    assert "evaluation engines 0-0, 2 ranks of each on a node" in shown


def test_planner_counts_gpus_of_evaluation_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path)
    sizes = [
        str(tmp_path / "run.yaml"),
        HELD_OUT,
        "generator.tp=4",
        "generator.engines=2",
        "trainer.tp=8",
    ]
    assert main(["plan", *sizes, "eval.engines=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluation"] == {"ranks": 12, "engines": 3}
    assert main(["plan", *sizes, "eval.engines=3"]) == 0
    assert "evaluation engines 3, tp 4: 12 ranks; as the generator's\n" in capsys.readouterr().out
    shares = {}
    for number in (0, 2):
        search = ["--search", "--gpus", "32", "--json"]
        assert main(["plan", *sizes, f"eval.engines={number}", *search]) == 0
        facts = json.loads(capsys.readouterr().out)
        evaluation_ranks = facts.get("evaluation", {}).get("ranks", 0)
        shares[number] = facts["trainer"]["ranks"] + facts["generator"]["ranks"] + evaluation_ranks
    assert all(ranks <= 32 for ranks in shares.values()), (
        f"a search leaves them their share of the budget: {shares}"
    )


def test_lanes_of_evaluation_engines_come_last(tmp_path: Path) -> None:
    for process, spans in {
        "generator.0": [("generate batch 0", "main")],
        "evaluator.0": [
            ("evaluation weights 2", "eval_engine.0"),
            ("evaluate version 2", "eval_engine.0"),
        ],
        "trainer.0": [
            ("write evaluation weights 2", "main"),
            ("wait for evaluation engines to take weights 2", "main"),
        ],
    }.items():
        trace = TraceWriter(tmp_path, process)
        for name, track in spans:
            trace.add(name, 1.0, 2.0, track)
        trace.close()
    report = RunReader(tmp_path, 1 << 20).read()
    assert [*report["lanes"]] == ["trainer.0", "generator.0", "eval_engine.0"]
    assert [span[0] for span in report["lanes"]["eval_engine.0"]] == [
        "evaluation weights",
        "evaluate",
    ]
    assert {span[0] for span in report["lanes"]["trainer.0"]} == {"evaluation weights"}, (
        "none of the generator's updates"
    )
    assert report["pauses"] == [] and report["pairs"] == {}


def test_journal_has_the_fate_of_each_version(tmp_path: Path) -> None:
    for version in (0, 2):
        note(tmp_path, version, BEGUN)
        write_result(tmp_path, version, {"pass@1": 0.5})
    note(tmp_path, 4, BEGUN)
    note(tmp_path, 6, SKIPPED, "version 4 was still being evaluated")
    note(tmp_path, 8, FAILED, "its engines were lost")
    note(tmp_path, 10, BEGUN)
    with open(tmp_path / "eval/journal.jsonl", "a") as file:
        file.write('{"version": 12, "wh')
    assert missed(tmp_path) == {
        6: (SKIPPED, "version 4 was still being evaluated"),
        8: (FAILED, "its engines were lost"),
    }

    forget_after(tmp_path, 8)
    assert read_journal(tmp_path).keys() == {0, 2, 4, 6, 8}
    assert note_lost(tmp_path, 8) == [4] and note_lost(tmp_path, 8) == []
    assert missed(tmp_path)[4] == (LOST, "the run ended meanwhile") and len(missed(tmp_path)) == 3
    assert note_lost(tmp_path, 21, due=[8, 20]) == [20], "that of 8 has failed"
    write_result(tmp_path, 8, {"pass@1": 0.5})
    assert 8 not in missed(tmp_path), "a run that went on from there has evaluated it"


def test_run_after_its_last_step_may_lack_scores(tmp_path: Path) -> None:
    settings = config(tmp_path, HELD_OUT, "max_steps=4", f"run_dir={tmp_path / 'run'}")
    assert not unscored(settings), "it has not begun"
    checkpoint_path(settings.run_dir, 2).mkdir(parents=True)
    write_result(settings.run_dir, 2, {"pass@1": 0.5})
    assert not unscored(settings), "it is not at its end"
    checkpoint_path(settings.run_dir, 4).mkdir(parents=True)
    assert unscored(settings)
    settings.max_steps = 3
    assert not unscored(settings), "nobody has asked for so many steps"
    settings.max_steps = 4
    write_result(settings.run_dir, 4, {"pass@1": 0.5})
    assert not unscored(settings)
    (Path(settings.run_dir) / "eval/version_000004.json").unlink()
    settings.data.eval = None
    assert not unscored(settings), "there is nothing to evaluate on"


def test_missed_evaluations_are_counted_in_the_next_row(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    new = NewEvaluations(tmp_path)
    writer.write(0, {"loss": 0.0, **new.metrics()})
    note(tmp_path, 2, SKIPPED, "…")
    note(tmp_path, 4, SKIPPED, "…")
    writer.write(1, {"loss": 0.0, **new.metrics()})
    writer.write(2, {"loss": 0.0, **new.metrics()})
    writer.close()
    note(tmp_path, 6, FAILED, "…")
    for _ in range(2):
        complete_metrics(tmp_path)
        rows = read_metrics(tmp_path / METRICS_FILE)
        assert [row.get("eval/skipped") for row in rows] == [None, 2, 2]
        assert [row.get("eval/failed") for row in rows] == [None, None, 1]
        counts = {key for row in rows for key in row if key.startswith("eval/")}
        assert counts == {"eval/skipped", "eval/failed"}
    assert missed_lines(rows) == [
        "evaluations by step 1: 2 skipped",
        "evaluations by step 2: 2 skipped, 1 failed",
    ]


def test_checkpoint_stays_while_its_score_may_come(tmp_path: Path) -> None:
    best = [
        "checkpoint.every=2",
        "eval.every=2",
        "eval.engines=1",
        "checkpoint.keep_best=eval/pass@1",
    ]
    settings = load_config(CONFIGS / "quickstart.yaml", [f"run_dir={tmp_path}", *best])
    for step in (2, 4, 6, 8):
        checkpoint_path(tmp_path, step).mkdir(parents=True)
    note(tmp_path, 2, BEGUN)
    note(tmp_path, 4, SKIPPED, "version 2 was still being evaluated")
    assert spared_steps(settings) == {2, 6, 8}
    write_result(tmp_path, 2, {"pass@1": 0.5})
    note(tmp_path, 6, FAILED, "its engines were lost")
    assert spared_steps(settings) == {2, 8}


@dataclass
class TrainerLink:
    """A link to trainer ranks that records what it sends."""

    sent: list = field(default_factory=list)

    async def send_all(self, names, message):
        self.sent.extend(message for _ in names)


@dataclass
class EvaluationRecorder:
    """A driver that records its evaluations. Each lasts until a test says that it is done."""

    fleet: object
    evaluated: list[Version] = field(default_factory=list)
    missed: list = field(default_factory=list)
    evaluating: Version | None = None
    no_engines_reason: str = ""

    @property
    def version(self) -> Version:
        return self.fleet.version

    def begin(self, version: Version, cost: UpdateCost) -> None:
        assert self.evaluating is None, "nothing is written to an engine that evaluates"
        self.evaluated.append(version)
        self.evaluating = version

    def miss(self, version: Version, outcome: str, reason: str) -> None:
        self.missed.append((version, outcome, reason))

    def done(self) -> None:
        self.evaluating = None
        self.fleet.pulse.beat()


class InstantReceiver(EvaluationReceiver):
    """A receiver whose engines take any version at once. Offers come from a queue."""

    def __init__(self, fleet):
        timeouts = SimpleNamespace(rollouts_s=100.0, weights_s=10.0)
        self._plan = SimpleNamespace(
            config=SimpleNamespace(
                max_steps=10, timeouts=timeouts, weights=SimpleNamespace(audited=True)
            )
        )
        self._link = TrainerLink()
        self._trainers = ["trainer.0"]
        self._hosts = ["here"]
        self._updates = 0
        self.offered: asyncio.Queue[Version] = asyncio.Queue()
        self._offers = self._sessions = self
        self.fixed_ = ""

    @property
    def fixed(self) -> str:
        return self.fixed_

    async def next(self, serving):
        return SimpleNamespace(version=await self.offered.get())

    async def open(self, fleet, hosts, serving, version):
        return fleet.members or None

    async def _write(self, fleet, session):
        return UpdateCost((0.0, 1.0), 1, fake_fleets.numbers(session))

    def grants(self) -> list[tuple[Version, int, bool]]:
        """(version, engines, whether to offer it again) of each refused offer."""
        return [
            (grant.version, grant.engines, grant.later)
            for grant in self._link.sent
            if isinstance(grant, WeightsGrant)
        ]


def receiving(body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "RETURN_S", 0.05)
    monkeypatch.setattr(engines, "LATER_S", 0.05)

    async def within() -> None:
        fleet, _ = fake_fleets.of(1)
        receiver = InstantReceiver(fleet)
        driver = EvaluationRecorder(fleet)
        task = asyncio.ensure_future(receiver.take_all(driver))
        try:
            await body(receiver, driver, fleet, task)
        finally:
            task.cancel()

    fake_fleets.run(within)


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_early_version_is_skipped_and_the_last_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(receiver, driver, fleet, task) -> None:
        for version in (0, 2, 4):
            receiver.offered.put_nowait(version)
        await until(lambda: len(driver.missed) == 2)
        assert driver.evaluated == [0] and receiver.grants() == [(2, (), False), (4, (), False)]
        assert driver.missed == [
            (version, "skipped", "version 0 was still being evaluated") for version in (2, 4)
        ]
        receiver.offered.put_nowait(10)
        await until(lambda: receiver.grants()[2:] == [(10, (), True)])
        receiver.offered.put_nowait(10)
        driver.done()
        await task
        assert driver.evaluated == [0, 10] and len(driver.missed) == 2 and fleet.version == 10

    receiving(body, monkeypatch)


def test_without_engines_a_version_fails_and_the_last_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last version waits until no engine can come back."""

    async def body(receiver, driver, fleet, task) -> None:
        fleet.lose(EngineUnreachable(fleet.engines[0].url, "it died"))
        receiver.offered.put_nowait(2)
        await until(lambda: driver.missed)
        assert driver.missed == [(2, "failed", "no engine was there: it died")]
        assert receiver.grants() == [(2, (), False)]
        receiver.offered.put_nowait(10)
        await until(lambda: receiver.grants()[1:] == [(10, (), True)])
        driver.no_engines_reason = "no engine was there, and none will be"
        receiver.offered.put_nowait(10)
        await task
        assert driver.missed[1:] == [(10, "failed", driver.no_engines_reason)]
        assert receiver.grants()[2:] == [(10, (), False)]
        assert not driver.evaluated

    receiving(body, monkeypatch)


def test_returned_engine_evaluates_unless_groups_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process groups of gloo and nccl cannot change."""

    async def body(receiver, driver, fleet, task) -> None:
        fleet.lose(EngineUnreachable(fleet.engines[0].url, "it died"))
        fleet.come_back(fleet.engines[0])
        receiver.offered.put_nowait(2)
        await until(lambda: driver.evaluated == [2])
        driver.done()
        fleet.lose(EngineUnreachable(fleet.engines[0].url, "it died"))
        fleet.come_back(fleet.engines[0])
        receiver.fixed_ = "weights go by gloo, whose process groups cannot change"
        receiver.offered.put_nowait(4)
        await until(lambda: driver.missed)
        assert driver.missed == [(4, "failed", f"an engine was lost, and {receiver.fixed_}")]

    receiving(body, monkeypatch)
