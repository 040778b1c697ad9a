"""megarl plan, for people and for scripts, and the shipped configs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.keys import settings
from megarl.config.load import load_config
from megarl.estimate.hardware import GPUS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs/examples").glob("*.yaml")])
KEYS = [
    "fits",
    "trainer_gib_per_gpu",
    "generator_gib_per_gpu",
    "train_s",
    "generate_s",
    "sync_s",
    "step_s",
    "sync_baseline_step_s",
    "speedup",
    "binding",
]
# LlamaRL, table 3: GPUs, model parallel sizes of trainer and generator, engines' precision. 405B
# trains at 8 instead of 16 with FSDP.
PAPER = {
    "papers/llamarl_8b_math": (256, 8, 1, None),
    "papers/llamarl_70b_math": (256, 8, 4, "fp8_block"),
    "405b_aipo": (1024, 8, 8, "fp8_block"),
}


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """The object that is printed. The exit status tells scripts whether the plan fits."""
    status = cli.main(["plan", *arguments, "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert status == (0 if facts["fits"] else 1)
    return facts


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_fits(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = plan(capsys, str(path))
    assert facts["fits"] is True
    assert facts["too_large_gib"] == {}
    assert facts["remedies"] == []
    assert (
        max(facts["trainer_gib_per_gpu"], facts["generator_gib_per_gpu"])
        < 0.95 * facts["gpu_memory_gib"]
    )
    assert list(facts)[7:17] == KEYS
    sides = facts["train_s"], facts["generate_s"]
    assert max(sides) < facts["step_s"]
    assert facts["speedup"] == pytest.approx(facts["sync_baseline_step_s"] / facts["step_s"])
    assert sum(facts["trainer_memory_gib"].values()) == pytest.approx(facts["trainer_gib_per_gpu"])
    assert sum(facts["train_parts_s"].values()) == pytest.approx(facts["train_s"])


@pytest.mark.parametrize("name", PAPER)
def test_configs_after_the_paper(name: str) -> None:
    gpus, trainer_mp, generator_tp, quantization = PAPER[name]
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    t = config.trainer
    g = config.generator
    assert t.tp * t.pp * t.cp * t.dp + g.engines * g.tp == gpus
    assert (t.tp * t.pp, g.tp, g.quantization) == (trainer_mp, generator_tp, quantization)
    assert config.rollout.prompts_per_step * config.rollout.n == 2048


def test_the_table_says_what_fits_and_what_binds(printed, tmp_path: Path) -> None:
    out = printed("plan", "configs/405b_aipo.yaml", "--picture", str(tmp_path / "plan.svg"))
    for text in (
        "405,853,388,800 parameters",
        "engines 64, tp 8: 512 ranks",
        "KV cache",
        "weight update",
        "binds      ",
        "fits       yes",
    ):
        assert text in out
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    assert max(map(len, out.splitlines())) <= 140


def test_plan_that_does_not_fit_prints_excess_and_remedies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["configs/papers/llamarl_70b_math.yaml", "trainer.tp=4", "trainer.dp=34"]
    facts = plan(capsys, *arguments)
    over = facts["trainer_gib_per_gpu"] - facts["gpu_memory_gib"]
    assert facts["fits"] is False
    assert facts["binding"] == "memory of the trainer"
    assert facts["too_large_gib"] == {"trainer": pytest.approx(over)}
    assert cli.main(["plan", *arguments]) == 1
    out = capsys.readouterr().out
    assert f"fits       no: the trainer is {over:.1f} GiB per GPU too large" in out
    remedy = next(
        line.strip()
        for line in out.splitlines()
        if line.strip().startswith("trainer.tp=8 trainer.dp=17")
    )
    again = plan(capsys, *arguments, *remedy.rpartition(":")[0].split())
    assert again["fits"] is True
    assert remedy.endswith(f"{again['trainer_gib_per_gpu']:.1f} GiB")


@pytest.mark.parametrize(
    "overrides", [[], ["trainer.epochs=2", "trainer.tp=2", "rollout.stop=[a b]"]]
)
def test_a_search_prints_overrides_that_plan_the_same(
    overrides: list[str], capsys: pytest.CaptureFixture[str], printed
) -> None:
    arguments = ["configs/8b_aipo.yaml", *overrides, "--search", "--gpus", "16"]
    facts = plan(capsys, *arguments)
    assert facts["fits"]
    assert set(facts["search"]) == {"settings", "theta", "balanced_theta"}
    out = printed("plan", *arguments)
    assert "search     16 GPUs" in out
    assert "lemma B.3" in out
    printed = shlex.split(out.splitlines()[-1])
    again = plan(capsys, *printed)
    assert again["step_s"] == pytest.approx(facts["step_s"])
    assert again["trainer"] == facts["trainer"]


def test_settings_that_the_plan_ignores_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """They include no setting whose absence would change the plan."""
    known_args = "{chunked_prefill_size: 512, disable_overlap_schedule: true, kv_cache_dtype: bf16}"
    counted = ["trainer.ddp.overlap_grad_reduce=false", f"generator.server_args={known_args}"]
    pipeline = ["configs/405b_aipo.yaml", "trainer.zero=1", "trainer.pp=14", "trainer.dp=4"]
    with_settings = plan(capsys, *pipeline, *counted)
    plain = plan(capsys, *pipeline)
    assert with_settings["not_counted"] == []
    assert with_settings["train_s"] > plain["train_s"]
    assert with_settings["generate_s"] > plain["generate_s"]
    activations = [facts["generator_memory_gib"]["activations"] for facts in (with_settings, plain)]
    assert activations[0] < activations[1]
    left_out = ["trainer.megatron.recompute_granularity", "generator.server_args.kv_cache_dtype"]
    arguments = [
        *pipeline,
        "trainer.recompute=false",
        f"{left_out[0]}=selective",
        f"{left_out[1]}=nvfp4",
    ]
    assert plan(capsys, *arguments)["not_counted"] == left_out
    assert cli.main(["plan", *arguments]) == 1  # too large
    assert f"not counted: {', '.join(left_out)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "refused"),
    [
        ("A100", "must be null with cluster.gpu=A100"),
        ("B200", "with cluster.gpu=B200 needs"),
        ("H100", ""),
    ],
)
def test_a_plan_says_what_training_refuses_on_these_gpus(capsys, gpu, refused):
    arguments = ["configs/8b_aipo.yaml", f"cluster.gpu={gpu}", "generator.quantization=fp8_block"]
    facts = plan(capsys, *arguments)
    assert len(facts["refused"]) == bool(refused)
    assert all(refused in problem for problem in facts["refused"])
    assert facts["fits"] is not bool(refused)
    assert cli.main(["plan", *arguments]) == bool(refused)
    assert (
        "refused    by megarl train: generator.quantization=fp8_block: " + refused
        in capsys.readouterr().out
    ) == bool(refused)


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("glm_4.6_aipo", "generator.quantization=fp8_channel"),
        ("deepseek_v3_aipo", "generator.quantization=fp8_channel"),
        ("qwen3_next_80b_a3b_aipo", "generator.quantization=fp8_tensor"),
        ("qwen3_30b_a3b_aipo", "trainer.tp=2 trainer.dp=8"),
        ("8b_aipo", "model.dtype=float32"),
        ("8b_aipo", "generator.tp=16 generator.engines=1 launch.ranks_per_node=6"),
    ],
)
def test_a_plan_fits_only_if_training_accepts_it(
    name: str, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"configs/{name}.yaml", *override.split()]
    facts = plan(capsys, *arguments)
    assert facts["fits"] is False
    assert facts["too_large_gib"] == {}
    assert override.split("=")[0] in facts["refused"][0]
    assert cli.main(["plan", *arguments]) == 1
    out = capsys.readouterr().out
    assert "fits       no: into memory, but megarl train refuses" in out
    assert f"refused    by megarl train: {facts['refused'][0]}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8"], "--gpus 8: needs --search"),
        (["--search", "--gpus", "1"], "--gpus 1: must be at least 2"),
        (["--picture", "plan.gif"], "must end in .svg or .png"),
        (
            ["rollout.max_tokens=4000"],
            "plan.prompt_tokens=128 it is 4128 tokens; they must be at most "
            "trainer.max_tokens_per_microbatch",
        ),
        (
            ["cluster.gpu=H10"],
            "cluster.gpu=H10: must be one of RTX4090, L40S, A100, H100, H200, B200, B300, GB200, "
            "GB300, cpu",
        ),
    ],
)
def test_mistakes_end_with_2(arguments: list[str], message: str, refusal) -> None:
    assert message in refusal("plan", "configs/8b_aipo.yaml", *arguments)


def test_a_step_overlaps_where_the_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    """Unbounded capacity is not synchronous.

    A bound on staleness limits how far ahead prompts are begun.
    """

    def sums(*arguments: str) -> bool:
        facts = plan(capsys, "configs/quickstart.yaml", *arguments)
        return facts["step_s"] > facts["train_s"] + facts["generate_s"]

    assert not sums("async.capacity=null")
    assert not sums("async.capacity=null", "--search", "--gpus", "4")
    assert not sums("async.capacity=4")
    assert sums("async.capacity=0")
    assert sums("async.capacity=null", "async.max_staleness=0")


def test_the_synchronous_baseline_scores_by_the_reference_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = plan(capsys, "configs/8b_aipo.yaml", "algorithm.kl_coef=0")
    penalised = plan(capsys, "configs/8b_aipo.yaml", "algorithm.kl_coef=0.1")
    assert penalised["train_s"] > plain["train_s"]
    assert penalised["sync_baseline_step_s"] > plain["sync_baseline_step_s"]


def test_larger_gpus_hold_more_and_decode_faster(capsys: pytest.CaptureFixture[str]) -> None:
    h100 = plan(capsys, "configs/70b_aipo.yaml", "cluster.gpu=H100")
    h200 = plan(capsys, "configs/70b_aipo.yaml", "cluster.gpu=H200")
    b200 = plan(capsys, "configs/70b_aipo.yaml", "cluster.gpu=B200")
    assert h100["generate_s"] > h200["generate_s"] > b200["generate_s"]
    assert h100["train_s"] == pytest.approx(h200["train_s"], rel=0.05)
    assert b200["train_s"] < 0.7 * h100["train_s"]


def test_the_setting_names_the_machines_that_are_known() -> None:
    limit = settings()["cluster.gpu"].limit
    assert limit is not None
    assert all(map(limit.accepts, GPUS))
    assert limit.text == "one of " + ", ".join(GPUS)


def test_planning_imports_no_torch() -> None:
    """Nor Megatron, SGLang or matplotlib, so that a plan comes at once."""
    script = (
        "import sys; from megarl import cli; cli.main(['plan', 'configs/8b_aipo.yaml', "
        "'--search', '--json']); "
        "heavy = {'torch', 'megatron', 'sglang', 'transformers', 'matplotlib', 'scipy'} & "
        "set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("name", ["405b_aipo", "qwen3_30b_a3b_aipo", "quickstart"])
def test_theory_prints_closed_form_beside_the_search(
    name: str, capsys: pytest.CaptureFixture[str], printed
) -> None:
    """The optimum of section 7 of the paper, and the speedup of theorem 7.5."""
    path = f"configs/{name}.yaml"
    plain = plan(capsys, path)
    facts = plan(capsys, path, "--theory")
    theory = facts.pop("theory")
    assert facts == plain, "the plan is the config's own"
    searched = plan(capsys, path, "--search")["search"]
    assert theory["search"]["theta"] == searched["theta"]
    closed_form = theory["closed_form"]
    synchronous = theory["synchronous"]
    assert theory["speedup_bound"] == pytest.approx(synchronous["step_s"] / closed_form["step_s"])
    assert theory["speedup_bound"] > 1
    # elsewhere the search splits weights or the optimizer over replicas, which the paper does not
    if name != "qwen3_30b_a3b_aipo" and searched["settings"]["trainer.zero"] < 3:
        assert closed_form["step_s"] < theory["search"]["step_s"], (
            "which knows of whole GPUs, and of communication"
        )
    out = printed("plan", path, "--theory")
    assert f"at least x{theory['speedup_bound']:.2f} as fast (theorem 7.5)" in out
    assert max(map(len, out.splitlines())) <= 140
