"""Teachers at the trainer: the frozen models on its ranks, and the numbers of all teachers for a
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megarl.base.rollout_types import RemoteSequence, TrainSequence
from megarl.config.schema import SAMPLED, VOCABULARY, RunConfig
from megarl.kernels import linear_kl
from megarl.kernels.chunked_kl import LikeliestTokens, Teacher, WholeDistribution
from megarl.plan.resolve import RunPlan
from megarl.teachers.loss import TeacherTokens
from megarl.teachers.plan import FrozenRole, teacher_format, teachers_of
from megarl.trainer.distributed import to_device
from megarl.trainer.fully_sharded import gathered
from megarl.trainer.logprobs import Rows, main_grad, spread
from megarl.trainer.microbatch import MicroBatch, lay
from megarl.trainer.model import MegatronModel, output_weight
from megarl.trainer.parallel import tensor_group

Divergence = Callable[[Callable[[np.ndarray], Teacher]], torch.Tensor]
"""Computes [t] float32, the policy's divergence from a teacher.

Its argument makes what is known of the teacher at positions [N].
"""
# place of a sample in the batch -> its sequence
Sequences = Mapping[int, TrainSequence | RemoteSequence]
ByPlaces = Callable[
    [Callable[[list[TrainSequence | RemoteSequence]], list[np.ndarray]]], Mapping[int, np.ndarray]
]


@dataclass(frozen=True)
class Teachers:
    """All teachers of a run, in the order of the config. `models`: the teachers on the trainer's
    ranks.
    """

    config: RunConfig
    models: Mapping[str, MegatronModel] = field(default_factory=dict)

    def of_batch(self, sequences: Sequences, by_places: ByPlaces) -> BatchScores:
        """Scores the batch with the models.

        A model whose whole distributions are needed computes each mini-batch just before its step
        instead, since whole distributions are too large to keep.
        """
        names = list(teachers_of(self.config))
        over = self.config.algorithm.distill.over
        form = teacher_format(self.config)
        if over == SAMPLED:
            model_scores = {name: by_places(self._scores(name)) for name in self.models}
        else:
            model_scores = {}
        empty = np.empty(0, np.float32)
        served_names = [name for name in names if name not in self.models]
        engine_scores: dict[str, tuple[dict[int, np.ndarray], dict[int, np.ndarray]]] = {}
        for name in served_names:
            engine_scores[name] = ({}, {})
        for place, sequence in sequences.items() if served_names else ():
            if isinstance(sequence, RemoteSequence):
                for ids, logprobs in engine_scores.values():
                    ids[place] = logprobs[place] = empty
                continue
            length = len(sequence.teachers) // form.token_bytes
            for name, scores in zip(
                served_names, form.unpack(sequence.teachers, length), strict=True
            ):
                prompt_length = len(sequence) - length
                ids, logprobs = engine_scores[name]
                ids[place] = np.concatenate(
                    [np.zeros((prompt_length, scores.ids.shape[1]), np.int32), scores.ids]
                )
                known_logprobs = np.concatenate(
                    [
                        np.full((prompt_length, scores.logprobs.shape[1]), np.nan, np.float32),
                        scores.logprobs,
                    ]
                )
                logprobs[place] = known_logprobs[:, 0] if over == SAMPLED else known_logprobs
        return BatchScores(self, names, model_scores, engine_scores)

    def _scores(
        self, name: str
    ) -> Callable[[list[TrainSequence | RemoteSequence]], list[np.ndarray]]:
        return lambda sequences: self.models[name].token_logprobs(
            sequences, self.config.rollout.temperature
        )


@dataclass(frozen=True)
class BatchScores:
    """The teachers' numbers for a batch, keyed by the places of its samples."""

    teachers: Teachers
    names: Sequence[str]
    model_scores: Mapping[
        str, Mapping[int, np.ndarray]
    ]  # log-probs from models on the trainer's ranks
    # ids and log-probs
    engine_scores: Mapping[str, tuple[Mapping[int, np.ndarray], Mapping[int, np.ndarray]]]

    def of_step(
        self, places: Sequence[int], sequences: Sequence[TrainSequence | RemoteSequence]
    ) -> list[TeacherOfStep]:
        """The teachers' numbers for an optimizer step on the samples at `places`, whose sequences
        are `sequences`.
        """

        teachers: list[TeacherOfStep] = []
        over = self.teachers.config.algorithm.distill.over
        for name in self.names:
            if over == VOCABULARY:
                model = self.teachers.models[name]
                teachers.append(ModelScores(model, model.scored_hidden(sequences)))
                continue
            ids, logprobs = self.engine_scores.get(name) or ({}, self.model_scores[name])
            logprobs_of_places = [logprobs[place] for place in places]
            teachers.append(
                SampledTokenScores(logprobs_of_places)
                if over == SAMPLED
                else LikeliestTokenScores([ids[place] for place in places], logprobs_of_places)
            )
        return teachers


