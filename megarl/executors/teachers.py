"""The frozen models on the trainer's ranks, and what a batch's teachers say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.config.algorithm import SAMPLED, VOCABULARY
from megarl.config.schema import RunConfig
from megarl.plan.resolve import RunPlan
from megarl.plan.teachers import FrozenRole, teacher_format, teachers_of
from megarl.types import Elsewhere, TrainSequence

if TYPE_CHECKING:  # nothing here needs Megatron unless there is a model
    from megarl.trainer.megatron_model import MegatronModel
    from megarl.trainer.teachers import TeacherOfStep

Sequences = Mapping[int, TrainSequence | Elsewhere]  # by samples' places in the batch
ByPlaces = Callable[[Callable[[list[TrainSequence | Elsewhere]], list[np.ndarray]]], Mapping[int, np.ndarray]]


def load_frozen(plan: RunPlan, role: FrozenRole, policy: MegatronModel) -> MegatronModel:
    """A model with the trainer's ranks and sizes, without gradients or optimizer. It stays in the memory of their devices: one that is too
    large for that is better on engines."""
    from megarl.trainer.megatron_model import MegatronModel

    config = plan.config
    trainer = replace(config.trainer, routing_replay=False, recompute=False)
    model = MegatronModel(
        role.spec, plan.trainer_topology, trainer, config.model.dtype, config.seed, timeout_s=config.timeouts.collective_s
    )
    model.squares = policy.squares
    model.load_hf(role.path)
    return model


@dataclass(frozen=True)
class Teachers:
    """All of a run's, in the order of the config. `models`: those on the trainer's ranks."""

    config: RunConfig
    models: Mapping[str, MegatronModel] = field(default_factory=dict)

    def of_batch(self, sequences: Sequences, by_places: ByPlaces) -> OfBatch:
        """Scores the batch by the models. A model whose whole distributions count computes each mini-batch before its step instead, since
        these are too large to be kept."""
        names, over, form = list(teachers_of(self.config)), self.config.algorithm.distill.over, teacher_format(self.config)
        own = {name: by_places(self._scores(name)) for name in self.models} if over == SAMPLED else {}
        empty = np.empty(0, np.float32)
        served = [name for name in names if name not in self.models]
        of_engines: dict[str, tuple[dict[int, np.ndarray], dict[int, np.ndarray]]] = {name: ({}, {}) for name in served}
        for place, sequence in sequences.items() if served else ():
            if isinstance(sequence, Elsewhere):
                for ids, logprobs in of_engines.values():
                    ids[place] = logprobs[place] = empty
                continue
            length = len(sequence.teachers) // form.token_bytes
            for name, told in zip(served, form.unpack(sequence.teachers, length), strict=True):
                before, (ids, logprobs) = len(sequence) - length, of_engines[name]
                ids[place] = np.concatenate([np.zeros((before, told.ids.shape[1]), np.int32), told.ids])
                known = np.concatenate([np.full((before, told.logprobs.shape[1]), np.nan, np.float32), told.logprobs])
                logprobs[place] = known[:, 0] if over == SAMPLED else known
        return OfBatch(self, names, own, of_engines)

    def _scores(self, name: str) -> Callable[[list[TrainSequence | Elsewhere]], list[np.ndarray]]:
        return lambda some: self.models[name].token_logprobs(some, self.config.rollout.temperature)


@dataclass(frozen=True)
class OfBatch:
    """What they say of a batch, by the places of its samples."""

    teachers: Teachers
    names: Sequence[str]
    own: Mapping[str, Mapping[int, np.ndarray]]  # log-probs by models on the trainer's ranks
    of_engines: Mapping[str, tuple[Mapping[int, np.ndarray], Mapping[int, np.ndarray]]]  # ids and log-probs

    def of_step(self, places: Sequence[int], chosen: Sequence[TrainSequence | Elsewhere]) -> list[TeacherOfStep]:
        """For an optimizer step on the samples at `places`, which are `chosen`."""
        from megarl.trainer.teachers import OfLikeliest, OfModel, OfTokens

        found: list[TeacherOfStep] = []
        over = self.teachers.config.algorithm.distill.over
        for name in self.names:
            if over == VOCABULARY:
                model = self.teachers.models[name]
                found.append(OfModel(model, model.scored_hidden(chosen)))
                continue
            ids, logprobs = self.of_engines.get(name) or ({}, self.own[name])
            told = [logprobs[place] for place in places]
            found.append(OfTokens(told) if over == SAMPLED else OfLikeliest([ids[place] for place in places], told))
        return found
