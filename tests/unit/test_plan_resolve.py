"""Resolving: the consequences of a config, every mistake between roles, and the shipped configs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from resolving import CONFIGS, config, problems_of, with_weights

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.load import load_config
from megarl.plan import vendor_settings
from megarl.plan.checks import DEQUANTISED
from megarl.plan.resolve import RunPlan, find_spec, resolve, with_routing_replay
from megarl.plan.topologies import generator_ranks

pytestmark = pytest.mark.usefixtures("hub_offline")

SGLANG = vendor_settings.version_of("sglang")

REPLICAS = f"model.path={CONFIGS}/models/qwen3-30b-a3b generator.tp=2 generator.dp_attention=2"


def test_a_plan_follows_from_the_config(tmp_path: Path) -> None:
    overrides = [
        "trainer.tp=4",
        "trainer.pp=2",
        "trainer.dp=3",
        "trainer.zero=0",
        "generator.engines=5",
        "generator.tp=2",
    ]
    plan = resolve(
        config(tmp_path, *overrides, "rollout.prompts_per_step=6", "rollout.n=3", "max_steps=7")
    )
    assert plan.trainer_topology == TrainerTopology(tp=4, pp=2, dp=3, zero=0)
    assert plan.trainer_topology.world_size == 24
    assert plan.groups[0].topology == GeneratorTopology(engines=5, tp=2)
    assert generator_ranks(plan.groups) == 10
    assert (plan.steps, plan.sequences_per_step, plan.spec.num_layers) == (7, 18, 32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.steps = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("trainer.vpp=2", "trainer.vpp=2: needs trainer.pp of at least 2; it is 1"),
        (
            "trainer.pp=4 trainer.vpp=3",
            "trainer.pp=4 * trainer.vpp=3: must divide the model's 32 layers",
        ),
        (
            "trainer.pp=4 trainer.first_stage_layers=7",
            "trainer.first_stage_layers=7: must leave layers that the other 3 of trainer.pp=4 "
            "stages can share evenly; 25 of 32 are left; "
            "first and last of 8 each would do",
        ),
        (
            "trainer.last_stage_layers=7",
            "trainer.last_stage_layers=7: needs trainer.pp of at least 2; it is 1",
        ),
        ("trainer.ep=2", "trainer.ep=2: must be 1: a llama model has no experts"),
        ("generator.ep=4", "generator.ep=4: must be 1: a llama model has no experts"),
        (
            "generator.dp_attention=2",
            "generator.dp_attention=2: must be 1 for a llama model; others are for deepseek_v3, "
            "qwen3_moe",
        ),
        ("trainer.etp=2", "trainer.etp=2: must be 1: a llama model has no experts"),
        (
            "trainer.routing_replay=true",
            "trainer.routing_replay=true: must be false: a llama model has no experts",
        ),
        (
            "generator.server_args.enable_return_routed_experts=true",
            "generator.server_args.enable_return_routed_experts=true: must be set by "
            "trainer.routing_replay",
        ),
        (
            "generator.quantization=fp8",
            "generator.quantization=fp8: must be one of fp8_block, fp8_channel, fp8_tensor",
        ),
        (
            "generator.quantization=fp8_block generator.tp=32",
            "generator.quantization=fp8_block: with generator.tp=32 a rank must hold multiples of "
            "128; it holds 448 rows of "
            "model.layers.*.mlp.gate_proj.weight, 448 rows of model.layers.*.mlp.up_proj.weight, "
            "448 columns of model.layers.*.mlp.down_proj.weight",
        ),
        (
            "generator.quantization=fp8_channel generator.server_args.load_format=auto",
            "generator.server_args.load_format: must be left out with "
            "generator.quantization=fp8_channel, which decides it",
        ),
        (
            "trainer.tp=3",
            "trainer.tp=3: must divide the model's 32 attention heads and 8 key-value heads and "
            "14336 ffn rows",
        ),
        ("generator.tp=64", "generator.tp=64: must divide the model's 32 attention heads"),
        ("trainer.pp=5", "trainer.pp=5: must divide the model's 32 layers"),
        (
            "trainer.sequence_parallel=true",
            "trainer.sequence_parallel=true: needs trainer.tp of at least 2; it is 1",
        ),
        ("rollout.n=1", "rollout.n=1: must be at least 2: aipo compares a prompt's samples"),
        (
            "trainer.dp=16 rollout.prompts_per_step=3 rollout.n=5",
            "rollout.prompts_per_step=3 * rollout.n=5: 15 sequences an optimizer step must be at "
            "least trainer.dp=16",
        ),
        (
            "rollout.max_tokens=8192",
            "rollout.max_tokens=8192: must be less than trainer.max_tokens_per_microbatch = 8192, "
            "prompt and response together",
        ),
        (
            "rollout.max_tokens=131072 trainer.max_tokens_per_microbatch=200000",
            "rollout.max_tokens=131072: must be less than the model's context of 131072, prompt "
            "and response together",
        ),
        (
            "generator.kv_cache_tokens=1000",
            "rollout.max_tokens=1024: must be less than generator.kv_cache_tokens = 1000, prompt "
            "and response together",
        ),
        (
            f"{REPLICAS} generator.kv_cache_tokens=2000",
            "rollout.max_tokens=1024: must be less than generator.kv_cache_tokens / "
            "generator.dp_attention = 1000, "
            "prompt and response together",
        ),
        (f"{REPLICAS} generator.tp=1", "generator.dp_attention=2: must divide generator.tp=1"),
        (
            f"{REPLICAS} generator.tp=1 generator.quantization=fp8_block",
            "generator.dp_attention=2: must divide generator.tp=1",
        ),
        (
            f"{REPLICAS} generator.tp=4 generator.quantization=fp8_block",
            "generator.quantization=fp8_block: with generator.tp=4, generator.ep=1, "
            "generator.dp_attention=2 a rank must hold multiples "
            "of 128; it holds 192 rows of model.layers.*.mlp.experts.*.gate_proj.weight, "
            "192 rows of model.layers.*.mlp.experts.*.up_proj.weight, "
            "192 columns of model.layers.*.mlp.experts.*.down_proj.weight",
        ),
        (
            f"{REPLICAS} generator.max_concurrency=1",
            "generator.max_concurrency=1: must be at least generator.dp_attention=2",
        ),
        (
            "eval.max_tokens=131072",
            "eval.max_tokens=131072: must be less than the model's context of 131072, prompt and "
            "response together",
        ),
        (
            "async.chunk_tokens=64",
            "async.chunk_tokens=64: only async.partial_rollout=resume cuts responses; it is "
            "in_flight",
        ),
        (
            "async.partial_rollout=resume async.chunk_tokens=1024",
            "async.chunk_tokens=1024: must be below rollout.max_tokens=1024, or nothing is ever cut",
        ),
        (
            "rollout.name=tool_calls async.keep_kv_cache=true async.partial_rollout=retract",
            "async.keep_kv_cache=true: must be false with async.partial_rollout=retract: only "
            "in_flight keeps keys and values at an update",
        ),
        (
            "rollout.name=tool_calls async.keep_kv_cache=true async.max_staleness=0",
            "async.keep_kv_cache=true: must be false where no episode goes on through an update: "
            "async.capacity or async.max_staleness is 0",
        ),
        (
            "async.keep_kv_cache=true",
            "async.keep_kv_cache=true: must be false with rollout.name=single_turn, whose episodes "
            "have no later turns",
        ),
        (
            "rollout.name=tool_calls async.keep_kv_cache=true deterministic=true",
            "async.keep_kv_cache=true: must be false with deterministic=true, which has no prefix "
            "cache",
        ),
        (
            "async.too_old=mask",
            "async.too_old=mask: needs async.max_staleness; it is null, and nothing is ever too old",
        ),
        (
            "async.too_old=mask async.max_staleness=2 async.partial_rollout=block",
            "async.too_old=mask: must be reject where all tokens of a group have one version: with "
            "async.partial_rollout=block, or if async.capacity or async.max_staleness is 0",
        ),
        (
            "async.too_old=mask async.max_staleness=2 algorithm.name=online_dpo",
            "async.too_old=mask: must be reject with algorithm.name=online_dpo, which needs all "
            "tokens of a response",
        ),
        ("async.max_updates=3", "async.max_updates=3: must be left out with async.idle=off"),
        (
            "async.idle=updates",
            "async.idle=updates: needs async.capacity and async.max_staleness of at least 2: one step "
            "behind, the generator waits for the weights that further passes hold up",
        ),
        (
            "async.idle=updates async.capacity=2 async.max_samples=8",
            "async.max_samples=8: must be left out with async.idle=updates",
        ),
        (
            "async.idle=updates async.max_updates=2 trainer.epochs=2 max_steps=9 async.capacity=2",
            "async.max_updates=2: must be more than trainer.epochs=2, the passes that are made anyway",
        ),
        (
            "async.idle=updates async.capacity=0",
            "async.idle=updates: must be off where the sides take turns: async.capacity or "
            "async.max_staleness is 0",
        ),
        (
            "async.idle=updates async.capacity=2 algorithm.name=ppo roles.critic.path=x",
            "async.idle=updates: must be off with a critic",
        ),
        (
            "async.idle=samples async.max_samples=4",
            "async.max_samples=4: must be more than rollout.n=4",
        ),
        (
            "async.idle=samples async.capacity=null",
            "async.idle=samples: must be off where the generator never waits: async.capacity and "
            "async.max_staleness are null",
        ),
        (
            "async.idle=samples rollout.name=program",
            "async.idle=samples: must be off with rollout.name=program: its episodes may begin with "
            "different tokens",
        ),
        (
            "async.idle=samples data.curriculum.rest_epochs=2",
            "async.idle=samples: must be off with data.curriculum, which needs all rewards of a "
            "prompt",
        ),
        (
            "generator.server_args.tp_size=2",
            "generator.server_args.tp_size=2: must be set by generator.tp",
        ),
        (
            "generator.server_args.attn_dp_size=2",
            "generator.server_args.attn_dp_size=2: must be set by generator.dp_attention",
        ),
        (
            "generator.server_args.dp_size=2",
            "generator.server_args.dp_size=2: must be left out; "
            f"{vendor_settings.SGLANG_REFUSED['dp_size']}",
        ),
        (
            "generator.server_args.host=0.0.0.0",
            "generator.server_args.host=0.0.0.0: must be left out; the launcher decides it",
        ),
        (
            "generator.server_args.enable_eplb=true",
            "generator.server_args.enable_eplb=true: must be left out; "
            "weights are written to the experts where the layout has them, and it would move them",
        ),
        (
            "generator.server_args.moe_runner_backend=flashinfer_cutlass",
            "generator.server_args.moe_runner_backend=flashinfer_cutlass: must be triton or "
            "deep_gemm, "
            "which compute with experts as they are written",
        ),
        (
            "generator.server_args.enable_mixed_chunks=true",
            f"generator.server_args.enable_mixed_chunks=true: unknown to SGLang {SGLANG}; did you "
            "mean enable_mixed_chunk?",
        ),
        (
            "generator.server_args.--tensor-parallel-size=2",
            f"generator.server_args.--tensor-parallel-size=2: unknown to SGLang {SGLANG}; did you "
            "mean generator.tp?",
        ),
        (
            "generator.server_args.page_size=big",
            "generator.server_args.page_size=big: must be an integer or null",
        ),
        (
            "generator.server_args.page_size=true",
            "generator.server_args.page_size=true: must be an integer or null",
        ),
        (
            "generator.server_args.disable_radix_cache=1",
            "generator.server_args.disable_radix_cache=1: must be true or false",
        ),
        (
            "generator.server_args.schedule_conservativeness=null",
            "generator.server_args.schedule_conservativeness=null: must be a number",
        ),
        (
            "generator.server_args.cuda_graph_bs_decode=8",
            "generator.server_args.cuda_graph_bs_decode=8: must be Optional[List[int]]",
        ),
        (
            "generator.server_args.grammar_backend=outline",
            "generator.server_args.grammar_backend=outline: must be one of llguidance, none, "
            "outlines, xgrammar; did you mean outlines?",
        ),
        (
            "generator.server_args.pp_size=2",
            "generator.server_args.pp_size=2: must be left out; "
            f"{vendor_settings.SGLANG_REFUSED['pp_size']}",
        ),
        (
            "generator.server_args.device=cpu",
            "generator.server_args.device=cpu: must be left out; the launcher decides it",
        ),
        ("eval.every=10", "eval.every=10: needs a held-out set: set data.eval.source"),
        (
            "eval.suites.a.source=a.jsonl eval.suites.a.since=2024-08-01",
            "eval.suites.a.since=2024-08-01: only benchmark=livecodebench has dates",
        ),
        (
            "eval.suites.a.source=a.jsonl eval.suites.a.samples=8 eval.suites.a.temperature=0 "
            "eval.temperature=0.7",
            "eval.suites.a.samples=8: at temperature 0 they are all the same; set "
            "eval.suites.a.temperature",
        ),
        (
            "eval.suites.a.source=a.jsonl eval.suites.a.temperature=0 eval.samples=8 "
            "eval.temperature=0.7",
            "eval.samples=8: at temperature 0 they are all the same; set eval.suites.a.temperature",
        ),
    ],
)
def test_each_mistake_is_one_line(tmp_path: Path, overrides: str, problem: str) -> None:
    assert problems_of(tmp_path, *overrides.split()) == [problem]


@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.tp=8",
        "generator.tp=32",
        "generator.quantization=fp8_block generator.tp=16",
        "generator.quantization=fp8_tensor generator.tp=32",
        "async.capacity=4 async.max_staleness=2",
        "async.capacity=null",
        "generator.server_args.page_size=1",
        "generator.server_args.moe_runner_backend=deep_gemm",
        "generator.server_args.attention_backend=torch_native "
        "generator.server_args.schedule_conservativeness=1",
    ],
)
def test_unusual_settings_are_accepted(tmp_path: Path, overrides: str) -> None:
    assert isinstance(resolve(config(tmp_path, *overrides.split())), RunPlan)


def deepseek(tmp_path: Path, **changes: int) -> str:
    """An override that names a folder with DeepSeek-V3's config.json, changed by `changes`."""
    values = json.loads((CONFIGS / "models/deepseek-v3/config.json").read_text())
    values.pop("quantization_config", None)
    (tmp_path / "deepseek").mkdir()
    (tmp_path / "deepseek/config.json").write_text(json.dumps(values | changes))
    return f"model.path={tmp_path}/deepseek"