@dataclass(frozen=True)
class SampledTokenScores:
    """Log-probs of the tokens themselves.

    This and the two following classes turn a microbatch into what the loss needs of one teacher. A
    teacher on engines has sent numbers for each token. A teacher on the trainer's ranks is a frozen
    model there. Both distributions, the policy's and the teacher's, have the temperature
    rollout.temperature, as the reference does. SGLang gives log-probs of a prompt only at
    temperature 1, so with a teacher on engines the temperature must be 1 (teachers/plan.py).
    """

    logprobs: Sequence[np.ndarray]  # [L] of each sequence; NaN where the teacher gave none

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> TeacherTokens:
        row = to_device(
            torch.from_numpy(lay(microbatch.plan, lambda i: self.logprobs[i], np.float32)),
            microbatch.targets.device,
        )
        return TeacherTokens(
            torch.where(row.isnan(), 0.0, row), microbatch.loss_mask & ~row.isnan()
        )


@dataclass(frozen=True)
class LikeliestTokenScores:
    """The likeliest tokens at each place."""

    ids: Sequence[np.ndarray]  # [L, k] of each sequence
    logprobs: Sequence[np.ndarray]  # [L, k]; NaN where the teacher gave none

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> TeacherTokens:
        plan = microbatch.plan
        device = microbatch.targets.device
        shape = next((row.shape[1:] for row in self.ids if row.ndim == 2), (1,))
        ids = lay(plan, lambda i: self.ids[i], np.int64, shape)
        logprobs = lay(plan, lambda i: self.logprobs[i], np.float32, shape)
        is_known = np.isfinite(logprobs[:, 0])  # a place has all k or none

        def likeliest_at(positions: np.ndarray) -> Teacher:
            known_ids = np.where(is_known[positions][:, None], ids[positions], np.arange(shape[0]))
            return LikeliestTokens(
                to_device(torch.from_numpy(known_ids), device),
                to_device(torch.from_numpy(np.nan_to_num(logprobs[positions])), device),
            )

        return TeacherTokens(
            divergence(likeliest_at),
            microbatch.loss_mask & to_device(torch.from_numpy(is_known), device),
        )


class ModelScores:
    """The whole vocabulary at each place, from a frozen model.

    It computes the step's microbatches before the policy does.
    """

    def __init__(self, model: MegatronModel, hidden: dict[tuple[int, ...], torch.Tensor]):
        self._hidden = hidden
        self._weight: torch.Tensor | None = None  # only on the last pipeline stage
        chunk = model.chunks[-1]
        if chunk.post_process:
            with gathered(chunk):
                self._weight = output_weight(chunk).detach()
                # The step's backward passes read it, when a sharded model has freed its own.
                if model.topology.zero == 3:
                    self._weight = self._weight.clone()

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> TeacherTokens:
        hidden = self._hidden[microbatch.plan.indices]
        weight = self._weight
        assert weight is not None
        return TeacherTokens(
            divergence(lambda positions: WholeDistribution(hidden.to(weight.device), weight)),
            microbatch.loss_mask,
        )


TeacherOfStep = SampledTokenScores | LikeliestTokenScores | ModelScores


def token_divergence(
    make: Callable[[np.ndarray], Teacher],
    rows: Rows,
    weight: torch.nn.Parameter,
    microbatch: MicroBatch,
    vocab_size: int,
    *,
    temperature: float,
    chunk_tokens: int,
) -> torch.Tensor:
    """[t] float32: the divergence at each position, 0 where not `microbatch.scored`; with gradients
    like those of token_logprobs.
    """
    teacher = make(rows.positions)
    values = linear_kl(
        rows.rows,
        weight,
        teacher,
        tensor_group(),
        vocab_size,
        temperature,
        chunk_tokens,
        main_grad(weight),
    )
    return spread(values, rows, microbatch)


def load_frozen(plan: RunPlan, role: FrozenRole, policy: MegatronModel) -> MegatronModel:
    """A model with the trainer's ranks and sizes, without gradients or optimizer.

    It stays in the devices' memory; a model that is too large for that should be on engines.
    """
    from megarl.trainer.model import MegatronModel

    config = plan.config
    trainer = replace(config.trainer, routing_replay=False, recompute=False)
    model = MegatronModel(
        role.spec,
        plan.trainer_topology,
        trainer,
        config.model.dtype,
        config.seed,
        timeout_s=config.timeouts.collective_s,
    )
    model.squares = policy.squares
    model.load_hf(role.path)
    return model
