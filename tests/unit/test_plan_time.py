"""The planner's times against counts by hand, against a simulation, and against a run's map."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.load import load_config
from megarl.config.schema import GeneratorConfig, RunConfig, TrainerConfig
from megarl.estimate.estimate import estimate, unfinished
from megarl.estimate.hardware import CONSTANTS, GPUS, Cluster
from megarl.estimate.memory import (
    AdapterElements,
    WeightElements,
    Workload,
    generator_weights,
    scoring_passes,
    trainer_elements,
)
from megarl.estimate.places import longest_of_prompt, wait_s
from megarl.estimate.report import render
from megarl.estimate.times import (
    CHANGED,
    CollectiveGroup,
    GenerateModel,
    TrainModel,
    TrainTime,
    balanced_sync_s,
    sync_s,
)
from megarl.models import load_spec
from megarl.models.registry import flops_per_token
from megarl.plan.topologies import trainer_topology
from megarl.reshard.forwarding import planned_relays
from megarl.reshard.layout import generator_layout, parameter_count, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.report import to_json
from megarl.reshard.schedule import WRITE_S

CONFIGS = Path(__file__).parents[2] / "configs"
H100 = Cluster(GPUS["H100"])
LLAMA_8B = load_spec(CONFIGS / "models/llama-3.1-8b")
LLAMA_70B = load_spec(CONFIGS / "models/llama-3.1-70b")
QWEN_30B = load_spec(CONFIGS / "models/qwen3-30b-a3b")


def config(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


@pytest.mark.parametrize(
    ("spec", "active"), [(LLAMA_8B, 7.50e9), (LLAMA_70B, 69.5e9), (QWEN_30B, 3.03e9)]
)
def test_flops_of_a_token_are_two_per_active_parameter(spec: object, active: float) -> None:
    """All parameters except the embedding.

    For Qwen3-30B-A3B these are the 3.3 billion active ones, minus 0.3 for the embedding.
    """
    assert flops_per_token(spec, 0) == pytest.approx(2 * active, rel=0.01)


def test_attention_is_half_of_a_square() -> None:
    """Scores and values of 32 heads of 128 over 4096 positions: 4 s^2 d per head and layer, half of
    it masked.
    """
    length = 4096
    layers = 32
    heads = 32
    width = 128
    flops = layers * heads * 4 * length**2 * width / 2
    assert length * (
        flops_per_token(LLAMA_8B, length) - flops_per_token(LLAMA_8B, 0)
    ) == pytest.approx(flops)


@pytest.mark.parametrize("length", [64, 1000])
def test_token_attends_to_its_prefix_or_its_window(length: int) -> None:
    """The mean is over a sequence's positions, and over gpt-oss-20b's layers: every other one has a
    window of 128.
    """
    spec = load_spec(CONFIGS / "models/gpt-oss-20b")
    window = np.minimum(np.arange(length) + 0.5, 128).mean()
    attended = spec.attention.attended(spec.attention_layers, length)
    assert attended == pytest.approx((length / 2 + window) / 2, rel=1e-4)
    assert LLAMA_8B.attention.attended(32, length) == length / 2


def step(
    spec: object = LLAMA_70B, work: Workload | None = None, cluster: Cluster = H100, **sizes: object
) -> TrainTime:
    trainer = TrainerConfig(
        **({"tp": 8, "sequence_parallel": True, "max_tokens_per_microbatch": 8192} | sizes)
    )
    return TrainModel(spec, trainer, "bfloat16", cluster).seconds(
        work or Workload(512, 128, 512, 512, 1024)
    )


def test_a_pipeline_pays_its_bubble() -> None:
    """The bubble is (pp - 1) / microbatches of the remaining time, and less with virtual stages."""
    work = Workload(128, 32, 4096, 4096, 4096)  # 128 microbatches of one sequence
    # only the bubble counts
    endless = replace(H100, gpus_per_node=64, gpu=replace(H100.gpu, nvlink_bytes_per_s=1e18))
    alone = step(work=work, cluster=endless)
    piped = step(work=work, cluster=endless, pp=4)
    virtual = step(work=work, cluster=endless, pp=4, vpp=5)
    work_s = piped.compute + piped.tensor_parallel
    assert alone.pipeline == 0
    assert piped.pipeline == pytest.approx(3 / 128 * work_s, rel=0.01)
    assert virtual.pipeline < piped.pipeline / 4  # a fifth, plus the starts of messages
    assert piped.compute == pytest.approx(alone.compute / 4, rel=0.05)
    assert step(work=work, pp=4).pipeline > piped.pipeline  # plus the messages between stages


def test_attention_costs_the_square_of_each_length() -> None:
    """If half of the tokens are in sequences of 1,000 and half in sequences of 9,000, they cost as
    much as in sequences of 5,000. For 40,000 tokens on one H100, a layer of 8B takes 2 * 32 * (128
    + 128) * 5000 / 2 FLOPs a token forward, and 2.5 times that backward (FlashAttention-2).
    """
    work = Workload(64, 16, 1000, 9000, 9000)
    assert work.tokens_per_square == 10_000
    lengths = [1000] * 9 + [9000]
    assert sum(n * n for n in lengths) / sum(lengths) == 5000
    one = TrainModel(LLAMA_8B, TrainerConfig(), "bfloat16", H100)
    long = one._attention_s(40_000, 5000)
    short = one._attention_s(40_000, 1000)
    rate = 0.7816 * 989e12 / (1 + 256 / 40_000 + 256 / 512)
    assert long == 5 * short == pytest.approx(40_000 * 2 * 32 * 256 * 5000 / 2 / rate, rel=1e-3)
    flat = Workload(64, 16, 10, 9990, 9990)

    def compute_s(recompute: bool) -> float:
        trainer = TrainerConfig(max_tokens_per_microbatch=10_000, recompute=recompute)
        return TrainModel(LLAMA_8B, trainer, "bfloat16", H100).seconds(flat).compute

    assert compute_s(recompute=True) - compute_s(recompute=False) == pytest.approx(
        64 * 32 * (one._layer_s(10_000) + one._attention_s(10_000, 10_000))
    )


def test_lengths_that_vary() -> None:
    """Against random numbers: exponential lengths with mean 2,000, cut at 8,000."""
    work = Workload(64, 16, 100, 2000 * (1 - np.exp(-4)), 8000)
    drawn = np.minimum(np.random.default_rng(0).exponential(2000, 2_000_000), 8000)
    assert work.mean_square == pytest.approx(np.mean(drawn**2), rel=5e-3)
    assert work.tokens_per_square == pytest.approx(
        np.sum((100 + drawn) ** 2) / np.sum(100 + drawn), rel=5e-3
    )
    # 1 + 2 + ... + R, over all steps
    assert work.decoded == pytest.approx(np.sum(drawn**2 / 2) / np.sum(drawn), rel=5e-3)
    assert Workload(64, 16, 100, 8000, 8000).decoded == 4000


def test_keys_and_values_go_around_while_attention_computes() -> None:
    """8 key-value heads of 128 over tp 8 are 512 bytes a token.

    They take three ring steps between nodes, over one NIC.
    """
    trainer = TrainerConfig(tp=8, cp=4, sequence_parallel=True)
    model = TrainModel(LLAMA_70B, trainer, "bfloat16", H100)
    ring_s = 3 * (10e-6 + 32768 / 4 * 512 / (0.75 * 50e9))
    assert model._context_s(32768, attention_s=0) == pytest.approx(ring_s)
    assert model._context_s(32768, attention_s=ring_s / 2) == pytest.approx(ring_s / 2)
    assert model._context_s(32768, model._attention_s(32768, 32768)) == 0
    assert TrainModel(LLAMA_70B, TrainerConfig(tp=8), "bfloat16", H100)._context_s(8192, 0) == 0


def test_one_long_sequence_slows_a_batch_of_short_ones() -> None:
    """Data parallelism does not cut a sequence, so the long one's rank works longest: 128k tokens
    beside 255 sequences of 1,000 on 16 ranks.
    """
    model = TrainModel(
        LLAMA_8B, TrainerConfig(dp=16, max_tokens_per_microbatch=131072), "bfloat16", H100
    )

    class OneLong(Workload):
        straggler = 131_072 - 500  # the longest sequence of a step, only in this test

    work = OneLong(256, 64, 500, (255 * 500 + 130_572) / 256, 130_572)
    # attention's FLOPs per token and token of length, over all other FLOPs
    square = 32 * 2 * 32 * 256 / 2 / (2 * 7.5047e9)
    share = 256 / 16 * work.tokens_per_sequence * (1 + square * work.tokens_per_square)
    assert model._longest_share(work) == pytest.approx(
        131_072 * (1 + square * 131_072) / share, rel=1e-3
    )
    assert model._longest_share(work) > 2
    assert model._longest_share(replace(work, sequences=100 * 256)) == 1


def test_gradients_are_reduced_behind_the_last_backward_pass() -> None:
    """70B on tp 8, dp 4: 8.8e9 elements a rank, with one NIC each.

    The exposed time is what the backward pass does not cover, and at least one bucket.
    """
    model = TrainModel(
        LLAMA_70B, TrainerConfig(tp=8, dp=4, sequence_parallel=True), "bfloat16", H100
    )
    (elements,) = trainer_elements(LLAMA_70B, model.trainer, "bfloat16")
    group = CollectiveGroup(4, 8, H100, CONSTANTS)
    reduced = group.gather_s(4 * elements.total)
    gathered = group.gather_s(2 * elements.total)
    apart = replace(model, trainer=replace(model.trainer, ddp={"overlap_grad_reduce": False}))
    assert apart._data_s(elements, 10.0) == pytest.approx(reduced + gathered)
    assert model._data_s(elements, reduced / 4) == pytest.approx(0.75 * reduced + gathered)
    assert model._data_s(elements, 10.0) == pytest.approx(
        40e6 / elements.total * reduced + gathered
    )
    # an all-reduce of gradients, and no weights to gather
    plain = replace(model, trainer=replace(model.trainer, zero=0))
    assert plain._data_s(elements, 0.0) == pytest.approx(
        group.all_reduce_s(4 * elements.total), rel=1e-3
    )
    cpu = replace(model, cluster=Cluster(GPUS["cpu"]))
    assert cpu._data_s(elements, 1e9) > replace(
        cpu, trainer=replace(cpu.trainer, ddp={"overlap_grad_reduce": True})
    )._data_s(elements, 1e9)


def test_computing_hides_the_gathers_of_sharded_parameters() -> None:
    """Weights are gathered twice and gradients reduced once for each microbatch: 2 + 2 + 4 bytes an
    element. Of one layer's, nothing hides the first and the last.
    """
    trainer = TrainerConfig(tp=8, dp=4, sequence_parallel=True, zero=3)
    model = TrainModel(LLAMA_70B, trainer, "bfloat16", H100)
    (elements,) = trainer_elements(LLAMA_70B, trainer, "bfloat16")
    group = CollectiveGroup(4, 8, H100, CONSTANTS)
    gather_s = group.gather_s(2 * elements.total)
    reduce_s = group.gather_s(4 * elements.total)
    assert model._gathers_s(1, 0.0, 0.0) == pytest.approx(2 * gather_s + reduce_s)
    assert model._gathers_s(1, 1e3, 1e3) == pytest.approx((2 * gather_s + reduce_s) / 80)
    assert model._gathers_s(2, gather_s / 4, 1e3) == pytest.approx(
        1.5 * gather_s + (gather_s + reduce_s) / 80
    )
    assert model._data_s(elements, 0.0) == 0.0
    few = step(dp=4, zero=3, max_tokens_per_microbatch=32768).data_parallel
    many = step(dp=4, zero=3, max_tokens_per_microbatch=4096).data_parallel
    assert few < many
    adapters = AdapterElements(trained=[WeightElements(1000, 0)], additional=[1000])
    assert replace(model, adapters=adapters)._gathers_s(1, 0.0, 0.0) == pytest.approx(2 * gather_s)


def test_what_costs_more() -> None:
    base = step(dp=4)
    # the head is not recomputed
    assert step(dp=4, recompute=True).compute == pytest.approx(base.compute * 4 / 3, rel=0.01)
    assert step(dp=8).compute == pytest.approx(base.compute / 2, rel=0.05)
    assert step(tp=4, dp=8).tensor_parallel < base.tensor_parallel
    apart = {"overlap_grad_reduce": False}
    # 8 bytes an element against 6
    assert step(dp=4, zero=0, ddp=apart).data_parallel > step(dp=4, ddp=apart).data_parallel
    assert 100 < base.tflops < 989 * CONSTANTS.gemm_efficiency


def test_batch_costs_as_much_as_its_optimizer_steps() -> None:
    """Each step has its own gradients, bubble and update.

    A batch is scored once, however many epochs.
    """
    work = Workload(512, 128, 512, 512, 1024)
    sizes = {"dp": 4, "pp": 2}
    quarter = step(work=replace(work, sequences=128), **sizes)
    several = step(work=work, minibatches=4, epochs=3, **sizes)
    for part in ("compute", "tensor_parallel", "pipeline", "data_parallel", "optimizer", "total"):
        assert getattr(several, part) == pytest.approx(12 * getattr(quarter, part)), part
    assert several.tflops == pytest.approx(quarter.tflops)

    def scoring_s(**cut: int) -> float:
        model = TrainModel(
            LLAMA_70B,
            TrainerConfig(tp=8, dp=4, max_tokens_per_microbatch=8192, **cut),
            "bfloat16",
            H100,
        )
        return model.seconds(work, extra_forwards=1).compute - model.seconds(work).compute

    assert (
        scoring_s(minibatches=4, epochs=3)
        == pytest.approx(scoring_s(minibatches=4))
        == pytest.approx(scoring_s())
    )


def test_number_of_scoring_passes_follows_the_algorithm() -> None:
    """The proximal policy, unless it is the policy itself.

    For pairs, policy and reference, and the policy in every epoch.
    """
    decoupled = "algorithm.ratio=decoupled"
    several = "trainer.minibatches=2"
    penalised = "algorithm.kl_coef=0.1"
    passes = {
        (): 0,
        (several,): 0,
        (decoupled,): 0,
        (decoupled, several): 1,
        (penalised,): 1,
        (penalised, decoupled, several): 2,
    }
    in_reward = "algorithm.kl=reward"
    pairs = "algorithm.name=online_dpo"
    passes |= {
        (penalised, in_reward): 2,
        (penalised, in_reward, decoupled, several): 2,
        (pairs,): 2,
        (pairs, "trainer.epochs=3"): 4,
    }
    passes |= {("algorithm.name=copg", "algorithm.beta=0"): 0}
    assert {
        overrides: scoring_passes(config("8b_aipo", *overrides)) for overrides in passes
    } == passes
    once = estimate(config("8b_aipo", several), LLAMA_8B)
    again = estimate(config("8b_aipo", several, decoupled), LLAMA_8B)
    assert again.train.compute > once.train.compute and again.trainer == once.trainer, (
        "it takes time, and no memory"
    )


def test_experts_cost_what_they_compute_and_send() -> None:
    inside = step(QWEN_30B, tp=1, dp=16, ep=8, sequence_parallel=False)
    across = step(QWEN_30B, tp=1, dp=16, ep=16, sequence_parallel=False)
    dense = step(LLAMA_8B, tp=1, dp=16, sequence_parallel=False)
    # NVLink instead of the NIC
    assert dense.expert_parallel == 0 < inside.expert_parallel < across.expert_parallel / 2


def test_collectives_by_where_the_ranks_stand() -> None:
    node = CollectiveGroup(8, 1, H100, CONSTANTS)
    nodes = CollectiveGroup(64, 1, H100, CONSTANTS)
    strided = CollectiveGroup(16, 8, H100, CONSTANTS)
    assert (node.nodes, nodes.nodes, strided.nodes) == (1, 8, 16)
    assert node.bytes_per_s == pytest.approx(0.75 * 450e9)
    assert nodes.bytes_per_s == pytest.approx(0.75 * 400e9)  # eight NICs in parallel
    assert strided.bytes_per_s == pytest.approx(0.75 * 50e9)  # one member a node, with its own NIC
    assert node.all_reduce_s(1e9) == pytest.approx(2 * 7 / 8 * 1e9 / node.bytes_per_s, rel=0.01)
    assert (
        CollectiveGroup(1, 1, H100, CONSTANTS).all_reduce_s(1e9)
        == 0
        == CollectiveGroup(1, 1, H100, CONSTANTS).all_to_all_s(1e9)
    )


def test_lengths_have_the_mean_they_were_given() -> None:
    for mean, longest in ((512, 2048), (1024, 2048), (1900, 2048), (100, 4096)):
        work = Workload(64, 16, 128, mean, longest)
        positions = (np.arange(20000) + 0.5) * longest / 20000
        # E integrates the survival function
        assert np.mean([work.survivors(t) for t in positions]) * longest == pytest.approx(
            mean, rel=1e-3
        )
    assert Workload(64, 16, 128, 2048, 2048).straggler == 2048


def simulated_steps(lengths: np.ndarray, slots: int) -> int:
    """The decoding steps of an engine that fills a free slot at once, simulated request by request
    as an independent reference.
    """
    waiting = list(lengths)
    running = []
    steps = 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop())
        span = min(running)
        steps += span
        running = [tokens - span for tokens in running if tokens > span]
    return steps


@pytest.mark.parametrize(("requests", "slots"), [(32, 32), (128, 16), (128, 64), (512, 32)])
def test_generation_against_a_simulation(requests: int, slots: int) -> None:
    """All decoding steps take equally long, so time counts steps.

    The result is for the slowest of 16 engines, over many draws.
    """
    engines = 16
    work = Workload(16 * requests, 4 * requests, 128, 400, 2048)
    flat = replace(CONSTANTS, decode_step_s=1e6, decode_layer_s=0.0)  # only the overhead counts
    model = GenerateModel(
        LLAMA_8B,
        GeneratorConfig(engines=engines, tp=1, max_concurrency=slots),
        "bfloat16",
        H100,
        flat,
    )
    random = np.random.default_rng(0)
    draws = (
        np.minimum(random.exponential(work.scale, (12, engines, requests)), 2048).astype(int) + 1
    )
    simulated = np.mean(
        [max(simulated_steps(lengths, slots) for lengths in draw) for draw in draws]
    )
    assert model.seconds(work).total / 1e6 == pytest.approx(simulated, rel=0.12)


@pytest.mark.parametrize("slots", [32, 8])
def test_the_tail_works_on_what_is_left(slots: int) -> None:
    """If only matrix products count, time is proportional to the responses' tokens, however they
    are spread over steps.
    """
    work = Workload(64, 16, 128, 400, 2048)
    slow = replace(CONSTANTS, decode_gemm_efficiency=1e-9)
    model = GenerateModel(
        LLAMA_8B, GeneratorConfig(engines=2, max_concurrency=slots), "bfloat16", H100, slow
    )
    times = model.seconds(work)
    of_one_token = model.decode_step(1, 128 + 400 / 2).compute
    assert times.full + times.tail == pytest.approx(32 * 400 * of_one_token, rel=0.1)


def test_carrying_responses_over_leaves_no_tail() -> None:
    model = GenerateModel(
        LLAMA_8B, GeneratorConfig(engines=16, max_concurrency=64), "bfloat16", H100
    )
    work = Workload(2048, 512, 128, 512, 2048)
    waiting = model.seconds(work)
    carried = model.seconds(work, carried_over=True)
    assert carried.tail == 0 < waiting.tail
    assert carried.total < waiting.total
    assert carried.full == pytest.approx(2048 / 16 * 512 / 64 * carried.token_s)


def test_responses_that_are_prefilled_again() -> None:
    """Once a step, for 64 running requests, with 70B in fp8 on 8 H100, at half of 8 * 1979e12
    FLOP/s.
    """
    model = GenerateModel(
        LLAMA_70B,
        GeneratorConfig(tp=8, max_concurrency=64, quantization="fp8_block"),
        "bfloat16",
        H100,
    )
    work = Workload(512, 128, 200, 1000, 1000)  # equal lengths, so on average half done: 700 tokens
    prefilled_once = model.seconds(work, carried_over=True, prefilled_again=False).prefill
    again = model.seconds(work, carried_over=True, prefilled_again=True).prefill
    flops = 2 * (parameter_count(LLAMA_70B) - 128256 * 8192) + 80 * 2 * 64 * 256 * 1400 / 2
    assert again - prefilled_once == pytest.approx(64 * 700 * flops / (8 * 1979e12 / 2), rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "prefills"),
    [("block", False), ("in_flight", False), ("retract", True), ("resume", True)],
)
def test_partial_rollouts_that_prefill_again(mode: str, prefills: bool) -> None:
    assert unfinished(config("70b_32k_aipo", f"async.partial_rollout={mode}")) == {
        "carried_over": mode != "block",
        "prefilled_again": prefills,
        "ahead": 1,
    }
    synchronous = unfinished(
        config("70b_32k_aipo", f"async.partial_rollout={mode}", "async.capacity=0")
    )
    assert not synchronous["carried_over"]
    assert not synchronous["prefilled_again"]


def test_engines_run_no_more_responses_than_may_be_ahead() -> None:
    """With 512 responses a step on 8 engines, one step ahead, 64 run at once, however many an
    engine could run.
    """
    model = GenerateModel(
        LLAMA_8B, GeneratorConfig(engines=8, max_concurrency=256), "bfloat16", H100
    )
    work = Workload(512, 128, 128, 512, 2048)
    concurrency = [
        model.seconds(work, carried_over=True, ahead=ahead).concurrency
        for ahead in (1, 2, math.inf)
    ]
    assert concurrency == [64, 128, 256]


def test_decoding_is_bound_by_memory_then_by_products() -> None:
    model = GenerateModel(LLAMA_70B, GeneratorConfig(tp=8), "bfloat16", H100)
    few = model.decode_step(1, 512)
    many = model.decode_step(4096, 512)
    assert few.memory > few.compute
    assert many.compute > few.memory
    weights = (parameter_count(LLAMA_70B) - 128256 * 8192) * 2 / 8
    assert few.memory == pytest.approx(weights / (3.35e12 * CONSTANTS.hbm_efficiency), rel=0.01)
    fp8 = GenerateModel(
        LLAMA_70B, GeneratorConfig(tp=8, quantization="fp8_block"), "bfloat16", H100
    )
    assert fp8.decode_step(1, 512).memory == pytest.approx(few.memory / 2, rel=0.05)


def test_a_decoding_step_samples_and_reads_the_cache() -> None:
    """128 requests have 32,000 tokens each, and 8B keeps 131,072 bytes a token.

    Sampling takes 15.5 passes over 128,256 fp32 logits.
    """
    model = GenerateModel(LLAMA_8B, GeneratorConfig(), "bfloat16", H100)
    short = model.decode_step(128, 0)
    long = model.decode_step(128, 32_000)
    assert long.memory - short.memory == pytest.approx(128 * 32_000 * 131_072 / (0.8 * 3.35e12))
    assert (
        long.sampling == short.sampling == pytest.approx(15.5 * 4 * 128 * 128_256 / (0.8 * 3.35e12))
    )
    assert model.decode_step(128, 0).collectives == 0


def test_the_scheduler_works_while_the_gpu_computes() -> None:
    model = GenerateModel(LLAMA_8B, GeneratorConfig(), "bfloat16", H100)
    few = model.decode_step(8, 100)
    many = replace(model, generator=GeneratorConfig(tp=8)).decode_step(64, 100)
    gpu = few.memory + few.sampling + few.launches
    assert few.host == pytest.approx(2e-3 + 8 * 20e-6)
    assert few.total == pytest.approx(gpu)
    # the scheduler limits a small model on many GPUs
    assert many.total == many.host == pytest.approx(2e-3 + 64 * 20e-6)
    for apart in (
        replace(model, overlapped=False),
        replace(model, generator=GeneratorConfig(server_args={"disable_overlap_schedule": True})),
    ):
        assert apart.decode_step(8, 100).total == pytest.approx(gpu + few.host)
    # like the launcher's engines on CPUs
    assert not replace(model, cluster=Cluster(GPUS["cpu"])).decode_step(8, 100).overlapped


def test_a_batch_of_tokens_wakes_more_experts() -> None:
    model = GenerateModel(QWEN_30B, GeneratorConfig(tp=2), "bfloat16", H100)
    one_token = model.decode_step(1, 0).memory
    all_ = model.decode_step(1000, 0).memory
    assert one_token < all_ / 5
    assert all_ == pytest.approx(
        (model.weights.streamed + model.weights.expert) / (0.8 * 3.35e12), rel=1e-3
    )


def test_too_small_a_cache_lowers_the_concurrency() -> None:
    work = Workload(1024, 256, 1000, 1000, 2000)

    def times_with(kv_cache_tokens: int):
        generator = GeneratorConfig(max_concurrency=256, kv_cache_tokens=kv_cache_tokens)
        return GenerateModel(LLAMA_8B, generator, "bfloat16", H100).seconds(work)

    roomy = times_with(10**7)
    tight = times_with(64_000)
    assert roomy.concurrency == 256
    assert tight.concurrency == 32
    assert tight.total > roomy.total


@pytest.mark.parametrize("name", ["8b_aipo_256", "70b_aipo", "405b_aipo"])
def test_the_update_is_that_of_the_map(name: str) -> None:
    run_config = config(name)
    spec = load_spec(Path(CONFIGS.parent) / run_config.model.spec)
    source = trainer_layout(spec, trainer_topology(run_config.trainer), "bfloat16")
    destination = generator_layout(
        spec,
        run_config.generator.topology,
        "bfloat16",
        quantization=run_config.generator.quantization,
    )
    reshard_map = ReshardMap.build(source, destination)
    whole_s, delta, of_writes_s = sync_s(spec, run_config, H100)
    facts = to_json(
        *planned_relays(reshard_map, run_config.weights.relay, run_config.generator.tp),
        changed=CHANGED,
    )
    assert (whole_s, delta) == pytest.approx((facts["predicted_s"], facts["delta_predicted_s"]))
    assert delta < 0.06 * whole_s
    engine_bytes = reshard_map.summary().bytes / destination.world_size
    of_bytes_s = balanced_sync_s(engine_bytes, destination.world_size, source.world_size, H100)
    assert whole_s == pytest.approx(max(of_bytes_s, of_writes_s), rel=0.06)
    busiest = max(len(reshard_map.writes_from(rank)) for rank in (0, source.world_size - 1))
    assert of_writes_s >= busiest * WRITE_S


@pytest.mark.parametrize("relay, most", [("auto", 16), ("engines", 2)])
def test_the_update_from_few_trainer_ranks_to_many_engines(relay: str, most: int) -> None:
    sizes = [
        "trainer.tp=8",
        "trainer.pp=1",
        "trainer.dp=1",
        "generator.tp=8",
        "generator.engines=16",
        "generator.quantization=null",
    ]
    run_config = config("70b_aipo", *sizes, f"weights.relay={relay}")
    spec = load_spec(Path(CONFIGS.parent) / run_config.model.spec)
    engine_bytes = generator_weights(spec, run_config.generator, "bfloat16").total
    whole_s, delta, _ = sync_s(spec, run_config, H100)
    assert delta < whole_s < 1.05 * most * engine_bytes / H100.gpu.nic_bytes_per_s
    relaying = 16 if relay == "engines" else 0
    # the embedding is one piece
    assert whole_s == pytest.approx(balanced_sync_s(engine_bytes, 128, 8, H100, relaying), rel=0.1)


def test_longest_of_independent_responses_is_a_harmonic_sum() -> None:
    work = Workload(256, 64, 100, 500, 10**4)  # hardly any response reaches the cut
    longest = longest_of_prompt(work, 4, 0.0)
    assert longest == pytest.approx(500 * (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.01)
    assert longest_of_prompt(work, 1, 0.0) == 500
    assert 500 < longest_of_prompt(work, 4, 0.9) < longest
    assert longest_of_prompt(work, 4, 1.0) == pytest.approx(500, rel=0.03)


@pytest.mark.parametrize(
    ("places", "ahead", "waited_s"),
    [
        # all places are full when a batch is taken; then 64 exp(-30 / 20) prompts stay too long
        (64, 1, 20 * math.exp(-1.5)),
        (640, 1, 20 * math.exp(-1.5)),  # no more begin
        (16, math.inf, 64 / 16 * 20 - 30),  # always full, and too few
        (64, math.inf, 0.0),
        (64, 4, 0.0),
    ],
)
def test_wait_for_places_in_closed_form(places: int, ahead: float, waited_s: float) -> None:
    waited = wait_s(prompts=64, places=places, ahead=ahead, rollout_s=20, step_s=32, pause_s=2)
    assert waited == pytest.approx(waited_s)


@pytest.mark.parametrize("share_gpus", ["true", "false"])
@pytest.mark.parametrize("capacity", [0, 1])
@pytest.mark.parametrize(("prompt", "response"), [(128, 1000), (1024, 30)])
def test_longer_side_binds(share_gpus: str, capacity: int, prompt: int, response: int) -> None:
    run = config(
        "one_gpu",
        f"cluster.share_gpus={share_gpus}",
        f"async.capacity={capacity}",
        f"plan.prompt_tokens={prompt}",
        f"plan.response_tokens={response}",
        "trainer.recompute=false",
        "rollout.max_tokens=4096",
    )
    estimated = estimate(run, load_spec(run.model.spec))
    longer = "training" if response == 30 else "generation"
    times_s = {"training": estimated.train.total, "generation": estimated.generate.total}
    assert max(times_s, key=times_s.get) == longer
    assert not estimated.overfull and estimated.binding.startswith(f"{longer}: ")


def test_adapters_sent_alone_count_as_their_bytes() -> None:
    spec = load_spec(CONFIGS / "models/qwen2.5-1.5b")
    full = estimate(config("one_gpu"), spec)
    adapters = estimate(config("one_gpu", "lora.rank=32"), spec)
    merged = estimate(config("one_gpu", "lora.rank=32", "weights.delta=auto"), spec)
    assert full.delta_sync_s < full.sync_s
    assert adapters.sends_adapters and adapters.delta_sync_s == adapters.sync_s
    assert adapters.sync_s - adapters.control_s < 0.1 * (full.sync_s - full.control_s)
    assert not merged.sends_adapters and merged.delta_sync_s == full.delta_sync_s
    text = "\n".join(render(adapters, None, ()))
    assert "the busiest rank's adapters" in text and "have changed" not in text


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "take 6.9 of 37.7 GiB of generator.mem_fraction"),
        (
            ["generator.kv_cache_tokens=1500000"],
            "need 42.9 GiB, 5.3 GiB more than the 37.7 GiB of generator.mem_fraction",
        ),
        (
            ["cluster.gpu=RTX4090"],
            "need 2.9 GiB, but the trainer beside them takes 32.3 of the GPU's 23.6 GiB",
        ),
    ],
)
def test_engines_memory_reads_as_one_sentence(overrides: list[str], line: str) -> None:
    run = config("one_gpu", *overrides)
    lines = list(render(estimate(run, load_spec(run.model.spec)), None, ()))
    assert f"           engines' weights and KV cache {line}" in lines


def test_checkpoint_takes_its_bytes_at_its_rate() -> None:
    spec = load_spec(CONFIGS / "models/qwen2.5-1.5b")
    run = config("one_gpu", "plan.checkpoint_gb_s=0.5")
    checkpoint_bytes = 12 * parameter_count(spec)  # float32 weights and two moments
    assert estimate(run, spec).checkpoint_s == pytest.approx(checkpoint_bytes / 0.5e9)
    eight = config("one_gpu", "trainer.dp=8", "trainer.zero=1", "launch.ranks_per_node=8")
    assert estimate(eight, spec).checkpoint_s == pytest.approx(checkpoint_bytes / 2e9)
    lora = config("one_gpu", "lora.rank=32")
    assert estimate(lora, spec).checkpoint_s < 0.1 * estimate(run, spec).checkpoint_s
