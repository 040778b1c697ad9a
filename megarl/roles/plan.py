"""The models beside the policy: checks their settings, and finds the shapes of the models on
engines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megarl.algorithms import recipes
from megarl.config.algorithms import OUTCOME, PROCESS, RETURNS
from megarl.config.errors import ConfigError
from megarl.config.keys import yaml_text
from megarl.config.schema import (
    BY_CALLS,
    MAX_REWARD,
    UNSCORED,
    GeneratorConfig,
    RunConfig,
)
from megarl.config.tasks import by_source, tasks_of, with_source_keys
from megarl.data.rows import held_out
from megarl.generator.groups import EngineGroup
from megarl.messaging.rendezvous import PURPOSES, Purpose
from megarl.models import ModelSpec, load_spec
from megarl.models.registry import CAUSAL_LM, CLASSIFICATION, family, missing_folder
from megarl.rewards.score import (
    RewardPart,
    parts_in_evaluation,
    parts_in_labels,
    parts_in_win_rate,
    parts_of_source,
    trained_parts,
)
from megarl.roles.settings import (
    CHAT,
    CRITIC,
    ENGINES,
    INITIAL,
    JUDGE,
    PAIRWISE,
    PLACES,
    REFERENCE,
    REWARD_MODEL,
    STEPS,
    TEACHER,
    RoleConfig,
    flat,
    place_of,
    role_of,
)

NAME = re.compile(r"[A-Za-z0-9][\w-]*")
# names that other processes have
TAKEN = (
    *"trainer reward tool sft evaluate export hub evaluation label".split(),
    *(purpose.driver for purpose in PURPOSES),
    *(purpose.prefix for purpose in PURPOSES),
)
TAKEN_PARTS = ("penalty", "turns")  # metrics: reward/penalty/mean, reward/turns/mean
# The reward models that SGLang has: a linear map to one score, or Qwen2.5-Math-RM's two layers.
TWO_LAYERS = "Qwen2ForRewardModel"
SERVED = (*(f"{family}{CLASSIFICATION}" for family in ("Llama", "Qwen2", "Qwen3")), TWO_LAYERS)
BEFORE = ("sft", "reward-model", "export")  # commands that need no models beside the policy
_SHAPE_KEYS = (
    "engines",
    "tp",
    "ep",
    "max_concurrency",
    "kv_cache_tokens",
    "mem_fraction",
    "server_args",
)
ENGINE_KEYS = (*_SHAPE_KEYS, "timeout_s")
_JUDGE_KEYS = (
    "chat",
    "mode",
    "verdict",
    "verdict_scores",
    "verdict_range",
    "temperature",
    "max_tokens",
    "opponents",
)
# role -> its keys besides role, path and on; a role on engines also has the engines' settings
_KEYS = {
    CRITIC: (),
    REWARD_MODEL: ("template", "chat_template", "scores", "step_separator"),
    JUDGE: ("template", "chat_template", *_JUDGE_KEYS),
    TEACHER: ("weight",),
    REFERENCE: (),
    INITIAL: (),
}


@dataclass(frozen=True)
class ServedRole:
    """A frozen model on engines of its own."""

    name: str
    settings: RoleConfig
    spec: ModelSpec
    dtype: str

    @property
    def role(self) -> str:
        return role_of(self.name, self.settings)

    @property
    def group(self) -> EngineGroup:
        shape = GeneratorConfig(**{key: getattr(self.settings, key) for key in _SHAPE_KEYS})
        purpose = Purpose(
            prefix=self.name, text=f"engines of {self.name}", section=f"roles.{self.name}"
        )
        return EngineGroup("", shape, purpose=purpose)


def roles_of(config: RunConfig) -> dict[str, RoleConfig]:
    return {name: settings for name, settings in config.roles.items() if settings is not None}


def pairwise(config: RunConfig, part: RewardPart) -> bool:
    """Whether the part compares the responses to a prompt, rather than scoring each by itself."""
    name = part.role or ""
    settings = config.roles.get(name)
    if settings is None or role_of(name, settings) != JUDGE:
        return False
    return settings.mode == PAIRWISE


def pairs(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Pairs of responses, each once: all pairs, or each response with the next `opponents`
    responses in a circle.
    """
    furthest = count // 2 if opponents is None else min(opponents, count // 2)
    found_pairs: set[tuple[int, int]] = set()
    for first in range(count):
        for step in range(1, furthest + 1):
            second = (first + step) % count
            if first != second:
                found_pairs.add((min(first, second), max(first, second)))
    return sorted(found_pairs)


