"""What a verifier or a user's own function takes and returns."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import reprlib
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import msgspec

from megarl.base.rollout_types import (
    EPISODE,
    UNANSWERED,
    Failure,
    GroupSummary,
    Prompt,
    Sample,
    SampleSummary,
    TurnReward,
)
from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import GRADERS, MAX_REWARD, RewardConfig, RolloutConfig, RunConfig
from megarl.config.tasks import (
    by_source,
    source_of,
    sources_of_each_task,
    task_of,
    tasks_of,
    with_source_keys,
)

CORRECT = 1.0  # the lowest reward that counts as right
SCORE = "score"  # in a result with named parts, the key or field that is the reward
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 200


class ScoreRequest(msgspec.Struct, frozen=True):
    """A response and all that is known about it.

    A user's own function gets the fields that its parameters name.
    """

    response: str  # the policy's text in its last turn; also called `text`
    answer: str  # the reference answer
    prompt: str = ""  # the prompt as the model saw it
    row: dict[str, Any] = {}  # the prompt's whole row of the data set
    prompt_token_ids: list[int] = []
    token_ids: Sequence[int] = ()  # of the whole response: all turns, including end-of-text
    # newest weight version among its tokens, which is the number of steps done by then
    version: int = -1
    turn_ends: Sequence[int] = ()  # how many of token_ids come before the end of each turn
    sample_index: int = 0  # the sample's number within its prompt, from 0
    truncated: bool = False  # whether the response was cut at the maximum length
    source: str = ""  # name of the prompt's source in data.train.sources or eval.suites


def request_of(
    prompt: Prompt, text: str, token_ids: Sequence[int], index: int = 0, truncated: bool = False
) -> ScoreRequest:
    """The request to score a response outside of training. `index`: among the prompt's samples."""
    return ScoreRequest(
        response=text,
        answer=prompt.answer,
        prompt=prompt.text,
        row=prompt.row,
        source=prompt.source,
        prompt_token_ids=prompt.token_ids,
        token_ids=token_ids,
        version=0,
        sample_index=index,
        truncated=truncated,
    )


_FIELDS = {"text": "response", **{name: name for name in ScoreRequest.__struct_fields__}}
# The arguments of verl's reward functions, for rows in verl's format.
_OF_VERL: dict[str, Callable[[ScoreRequest], Any]] = {
    "solution_str": lambda request: request.response,
    "ground_truth": lambda request: _ground_truth(request),
    "data_source": lambda request: request.row.get("data_source", request.source),
    "extra_info": lambda request: request.row.get("extra_info"),
}
_OF_TRL = {"prompts": "prompt", "completions": "response", "completion_ids": "token_ids"}
_FROM_TRL = (
    "it has TRL's parameters, lists of all responses of a batch; here a function scores one "
    "response, and returns one number. prompts[i] "
    "is prompt, completions[i] is response, completion_ids[i] is token_ids, a column is row[its "
    "name]. This calls it: def reward({takes}): "
    "return {name}({given})[0]"
)


class Score(msgspec.Struct, frozen=True):
    """A response's reward. With `failures`, all or a part of it is a substitute score."""

    reward: float
    parts: dict[str, float] = {}
    failures: list[Failure] = []
    # the scores of its steps, which are earned in place of `reward`; empty: `reward` is, at the end
    turn_rewards: list[TurnReward] = []


