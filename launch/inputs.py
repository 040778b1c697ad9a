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

from megarl.agents.program import PROGRAM
from megarl.base.coroutines import run_coroutine
from megarl.config.algorithms import ALGORITHMS
from megarl.config.errors import ConfigError, RunError, problems_of
from megarl.config.schema import OF_HUBS, RunConfig
from megarl.critic.plan import critic_path
from megarl.data.check import Checked, check_data
from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.models import ModelSpec
from megarl.models.registry import check_as_transformers, is_own
from megarl.plan.checkpoints import complete_checkpoints, exported_steps
from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import ITEM_BYTES, parameter_count
from megarl.rewards.extract import asked_forms
from megarl.rewards.pool import RewardMistake
from megarl.rewards.score import CORRECT, Part, Score, ScoreRequest, parts_in_evaluation, parts_of
from megarl.roles.plan import ServedRole
from megarl.rollouts.environments.loading import check_rollout
from megarl.teachers.plan import FrozenRole
from megarl.trackers.trackers import check_trackers
from megarl.trainer.hf_files import check_checkpoint, check_config

# Checks that the disk has room for everything a command will write, before it computes for hours.
# All nodes see the same disk.


# per parameter of a checkpoint: the float32 master weight and both of Adam's moments
OPTIMIZER_BYTES = 4 + 4 + 4


def check_room(plan: RunPlan, command: str) -> None:
    """Raises ConfigError if there is too little room for the files that `command` (train, sft, …)
    writes.
    """
    if command == "train":
        check_room_for_checkpoints(plan)
    elif command == "sft":
        check_room_for_weights(plan, "sft.output=", plan.config.sft.output)
        # a checkpoint is complete before the previous one is removed
        if 0 < plan.config.sft.save_every < plan.config.sft.steps:
            each_bytes = plan.trained_parameters * OPTIMIZER_BYTES
            _check(
                "run_dir=",
                plan.config.run_dir,
                2 * each_bytes,
                "2 checkpoints of the warm start (sft.save_every)",
            )
    elif command == "reward-model":
        check_room_for_weights(plan, "reward_model.output=", plan.config.reward_model.output)


def check_room_for_checkpoints(plan: RunPlan) -> None:
    """Raises ConfigError if run_dir has no room for future checkpoints.

    Each one is completed before the oldest is removed.
    """
    config = plan.config
    there = len(complete_checkpoints(config.run_dir))
    most = config.checkpoint.keep + 1
    if config.checkpoint.keep_best is not None:
        # the best checkpoint, and the one that is being evaluated
        most += 2 if config.eval.engines else 1
    number = max(1, most - there)
    parameters = plan.trained_parameters + (
        parameter_count(plan.critic.with_scalar_head()) if plan.critic else 0
    )
    each_bytes = parameters * OPTIMIZER_BYTES
    more = "more " if there else ""
    best = ", keep_best" if config.checkpoint.keep_best else ""
    what = (
        f"{number} {more}checkpoint{'s' * (number > 1)} "
        f"(checkpoint.keep={config.checkpoint.keep}{best})"
    )
    needed_bytes = number * each_bytes
    if every := config.checkpoint.hf_every:
        exports = len(
            {*range(every, config.max_steps + 1, every), config.max_steps}
            - exported_steps(config.run_dir)
        )
        what = f"{what} and {exports} exports (checkpoint.hf_every={every})"
        needed_bytes = needed_bytes + exports * _weights_bytes(plan)
    _check("run_dir=", config.run_dir, needed_bytes, what)


def check_room_for_weights(plan: RunPlan, option: str, folder: str | Path) -> None:
    """Raises ConfigError if `folder`, given by the user as `option`, has no room for the model as
    an HF checkpoint.
    """
    _check(option, folder, _weights_bytes(plan), "the weights")


def _weights_bytes(plan: RunPlan) -> int:
    return parameter_count(plan.spec) * ITEM_BYTES[plan.config.model.dtype]


def _check(option: str, folder: str | Path, needed_bytes: int, what: str) -> None:
    there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{option}{folder}: {what} will take {_size(needed_bytes)}, and {_size(free_bytes)} "
            "are free there"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


# Tries the rewards on a few rows before anything starts. A dry run shows the scores. A run is
# refused if a reward would end it.


ABSURD = "}{ \\boxed{\u2603 </think> -1e999 \ufffd\n" * 40
TEXTS = {"the reference answer": None, "an empty text": "", "an absurd text": ABSURD}
# built-in rules that score the reference answer as right
_OF_ANSWERS = ("math", "last_number", "choice")


