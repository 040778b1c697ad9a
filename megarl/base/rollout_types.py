"""The data that travels between executors: prompts, samples, groups and batches.

Values with one number per token are typed arrays. At the generator, where users' code handles them,
they are Python's `array`: as with lists, `+` concatenates and `==` compares, and nothing is
silently broadcast. At the trainer they are NumPy's. `rollouts/channel.py` has the form in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from megarl.base.kept_sets import KeptSets, KeptSummary

Version = int
"""The version of the weights: 0 for the initial weights, plus 1 for every batch they were trained
on.
"""


Ordinal = int
"""The number of a prompt in the run's endless stream of prompts, from 0 on."""

_DTYPES = {"i": np.dtype(np.int32), "f": np.dtype(np.float32), "b": np.dtype(np.bool_)}
# code of an array -> the kinds of NumPy arrays that convert to it
_CONVERTIBLE_KINDS = {"i": "iu", "f": "iuf", "b": "b"}


def typed(values: Iterable[Any], code: str) -> array[Any]:
    """`values` as an array of int32 ("i"), float32 ("f") or booleans ("b").

    An array of that type is returned as it is.

    Raises: TypeError for other kinds of values, OverflowError for an integer of more than 32 bits.
    """
    if isinstance(values, array) and values.typecode == code:
        return values
    if not isinstance(values, np.ndarray):
        return array(code, map(bool, values) if code == "b" else values)
    if values.ndim != 1 or values.dtype.kind not in _CONVERTIBLE_KINDS[code]:
        raise TypeError(
            f"an array of {values.dtype} and shape {values.shape}, where a row of {_DTYPES[code]} "
            "is wanted"
        )
    if code == "i" and values.size and not -(1 << 31) <= values.min() <= values.max() < 1 << 31:
        raise OverflowError("an integer of more than 32 bits")
    result = array(code)
    if values.size:
        result.frombytes(np.ascontiguousarray(values, _DTYPES[code]).data.cast("B"))
    return result


def view(values: array[Any]) -> np.ndarray:
    """A NumPy view of the memory of `values`.

    While the view exists, `values` can neither grow nor shrink.
    """
    dtype = _DTYPES[values.typecode]
    return np.frombuffer(values, dtype) if values else np.empty(0, dtype)


def impossible_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """[T] bool: which log-probs are impossible: NaN, infinite, or above 0 by more than an engine's
    error in bfloat16.
    """
    return ~(np.isfinite(logprobs) & (logprobs <= 0.01))


class Typed(msgspec.Struct, frozen=True):
    """A struct whose constructor converts lists and NumPy arrays to typed arrays."""

    def _convert(self, **codes: str) -> None:
        for name, code in codes.items():
            try:
                msgspec.structs.force_setattr(self, name, typed(getattr(self, name), code))
            except (TypeError, OverflowError) as error:
                raise TypeError(f"{type(self).__name__}.{name}: {error}") from error


