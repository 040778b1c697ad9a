"""What travels between executors: prompts, samples, groups and batches, and what is packed into bytes to travel with them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

# What travels between executors: prompts, samples, groups, batches.
#
# Whatever has one number per token is a typed array. At the generator, where users' code handles it, that is Python's `array`: as with
# lists, `+` concatenates and `==` compares, and nothing is silently broadcast. At the trainer it is NumPy's. `rollouts.packing` has the
# form between the two.


Version = int
"""Weight version: 0 for the initial weights, +1 for every batch that they were trained on."""


Ordinal = int
"""Number of a prompt in the run's endless stream of prompts, from 0 on."""

_DTYPES = {"i": np.dtype(np.int32), "f": np.dtype(np.float32), "b": np.dtype(np.bool_)}
_TAKEN = {"i": "iu", "f": "iuf", "b": "b"}  # kinds of NumPy arrays that become such an array


def typed(values: Iterable[Any], code: str) -> array[Any]:
    """`values` as an array of int32 ("i"), float32 ("f") or truth values ("b"); the same object where it is one already.

    Raises: TypeError for what are no such numbers, OverflowError for an integer of more than 32 bits.
    """
    if isinstance(values, array) and values.typecode == code:
        return values
    if not isinstance(values, np.ndarray):
        return array(code, map(bool, values) if code == "b" else values)
    if values.ndim != 1 or values.dtype.kind not in _TAKEN[code]:
        raise TypeError(f"an array of {values.dtype} and shape {values.shape}, where a row of {_DTYPES[code]} is wanted")
    if code == "i" and values.size and not -(1 << 31) <= values.min() <= values.max() < 1 << 31:
        raise OverflowError("an integer of more than 32 bits")
    made = array(code)
    if values.size:
        made.frombytes(np.ascontiguousarray(values, _DTYPES[code]).data.cast("B"))
    return made


def view(values: array[Any]) -> np.ndarray:
    """The memory of `values` as NumPy sees it. While the view lives, `values` can neither grow nor shrink."""
    return np.frombuffer(values, _DTYPES[values.typecode]) if values else np.empty(0, _DTYPES[values.typecode])


def impossible_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """Which of them no token can have: NaN, infinite, or above 0 by more than an engine's arithmetic in bfloat16 can be off."""
    return ~(np.isfinite(logprobs) & (logprobs <= 0.01))


class Typed(msgspec.Struct, frozen=True):
    """Takes lists and NumPy's arrays for its arrays, and converts them when it is made."""

    def _convert(self, **codes: str) -> None:
        for name, code in codes.items():
            try:
                msgspec.structs.force_setattr(self, name, typed(getattr(self, name), code))
            except (TypeError, OverflowError) as error:
                raise TypeError(f"{type(self).__name__}.{name}: {error}") from error


class Prompt(msgspec.Struct, frozen=True):
    """One prompt. `ordinal` numbers the prompts of a run; it is never reused, also not across a resume."""

    ordinal: Ordinal
    token_ids: list[int]  # [P]
    text: str
    answer: str  # the reference the verifier compares with
    row: dict[str, Any] = {}  # of the data set, for a reward function of the user's own
    source: str = ""  # its name in data.train.sources or eval.suites; empty for data.train and data.eval themselves


class Failure(msgspec.Struct, frozen=True):
    """Why a response has no score of its own."""

    kind: str  # "timeout" | "error" | "memory" | "exit"; of an episode as rollout/failed_<kind> counts it
    reason: str  # as it completes "… failed: "
    text: str = ""  # how the response begins
    part: str = ""  # of reward.parts; roles.NAME of a teacher; rollout.NAME of the episode itself; empty if the reward has none


WARNING = "warning"  # kind of what is told as failures are, but is none
EPISODE = "rollout."  # begins the `part` of what an episode itself has failed of, behind which is the rollout's name
UNANSWERED = "unanswered"  # finish reason of an episode that has sampled nothing, whose sample has no tokens; its prompt is dropped


