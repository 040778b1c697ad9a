"""Turns a config into the frozen plan of a run, or raises one error with all problems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.errors import ConfigError, problems_of
from megarl.config.keys import with_settings
from megarl.config.schema import IGNORE, RunConfig
from megarl.critic.plan import check_critic, find_critic
from megarl.generator.groups import EngineGroup
from megarl.lora.plan import AdapterPlan, check_first_adapters
from megarl.lora.settings import LoraConfig
from megarl.models import ModelSpec, load_spec
from megarl.models.registry import CLASSIFICATION, did_you_mean, missing_folder
from megarl.models.spec import SCALAR
from megarl.plan.checks import (
    COMMAND_CHECKS,
    CONFIG_CHECKS,
    MODEL_CHECKS,
    PLANNING_COMMANDS,
    RUN_MODEL_CHECKS,
    check_batch,
    check_sizes,
    problems_by_group,
    with_model,
)
from megarl.plan.topologies import engine_groups, trainer_topology
from megarl.plan.weights import WeightsSource, find_weights, missing_weights, with_date
from megarl.reshard.layout import parameter_count
from megarl.roles.plan import ServedRole, find_served
from megarl.roles.settings import REFERENCE
from megarl.speculative.settings import NEXTN, NGRAM
from megarl.teachers.plan import FrozenRole, check_served_teachers, find_frozen

# commands that render prompts, or go on to one that does
DATED = ("train", "dry-run", "sft", "reward-model", "label", "eval", "export")
# command -> the section that may set its own parallel sizes
SIZE_SECTIONS = {"sft": "sft", "reward-model": "reward_model"}


@dataclass(frozen=True)
class RunPlan:
    """Everything about a run that follows from its config alone.

    The launcher chooses hosts and ports.
    """

    config: RunConfig
    spec: ModelSpec
    trainer_topology: TrainerTopology
    steps: int  # of the whole run; each has one batch and makes one version of the weights
    sequences_per_step: int  # prompts_per_step * n
    weights: WeightsSource  # the weights that the command begins with
    # shape of the critic's first checkpoint, which may have another head; None: no critic
    critic: ModelSpec | None = None
    served: tuple[ServedRole, ...] = ()  # the frozen models on engines of their own
    frozen: tuple[FrozenRole, ...] = ()  # the frozen models on the trainer's ranks

    @property
    def weights_path(self) -> str:
        return self.weights.path

    @property
    def reference(self) -> FrozenRole | None:
        """The reference model of the KL divergence, if it is not the model that the run began
        with.
        """
        return next((role for role in self.frozen if role.role == REFERENCE), None)

    @property
    def adapters(self) -> AdapterPlan | None:
        """Low-rank adapters (LoRA) that are trained in the place of the policy's weights; None: the
        weights are trained.
        """
        return AdapterPlan.of(self.config, self.spec)

    @property
    def sent_adapters(self) -> AdapterPlan | None:
        """The adapters, if updates carry them alone.

        None: updates carry all weights, with adapters merged into them if there are any.
        """
        adapters = self.adapters
        return adapters if adapters is not None and adapters.are_sent_alone() else None

    @property
    def trained_parameters(self) -> int:
        """The number of the policy's parameters that are trained."""
        return parameter_count(self.spec) if self.adapters is None else self.adapters.parameters

    @cached_property
    def groups(self) -> tuple[EngineGroup, ...]:
        """The groups of engines of one shape."""
        return engine_groups(self.config.generator)

    @property
    def engines(self) -> int:
        return sum(group.settings.engines for group in self.groups)

    @property
    def places(self) -> int:
        """The requests that all engines run together."""
        return sum(group.places for group in self.groups)

    @property
    def topologies(self) -> list[GeneratorTopology]:
        """[engine] the topology of its group."""
        return [group.topology for group in self.groups for _ in group.numbers]

    def with_engines(self, counts: Sequence[int]) -> RunPlan:
        """The plan with these numbers of engines, one for each group."""
        settings = {
            f"{group.key}.engines": count for group, count in zip(self.groups, counts, strict=True)
        }
        return replace(self, config=with_settings(self.config, settings))

    def group_alone(self, name: str) -> RunPlan:
        """The plan with only the engines of one group, as if there were no groups."""
        (group,) = (group for group in self.groups if group.name == name)
        return replace(self, config=replace(self.config, generator=group.settings))


