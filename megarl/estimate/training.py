"""What a run's training takes: that of the policy and, where the algorithm has one, of its critic."""

from __future__ import annotations

from dataclasses import replace

from megarl.config.algorithm import SAMPLED
from megarl.config.roles import REFERENCE
from megarl.config.schema import RunConfig, TrainerConfig
from megarl.estimate.constants import Constants
from megarl.estimate.hardware import Cluster, Gpu
from megarl.estimate.sizes import shadow_bytes
from megarl.estimate.train_time import TrainModel, TrainTime
from megarl.estimate.trainer_memory import TrainerMemory, trainer_memory
from megarl.estimate.workload import Workload, scoring_passes
from megarl.models import ModelSpec
from megarl.models.adapters import Lora
from megarl.plan.critic import find_critic
from megarl.plan.lora import sends_adapters
from megarl.plan.teachers import find_frozen, teachers_of
from megarl.plan.weights import needs_reference


def critic_of(config: RunConfig, spec: ModelSpec) -> ModelSpec | None:
    critic = find_critic(config, spec)
    return critic.with_scalar_head() if critic else None


def training_memory(config: RunConfig, spec: ModelSpec, trainer: TrainerConfig, gpu: Gpu) -> TrainerMemory:
    """With `trainer` in the place of the config's. Raises ConfigError if the sizes do not divide a model."""
    frozen, swapped = frozen_of(config, spec)
    divergence = bool(teachers_of(config)) and config.algorithm.distill.over != SAMPLED
    of_all = {"reference": swapped, "critic": critic_of(config, spec), "frozen": frozen, "divergence": divergence}
    on_device = config.weights.delta != "off" and config.weights.delta_shadow == "device"
    shadow = shadow_bytes(spec, trainer, config.generator, config.model.dtype) if on_device else 0.0
    merges = not sends_adapters(config, spec, gpu.device)
    return trainer_memory(spec, trainer, config.model.dtype, gpu, **of_all, lora=Lora.of(config.lora), merges=merges, shadow=shadow)


def frozen_of(config: RunConfig, spec: ModelSpec) -> tuple[list[ModelSpec], bool]:
    """The frozen models on the trainer's ranks, and whether there is a reference that takes the place of the policy's weights."""
    roles = find_frozen(config, spec, None)
    swapped = [role for role in roles if role.role == REFERENCE and role.spec == spec and not config.lora.rank]
    return [role.spec for role in roles if role not in swapped], needs_reference(config) or bool(swapped)


def training_time(
    config: RunConfig, spec: ModelSpec, trainer: TrainerConfig, cluster: Cluster, constants: Constants, workload: Workload
) -> TrainTime:
    """The two models compute one after the other; the critic scores each batch once before it is trained."""
    policy = TrainModel(spec, trainer, config.model.dtype, cluster, constants, Lora.of(config.lora))
    of_policy = policy.seconds(workload, extra_forwards=scoring_passes(config))
    for model in frozen_of(config, spec)[0]:
        scoring = TrainModel(model, trainer, config.model.dtype, cluster, constants).scoring_s(workload)
        of_policy = replace(of_policy, compute=of_policy.compute + scoring)
    if (critic := critic_of(config, spec)) is None:
        return of_policy
    of_critic = TrainModel(critic, trainer, config.model.dtype, cluster, constants).seconds(workload, extra_forwards=1)
    both = {name: value + getattr(of_critic, name) for name, value in vars(of_policy).items()}
    done = of_policy.tflops * of_policy.total + of_critic.tflops * of_critic.total
    return TrainTime(**both | {"tflops": done / (of_policy.total + of_critic.total)})