@dataclass(frozen=True)
class Tried:
    """The scores that one part of the reward has given to a dataset's first rows."""

    part: Part
    key: str  # config key of the dataset
    scores: Mapping[str, Sequence[Score]]  # name in TEXTS -> score of each row
    unread_form: str = ""  # in which a prompt asks for the answer, and the rule finds none

    def __str__(self) -> str:
        told = "; ".join(
            f"{name} {', '.join(map(_shown, scores))}" for name, scores in self.scores.items()
        )
        rows = len(next(iter(self.scores.values())))
        same = len({score.reward for scores in self.scores.values() for score in scores}) == 1
        of_rows = f"{self.part.setting}, {rows} row{'s' * (rows > 1)} of {self.key}"
        return "; ".join(
            [f"{of_rows}: {told}", *self.remarks, *(["all of these score the same"] * same)]
        )

    @property
    def remarks(self) -> Iterator[str]:
        """Doubts about the scores that do not stop a run."""
        named = reversed(
            [(name, score) for name, scores in self.scores.items() for score in scores]
        )
        failures = {failure.reason: name for name, score in named for failure in score.failures}
        yield from (f"scoring {name} failed: {reason}" for reason, name in failures.items())
        means = {
            name: sum(score.reward for score in scores) / len(scores)
            for name, scores in self.scores.items()
        }
        first, *others = means
        if not failures and any(means[first] < means[name] for name in others):
            yield "the reference answer scores less than an empty or absurd text"
        if self.unread_form:
            known = "<answer>…</answer>, \\boxed{…}, #### …, Answer: …, or the last line"
            yield (
                f"the prompt asks for {self.unread_form}, where {self.part.name} finds no "
                f"answer; it reads {known}"
            )


def _shown(score: Score) -> str:
    return "failed" if score.failures else f"{score.reward:g}"


def try_rewards(config: RunConfig, datasets: Sequence[Checked], thorough: bool) -> list[Tried]:
    """Scores three texts for the first row of each dataset with the user's own functions.

    If `thorough`, scores several rows, also with built-in rules. Raises ConfigError for all
    mistakes that would end the run, once for each function.
    """
    if config.rollout.name in OF_HUBS or (
        config.rollout.name == PROGRAM and config.rollout.args.get("reward") == PROGRAM
    ):
        return []  # there the environment or the program gives the reward
    wanted: dict[Part, list[tuple[Checked, list[Row]]]] = {}
    for checked in datasets:
        suite = checked.key.removeprefix("eval.suites.")
        rows = [row for row in checked.first if isinstance(row, Row)][: None if thorough else 1]
        for part in (
            parts_of(config.reward)
            if checked.key.startswith("data.train")
            else parts_in_evaluation(config, suite)
        ):
            if rows and (":" in part.name or (thorough and part.name in _OF_ANSWERS)):
                wanted.setdefault(part, []).append((checked, rows))
    if not wanted:
        return []
    tokenizer = None
    # a dry run goes on without what the hub does not give (check_data)
    with contextlib.suppress(ConfigError):
        tokenizer = load_tokenizer(config.model)
    with tempfile.TemporaryDirectory(prefix="megarl-trial-") as logs:
        return run_coroutine(
            _try_all(
                replace(config, reward=replace(config.reward, workers=1)),
                wanted,
                tokenizer,
                Path(logs),
            )
        )