def parameters_of(function: Callable[..., Any], setting: str) -> list[str]:
    """The fields that the parameters of `function` name, in its order; all fields if it takes
    **kwargs. Args: setting: its "key=value".

    A parameter that names no field keeps its default, as does one that functools.partial has bound.
    Raises ConfigError if it has none, or if a field cannot be passed by name.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # some functions written in C
        raise ConfigError(
            f"{setting}: its parameters are unknown ({error}); wrap it in a function with named "
            "parameters"
        ) from error
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if {"prompts", "completions"} & {p.name for p in by_name}:
        raise ConfigError(f"{setting}: {_from_trl(function)}")
    bound = function.keywords if isinstance(function, functools.partial) else {}
    names = []
    for parameter in by_name:
        name = parameter.name
        if name not in bound and (name in _FIELDS or name in _OF_VERL):
            names.append(name)
    unknown = [p.name for p in by_name if p.name not in names and p.default is p.empty]
    problems = []
    for name in unknown:
        problems.append(
            f"{setting}: its parameter {name} has no default and is none of "
            f"{', '.join(_FIELDS)}{_near(name)}"
        )
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    problems += [
        f"{setting}: its parameter {shown} must be one that can be passed by name"
        for shown in unnamed
    ]
    if problems:
        raise ConfigError(problems)
    remaining_fields: list[str] = []
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        remaining_fields = [name for name in _FIELDS if name not in names and name not in bound]
    return names + remaining_fields


def _from_trl(function: Callable[..., Any]) -> str:
    """An error message for a reward function written for TRL: it shows a function that calls it for
    one response.
    """
    parameters = inspect.signature(function).parameters.values()
    trl_names = [p.name for p in parameters if p.name in _OF_TRL]
    columns = []
    for p in parameters:
        if p.name not in _OF_TRL and p.kind is not p.VAR_KEYWORD and p.default is p.empty:
            columns.append(p.name)
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes = [_OF_TRL[name] for name in trl_names]
    if takes_keywords or columns:
        takes.append("row")
    arguments = [f"{name}=[{_OF_TRL[name]}]" for name in trl_names]
    if takes_keywords:
        arguments.append("**{key: [value] for key, value in row.items()}")
    else:
        arguments += [f"{name}=[row[{name!r}]]" for name in columns]
    return _FROM_TRL.format(
        takes=", ".join(takes), name=getattr(function, "__name__", "it"), given=", ".join(arguments)
    )


def arguments_of(request: ScoreRequest, parameters: Sequence[str]) -> list[Any]:
    """The values of the fields `parameters`, with arrays as lists."""
    values = []
    for name in parameters:
        if name in _OF_VERL:
            value = _OF_VERL[name](request)
        else:
            value = getattr(request, _FIELDS[name])
        if isinstance(value, array):
            value = value.tolist()
        values.append(value)
    return values


def score_of(result: Any) -> Score:
    """The Score that a function's result stands for: a number, or a dict or dataclass of numbers
    with one named "score". Raises TypeError for anything else.
    """
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    if not isinstance(result, dict):
        return Score(_number(result, "a number, or a dict with a score and its parts"))
    if SCORE not in result:
        raise TypeError(f"it must give a dict with the key {SCORE!r}, not {_shown(result)}")
    parts = {}
    for name, value in result.items():
        if name != SCORE:
            parts[str(name)] = _number(value, f"a number as {name!r}")
    return Score(_number(result[SCORE], f"a number as {SCORE!r}"), parts)


def _number(value: Any, expected: str) -> float:
    """Accepts booleans and scalars of NumPy and torch, but no text, not even "1"."""
    scalar = value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        scalar = value.item()
    if not isinstance(scalar, numbers.Real):
        raise TypeError(f"it must give {expected}, not {_shown(value)}")
    try:
        number = float(scalar)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:
        raise TypeError(
            f"it must give {expected}, finite and at most {MAX_REWARD:g} in size, not "
            f"{_shown(value)}"
        )
    return number


def _shown(value: Any) -> str:
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python refuses to write integers with very many digits
        if isinstance(value, int):
            return f"an integer of {value.bit_length()} bits"
        return f"one of {type(value).__name__}"


def _ground_truth(request: ScoreRequest) -> Any:
    column = request.row.get("reward_model")
    if isinstance(column, dict):
        return column.get("ground_truth", request.answer)
    return request.answer


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"; did you mean {near[0]}?" if near else ""


ROLE = "roles."  # prefix of the name of a score that a model of `roles` gives
_EXAMPLE_CHARS = 200


@dataclass(frozen=True)
class RewardPart:
    """One score of a response.

    `part` is its name in reward.parts; empty if it is the whole reward.
    """

    name: str  # as reward.name
    failed_score: float
    part: str = ""
    weight: float = 1.0
    key: str = "reward.name"

    @property
    def setting(self) -> str:
        return f"{self.key}={self.name}"

    @property
    def role(self) -> str | None:
        """The role whose model gives the score; None if a rule does."""
        return self.name.removeprefix(ROLE) if self.name.startswith(ROLE) else None

    def failed(self, kind: str, reason: str, request: ScoreRequest) -> Score:
        """The substitute score of a response that could not be scored."""
        return Score(
            self.failed_score,
            failures=[Failure(kind, reason, excerpt(request.response), self.part)],
        )


def single(config: RewardConfig) -> RewardPart:
    return RewardPart(config.name, config.failed_score)


def parts_of(config: RewardConfig) -> list[RewardPart]:
    """The parts of the reward: reward.parts, or reward.name alone."""
    parts = []
    for part, settings in config.parts.items():
        if settings is not None:
            failed_score = settings.failed_score
            if failed_score is None:
                failed_score = config.failed_score
            key = f"reward.parts.{part}.name"
            parts.append(RewardPart(settings.name, failed_score, part, settings.weight, key))
    return parts or [single(config)]


def parts_of_source(config: RunConfig, source: str) -> list[RewardPart]:
    """The parts of the reward of a source's prompts (megarl.config.tasks)."""
    parts = []
    for part in parts_of(task_of(config, source).reward):
        parts.append(dataclasses.replace(part, key=with_source_keys(part.key, config, source)))
    return parts