def check_roles(config: RunConfig) -> Iterator[str]:
    used = _roles_in_training(config) | _roles_in_evaluation(config) | _roles_in_labels(config)
    for name, settings in roles_of(config).items():
        key = f"roles.{name}"
        role = role_of(name, settings)
        if not NAME.fullmatch(name) or name in TAKEN:
            yield (
                f"{key}: its name must be letters, digits, - and _, and none of {', '.join(TAKEN)}"
            )
        elif role not in PLACES:
            yield (
                f"{key}.role=null: must be one of {', '.join(PLACES)}; only a role that is "
                "called so needs none"
            )
        elif settings.on not in (None, *PLACES[role]):
            yield f"{key}.on={settings.on}: a {role} must be on {' or '.join(PLACES[role])}"
        else:
            yield from _foreign_keys(key, settings, role, place_of(name, settings) == ENGINES)
            yield from _CHECKS[role](config, key, settings)
            if role in (REWARD_MODEL, JUDGE) and name not in used:
                yield (
                    f"{key}: nothing uses it; name it in reward.name, reward.parts, eval.reward, "
                    "eval.win_rate, label.reward or data.train.sources.NAME.reward, or set "
                    f"{key}=null"
                )
    for role in (CRITIC, REFERENCE, INITIAL):
        names = []
        for name, settings in roles_of(config).items():
            if role_of(name, settings) == role:
                names.append(name)
        if len(names) > 1:
            yield f"roles.{names[1]}: a run has one {role}, and roles.{names[0]} is one"


def _roles_in_training(config: RunConfig) -> set[str | None]:
    return {part.role for part in trained_parts(config)}


def _roles_in_evaluation(config: RunConfig) -> set[str | None]:
    roles = {part.role for part in parts_in_win_rate(config)}
    for suite in [name for name, *_ in held_out(config)] or [""]:
        roles |= {part.role for part in parts_in_evaluation(config, suite)}
    return roles


def _roles_in_labels(config: RunConfig) -> set[str | None]:
    return {part.role for part in parts_in_labels(config)}


def _foreign_keys(key: str, settings: RoleConfig, role: str, on_engines: bool) -> Iterator[str]:
    """Problems with settings that only another role has, or the same role in another place."""
    allowed = ("role", "path", "on", "sft", *_KEYS[role])
    if on_engines:
        allowed += ENGINE_KEYS
    default = RoleConfig()
    for field in fields(settings):
        name = field.name
        value = getattr(settings, name)
        if name not in allowed and value != getattr(default, name):
            place = ""
            if name in ENGINE_KEYS and ENGINES in PLACES[role]:
                place = " on the trainer's ranks"
            yield f"{key}.{name}={yaml_text(value)}: a {role}{place} has no such setting"


def _check_critic(config: RunConfig, key: str, settings: RoleConfig) -> Iterator[str]:
    if not recipes.has_critic(config.algorithm):
        yield f"{key}: {recipes.no_critic(config.algorithm)}"


