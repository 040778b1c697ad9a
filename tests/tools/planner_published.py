"""Published step times and throughputs, and what this planner makes of the same runs.

What a table leaves open is filled in here once, the same for all its rows, and named in ASSUMED. Rows 1, 3, 5, … of every table are
fitted on, rows 2, 4, 6, … are held out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.schema import GeneratorConfig, TrainerConfig
from megarl.estimate.hardware import CONSTANTS, GPUS, Cluster, Constants
from megarl.estimate.memory import Workload, trainer_held
from megarl.estimate.search import even_stages
from megarl.estimate.times import GenerateModel, TrainModel, TrainTime
from megarl.models import load_spec
from megarl.reshard.layout import ITEM_BYTES

H100 = Cluster(GPUS["H100"])
FP8_GEMM_GAIN = 0.75  # of fp8's doubled peak in training: scales, and products that stay in bf16


@dataclass(frozen=True)
class Fit(Constants):
    """The planner's constants, and what the published runs have beside them."""

    switch_s: float = 21.18  # colocated phases: waking, offloading, refitting, per step
    vllm_request_s: float = (
        5.392e-05  # per request and decoding step of vLLM: scheduler, log-probs, and a Python generator for each request
    )


FITTED = ("gemm_efficiency", "expert_pass_s", "decode_layer_s", "node_latency_s", "switch_s", "glue_s", "vllm_request_s")
FIT = Fit(**vars(CONSTANTS))
MODELS = Path(__file__).parents[2] / "configs" / "models"

ASSUMED = {
    "LlamaRL": "prompts of 128 tokens, responses of 512 on average and 2048 at most, microbatches of 16384 tokens, full recomputation, "
    "FSDP over the data-parallel ranks; groups of engines are GPUs / mp, and the 8 / 4 row has 136 generating GPUs, not 120, as only those "
    "make its 34 groups; asynchronous runs carry unfinished responses over (section 4); one factor for all rows, as only ratios count",
    "NeMo-RL": "prompts of 150 tokens, microbatches of the longest sequence; as its recipes (r0.6.0) have it: two scoring passes, of "
    "policy and reference, recomputation but for Qwen3-30B-A3B, half of the GPUs of runs one step off generate and a third of those eight "
    "steps off; the latter alone carry responses over; vLLM does not overlap its scheduler with the GPU",
    "Megatron-Bridge": "no recomputation",
}


@dataclass(frozen=True)
class Row:
    """One published run. `measured_s`: seconds of a step. Fields of the subclasses are the table's columns."""

    table: str
    name: str
    measured_s: float

    def predict_s(self, constants: Fit) -> float:
        raise NotImplementedError


class FsdpTrainModel(TrainModel):
    """LlamaRL's trainer, whose data-parallel ranks hold shards of the weights. This project's shard the optimizer alone.

    Each microbatch gathers the weights twice and reduces gradients once; one layer's transfers hide behind another's products.
    """

    def seconds(self, workload: Workload, *, extra_forwards: int = 0) -> TrainTime:
        plain = super().seconds(workload, extra_forwards=extra_forwards)
        count = math.ceil(workload.tokens / self.trainer.dp / self._rows(workload))
        (held,) = trainer_held(self.spec, self.trainer, self.dtype)
        transfers = count * 3 * self._group(self.trainer.dp, self.trainer.tp).gather_s(ITEM_BYTES[self.dtype] * held.dense)
        exposed = max(transfers / count / self.spec.num_layers, transfers - plain.compute)
        return replace(plain, data_parallel=exposed)