def trained_parts(config: RunConfig) -> list[RewardPart]:
    """The parts of the rewards of all training prompts."""
    parts: dict[RewardPart, None] = {}
    for source in tasks_of(config):
        parts |= dict.fromkeys(parts_of_source(config, source))
    return list(parts)


def parts_in_evaluation(config: RunConfig, suite: str = "") -> list[RewardPart]:
    """The parts of the score of held-out responses.

    A benchmark has its own grader, a suite with a task that of its source; all other suites share
    one reward.
    """
    suite_settings = config.eval.suites.get(suite)
    benchmark = suite_settings.benchmark if suite_settings else None
    if benchmark:
        key = f"eval.suites.{suite}.benchmark={benchmark}, graded by reward.name"
        return [RewardPart(GRADERS[benchmark], 0.0, key=key)]
    source = source_of(config, f"eval.suites.{suite}")
    if source:
        return parts_of_source(config, source)
    if config.eval.reward is None:
        return parts_of(config.reward)
    return [RewardPart(config.eval.reward, config.reward.failed_score, key="eval.reward")]


def parts_in_labels(config: RunConfig) -> list[RewardPart]:
    """The parts of the score by which megarl label prefers responses."""
    if config.label.reward is not None:
        return [RewardPart(config.label.reward, config.reward.failed_score, key="label.reward")]
    return parts_of(config.reward) if config.label.data else trained_parts(config)


def parts_in_win_rate(config: RunConfig) -> list[RewardPart]:
    """What compares held-out responses with references (eval.win_rate); empty if nothing does."""
    if config.eval.win_rate is None:
        return []
    return [RewardPart(config.eval.win_rate, config.reward.failed_score, key="eval.win_rate")]


def all_parts(config: RunConfig) -> list[RewardPart]:
    """The parts of the rewards of training, of all evaluations, and of labels."""
    suites = [name for name, suite in config.eval.suites.items() if suite]
    evaluated = [part for name in ("", *suites) for part in parts_in_evaluation(config, name)]
    others = (*parts_in_win_rate(config), *parts_in_labels(config))
    return list(dict.fromkeys((*trained_parts(config), *evaluated, *others)))