def _check_reward_model(config: RunConfig, key: str, settings: RoleConfig) -> Iterator[str]:
    if settings.template not in (None, CHAT):
        yield from _check_fields(key, settings.template, "{response}")
    if settings.scores != STEPS:
        if settings.step_separator != RoleConfig().step_separator:
            shown = yaml_text(settings.step_separator)
            yield f"{key}.step_separator={shown}: needs {key}.scores={STEPS}"
        return
    steps = f"{key}.scores={STEPS}"
    if config.algorithm.credit == OUTCOME:
        yield (
            f"{steps}: needs algorithm.credit={RETURNS} or {PROCESS}; {OUTCOME} would ignore all "
            "steps but the last"
        )
    for source, task in tasks_of(config).items():
        roles = {f"roles.{part.role}" for part in parts_of_source(config, source)}
        if key in roles and task.rollout.name in BY_CALLS:
            rollout = f"{with_source_keys('rollout.name', config, source)}={task.rollout.name}"
            yield (
                f"{steps}: needs episodes of one sequence; those of {rollout} may have branches "
                "(docs/agents.md)"
            )


def _check_judge(config: RunConfig, key: str, settings: RoleConfig) -> Iterator[str]:
    compares = settings.mode == PAIRWISE
    if settings.template is None:
        yield f"{key}.template=null: must be set: what the judge reads"
    else:
        needed = ("{response_a}", "{response_b}") if compares else ("{response}",)
        yield from _check_fields(key, settings.template, *needed)
    if settings.verdict is None:
        yield f"{key}.verdict=null: must be set: a regular expression with one group"
    else:
        yield from _check_pattern(key, settings.verdict)
    for word, score in settings.verdict_scores.items():
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if not is_number or not abs(score) <= MAX_REWARD:
            yield (
                f"{key}.verdict_scores.{word}={yaml_text(score)}: must be a number of at most "
                f"{MAX_REWARD:g} in size"
            )
        elif compares and not 0 <= score <= 1:
            yield (
                f"{key}.verdict_scores.{word}={score}: must be in [0, 1] for "
                f"{key}.mode=pairwise: what {{response_a}} wins"
            )
    low, high = settings.verdict_range
    if not low < high:
        yield (
            f"{key}.verdict_range={yaml_text(settings.verdict_range)}: the first number must be "
            "below the second"
        )
    if settings.opponents is not None and not compares:
        yield f"{key}.opponents={settings.opponents}: needs {key}.mode=pairwise"
    in_training = key.removeprefix("roles.") in _roles_in_training(config)
    if compares and in_training and config.rollout.n < 2:
        yield (
            f"rollout.n={config.rollout.n}: must be at least 2: {key} compares the responses to "
            "a prompt"
        )


def _check_fields(key: str, template: str, *needed: str) -> Iterator[str]:
    """Problems with fields that are missing, or misspelt and so read as plain text."""
    missing = [name for name in needed if name not in template]
    if missing:
        yield f"{key}.template={template!r}: must contain {' and '.join(missing)}"
        return
    fields = ("{prompt}", "{answer}", *needed)
    for name in dict.fromkeys(re.findall(r"\{\w+\}", template)):
        near = difflib.get_close_matches(name.lower(), fields, n=1, cutoff=0.8)
        if name not in fields and near:
            yield (
                f"{key}.template={template!r}: {name} is none of its fields; did you mean "
                f"{near[0]}?"
            )


def _check_pattern(key: str, pattern: str) -> Iterator[str]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield f"{key}.verdict={pattern}: is not a regular expression: {error}"
        return
    if groups != 1:
        yield (
            f"{key}.verdict={pattern}: must have one group, not {groups}; (?:…) groups without "
            "counting"
        )


def _check_teacher(config: RunConfig, key: str, settings: RoleConfig) -> Iterator[str]:
    return iter(())  # see teachers.check_distillation


def _check_initial(config: RunConfig, key: str, settings: RoleConfig) -> Iterator[str]:
    if not held_out(config):
        yield f"{key}: needs held-out prompts: set data.eval.source"


def _check_reference(config: RunConfig, key: str, settings: RoleConfig) -> Iterator[str]:
    if recipes.needs_reference(config.algorithm) is None:
        yield f"{key}: nothing uses it; set algorithm.kl_coef, or an algorithm with a beta"


_CHECKS = {
    CRITIC: _check_critic,
    REWARD_MODEL: _check_reward_model,
    JUDGE: _check_judge,
    TEACHER: _check_teacher,
    REFERENCE: _check_reference,
    INITIAL: _check_initial,
}