async def _try_all(
    config: RunConfig,
    wanted: Mapping[Part, Sequence[tuple[Checked, Sequence[Row]]]],
    tokenizer: Tokenizer | None,
    logs: Path,
) -> list[Tried]:
    from megarl.rollouts.rollout import open_part  # not at the top: it imports aiohttp

    found: list[Tried] = []
    problems: list[str] = []
    async with AsyncExitStack() as resources:
        for part, sets in wanted.items():
            score = await open_part(config, part, {}, resources, logs)
            told = ""
            try:
                for checked, rows in sets:
                    given: dict[str, list[Score]] = {}
                    for name, text in TEXTS.items():
                        requests = [
                            _request(row, part, checked.key, text, tokenizer) for row in rows
                        ]
                        told = f"it was given {name} to {rows[0].where or checked.source}"
                        given[name] = [await score(request) for request in requests]
                    unread = (
                        await _unread_form(rows, part, checked.key, score)
                        if part.name in _OF_ANSWERS
                        else ""
                    )
                    found.append(Tried(part, checked.key, given, unread))
            except RewardMistake as mistake:
                problems.append(f"{'; '.join(mistake.told.split(chr(10)))}; {told}")
            except RunError as error:  # no worker could be started
                problems.append(f"{part.setting}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


async def _unread_form(
    rows: Sequence[Row], part: Part, key: str, score: Callable[[ScoreRequest], Awaitable[Score]]
) -> str:
    """A form for which a prompt asks, if the built-in rule reads none of those in that prompt; else
    empty.
    """
    for row in rows:
        forms = asked_forms(row.prompt)
        requests = [
            _request(row, part, key, f"{before}{row.answer}{behind}", None)
            for before, behind in forms
        ]
        scores = [(await score(request)).reward for request in requests]
        if scores and max(scores) < CORRECT:
            return "…".join(forms[-1])
    return ""


def _request(
    row: Row, part: Part, key: str, text: str | None, tokenizer: Tokenizer | None
) -> ScoreRequest:
    response = row.answer if text is None else text
    return ScoreRequest(
        response=response,
        answer=row.answer,
        # a rule counts no answer in thinking that the prompt begins
        prompt="" if part.name in _OF_ANSWERS else row.prompt,
        row=row.record,
        prompt_token_ids=tokenizer.encode_prompt(row.prompt, row.rendered) if tokenizer else [],
        token_ids=tokenizer.encode_text(response) if tokenizer else [],
        version=0,
        source=key.rpartition(".")[2]
        if ".sources." in key or key.startswith("eval.suites.")
        else "",
    )


COMMANDS = {
    "train": "train",
    "dry-run": "train",
    "sft": "sft",
    "reward-model": "reward-model",
    "eval": "eval",
}  # command -> the command whose inputs it reads

TRACKED = ("train", "sft", "reward-model")
_MAY_BEGIN_RANDOM = ("sft", "reward-model")


@dataclass(frozen=True)
class Inputs:
    """The results of checking the datasets, and of the rewards on their first rows."""

    datasets: list[Checked]
    rewards: list[Tried]

    @property
    def remarks(self) -> list[str]:
        """A line for each dataset and reward with something that the user may not know."""
        data = {f"Data: {each.key}": [*each.remarks] for each in self.datasets}
        rewards = {
            f"Reward: {each.part.setting} on {each.key}": [*each.remarks] for each in self.rewards
        }
        return [
            f"{of_what}: {'; '.join(remarks)}"
            for of_what, remarks in (data | rewards).items()
            if remarks
        ]


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
    if plan is not None and not (
        reads in _MAY_BEGIN_RANDOM and config.model.random_init and not plan.weights.are_there
    ):
        checks.append(lambda: check_weights(plan))
    if (
        plan is not None
        and not is_own(plan.spec)
        and (not at_hand or is_here(config.model.path, config))
    ):
        checks.append(lambda: check_as_transformers(config.model.path, plan.spec))
    key, critic = critic_path(config)
    if plan is not None and reads == "train" and plan.critic and critic and Path(critic).is_dir():
        checks.append(partial(check_complete, key, plan.critic, Path(critic)))
    if plan is not None and reads == "train" and plan.adapters:
        checks.append(plan.adapters.check_init)
    if reads in ("train", "eval"):
        checks.append(lambda: check_rollout(config, at_hand))
        served = plan.served if plan is not None else ()
        frozen = plan.frozen if plan is not None and reads == "train" else ()
        checks += [
            partial(check_frozen, role, config)
            for role in frozen
            if not at_hand or is_here(role.path, config)
        ]
        checks += [
            partial(check_role, role, config)
            for role in served
            if not at_hand or is_here(role.settings.path, config)
        ]
    if reads == "train" and config.weights.transport != "auto":
        checks.append(lambda: check_weights_transport(config.weights.transport, at_hand))
    if reads == "train" and config.algorithm.name not in ALGORITHMS:
        checks.append(lambda: check_rule(config.algorithm.name))
    if reads in TRACKED:
        checks.append(lambda: check_trackers(config.observe.trackers))
    if plan is not None and not at_hand:
        checks.append(lambda: check_room(plan, reads))
    if problems := problems_of(*checks):
        raise ConfigError(problems)
    return Inputs(
        datasets,
        try_rewards(config, datasets, at_hand)
        if plan is not None and reads in ("train", "eval")
        else [],
    )


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
