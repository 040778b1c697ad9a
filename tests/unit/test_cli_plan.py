"""megarl plan, reshard and train --dry-run: their counts, lists and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_files import json_lines

from megarl import cli
from megarl.config.load import load_config
from megarl.estimate.hardware import Cluster
from megarl.launch import commands
from megarl.plan.resolve import resolve

pytestmark = pytest.mark.usefixtures("hub_offline")  # dry runs would read the hub's rows
MODELS = Path(__file__).parents[2] / "configs" / "models"


def test_dry_run_reports_rows_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 1200)
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {MODELS}/tiny-llama, random_init: true, dtype: float32}}\ncluster: "
        f"{{gpu: cpu}}\nsft: {{steps: 1}}\n"
        "data: {train: {source: rows.jsonl}, eval: {source: HuggingFaceH4/MATH-500}}\nrollout: "
        "{max_tokens: 64}\n"
    )
    monkeypatch.chdir(tmp_path)
    out = printed("train", "run.yaml", "--dry-run")
    assert (
        "data.train: 1,200 rows of rows.jsonl, all read; the first 1,000 prompts leave room for a "
        "response" in out
    )
    assert "data.eval: HuggingFaceH4/MATH-500, on the hub, is read when the run starts" in out
    assert "\nWeights: the warm start in sft.output=runs/default/sft/hf\n" in out


@pytest.mark.parametrize(
    ("gpus_here", "ranks_per_node", "nodes"),
    [(0, "null", 4), (0, "4", 8), (4, "null", 8), (16, "null", 2)],
)
def test_dry_run_and_plan_count_the_same_gpus_of_a_node(
    gpus_here: int, ranks_per_node: str, nodes: int, monkeypatch
) -> None:
    """32 ranks. Without GPUs here, as on a login node, 8 a node; else as many as are here."""
    monkeypatch.setattr(commands, "gpus", lambda: (None,) * gpus_here)
    overrides = [
        "trainer.dp=8",
        "generator.engines=8",
        f"launch.ranks_per_node={ranks_per_node}",
    ]
    plan = commands.with_nodes_of_here(
        resolve(load_config(MODELS.parent / "8b_aipo.yaml", overrides), "plan")
    )
    assert f"launch     {nodes} nodes" in commands.render_launch(plan)
    assert Cluster.of(plan.config).gpus_per_node == 32 // nodes


@pytest.mark.parametrize("name", ["8b_aipo", "405b_aipo", "quickstart"])
def test_dry_run_predicts_one_time_for_the_update(name: str, printed) -> None:
    lines = printed("train", f"configs/{name}.yaml", "--dry-run").splitlines()
    (planned,) = [line.split()[2] for line in lines if line.startswith("           weight update")]
    (predicted,) = [line.split()[1] for line in lines if line.startswith("predicted")]
    assert planned == predicted


def test_map_depends_on_the_kind_of_engines(run_yaml: Path, printed) -> None:
    """If tp does not divide the heads, CPU engines add heads of zeros, and GPUs copy key-value
    heads.
    """
    rows = {}
    for gpu in ("cpu", "H100"):
        rows[gpu] = [
            line
            for line in printed(
                "reshard", str(run_yaml), "generator.tp=16", f"cluster.gpu={gpu}"
            ).splitlines()
            if line.startswith("self_attn.qkv_proj.weight")
        ]
    assert "with zeros" in rows["cpu"][0] and "with zeros" not in rows["H100"][0]


# The model cards say 8.03, 70.6 and 405.9 billion. Below, the bytes for 8B are computed by hand.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [("8b", 8_030_261_248), ("70b", 70_553_706_496), ("405b", 405_853_388_800)],
)
def test_plan_counts_the_parameters(
    model: str, parameters: int, run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 1: one GPU is too small for these models
    cli.main(["plan", str(run_yaml), f"model.path={MODELS}/llama-3.1-{model}", "--json"])
    assert json.loads(capsys.readouterr().out)["parameters"] == parameters


def test_plan_counts_bytes_per_rank(run_yaml: Path, printed, printed_json) -> None:
    sizes = [
        "trainer.tp=2",
        "trainer.pp=2",
        "trainer.dp=4",
        "generator.engines=3",
        "generator.tp=4",
    ]
    facts = printed_json("plan", str(run_yaml), *sizes, "--json")
    hidden = 4096
    ffn = 14336
    layers = 32
    q_rows = 4096
    kv_rows = 1024
    vocab = 128256
    vocab_tp2 = -(-vocab // 256) * 256  # Megatron pads to a multiple of 128 * tp

    def layer(tp: int) -> int:
        return (hidden * (2 * q_rows + 2 * kv_rows) + 3 * hidden * ffn) // tp + 2 * hidden

    first = layers // 2 * layer(2) + vocab_tp2 // 2 * hidden
    last = first + hidden  # output layer instead of embedding, and the final norm
    engine = layers * layer(4) + 2 * vocab // 4 * hidden + hidden
    trainer = facts["trainer"]
    generator = facts["generator"]
    assert (trainer["ranks"], generator["ranks"]) == (16, 12)
    assert (trainer["weight_bytes_min"], trainer["weight_bytes_max"]) == (2 * first, 2 * last)
    assert generator["weight_bytes_min"] == generator["weight_bytes_max"] == 2 * engine
    table = printed("plan", str(run_yaml), *sizes)
    assert "8,030,261,248 parameters" in table and "engines 3, tp 4: 12 ranks" in table


def test_predicted_time_of_an_adapter_update(run_yaml: Path, printed_json) -> None:
    sizes = [str(run_yaml), "trainer.tp=2", "generator.tp=2", "--json"]
    facts = []
    for overrides in ([], ["lora.rank=16"], ["lora.rank=16", "lora.targets=[q_proj]"]):
        facts.append(printed_json("reshard", *sizes, *overrides))
    full, adapters, unserved = facts
    assert "lora_predicted_s" not in full and unserved["lora_predicted_s"] is None, (
        "SGLang keeps q, k and v in one tensor"
    )
    # qkv, o, gate and up, down
    inner = [
        3 * 4096 + (4096 + 2 * 1024) // 2,
        4096 // 2 + 4096,
        2 * 4096 + 2 * 14336 // 2,
        14336 // 2 + 4096,
    ]
    per_rank = 2 * 32 * 16 * sum(inner)
    assert adapters["lora_predicted_s"] * adapters["link_bytes_per_s"] >= per_rank
    assert adapters["lora_predicted_s"] < 0.01 * adapters["predicted_s"]


def test_predicted_time_of_a_delta(run_yaml: Path, printed_json, refusal) -> None:
    """In bf16 each changed element takes 4 bytes instead of 2.

    A delta has at most half of the full bytes.
    """
    facts = []
    command = ["reshard", str(run_yaml), "trainer.tp=2", "generator.tp=2", "--json"]
    for options in (
        ["--delta", "0.02"],
        ["--delta", "0.02", "--link", "3"],
        ["--delta", "0.26"],
        ["--delta", "0"],
    ):
        facts.append(printed_json(*command, *options))
    small, slow, large, empty = facts
    assert small["delta_predicted_s"] == pytest.approx(0.04 * small["predicted_s"], rel=1e-3)
    slowdown = slow["delta_predicted_s"] / small["delta_predicted_s"]
    assert slowdown == pytest.approx(small["link_bytes_per_s"] / 3e9)
    assert large["delta_predicted_s"] == large["predicted_s"]
    assert empty["delta_predicted_s"] < 1e-4 * empty["predicted_s"]
    for option, value, allowed in (
        ("--delta", "1.5", "must be at least 0 and at most 1"),
        ("--link", "0", "must be more than 0"),
    ):
        assert f"{option} {value}: {allowed}" in refusal("reshard", str(run_yaml), option, value)


def test_memory_of_the_last_sent_weights_is_counted(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two trainer ranks sends its half of the weights to one engine, in bf16."""
    sizes = [
        "trainer.tp=2",
        "trainer.dp=1",
        "generator.engines=1",
        "generator.tp=1",
        "generator.quantization=null",
    ]
    plans = []
    for overrides in (
        [],
        ["weights.delta=auto"],
        ["weights.delta=auto", "weights.delta_shadow=device"],
    ):
        assert cli.main(["plan", str(run_yaml), *sizes, *overrides, "--json"]) == 1, (
            "the trainer needs more memory than two GPUs have"
        )
        plans.append(json.loads(capsys.readouterr().out))
    off, host, device = plans
    half_gib = off["generator"]["weight_bytes_max"] / 2 / 2**30
    assert (
        off["shadow_gib_per_node"]
        == off["trainer_memory_gib"]["shadow"]
        == host["trainer_memory_gib"]["shadow"]
        == 0
    )
    assert host["shadow_gib_per_node"] == pytest.approx(2 * half_gib, rel=0.01)
    assert device["trainer_gib_per_gpu"] - off["trainer_gib_per_gpu"] == pytest.approx(
        half_gib, rel=0.01
    )
    # the number of messages is the same
    bytes_s = {key: off[key] - off["control_s"] for key in ("delta_sync_s", "sync_s")}
    assert bytes_s["delta_sync_s"] == pytest.approx(0.02 * bytes_s["sync_s"], rel=0.01)


