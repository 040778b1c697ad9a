"""Checks the inputs of a command besides its settings, before anything starts: datasets, tokenizer,
weights, the user's own functions and classes, and disk space.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from megarl.agents.program import PROGRAM
from megarl.base.coroutines import run_coroutine
from megarl.config.algorithms import ALGORITHMS
from megarl.config.errors import ConfigError, RunError, problems_of
from megarl.config.schema import OF_HUBS, RolloutConfig, RunConfig
from megarl.config.tasks import source_of, task_of
from megarl.critic.plan import critic_path
from megarl.data.check import Checked, check_data
from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.models import ModelSpec
from megarl.models.registry import check_as_transformers, is_own
from megarl.plan.checkpoints import complete_checkpoints, exported_steps
from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import ITEM_BYTES, parameter_count
from megarl.rewards.extract import answer_forms
from megarl.rewards.pool import RewardMistake
from megarl.rewards.score import (
    CORRECT,
    RewardPart,
    Score,
    ScoreRequest,
    parts_in_evaluation,
    parts_in_labels,
    parts_of_source,
)
from megarl.roles.plan import ServedRole, read_as
from megarl.rollouts.environments.loading import check_rollout
from megarl.teachers.plan import FrozenRole
from megarl.trackers.trackers import check_trackers
from megarl.trainer.hf_files import check_checkpoint, check_config

# per parameter of a checkpoint: the float32 master weight and both of Adam's moments
OPTIMIZER_BYTES = 4 + 4 + 4


def check_room(plan: RunPlan, command: str) -> None:
    """Raises ConfigError if the disk, which all nodes see, has too little room for the files that
    `command` (train, sft, …) writes.
    """
    if command == "train":
        check_room_for_checkpoints(plan)
    elif command == "sft":
        check_room_for_weights(plan, "sft.output=", plan.config.sft.output)
        # a checkpoint is complete before the previous one is removed
        if 0 < plan.config.sft.save_every < plan.config.sft.steps:
            checkpoint_bytes = plan.trained_parameters * OPTIMIZER_BYTES
            files = "2 checkpoints of the warm start (sft.save_every)"
            _check_room("run_dir=", plan.config.run_dir, 2 * checkpoint_bytes, files)
    elif command == "reward-model":
        check_room_for_weights(plan, "reward_model.output=", plan.config.reward_model.output)


def check_room_for_checkpoints(plan: RunPlan) -> None:
    """Raises ConfigError if run_dir has no room for future checkpoints.

    Each one is completed before the oldest is removed.
    """
    config = plan.config
    existing = len(complete_checkpoints(config.run_dir))
    largest_count = config.checkpoint.keep + 1
    if config.checkpoint.keep_best is not None:
        # the best checkpoint, and the one that is being evaluated
        largest_count += 2 if config.eval.engines else 1
    count = max(1, largest_count - existing)
    parameters = plan.trained_parameters
    if plan.critic:
        parameters += parameter_count(plan.critic.with_scalar_head())
    needed_bytes = count * parameters * OPTIMIZER_BYTES
    qualifier = "more " if existing else ""
    best = ", keep_best" if config.checkpoint.keep_best else ""
    files = (
        f"{count} {qualifier}checkpoint{'s' * (count > 1)} "
        f"(checkpoint.keep={config.checkpoint.keep}{best})"
    )
    interval = config.checkpoint.hf_every
    if interval:
        steps = {*range(interval, config.max_steps + 1, interval), config.max_steps}
        exports = len(steps - exported_steps(config.run_dir))
        files = f"{files} and {exports} exports (checkpoint.hf_every={interval})"
        needed_bytes = needed_bytes + exports * _weights_bytes(plan)
    _check_room("run_dir=", config.run_dir, needed_bytes, files)


def check_room_for_weights(plan: RunPlan, option: str, folder: str | Path) -> None:
    """Raises ConfigError if `folder`, given by the user as `option`, has no room for the model as
    an HF checkpoint.
    """
    _check_room(option, folder, _weights_bytes(plan), "the weights")


def _weights_bytes(plan: RunPlan) -> int:
    return parameter_count(plan.spec) * ITEM_BYTES[plan.config.model.dtype]


def _check_room(option: str, folder: str | Path, needed_bytes: int, files: str) -> None:
    existing_folder = Path(folder).absolute()
    while not existing_folder.is_dir():
        existing_folder = existing_folder.parent
    free_bytes = shutil.disk_usage(existing_folder).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{option}{folder}: {files} will take {_size(needed_bytes)}, and {_size(free_bytes)} "
            "are free there"
        )


def _size(count: int) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.1f} MiB"


ABSURD = "}{ \\boxed{\u2603 </think> -1e999 \ufffd\n" * 40
TEXTS = {"the reference answer": None, "an empty text": "", "an absurd text": ABSURD}
# built-in rules that score the reference answer as right
_OF_ANSWERS = ("math", "last_number", "choice")


@dataclass(frozen=True)
class RewardTrial:
    """The scores that one part of the reward has given to a dataset's first rows, before anything
    starts. A dry run shows them.
    """

    part: RewardPart
    key: str  # config key of the dataset
    scores: Mapping[str, Sequence[Score]]  # name in TEXTS -> score of each row
    unread_form: str = ""  # in which a prompt asks for the answer, and the rule finds none

    def __str__(self) -> str:
        rows = len(next(iter(self.scores.values())))
        rewards: set[float] = set()
        texts = []
        for name, scores in self.scores.items():
            rewards.update(score.reward for score in scores)
            texts.append(f"{name} {', '.join(map(_score_text, scores))}")
        texts[0] = f"{self.part.setting}, {rows} row{'s' * (rows > 1)} of {self.key}: {texts[0]}"
        texts += self.remarks
        if len(rewards) == 1:
            texts.append("all of these score the same")
        return "; ".join(texts)

    @property
    def remarks(self) -> Iterator[str]:
        """Doubts about the scores that do not stop a run."""
        failures: dict[str, str] = {}  # reason -> name of the first text
        means = []
        for name, scores in self.scores.items():
            means.append(fmean(score.reward for score in scores))
            for score in scores:
                for failure in score.failures:
                    failures.setdefault(failure.reason, name)
        for reason, name in failures.items():
            yield f"scoring {name} failed: {reason}"
        if not failures and means[0] < max(means):
            yield "the reference answer scores less than an empty or absurd text"
        if self.unread_form:
            yield (
                f"the prompt asks for {self.unread_form}, where {self.part.name} finds no "
                "answer; it reads <answer>…</answer>, \\boxed{…}, #### …, Answer: …, or the "
                "last line"
            )


def _score_text(score: Score) -> str:
    if score.failures:
        return "failed"
    return f"{score.reward:g}"


def try_rewards(
    config: RunConfig, datasets: Sequence[Checked], thorough: bool, command: str = "train"
) -> list[RewardTrial]:
    """Scores three texts for the first row of each dataset with the user's own functions.

    If `thorough`, scores several rows, also with built-in rules. Raises ConfigError for all
    mistakes that would end the run, once for each function.
    """
    rows_by_part: dict[RewardPart, list[tuple[Checked, list[Row]]]] = {}
    for checked in datasets:
        rows = [row for row in checked.first if isinstance(row, Row)]
        source = source_of(config, checked.key)
        if not rows or _rewards_itself(task_of(config, source).rollout):
            continue
        if not thorough:
            rows = rows[:1]
        if command == "label":
            parts = parts_in_labels(config)
        elif checked.key.startswith("data.train"):
            parts = parts_of_source(config, source)
        else:
            parts = parts_in_evaluation(config, checked.key.removeprefix("eval.suites."))
        for part in parts:
            if ":" in part.name or (thorough and part.name in _OF_ANSWERS):
                rows_by_part.setdefault(part, []).append((checked, rows))
    if not rows_by_part:
        return []
    tokenizer = None
    # a dry run goes on without what the hub does not give (check_data)
    with contextlib.suppress(ConfigError):
        tokenizer = load_tokenizer(config.model)
    with tempfile.TemporaryDirectory(prefix="megarl-trial-") as logs:
        one_worker = replace(config, reward=replace(config.reward, workers=1))
        return run_coroutine(_try_parts(one_worker, rows_by_part, tokenizer, Path(logs)))


def _rewards_itself(rollout: RolloutConfig) -> bool:
    """Whether the environment or the program gives the reward."""
    return rollout.name in OF_HUBS or (
        rollout.name == PROGRAM and rollout.args.get("reward") == PROGRAM
    )


async def _try_parts(
    config: RunConfig,
    rows_by_part: Mapping[RewardPart, Sequence[tuple[Checked, Sequence[Row]]]],
    tokenizer: Tokenizer | None,
    logs: Path,
) -> list[RewardTrial]:
    from megarl.rollouts.rollout import open_part  # not at the top: it imports aiohttp

    trials: list[RewardTrial] = []
    problems: list[str] = []
    async with AsyncExitStack() as resources:
        for part, datasets in rows_by_part.items():
            score = await open_part(config, part, {}, resources, logs)
            context = ""
            try:
                for checked, rows in datasets:
                    scores: dict[str, list[Score]] = {}
                    for name, text in TEXTS.items():
                        requests = [
                            _request(row, part, checked.key, text, tokenizer) for row in rows
                        ]
                        context = f"it was given {name} to {rows[0].location or checked.source}"
                        scores[name] = [await score(request) for request in requests]
                    unread_form = ""
                    if part.name in _OF_ANSWERS:
                        unread_form = await _unread_form(rows, part, checked.key, score)
                    trials.append(RewardTrial(part, checked.key, scores, unread_form))
            except RewardMistake as mistake:
                problems.append(f"{mistake.description.replace(chr(10), '; ')}; {context}")
            except RunError as error:  # no worker could be started
                problems.append(f"{part.setting}: {error}")
    if problems:
        raise ConfigError(problems)
    return trials


async def _unread_form(
    rows: Sequence[Row],
    part: RewardPart,
    key: str,
    score: Callable[[ScoreRequest], Awaitable[Score]],
) -> str:
    """A form for which a prompt asks, if the built-in rule reads none of those in that prompt; else
    empty.
    """
    for row in rows:
        forms = answer_forms(row.prompt)
        requests = [
            _request(row, part, key, f"{before}{row.answer}{behind}", None)
            for before, behind in forms
        ]
        scores = [(await score(request)).reward for request in requests]
        if scores and max(scores) < CORRECT:
            return "…".join(forms[-1])
    return ""


def _request(
    row: Row, part: RewardPart, key: str, text: str | None, tokenizer: Tokenizer | None
) -> ScoreRequest:
    response = row.answer if text is None else text
    source = ""
    if ".sources." in key or key.startswith("eval.suites."):
        source = key.rpartition(".")[2]
    return ScoreRequest(
        response=response,
        answer=row.answer,
        # a rule counts no answer in thinking that the prompt begins
        prompt="" if part.name in _OF_ANSWERS else row.prompt,
        row=row.record,
        prompt_token_ids=tokenizer.encode_prompt(row.prompt, row.rendered) if tokenizer else [],
        token_ids=tokenizer.encode_text(response) if tokenizer else [],
        version=0,
        source=source,
    )


COMMANDS = {
    "train": "train",
    "dry-run": "train",
    "sft": "sft",
    "reward-model": "reward-model",
    "label": "label",
    "eval": "eval",
}  # command -> the command whose inputs it reads

TRACKED = ("train", "sft", "reward-model")
_MAY_BEGIN_RANDOM = ("sft", "reward-model")


@dataclass(frozen=True)
class Inputs:
    """The results of checking the datasets, and of the rewards on their first rows."""

    datasets: list[Checked]
    rewards: list[RewardTrial]

    @property
    def remarks(self) -> list[str]:
        """A line for each dataset and reward with something that the user may not know."""
        remarks = {f"Data: {dataset.key}": [*dataset.remarks] for dataset in self.datasets}
        for trial in self.rewards:
            remarks[f"Reward: {trial.part.setting} on {trial.key}"] = [*trial.remarks]
        return [f"{subject}: {'; '.join(texts)}" for subject, texts in remarks.items() if texts]


def check_inputs(
    config: RunConfig, command: str, plan: RunPlan | None, at_hand: bool = False
) -> Inputs:
    """Checks all inputs. `plan` is None if the settings do not give a valid one.

    With `at_hand`, checks what this machine has or the hub gives to it, and only the first prompts
    of long datasets. That works where a run could not. Raises ConfigError with all problems.
    """
    datasets: list[Checked] = []
    reads = COMMANDS[command]
    checks = [lambda: datasets.extend(check_data(config, plan and plan.spec, reads, at_hand))]
    if plan is not None:
        checks += _checks_of_models(config, plan, reads, at_hand)
    if reads in ("train", "eval", "label"):
        checks.append(lambda: check_rollout(config, at_hand))
    if reads == "train" and config.weights.transport != "auto":
        checks.append(lambda: check_weights_transport(config.weights.transport, at_hand))
    if reads == "train" and config.algorithm.name not in ALGORITHMS:
        checks.append(lambda: check_rule(config.algorithm.name))
    if reads in TRACKED:
        checks.append(lambda: check_trackers(config.observe.trackers))
    if plan is not None and not at_hand:
        checks.append(lambda: check_room(plan, reads))
    problems = problems_of(*checks)
    if problems:
        raise ConfigError(problems)
    if plan is None or reads not in ("train", "eval", "label"):
        return Inputs(datasets, rewards=[])
    return Inputs(datasets, try_rewards(config, datasets, at_hand, reads))


def _checks_of_models(
    config: RunConfig, plan: RunPlan, reads: str, at_hand: bool
) -> Iterator[Callable[[], None]]:
    """The checks of the policy's weights and of the models beside it."""

    def can_check(path: str) -> bool:
        return not at_hand or is_here(path, config)

    begins_random = config.model.random_init and not plan.weights.are_there
    if not (begins_random and reads in _MAY_BEGIN_RANDOM):
        yield lambda: check_weights(plan)
    yield lambda: check_configs(plan, reads, at_hand)
    if reads == "train":
        key, critic = critic_path(config)
        if plan.critic and critic and Path(critic).is_dir():
            yield partial(check_complete, key, plan.critic, Path(critic))
        if plan.adapters:
            yield plan.adapters.check_init
        for role in plan.frozen:
            if can_check(role.path):
                yield partial(check_frozen, role, config)
    if reads in ("train", "eval", "label"):
        for role in plan.served:
            if can_check(role.settings.path):
                yield partial(check_role, role, config)


