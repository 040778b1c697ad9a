"""`python tests/benchmarks packing`: a training step on packed sequences, compared with the same step on
sequences padded to a common length.

Lengths are lognormal, as lengths of answers are. The trainer is the real one on one rank:
Megatron's model, and a step with its optimizer. The padded way is that of trainers with rectangular
microbatches. Sequences are sorted by length. As many go into a microbatch as fit the token budget,
and each is padded with masked tokens to the longest of its microbatch. (The trainer then packs
these padded sequences.) Both ways take turns, and both must have the same gradient. On a CPU, times
are CPU times of the process, so that other work on the machine counts little.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist

from megarl.base.geometry import TrainerTopology
from megarl.base.rollout_types import TrainSequence
from megarl.config.errors import ConfigError
from megarl.config.schema import OptimizerConfig, TrainerConfig
from megarl.models.spec import ModelSpec
from megarl.trainer import cpu_support
from megarl.trainer.distributed import init_distributed

SPEC = ModelSpec(
    family="llama",
    num_layers=4,
    hidden_size=256,
    intermediate_size=704,
    num_attention_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=2048,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
SIGMA = 0.8
SHORTEST = 16
LONGEST = 1024  # of the distribution of lengths, in tokens
MEDIAN = 128
BUDGET = 4096  # most tokens of a microbatch
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PackingResult:
    device: str
    sequences: int
    tokens: int
    mean_length: float
    longest: int
    filled_fraction: float  # share of padding among the positions that the padded way computes
    packed_s: float  # median time of a step
    filled_s: float
    speedup: float  # median ratio over pairs of steps
    slowest_pair: float
    fastest_pair: float
    gradient_difference: float  # relative difference of the gradient's norm
    padded: int  # positions of padding that the packed way computes


def run(count: int, repeats: int, as_json: bool) -> None:
    """Prints the result.

    Raises ConfigError for fewer than one sequence or repeat, RuntimeError if the two ways differ.
    """
    for name, value in (("--sequences", count), ("--repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{name} {value}: must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MEGARL_TRAINER_STORE=f"{folder}/store"
        )
        device = init_distributed(TIMEOUT_S)
        try:
            result = measure(count, repeats, device)
        finally:
            dist.destroy_process_group()
    if as_json:
        print(json.dumps(asdict(result)))
        return
    r = result
    print(
        f"{r.sequences} sequences of {r.mean_length:.0f} tokens on average, at most {r.longest}; "
        f"{r.device}"
    )
    print(
        f"packed     {r.packed_s:8.3f} s a step, {r.tokens / r.packed_s:8.0f} tokens/s, "
        f"{r.padded} positions of padding"
    )
    print(
        f"filled up  {r.filled_s:8.3f} s a step, {r.tokens / r.filled_s:8.0f} tokens/s, "
        f"{r.filled_fraction:.0%} of positions are padding"
    )
    print(
        f"packed is {r.speedup:.2f} times as fast ({r.slowest_pair:.2f} to {r.fastest_pair:.2f} "
        f"over {repeats} pairs of steps)"
    )


def measure(count: int, repeats: int, device: torch.device) -> PackingResult:
    cpu_support.install()
    from megarl.algorithms.losses import nll_loss
    from megarl.trainer.step import MegatronTrainer

    settings = TrainerConfig(max_tokens_per_microbatch=BUDGET)
    # the weights do not change, so that all steps are equal
    still = OptimizerConfig(lr=0.0, weight_decay=0.0)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    trainer = MegatronTrainer(
        SPEC,
        TrainerTopology(),
        settings,
        dtype,
        1,
        total_steps=1000,
        timeout_s=TIMEOUT_S,
        optimizer=still,
    )
    trainer.init_random(0)
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(MEDIAN), SIGMA, count).clip(SHORTEST, LONGEST).astype(int)
    packed = [
        _sequence(random.integers(SPEC.vocab_size, size=length), length) for length in lengths
    ]
    filled = list(_filled(packed, BUDGET))

    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def step(sequences: list[TrainSequence]) -> tuple[float, float, int]:
        started = now()
        result = trainer.train_step(sequences, nll_loss, 1.0)
        return now() - started, result.grad_norm, result.padded

    # the first pair allocates memory
    pairs = [(step(packed), step(filled)) for _ in range(repeats + 1)][1:]
    ratios = [slow[0] / fast[0] for fast, slow in pairs]
    (_, packed_norm, padded), (_, filled_norm, _) = pairs[0]
    difference = abs(filled_norm / packed_norm - 1)
    if difference > (1e-2 if dtype == "bfloat16" else 1e-5):
        raise RuntimeError(
            f"the gradient's norm is {packed_norm} packed and {filled_norm} filled up"
        )
    tokens = sum(len(s.token_ids) for s in packed)
    return PackingResult(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU, one thread",
        sequences=count,
        tokens=tokens,
        mean_length=tokens / count,
        longest=int(lengths.max()),
        filled_fraction=1 - (tokens - count) / sum(len(s.token_ids) - 1 for s in filled),
        packed_s=statistics.median(fast[0] for fast, _ in pairs),
        filled_s=statistics.median(slow[0] for _, slow in pairs),
        speedup=statistics.median(ratios),
        slowest_pair=min(ratios),
        fastest_pair=max(ratios),
        gradient_difference=difference,
        padded=padded,
    )


def _filled(sequences: list[TrainSequence], budget: int) -> Iterator[TrainSequence]:
    """The sequences, each padded to the longest of its microbatch."""
    remaining = sorted(sequences, key=lambda sequence: -len(sequence.token_ids))
    while remaining:
        longest = len(remaining[0].token_ids)
        rows = max(1, budget // (longest - 1))
        yield from (_sequence(np.asarray(row.token_ids), longest) for row in remaining[:rows])
        remaining = remaining[rows:]


def _sequence(token_ids: np.ndarray, length: int) -> TrainSequence:
    """A sequence that learns all tokens but the first, padded with masked ones to `length`."""
    places = np.arange(length)
    zeros = np.zeros(length, np.float32)
    padded = np.zeros(length, np.int32)
    padded[: len(token_ids)] = token_ids
    return TrainSequence(padded, (places > 0) & (places < len(token_ids)), zeros, zeros)