class Sample(Typed, frozen=True):
    """One response to a prompt, with the behaviour policy mu that produced it.

    In a rollout of several turns the environment has written some of the tokens. Those are context, not actions: they
    have no log-prob and no version of their own, and are not learned.
    """

    token_ids: array[int]  # [T] int32, response tokens, end-of-text included when it was sampled
    logprobs: array[float]  # [T] float32, log mu(y_t | x, y_<t) under the distribution sampled from; 0 on the environment's tokens
    versions: array[int]  # [T] int32, weight version that produced each token; anything on the environment's tokens
    text: str
    reward: float
    finish_reason: str  # "stop" | "length" | UNANSWERED
    policy_mask: array[int] = msgspec.field(default_factory=partial(array, "b"))  # [T] 0 on the environment's tokens; empty: 1 everywhere
    environment_spans: list[tuple[int, int]] = []  # [start, end) in `text` of what the environment wrote, for people
    metrics: dict[str, float] = {}  # what the rollout counted; a step reports each one's mean as rollout/<name>
    routing: bytes = b""  # experts chosen at the positions of prompt and response (models/routing.py), from the first on; empty: unknown
    reward_parts: dict[str, float] = {}  # what the reward is made of; a step reports each one's mean as reward/<name>/mean
    failures: list[Failure] = []  # of the episode, its reward function, or parts of the reward; failed scores are in the place of theirs
    kept: KeptSets | None = None  # what each token was drawn from under top-p, top-k or min-p; None: unknown, or everything
    teachers: bytes = b""  # what teachers on engines say of each token (TeacherScores); empty without any
    branch: int = 0  # above 0: a further branch of the same episode as the sample before it, with the same reward

    def __post_init__(self) -> None:
        self._convert(token_ids="i", logprobs="f", versions="i", policy_mask="b")

    def summary(self) -> SampleSummary:
        """Raises: ValueError where the arrays differ in length."""
        tokens, turns = len(self.token_ids), int(len(self.token_ids) > 0)
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
            tokens,
            runs,
            turns,
            self.reward,
            self.finish_reason,
            len(self.routing),
            self.metrics,
            self.reward_parts,
            self.failures,
            None if self.kept is None else self.kept.summary(),
            len(self.teachers),
            self.branch,
        )


class _Ended(Protocol):
    @property
    def finish_reason(self) -> str: ...


def any_unanswered(samples: Iterable[_Ended]) -> bool:
    return any(sample.finish_reason == UNANSWERED for sample in samples)


class _Branch(Protocol):
    @property
    def branch(self) -> int: ...


def episodes[S: _Branch](samples: Iterable[S]) -> list[list[S]]:
    """The samples of each episode. A baseline is over these: all branches of one have its reward and its advantage."""
    found: list[list[S]] = []
    for sample in samples:
        if sample.branch:
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Equal neighbours as (value, count)."""
    if not values.size:
        return []
    starts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), values.size]
    return [(int(values[start]), end - start) for start, end in pairwise(starts)]


class Group(msgspec.Struct, frozen=True):
    """The n samples of one prompt: the unit of the baseline, and of sending."""

    prompt: Prompt
    samples: list[Sample]  # [n], or more where episodes have branches


class SampleSummary(msgspec.Struct, frozen=True):
    """What every trainer rank knows of a sample: all but its numbers a token, and its text."""

    tokens: int  # T
    policy_versions: list[tuple[Version, int]]  # of the tokens that the policy produced, in order: runs of (version, tokens)
    turns: int  # runs of policy tokens; 1 where the environment wrote nothing in between
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
    """What people read of a group."""

    prompt: str
    answer: str
    samples: list[tuple[str, list[tuple[int, int]]]]  # [n] text and environment_spans


class SampleNumbers(NamedTuple):
    """What is trained on of a sample."""

    prompt_ids: np.ndarray  # [P] int32
    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    policy_mask: np.ndarray | None  # [T] bool; None: True everywhere
    routing: bytes
    kept: KeptSets | None
    teachers: bytes = b""


class Batch(msgspec.Struct, frozen=True):
    """The input of one step: `prompts_per_step` groups, in the order of their ordinals. Without groups, too many prompts were dropped for
    it, and the run ends."""

    step: int
    groups: list[GroupSummary]
    generate_s: float  # from the start of its first rollout to the end of its last, without reward_s
    generator_wait_s: float  # how long the generator waited for weights since the batch before, counted in places in flight
    due_wait_s: float = 0.0  # of the trainer's waiting: for rollouts that would have become too old, though others were there
    rejected: int = 0  # groups found too old since the batch before, to be generated again
    buffered: int = 0  # finished groups left for later batches
    numbers: dict[int, SampleNumbers] = {}  # of the samples that this rank trains on, by their place in `samples`
    texts: list[msgspec.Raw] = []  # of each group an encoded GroupTexts, on trainer rank 0
    dropped: list[GroupSummary] = []  # by dynamic sampling: generated like `groups`, but not trained on
    dropped_texts: list[msgspec.Raw] = []  # as `texts`
    rested: int = 0  # prompts that the curriculum has left out since the batch before
    reward_s: float = 0.0  # of that time, what rollouts waited for scores, counted in rollouts in flight
    rollout_s: float = 0.0  # of one prompt, from its start to its score, a mean

    @property
    def samples(self) -> list[SampleSummary]:
        """Of all groups, one group after the other."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def generated(self) -> list[SampleSummary]:
        """The samples of all groups, and of those that were dropped."""
        return [sample for group in [*self.groups, *self.dropped] for sample in group.samples]