def resolve(config: RunConfig, command: str | None = None) -> RunPlan:
    """Checks `config` as a whole and derives the plan from it.

    Nothing is started, nothing is written.

    `command` ("train", "sft", "eval", …) adds the checks for this command. "dry-run" adds those of
    "train", but weights that megarl sft will make may be missing. Raises ConfigError with all
    problems.
    """
    batch_problems = list(check_batch(config))  # with the trainer's sizes, not a warm start's
    if command in DATED:
        config = with_date(config, command)
    if command in SIZE_SECTIONS:
        config = with_command_sizes(config, SIZE_SECTIONS[command])
    if command == "sft" and not config.sft.adapters:
        config = replace(config, lora=LoraConfig())
    checks = CONFIG_CHECKS + COMMAND_CHECKS.get(command or "", ())
    problems = problems_by_group(config, [check for check in checks if check is not check_batch])
    try:
        spec = find_spec(config)
    except ConfigError as error:
        raise ConfigError(
            batch_problems + _with_command_keys(problems, command, config) + error.problems
        ) from error
    config = with_routing_replay(config, spec, command)
    model_checks = MODEL_CHECKS
    if command not in PLANNING_COMMANDS:
        model_checks += RUN_MODEL_CHECKS
    problems += problems_by_group(config, [with_model(check, spec) for check in model_checks])
    problems = [
        *batch_problems,
        *_with_command_keys(problems, command, config),
        *missing_weights(config, command),
        *check_first_adapters(config, command),
    ]
    problems += problems_of(
        lambda: check_critic(config, spec, command), lambda: find_frozen(config, spec, command)
    )
    problems += problems_of(
        lambda: check_served_teachers(config, find_served(config, command), spec)
    )
    if spec.head == SCALAR and command not in (None, "reward-model"):
        problems.append(
            f"model.path={config.model.path}: is a reward model or critic ({CLASSIFICATION}), "
            "which generates no text"
        )
    if spec.vision_tower and command == "reward-model":
        problems.append(
            f"model.path={config.model.path}: must have no vision tower for megarl reward-model: "
            "what it writes would keep the name of a model that generates text"
        )
    # the dry run will tell the user to run megarl sft first
    if command == "dry-run" and not find_weights(config, command).are_there:
        size_check = with_model(check_sizes, spec)
        sft_problems = problems_by_group(with_command_sizes(config, "sft"), [size_check])
        for problem in _with_command_keys(sft_problems, "sft", config):
            # the generator's sizes are the same
            if problem not in problems:
                problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return _planned(config, spec, command)


def with_routing_replay(config: RunConfig, spec: ModelSpec, command: str | None) -> RunConfig:
    """The config with trainer.routing_replay decided where it is null: true where experts,
    asynchrony and engines that return their choices meet. False for megarl sft, which may get the
    decided config of the run after it: demonstrations come without choices.
    """
    replays = config.trainer.routing_replay
    if command == "sft" and spec.experts:
        replays = False
    elif replays is None:
        trains = command in ("train", "dry-run", "plan", None) and bool(spec.experts)
        returned = config.generator.speculative.algorithm != NGRAM
        replays = trains and returned and config.async_.capacity != 0
    return replace(config, trainer=replace(config.trainer, routing_replay=replays))


def checked_before(config: RunConfig, command: str | None) -> RunPlan:
    """The plan of a config that `resolve` has accepted in another process, and that already has the
    command's own sizes.
    """
    return _planned(config, find_spec(config), command)


def _planned(config: RunConfig, spec: ModelSpec, command: str | None) -> RunPlan:
    return RunPlan(
        config=config,
        spec=spec,
        trainer_topology=trainer_topology(config.trainer),
        steps=config.max_steps,
        sequences_per_step=config.rollout.prompts_per_step * config.rollout.n,
        weights=find_weights(config, command),
        critic=find_critic(config, spec),
        served=find_served(config, command),
        frozen=find_frozen(config, spec, command),
    )