def test_reshard_lists_dumps_and_draws(
    run_yaml: Path, tmp_path: Path, printed, printed_json, refusal
) -> None:
    sizes = [
        "trainer.tp=2",
        "trainer.dp=2",
        "generator.engines=2",
        "generator.tp=4",
        "generator.quantization=fp8_block",
    ]
    dump = tmp_path / "map.jsonl"
    picture = tmp_path / "map.svg"
    outputs = ["--json", "--dump", str(dump), "--picture", str(picture)]
    facts = printed_json("reshard", str(run_yaml), *sizes, *outputs)
    head, *copies = json_lines(dump)
    assert head["plan_hash"] == facts["plan_hash"] and len(copies) == facts["copies"]
    assert sum(copy["bytes"] for copy in copies) == facts["bytes"]
    assert picture.read_text().startswith("<?xml") and facts["predicted_s"] > 0
    for rank, key, number in (
        ("trainer:3", "source_rank", 3),
        ("generator:6", "destination_rank", 6),
    ):
        count = sum(copy[key] == number for copy in copies)
        *lines, total = printed("reshard", str(run_yaml), *sizes, "--rank", rank).splitlines()
        assert len(lines) == count
        assert total.startswith(f"{rank}: {count:,} copies") and total.endswith(" ms")
        assert any(" quantise, " in line for line in lines)
        assert any(" scale, " in line for line in lines)
    for rank, message in (
        ("trainer:4", "the trainer has ranks 0 to 3"),
        ("engine:0", "must be trainer:N or generator:N"),
    ):
        assert f"--rank {rank}: {message}" in refusal(
            "reshard", str(run_yaml), *sizes, "--rank", rank
        )


