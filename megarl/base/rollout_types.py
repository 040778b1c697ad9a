"""The data that travels between executors: prompts, samples, groups and batches, and the packed
bytes that travel with them.

Values with one number per token are typed arrays. At the generator, where users' code handles them,
they are Python's `array`: as with lists, `+` concatenates and `==` compares, and nothing is
silently broadcast. At the trainer they are NumPy's. `rollouts/channel.py` has the form in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

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

    def __post_init__(self) -> None:
        self._convert(token_ids="i", logprobs="f", versions="i", policy_mask="b")

    def summary(self) -> SampleSummary:
        """Raises: ValueError where the arrays differ in length."""
        tokens = len(self.token_ids)
        turns = int(len(self.token_ids) > 0)
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
        )


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


MOST_KEPT = 4096  # most tokens that an engine keeps; a few more if logits at the limit are equal


class KeptSets(msgspec.Struct, frozen=True):
    """Kept sets: for each of T tokens, the tokens that it was drawn from under top-p, top-k or
    min-p. They travel with a rollout as packed bytes.

    The sampling policy is the model's distribution, renormalised over that set. So the trainer
    takes log-probs over the same set ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556,
    section 3.1). Otherwise the importance ratio would not be defined.

    A set is written as its ids (2 bytes each, or 4 if the vocabulary is larger than 65,536) or,
    where that is smaller, as a bit for each token of the vocabulary, filled up to whole groups of 4
    bytes.
    """

    vocab_size: int
    sizes: bytes  # [T] int32, tokens in each set; 0: no set, as for the environment's tokens
    records: bytes  # the sets, one after the other

    @classmethod
    def from_ids(
        cls, vocab_size: int, tokens: np.ndarray, sizes: np.ndarray, ids: np.ndarray
    ) -> KeptSets:
        """tokens: [T] sampled tokens; sizes: [T] int32; ids: [sum of sizes], one set after the
        other, in any order.

        Raises: ValueError for an id outside the vocabulary, a repeated id in a set, or a set that
        lacks the token sampled from it.
        """
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(
                f"token ids from {ids.min()} to {ids.max()} in a vocabulary of {vocab_size}"
            )
        if len(sizes) != len(tokens) or sizes.sum() != len(ids):
            raise ValueError(
                f"{len(sizes)} sets of {sizes.sum()} token ids in all for {len(tokens)} tokens, "
                f"and {len(ids)} ids"
            )
        rows = np.repeat(np.arange(len(sizes)), sizes)
        keys = np.sort(rows * vocab_size + ids)
        if (keys[1:] == keys[:-1]).any():
            raise ValueError("a token is twice in a set")
        kept_sets = cls(
            vocab_size,
            sizes=sizes.astype("<i4").tobytes(),
            records=_packed(vocab_size, sizes, rows, keys - rows * vocab_size),
        )
        kept_sets.checked_ids(tokens)
        return kept_sets

    def __len__(self) -> int:
        return len(self.sizes) // 4

    @property
    def counts(self) -> np.ndarray:
        """[T] int32."""
        return np.frombuffer(self.sizes, "<i4")

    def ids(self) -> np.ndarray:
        """[sum of sizes] int32, ascending within a set.

        Raises: ValueError if `records` do not fit `sizes`.
        """
        sizes = self.counts
        as_bits, starts, end = _records(self.vocab_size, sizes)
        dtype = _id_dtype(self.vocab_size)
        if end != len(self.records):
            raise ValueError(f"{len(self.records)} bytes of sets, whose sizes speak of {end}")
        ids = np.empty(sizes.sum(), np.int32)
        listed = np.repeat(~as_bits, sizes)
        within = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        places = (np.repeat(starts // dtype.itemsize, sizes) + within)[listed]
        ids[listed] = np.frombuffer(self.records, dtype)[places]
        if as_bits.any():
            width = _bits_bytes(self.vocab_size)
            places = starts[as_bits][:, None] + np.arange(width)
            set_bytes = np.frombuffer(self.records, np.uint8)[places].ravel()
            used = np.flatnonzero(set_bytes)
            bits = np.flatnonzero(np.unpackbits(set_bytes[used], bitorder="little"))
            byte_of_bit = used[bits // 8]
            bit_counts = np.bincount(byte_of_bit // width, minlength=as_bits.sum())
            if not np.array_equal(bit_counts, sizes[as_bits]):
                raise ValueError("sets whose bits are not as many as their sizes")
            ids[~listed] = byte_of_bit % width * 8 + bits % 8
        return ids

    def checked_ids(self, tokens: np.ndarray) -> np.ndarray:
        """Like `ids`.

        Raises: ValueError also if one of the T sampled `tokens` is not in its own set.
        """
        sizes = self.counts
        sampled = np.zeros(len(self), np.bool_)
        rows = np.repeat(np.arange(len(sizes)), sizes)
        ids = self.ids()
        sampled[rows[ids == tokens[rows]]] = True
        missing = int((~sampled & (sizes > 0)).sum())
        if missing:
            raise ValueError(
                f"{missing} of {int((sizes > 0).sum())} sampled tokens are not in their own sets "
                "(rollout.replay_mask)"
            )
        return ids

    def first(self, tokens: int) -> KeptSets:
        """The sets of the first `tokens` tokens."""
        _, starts, end = _records(self.vocab_size, self.counts)
        if tokens < len(self):
            end = starts[tokens]
        return KeptSets(self.vocab_size, self.sizes[: 4 * tokens], self.records[:end])

    def summary(self) -> KeptSummary:
        sizes = self.counts
        return KeptSummary(
            vocab_size=self.vocab_size,
            total=int(sizes.sum()),
            largest=int((sizes >= MOST_KEPT).sum()),
            bytes=len(self.sizes) + len(self.records),
        )


class KeptSummary(msgspec.Struct, frozen=True):
    """What every trainer rank knows of a sample's kept sets."""

    vocab_size: int
    total: int  # sum of their sizes
    largest: int  # how many sets reach MOST_KEPT: without it, top_p or min_p might keep more
    bytes: int


