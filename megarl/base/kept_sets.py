"""Kept sets: the tokens that each token of a response was drawn from, and their packed form."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

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