def check_configs(plan: RunPlan, command: str, at_hand: bool) -> None:
    """Compares the config.json of every model that `command` loads with what Transformers' own
    class reads there. Raises ConfigError with all problems.
    """
    config = plan.config
    models = [("model.path", config.model.path, plan.spec)]
    key, critic = critic_path(config)
    if command == "train" and plan.critic and critic and Path(critic).is_dir():
        models.append((key, critic, plan.critic))
    if command == "train":
        models += [(f"roles.{role.name}.path", role.path, role.spec) for role in plan.frozen]
    if command in ("train", "eval", "label"):
        served = plan.served
        models += [(f"roles.{role.name}.path", role.settings.path, role.spec) for role in served]
    checks = [
        partial(check_as_transformers, path, spec, key, read_as(path))
        for key, path, spec in models
        if not is_own(spec) and (not at_hand or is_here(path, config))
    ]
    problems = problems_of(*checks)
    if problems:
        raise ConfigError(problems)


def check_weights(plan: RunPlan) -> None:
    """Raises ConfigError if the command begins with a checkpoint folder that is damaged or of
    another model.
    """
    folder = Path(plan.weights_path)
    if folder.is_dir() and not plan.weights.are_gone:
        check_config(plan.spec, folder)
        check_checkpoint(plan.spec, folder)