@dataclass(frozen=True)
class WeightedSum:
    """Scores a response by all parts concurrently."""

    parts: Sequence[tuple[RewardPart, Callable[[ScoreRequest], Awaitable[Score]]]]

    async def score(self, request: ScoreRequest) -> Score:
        scores = await asyncio.gather(*(score(request) for _, score in self.parts))
        return weighted_sum(
            [(part, score) for (part, _), score in zip(self.parts, scores, strict=True)]
        )


def weighted_sum(scored: Sequence[tuple[RewardPart, Score]]) -> Score:
    """The weighted sum of the parts' scores.

    A part without a name is the whole reward; other parts prefix their own parts with their name.
    """
    named = {part.part: score.reward for part, score in scored if part.part}
    inner = {}
    for part, score in scored:
        for name, value in score.parts.items():
            inner[f"{part.part}/{name}".lstrip("/")] = value
    failures = [failure for _, score in scored for failure in score.failures]
    return Score(
        bounded(sum(part.weight * score.reward for part, score in scored), named),
        named | inner,
        failures,
        _weighted_turns(scored),
    )


def _weighted_turns(scored: Sequence[tuple[RewardPart, Score]]) -> list[TurnReward]:
    """What steps earn by all parts: a part without scores of steps counts at the end."""
    ends = sorted({turn.end for _, score in scored for turn in score.turn_rewards})
    if not ends:
        return []
    rewards = dict.fromkeys(ends, 0.0)
    for part, score in scored:
        for end, reward in score.turn_rewards or [TurnReward(ends[-1], score.reward)]:
            rewards[end] += part.weight * reward
    return [TurnReward(end, reward) for end, reward in rewards.items()]


def bounded(reward: float, parts: Mapping[str, float]) -> float:
    """The weighted sum of `parts`. Raises RunError if it is larger than a reward may be."""
    if abs(reward) > MAX_REWARD:
        scores = ", ".join(f"{name} {score:g}" for name, score in parts.items())
        raise RunError(
            f"reward.parts: the weighted sum of {scores} is {reward:g}, more than {MAX_REWARD:g} "
            "in size: lower the weights"
        )
    return reward


def excerpt(response: str) -> str:
    """The beginning of a response, for error messages."""
    return response if len(response) <= _EXAMPLE_CHARS else response[:_EXAMPLE_CHARS] + "…"


def trained_score(score: float, tokens: int, finish_reason: str, config: RunConfig) -> float:
    """The reward that training uses instead of `score`: less length penalties, which evaluations
    and the metric reward/mean do not subtract. `config`: the task of the sample's source.

    A response that was cut loses `reward.unfinished_penalty`, or gets `reward.unfinished_score`,
    even if that is more than its score. Each of the last `reward.overlong_tokens` tokens below the
    length limit costs the same, in all `reward.overlong_penalty` (DAPO, arXiv:2503.14476, equation
    13).
    """
    reward = config.reward
    # exactly the fixed score: rounding would prefer one cut response to another
    if finish_reason == "length":
        if reward.unfinished_score is None:
            score -= reward.unfinished_penalty
        else:
            score = reward.unfinished_score
    if not reward.overlong_tokens:
        return score
    beyond = tokens - (config.rollout.max_tokens - reward.overlong_tokens)
    return score - reward.overlong_penalty * max(0, beyond) / reward.overlong_tokens


def trained_reward(branches: Sequence[SampleSummary], config: RunConfig) -> float:
    """`trained_score` of an episode.

    All its branches have the same reward; the branch with the largest penalty counts.
    """
    rewards = []
    for sample in branches:
        reward = trained_score(sample.reward, sample.tokens, sample.finish_reason, config)
        rewards.append(reward)
    return min(rewards)


def shapes(config: RunConfig) -> bool:
    """Whether any length penalty is set, of any source."""
    for task in tasks_of(config).values():
        reward = task.reward
        if reward.unfinished_penalty or reward.overlong_tokens:
            return True
        if reward.unfinished_score is not None:
            return True
    return False


