"""Whole runs of `megarl train` with real trainers and engines, some of whose processes die."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from corrupting_transport import TENSOR
from run_tools import (
    PROMPTS,
    descendants,
    in_fp8_blocks,
    in_mxfp4,
    make_model,
    quickstart,
    rows,
    run,
    started,
    succeed,
    title,
    trained_ordinals,
    wait_for_steps,
    wait_until,
)
from tracker_stores import curves_of, read_tensorboard

from megarl.observe.samples import format_group
from megarl.plan.checkpoints import complete_checkpoints
from megarl.plan.checks import DEQUANTISED
from megarl.report.reading import RunReader
from megarl.rollouts.buffer import Ledger
from megarl.rollouts.channel import summary_of, texts_of

pytestmark = pytest.mark.timeout(900)


SEVERAL = [
    "trainer.minibatches=2",
    "trainer.epochs=2",
    "algorithm.ratio=decoupled",
    "trainer.optimizer.schedule=cosine",
]
TRACKED = "observe.trackers=[tensorboard]"
STREAMING = ["async.capacity=null", "async.max_staleness=2", "async.partial_rollout=in_flight"]


@dataclass
class Resumed:
    run_dir: Path
    survivors: list[psutil.Process]  # of the killed run
    before: list[dict]  # its metrics
    ledger: Ledger  # in the checkpoint from which the second run continues
    second: subprocess.CompletedProcess

    @property
    def start(self) -> int:
        """The first step after the resume."""
        return self.ledger.consumed_below // PROMPTS


@pytest.fixture(scope="module")
def resumed(model, tmp_path_factory):
    """A run with trainer TP2, one step behind, that was killed after its third step and started
    again, with streaming. Each batch makes four optimizer steps.
    """
    folder = tmp_path_factory.mktemp("resumed")
    run_dir = folder / "run"
    # as a user has it, in all parts
    with started(
        quickstart(model, run_dir, *SEVERAL, TRACKED), folder / "first.log", imported=False
    ) as first:
        wait_for_steps(first, run_dir, 3)
        wait_until(lambda: complete_checkpoints(run_dir), first, "a checkpoint")
        children = descendants(first)
    _gone, alive = psutil.wait_procs(children, timeout=30)
    before = rows(run_dir)
    ledger = Ledger.load(complete_checkpoints(run_dir)[-1][1])
    return Resumed(
        run_dir,
        alive,
        before,
        ledger,
        run(quickstart(model, run_dir, *SEVERAL, *STREAMING, TRACKED, "checkpoint.hf_every=4")),
    )


def test_a_killed_launcher_leaves_no_process_behind(resumed):
    assert resumed.survivors == []


def test_killed_run_repeats_and_skips_no_prompt(resumed):
    assert resumed.second.returncode == 0, resumed.second.stderr
    after = rows(resumed.run_dir)
    before = resumed.before
    start = resumed.start
    assert [row["step"] for row in after] == list(range(6))
    assert [row["weights/version"] for row in after] == [1, 2, 3, 4, 5, 6]
    trained = trained_ordinals(resumed.run_dir)
    assert [len(ordinals) for ordinals in trained] == [PROMPTS] * 6
    assert sorted(itertools.chain(*trained)) == list(range(6 * PROMPTS))
    assert after[:start] == before[:start], "steps before the checkpoint are kept"
    assert start < 3 or len(before) > 3, "the kill came after the checkpoint"
    assert after[start] != before[start : start + 1], "the step after it was done again"


def test_finished_rollouts_survive_a_kill(resumed):
    """Rollouts that the trainer held when it saved are trained on unchanged, and not generated
    again.
    """
    texts_of_groups = [
        (summary_of(group), texts_of(group.texts)) for group in resumed.ledger.groups
    ]
    assert len(texts_of_groups) >= PROMPTS, (
        "an update waits for what runs: the next batch was there"
    )
    texts = "".join(path.read_text() for path in resumed.run_dir.glob("rollouts/step_*.txt"))
    assert all(format_group(*group) in texts for group in texts_of_groups)


def trace(run_dir: Path) -> list[dict]:
    return json.loads((run_dir / "trace.json").read_text())["traceEvents"]


def test_the_report_is_made_of_what_the_run_wrote(resumed):
    data = RunReader(resumed.run_dir, text_bytes=1 << 26).read()
    table = rows(resumed.run_dir)
    assert data["steps"] == list(range(6)) and data["metrics"]["loss"] == [
        row["loss"] for row in table
    ]
    assert [mark["step"] for mark in data["marks"] if mark["what"] == "start"] == [
        0,
        resumed.start,
    ]
    assert (
        data["marks"][-1]["how"] == "finished"
        and data["expected"]["step_s"] > 0
        and data["expected"]["gpu"] == "cpu"
    )
    assert (
        sum(size for pairs in data["pairs"].values() for _, size in pairs)
        == table[-1]["sync/bytes"]
        and len(data["pairs"]) == 2
    )
    pauses = {pause["version"]: pause for pause in data["pauses"]}
    assert all(pauses[row["weights/version"]]["bytes"] == row["sync/bytes"] for row in table)
    assert all(pause["audited"] and pause["engines"] == [0] for pause in pauses.values())
    index = data["samples"]["index"]
    last = table[-1]
    # earlier rows may be from the killed start
    assert sum(data["engine_tokens"]) >= last["tokens_per_s"] * last["time/step_s"] * 0.99 > 0
    assert [index["step"].count(step) for step in range(6)] == [
        4 * len(data["samples"]["index"]["step"]) // 24
    ] * 6
    groups = [
        group
        for chunk in data["samples"]["chunks"]
        for group in json.loads(gzip.decompress(base64.b64decode(chunk)))
    ]
    samples = [sample for group in groups for sample in group["samples"]]
    trained = [sample for sample in samples if sample["numbers"]]
    assert trained or all(row["zero_advantage_fraction"] > 0 for row in table)
    for sample in trained:
        numbers = sample["numbers"]
        # special tokens are not in the text
        text_pieces = [piece for piece in numbers["pieces"] if not re.fullmatch(r"<\w+>", piece)]
        assert "".join(text_pieces) == sample["text"] and len(numbers["diff"]) == sample["tokens"]
        assert (
            all(abs(difference) < 1 for difference in numbers["diff"]) and numbers["advantage"] != 0
        )


def test_every_step_reports_itself(resumed):
    expected = [
        "step",
        "wall_s",
        "reward/mean",
        "loss",
        "grad_norm",
        "weights/version",
        "staleness/mean",
        "staleness/max",
        "is_ratio/mean",
        "is_ratio/clipped_fraction",
        "time/train_s",
        "time/generate_s",
        "time/sync_s",
        "time/sync_pause_s",
        "time/trainer_wait_s",
        "time/generator_wait_s",
        "samples_per_s",
        "tokens_per_s",
        "sync/bytes",
        "sync/audit_ok",
        "staleness/rejected",
        "time/due_wait_s",
        "time/rollout_s",
        "prompts/buffered",
    ]
    table = rows(resumed.run_dir)
    for row in table:
        nothing_trained = (
            {"is_ratio/mean", "is_ratio/clipped_fraction"}
            if row["zero_advantage_fraction"] == 1
            else set()
        )
        assert set(expected) - nothing_trained <= row.keys()
        assert row["sync/audit_ok"] is True
        assert row["optimizer_steps"] == 4
        assert row["tokens/padded"] == 0 or row["optimizer_steps/empty"] > 0
        assert row["optimizer_steps/empty"] == 4 or row["behavior_ratio/mean"] > 0
        assert 0 <= row["staleness/mean"] <= row["staleness/max"] <= 2
        assert all(row[key] >= 0 for key in expected if key.startswith("time/"))
    assert any(row["samples/trained"] for row in table), "not all steps were on nothing"
    # the optimizer steps up to each batch, of 24; five are warm-up
    last = [4 * (row["step"] + 1) for row in table]
    rates = [k / 5 if k < 5 else 0.1 + 0.45 * (1 + math.cos(math.pi * (k - 5) / 19)) for k in last]
    assert [row["learning_rate"] for row in table] == pytest.approx([8e-5 * rate for rate in rates])
    assert [row["staleness/max"] for row in resumed.before[:3]] == [0, 1, 1], (
        "capacity 1 runs one step behind"
    )
    assert all(row["time/sync_pause_s"] > 0 for row in table)
    assert (
        len([event for event in trace(resumed.run_dir) if event["name"] == "pause for weights 6"])
        == 1
    )
    assert "pass@1" in resumed.second.stdout
    assert "crashed" not in (resumed.run_dir / "logs/engine.0.log").read_text(), (
        "the end of a run is no crash of its engines"
    )
    assert all(
        row["time/train_s"] + row["time/trainer_wait_s"] + row["time/sync_s"] <= row["time/step_s"]
        for row in table
    )
    for name in (
        "config.yaml",
        "report.png",
        "agreement.png",
        "trace.json",
        "rollouts/step_000005.txt",
        "logs/trainer.1.log",
        "eval/version_000006.json",
    ):
        assert (resumed.run_dir / name).stat().st_size > 0, name


def test_a_tracker_has_the_curves_of_all_starts(resumed):
    assert "tracker" not in resumed.second.stdout
    assert read_tensorboard(resumed.run_dir, "") == curves_of(resumed.run_dir)


def test_trainer_and_generator_agree_on_log_probs(resumed):
    run_dir = resumed.run_dir
    differences = {
        row["step"]: row["logprob/abs_diff_mean"]
        for row in rows(run_dir)
        if "logprob/abs_diff_mean" in row
    }
    assert set(differences) == {0, 2, 4}
    assert all(0 < difference <= 1e-4 for difference in differences.values()), differences


def test_weights_of_a_finished_run_are_exported_and_evaluated(resumed, model, tmp_path):
    run_dir = resumed.run_dir
    again = succeed(quickstart(model, run_dir))
    assert "complete" in again.stdout
    succeed(
        [
            "export",
            "configs/quickstart.yaml",
            f"model.path={model}",
            f"run_dir={run_dir}",
            "--output",
            str(tmp_path / "hf"),
        ]
    )
    assert sorted(path.name for path in (run_dir / "hf").iterdir()) == [
        "step_000004",
        "step_000006",
    ]
    of_run, of_command = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (run_dir / "hf/step_000006", tmp_path / "hf")
    )
    assert of_run == of_command, "exported beside the run's steps, and from its checkpoint"
    scores = json.loads((run_dir / "eval/version_000006.json").read_text())
    of_checkpoint = (f"model.path={model}", f"run_dir={run_dir}")
    of_export = (f"model.path={tmp_path / 'hf'}", f"run_dir={run_dir}")
    for weights, settings in (
        (run_dir / "checkpoints/step_000006", of_checkpoint),
        (tmp_path / "hf", of_export),
    ):
        scored = succeed(["eval", "configs/quickstart.yaml", *settings, "eval.limit=16", "--json"])
        result = json.loads(scored.stdout)
        assert (result["weights"], result["pass@1"]) == (str(weights), scores["pass@1"])


def test_run_replays_experts_of_a_tp2_engine(
    tmp_path,
):
    """The trainer is pipelined and synchronous, over gloo.

    Each engine rank has half of the experts.

    Responses come in pieces of at most four tokens, each with its own choices of experts.
    """
    model = make_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    overrides = [
        "async.capacity=0",
        "trainer.tp=1",
        "trainer.pp=2",
        "generator.tp=2",
        "weights.transport=gloo",
        "max_steps=3",
    ]
    overrides += [
        "trainer.routing_replay=true",
        "generator.ep=2",
        "async.partial_rollout=resume",
        "async.chunk_tokens=4",
    ]
    # random weights get no reward, so that all would be skipped
    overrides += ["algorithm.skip_zero_advantage=false"]
    overrides += ["algorithm.kl_coef=0.01"]
    succeed(quickstart(model, tmp_path / "run", *overrides))
    table = rows(tmp_path / "run")
    assert [row["staleness/max"] for row in table] == [0, 0, 0], "capacity 0 is on policy"
    assert all(row["sync/audit_ok"] for row in table)
    assert table[0]["logprob/abs_diff_mean"] <= 1e-4
    assert abs(table[0]["is_ratio/mean"] - 1) < 1e-3, "on policy, pi and mu are the same"
    for row in table:
        assert (
            row["agreement/age_0/tokens"]
            == row["agreement/tokens"]
            == sum(row["agreement/histogram"])
            > 100
        )
        assert row["agreement/age_0/abs_diff_max"] < 1e-3 and row["agreement/ess_sequences"] > 0.999
    assert all(row["router/replayed_fraction"] == 1 for row in table), (
        "every token that goes into the model has its experts"
    )
    assert all(row["router/replaced_fraction"] < 1e-3 for row in table), (
        "in float32 the trainer's router chooses the same"
    )
    assert table[0]["logprob/abs_diff_mean_own_routing"] > 0
    assert table[0]["kl/mean"] == pytest.approx(0, abs=1e-9), (
        "before the first step, policy and reference are the same"
    )
    assert table[2]["kl/mean"] >= 0


@pytest.mark.long
def test_a_run_of_gpt_oss_from_its_published_form(tmp_path):
    """The trainer reads the MXFP4 checkpoint.

    The engine gets its weights from the first update. TP2xEP2 to TP2xEP2.
    """
    model = in_mxfp4(make_model(tmp_path / "model", "gpt_oss"))
    overrides = [f"generator.server_args.{name}={value!r}" for name, value in DEQUANTISED.items()]
    overrides += [
        "trainer.tp=2",
        "trainer.ep=2",
        "trainer.sequence_parallel=true",
        "generator.tp=2",
        "generator.ep=2",
        "max_steps=20",
    ]
    overrides += [
        "trainer.routing_replay=true",
        "async.partial_rollout=in_flight",
        "algorithm.skip_zero_advantage=false",
    ]
    succeed(quickstart(model, tmp_path / "run", *overrides))
    table = rows(tmp_path / "run")
    assert len(table) == 20 and all(row["sync/audit_ok"] for row in table)
    assert table[0]["logprob/abs_diff_mean"] <= 1e-4
    assert all(row["router/replayed_fraction"] == 1 for row in table)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize("partial_rollout", ["in_flight", "retract"])
def test_a_run_of_gated_delta_nets_and_their_states(tmp_path, partial_rollout, family):
    """Trainer TP2 with replayed experts, one step behind.

    At each update running requests keep the keys, values and states of the older weights, or all
    are computed anew. The second family's checkpoint also has a vision tower.
    """
    model = make_model(tmp_path / "model", family)
    overrides = [
        "trainer.sequence_parallel=true",
        "trainer.routing_replay=true",
        f"async.partial_rollout={partial_rollout}",
        "max_steps=20",
    ]
    succeed(quickstart(model, tmp_path / "run", *overrides, "algorithm.skip_zero_advantage=false"))
    table = rows(tmp_path / "run")
    assert len(table) == 20 and all(row["sync/audit_ok"] for row in table)
    probes = [row["logprob/abs_diff_mean"] for row in table if "logprob/abs_diff_mean" in row]
    assert len(probes) == 10 and max(probes) <= 1e-4
    assert all(row["router/replayed_fraction"] == 1 for row in table)


@pytest.mark.long
@pytest.mark.parametrize("family", ["mistral", "phi3", "olmo2", "gemma3_text", "qwen3_5_text"])
def test_a_run_of_a_small_family_goes_on_under_other_sizes(family, tmp_path):
    """10 steps of TP2 to TP1, then 10 of PP2 to TP2 from their checkpoint.

    Every update is audited, and log-probs agree from the first step on.
    """
    model = make_model(tmp_path / "model", family)
    overrides = ["algorithm.skip_zero_advantage=false", "eval.every=0", "checkpoint.every=5"]
    for steps, sizes in (
        (10, ["trainer.tp=2"]),
        (20, ["trainer.tp=1", "trainer.pp=2", "generator.tp=2"]),
    ):
        succeed(quickstart(model, tmp_path / "run", *overrides, *sizes, f"max_steps={steps}"))
        table = rows(tmp_path / "run")
        assert len(table) == steps and all(row["sync/audit_ok"] for row in table)
        assert (
            max(
                row["agreement/abs_diff_max"]
                for row in table
                if row["staleness/max"] == 0 or row["step"] == 0
            )
            < 1e-3
        )


@pytest.mark.long
@pytest.mark.parametrize("published", ["float32", "fp8"])
def test_a_run_with_fp8_engines(published, tmp_path):
    """Trainer TP2 in float32.

    Each rank has 64 rows of k and v and 192 of gate and up, so blocks are cut. `published`: the
    checkpoint is in fp8 too.
    """
    model = make_model(tmp_path / "model", head_dim=64)
    model = in_fp8_blocks(model) if published == "fp8" else model
    overrides = [
        "generator.quantization=fp8_block",
        "async.capacity=0",
        "algorithm.skip_zero_advantage=false",
        "max_steps=3",
    ]
    # the run ends before its warm-up does
    overrides += ["trainer.optimizer.schedule=cosine", "trainer.optimizer.warmup_steps=5"]
    succeed(quickstart(model, tmp_path / "run", *overrides))
    table = rows(tmp_path / "run")
    assert all(row["sync/audit_ok"] for row in table) and len(table) == 3
    assert [row["learning_rate"] / table[0]["learning_rate"] for row in table] == pytest.approx(
        [1, 2, 3]
    )
    # Per layer: codes, scales of blocks (qkv 2 + 1 + 1, o 1 x 2, gate and up 3 + 3, down 1 x 3),
    # norms. Then embedding, head, norm.
    layer = 128 * (256 + 2 * 128 + 256 + 3 * 384) + 4 * (4 + 2 + 6 + 3) + 2 * 2 * 128
    assert {row["sync/bytes"] for row in table} == {4 * layer + 2 * (2 * 64 * 128 + 128)}
    # The engine computes with quantised weights, the trainer does not.
    assert 1e-4 < table[0]["logprob/abs_diff_mean"] < 0.1


def test_a_corrupted_write_stops_the_run_naming_tensor_and_rank(model, tmp_path):
    completed = run(
        quickstart(
            model, tmp_path / "run", "weights.transport=corrupting_transport:CorruptingTransport"
        )
    )
    assert completed.returncode == 1
    assert f"{TENSOR} on generator rank 0 is not what trainer rank" in completed.stderr
    assert "1" in completed.stderr.split("is not what trainer rank", 1)[1].splitlines()[0]
    # The second update is the bad one. Step 1 has its samples from the first update, and may end
    # before the audit.
    assert all(row["staleness/mean"] == row["step"] for row in rows(tmp_path / "run")), (
        "nothing of the bad weights is trained on"
    )
    log = (tmp_path / "run/logs/generator.0.log").read_text()
    assert TENSOR in log.rstrip().splitlines()[-1], "nothing below the error"


def test_a_killed_engine_ends_the_run_with_its_last_words(model, tmp_path):
    run_dir = tmp_path / "run"
    with started(
        quickstart(model, run_dir, "max_steps=100000", "generator.on_failure=fail"),
        tmp_path / "log",
    ) as process:
        wait_for_steps(process, run_dir, 1)
        engine = next(
            child for child in descendants(process) if "megarl.generator.server" in title(child)
        )
        engine.kill()
        killed = time.monotonic()
        process.wait(timeout=60)
        ended_s = time.monotonic() - killed
    output = (tmp_path / "log").read_text()
    assert process.returncode == 1
    assert "engine.0 was killed by SIGKILL" in output and "engine.0.log" in output
    assert ended_s < 60, "not by a deadline of a minute or more"