@dataclass(frozen=True)
class LlamaRlRow(Row):
    model: str
    trainer_gpus: int
    trainer_mp: int
    generator_gpus: int
    generator_mp: int
    concurrency: int  # of one engine
    fp8: bool = False
    synchronous: bool = False

    def predict_s(self, constants: Fit) -> float:
        spec = load_spec(MODELS / self.model)
        work = Workload(sequences=2048, prompts=512, prompt_tokens=128, response_tokens=512, max_response_tokens=2048)
        trainer = TrainerConfig(
            tp=self.trainer_mp, dp=self.trainer_gpus // self.trainer_mp, sequence_parallel=self.trainer_mp > 1,
            recompute=True, max_tokens_per_microbatch=16384,
        )  # fmt: skip
        generator = GeneratorConfig(
            engines=self.generator_gpus // self.generator_mp, tp=self.generator_mp, max_concurrency=self.concurrency,
            quantization="fp8_channel" if self.fp8 else None,
        )  # fmt: skip
        train = FsdpTrainModel(spec, trainer, "bfloat16", H100, constants).seconds(work).total
        batched = replace(constants, decode_request_s=0.0)  # its generator is a program of tensors
        engines = GenerateModel(spec, generator, "bfloat16", H100, batched, overlapped=False)
        generate = engines.seconds(work, carried_over=not self.synchronous).total
        return (train + generate if self.synchronous else max(train, generate)) + constants.glue_s


