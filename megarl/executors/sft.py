"""Supervised warm start with the trainer of the RL run: next-token prediction on the response
tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.algorithms.losses import nll_loss
from megarl.base.rollout_types import TrainSequence
from megarl.config.errors import RunError
from megarl.data import contents
from megarl.data.batches import sft_batches, sft_held_out
from megarl.executors.policy import load_checkpoint, make_policy
from megarl.messaging.rendezvous import Rendezvous
from megarl.observe.metrics import MetricsWriter
from megarl.observe.status import StatusBoard
from megarl.plan.checkpoints import checkpoint_path, prune_checkpoints, scored_path
from megarl.plan.resolve import RunPlan
from megarl.plan.weights import WARM_START, warm_start_record
from megarl.trainer import checkpoint
from megarl.trainer.distributed import init_distributed, shutdown_distributed
from megarl.trainer.step import MegatronTrainer


def run_sft_rank(plan: RunPlan, rank: int, rendezvous: Rendezvous) -> None:
    """One trainer rank.

    Rank 0 writes `run_dir`/sft/metrics.jsonl; all ranks together export to `sft.output`.

    With `sft.eval`, the loss on it is measured before the first step, every `sft.every` steps, and
    after the last. If `sft.keep` is best, weights with a lower loss than all before are exported
    beside `sft.output` at once, and moved there at the end. Every `sft.save_every` steps a
    checkpoint is saved, from which an interrupted warm start resumes.

    With `sft.score_every`, the ranks end at its next multiple: they save a checkpoint, and export
    to `scored_path`. The launcher evaluates that, and starts them again.
    """
    config = plan.config
    run_dir = Path(plan.config.run_dir) / "sft"
    status = StatusBoard(run_dir, f"sft.{rank}").for_work()
    status.set("building the model")
    init_distributed(config.timeouts.collective_s)
    start_step = rendezvous.start_step
    best = f"{config.sft.output}.best"
    trainer, lowest = _begun(plan, rendezvous.checkpoint, best)
    held_out = sft_held_out(config, plan.spec)
    record = {
        WARM_START: warm_start_record(config),
        contents.FILE: (run_dir / contents.FILE).read_text(encoding="utf-8"),
    }
    metrics = MetricsWriter(run_dir, resume_step=start_step) if rank == 0 else None
    start = time.monotonic()
    for step, sequences in enumerate(sft_batches(config, plan.spec, start_step), start_step):
        status.set(f"step {step}")
        if held_out and step == 0:
            eval_losses = {"before/eval/loss": mean_loss(trainer, held_out, config.sft.batch_size)}
        else:
            eval_losses = {}
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        result = trainer.train_step(sequences, nll_loss, float(tokens))
        result.check_tokens(tokens)
        steps_done = step + 1
        is_last = steps_done == config.sft.steps
        if held_out and (is_last or _is_due(steps_done, config.sft.every)):
            status.set(f"held-out loss after step {step}")
            eval_losses["eval/loss"] = loss = mean_loss(trainer, held_out, config.sft.batch_size)
            if config.sft.keep == "best" and loss < lowest:
                lowest = loss
                trainer.export_hf(best, config.model.path, record)
        if metrics is not None:
            wall_s = time.monotonic() - start
            samples_per_s = (step + 1 - start_step) * len(sequences) / wall_s
            row = {
                "wall_s": wall_s,
                "loss": result.loss,
                "entropy/mean": result.entropy,
                "grad_norm": result.grad_norm,
                **eval_losses,
                "samples_per_s": samples_per_s,
            }
            metrics.write(step, row)
        ends_here = _is_due(steps_done, config.sft.score_every) and not is_last
        if ends_here:  # before the checkpoint, which promises these weights
            status.set(f"exporting after step {step}")
            trainer.export_hf(scored_path(config, steps_done), config.model.path, record)
        if ends_here or (_is_due(steps_done, config.sft.save_every) and not is_last):
            status.set(f"saving after step {step}")
            if metrics is not None:
                metrics.sync()
            files = {name: text.encode() for name, text in record.items()}
            state = {"step": steps_done, "lowest": str(lowest)}
            checkpoint.save(trainer, checkpoint_path(run_dir, steps_done), state, files)
            if rank == 0:
                prune_checkpoints(run_dir, keep=1)
        if ends_here:
            if metrics is not None:
                metrics.close()
            shutdown_distributed()
            return
    status.set("exporting")
    if lowest < math.inf:
        if rank == 0:
            Path(best).rename(config.sft.output)
    else:
        trainer.export_hf(config.sft.output, config.model.path, record)
    if metrics is not None:
        metrics.close()
        prune_checkpoints(run_dir, keep=0)
    shutdown_distributed()


def _is_due(steps_done: int, every: int) -> bool:
    return every > 0 and steps_done % every == 0


def _begun(plan: RunPlan, path: str, best: str) -> tuple[MegatronTrainer, float]:
    """Returns (trainer, lowest held-out loss so far).

    The trainer has the weights of the checkpoint at `path`, or initial weights if `path` is empty.
    The weights with the lowest loss are at `best`; if there are none, the loss is infinity.
    """
    config = plan.config
    trainer = make_policy(plan, config.sft.steps, config.sft.optimizer)
    if config.model.random_init:
        trainer.init_random(config.seed)
    else:
        trainer.load_hf(config.model.path)
    if not path:
        return trainer, math.inf
    lowest = float(load_checkpoint(trainer, path)["lowest"])
    if lowest < math.inf and not Path(best).is_dir():
        raise RunError(
            f"{best}: the best weights so far are gone; to begin anew, remove {Path(path).parent}"
        )
    return trainer, lowest


def mean_loss(trainer: MegatronTrainer, sequences: Sequence[TrainSequence], size: int) -> float:
    """The mean negative log-prob of the learned tokens, `size` sequences at a time. Collective."""
    parts = (sequences[first : first + size] for first in range(0, len(sequences), size))
    total = sum(
        float(row.sum(dtype="float64")) for part in parts for row in trainer.token_logprobs(part)
    )
    return -total / sum(int(sequence.loss_mask.sum()) for sequence in sequences)