def with_command_sizes(config: RunConfig, section: str) -> RunConfig:
    """The config with the parallel sizes of `section` as the trainer's.

    They may differ, since its command exports to HF format.

    If the section sets any size, the command has only those sizes. If it sets none, the command has
    the trainer's.
    """
    command_sizes = _command_sizes(config, section)
    if not command_sizes:
        return config
    sizes = dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp", "dp"), 1) | command_sizes
    trainer = replace(
        config.trainer,
        **sizes,
        first_stage_layers=None,
        last_stage_layers=None,
        sequence_parallel=config.trainer.sequence_parallel and sizes["tp"] > 1,
    )
    return replace(config, trainer=trainer)


def _command_sizes(config: RunConfig, section: str) -> dict[str, int]:
    if section == "sft":
        sizes = {"tp": config.sft.tp, "pp": config.sft.pp, "dp": config.sft.dp}
    else:
        settings = config.reward_model
        sizes = {"tp": settings.tp, "pp": settings.pp, "dp": settings.dp}
    return {axis: size for axis, size in sizes.items() if size is not None}


def _with_command_keys(problems: list[str], command: str | None, config: RunConfig) -> list[str]:
    """The problems, with a command's own sizes named by the keys that the user has set."""
    section = SIZE_SECTIONS.get(command or "")
    if section is None or not _command_sizes(config, section):
        return problems
    return [re.sub(r"\btrainer\.(tp|pp|dp)\b", rf"{section}.\1", problem) for problem in problems]


def find_spec(config: RunConfig) -> ModelSpec:
    """The model's shape, from `model.path`, or from `model.spec` if the checkpoint is not on this
    machine.

    Raises ConfigError if a folder is missing, a config.json cannot be used, or the two disagree.
    """
    model = config.model
    problems = list(missing_folder("model.path", model.path))
    if model.tokenizer:
        problems += missing_folder("model.tokenizer", model.tokenizer)
    if model.spec is not None and not Path(model.spec).exists():
        problems.append(f"model.spec={model.spec}: no such file{did_you_mean(Path(model.spec))}")
    if model.path == config.sft.output and problems:
        problems[0] += "; megarl sft writes it"
    if problems:
        raise ConfigError(problems)
    run_problem = _run_folder_problem(Path(model.path))
    if run_problem:
        raise ConfigError(f"model.path={model.path}: {run_problem}")
    mtp = config.trainer.mtp != IGNORE
    drafts = mtp and config.generator.speculative.algorithm == NEXTN
    if model.spec is None:
        return replace(_load_checkpoint_spec(model.path, model.family, mtp), mtp_drafts=drafts)
    spec = load_spec(model.spec, "model.spec", model.family, mtp)
    if Path(model.path).is_dir():
        checkpoint_spec = load_spec(model.path, own_family=model.family, mtp=mtp)
        differences = []
        for name, value in vars(spec).items():
            if value != getattr(checkpoint_spec, name):
                differences.append(f"{name} {value!r}")
        if differences:
            raise ConfigError(
                f"model.spec={model.spec}: must agree with model.path={model.path}; it differs in "
                f"{', '.join(differences)}"
            )
    return replace(spec, mtp_drafts=drafts)


def _load_checkpoint_spec(path: str, own_family: str | None, mtp: bool) -> ModelSpec:
    try:
        return load_spec(path, own_family=own_family, mtp=mtp)
    except ConfigError as error:
        if Path(path).is_dir():
            raise
        raise ConfigError(
            [
                f"{problem}; to plan without the checkpoint, set model.spec"
                for problem in error.problems
            ]
        ) from error


def _run_folder_problem(path: Path) -> str:
    """What to do if the folder belongs to a run and is not a Hugging Face model; otherwise
    empty.
    """
    if (path / "config.json").exists():
        return ""
    step = re.fullmatch(r"step_0*(\d+)", path.name)
    if step and path.parent.name == "checkpoints":
        return (
            "is a checkpoint, not a model; first: megarl export CONFIG "
            f"run_dir={path.parent.parent} --step {step[1]} --output FOLDER"
        )
    run = path.parent if path.name == "checkpoints" else path
    if not any(run.glob("checkpoints/step_*")):
        return ""
    return (
        "holds a run's checkpoints, no model; first: megarl export CONFIG "
        f"run_dir={run} --output FOLDER"
    )
