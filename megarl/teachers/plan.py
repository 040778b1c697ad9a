"""Teachers and references among the roles: checks that they fit the run, and finds the shapes of
those on the trainer's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.algorithms import recipes
from megarl.base.teacher_scores import TeacherFormat
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
    result: dict[str, float] = {}
    for name, settings in roles_of(config).items():
        if role_of(name, settings) == TEACHER:
            result[name] = settings.weight
    return result


def teacher_format(config: RunConfig) -> TeacherFormat:
    """The format of the log-probs that teachers on engines add to each response."""
    names = []
    for name, settings in roles_of(config).items():
        if name in teachers_of(config) and place_of(name, settings) == ENGINES:
            names.append(name)
    return TeacherFormat(len(names), config.algorithm.distill.likeliest)


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
        needed_place = PLACE_OF.get(distill.over, place)
        if needed_place != place:
            if place == ENGINES:
                explanation = "SGLang gives only the likeliest tokens"
            else:
                explanation = "the whole vocabulary is known there: set over=vocabulary"
            yield (
                f"algorithm.distill.over={distill.over}: needs roles.{name}.on={needed_place}; it "
                f"is on {place}, and {explanation}"
            )
        if place == ENGINES and config.rollout.temperature != 1:
            reason = "SGLang gives log-probs of its input at temperature 1 only"
            yield (
                f"rollout.temperature={config.rollout.temperature}: must be 1 with roles.{name} "
                f"on engines: {reason}"
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
    frozen = []
    problems = []
    for name, settings in (
        roles_of(config).items() if command not in (*BEFORE, "eval", "label") else ()
    ):
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
            if missing and maker:
                spec = future_spec(config, maker, settings)
            else:
                spec = load_spec(settings.path, key, config.model.family)
            if spec.head != LM:
                problems_of_role = ["is a reward model or critic, which gives no probabilities"]
            else:
                problems_of_role = []
            problems_of_role += misfits(config, spec, policy)
            if (
                spec.vocab_size != policy.vocab_size
                and role == TEACHER
                and config.algorithm.distill.over != SAMPLED
            ):
                problems_of_role.append(
                    _size_problem(
                        spec,
                        f"must be the policy's, {policy.vocab_size}, for "
                        "algorithm.distill.over=vocabulary",
                    )
                )
            problems += [f"{key}={settings.path}: {problem}" for problem in problems_of_role]
            frozen.append(FrozenRole(name, role, settings.path, spec))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tuple(frozen)


def check_served_teachers(
    config: RunConfig, served: tuple[ServedRole, ...], policy: ModelSpec
) -> None:
    """Raises ConfigError if a teacher on engines lacks some of the policy's tokens, or has fewer
    tokens than distill.top_k.
    """
    problems = []
    likeliest = config.algorithm.distill.likeliest
    for role in (served_role for served_role in served if served_role.role == TEACHER):
        size = role.spec.vocab_size
        if size < policy.vocab_size:
            requirement = f"must be at least the policy's, {policy.vocab_size}"
            problems.append(
                f"roles.{role.name}.path={role.settings.path}: "
                f"{_size_problem(role.spec, requirement)}"
            )
        elif likeliest > size:  # such a request would end the engine
            problems.append(
                f"algorithm.distill.top_k={likeliest}: must be at most the size of "
                f"roles.{role.name}'s vocabulary, {size}"
            )
    if problems:
        raise ConfigError(problems)


def _size_problem(spec: ModelSpec, requirement: str) -> str:
    return f"the size of its vocabulary, {spec.vocab_size}, {requirement}"
