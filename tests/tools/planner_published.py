"""Published step times and throughputs, and the planner's predictions for the same runs.

ASSUMED lists what the tables do not say; an assumption is the same for all rows of a table.
Constants are fitted on rows 1, 3, 5, … of every table. Rows 2, 4, 6, … are held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.config.schema import GeneratorConfig, TrainerConfig
from megarl.estimate.hardware import CONSTANTS, GPUS, Cluster, Constants
from megarl.estimate.memory import Workload, trainer_elements
from megarl.estimate.search import even_stages
from megarl.estimate.times import GenerateModel, TrainModel, TrainTime
from megarl.models import load_spec
from megarl.reshard.layout import ITEM_BYTES

H100 = Cluster(GPUS["H100"])
B300 = Cluster(GPUS["B300"])
GB200 = Cluster(GPUS["GB200"], 4)


@dataclass(frozen=True)
class Fit(Constants):
    """The planner's constants, and further ones that only the published runs need."""

    switch_s: float = 23.42  # of colocated phases, a step: waking, offloading, refitting
    vllm_request_s: float = (
        # of vLLM, per request and decoding step: scheduler, log-probs, and a Python generator for
        # each request
        5.479e-05
    )


FITTED = (
    "gemm_efficiency",
    "expert_pass_s",
    "decode_layer_s",
    "node_latency_s",
    "switch_s",
    "glue_s",
    "vllm_request_s",
)
FIT = Fit(**vars(CONSTANTS))
MODELS = Path(__file__).parents[2] / "configs" / "models"

ASSUMED = {
    "LlamaRL": "prompts of 128 tokens, responses of 512 on average and 2048 at most, microbatches "
    "of 16384 tokens, full recomputation, "
    "FSDP over the data-parallel ranks; groups of engines are GPUs / mp, and the 8 / 4 row has "
    "136 generating GPUs, not 120, as only those "
    "make its 34 groups; asynchronous runs carry unfinished responses over (section 4); one "
    "factor for all rows, as only ratios count",
    "NeMo-RL": "prompts of 150 tokens, microbatches of the longest sequence; as its recipes "
    "(r0.6.0) have it: two scoring passes, of "
    "policy and reference, recomputation but for Qwen3-30B-A3B, half of the GPUs of runs one step "
    "off generate and a third of those eight "
    "steps off; the latter alone carry responses over; vLLM does not overlap its scheduler with "
    "the GPU",
    "Megatron-Bridge": "no recomputation; as its recipes have it: products of layers in fp8, and "
    "beside them tensor-parallel sums (Llama) "
    "or the exchange with experts (Qwen3-235B-A22B on H100), which goes to each node once "
    "elsewhere (flex); as many layers as stages "
    "divide",
    "NeMo-RL on GB200": "as above; experts' exchange goes to each node once but for runs one step "
    "off and Qwen3-30B-A3B",
}


@dataclass(frozen=True)
class Row:
    """One published run.

    `measured_s`: seconds of a step. Fields of the subclasses are the table's columns.
    """

    table: str
    name: str
    measured_s: float

    def predict_s(self, constants: Fit) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class RlRow(Row):
    """With a trainer and engines."""

    def sides(self, constants: Fit) -> Sides:
        raise NotImplementedError

    def predict_s(self, constants: Fit) -> float:
        return self.sides(constants).step_s()


@dataclass(frozen=True)
class Sides:
    """A published run's trainer and engines."""

    train_s: Callable[[Workload], float]
    engines: GenerateModel
    work: Workload
    steps_off: int  # 0: the phases take turns
    carried_over: bool
    rest_s: float  # that overlaps with nothing

    def step_s(self) -> float:
        train_s = self.train_s(self.work)
        generate_s = self.engines.seconds(self.work, carried_over=self.carried_over).total
        return (max(train_s, generate_s) if self.steps_off else train_s + generate_s) + self.rest_s


