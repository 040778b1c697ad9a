"""Compares colocation, where trainer and engines take turns on the same GPUs, with separate GPUs
for each (docs/planner.md).

`python tests/tools/colocation.py` prints the table of that document. The times are the planner's.
Where the planner has no figure, the assumption favours colocation: see ASSUMED.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megarl.config.keys import with_settings
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.estimate.estimate import estimate, training_memory
from megarl.estimate.search import Search, search
from megarl.models import ModelSpec
from megarl.plan.resolve import resolve

CONFIG = Path(__file__).resolve().parents[2] / "configs/8b_aipo.yaml"
SETTINGS = (
    "rollout.prompts_per_step=128 rollout.n=8 trainer.max_tokens_per_microbatch=32768 "
    "generator.kv_cache_tokens=100000"
).split()
ROWS = [
    (512, 2048, 4),
    *(
        (*lengths, gpus)
        for lengths in ((512, 2048), (2048, 8192), (6000, 16384))
        for gpus in (8, 16, 32)
    ),
]
HOST_BYTES_PER_S = 50e9  # from a GPU to its host's memory, PCIe 5.0 x16
LEFT_GIB = 4.0  # the waiting side leaves this on a GPU: CUDA context, NCCL's buffers, graphs

ASSUMED = f"""\
Llama 3.1 8B on H100, 1024 responses a step. *Apart* is the best split that `--search` finds, one step behind. *In turn*, each side has the
fastest shape that fits on all GPUs, less {LEFT_GIB:g} GiB that the other side leaves there. \
Weights and optimizer move to the host's memory and back
at {HOST_BYTES_PER_S / 1e9:g} GB/s a GPU. The update takes no time, and neither does giving engines their memory back. Neither
counts waits for places in flight."""
HEAD = [
    "responses, mean / longest",
    "GPUs",
    "apart: train + generate",
    "step",
    "in turn: train, generate, move",
    "step on-policy",
    "step one behind",
]


def table() -> str:
    rows: list[list[object]] = [[*HEAD], ["---"] * len(HEAD)]
    for mean, longest, gpus in ROWS:
        plan = resolve(
            load_config(
                CONFIG, [*SETTINGS, f"plan.response_tokens={mean}", f"rollout.max_tokens={longest}"]
            )
        )
        plans, best = search(plan.config, plan.spec, gpus)
        apart = estimate(best, plan.spec)
        training = round(plans.theta * gpus)
        # One step behind: unfinished responses lose their KV cache while the trainer has the
        # memory, and are prefilled again.
        on_policy, behind = (
            in_turn(with_partial(plan.config, mode), plan.spec, gpus)
            for mode in ("block", "retract")
        )
        steps = [sum(parts) + apart.glue_s for parts in (on_policy, behind)]
        parts = ", ".join(f"{part:.1f}" for part in behind)
        cells = [
            f"{mean} / {longest}",
            gpus,
            f"{training} + {gpus - training}",
            f"{apart.step_s - apart.places_wait_s:.1f}",
            parts,
            *(f"{s:.1f}" for s in steps),
        ]
        rows.append(cells)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def with_partial(config: RunConfig, mode: str) -> RunConfig:
    return replace(config, async_=replace(config.async_, partial_rollout=mode))


def in_turn(config: RunConfig, spec: ModelSpec, gpus: int) -> tuple[float, float, float]:
    """Seconds of training, of generation, and of moving the trainer's memory out and back."""
    sides = Search(config, spec, gpus)
    usable_gpu = replace(sides.cluster.gpu, memory_gib=sides.cluster.gpu.memory_gib - LEFT_GIB)
    sides.cluster = replace(sides.cluster, gpu=usable_gpu)
    trainer = sides.trainer(gpus)
    generator = sides.generator(gpus)
    assert trainer is not None and generator is not None
    memory = training_memory(
        config, spec, with_settings(config, trainer.settings).trainer, usable_gpu
    )
    return (
        trainer.seconds,
        generator.seconds,
        2 * (memory.weights + memory.optimizer) / HOST_BYTES_PER_S,
    )


if __name__ == "__main__":
    print(f"{ASSUMED}\n\n{table()}")
