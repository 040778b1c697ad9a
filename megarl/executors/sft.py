"""Supervised warm start with the trainer of the RL run: next-token prediction on the response tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from megarl.algorithms.nll import nll_loss
from megarl.data.sft import sft_batches
from megarl.observe.metrics import MetricsWriter
from megarl.observe.status import StatusBoard
from megarl.plan.resolve import RunPlan
from megarl.plan.weights import WARM_START, warm_start_record
from megarl.trainer.distributed import init_distributed, shutdown_distributed
from megarl.trainer.make import make_trainer


def run_sft_rank(plan: RunPlan, rank: int) -> None:
    """One trainer rank. Rank 0 writes `run_dir`/sft/metrics.jsonl; all ranks together export to `sft.output`."""
    config, run_dir = plan.config, Path(plan.config.run_dir) / "sft"
    status = StatusBoard(run_dir, f"sft.{rank}")
    status.set("building the model")
    init_distributed(config.timeouts.collective_s)
    budget = config.sft.max_tokens_per_microbatch or config.trainer.max_tokens_per_microbatch
    trainer = make_trainer(
        plan.spec,
        plan.trainer_topology,
        replace(config.trainer, max_tokens_per_microbatch=budget),
        config.model.dtype,
        config.seed,
        total_steps=config.sft.steps,
        timeout_s=config.timeouts.collective_s,
        lora=config.lora,
        optimizer=config.sft.optimizer,
    )
    if config.model.random_init:
        trainer.init_random(config.seed)
    else:
        trainer.load_hf(config.model.path)
    metrics = MetricsWriter(run_dir, config.observe.tensorboard) if rank == 0 else None
    started = time.monotonic()
    for step, sequences in enumerate(sft_batches(config, plan.spec)):
        status.set(f"step {step}")
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        result = trainer.train_step(sequences, nll_loss, float(tokens))
        result.check_tokens(tokens)
        if metrics is not None:
            wall_s = time.monotonic() - started
            samples_per_s = (step + 1) * len(sequences) / wall_s
            values = {"loss": result.loss, "entropy/mean": result.entropy, "grad_norm": result.grad_norm}
            metrics.write(step, {"wall_s": wall_s, **values, "samples_per_s": samples_per_s})
    status.set("exporting")
    trainer.export_hf(config.sft.output, config.model.path, {WARM_START: warm_start_record(config)})
    if metrics is not None:
        metrics.close()
    shutdown_distributed()