class FsdpTrainModel(TrainModel):
    """LlamaRL's trainer: its data-parallel ranks hold shards of the weights.

    MegaRL's ranks shard only the optimizer.

    Each microbatch gathers the weights twice and reduces gradients once. One layer's transfers
    overlap with another layer's matrix products.
    """

    def seconds(self, workload: Workload, *, extra_forwards: int = 0) -> TrainTime:
        plain = super().seconds(workload, extra_forwards=extra_forwards)
        count = math.ceil(workload.tokens / self.trainer.dp / self._rows(workload))
        (elements,) = trainer_elements(self.spec, self.trainer, self.dtype)
        transfers = (
            count
            * 3
            * self._group(self.trainer.dp, self.trainer.tp).gather_s(
                ITEM_BYTES[self.dtype] * elements.dense
            )
        )
        exposed = max(transfers / count / self.spec.num_layers, transfers - plain.compute)
        return replace(plain, data_parallel=exposed)


@dataclass(frozen=True)
class LlamaRlRow(RlRow):
    model: str
    trainer_gpus: int
    trainer_mp: int
    generator_gpus: int
    generator_mp: int
    concurrency: int  # of one engine
    fp8: bool = False
    synchronous: bool = False

    def sides(self, constants: Fit) -> Sides:
        spec = load_spec(MODELS / self.model)
        work = Workload(
            sequences=2048,
            prompts=512,
            prompt_tokens=128,
            response_tokens=512,
            max_response_tokens=2048,
        )
        trainer = TrainerConfig(
            tp=self.trainer_mp, dp=self.trainer_gpus // self.trainer_mp,
            sequence_parallel=self.trainer_mp > 1,
            recompute=True, max_tokens_per_microbatch=16384,
        )  # fmt: skip
        generator = GeneratorConfig(
            engines=self.generator_gpus // self.generator_mp, tp=self.generator_mp,
            max_concurrency=self.concurrency,
            quantization="fp8_channel" if self.fp8 else None,
        )  # fmt: skip
        train = FsdpTrainModel(spec, trainer, "bfloat16", H100, constants)
        # LlamaRL's generator has no Python work a request
        batched = replace(constants, decode_request_s=0.0)
        engines = GenerateModel(spec, generator, "bfloat16", H100, batched, overlapped=False)
        alone = not self.synchronous
        return Sides(
            lambda work: train.seconds(work).total,
            engines,
            work,
            int(alone),
            alone,
            constants.glue_s,
        )


@dataclass(frozen=True)
class NemoRlRow(RlRow):
    model: str
    gpus: int
    longest: int
    mean: int
    sequences: int
    optimizer_steps: int
    generator_tp: int
    sizes: tuple[int, int, int, int]  # trainer's tp, cp, ep, pp
    generator_gpus: int | None = None  # None: both phases use all GPUs, in turns
    steps_off: int = 0
    cluster: Cluster = H100
    fp8: bool = False

    def sides(self, constants: Fit) -> Sides:
        spec = load_spec(MODELS / self.model)
        tp, cp, ep, pp = self.sizes
        first, last = even_stages(spec.num_layers, pp)
        trainer = TrainerConfig(
            tp=tp, cp=cp, ep=ep, pp=pp, dp=(self.gpus - (self.generator_gpus or 0)) // (tp * cp * pp), sequence_parallel=tp > 1,
            recompute=self.model != _30B, first_stage_layers=first, last_stage_layers=last,
            max_tokens_per_microbatch=self.longest,
            megatron=(FLEX if self.cluster == GB200 and self.model != _30B and not self.steps_off else {}) | (FP8 if self.fp8 else {}),
        )  # fmt: skip
        count = (self.generator_gpus or self.gpus) // self.generator_tp
        in_flight = max(1, self.steps_off) * self.sequences // count
        quantization = "fp8_block" if self.fp8 else None
        generator = GeneratorConfig(
            engines=count,
            tp=self.generator_tp,
            max_concurrency=in_flight,
            quantization=quantization,
        )
        work = Workload(
            self.sequences, self.sequences // 32, 150, self.mean - 150, self.longest - 150
        )
        train = TrainModel(spec, trainer, "bfloat16", self.cluster, constants)

        def train_s(work: Workload) -> float:
            of_one_update = replace(work, sequences=work.sequences / self.optimizer_steps)
            return self.optimizer_steps * train.seconds(of_one_update, extra_forwards=2).total

        vllm = replace(constants, decode_request_s=constants.vllm_request_s)
        engines = GenerateModel(spec, generator, "bfloat16", self.cluster, vllm, overlapped=False)
        rest_s = constants.glue_s + (0.0 if self.steps_off else constants.switch_s)
        return Sides(train_s, engines, work, self.steps_off, self.steps_off > 1, rest_s)


