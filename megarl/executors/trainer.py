"""The trainer executor: turns a batch of groups into the next version of the weights (LlamaRL,
section 5.1.1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from megarl.algorithms.batches import (
    batch_metrics,
    batch_rewards,
    dropped_metrics,
    idle_samples_metrics,
    masked_places,
    old_token_metrics,
    source_metrics,
    step_times,
    too_many_dropped,
    without_old_tokens,
)
from megarl.algorithms.recipes import needs_groups_to_differ
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Batch, TrainSequence, Version
from megarl.base.shared_gpu import GIB, card_bytes, high_water_bytes, take_peak
from megarl.config.algorithms import OUTCOME
from megarl.config.errors import RunError
from megarl.config.tasks import tasks_of
from megarl.critic.executor import ActorCriticSteps, begin_critic, make_critic
from megarl.data.order import train_mixture
from megarl.data.tokenizer import load_tokenizer
from megarl.evaluation.scores import NewEvaluations, forget_after
from megarl.executors.batch_steps import BatchSteps, kept_rows, step_metrics
from megarl.executors.idle_updates import IdleUpdates
from megarl.executors.policy import load_checkpoint, make_policy, steps_of_run
from megarl.executors.saving import Saving
from megarl.messaging.messages import ProbeReady, WeightsApplied
from megarl.messaging.rendezvous import Rendezvous
from megarl.observe.agreement import (
    DIFFERENCE,
    ESS_LIMIT,
    LARGEST,
    LIMIT,
    describe_differences,
    least_ess,
    probe_limit,
    too_far,
)
from megarl.observe.metrics import MetricsWriter
from megarl.observe.samples import OrdinalsWriter, SamplesWriter, TokensWriter, write_rollouts
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import Layout
from megarl.rewards.credit import turn_metrics, without_signal
from megarl.rewards.score import failed_source, shapes
from megarl.roles.settings import TEACHER
from megarl.rollouts.buffer import LEDGER_FILE, Ledger
from megarl.rollouts.channel import texts_of
from megarl.speculative.plan import ACCEPTED, Acceptance, never_trained
from megarl.teachers.plan import teachers_of
from megarl.teachers.trainer import Teachers, load_frozen
from megarl.trainer.cpu_support import layer_spec
from megarl.trainer.distributed import init_distributed, shutdown_distributed
from megarl.trainer.step import StepResult
from megarl.weight_sync.content import sent_layout
from megarl.weight_sync.sender import SyncReport

DISTRIBUTIONS = {"reward": "reward", "response_tokens": "tokens"}  # metric -> field of a sample


@dataclass
class TrainerExecutor:
    """One rank of the trainer.

    All ranks get the same batch, but per-token numbers only for the samples that they train on.
    After a step all are in the same state.
    """

    plan: RunPlan
    rank: int
    rendezvous: Rendezvous
    # returns the ledger of prompts for the checkpoint, on rank 0
    ledger: Callable[[], bytes] = Ledger().encode
    # see IdleUpdates
    awaits: Callable[[int, bool], bool] = lambda step, wanted: False
    curr_step: int = 0
    stopped: bool = False

    def init(self) -> None:
        config = self.plan.config
        run_dir = Path(config.run_dir)
        self.status = StatusBoard(run_dir, f"trainer.{self.rank}").for_work()
        self.trace = TraceWriter(run_dir, f"trainer.{self.rank}")
        self.status.set("building the model")
        self.device = init_distributed(config.timeouts.collective_s)
        self.trainer = make_policy(self.plan, steps_of_run(self.plan))
        self._mixture = train_mixture(config)
        self.algorithm = make_algorithm(config.algorithm, teachers_of(config))
        self.critic = make_critic(self.plan, self.trainer) if self.plan.critic else None
        models = {}
        for role in self.plan.frozen:
            if role.role == TEACHER:
                models[role.name] = load_frozen(self.plan, role, self.trainer)
        teachers = Teachers(config, models) if teachers_of(config) else None
        self._idle = None
        if config.async_.idle == "updates":
            self._idle = IdleUpdates(config, least_ess(config.algorithm), self.awaits)
        if self.critic is None:
            self.batch_steps = BatchSteps(
                self.trainer, self.algorithm, config, teachers=teachers, idle=self._idle
            )
        else:
            self.batch_steps = ActorCriticSteps(
                self.trainer, self.algorithm, config, critic=self.critic, teachers=teachers
            )
        if self.algorithm.needs_reference:
            self._hold_reference()
        # the reference is then the initial weights, which are loaded already
        has_initial_weights = self.algorithm.needs_reference and self.plan.reference is None
        if not has_initial_weights and (self.trainer.frozen or not self.rendezvous.checkpoint):
            self.trainer.load_hf(self.plan.weights_path)
        if self.rendezvous.checkpoint:
            load_checkpoint(self.trainer, self.rendezvous.checkpoint, self.critic)
        elif self.critic is not None:
            begin_critic(self.critic, self.plan)
        self.curr_step = self.rendezvous.start_step
        self.metrics: MetricsWriter | None = None
        self.ordinals: OrdinalsWriter | None = None
        self.samples: SamplesWriter | None = None
        # created only when there is something to write, on few ranks
        self.tokens: TokensWriter | None = None
        if self.rank == 0:
            self.metrics = MetricsWriter(run_dir, resume_step=self.curr_step)
            self.ordinals = OrdinalsWriter(run_dir, resume_step=self.curr_step)
            self.samples = SamplesWriter(run_dir, resume_step=self.curr_step)
            forget_after(run_dir, self.curr_step)
            self._evaluations = NewEvaluations(run_dir)
        self._step_ended = self._started = time.monotonic()
        self._metrics_before: dict[str, float] = {}  # of the next row, known before its step
        self._acceptance = Acceptance(never_trained(config))
        self.saving = Saving(
            config, self.trainer, self.trace, saved_step=self.curr_step, critic=self.critic
        )
        self.saving.resume()
        take_peak()
        # the last weights must still be evaluated, and no step follows
        if self.curr_step == config.max_steps:
            self.saving.after_step(self.curr_step, self._records, last=True)

    def _hold_reference(self) -> None:
        """Loads the reference: the role's model, or else the weights that the run began with, even
        after a resume.
        """
        role = self.plan.reference
        # adapters can be off only in their own model
        if role is not None and (role.spec != self.plan.spec or self.trainer.frozen):
            self.trainer.hold_reference(load_frozen(self.plan, role, self.trainer))
            return
        self.trainer.load_hf(role.path if role else self.plan.weights_path)
        self.trainer.hold_reference()

    @property
    def version(self) -> Version:
        """The version of the current weights: the number of batches that they were trained on."""
        return self.curr_step

    def set_step(self, step: int) -> None:
        self.status.set(f"step {step}")

    def put_batch(self, batch: Batch, waited_s: float) -> None:
        self.batch = batch
        self._batch_wait_s = waited_s

    def stop(self) -> None:
        """Called instead of `put_batch` when the run must stop here."""
        self.stopped = True

    def put_sync(self, report: SyncReport, applied: Callable[[], WeightsApplied | None]) -> None:
        """Takes the cost of sending the weights.

        `applied` waits for the generator to confirm that they are in use; it returns None if the
        run stops first. It is called only when the step is reported.
        """
        self._sync = report
        self._applied = applied

    def put_metrics(self, metrics: Mapping[str, float]) -> None:
        """Takes metrics for the next row."""
        self._metrics_before |= metrics

    def step(self) -> None:
        """Trains on the batch from `put_batch`, which makes weight version `curr_step + 1`."""
        batch = self.batch
        self._check_scores(batch)
        started = time.monotonic()
        with self.trace.span(f"train step {batch.step}"):
            results = self.batch_steps.train(self._in_loss(batch))
        self.curr_step += 1
        self._write_tokens(batch, results)
        if self.metrics is not None:
            self._write_metrics(batch, results, train_s=time.monotonic() - started)

    @property
    def replicas(self) -> list[list[int]]:
        return self.plan.trainer_topology.replicas

    def assign(self, batch: Batch) -> list[list[int]]:
        """[dp][…] the places in the batch of the samples that each data-parallel rank trains on.

        All ranks return the same, whichever parts of the batch they have.
        """
        return self.batch_steps.assign(self._in_loss(batch))

    def _in_loss(self, batch: Batch) -> Batch:
        return without_old_tokens(batch, self.plan.config.async_)

    def _check_scores(self, batch: Batch) -> None:
        """Raises RunError on all ranks if too many scores or episodes failed, or too many prompts
        were dropped. Writes the rollouts first.
        """
        groups = [*batch.groups, *batch.dropped]
        problem = failed_source(self.plan.config, groups, [*teachers_of(self.plan.config)])
        problem = problem or too_many_dropped(batch, self.plan.config)
        if problem:
            written = self._write_rollouts(batch) if self.rank == 0 else None
            raise RunError(
                f"step {batch.step}: {problem}"
                + (f"\nThe step's samples are in {written}" if written else "")
            )

    def _write_rollouts(self, batch: Batch) -> Path | None:
        limit = self.plan.config.observe.rollouts_per_step
        groups = zip(batch.groups, batch.texts[:limit])
        dropped = zip(batch.dropped, batch.dropped_texts[:limit])
        trained_texts = [(group, texts_of(texts)) for group, texts in groups]
        dropped_texts = [(group, texts_of(texts)) for group, texts in dropped]
        if self.samples is not None:
            self.samples.write(batch.step, trained_texts)
            self.samples.write(batch.step, dropped_texts, dropped=True)
        return write_rollouts(
            self.plan.config.run_dir, batch.step, trained_texts, dropped_texts, len(batch.dropped)
        )

    def _write_tokens(self, batch: Batch, results: list[StepResult]) -> None:
        rows = kept_rows(results)
        if rows and self.tokens is None:
            piece = load_tokenizer(self.plan.config.model).piece
            self.tokens = TokensWriter(self.plan.config.run_dir, self.rank, piece)
        names = []
        for group in batch.groups:
            for sample in range(len(group.samples)):
                names.append((group.ordinal, sample))
        for place, row in rows.items():
            assert self.tokens is not None
            ordinal, sample = names[place]
            self.tokens.write(batch.step, ordinal, sample, row)

    def _write_metrics(self, batch: Batch, results: list[StepResult], train_s: float) -> None:
        assert self.metrics is not None and self.ordinals is not None  # rank 0
        applied = self._applied()
        now = time.monotonic()
        step_s = now - self._step_ended
        self._step_ended = now
        metrics = {
            "wall_s": now - self._started,
            **self._learning_metrics(batch, results),
            **step_times(
                batch,
                step_s,
                train_s,
                self._batch_wait_s,
                self._sync.wait_s,
                self._sync.sync_s,
                applied.pause_s if applied else 0.0,
            ),
            "time/save_s": self.saving.taken_s(),
            "samples_per_s": len(batch.samples) / step_s,
            "tokens_per_s": sum(sample.policy_tokens for sample in batch.samples) / step_s,
            **self._counts(batch, results),
            **_applied_metrics(applied),
            **_memory_metrics(applied),
            **self._accepted_metrics(applied),
            "staleness/rejected": batch.rejected,
            **old_token_metrics(batch, self.plan.config.async_),
            "prompts/buffered": batch.buffered,
            "prompts/first": batch.groups[0].ordinal,
            "prompts/last": batch.groups[-1].ordinal,
            **self._evaluations.metrics(),
        }
        distributions = {}
        for name, field in DISTRIBUTIONS.items():
            distributions[name] = [getattr(sample, field) for sample in batch.generated]
        agreement = results[0].agreement if results else None
        histograms = agreement.histograms() if agreement else {}
        self.metrics.write(batch.step, metrics, distributions, histograms)
        self._metrics_before = {}
        self._write_rollouts(batch)
        self.ordinals.write(
            batch.step,
            [group.ordinal for group in batch.groups],
            [group.ordinal for group in batch.dropped],
        )

    def _learning_metrics(self, batch: Batch, results: list[StepResult]) -> dict[str, Any]:
        """Metrics of what was learned, and from what."""
        config = self.plan.config
        rewards = batch_rewards(batch, config) if shapes(config) else None
        metrics: dict[str, Any] = batch_metrics(batch, self.version - 1, rewards)
        if config.rollout.dynamic_sampling or batch.dropped:
            metrics |= dropped_metrics(batch)
        metrics |= turn_metrics(batch.generated, config)
        if config.algorithm.credit != OUTCOME:
            metrics["zero_advantage_fraction"] = without_signal(batch.groups, config)
        metrics |= source_metrics(batch, self._mixture, config.data.curriculum is not None)
        metrics |= step_metrics(results, self.algorithm)
        metrics |= self.batch_steps.value_metrics()
        if config.async_.idle == "samples":
            metrics |= idle_samples_metrics(batch)
        if self._idle is not None:
            metrics |= self._idle.metrics
        # With a critic, samples of equal reward also have advantages. Without a reward, equal
        # rewards mean nothing.
        if not needs_groups_to_differ(config.algorithm):
            metrics["zero_advantage_fraction"] = None
        metrics |= {
            "weights/version": self.version,
            LIMIT: probe_limit(self.plan),
            ESS_LIMIT: least_ess(config.algorithm),
        }
        return metrics | self._metrics_before

    def _counts(self, batch: Batch, results: list[StepResult]) -> dict[str, int]:
        config = self.plan.config
        passes = max(1, len(results) // config.trainer.minibatches)
        trained = sum(result.sequences for result in results) // passes
        counts = {"samples/trained": trained}
        if any(task.algorithm.mask_truncated for task in tasks_of(config).values()):
            counts["samples/masked"] = len(masked_places(batch, config))
        return counts

    def _accepted_metrics(self, applied: WeightsApplied | None) -> dict[str, float]:
        """Metrics of speculative decoding. Prints a line when the draft model has become stale."""
        if applied is None:
            return {}
        metrics = self._acceptance.metrics(applied.version, *applied.drafts)
        warning = self._acceptance.warning(applied.version, metrics.get(ACCEPTED))
        if warning:
            print(warning, flush=True)
        return metrics

    @property
    def layout(self) -> Layout:
        """The layout of the weights on this executor's ranks."""
        return sent_layout(self.plan, self.trainer.layout, layer_spec())

    def get_model(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under Megatron's names with global layer numbers, for the weights
        channel to read.
        """
        return self.trainer.sent_parameters()

    def compare_probe(self, probe: ProbeReady) -> None:
        """Scores the probe's tokens, if there are any, under the same weights, and adds the mean
        absolute log-prob difference to the metrics. With routing replay, also measures it without
        replay. Raises RunError if trainer and generator differ too much.
        """
        if not probe.token_ids:
            return
        of_sequence = self._probe_differences(probe, probe.routing)
        for group in dict.fromkeys(probe.groups) or [""]:
            group_differences: list[float] = []
            for sequence_group, values in zip(probe.groups or repeat(""), of_sequence):
                if sequence_group == group:
                    group_differences += values
            self._compare_with(group, group_differences, probe.version)
        differences = list(chain.from_iterable(of_sequence))
        self._metrics_before |= {DIFFERENCE: fmean(differences), LARGEST: max(differences)}
        if self.plan.config.trainer.routing_replay:
            without_routing = [b""] * len(probe.token_ids)
            mean = fmean(chain.from_iterable(self._probe_differences(probe, without_routing)))
            self._metrics_before["logprob/abs_diff_mean_own_routing"] = mean

    def _compare_with(self, group: str, differences: list[float], version: Version) -> None:
        """Compares the difference of a group's engines with the limit for their precision.

        Prints a warning above it. Raises RunError far above.
        """
        mean = fmean(differences)
        limit = probe_limit(self.plan, group)
        group_text = f" of group {group}" if group else ""
        problem = too_far(mean, limit)
        if problem:
            raise RunError(f"weights version {version}{group_text}: {problem}")
        if self.rank == 0 and (
            differences_text := describe_differences([{DIFFERENCE: mean, LIMIT: limit}])
        ):
            print(f"weights version {version}{group_text}: {differences_text}", flush=True)
        if group:
            self._metrics_before[f"{DIFFERENCE}/{group}"] = mean

    def _probe_differences(self, probe: ProbeReady, routing: list[bytes]) -> list[list[float]]:
        """[sequence][…] the absolute log-prob differences of the tokens that the generator drew."""
        sequences = []
        for ids, prompt, experts, kept in zip(
            probe.token_ids, probe.prompt_lengths, routing, probe.kept, strict=True
        ):
            sequences.append(
                TrainSequence(
                    token_ids=np.array(ids, np.int32),
                    loss_mask=np.arange(len(ids)) >= prompt,
                    mu_logprobs=np.zeros(len(ids), np.float32),
                    advantages=np.zeros(len(ids), np.float32),
                    routing=experts,
                    kept=kept,
                )
            )
        trainer_logprobs = self.trainer.token_logprobs(
            sequences, temperature=self.plan.config.rollout.temperature
        )
        result: list[list[float]] = []
        for row, prompt, generator_logprobs in zip(
            trainer_logprobs, probe.prompt_lengths, probe.logprobs
        ):
            result.append(
                [
                    abs(trainer_logprob - generator_logprob)
                    for trainer_logprob, generator_logprob in zip(
                        row[prompt:].tolist(), generator_logprobs, strict=True
                    )
                ]
            )
        return result

    def save_checkpoint(self) -> None:
        """Saves weights, optimizer, RNG and ledger: every `checkpoint.every` steps, after the last
        step, and when the run is stopped.
        """
        self.saving.after_step(
            self.curr_step,
            self._records,
            last=self.stopped or self.curr_step == self.plan.config.max_steps,
        )

    def _records(self) -> dict[str, bytes]:
        """The files that rank 0 adds to a checkpoint.

        All steps that they count as done are already on disk.
        """
        if self.metrics is None or self.ordinals is None:
            return {}
        self.metrics.sync()
        self.ordinals.sync()
        return {LEDGER_FILE: self.ledger()}

    def shutdown(self) -> None:
        self.status.set("done")
        self.trace.close()
        for file in (self.metrics, self.ordinals, self.samples, self.tokens):
            if file is not None:
                file.close()
        shutdown_distributed()


def _memory_metrics(applied: WeightsApplied | None) -> dict[str, float]:
    """The most memory that this rank, and a worker of an engine, have held so far, in GiB.

    In use: that of this rank's GPU now.
    """
    in_bytes = {
        "memory/trainer_gib": high_water_bytes(of_tensors=True),
        "memory/engine_gib": applied.high_water_bytes if applied else 0,
        "memory/gpu_in_use_gib": card_bytes(),
    }
    return {name: count / GIB for name, count in in_bytes.items() if count}


def _applied_metrics(applied: WeightsApplied | None) -> dict[str, float | bool]:
    if applied is None:
        return {}
    if applied.changed_fraction is None:
        changed = {}
    else:
        changed = {"sync/changed_fraction": applied.changed_fraction}
    metrics: dict[str, float | bool] = {
        "sync/bytes": applied.bytes_written,
        "sync/audit_ok": applied.audited,
        "engines/serving": applied.engines,
    }
    tokens, cached = applied.prefill
    if tokens:
        metrics["prefill/tokens"] = tokens - cached
        metrics["prefill/cached_fraction"] = cached / tokens
    by_group = {f"engines/serving/{name}": engines for name, engines in applied.serving.items()}
    by_group |= {f"engines/tokens/{name}": tokens for name, tokens in applied.sampled.items()}
    return {**metrics, **by_group, **changed}
