"""Teachers and references among the roles: checks that they fit the run, and finds the shapes of
those on the trainer's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.algorithms import recipes
from megarl.base.rollout_types import TeacherFormat
from megarl.config.errors import ConfigError
from megarl.config.schema import SAMPLED, TOP_K, VOCABULARY, DistillConfig, RunConfig
from megarl.critic.plan import misfits
from megarl.models import ModelSpec, load_spec
from megarl.models.registry import missing_folder
from megarl.models.spec import LM
from megarl.roles.plan import BEFORE, ServedRole, future_spec, makers, roles_of
from megarl.roles.settings import ENGINES, REFERENCE, TEACHER, TRAINER, place_of, role_of

PLACE_OF = {TOP_K: ENGINES, VOCABULARY: TRAINER}  # value of `over` -> where teachers must be


@dataclass(frozen=True)
class FrozenRole:
    """A frozen model on the trainer's ranks."""

    name: str
    role: str
    path: str
    spec: ModelSpec


def teachers_of(config: RunConfig) -> dict[str, float]:
    """The weights of all teachers, in the order of the config."""
    return {
        name: settings.weight
        for name, settings in roles_of(config).items()
        if role_of(name, settings) == TEACHER
    }


def teacher_format(config: RunConfig) -> TeacherFormat:
    """The format of the log-probs that teachers on engines add to each response."""
    served = [
        name
        for name, settings in roles_of(config).items()
        if name in teachers_of(config) and place_of(name, settings) == ENGINES
    ]
    return TeacherFormat(len(served), config.algorithm.distill.likeliest)


def check_distillation(config: RunConfig) -> Iterator[str]:
    distill = config.algorithm.distill
    teachers = teachers_of(config)
    algorithm = config.algorithm
    if not teachers:
        if algorithm.name == "distill":
            yield "algorithm.name=distill: needs a teacher: set roles.teacher.path"
        if distill != DistillConfig():
            yield "algorithm.distill: needs a teacher: set roles.teacher.path"
        return
    if distill.top_k is not None and distill.over != TOP_K:
        yield (
            f"algorithm.distill.top_k={distill.top_k}: must be null: only "
            "algorithm.distill.over=top_k has it"
        )
    for name, settings in roles_of(config).items():
        if name not in teachers:
            continue
        place = place_of(name, settings)
        if (needed := PLACE_OF.get(distill.over, place)) != place:
            gives = (
                "SGLang gives only the likeliest tokens"
                if place == ENGINES
                else "the whole vocabulary is known there: set over=vocabulary"
            )
            yield (
                f"algorithm.distill.over={distill.over}: needs roles.{name}.on={needed}; it is "
                f"on {place}, and {gives}"
            )
        if place == ENGINES and config.rollout.temperature != 1:
            what = "SGLang gives log-probs of its input at temperature 1 only"
            yield (
                f"rollout.temperature={config.rollout.temperature}: must be 1 with roles.{name} "
                f"on engines: {what}"
            )
    if config.rollout.truncated:
        yield (
            "rollout.top_p, top_k, min_p: must be off with a teacher, because the policy is "
            "compared with its whole distribution"
        )
    if recipes.recipe_of(algorithm).beta is not None:
        yield (
            f"algorithm.name={algorithm.name}: is a loss of several responses, to which no "
            "teacher can be added"
        )
    if config.rollout.dynamic_sampling and not recipes.needs_reward(algorithm):
        yield (
            "rollout.dynamic_sampling=true: must be false with algorithm.name=distill, which "
            "learns from every prompt"
        )


def find_frozen(
    config: RunConfig, policy: ModelSpec, command: str | None
) -> tuple[FrozenRole, ...]:
    """The teachers and the reference on the trainer's ranks.

    A checkpoint that a command will make counts as present until the run starts. For commands
    before a run, any other missing checkpoint is left out. Raises ConfigError with all problems.
    """
    found = []
    problems = []
    for name, settings in roles_of(config).items() if command not in (*BEFORE, "eval") else ():
        role = role_of(name, settings)
        key = f"roles.{name}.path"
        if role not in (TEACHER, REFERENCE) or place_of(name, settings) != TRAINER:
            continue
        missing = list(missing_folder(key, settings.path))
        maker = makers(config).get(settings.path)
        if missing and (maker is None or command == "train"):
            if command is not None:
                problems += [
                    f"{problem}; megarl {maker} writes it" if maker else problem
                    for problem in missing
                ]
            continue
        try:
            spec = (
                future_spec(config, maker, settings)
                if missing and maker
                else load_spec(settings.path, key, config.model.family)
            )
            own = (
                ["is a reward model or critic, which gives no probabilities"]
                if spec.head != LM
                else []
            )
            own += misfits(config, spec, policy)
            if (
                spec.vocab_size != policy.vocab_size
                and role == TEACHER
                and config.algorithm.distill.over != SAMPLED
            ):
                own.append(
                    _other_size(
                        spec,
                        f"must be the policy's, {policy.vocab_size}, for "
                        "algorithm.distill.over=vocabulary",
                    )
                )
            problems += [f"{key}={settings.path}: {problem}" for problem in own]
            found.append(FrozenRole(name, role, settings.path, spec))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def check_served_teachers(
    config: RunConfig, served: tuple[ServedRole, ...], policy: ModelSpec
) -> None:
    """Raises ConfigError if a teacher on engines lacks some of the policy's tokens, or has fewer
    tokens than distill.top_k.
    """
    problems = []
    likeliest = config.algorithm.distill.likeliest
    for role in (each for each in served if each.role == TEACHER):
        if (size := role.spec.vocab_size) < policy.vocab_size:
            told = f"must be at least the policy's, {policy.vocab_size}"
            problems.append(
                f"roles.{role.name}.path={role.settings.path}: {_other_size(role.spec, told)}"
            )
        elif likeliest > size:  # such a request would end the engine
            problems.append(
                f"algorithm.distill.top_k={likeliest}: must be at most the size of "
                f"roles.{role.name}'s vocabulary, {size}"
            )
    if problems:
        raise ConfigError(problems)


def _other_size(spec: ModelSpec, must: str) -> str:
    return f"the size of its vocabulary, {spec.vocab_size}, {must}"