class OverlappedTrainModel(TrainModel):
    """Megatron-Bridge's trainer, which overlaps some communication with matrix products.

    MegaRL's does not.
    """

    def seconds(self, workload: Workload, *, extra_forwards: int = 0) -> TrainTime:
        plain = super().seconds(workload, extra_forwards=extra_forwards)
        # the tensor-parallel sums overlap with their matrix products
        if self.trainer.megatron.get("tp_comm_overlap"):
            plain = replace(plain, tensor_parallel=max(0.0, plain.tensor_parallel - plain.compute))
        # overlaps with another microbatch
        if self.trainer.megatron.get("overlap_moe_expert_parallel_comm"):
            plain = replace(plain, expert_parallel=max(0.0, plain.expert_parallel - plain.compute))
        return plain


FLEX = {"moe_token_dispatcher_type": "flex"}
SUMS_BESIDE = {"tp_comm_overlap": True}
EXPERTS_BESIDE = {"overlap_moe_expert_parallel_comm": True}
FP8 = {"fp8": "e4m3"}


@dataclass(frozen=True)
class PretrainRow(Row):
    cluster: Cluster
    model: str
    gpus: int
    batch: int
    microbatch: int  # sequences
    length: int
    sizes: tuple[int, int, int, int, int]  # tp, cp, pp, vpp, ep
    megatron: dict[str, Any]

    def predict_s(self, constants: Fit) -> float:
        tp, cp, pp, vpp, ep = self.sizes
        spec = load_spec(MODELS / self.model)
        spec = replace(spec, num_layers=pp * vpp * math.ceil(spec.num_layers / (pp * vpp)))
        trainer = TrainerConfig(
            tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, dp=self.gpus // (tp * cp * pp),
            sequence_parallel=tp > 1,
            max_tokens_per_microbatch=self.microbatch * self.length, megatron=self.megatron,
        )  # fmt: skip
        work = Workload(self.batch, self.batch, self.length / 2, self.length / 2, self.length / 2)
        return (
            OverlappedTrainModel(spec, trainer, "bfloat16", self.cluster, constants)
            .seconds(work)
            .total
        )


def _pretrain(
    name: str, tokens_per_s: float, cluster: Cluster, model: str, gpus: int, batch: int,
    microbatch: int, length: int,
    sizes: tuple[int, int, int, int, int], recipe: dict[str, Any],
) -> Row:  # fmt: skip
    title = f"{name}, {gpus} {cluster.gpu.name}"
    step_s = batch * length / gpus / tokens_per_s
    return PretrainRow(
        "Megatron-Bridge",
        title,
        step_s,
        cluster,
        model,
        gpus,
        batch,
        microbatch,
        length,
        sizes,
        FP8 | recipe,
    )


_8B = "llama-3.1-8b"
_70B = "llama-3.1-70b"
_405B = "llama-3.1-405b"
_DEEPSEEK = "deepseek-v3"
_235B = "qwen3-235b-a22b"
_30B = "qwen3-30b-a3b"