class TrainSequence(msgspec.Struct, frozen=True, eq=False):
    """One token sequence as the trainer sees it: prompt and response joined, with per-token training data. It is made of arrays or lists.

    Position i of `loss_mask`, `mu_logprobs`, `advantages` speaks of the prediction of token i from tokens < i;
    position 0 is therefore always masked.
    """

    token_ids: np.ndarray  # [L] int32
    loss_mask: np.ndarray  # [L] bool, True on tokens that the policy produced (or, in SFT, is to learn)
    mu_logprobs: np.ndarray  # [L] float32, 0 where masked
    advantages: np.ndarray  # [L] float32, 0 where masked
    routing: bytes = b""  # experts to use (models/routing.py), at the first positions, up to L - 1 of them
    kept: KeptSets | None = None  # of the last tokens: what each was drawn from. None: log-probs are over the whole vocabulary
    teachers: bytes = b""  # of the last tokens: what teachers on engines say of them

    def __post_init__(self) -> None:
        for name, code in (("token_ids", "i"), ("loss_mask", "b"), ("mu_logprobs", "f"), ("advantages", "f")):
            values = getattr(self, name)
            if not (isinstance(values, np.ndarray) and values.dtype == _DTYPES[code]):
                msgspec.structs.force_setattr(self, name, view(typed(values, code)))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainSequence):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)


class Elsewhere(msgspec.Struct, frozen=True):
    """In the place of a TrainSequence that another data-parallel rank trains on: its length alone."""

    length: int

    def __len__(self) -> int:
        return self.length


# The sets of tokens that sampled tokens were drawn from under top-p, top-k or min-p, packed into bytes that travel with a rollout.
#
# The policy that sampled is the model's distribution renormalised over that set, so the trainer takes its log-probs over the same set
# ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1). Otherwise their ratio would not be defined.


MOST_KEPT = 4096  # tokens that an engine keeps at most, or some more where logits at the limit are equal