def check_complete(key: str, spec: ModelSpec, folder: Path) -> None:
    """Like `check_checkpoint`, for the folder that the setting `key` names."""
    problems = problems_of(lambda: check_checkpoint(spec, folder))
    if problems:
        raise ConfigError(
            [f"{key}={folder}: {problem.removeprefix(f'{folder}: ')}" for problem in problems]
        )


def is_here(path: str, config: RunConfig) -> bool:
    """Whether the checkpoint at `path` and the policy's tokenizer are on this machine."""
    return all(
        Path(folder).is_dir() for folder in (path, config.model.tokenizer or config.model.path)
    )


def check_frozen(role: FrozenRole, config: RunConfig) -> None:
    """Raises ConfigError if a model on the trainer's ranks is damaged, or has other tokens than the
    policy.
    """
    from megarl.teachers.engines import check_tokens  # not at the top: it imports aiohttp

    key = f"roles.{role.name}.path"
    if Path(role.path).is_dir():
        check_complete(key, role.spec, Path(role.path))
    check_tokens(key, role.path, load_tokenizer(config.model))


def check_role(role: ServedRole, config: RunConfig) -> None:
    """Raises ConfigError if a model beside the policy has no weights, or cannot read the policy's
    responses.
    """
    # not at the top: it imports aiohttp
    from megarl.roles.opening import check_role_weights, check_served

    check_role_weights(role)
    check_served(role, load_tokenizer(config.model))


def check_rule(name: str) -> None:
    """Raises ConfigError if the user's own algorithm cannot be used."""
    from megarl.algorithms.registry import find_rule  # not at the top: it imports torch

    find_rule(name)


def check_weights_transport(setting: str, at_hand: bool = False) -> None:
    """Raises ConfigError if the transport cannot work on this host; with `at_hand`, only if no
    transport has that name.
    """
    # not at the top: it imports torch
    from megarl.weight_sync.transports.choice import AUTO, check_transport, transport_class

    if not at_hand:
        check_transport(setting)
    elif setting != AUTO:
        transport_class(setting)