@pytest.mark.parametrize(
    ("config", "ranks"), [("papers/llamarl_70b_math", (136, 120)), ("405b_aipo", (512, 512))]
)
def test_large_runs_of_the_paper_can_be_planned(
    config: str, ranks: tuple[int, int], printed_json, refusal
) -> None:
    path = f"configs/{config}.yaml"
    facts = printed_json("reshard", path, "--json")
    assert (facts["trainer_ranks"], facts["generator_ranks"]) == ranks
    assert facts["exactly_once"] is True
    assert facts["bytes"] == facts["bytes_minimum"] and facts["receiver_max_over_mean"] == 1.0
    # 405B: 1.035, since the embedding is in bf16 beside fp8 layers
    assert facts["sender_max_over_mean"] < facts["sender_bound"] + 0.001
    assert cli.main(["plan", path, "--json"]) == 0
    assert "generator.quantization=fp8_block: must be null for megarl eval" in refusal("eval", path)


def test_gpt_oss_can_be_planned(printed, printed_json, refusal) -> None:
    """Rows of gate and up alternate on both sides, so few copies suffice."""
    path = "configs/gpt_oss_120b_aipo.yaml"
    facts = printed_json("reshard", path, "--json")
    assert (facts["trainer_ranks"], facts["generator_ranks"]) == (32, 32)
    assert facts["exactly_once"] is True
    assert facts["bytes"] == facts["bytes_minimum"]
    assert facts["copies"] < 200_000
    assert facts["sender_max_over_mean"] < 1.001
    assert "fits       yes" in printed("plan", path)
    assert "generator.server_args.load_format=dummy: must be left out for megarl eval" in refusal(
        "eval", path
    )


def test_reshard_reports_the_map(run_yaml: Path, printed, printed_json) -> None:
    sizes = ["trainer.tp=2", "trainer.dp=2", "generator.engines=2", "generator.tp=4"]
    facts = printed_json("reshard", str(run_yaml), *sizes, "--json")
    assert (facts["trainer_ranks"], facts["generator_ranks"], facts["exactly_once"]) == (4, 8, True)
    engine_rank = printed_json("plan", str(run_yaml), *sizes, "--json")["generator"][
        "weight_bytes_max"
    ]
    assert facts["bytes"] == facts["bytes_minimum"] == 8 * engine_rank
    table = printed("reshard", str(run_yaml), *sizes)
    assert "self_attn.qkv_proj.weight" in table and facts["plan_hash"] in table
    assert table.endswith("proven: every destination byte is written exactly once\n")
