"""The sets of tokens that sampled tokens were drawn from under top-p, top-k or min-p, packed into bytes that travel with a rollout.

The policy that sampled is the model's distribution renormalised over that set, so the trainer takes its log-probs over the same set
("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1). Otherwise their ratio would not be defined.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

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