def check_reward(config: RunConfig) -> Iterator[str]:
    """Problems with reward parts that nothing scores, or that have an invalid name."""
    yield from _check_part_names(config)
    evaluated: list[RewardPart] = []
    for suite, *_ in held_out(config):
        evaluated += parts_in_evaluation(config, suite)
    others = (*parts_in_win_rate(config), *parts_in_labels(config))
    for part in dict.fromkeys((*trained_parts(config), *evaluated, *others)):
        settings = config.roles.get(part.role or "")
        if part.name == UNSCORED:
            yield from _check_unscored(config, part, part in evaluated)
        if part.role is None:
            continue
        if settings is None:
            names = ", ".join(roles_of(config)) or "none"
            yield f"{part.setting}: there is no such role; there is {names}"
            continue
        role = role_of(part.role, settings)
        if role not in (REWARD_MODEL, JUDGE):
            yield f"{part.setting}: must be a {REWARD_MODEL} or a {JUDGE}; it is a {role}"
        elif part in evaluated and pairwise(config, part):
            yield (
                f"{part.setting}: compares the responses to a prompt, which says nothing of "
                "held-out ones; set eval.reward to another"
            )


@by_source
def _check_part_names(config: RunConfig) -> Iterator[str]:
    for name, reward_part in config.reward.parts.items():
        if reward_part is not None and (not NAME.fullmatch(name) or name in TAKEN_PARTS):
            yield (
                f"reward.parts.{name}: its name must be letters, digits, - and _, and none of "
                f"{', '.join(TAKEN_PARTS)}"
            )


def _check_unscored(config: RunConfig, part: RewardPart, in_evaluation: bool) -> Iterator[str]:
    if part.part or part.key in ("eval.reward", "eval.win_rate", "label.reward"):
        yield f"{part.setting}: must score something"
    elif recipes.needs_reward(config.algorithm):
        yield (
            f"{part.setting}: {config.algorithm.name} learns from rewards; "
            "algorithm.name=distill learns from teachers alone"
        )
    elif in_evaluation:
        yield f"{part.setting}: scores no held-out responses either; set eval.reward"


def find_served(config: RunConfig, command: str | None) -> tuple[ServedRole, ...]:
    """The models on engines, if the command needs any.

    A checkpoint that megarl sft or reward-model will make from model.path counts as present until
    the run starts. Raises ConfigError with all problems of the checkpoints.
    """
    if command in BEFORE:
        return ()
    served_roles = []
    problems = []
    for name, settings in _roles_for(config, command).items():
        role = role_of(name, settings)
        if role not in PLACES or place_of(name, settings) != ENGINES:
            continue
        key = f"roles.{name}.path"
        missing = list(missing_folder(key, settings.path))
        maker = makers(config).get(settings.path)
        if missing and command is None:
            continue
        if missing and (maker is None or command in ("train", "eval", "label")):
            hint = f"; megarl {maker} writes it" if maker else ""
            problems += [f"{problem}{hint}" for problem in missing]
            continue
        try:
            if missing and maker:
                spec = future_spec(config, maker, settings)
                for problem in _future_misfits(maker, spec, role):
                    problems.append(f"{key}={settings.path}: {problem}")
            else:
                spec = _spec(settings, role, key)
            problems += _misfits(config, name, settings, spec)
            served_roles.append(ServedRole(name, settings, spec, config.model.dtype))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tuple(served_roles)


def _roles_for(config: RunConfig, command: str | None) -> dict[str, RoleConfig]:
    """The roles that a command needs. A run needs none that only labels use."""
    evaluating = _roles_in_evaluation(config)
    labelling = _roles_in_labels(config)
    roles = {}
    for name, settings in roles_of(config).items():
        is_initial = role_of(name, settings) == INITIAL
        needed = name not in labelling or name in evaluating | _roles_in_training(config)
        if command == "eval":
            needed = name in evaluating or is_initial
        elif command == "label":
            needed = name in labelling
        if needed:
            roles[name] = settings
    return roles