class Prompt(msgspec.Struct, frozen=True):
    """One prompt.

    `ordinal` numbers the prompts of a run and is never reused, not even after a resume.
    """

    ordinal: Ordinal
    token_ids: list[int]  # [P]
    text: str
    answer: str  # the reference for the verifier
    row: dict[str, Any] = {}  # the row of the dataset, for a user's own reward function
    # name of its source in data.train.sources or eval.suites; empty for data.train and data.eval
    source: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why a response has no score of its own."""

    # "timeout" | "error" | "memory" | "exit"; for an episode, the <kind> in rollout/failed_<kind>
    kind: str
    reason: str  # completes "… failed: "
    text: str = ""  # the beginning of the response
    # what failed: a part of the reward (empty: the whole), a teacher roles.NAME, or the episode,
    # rollout.NAME
    part: str = ""


WARNING = "warning"  # kind of a warning, which is reported like a failure
EPISODE = "rollout."  # prefix of `part` if the episode itself failed; the rollout's name follows
# finish reason of an episode that sampled nothing: its sample has no tokens, and its prompt is
# dropped
UNANSWERED = "unanswered"


class TurnReward(NamedTuple):
    """What one turn of a response has earned, or one step of a turn."""

    end: int  # of the turn: how many of the response's tokens come before its end
    reward: float


class Sample(Typed, frozen=True):
    """One response to a prompt, with the behaviour policy mu that produced it.

    In a rollout of several turns, the environment has written some of the tokens. Those are
    context, not actions. They have neither a log-prob nor a version, and are not learned.
    """

    token_ids: array[int]  # [T] int32, response tokens, end-of-text included when it was sampled
    # [T] float32, log mu(y_t | x, y_<t) under the distribution sampled from; 0 on the environment's
    # tokens
    logprobs: array[float]
    # [T] int32, weight version that sampled each token; arbitrary on the environment's tokens
    versions: array[int]
    text: str
    reward: float
    finish_reason: str  # "stop" | "length" | UNANSWERED
    # [T] 0 on the environment's tokens; empty: 1 everywhere
    policy_mask: array[int] = msgspec.field(default_factory=partial(array, "b"))
    # [start, end) in `text` of the environment's parts, for display
    environment_spans: list[tuple[int, int]] = []
    # numbers from the rollout; a step reports their means as rollout/<name>
    metrics: dict[str, float] = {}
    # experts chosen at the positions of prompt and response (models/routing.py), from the first on;
    # empty: unknown
    routing: bytes = b""
    # parts of the reward; a step reports their means as reward/<name>/mean
    reward_parts: dict[str, float] = {}
    # of the episode, the reward or its parts; those have substitute scores
    failures: list[Failure] = []
    # the set that each token was drawn from; None: unknown, or the whole vocabulary
    kept: KeptSets | None = None
    teachers: bytes = b""  # packed TeacherScores of teachers on engines; empty without any
    # above 0: a further branch of the same episode as the sample before it, with the same reward
    branch: int = 0
    # what each turn has earned, in order. The last one includes the reward that the whole response
    # gets at its end. Empty: `reward` is earned at the end.
    turn_rewards: list[TurnReward] = []

    def __post_init__(self) -> None:
        self._convert(token_ids="i", logprobs="f", versions="i", policy_mask="b")
        if self.turn_rewards:
            turns = [TurnReward(*turn) for turn in self.turn_rewards]
            msgspec.structs.force_setattr(self, "turn_rewards", turns)

    def summary(self) -> SampleSummary:
        """Raises: ValueError where the arrays differ in length."""
        tokens = len(self.token_ids)
        turns = int(len(self.token_ids) > 0)
        turn_rewards = self.turn_rewards
        shared_turns = 0
        arrays = (
            ("versions", self.versions),
            ("policy_mask", self.policy_mask or self.versions),
            ("kept", self.versions if self.kept is None else self.kept),
        )
        for name, values in arrays:
            if len(values) != tokens:
                raise ValueError(f"{tokens} token ids, but {len(values)} {name}")
        if self.policy_mask:
            mask = view(self.policy_mask)
            runs = _runs(view(self.versions)[mask])
            turns = int(mask[0]) + int(np.count_nonzero(mask[1:] > mask[:-1]))
            if not turn_rewards:
                ends = (np.flatnonzero(mask[:-1] > mask[1:]) + 1).tolist()
                if mask[-1]:
                    ends.append(tokens)
                turn_rewards = at_the_end(ends, self.reward)
            first = int(mask.argmax())
            shared_turns = sum(end <= first for end, _ in turn_rewards)
        elif self.versions[1:] == self.versions[:-1]:
            runs = [(self.versions[0], tokens)] if tokens else []
        else:
            runs = _runs(view(self.versions))
        return SampleSummary(
            tokens=tokens,
            policy_versions=runs,
            turns=turns,
            reward=self.reward,
            finish_reason=self.finish_reason,
            routing_bytes=len(self.routing),
            metrics=self.metrics,
            reward_parts=self.reward_parts,
            failures=self.failures,
            kept=None if self.kept is None else self.kept.summary(),
            teacher_bytes=len(self.teachers),
            branch=self.branch,
            turn_rewards=turn_rewards,
            shared_turns=shared_turns,
        )


def at_the_end(ends: Iterable[int], reward: float) -> list[TurnReward]:
    """The rewards of turns with these ends, if the last one has earned everything."""
    turns = [TurnReward(end, 0.0) for end in ends]
    if turns:
        turns[-1] = TurnReward(turns[-1].end, reward)
    return turns


class _HasFinishReason(Protocol):
    @property
    def finish_reason(self) -> str: ...


def any_unanswered(samples: Iterable[_HasFinishReason]) -> bool:
    return any(sample.finish_reason == UNANSWERED for sample in samples)


class _HasBranch(Protocol):
    @property
    def branch(self) -> int: ...


def episodes[S: _HasBranch](samples: Iterable[S]) -> list[list[S]]:
    """The samples of each episode.

    Baselines are computed over episodes; all branches of one share its reward and its advantage.
    """
    groups: list[list[S]] = []
    for sample in samples:
        if sample.branch:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Runs of equal neighbours as (value, count)."""
    if not values.size:
        return []
    starts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), values.size]
    return [(int(values[start]), end - start) for start, end in pairwise(starts)]


class Group(msgspec.Struct, frozen=True):
    """The n samples of one prompt: the unit of the baseline, and of sending."""

    prompt: Prompt
    samples: list[Sample]  # [n], or more where episodes have branches
    # of further episodes, which are not trained on (async.idle=samples)
    unsent_rewards: list[float] = []