def test_shared_experts_that_cpu_engines_pad_one_by_one(tmp_path: Path) -> None:
    model = deepseek(tmp_path, n_shared_experts=2, moe_intermediate_size=96)
    stages = ["trainer.pp=4", "trainer.first_stage_layers=16", "cluster.gpu=cpu"]
    (problem,) = problems_of(tmp_path, model, *stages, "generator.tp=2")
    remedy = (
        "must be a multiple of 32 * generator.tp=2 on CPUs, or its 2 shared experts are "
        "padded; generator.tp=1 would do"
    )
    assert problem.endswith(f"the 96 ffn rows of an expert {remedy}")
    assert resolve(config(tmp_path, model, *stages, "generator.tp=1"))
    assert resolve(config(tmp_path, model, *stages[:2], "generator.tp=2"))


def test_engines_of_a_checkpoint_in_fp8_keep_its_format(tmp_path: Path) -> None:
    model = deepseek(tmp_path)
    sizes = ["trainer.pp=4", "trainer.first_stage_layers=16", "generator.tp=8", "generator.ep=8"]
    path = tmp_path / "deepseek/config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}})
    )
    (problem,) = problems_of(tmp_path, model, *sizes)
    assert problem.startswith("generator.quantization=null: must be fp8_block, since model.path=")
    assert resolve(config(tmp_path, model, *sizes, "generator.quantization=fp8_block"), "plan")