@by_source
def problems(config: RunConfig) -> Iterable[str]:
    reward = config.reward
    longest = config.rollout.max_tokens
    if reward.overlong_tokens > longest:
        yield (
            f"reward.overlong_tokens={reward.overlong_tokens}: must be at most "
            f"rollout.max_tokens={longest}"
        )
    if reward.unfinished_score is not None and reward.unfinished_penalty:
        conflict = f"reward.unfinished_penalty={reward.unfinished_penalty:g}"
        yield f"reward.unfinished_score={reward.unfinished_score:g}: must be null with {conflict}"


METRICS = {
    "timeout": "reward/timeouts",
    "error": "reward/errors",
    "memory": "reward/out_of_memory",
    "exit": "reward/exits",
}
FAILED_FRACTION = "reward/failed_fraction"
FAILED_EPISODES = "rollout/failed_fraction"
# prefix of the key for the share of episodes that failed in one way
_FAILED_KIND = "rollout/failed_"

Scored = Sample | SampleSummary


def failure_metrics(samples: Sequence[Scored]) -> dict[str, float]:
    """The number of samples whose scoring failed, by kind and by part of the reward, and the share
    of such samples.
    """
    metrics: Counter[str] = Counter(dict.fromkeys(METRICS.values(), 0))
    failed = 0
    for sample in samples:
        failures = list(filter(_of_score, sample.failures))
        failed += bool(failures)
        for failure in failures:
            metrics[METRICS[failure.kind]] += 1
            if failure.part:
                metrics[f"reward/{failure.part}/failed"] += 1
    return {**metrics, FAILED_FRACTION: failed / len(samples)}


def teacher_failures(samples: Sequence[Scored]) -> dict[str, float]:
    """For each teacher on engines, how many of the samples it has failed to judge."""
    counts: Counter[str] = Counter()
    for sample in samples:
        for failure in filter(_of_teacher, sample.failures):
            counts[f"distill/{failure.part.removeprefix(ROLE)}/failed"] += 1
    return dict(counts)


def _of_teacher(failure: Failure) -> bool:
    return failure.part.startswith(ROLE)


def of_episode(failure: Failure) -> bool:
    """Whether the episode itself has failed, and not only its scoring."""
    return failure.part.startswith(EPISODE)


def _of_score(failure: Failure) -> bool:
    return not _of_teacher(failure) and not of_episode(failure)


def failed_episodes(samples: Sequence[Scored]) -> list[Failure]:
    """The failure of each episode that failed. A branch is not an episode of its own."""
    failures = []
    for sample in samples:
        failures += list(filter(of_episode, sample.failures))[:1]
    return failures


def episode_metrics(samples: Sequence[Scored]) -> dict[str, float]:
    """The share of the episodes that failed."""
    return {
        FAILED_EPISODES: len(failed_episodes(samples))
        / max(1, sum(not sample.branch for sample in samples))
    }


def too_many_failed_episodes(config: RolloutConfig, samples: Sequence[Scored]) -> str | None:
    """If more than `rollout.max_failed_fraction` of the episodes failed, the reason why the run
    must stop: kinds, limit and an example.

    Episodes that sampled nothing do not count here: nothing is learned from them, and
    rollout.args.max_unanswered limits them.
    """
    failures = [failure for failure in failed_episodes(samples) if failure.kind != UNANSWERED]
    episodes = sum(not sample.branch for sample in samples)
    if len(failures) <= config.max_failed_fraction * episodes:
        return None
    counts = Counter(failure.kind for failure in failures)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    share = (
        f"{len(failures)} of {episodes} episodes failed ({kinds}), more than "
        f"rollout.max_failed_fraction={config.max_failed_fraction:g}"
    )
    return f"rollout.name={config.name}: {share}; for example {failures[-1].reason!a}"


