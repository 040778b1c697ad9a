"""Megatron's trainer on one GPU in bf16: tokens per second, MFU and peak memory, beside the
planner's predictions.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megarl.algorithms.base import LossOutput
from megarl.base.geometry import TrainerTopology
from megarl.base.rollout_types import TrainSequence
from megarl.bench.gpu.measure import Bench, llama
from megarl.config.schema import TrainerConfig
from megarl.estimate.hardware import GIB, GPUS, Cluster, Gpu
from megarl.estimate.memory import Workload, trainer_memory
from megarl.estimate.times import TrainModel
from megarl.models.registry import flops_per_token
from megarl.models.spec import ModelSpec
from megarl.trainer import cpu_support

DTYPE = "bfloat16"
# most difference of a log-prob: bf16 products of different shapes round differently
TOLERANCE = 0.1
WARM_UP = 2
STEPS = 5


def run(bench: Bench, size: str) -> None:
    spec = llama("toy" if bench.toy else size)
    settings = TrainerConfig(max_tokens_per_microbatch=64 if bench.toy else 16384)
    gpu = hardware(bench)
    planned = trainer_memory(spec, settings, DTYPE, gpu)
    if bench.cuda and planned.total > gpu.memory_gib * GIB:
        bench.row(
            f"not run: the planner says {planned.total / GIB:.1f} GiB, this GPU has "
            f"{gpu.memory_gib:.1f} GiB"
        )
        return
    batch = sequences(bench, spec)
    cpu_support.install()  # does nothing if there is CUDA
    from megarl.trainer.cpu_support import layer_spec
    from megarl.trainer.distributed import init_distributed, shutdown_distributed
    from megarl.trainer.step import MegatronTrainer

    with tempfile.TemporaryDirectory(prefix="megarl-gpu-") as folder:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MEGARL_TRAINER_STORE": f"{folder}/store",
        }
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        init_distributed(60)
        trainer = MegatronTrainer(
            spec, TrainerTopology(), settings, DTYPE, seed=1, total_steps=100, timeout_s=60
        )
        fill(trainer)
        bench.row(f"{size}, {layer_spec()} spec, packed; sequences a step", measured=len(batch))
        bench.row("tokens a step", measured=tokens(batch))
        agree(bench, trainer, batch)
        seconds, loss, padded = train(bench, trainer, batch)
        bench.row("positions of padding", measured=padded)
        flops = step_flops(spec, batch)
        bench.row(
            "loss of the first step, a token", measured=loss, planned=float(np.log(spec.vocab_size))
        )
        step_s = TrainModel(spec, settings, DTYPE, Cluster(gpu, 1)).seconds(workload(batch)).total
        bench.row("training, s a step", measured=seconds, planned=step_s)
        bench.row(
            "training, tokens/s", measured=tokens(batch) / seconds, planned=tokens(batch) / step_s
        )
        bench.row("model's TFLOP/s", measured=flops / seconds / 1e12, planned=flops / step_s / 1e12)
        bench.row("MFU, of the data sheet's peak", fraction=flops / seconds / gpu.bf16_flops)
        memory(bench, gpu, planned)
        product = bench.matmul_flops()
        bench.row(
            "measured matrix product, TFLOP/s",
            measured=product / 1e12,
            planned=gpu.bf16_flops / 1e12,
        )
        bench.row("MFU, of the measured matrix product", fraction=flops / seconds / product)
        started_s = time.perf_counter()
        trainer.token_logprobs(batch)
        bench.wait()
        bench.row("scoring, tokens/s", measured=tokens(batch) / (time.perf_counter() - started_s))
        shutdown_distributed()


def step_flops(spec: ModelSpec, batch: list[TrainSequence]) -> float:
    flops = 0.0
    for sequence in batch:
        length = len(sequence.token_ids)
        flops += 3 * length * flops_per_token(spec, length)
    return flops


def hardware(bench: Bench) -> Gpu:
    """The planner's entry for this GPU.

    For an unknown GPU, measured rates replace those of the data sheet.
    """
    if not bench.cuda:
        return GPUS["cpu"]
    properties = torch.cuda.get_device_properties(bench.device)
    names = [name for name in GPUS if name in properties.name.replace(" ", "")]
    if names:
        return GPUS[max(names, key=len)]  # GB200 is no B200
    product = bench.matmul_flops()
    unknown = Gpu(
        properties.name,
        properties.total_memory / GIB,
        bench.copy_bytes_per_s(),
        product,
        product,
        0.0,
        0.0,
    )
    torch.cuda.empty_cache()
    return unknown


def sequences(bench: Bench, spec: ModelSpec) -> list[TrainSequence]:
    """Sequences with typical lengths for RL: a prompt, and a response of lognormal length."""
    random = np.random.default_rng(0)
    prompt, median, longest, budget = (4, 12, 40, 256) if bench.toy else (256, 700, 8192, 65536)
    batch: list[TrainSequence] = []
    while tokens(batch) < budget:
        response = int(min(longest, max(1, median * random.lognormal(0.0, 0.8))))
        length = prompt + response
        ids = random.integers(0, spec.vocab_size, length, np.int32)
        zeros = np.zeros(length, np.float32)
        ones = np.ones(length, np.float32)
        batch.append(
            TrainSequence(
                token_ids=ids,
                loss_mask=np.arange(length) >= prompt,
                mu_logprobs=zeros,
                advantages=ones,
            )
        )
    return batch


def tokens(batch: Sequence[TrainSequence]) -> int:
    return sum(len(sequence.token_ids) for sequence in batch)


def workload(batch: Sequence[TrainSequence]) -> Workload:
    prompt = int(batch[0].loss_mask.argmax())
    response = tokens(batch) / len(batch) - prompt
    return Workload(
        len(batch),
        len(batch),
        prompt,
        response,
        max(len(sequence.token_ids) for sequence in batch) - prompt,
    )


def fill(trainer) -> None:
    """Fills the model with random weights, drawn on the device."""
    from megarl.trainer.optimizer import reload_masters

    torch.manual_seed(1)
    for values in trainer.local_parameters().values():
        if values.dim() > 1:
            values.normal_(0, 0.02)
        else:
            values.fill_(1)
    reload_masters(trainer.optimizer)


def agree(bench: Bench, trainer, batch: Sequence[TrainSequence]) -> None:
    """Checks that a sequence gets the same log-probs among others as alone."""
    by_length = sorted(batch, key=lambda sequence: len(sequence.token_ids))
    sample = by_length[:: max(1, len(batch) // 4)]
    together = trainer.token_logprobs(sample)
    separate = [trainer.token_logprobs([sequence])[0] for sequence in sample]
    difference = max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(together, separate)
    )
    row: dict[str, Any] = {
        "what": "log-probs among others and alone, largest difference",
        "measured": difference,
    }
    if not difference < TOLERANCE:  # NaN included
        row["failed"] = (
            f"log-probs of a sequence alone differ by {difference:.2g}, allowed is {TOLERANCE}"
        )
    bench.emit(row)


def train(bench: Bench, trainer, batch: Sequence[TrainSequence]) -> tuple[float, float, int]:
    """(median seconds of a step, loss of the first step per token, positions of padding)."""
    trained_tokens = sum(int(sequence.loss_mask.sum()) for sequence in batch)
    results = []
    seconds = []
    for _ in range(1 + 1 if bench.toy else WARM_UP + STEPS):
        bench.wait()
        started_s = time.perf_counter()
        results.append(trainer.train_step(batch, negative_logprobs, float(trained_tokens)))
        bench.wait()
        seconds.append(time.perf_counter() - started_s)
    return (
        statistics.median(seconds[1 if bench.toy else WARM_UP :]),
        results[0].loss,
        results[0].padded,
    )


def negative_logprobs(logprobs: torch.Tensor, microbatch) -> LossOutput:
    return LossOutput(-(microbatch.advantages * logprobs)[microbatch.loss_mask].sum(), {})


def memory(bench: Bench, gpu: Gpu, planned) -> None:
    """Memory peaks since the process began.

    The runtime's memory is what is used on the device beyond PyTorch's allocator.
    """
    parts = {name: value for name, value in vars(planned).items() if name != "runtime"}
    detail = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items())
    if not bench.cuda:
        bench.row("tensors at their peak, GiB", planned=sum(parts.values()) / GIB, note=detail)
        return
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.memory_reserved()
    bench.row(
        "tensors at their peak, GiB",
        measured=allocated / GIB,
        planned=sum(parts.values()) / GIB,
        note=detail,
    )
    bench.row("held by the allocator, GiB", measured=torch.cuda.max_memory_reserved() / GIB)
    bench.row("runtime, GiB", measured=(total - free - reserved) / GIB, planned=gpu.runtime_gib)
    bench.row("this GPU's memory, GiB", measured=total / GIB, planned=gpu.memory_gib)