class SampleSummary(msgspec.Struct, frozen=True):
    """What every trainer rank knows of a sample: everything but its text and its per-token
    numbers.
    """

    tokens: int  # T
    # of the policy's tokens, in order: runs of (version, tokens)
    policy_versions: list[tuple[Version, int]]
    turns: int  # runs of policy tokens; 1 if the environment wrote nothing in between
    reward: float
    finish_reason: str
    routing_bytes: int = 0
    metrics: dict[str, float] = {}
    reward_parts: dict[str, float] = {}
    failures: list[Failure] = []
    kept: KeptSummary | None = None
    teacher_bytes: int = 0
    branch: int = 0
    # as Sample's; without rewards at turns, the last of several turns has earned everything
    turn_rewards: list[TurnReward] = []
    shared_turns: int = 0  # first turns that are learned in another branch

    @property
    def turns_or_one(self) -> list[TurnReward]:
        """`turn_rewards`, with a response of one turn as that turn."""
        return self.turn_rewards or [TurnReward(self.tokens, self.reward)]

    @property
    def policy_tokens(self) -> int:
        return sum(tokens for _, tokens in self.policy_versions)

    @property
    def environment_tokens(self) -> int:
        return self.tokens - self.policy_tokens

    @property
    def min_version(self) -> Version:
        return min(version for version, _ in self.policy_versions)

    @property
    def max_version(self) -> Version:
        return max(version for version, _ in self.policy_versions)


class GroupSummary(msgspec.Struct, frozen=True):
    ordinal: Ordinal
    prompt_tokens: int
    samples: list[SampleSummary]  # [n], or more where episodes have branches
    source: str = ""  # of its prompt
    unsent_rewards: list[float] = []  # see Group

    @property
    def rewards(self) -> list[float]:
        """Of all episodes that were sampled, also those not sent."""
        sent = [sample.reward for sample in self.samples if not sample.branch]
        return sent + self.unsent_rewards


class GroupTexts(msgspec.Struct, frozen=True):
    """The texts of a group, for display."""

    prompt: str
    answer: str
    samples: list[tuple[str, list[tuple[int, int]]]]  # [n] text and environment_spans


class SampleNumbers(NamedTuple):
    """The per-token numbers of a sample, for training."""

    prompt_ids: np.ndarray  # [P] int32
    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    policy_mask: np.ndarray | None  # [T] bool; None: True everywhere
    routing: bytes
    kept: KeptSets | None
    teachers: bytes = b""


class BatchHeader(msgspec.Struct, frozen=True, tag=True):
    """What every trainer rank knows of a batch: `prompts_per_step` groups, sorted by ordinal.

    If it has no groups, too many prompts were dropped, and the run ends.
    """

    step: int
    groups: list[GroupSummary]
    generate_s: float  # from the start of the first rollout to the end of the last, minus reward_s
    # the generator's wait for weights since the last batch, weighted by the share of idle places
    generator_wait_s: float
    # part of the trainer's wait: enough groups were there, but a due one was not
    due_wait_s: float = 0.0
    rejected: int = 0  # groups rejected as too old since the last batch
    buffered: int = 0  # finished groups left for later batches
    # by dynamic sampling: generated like `groups`, but not trained on
    dropped: list[GroupSummary] = []
    rested: int = 0  # prompts that the curriculum has left out since the last batch
    reward_s: float = 0.0  # wait for scores in that time, weighted by the share of waiting rollouts
    rollout_s: float = 0.0  # mean time of a prompt from its start to its score


class Batch(BatchHeader, frozen=True):
    """The input of one step."""

    # place in `samples` -> numbers, for the samples that this rank trains on
    numbers: dict[int, SampleNumbers] = {}
    texts: list[msgspec.Raw] = []  # an encoded GroupTexts for each group; only on trainer rank 0
    dropped_texts: list[msgspec.Raw] = []  # as `texts`

    @property
    def samples(self) -> list[SampleSummary]:
        """The samples of all groups, group by group."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def generated(self) -> list[SampleSummary]:
        """The samples of all groups, including dropped ones."""
        return [sample for group in [*self.groups, *self.dropped] for sample in group.samples]


class TrainSequence(msgspec.Struct, frozen=True, eq=False):
    """One training sequence: prompt and response joined, with per-token training data.

    It may be constructed from arrays or lists.

    Position i of `loss_mask`, `mu_logprobs` and `advantages` concerns the prediction of token i
    from tokens < i. So position 0 is always masked.
    """

    token_ids: np.ndarray  # [L] int32
    # [L] bool, True on tokens that the policy produced (or, in SFT, is to learn)
    loss_mask: np.ndarray
    mu_logprobs: np.ndarray  # [L] float32, 0 where masked
    advantages: np.ndarray  # [L] float32, 0 where masked
    # experts to use (models/routing.py), at the first positions, up to L - 1 of them
    routing: bytes = b""
    # for the last tokens: the set that each was drawn from; None: the whole vocabulary
    kept: KeptSets | None = None
    teachers: bytes = b""  # for the last tokens: packed TeacherScores of teachers on engines

    def __post_init__(self) -> None:
        for name, code in (
            ("token_ids", "i"),
            ("loss_mask", "b"),
            ("mu_logprobs", "f"),
            ("advantages", "f"),
        ):
            values = getattr(self, name)
            if not (isinstance(values, np.ndarray) and values.dtype == _DTYPES[code]):
                msgspec.structs.force_setattr(self, name, view(typed(values, code)))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainSequence):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
        )


class RemoteSequence(msgspec.Struct, frozen=True):
    """Stands for a TrainSequence that another data-parallel rank trains on.

    It has only the length.
    """

    length: int

    def __len__(self) -> int:
        return self.length
