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
from megarl.kernels.chunked_kl import Likeliest, Teacher, Whole
from megarl.plan.resolve import RunPlan
from megarl.teachers.loss import Taught
from megarl.teachers.plan import FrozenRole, teacher_format, teachers_of
from megarl.trainer.distributed import sent
from megarl.trainer.logprobs import Rows, main_grad, spread
from megarl.trainer.microbatch import MicroBatch, lay
from megarl.trainer.model import MegatronModel, output_weight
from megarl.trainer.parallel import tensor_group

# The numbers of one teacher for a step. Each of these classes turns a microbatch into what the loss
# needs of one teacher.
#
# A teacher on engines has sent numbers for each token. A teacher on the trainer's ranks is a frozen
# model there. Both distributions, the policy's and the teacher's, have the temperature
# rollout.temperature, as the reference does. SGLang gives log-probs of a prompt only at temperature
# 1, so with a teacher on engines the temperature must be 1 (teachers/plan.py).


Divergence = Callable[[Callable[[np.ndarray], Teacher]], torch.Tensor]
"""Computes [t] float32, the policy's divergence from a teacher.

Its argument makes what is known of the teacher at positions [N].
"""


@dataclass(frozen=True)
class OfTokens:
    """Log-probs of the tokens themselves."""

    logprobs: Sequence[np.ndarray]  # [L] of each sequence; NaN where the teacher gave none

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> Taught:
        row = sent(
            torch.from_numpy(lay(microbatch.plan, lambda i: self.logprobs[i], np.float32)),
            microbatch.targets.device,
        )
        return Taught(torch.where(row.isnan(), 0.0, row), microbatch.loss_mask & ~row.isnan())


@dataclass(frozen=True)
class OfLikeliest:
    """The likeliest tokens at each place."""

    ids: Sequence[np.ndarray]  # [L, k] of each sequence
    logprobs: Sequence[np.ndarray]  # [L, k]; NaN where the teacher gave none

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> Taught:
        plan = microbatch.plan
        device = microbatch.targets.device
        shape = next((row.shape[1:] for row in self.ids if row.ndim == 2), (1,))
        ids = lay(plan, lambda i: self.ids[i], np.int64, shape)
        logprobs = lay(plan, lambda i: self.logprobs[i], np.float32, shape)
        known = np.isfinite(logprobs[:, 0])  # a place has all k or none

        def at(positions: np.ndarray) -> Teacher:
            some = np.where(known[positions][:, None], ids[positions], np.arange(shape[0]))
            return Likeliest(
                sent(torch.from_numpy(some), device),
                sent(torch.from_numpy(np.nan_to_num(logprobs[positions])), device),
            )

        return Taught(divergence(at), microbatch.loss_mask & sent(torch.from_numpy(known), device))


class OfModel:
    """The whole vocabulary at each place, from a frozen model.

    It computes the step's microbatches before the policy does.
    """

    def __init__(self, model: MegatronModel, hidden: dict[tuple[int, ...], torch.Tensor]):
        self._model = model
        self._hidden = hidden

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> Taught:
        hidden, weight = (
            self._hidden[microbatch.plan.indices],
            output_weight(self._model.chunks[-1]).detach(),
        )
        return Taught(
            divergence(lambda positions: Whole(hidden.to(weight.device), weight)),
            microbatch.loss_mask,
        )


TeacherOfStep = OfTokens | OfLikeliest | OfModel


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
    of_rows = make(rows.positions)
    values = linear_kl(
        rows.rows,
        weight,
        of_rows,
        tensor_group(),
        vocab_size,
        temperature,
        chunk_tokens,
        main_grad(weight),
    )
    return spread(values, rows, microbatch)


# The frozen models on the trainer's ranks, and the numbers of all teachers for a batch.


# place of a sample in the batch -> its sequence
Sequences = Mapping[int, TrainSequence | RemoteSequence]
ByPlaces = Callable[
    [Callable[[list[TrainSequence | RemoteSequence]], list[np.ndarray]]], Mapping[int, np.ndarray]
]


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


@dataclass(frozen=True)
class Teachers:
    """All teachers of a run, in the order of the config. `models`: the teachers on the trainer's
    ranks.
    """

    config: RunConfig
    models: Mapping[str, MegatronModel] = field(default_factory=dict)

    def of_batch(self, sequences: Sequences, by_places: ByPlaces) -> OfBatch:
        """Scores the batch with the models.

        A model whose whole distributions are needed computes each mini-batch just before its step
        instead, since whole distributions are too large to keep.
        """
        names = list(teachers_of(self.config))
        over = self.config.algorithm.distill.over
        form = teacher_format(self.config)
        own = (
            {name: by_places(self._scores(name)) for name in self.models} if over == SAMPLED else {}
        )
        empty = np.empty(0, np.float32)
        served = [name for name in names if name not in self.models]
        of_engines: dict[str, tuple[dict[int, np.ndarray], dict[int, np.ndarray]]] = {
            name: ({}, {}) for name in served
        }
        for place, sequence in sequences.items() if served else ():
            if isinstance(sequence, RemoteSequence):
                for ids, logprobs in of_engines.values():
                    ids[place] = logprobs[place] = empty
                continue
            length = len(sequence.teachers) // form.token_bytes
            for name, told in zip(served, form.unpack(sequence.teachers, length), strict=True):
                before, (ids, logprobs) = len(sequence) - length, of_engines[name]
                ids[place] = np.concatenate(
                    [np.zeros((before, told.ids.shape[1]), np.int32), told.ids]
                )
                known = np.concatenate(
                    [np.full((before, told.logprobs.shape[1]), np.nan, np.float32), told.logprobs]
                )
                logprobs[place] = known[:, 0] if over == SAMPLED else known
        return OfBatch(self, names, own, of_engines)

    def _scores(
        self, name: str
    ) -> Callable[[list[TrainSequence | RemoteSequence]], list[np.ndarray]]:
        return lambda some: self.models[name].token_logprobs(some, self.config.rollout.temperature)


@dataclass(frozen=True)
class OfBatch:
    """The teachers' numbers for a batch, keyed by the places of its samples."""

    teachers: Teachers
    names: Sequence[str]
    own: Mapping[str, Mapping[int, np.ndarray]]  # log-probs from models on the trainer's ranks
    # ids and log-probs
    of_engines: Mapping[str, tuple[Mapping[int, np.ndarray], Mapping[int, np.ndarray]]]

    def of_step(
        self, places: Sequence[int], chosen: Sequence[TrainSequence | RemoteSequence]
    ) -> list[TeacherOfStep]:
        """The teachers' numbers for an optimizer step on the samples at `places`, whose sequences
        are `chosen`.
        """

        found: list[TeacherOfStep] = []
        over = self.teachers.config.algorithm.distill.over
        for name in self.names:
            if over == VOCABULARY:
                model = self.teachers.models[name]
                found.append(OfModel(model, model.scored_hidden(chosen)))
                continue
            ids, logprobs = self.of_engines.get(name) or ({}, self.own[name])
            told = [logprobs[place] for place in places]
            found.append(
                OfTokens(told)
                if over == SAMPLED
                else OfLikeliest([ids[place] for place in places], told)
            )
        return found