def join_kept_sets(
    first: KeptSets | None, first_tokens: int, second: KeptSets | None, second_tokens: int
) -> KeptSets | None:
    """The sets of `first_tokens` tokens followed by `second_tokens` tokens.

    None stands for tokens without sets.
    """
    sets = first or second
    if sets is None:
        return None
    vocab_size = sets.vocab_size
    first = first or KeptSets(vocab_size, bytes(4 * first_tokens), b"")
    second = second or KeptSets(vocab_size, bytes(4 * second_tokens), b"")
    return KeptSets(vocab_size, first.sizes + second.sizes, first.records + second.records)


def kept_metrics(summaries: Iterable[KeptSummary | None], policy_tokens: int) -> dict[str, float]:
    """Metrics of the kept sets of a batch; empty if no set is known."""
    total = 0
    size_bytes = 0
    largest = 0
    has_sets = False
    for summary in summaries:
        if summary is not None:
            has_sets = True
            total += summary.total
            size_bytes += summary.bytes
            largest += summary.largest
    if not has_sets:
        return {}
    return {
        "mask/kept_mean": total / policy_tokens,
        "mask/bytes_per_token": size_bytes / policy_tokens,
        "mask/overflow": float(largest),
    }


def _id_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _bits_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 32) * 4


def _records(vocab_size: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """[T] whether each set is written as bits, [T] where it begins, and where the last one ends."""
    as_ids = sizes.astype(np.int64) * _id_dtype(vocab_size).itemsize
    bits = _bits_bytes(vocab_size)
    lengths = np.minimum(as_ids, bits)
    ends = np.cumsum(lengths)
    return as_ids > bits, ends - lengths, int(ends[-1]) if len(ends) else 0


def _packed(vocab_size: int, sizes: np.ndarray, rows: np.ndarray, ids: np.ndarray) -> bytes:
    """The packed sets. `ids`: ascending within a set; `rows`: the set that each id belongs to."""
    as_bits, starts, end = _records(vocab_size, sizes)
    packed = np.zeros(end, np.uint8)
    dtype = _id_dtype(vocab_size)
    within = np.arange(len(ids)) - (np.cumsum(sizes) - sizes)[rows]
    bits = as_bits[rows]
    listed = ~bits
    packed.view(dtype)[(starts[rows] // dtype.itemsize + within)[listed]] = ids[listed]
    if bits.any():
        places = starts[rows[bits]] + ids[bits] // 8  # ascending, as sets and their ids are
        firsts = np.flatnonzero(np.diff(places, prepend=-1))
        packed[places[firsts]] = np.add.reduceat(1 << ids[bits] % 8, firsts)
    return packed.tobytes()


@dataclass(frozen=True)
class TeacherScores:
    """The log-probs of one teacher on engines for the T tokens of a response.

    `TeacherFormat` packs them into bytes that travel with the rollout.
    """

    # [T, k] int32, the likeliest tokens at each place; [T, 0] if only the tokens' own log-probs are
    # needed
    ids: np.ndarray
    # [T, k] float32 of these, or [T, 1] of the tokens themselves; NaN where the teacher gave none
    logprobs: np.ndarray


@dataclass(frozen=True)
class TeacherFormat:
    """The byte layout: for each token, and for each teacher in turn, its ids (int32) and then its
    log-probs (float32).
    """

    teachers: int
    top_k: int  # 0: the log-probs of the tokens themselves

    @property
    def token_bytes(self) -> int:
        return 4 * self.teachers * self._width

    @property
    def _width(self) -> int:
        return 2 * self.top_k or 1

    def pack(self, scores: Sequence[TeacherScores | None], tokens: int) -> bytes:
        """Packs the `scores` of each teacher for `tokens` tokens.

        None stands for a teacher that failed.
        """
        missing_scores = TeacherScores(
            ids=np.zeros((tokens, self.top_k), np.int32),
            logprobs=np.full((tokens, self.top_k or 1), np.nan, np.float32),
        )
        parts: list[np.ndarray] = []
        for teacher_scores in scores:
            teacher_scores = teacher_scores or missing_scores
            parts += [teacher_scores.ids.view(np.float32), teacher_scores.logprobs]
        return np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32).tobytes()

    def unpack(self, packed: bytes, tokens: int) -> list[TeacherScores]:
        """The scores of each teacher.

        Raises: ValueError if `packed` has another number of tokens.
        """
        numbers = np.frombuffer(packed, np.float32).reshape(tokens, self.teachers, self._width)
        scores = []
        for teacher_numbers in numbers.swapaxes(0, 1):
            ids = np.ascontiguousarray(teacher_numbers[:, : self.top_k]).view(np.int32)
            scores.append(TeacherScores(ids, teacher_numbers[:, self.top_k :]))
        return scores
