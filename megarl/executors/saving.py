"""Saving in a run: checkpoints to resume from, and exports of the weights for other uses.

They are written during the following steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from megarl.config.schema import RunConfig
from megarl.evaluation.scores import spared_steps
from megarl.observe.status import TraceWriter
from megarl.plan.checkpoints import (
    checkpoint_path,
    export_path,
    make_room,
    prune_checkpoints,
    remove_whole,
)
from megarl.trainer import checkpoint
from megarl.trainer.hf_io import Writing
from megarl.trainer.step import MegatronTrainer


class Saving:
    """Begins checkpoints and exports when they are due, and completes them.

    Every method with a step argument is collective.

    At most one checkpoint and one export are being written. If the next is due earlier, the step
    waits until the last is complete.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: MegatronTrainer,
        trace: TraceWriter,
        saved_step: int,
        critic: MegatronTrainer | None = None,
    ):
        """`saved_step`: the step of the checkpoint that the run resumes from, or 0."""
        self._config = config
        self._trainer = trainer
        self._trace = trace
        self._critic = critic
        self._saved = saved_step
        self._exported = -1
        self._taken_s = 0.0
        self._checkpoint: Writing | None = None
        self._export: Writing | None = None

    def resume(self) -> None:
        """Repeats the export of the step that the run resumes from, if the run ended before it was
        complete.
        """
        step = self._saved
        missing = [step > 0 and not export_path(self._config.run_dir, step).exists()]
        # rank 0 decides, since hosts may see changes of a folder at different times
        dist.broadcast_object_list(missing)
        if missing[0]:
            self._begin_export_if_due(step)

    def after_step(
        self, step: int, records: Callable[[], Mapping[str, bytes]], *, last: bool
    ) -> None:
        """Saves what is due after `step` steps.

        `records` returns the files to add to a checkpoint; called on rank 0. After the `last` step
        a checkpoint is always due, and everything is complete on return.

        Raises WriteError if a checkpoint or export, begun now or after an earlier step, could not
        be written.
        """
        every = self._config.checkpoint.every
        start = time.perf_counter()
        if self._checkpoint is not None and self._checkpoint.written():
            self._finish_checkpoint()
        if self._export is not None and self._export.written():
            self._finish_export()
        if step != self._saved and (last or (every > 0 and step % every == 0)):
            self._finish_checkpoint()
            self._begin_checkpoint(
                step, records, beside=self._config.checkpoint.beside and not last
            )
        self._begin_export_if_due(step)
        if last:
            self._finish_checkpoint()
            self._finish_export()
        self._taken_s += time.perf_counter() - start

    def taken_s(self) -> float:
        """How long saving has delayed steps since the last call."""
        taken_s = self._taken_s
        self._taken_s = 0.0
        return taken_s

    def _begin_checkpoint(
        self, step: int, records: Callable[[], Mapping[str, bytes]], *, beside: bool
    ) -> None:
        run_dir = self._config.run_dir
        with self._trace.span(f"checkpoint {step}"):
            if dist.get_rank() == 0:
                make_room(run_dir, spared_steps(self._config))
            path = checkpoint_path(run_dir, step)
            state = {"step": step}
            self._checkpoint = checkpoint.begin(
                self._trainer, path, state, records(), beside=beside, critic=self._critic
            )
        self._saved = step

    def _finish_checkpoint(self) -> None:
        if self._checkpoint is not None:
            # a run that resumes from this checkpoint does not repeat the export
            if self._exported < self._saved:
                self._finish_export()
            with self._trace.span(f"complete {self._checkpoint.path.name}"):
                self._checkpoint.finish()
            self._checkpoint = None
            if dist.get_rank() == 0:
                prune_checkpoints(
                    self._config.run_dir, self._config.checkpoint.keep, spared_steps(self._config)
                )

    def _begin_export_if_due(self, step: int) -> None:
        config = self._config
        every = self._config.checkpoint.hf_every
        if every > 0 and step != self._exported and (step % every == 0 or step == config.max_steps):
            self._finish_export()
            path = export_path(config.run_dir, step)
            if dist.get_rank() == 0:
                # This export was left by a run that died before its checkpoint of this step. If
                # this run dies too, `resume` must not take the export for its own.
                remove_whole(path)
            with self._trace.span(f"export {step}"):
                self._export = self._trainer.begin_export(
                    str(path), config.model.path, beside=config.checkpoint.beside
                )
            self._exported = step

    def _finish_export(self) -> None:
        if self._export is not None:
            with self._trace.span(f"complete export {self._export.path.name}"):
                self._export.finish()
            self._export = None