def test_mxfp4_checkpoint_must_be_served_dequantised(
    tmp_path: Path,
) -> None:
    shipped = json.loads(
        (Path(__file__).parents[2] / "configs/models/gpt-oss-20b/config.json").read_text()
    )
    (tmp_path / "gpt_oss").mkdir()
    (tmp_path / "gpt_oss/config.json").write_text(
        json.dumps(shipped | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    model = f"model.path={tmp_path}/gpt_oss"
    (problem,) = problems_of(tmp_path, model)
    assert problem.startswith('generator.server_args: must have {"json_model_override_args": ')
    remedies = [f"generator.server_args.{name}={value!r}" for name, value in DEQUANTISED.items()]
    assert resolve(config(tmp_path, model, *remedies), "plan")
    assert problems_of(
        tmp_path,
        model,
        *remedies,
        "trainer.etp=2",
        "trainer.tp=2",
        "trainer.sequence_parallel=true",
    ) == ["trainer.etp=2: must be 1: the experts of a gpt_oss model have biases"]


def test_sinks_are_refused_where_the_vendors_have_none_on_gpus(tmp_path: Path) -> None:
    model = f"model.path={Path(__file__).parents[2] / 'configs/models/gpt-oss-20b'}"
    (problem,) = problems_of(tmp_path, model, "trainer.cp=2")
    assert (
        problem
        == "trainer.megatron.cp_comm_type: must be a2a with trainer.cp=2: a gpt_oss model has sinks"
    )
    assert resolve(config(tmp_path, model, "trainer.cp=2", "trainer.megatron.cp_comm_type=a2a"))
    assert resolve(config(tmp_path, model, "trainer.cp=2", "cluster.gpu=cpu"))
    (problem,) = problems_of(tmp_path, model, "cluster.gpu=B200")
    assert problem.startswith("generator.server_args.attention_backend: must be triton: ")
    assert resolve(
        config(
            tmp_path, model, "cluster.gpu=B200", "generator.server_args.attention_backend=triton"
        )
    )


def test_fused_rows_that_never_fill_blocks_get_no_advice(tmp_path: Path) -> None:
    sizes = ["trainer.pp=4", "trainer.first_stage_layers=16", "generator.tp=8", "generator.ep=8"]
    model = deepseek(tmp_path, q_lora_rank=160)
    assert problems_of(tmp_path, model, *sizes, "generator.quantization=fp8_block") == [
        "generator.quantization=fp8_block: must be null for this model: at any generator.tp "
        "SGLang fuses rows that must be multiples "
        "of 128, and are 160 of model.layers.*.self_attn.q_a_proj.weight"
    ]
    assert resolve(config(tmp_path, model, *sizes))


def test_arguments_are_judged_where_sglang_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a laptop that only plans."""
    monkeypatch.setitem(sys.modules, "sglang", None)
    [problem] = problems_of(tmp_path, "generator.server_args.enable_mixed_chunks=true")
    assert problem.endswith("did you mean enable_mixed_chunk?")


def test_mistakes_of_all_roles_are_reported_together(tmp_path: Path) -> None:
    problems = problems_of(
        tmp_path,
        "trainer.tp=5",
        "generator.tp=7",
        "rollout.n=1",
        "trainer.vpp=2",
        "async.chunk_tokens=9",
    )
    assert {problem.split(":")[0] for problem in problems} == {
        "trainer.tp=5", "generator.tp=7", "rollout.n=1", "trainer.vpp=2", "async.chunk_tokens=9"
    }  # fmt: skip


def test_fp8_blocks_on_blackwell_need_a_kernel_for_plain_scales(tmp_path: Path) -> None:
    blocks = [
        with_weights(tmp_path / "model"),
        "generator.quantization=fp8_block",
        "cluster.gpu=B200",
        "generator.tp=4",
    ]
    (problem,) = problems_of(tmp_path, *blocks, command="train")
    assert (
        "needs generator.server_args.fp8_gemm_runner_backend of flashinfer_trtllm or triton; it "
        "is auto" in problem
    )
    assert resolve(
        config(tmp_path, *blocks, "generator.server_args.fp8_gemm_runner_backend=triton"), "train"
    )
    assert resolve(config(tmp_path, *blocks), "plan")


def test_command_checks(tmp_path: Path) -> None:
    weights = with_weights(tmp_path / "model")
    assert problems_of(tmp_path, weights, command="eval") == [
        "data.eval=null: megarl eval needs a held-out set: set data.eval.source"
    ]
    assert problems_of(tmp_path, weights, "trainer.dp=4", "sft.batch_size=2", command="sft") == [
        "sft.steps=0: must be at least 1 for megarl sft",
        "sft.batch_size=2: must be at least trainer.dp=4",
    ]
    assert resolve(config(tmp_path, weights, "sft.steps=1"), "sft").config.sft.steps == 1


def test_the_warm_start_has_parallel_sizes_of_its_own(tmp_path: Path) -> None:
    weights = with_weights(tmp_path / "weights")
    sizes = ["trainer.tp=2", "trainer.pp=2", "trainer.sequence_parallel=true", "sft.steps=1"]
    warm_start = resolve(config(tmp_path, weights, *sizes, "sft.dp=2"), "sft")
    assert warm_start.trainer_topology == TrainerTopology(dp=2)
    assert not warm_start.config.trainer.sequence_parallel
    assert resolve(config(tmp_path, weights, *sizes), "sft").trainer_topology == TrainerTopology(
        tp=2, pp=2
    )
    assert resolve(
        config(tmp_path, weights, *sizes, "sft.dp=2"), "train"
    ).trainer_topology == TrainerTopology(tp=2, pp=2)


def test_problems_of_the_warm_starts_sizes_name_its_own_keys(tmp_path: Path) -> None:
    weights = with_weights(tmp_path / "weights")
    assert problems_of(
        tmp_path, weights, "sft.steps=1", "sft.tp=3", "sft.dp=1000", command="sft"
    ) == [
        "sft.batch_size=128: must be at least sft.dp=1000",
        "sft.tp=3: must divide the model's 32 attention heads and 8 key-value heads and 14336 ffn rows",
    ]
    # A dry run that would advise megarl sft also finds what megarl sft would refuse.
    advised = ["model.random_init=true", "sft.steps=1"]
    assert problems_of(tmp_path, *advised, "sft.pp=5", command="dry-run") == [
        "sft.pp=5: must divide the model's 32 layers"
    ]
    assert resolve(config(tmp_path, weights, "sft.pp=5"), "dry-run")


@pytest.mark.parametrize(
    "path",
    sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("examples/*.yaml")]),
    ids=lambda path: path.stem,
)
def test_every_shipped_config_resolves(path: Path, tmp_path: Path) -> None:
    plan = resolve(load_config(path, [f"run_dir={tmp_path}"]))
    assert plan.trainer_topology.world_size >= 1
    assert plan.sequences_per_step >= plan.trainer_topology.dp


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.dp", 100_001),
        ("generator.engines", 100_001),
        ("eval.engines", 100_001),
        ("roles.judge.engines", 100_001),
    ],
)
def test_absurd_numbers_of_ranks_are_refused(tmp_path: Path, key: str, value: int) -> None:
    problem = f"{key}={value}: {value} ranks; at most 100000 can be planned"
    judge = ["roles.judge.role=judge", f"roles.judge.path={tmp_path}"]
    assert problem in problems_of(tmp_path, *judge, f"{key}={value}")


MOE = "configs/qwen3_30b_a3b_aipo.yaml"


@pytest.mark.parametrize(
    ("path", "overrides", "command", "replays"),
    [
        (MOE, [], "plan", True),
        (MOE, ["async.capacity=null"], "plan", True),
        (MOE, ["async.capacity=0", "async.partial_rollout=block"], "plan", False),
        (MOE, ["generator.speculative.algorithm=ngram"], "plan", False),
        (MOE, ["trainer.routing_replay=false"], "plan", False),
        (MOE, ["async.capacity=0", "trainer.routing_replay=true"], "plan", True),
        (MOE, [], "export", False),
        (MOE, ["trainer.routing_replay=true"], "sft", False),
        ("configs/8b_aipo.yaml", ["trainer.routing_replay=true"], "sft", True),
        ("configs/8b_aipo.yaml", [], "plan", False),
    ],
)
def test_routing_is_replayed_where_experts_and_asynchrony_meet(path, overrides, command, replays):
    config = load_config(path, overrides)
    decided = with_routing_replay(config, find_spec(config), command)
    assert decided.trainer.routing_replay is replays
