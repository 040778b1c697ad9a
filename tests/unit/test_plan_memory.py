"""The planner's memory against counts by hand, and against the layouts of the reshard map.

tests/cpu/test_planner_memory.py compares it with a real Megatron trainer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import GeneratorConfig, RunConfig, TrainerConfig
from megarl.estimate import memory
from megarl.estimate.estimate import check_longest, estimate, with_kv_caches
from megarl.estimate.hardware import GIB, GPUS
from megarl.estimate.memory import (
    PAGE_SLACK,
    BesideCache,
    Workload,
    generator_memory,
    generator_weights,
    kv_bytes_per_token,
    kv_bytes_read,
    kv_tokens,
    landing_bytes,
    microbatches_in_flight,
    optimizer_bytes,
    prefill_tokens,
    rank_bytes,
    stage_elements,
    stage_memory,
    trainer_elements,
    trainer_memory,
    usable_static,
)
from megarl.estimate.report import render
from megarl.models import load_spec
from megarl.plan.resolve import RunPlan, resolve
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.schedule import landings

CONFIGS = Path(__file__).parents[2] / "configs"
_8B = "papers/llamarl_8b_math"  # finer trainer ranks than engines'
MODELS = CONFIGS / "models"
H100 = GPUS["H100"]
WORK = Workload(512, 128, 128, 512, 2048)


def spec(name: str):
    return load_spec(MODELS / name)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("llama-3.1-8b", {"tp": 2, "pp": 2, "dp": 2}),
        (
            "llama-3.1-405b",
            {"tp": 8, "pp": 16, "dp": 2, "first_stage_layers": 7, "last_stage_layers": 7},
        ),
        ("llama-3.1-8b", {"tp": 2, "pp": 2, "vpp": 4, "dp": 2}),
        ("qwen3-30b-a3b", {"tp": 2, "pp": 2, "dp": 4, "ep": 8}),
        (
            "deepseek-v3",
            {
                "tp": 2,
                "pp": 4,
                "dp": 8,
                "ep": 16,
                "first_stage_layers": 15,
                "last_stage_layers": 14,
            },
        ),
    ],
)
def test_weights_are_those_of_the_fullest_rank_of_the_layout(model: str, sizes: dict) -> None:
    layout = trainer_layout(spec(model), TrainerTopology(**sizes), "bfloat16")
    fullest: dict[int, int] = {}
    for rank in range(layout.world_size):  # tensor by tensor, as on a rank of the run
        stage = rank // (layout.world_size // sizes.get("pp", 1))
        elements = sum(math.prod(tensor.shape) for tensor in layout.tensors(rank))
        fullest[stage] = max(fullest.get(stage, 0), elements)
    assert [elements.total for elements in stage_elements(layout)] == pytest.approx(
        list(fullest.values()), rel=1e-6
    )
    trainer = TrainerConfig(**sizes)
    assert [elements.total for elements in trainer_elements(spec(model), trainer, "bfloat16")] == [
        elements.total for elements in stage_elements(layout)
    ]


@pytest.mark.parametrize("quantization", [None, "fp8_block", "fp8_channel"])
@pytest.mark.parametrize(
    ("model", "tp", "ep"),
    [("llama-3.1-70b", 4, 1), ("qwen3-30b-a3b", 4, 4), ("llama-3.1-8b", 1, 1)],
)
def test_engine_weights_are_those_of_the_layout(
    model: str, tp: int, ep: int, quantization: str | None
) -> None:
    layout = generator_layout(
        spec(model), GeneratorTopology(3, tp, ep), "bfloat16", quantization=quantization
    )
    generator = GeneratorConfig(engines=3, tp=tp, ep=ep, quantization=quantization)
    assert generator_weights(spec(model), generator, "bfloat16").total == max(rank_bytes(layout))


def test_the_trainer_of_70b_by_hand() -> None:
    """TP8: an eighth of every matrix, with embedding and head padded to 128 * 8 rows; whole norms."""
    layers = 80
    hidden = 8192
    ffn = 28672
    kv = 1024
    vocab = 129024
    matrices = (
        layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn) + 2 * vocab * hidden
    )
    elements = matrices // 8 + (2 * layers + 1) * hidden
    trainer = TrainerConfig(
        tp=8, dp=16, sequence_parallel=True, recompute=True, max_tokens_per_microbatch=8192
    )
    planned = trainer_memory(spec("llama-3.1-70b"), trainer, "bfloat16", H100)
    assert (planned.weights, planned.gradients, planned.optimizer) == (
        2 * elements,
        4 * elements,
        12 * elements / 16,
    )
    # the input of each layer, for an eighth of the sequence
    boundaries = layers * 8192 * hidden * 2 / 8
    # One whole layer: inputs and outputs of norms; q, k, v and attention's output; gate, up and
    # their product; then the widest gradients.
    saved_per_token = 4 * hidden / 8 + (2 * hidden + 2 * kv) / 8 + 3 * ffn / 8
    workspace = 2 * 2 * ffn / 8 + 2 * hidden / 8 + hidden
    assert planned.activations == boundaries + 2 * 8192 * (saved_per_token + workspace)
    # Hidden states and their gradient; and zeros as large as the output layer, which exceed a
    # chunk's logits and their gradient.
    assert 2 * hidden * vocab / 8 > 2048 * vocab / 8 * (4 + 2)
    assert planned.logits == 2 * 2 * 8192 * hidden + 2 * hidden * vocab / 8
    assert planned.total < H100.memory_gib * GIB


def test_a_layer_keeps_what_megatron_reckons() -> None:
    """Megatron-LM, theoretical_memory_usage.py: 18 h + 4 f bytes a token and layer, for a GPT with
    as many kv heads as heads. Here there are no dropout masks (2 h less), but a gate beside the up
    projection (2 f more).
    """
    llama = replace(spec("llama-3.1-8b"), num_kv_heads=32)
    saved = 2 * memory.layer_activations(llama, TrainerConfig(), experts=False).saved
    assert saved == 18 * 4096 + 4 * 14336 - 2 * 4096 + 2 * 14336


def test_zero_splits_dense_and_experts_over_their_own_meshes() -> None:
    # 16 ranks: two replicas of each expert, eight of everything else
    shape = {"tp": 2, "dp": 8, "cp": 1, "ep": 8}
    (elements,) = trainer_elements(spec("qwen3-30b-a3b"), TrainerConfig(**shape), "bfloat16")
    assert optimizer_bytes(elements, TrainerConfig(zero=1, **shape), "bfloat16") == 12 * (
        elements.dense / 8 + elements.expert / 2
    )
    assert (
        optimizer_bytes(elements, TrainerConfig(zero=0, **shape), "bfloat16") == 12 * elements.total
    )
    # the weights are their own masters
    assert (
        optimizer_bytes(elements, TrainerConfig(zero=0, **shape), "float32") == 8 * elements.total
    )


def test_sharded_parameters_are_shared_by_data_parallel_ranks() -> None:
    """18 bytes an element, as rehearsed (docs/gpu.md). A pass gathers layers, whatever dp is."""
    shape = {"tp": 2, "dp": 8, "ep": 8, "sequence_parallel": True}
    model = spec("qwen3-30b-a3b")
    (elements,) = trainer_elements(model, TrainerConfig(**shape), "bfloat16")
    held = elements.dense / 8 + elements.expert / 2
    whole = trainer_memory(model, TrainerConfig(**shape), "bfloat16", H100)
    sharded = trainer_memory(model, TrainerConfig(zero=3, **shape), "bfloat16", H100)
    assert (sharded.weights, sharded.gradients, sharded.optimizer) == (
        2 * held,
        4 * held,
        12 * held,
    )
    assert whole.weights == 2 * elements.total and whole.optimizer == sharded.optimizer
    gathered = memory.gathered_bytes(model, TrainerConfig(zero=3, **shape), "bfloat16", 0)
    assert sharded.buffers == whole.buffers + gathered
    # embedding and output layer; and more than one layer, less than all
    ends = 2 * 2 * model.vocab_size / 2 * model.hidden_size
    layer = 2 * elements.total / model.num_layers
    assert ends + layer < gathered < ends + 12 * layer
    critic = trainer_memory(
        model, TrainerConfig(zero=3, **shape), "bfloat16", H100, critic=model, frozen=[model]
    )
    assert critic.critic == 18 * held and critic.frozen == 2 * held
    taught = trainer_memory(
        model, TrainerConfig(zero=3, **shape), "bfloat16", H100, frozen=[model], divergence=True
    )
    # a step keeps the teacher's whole output layer, which has padding
    assert taught.frozen - critic.frozen == pytest.approx(ends / 2, rel=1e-3)


def test_a_frozen_reference_is_a_copy_of_the_weights() -> None:
    trainer = TrainerConfig(tp=4)
    alone = trainer_memory(spec("llama-3.1-8b"), trainer, "bfloat16", H100)
    beside = trainer_memory(spec("llama-3.1-8b"), trainer, "bfloat16", H100, reference=True)
    assert beside.total - alone.total == beside.reference == alone.weights


def one_forward_one_backward(pp: int, stage: int, count: int) -> int:
    """The largest number of live microbatches on a stage, by its schedule: warm-up forwards, then
    forwards and backwards in turn, then the remaining backwards.
    """
    warm_up = min(pp - stage - 1, count)
    order = ["F"] * warm_up + ["F", "B"] * (count - warm_up) + ["B"] * warm_up
    alive = most = 0
    for step in order:
        alive += 1 if step == "F" else -1
        most = max(most, alive)
    return most


@pytest.mark.parametrize(("pp", "stage"), [(1, 0), (4, 0), (4, 1), (4, 3), (16, 0)])
def test_microbatches_in_flight(pp: int, stage: int) -> None:
    assert microbatches_in_flight(TrainerConfig(pp=pp), stage) == one_forward_one_backward(
        pp, stage, 64
    )


def test_virtual_stages_keep_more_chunks_in_flight() -> None:
    """Narayanan et al. 2021 (Megatron-LM), section 2.2.2: 1 + (p - 1) / (p v) of a whole model's
    activations on the first of p stages.

    During work on the last of them, one more chunk's share is alive.
    """
    for pp, vpp in ((4, 2), (8, 5), (2, 4)):
        whole_model = microbatches_in_flight(TrainerConfig(pp=pp, vpp=vpp), 0) / pp
        assert whole_model == pytest.approx(1 + (pp - 1) / (pp * vpp), abs=1.01 / (pp * vpp))


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("recompute", True, "activations"),
        ("sequence_parallel", True, "activations"),
        ("max_tokens_per_microbatch", 4096, "activations"),
        ("logprob_chunk_tokens", 1024, "logits"),
        ("cp", 2, "activations"),
        ("tp", 8, "gradients"),
        ("pp", 2, "weights"),
        ("dp", 8, "optimizer"),
    ],
)
def test_every_knob_turns_its_part_down(key: str, value: object, part: str) -> None:
    sizes = {"tp": 4, "dp": 2, "max_tokens_per_microbatch": 8192}
    trainers = TrainerConfig(**sizes), TrainerConfig(**(sizes | {key: value}))
    before, after = (
        trainer_memory(spec("llama-3.1-8b"), trainer, "bfloat16", H100) for trainer in trainers
    )
    assert getattr(after, part) < 0.8 * getattr(before, part) or (
        key == "sequence_parallel" and after.activations < before.activations
    )


def test_logits_are_on_the_last_stage_alone() -> None:
    stages = stage_memory(spec("llama-3.1-8b"), TrainerConfig(pp=4), "bfloat16", H100)
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
    activations = [stage.activations for stage in stages]
    assert activations == sorted(
        activations, reverse=True
    )  # the first stage has the most microbatches in flight


def test_kv_cache_of_a_token() -> None:
    """8B has 32 layers, and keys and values of 8 heads of 128 in bf16.

    With more than 8 ranks heads are copied. DeepSeek-V3 has 512 + 64 a layer.
    """
    llama = spec("llama-3.1-8b")
    deepseek = spec("deepseek-v3")
    one = GeneratorConfig(tp=1)
    eight = GeneratorConfig(tp=8)
    sixteen = GeneratorConfig(tp=16)
    assert kv_bytes_per_token(llama, one, 2) == 32 * 2 * 8 * 128 * 2 == 131072
    assert (
        kv_bytes_per_token(llama, eight, 2) == kv_bytes_per_token(llama, sixteen, 2) == 131072 / 8
    )
    assert (
        kv_bytes_per_token(deepseek, eight, 2)
        == kv_bytes_per_token(deepseek, one, 2)
        == 61 * 576 * 2
    )
    # each replica has its own requests
    assert (
        kv_bytes_per_token(deepseek, GeneratorConfig(tp=8, dp_attention=8), 2) == 61 * 576 * 2 / 8
    )
    # 4 key-value heads: at tp 8 each has two copies; with two replicas of attention, one
    qwen = spec("qwen3-235b-a22b")
    assert kv_bytes_per_token(qwen, eight, 2) == 2 * kv_bytes_per_token(
        qwen, GeneratorConfig(tp=8, dp_attention=2), 2
    )


def test_kv_cache_has_the_dtype_of_server_args() -> None:
    llama = spec("llama-3.1-8b")
    shapes = {
        name: GeneratorConfig(tp=1, server_args={"kv_cache_dtype": name})
        for name in ("auto", "bf16", "fp8_e5m2", "mxfp8", "nvfp4")
    }
    bytes_of_token = {
        name: kv_bytes_per_token(llama, shape, 2) / 131072 for name, shape in shapes.items()
    }
    assert bytes_of_token == {"auto": 1, "bf16": 1, "fp8_e5m2": 0.5, "mxfp8": 33 / 64, "nvfp4": 1}
    tokens = {
        name: kv_tokens(llama, shape, "bfloat16", WORK, H100) for name, shape in shapes.items()
    }
    assert tokens["fp8_e5m2"] == pytest.approx(2 * tokens["bf16"], rel=1e-4)
    read = [kv_bytes_read(llama, shapes[name], 2, 1000) for name in ("auto", "fp8_e5m2")]
    assert read[0] == 2 * read[1]


def test_windowed_layers_keep_fewer_keys_and_values() -> None:
    """gpt-oss-20b: 24 layers, 12 of them with windows of 128 tokens, 8 heads of 64.

    For Gemma 3 SGLang has one pool.
    """
    oss = spec("gpt-oss-20b")
    layer = 2 * 8 * 64 * 2
    one = GeneratorConfig(tp=1)
    settings = ({}, {"swa_full_tokens_ratio": 0.25}, {"disable_hybrid_swa_memory": True})
    layers_kept = [
        kv_bytes_per_token(oss, GeneratorConfig(tp=1, server_args=server_args), 2) / layer
        for server_args in settings
    ]
    assert layers_kept == pytest.approx([12 + 0.8 * 12, 12 + 0.25 * 12, 24])
    assert kv_bytes_per_token(spec("gemma-3-1b"), one, 2) == 26 * 2 * 1 * 256 * 2
    assert [kv_bytes_read(oss, one, 2, context) / layer for context in (100, 1000)] == [
        24 * 100,
        12 * 1000 + 12 * 128,
    ]


def test_a_kv_cache_fills_a_gpu_up_to_mem_fraction() -> None:
    llama = spec("llama-3.1-8b")
    generator = GeneratorConfig(tp=1, max_concurrency=128)
    planned = generator_memory(llama, generator, "bfloat16", WORK, H100)
    assert planned.static == pytest.approx(usable_static(generator, H100), abs=131072)
    assert planned.static <= usable_static(generator, H100)
    fixed = generator_memory(llama, GeneratorConfig(kv_cache_tokens=1000), "bfloat16", WORK, H100)
    assert fixed.kv_cache == 1000 * 131072
    shared = [
        kv_tokens(llama, generator, "bfloat16", WORK, H100, BesideCache(occupied=gib * GIB))
        for gib in (0, 30, 70)
    ]
    assert shared[1] == pytest.approx(
        (0.85 * (79.1 - 2.5 - 30) * GIB - planned.weights) / 131072, abs=1
    ), "SGLang's rule for a shared GPU"
    assert shared[0] == planned.kv_cache / 131072 and shared[2] == 128 + 2048, (
        "at least one request of full length"
    )


def test_a_kv_cache_on_a_cpu_is_as_large_as_requests_need() -> None:
    """Not a share of the machine: max_concurrency requests of the longest response and 256 tokens,
    or a whole context, in 4.4 GiB less the weights. What a run sets must not depend on plan.*,
    which it ignores.
    """
    tiny = spec("tiny-llama")
    large = spec("qwen2.5-0.5b")
    cpu = GPUS["cpu"]
    few = GeneratorConfig(max_concurrency=4)
    many = GeneratorConfig(max_concurrency=256)
    assert kv_tokens(tiny, few, "float32", WORK, cpu) == math.ceil(4 * (256 + 2048) * PAGE_SLACK)
    assert kv_tokens(tiny, few, "float32", replace(WORK, prompt_tokens=9000), cpu) == kv_tokens(
        tiny, few, "float32", WORK, cpu
    )
    short = replace(WORK, max_response_tokens=16)
    assert (
        kv_tokens(tiny, GeneratorConfig(max_concurrency=1), "float32", short, cpu)
        == tiny.max_position_embeddings
    )
    planned = generator_memory(large, many, "float32", WORK, cpu)
    assert planned.kv_cache < 256 * (256 + 2048) * kv_bytes_per_token(large, many, 4)
    assert planned.static <= usable_static(many, cpu)


def test_kv_cache_holds_the_longest_response_of_a_suite() -> None:
    suite = "eval.suites={long: {source: synthetic:chain, max_tokens: 9000}}"
    plan = resolve(
        load_config(
            "configs/quickstart.yaml",
            ["generator.kv_cache_tokens=null", "generator.max_concurrency=1", suite],
        )
    )
    tokens = [
        with_kv_caches(config, plan.spec, gpu=GPUS["cpu"]).generator.kv_cache_tokens or 0
        for config in (plan.config, without(plan))
    ]
    assert tokens[0] >= 9000 > tokens[1]


def without(plan: RunPlan) -> RunConfig:
    return replace(plan.config, eval=replace(plan.config.eval, suites={}))


def test_an_engine_prefills_in_chunks() -> None:
    """Chunks have SGLang's default size on such a GPU, or the size in its arguments.

    And a table takes 4 bytes a token of context.
    """
    llama = spec("llama-3.1-8b")
    plain = GeneratorConfig(max_concurrency=64)
    smaller = GeneratorConfig(max_concurrency=64, server_args={"chunked_prefill_size": 2048})
    unchunked = GeneratorConfig(max_concurrency=64, server_args={"chunked_prefill_size": -1})
    assert [prefill_tokens(llama, plain, GPUS[gpu]) for gpu in ("H100", "H200", "B200")] == [
        8192,
        8192,
        16384,
    ]
    assert prefill_tokens(llama, smaller, H100) == 2048
    assert prefill_tokens(llama, unchunked, H100) == 131072
    activations = [
        generator_memory(llama, generator, "bfloat16", WORK, H100).activations
        for generator in (plain, smaller)
    ]
    assert activations[0] - activations[1] == (8192 - 2048) * 2 * (4 * 4096 + 3 * 14336)
    assert (
        activations[0] == 8192 * 2 * (4 * 4096 + 3 * 14336) + 2 * 4 * 64 * 128256 + 4 * 65 * 131072
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.max_tokens=36800"],
            "it is 37056 tokens; they must be at most trainer.max_tokens_per_microbatch = 36864",
        ),
        (
            ["generator.kv_cache_tokens=33000"],
            "it is 33024 tokens; they must be at most generator.kv_cache_tokens = 33000",
        ),
        (
            ["plan.prompt_tokens=100000"],
            "it is 132768 tokens; they must be at most the model's context of 131072",
        ),
        (
            [
                "generator.kv_cache_tokens=null",
                "generator.tp=2",
                "generator.engines=64",
                "generator.mem_fraction=0.5",
            ],
            "what an engine of generator.tp=2 on H100 has for its KV cache "
            "(generator.mem_fraction=0.5): 2",
        ),
    ],
)
def test_longest_sequence_must_fit_microbatch_and_engine(
    overrides: list[str], message: str
) -> None:
    plan = resolve(load_config(CONFIGS / "70b_32k_aipo.yaml", overrides))
    with pytest.raises(ConfigError) as refused:
        check_longest(plan.config, plan.spec)
    assert any(message in problem for problem in refused.value.problems)
    assert all(problem.startswith("rollout.max_tokens=3") for problem in refused.value.problems)


def test_landing_memory_is_for_tensors_cut_by_columns() -> None:
    """The output projections of attention and MLP: whole from TP2 to TP1; every rank's half from
    TP8 to TP2; nothing from TP1, nor from TP8 to TP8.
    """
    llama = spec("llama-3.1-8b")
    cut_by_columns = 32 * (4096 * 4096 + 4096 * 14336) * 2
    sizes = {
        (trainer, engine): landing_bytes(
            llama, TrainerConfig(tp=trainer), GeneratorConfig(tp=engine), "bfloat16"
        )
        for trainer, engine in ((2, 1), (8, 2), (1, 1), (8, 8))
    }
    assert sizes == {(2, 1): cut_by_columns, (8, 2): cut_by_columns / 2, (1, 1): 0, (8, 8): 0}


@pytest.mark.parametrize(
    ("model", "trainer", "engine"),
    [
        ("qwen3-235b-a22b", {"tp": 8, "ep": 8, "dp": 8}, {"tp": 4}),
        # three dense layers, then 58 of experts
        ("deepseek-v3", {"tp": 8, "ep": 8, "etp": 2, "dp": 8}, {"tp": 4, "ep": 2}),
    ],
)
def test_landing_memory_of_all_layers_follows_from_two(
    model: str, trainer: dict, engine: dict
) -> None:
    topology = TrainerTopology(**trainer)
    one = GeneratorTopology(1, **engine)
    map = ReshardMap.build(
        trainer_layout(spec(model), topology, "bfloat16"),
        generator_layout(spec(model), one, "bfloat16"),
    )
    landing = landing_bytes(
        spec(model), TrainerConfig(**trainer), GeneratorConfig(**engine), "bfloat16"
    )
    assert landing == sum(copy.bytes for copy in landings(map, 0)) > 0


@pytest.mark.parametrize(
    ("config", "overrides", "gib"),
    [(_8B, [], 4.5), (_8B, ["weights.transport=nccl"], 0), ("8b_aipo", [], 0)],
    ids=["over several nodes", "by messages", "on one node"],
)
def test_landing_memory_is_counted_with_mooncake(
    config: str, overrides: list[str], gib: float
) -> None:
    plan = resolve(load_config(CONFIGS / f"{config}.yaml", overrides))
    planned = estimate(plan.config, plan.spec)
    assert planned.generator.landing / GIB == gib
    assert (
        planned.generator.total
        == sum(vars(planned.generator).values())
        >= planned.generator.static + gib * GIB
    )
    assert planned.inboxes == 0
    changing = estimate(
        resolve(load_config(CONFIGS / f"{config}.yaml", [*overrides, "weights.delta=auto"])).config,
        plan.spec,
    )
    assert changing.inboxes == (changing.generator.weights if gib else 0), (
        "eight ranks a node, each an eighth of its weights"
    )
    assert any("inboxes" in line for line in render(changing, None, [])) == (gib > 0)