@dataclass(frozen=True)
class NemoRlRow(Row):
    model: str
    gpus: int
    longest: int
    mean: int
    sequences: int
    optimizer_steps: int
    generator_tp: int
    sizes: tuple[int, int, int, int]  # trainer's tp, cp, ep, pp
    generator_gpus: int | None = None  # None: both phases have all, in turns
    steps_off: int = 0

    def predict_s(self, constants: Fit) -> float:
        train_s, generate_s = self.sides_s(constants)
        step_s = max(train_s, generate_s) if self.steps_off else train_s + generate_s + constants.switch_s
        return step_s + constants.glue_s

    def sides_s(self, constants: Fit) -> tuple[float, float]:
        spec = load_spec(MODELS / self.model)
        tp, cp, ep, pp = self.sizes
        first, last = even_stages(spec.num_layers, pp)
        trainer = TrainerConfig(
            tp=tp, cp=cp, ep=ep, pp=pp, dp=(self.gpus - (self.generator_gpus or 0)) // (tp * cp * pp), sequence_parallel=tp > 1,
            recompute=self.model != _30B, first_stage_layers=first, last_stage_layers=last, max_tokens_per_microbatch=self.longest,
        )  # fmt: skip
        engines = (self.generator_gpus or self.gpus) // self.generator_tp
        in_flight = max(1, self.steps_off) * self.sequences // engines
        generator = GeneratorConfig(engines=engines, tp=self.generator_tp, max_concurrency=in_flight)
        work = Workload(self.sequences, self.sequences // 32, 150, self.mean - 150, self.longest - 150)
        train = TrainModel(spec, trainer, "bfloat16", H100, constants)
        of_one_update = replace(work, sequences=work.sequences / self.optimizer_steps)
        train_s = self.optimizer_steps * train.seconds(of_one_update, extra_forwards=2).total
        vllm = replace(constants, decode_request_s=constants.vllm_request_s)
        generate = GenerateModel(spec, generator, "bfloat16", H100, vllm, overlapped=False)
        return train_s, generate.seconds(work, carried_over=self.steps_off > 1).total


@dataclass(frozen=True)
class PretrainRow(Row):
    model: str
    gpus: int
    batch: int
    length: int
    sizes: tuple[int, int, int, int]  # tp, pp, vpp, ep

    def predict_s(self, constants: Fit) -> float:
        tp, pp, vpp, ep = self.sizes
        trainer = TrainerConfig(
            tp=tp, pp=pp, vpp=vpp, ep=ep, dp=self.gpus // (tp * pp), sequence_parallel=tp > 1, max_tokens_per_microbatch=self.length
        )
        work = Workload(self.batch, self.batch, self.length / 2, self.length / 2, self.length / 2)
        fp8 = Cluster(replace(H100.gpu, bf16_flops=FP8_GEMM_GAIN * H100.gpu.fp8_flops))
        return TrainModel(load_spec(MODELS / self.model), trainer, "bfloat16", fp8, constants).seconds(work).total


def _pretrain(name: str, tokens_per_s: float, model: str, gpus: int, batch: int, length: int, sizes: tuple[int, int, int, int]) -> Row:
    return PretrainRow("Megatron-Bridge", name, batch * length / gpus / tokens_per_s, model, gpus, batch, length, sizes)


_8B, _70B, _405B = "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"
_DEEPSEEK, _235B, _30B = "deepseek-v3", "qwen3-235b-a22b", "qwen3-30b-a3b"

# LlamaRL, table 3; NeMo-RL v0.6, docs/about/performance-summary.md; Megatron-Bridge, docs/performance-summary. Row order as published, but
# for the last two of NeMo-RL, which came later: no row changes its use.
TABLES: tuple[tuple[Row, ...], ...] = (
    (
        LlamaRlRow("LlamaRL", "8B baseline, 8 / 8", 22.45, _8B, 256, 8, 256, 8, 16, synchronous=True),
        LlamaRlRow("LlamaRL", "70B baseline, 8 / 8", 82.32, _70B, 256, 8, 256, 8, 16, synchronous=True),
        LlamaRlRow("LlamaRL", "405B baseline, 64 / 64", 635.8, _405B, 1024, 64, 1024, 64, 32, synchronous=True),
        LlamaRlRow("LlamaRL", "8B, 8 / 8", 12.22, _8B, 128, 8, 128, 8, 64),
        LlamaRlRow("LlamaRL", "8B, 8 / 1", 8.90, _8B, 128, 8, 128, 1, 32),
        LlamaRlRow("LlamaRL", "70B, 8 / 8", 26.19, _70B, 128, 8, 128, 8, 64),
        LlamaRlRow("LlamaRL", "70B, 8 / 4 fp8", 20.67, _70B, 120, 8, 136, 4, 16, fp8=True),
        LlamaRlRow("LlamaRL", "405B, 32 / 32", 240.8, _405B, 512, 32, 512, 32, 32),
        LlamaRlRow("LlamaRL", "405B, 16 / 16", 100.5, _405B, 512, 16, 512, 16, 48),
        LlamaRlRow("LlamaRL", "405B, 16 / 8 fp8", 59.5, _405B, 512, 16, 512, 8, 32, fp8=True),
    ),
    (
        NemoRlRow("NeMo-RL", "DeepSeek-V3, on-policy", 134, _DEEPSEEK, 256, 1536, 701, 512, 1, 32, (1, 1, 16, 16)),
        NemoRlRow("NeMo-RL", "DeepSeek-V3, 1 step off", 64.1, _DEEPSEEK, 512, 1536, 710, 512, 1, 32, (1, 1, 16, 16), 256, 1),
        NemoRlRow("NeMo-RL", "Qwen3-235B-A22B, on-policy", 395, _235B, 128, 8192, 5698, 512, 1, 16, (2, 2, 16, 8)),
        NemoRlRow("NeMo-RL", "Qwen3-235B-A22B, 1 step off", 231, _235B, 256, 8192, 5721, 512, 1, 8, (4, 1, 16, 8), 128, 1),
        NemoRlRow("NeMo-RL", "Qwen3-30B-A3B, on-policy", 192, _30B, 32, 4096, 3203, 2048, 4, 2, (1, 1, 8, 1)),
        NemoRlRow("NeMo-RL", "Qwen3-30B-A3B, 1 step off", 152, _30B, 32, 4096, 3201, 2048, 4, 2, (1, 1, 8, 2), 16, 1),
        NemoRlRow("NeMo-RL", "Qwen3-30B-A3B, 8 steps off", 34.5, _30B, 192, 4096, 3206, 2048, 4, 2, (1, 1, 8, 1), 64, 8),
    ),
    (
        _pretrain("Llama 3 70B, fp8", 1664, _70B, 64, 256, 8192, (4, 8, 5, 1)),
        _pretrain("Qwen3-30B-A3B, fp8", 8960, _30B, 16, 1024, 4096, (1, 1, 1, 16)),
    ),
)  # fmt: skip