def too_many_failures(
    config: RewardConfig,
    samples: Sequence[Scored],
    parts: Sequence[RewardPart] | None = None,
    teachers: Iterable[str] = (),
) -> str | None:
    """The reason why the run must stop, if more than `reward.max_failed_fraction` of the scores
    failed, of one part's scores, or of a teacher's answers. It has kinds, the limit and an example.
    `parts`: the parts of the reward, by default those of training.
    """
    settings_by_name = [(part.part, part.setting) for part in parts or parts_of(config)]
    settings_by_name += [(f"{ROLE}{name}", f"{ROLE}{name}") for name in teachers]
    for name, setting in settings_by_name:
        failures: list[Failure] = []
        for sample in samples:
            failures += [failure for failure in sample.failures if failure.part == name]
        if len(failures) > config.max_failed_fraction * len(samples):
            counts = Counter(METRICS[failure.kind] for failure in failures)
            share = f"of {len(samples)} samples {_described(counts)}"
            limit = f"more than reward.max_failed_fraction={config.max_failed_fraction:g}"
            return (
                f"{setting}: {share}, {limit}; for example {failures[0].text!a}: "
                f"{failures[0].reason}"
            )
    return None


def failed_source(
    config: RunConfig, groups: Sequence[GroupSummary], teachers: Sequence[str] = ()
) -> str | None:
    """The reason why the run must stop, if too many scores or episodes of a source failed among
    `groups` (`too_many_failures`, `too_many_failed_episodes`). Sources with the same reward and
    rollouts are judged together.
    """
    for names in sources_of_each_task(config):
        task = task_of(config, names[0])
        samples = []
        for group in groups:
            if group.source in names:
                samples += group.samples
        parts = parts_of_source(config, names[0])
        problem = too_many_failures(task.reward, samples, parts, teachers)
        problem = problem or too_many_failed_episodes(task.rollout, samples)
        if problem:
            prefix = f"data.train.sources.{', '.join(names)}: " if names[0] else ""
            return prefix + with_source_keys(problem, config, names[0])
    return None


def describe_failures(rows: Sequence[Mapping[str, float]]) -> str:
    """The failures counted in rows of metrics, in words; empty if there are none."""
    return _described({key: sum(row.get(key, 0) for row in rows) for key in METRICS.values()})


def describe_failed_episodes(rows: Sequence[Mapping[str, float]]) -> str:
    """The share of failed episodes in rows of metrics, in total and by kind, in words; empty if
    none failed.
    """
    if not any(row.get(FAILED_EPISODES) for row in rows):
        return ""
    shares = {}
    for key in dict.fromkeys(chain.from_iterable(rows)):
        if key.startswith(_FAILED_KIND):
            shares[key] = 100 * fmean(row.get(key, 0.0) for row in rows)
    description = f"{shares.pop(FAILED_EPISODES):.3g}% of the episodes failed"
    kinds = [
        f"{share:.3g}% {key.removeprefix(_FAILED_KIND)}" for key, share in shares.items() if share
    ]
    if kinds:
        description += f" ({', '.join(kinds)})"
    return description


def _described(counts: Mapping[str, float]) -> str:
    texts = []
    for key in METRICS.values():
        if counts.get(key):
            texts.append(f"{counts[key]:g} {key.partition('/')[2].replace('_', ' ')}")
    description = ", ".join(texts)
    return f"{sum(counts.values()):g} scores failed: {description}" if description else ""


def failure_label(failure: Failure) -> str:
    """The kind of a failure, and the part of the reward that it concerns."""
    return f"{failure.kind} of {failure.part}" if failure.part else failure.kind


def short(reason: str, errors: str = "") -> str:
    """Why an episode failed, for Failure.reason.

    Ends with the last line of `errors`, its program's standard error.
    """
    last = (errors.strip().splitlines() or [""])[-1].strip()
    return excerpt(f"{reason}: {last}" if last else reason)