def makers(config: RunConfig) -> dict[str, str]:
    """Folder -> the command that makes the checkpoint there."""
    commands = {config.sft.output: "sft", config.reward_model.output: "reward-model"}
    for settings in roles_of(config).values():
        if settings.sft:
            commands[settings.path] = "sft"
    return commands


def future_spec(config: RunConfig, maker: str, settings: RoleConfig) -> ModelSpec:
    """The shape of the model that the command `maker` will make."""
    spec = load_spec(
        flat(settings.sft).get("model.path") or config.model.spec or config.model.path,
        own_family=config.model.family,
    )
    return spec.with_scalar_head() if maker == "reward-model" else spec


def _future_misfits(maker: str, spec: ModelSpec, role: str) -> Iterable[str]:
    """A problem if the model that the command `maker` will make does not fit this role."""
    architecture = family(spec).ARCHITECTURES[0]
    if maker == "reward-model":
        architecture = architecture.replace(CAUSAL_LM, CLASSIFICATION)
    reason = _misplaced(architecture, role)
    if reason:
        yield f"megarl {maker} writes a {architecture} there{reason}"


def _misplaced(architecture: str, role: str) -> str:
    """Why a model of this architecture cannot have this role; empty if it can.

    To be put after the architecture's name.
    """
    if role == REWARD_MODEL:
        return "" if architecture in SERVED else f"; SGLang's reward models are {', '.join(SERVED)}"
    scores = architecture.endswith(CLASSIFICATION) or architecture == TWO_LAYERS
    return f", which generates no text; a {role} must" if scores else ""


def _spec(settings: RoleConfig, role: str, key: str) -> ModelSpec:
    """The model's shape. Raises ConfigError for an architecture that does not fit this role."""
    architecture = _architecture(settings.path)
    reason = _misplaced(architecture, role) if architecture else ""
    if reason:
        raise ConfigError(f"{key}={settings.path}: is a {architecture}{reason}")
    return load_spec(settings.path, key, read_as=read_as(settings.path))


def read_as(path: str) -> Mapping[str, Any]:
    """What is read in the place of a config.json's values: a model with TWO_LAYERS has the shape of
    one with a single layer.
    """
    one_layer = {"architectures": [f"Qwen2{CLASSIFICATION}"], "num_labels": 1}
    return one_layer if _architecture(path) == TWO_LAYERS else {}


def _architecture(path: str) -> str:
    """The model's, from its config.json; empty if none is stated."""
    from megarl.data.tokenizer import read_json  # not at the top: the GPU kit has no tokenizers

    return (read_json(path, "config.json").get("architectures") or [""])[0]


def _misfits(config: RunConfig, name: str, settings: RoleConfig, spec: ModelSpec) -> Iterable[str]:
    key = f"roles.{name}"
    context = min(
        spec.max_position_embeddings, settings.kv_cache_tokens or spec.max_position_embeddings
    )
    if spec.num_attention_heads % settings.tp or settings.tp % min(settings.tp, spec.num_kv_heads):
        heads = (
            f"{spec.num_attention_heads} attention heads and {spec.num_kv_heads} key-value heads"
        )
        yield f"{key}.tp={settings.tp}: must divide the model's {heads}"
    if settings.ep > 1 and not spec.experts:
        yield f"{key}.ep={settings.ep}: must be 1: a {spec.family} model has no experts"
    elif settings.tp % settings.ep:
        yield f"{key}.ep={settings.ep}: must divide {key}.tp={settings.tp}"
    if role_of(name, settings) == JUDGE and settings.max_tokens >= context:
        yield (
            f"{key}.max_tokens={settings.max_tokens}: must be less than its context of "
            f"{context} (that of the model, or kv_cache_tokens)"
        )
    if role_of(name, settings) != JUDGE and config.rollout.max_tokens >= context:
        longest = f"rollout.max_tokens={config.rollout.max_tokens}"
        yield (
            f"{longest}: must be less than the context of {key}, {context}, prompt and response "
            "together"
        )