class KeptSets(msgspec.Struct, frozen=True):
    """One set for each of T tokens.

    A set is written as its ids (2 bytes each, or 4 if the vocabulary is larger than 65,536) or, where that is smaller, as a bit for each
    token of the vocabulary, filled up to whole groups of 4 bytes.
    """

    vocab_size: int
    sizes: bytes  # [T] int32, how many tokens each set has; 0 where there is none: on what an environment wrote
    records: bytes  # the sets, one after the other

    @classmethod
    def of(cls, vocab_size: int, tokens: np.ndarray, sizes: np.ndarray, ids: np.ndarray) -> KeptSets:
        """tokens: [T] sampled tokens; sizes: [T] int32; ids: [sum of sizes], one set after the other, in any order.

        Raises: ValueError for ids that are not in the vocabulary, ids that are twice in a set, and sets without the token sampled from it.
        """
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"token ids from {ids.min()} to {ids.max()} in a vocabulary of {vocab_size}")
        if len(sizes) != len(tokens) or sizes.sum() != len(ids):
            raise ValueError(f"{len(sizes)} sets of {sizes.sum()} token ids in all for {len(tokens)} tokens, and {len(ids)} ids")
        rows = np.repeat(np.arange(len(sizes)), sizes)
        keys = np.sort(rows * vocab_size + ids)
        if (keys[1:] == keys[:-1]).any():
            raise ValueError("a token is twice in a set")
        made = cls(vocab_size, sizes.astype("<i4").tobytes(), _packed(vocab_size, sizes, rows, keys - rows * vocab_size))
        made.checked_ids(tokens)
        return made

    def __len__(self) -> int:
        return len(self.sizes) // 4

    @property
    def counts(self) -> np.ndarray:
        """[T] int32."""
        return np.frombuffer(self.sizes, "<i4")

    def ids(self) -> np.ndarray:
        """[sum of sizes] int32, ascending within a set. Raises: ValueError if `records` do not fit `sizes`."""
        sizes, (as_bits, starts, end), dtype = self.counts, _records(self.vocab_size, self.counts), _id_dtype(self.vocab_size)
        if end != len(self.records):
            raise ValueError(f"{len(self.records)} bytes of sets, whose sizes speak of {end}")
        found, listed = np.empty(sizes.sum(), np.int32), np.repeat(~as_bits, sizes)
        within = np.arange(len(found)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        found[listed] = np.frombuffer(self.records, dtype)[(np.repeat(starts // dtype.itemsize, sizes) + within)[listed]]
        if as_bits.any():
            width = _bits_bytes(self.vocab_size)
            places = starts[as_bits][:, None] + np.arange(width)
            set_bytes = np.frombuffer(self.records, np.uint8)[places].ravel()
            used = np.flatnonzero(set_bytes)
            at = np.flatnonzero(np.unpackbits(set_bytes[used], bitorder="little"))
            in_bytes = used[at // 8]
            if not np.array_equal(np.bincount(in_bytes // width, minlength=as_bits.sum()), sizes[as_bits]):
                raise ValueError("sets whose bits are not as many as their sizes")
            found[~listed] = in_bytes % width * 8 + at % 8
        return found

    def checked_ids(self, tokens: np.ndarray) -> np.ndarray:
        """As `ids`. Raises: ValueError also if one of the T sampled `tokens` is not in its own set."""
        sizes, sampled = self.counts, np.zeros(len(self), np.bool_)
        rows = np.repeat(np.arange(len(sizes)), sizes)
        ids = self.ids()
        sampled[rows[ids == tokens[rows]]] = True
        if missing := int((~sampled & (sizes > 0)).sum()):
            raise ValueError(f"{missing} of {int((sizes > 0).sum())} sampled tokens are not in their own sets (rollout.replay_mask)")
        return ids

    def first(self, tokens: int) -> KeptSets:
        """Those of the first tokens."""
        _, starts, end = _records(self.vocab_size, self.counts)
        return KeptSets(self.vocab_size, self.sizes[: 4 * tokens], self.records[: starts[tokens] if tokens < len(self) else end])

    def summary(self) -> KeptSummary:
        sizes = self.counts
        return KeptSummary(self.vocab_size, int(sizes.sum()), int((sizes >= MOST_KEPT).sum()), len(self.sizes) + len(self.records))


class KeptSummary(msgspec.Struct, frozen=True):
    """What every trainer rank knows of a sample's sets."""

    vocab_size: int
    total: int  # of their sizes
    largest: int  # how many have the most that are recorded: top_p or min_p alone might have kept more
    bytes: int


def join(kept: KeptSets | None, tokens: int, more: KeptSets | None, more_tokens: int) -> KeptSets | None:
    """The sets of `tokens` tokens and of `more_tokens` after them; None stands for tokens without sets."""
    known = kept or more
    if known is None:
        return None
    parts = [each or KeptSets(known.vocab_size, bytes(4 * count), b"") for each, count in ((kept, tokens), (more, more_tokens))]
    return KeptSets(known.vocab_size, b"".join(part.sizes for part in parts), b"".join(part.records for part in parts))


def kept_metrics(summaries: Iterable[KeptSummary | None], policy_tokens: int) -> dict[str, float]:
    """Empty where no set is known."""
    known = [summary for summary in summaries if summary is not None]
    if not known:
        return {}
    return {
        "mask/kept_mean": sum(each.total for each in known) / policy_tokens,
        "mask/bytes_per_token": sum(each.bytes for each in known) / policy_tokens,
        "mask/overflow": float(sum(each.largest for each in known)),
    }


def _id_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _bits_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 32) * 4


def _records(vocab_size: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """[T] whether a set is written as bits, [T] where it begins, and where the last one ends."""
    as_ids, bits = sizes.astype(np.int64) * _id_dtype(vocab_size).itemsize, _bits_bytes(vocab_size)
    lengths = np.minimum(as_ids, bits)
    ends = np.cumsum(lengths)
    return as_ids > bits, ends - lengths, int(ends[-1]) if len(ends) else 0


def _packed(vocab_size: int, sizes: np.ndarray, rows: np.ndarray, ids: np.ndarray) -> bytes:
    """`ids`, ascending within a set; `rows`: the set that each belongs to."""
    as_bits, starts, end = _records(vocab_size, sizes)
    packed, dtype = np.zeros(end, np.uint8), _id_dtype(vocab_size)
    within, bits = np.arange(len(ids)) - (np.cumsum(sizes) - sizes)[rows], as_bits[rows]
    listed = ~bits
    packed.view(dtype)[(starts[rows] // dtype.itemsize + within)[listed]] = ids[listed]
    if bits.any():
        places = starts[rows[bits]] + ids[bits] // 8  # ascending, as sets and their ids are
        firsts = np.flatnonzero(np.diff(places, prepend=-1))
        packed[places[firsts]] = np.add.reduceat(1 << ids[bits] % 8, firsts)
    return packed.tobytes()


# What teachers on engines say of a response, packed into bytes that travel with a rollout.


@dataclass(frozen=True)
class TeacherScores:
    """By one teacher, of T tokens."""

    ids: np.ndarray  # [T, k] int32, the likeliest tokens at each place; [T, 0] if it was asked for the tokens' own log-probs alone
    logprobs: np.ndarray  # [T, k] float32 of these, or [T, 1] of the tokens themselves; NaN where it has said nothing


@dataclass(frozen=True)
class TeacherFormat:
    """The bytes of a token are, of each teacher in turn, its ids (int32) and then its log-probs (float32)."""

    teachers: int
    top_k: int  # 0: the log-probs of the tokens themselves

    @property
    def token_bytes(self) -> int:
        return 4 * self.teachers * self._width

    @property
    def _width(self) -> int:
        return 2 * self.top_k or 1

    def pack(self, told: Sequence[TeacherScores | None], tokens: int) -> bytes:
        """`told` by each teacher, of `tokens` tokens; None if it failed."""
        nothing = TeacherScores(np.zeros((tokens, self.top_k), np.int32), np.full((tokens, self.top_k or 1), np.nan, np.float32))
        parts = [part for one in told for part in ((one or nothing).ids.view(np.float32), (one or nothing).logprobs)]
        return np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32).tobytes()

    def unpack(self, packed: bytes, tokens: int) -> list[TeacherScores]:
        """Raises: ValueError if `packed` is of another number of tokens."""
        numbers = np.frombuffer(packed, np.float32).reshape(tokens, self.teachers, self._width)
        return [
            TeacherScores(np.ascontiguousarray(one[:, : self.top_k]).view(np.int32), one[:, self.top_k :]) for one in numbers.swapaxes(0, 1)
        ]