# Sources: LlamaRL, table 3; NeMo-RL v0.6, docs/about/performance-summary.md; Megatron-Bridge,
# docs/performance-summary-archive.md, 26.04.01, of the families that MegaRL trains. Rows that were
# added later stand at the end of their table, so that every other row stays fitted or held out.
TABLES: tuple[tuple[Row, ...], ...] = (
    (
        LlamaRlRow("LlamaRL", "8B baseline, 8 / 8", 22.45, _8B, 256, 8, 256, 8, 16,
        synchronous=True),
        LlamaRlRow("LlamaRL", "70B baseline, 8 / 8", 82.32, _70B, 256, 8, 256, 8, 16,
        synchronous=True),
        LlamaRlRow("LlamaRL", "405B baseline, 64 / 64", 635.8, _405B, 1024, 64, 1024, 64, 32,
        synchronous=True),
        LlamaRlRow("LlamaRL", "8B, 8 / 8", 12.22, _8B, 128, 8, 128, 8, 64),
        LlamaRlRow("LlamaRL", "8B, 8 / 1", 8.90, _8B, 128, 8, 128, 1, 32),
        LlamaRlRow("LlamaRL", "70B, 8 / 8", 26.19, _70B, 128, 8, 128, 8, 64),
        LlamaRlRow("LlamaRL", "70B, 8 / 4 fp8", 20.67, _70B, 120, 8, 136, 4, 16, fp8=True),
        LlamaRlRow("LlamaRL", "405B, 32 / 32", 240.8, _405B, 512, 32, 512, 32, 32),
        LlamaRlRow("LlamaRL", "405B, 16 / 16", 100.5, _405B, 512, 16, 512, 16, 48),
        LlamaRlRow("LlamaRL", "405B, 16 / 8 fp8", 59.5, _405B, 512, 16, 512, 8, 32, fp8=True),
    ),
    (
        NemoRlRow("NeMo-RL", "DeepSeek-V3, on-policy", 134, _DEEPSEEK, 256, 1536, 701, 512, 1, 32,
        (1, 1, 16, 16)),
        NemoRlRow("NeMo-RL", "DeepSeek-V3, 1 step off", 64.1, _DEEPSEEK, 512, 1536, 710, 512, 1, 32,
        (1, 1, 16, 16), 256, 1),
        NemoRlRow("NeMo-RL", "Qwen3-235B-A22B, on-policy", 395, _235B, 128, 8192, 5698, 512, 1, 16,
        (2, 2, 16, 8)),
        NemoRlRow("NeMo-RL", "Qwen3-235B-A22B, 1 step off", 231, _235B, 256, 8192, 5721, 512, 1, 8,
        (4, 1, 16, 8), 128, 1),
        NemoRlRow("NeMo-RL", "Qwen3-30B-A3B, on-policy", 192, _30B, 32, 4096, 3203, 2048, 4, 2,
        (1, 1, 8, 1)),
        NemoRlRow("NeMo-RL", "Qwen3-30B-A3B, 1 step off", 152, _30B, 32, 4096, 3201, 2048, 4, 2,
        (1, 1, 8, 2), 16, 1),
        NemoRlRow("NeMo-RL", "Qwen3-30B-A3B, 8 steps off", 34.5, _30B, 192, 4096, 3206, 2048, 4, 2,
        (1, 1, 8, 1), 64, 8),
        NemoRlRow("NeMo-RL", "DeepSeek-V3, on-policy, 512 GPUs", 111, _DEEPSEEK, 512, 1536, 697,
        512, 1, 32, (1, 1, 16, 16)),
        NemoRlRow("NeMo-RL", "Qwen3-235B-A22B, on-policy, 256 GPUs", 312, _235B, 256, 8192, 5713,
        512, 1, 16, (2, 2, 16, 8)),
        NemoRlRow("NeMo-RL", "DeepSeek-V3, 1 step off, fp8", 59.2, _DEEPSEEK, 512, 1536, 721, 512,
        1, 16, (1, 1, 16, 16), 256, 1, fp8=True),
    ),
    (
        _pretrain("Llama 3 70B", 1664, H100, _70B, 64, 256, 1, 8192, (4, 1, 8, 5, 1), SUMS_BESIDE),
        _pretrain("Qwen3-30B-A3B", 8960, H100, _30B, 16, 1024, 1, 4096, (1, 1, 1, 1, 16), FLEX),
        _pretrain("Llama 3.1 405B", 328, H100, _405B, 1024, 1536, 1, 8192, (8, 2, 8, 8, 1),
        SUMS_BESIDE),
        _pretrain("Qwen3-235B-A22B", 1712, H100, _235B, 256, 8192, 1, 4096, (2, 1, 8, 4, 32),
        EXPERTS_BESIDE),
        _pretrain("Llama 3 70B", 3712, GB200, _70B, 64, 256, 1, 8192, (2, 1, 4, 5, 1), SUMS_BESIDE),
        _pretrain("Llama 3.1 405B", 800, GB200, _405B, 256, 1536, 1, 8192, (4, 1, 16, 8, 1),
        SUMS_BESIDE),
        _pretrain("DeepSeek-V3", 4256, GB200, _DEEPSEEK, 256, 4096, 1, 4096, (1, 1, 4, 4, 64),
        FLEX),
        _pretrain("DeepSeek-V3", 3456, B300, _DEEPSEEK, 256, 4096, 2, 4096, (1, 1, 8, 1, 8), FLEX),
        _pretrain("Qwen3-30B-A3B", 26112, GB200, _30B, 8, 512, 4, 4096, (1, 1, 1, 1, 8), FLEX),
        _pretrain("Qwen3-30B-A3B", 30720, B300, _30B, 8, 512, 8, 4096, (1, 1, 1, 1, 8), FLEX),
        _pretrain("Qwen3-235B-A22B", 5680, GB200, _235B, 256, 8192, 1, 4096, (1, 1, 8, 3, 32),
        FLEX),
        _pretrain("Qwen3-235B-A22B", 5936, B300, _235B, 256, 8192, 2, 4096, (1, 1, 8, 1, 8), FLEX),
    ),
    (
        NemoRlRow(
            "NeMo-RL on GB200", "DeepSeek-V3, on-policy, 128 GPUs", 108, _DEEPSEEK, 128, 1536, 711,
            512, 1, 32, (1, 1, 16, 8), cluster=GB200
        ),
        NemoRlRow(
            "NeMo-RL on GB200", "DeepSeek-V3, on-policy, 256 GPUs", 98.7, _DEEPSEEK, 256, 1536, 700,
            512, 1, 32, (1, 1, 16, 8),
            cluster=GB200,
        ),
        NemoRlRow(
            "NeMo-RL on GB200", "DeepSeek-V3, 1 step off", 61.7, _DEEPSEEK, 256, 1536, 708, 512, 1,
            16, (1, 1, 16, 8), 128, 1, GB200
        ),
        NemoRlRow(
            "NeMo-RL on GB200", "Qwen3-235B-A22B, on-policy, 64 GPUs", 286, _235B, 64, 8192, 5709,
            512, 1, 8, (2, 2, 16, 4), cluster=GB200
        ),
        NemoRlRow(
            "NeMo-RL on GB200", "Qwen3-235B-A22B, on-policy, 128 GPUs", 345, _235B, 128, 8192, 5693,
            512, 1, 8, (2, 2, 16, 4), cluster=GB200
        ),
        NemoRlRow("NeMo-RL on GB200", "Qwen3-235B-A22B, 1 step off", 278, _235B, 128, 8192, 5705,
        512, 1, 8, (4, 1, 16, 4), 64, 1, GB200),
        NemoRlRow("NeMo-RL on GB200", "Qwen3-30B-A3B, on-policy", 221, _30B, 16, 4096, 3199, 2048,
        4, 1, (1, 1, 16, 1), cluster=GB200),
        NemoRlRow("NeMo-RL on GB200", "Qwen3-30B-A3B, 1 step off", 301, _30B, 16, 4096, 3197, 2048,
        4, 1, (1, 1, 8, 1), 8, 1, GB200),
    ),
)  # fmt: skip
