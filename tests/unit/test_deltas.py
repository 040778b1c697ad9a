"""The changed values of a copy are encoded in the form with the fewest bytes, and decoded bit for
bit.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.base.geometry import Box
from megarl.config.schema import WeightsConfig
from megarl.kernels.changes import BLOCK, bits_of, compact, find_changes, positions_of, put
from megarl.messaging.messages import WeightsOffer
from megarl.reshard.deltas import (
    NOTHING,
    PAIRS,
    RUNS,
    WHOLE,
    best_kind,
    blob_bytes,
    body_bytes,
    find_deltas,
    make_blob,
    spread,
    spread_blob,
)
from megarl.reshard.execute import Payloads
from megarl.reshard.map import Copy
from megarl.weight_sync.writing import Deltas, changed_fraction, worth_it

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def noise(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0,
        256,
        (count * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    ).view(dtype)


def flipped_at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The same values with one bit flipped at `places`."""
    new = values.clone()
    bits_of(new)[places] ^= 1
    return new


PATTERNS = {  # elements, places
    "nothing": (1000, torch.tensor([], dtype=torch.int64)),
    "a scalar": (1, torch.tensor([0])),
    "all": (999, torch.arange(999)),
    "here and there": (3 * BLOCK + 5, torch.arange(0, 3 * BLOCK + 5, 97)),
    "across the ends of blocks": (
        2 * BLOCK + 2,
        torch.tensor([0, 1, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1]),
    ),
    "long runs, one through a whole block": (
        4 * BLOCK,
        torch.cat([torch.arange(7, 900), torch.arange(BLOCK - 3, 2 * BLOCK + 9)]),
    ),
    "no block but the last": (5 * BLOCK, torch.tensor([5 * BLOCK - 1])),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_delta_restores_the_new_values(pattern, dtype):
    count, places = PATTERNS[pattern]
    old = noise(count, dtype)
    new = flipped_at(old, places)
    (delta,) = find_deltas([(bits_of(new), bits_of(old))])
    follows = (torch.diff(places) == 1) & (places[1:] % BLOCK != 0)
    runs = len(places) - int(follows.sum())
    assert delta.changed == len(places)
    assert delta.kind == best_kind(count, len(places), runs, dtype.itemsize)
    size = body_bytes(delta.kind, count, delta.entries, delta.changed, dtype.itemsize)
    assert len(delta.body) == size
    spread(delta, old)
    assert torch.equal(bits_of(old), bits_of(new))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_delta_of_a_box_of_any_strides(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = data.draw(st.integers(1, 9))
    cols = data.draw(st.integers(1, 40))
    memory = noise(2 * rows * cols, dtype)
    box = {
        "whole": memory[: rows * cols].view(rows, cols),
        "columns": memory.view(rows, 2 * cols)[:, cols:],
    }
    box["turned"] = memory.view(-1)[: rows * cols].view(cols, rows).t()
    target = box[data.draw(st.sampled_from(sorted(box)))]
    places = data.draw(st.lists(st.integers(0, rows * cols - 1), unique=True))
    old = target.contiguous().view(-1)
    new = flipped_at(old, torch.tensor(sorted(places), dtype=torch.int64))
    expected = bits_of(memory).clone()
    holes = expected.as_strided(target.shape, target.stride(), target.storage_offset())
    holes.copy_(bits_of(new).view(target.shape))
    (delta,) = find_deltas([(bits_of(new), bits_of(old))])
    spread(delta, target)
    assert torch.equal(bits_of(memory), expected)


@pytest.mark.parametrize("at_once_bytes", [0, 150_000, 1 << 30])
def test_batched_comparison_equals_single_ones(at_once_bytes):
    old = [noise(count, torch.bfloat16, seed) for seed, (count, _) in enumerate(PATTERNS.values())]
    new = [flipped_at(values, places) for values, (_, places) in zip(old, PATTERNS.values())]
    pairs = [(bits_of(now), bits_of(was)) for now, was in zip(new, old)]
    for batched, pair in zip(find_deltas(iter(pairs), at_once_bytes), pairs, strict=True):
        (single,) = find_deltas([pair])
        assert torch.equal(batched.body, single.body)
        assert batched.kind == single.kind
        assert (batched.entries, batched.changed) == (single.entries, single.changed)


def test_nan_and_minus_zero_are_compared_by_bits():
    old = torch.tensor([0.0, float("nan"), 1.0, float("nan")])
    new = torch.tensor([-0.0, float("nan"), 1.0, -float("nan")])
    new.view(torch.int32)[3] |= 1
    assert [delta.changed for delta in find_deltas([(bits_of(new), bits_of(old))])] == [2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 1.0])
def test_compiled_loops_equal_the_reference(dtype, share):
    generator = torch.Generator().manual_seed(3)
    old = torch.randint(0, 100, ((1 << 20) + 77,), dtype=dtype, generator=generator)
    places = torch.nonzero(torch.rand(len(old), generator=generator) < share).view(-1)
    new = old.clone()
    new[places] += 1
    counts, offsets = find_changes(new, old)
    reference = compact(places, len(old))
    assert torch.equal(counts, reference[0]) and torch.equal(offsets, reference[1])
    assert torch.equal(positions_of(counts, offsets), places)
    memory = torch.randint(0, 100, (1031, 3000), dtype=dtype, generator=generator)
    for rows, cols in ((1031, 1017), (3, 3000)):  # columns of a matrix; whole rows
        target = memory[:rows, :cols]
        inside = places[places < rows * cols]
        expected = memory.clone()
        expected.view(-1)[inside // cols * 3000 + inside % cols] = new[inside]
        put(target, *compact(inside, rows * cols), new[inside])
        assert torch.equal(memory, expected)


def test_best_kind_has_the_fewest_bytes():
    """In bf16 a pair takes 4 bytes, and a run 4 bytes plus 2 for each element.

    A block takes 4, which padding may hide.
    """
    assert best_kind(1 << 20, 0, 0, 2) == NOTHING
    assert best_kind(1 << 20, 1000, 1000, 2) == best_kind(1 << 20, 1000, 501, 2) == PAIRS
    assert best_kind(1 << 20, 1000, 490, 2) == RUNS
    # half of the elements, in pairs, plus the blocks
    assert best_kind(1 << 20, 1 << 19, 1 << 18, 2) == WHOLE
    assert best_kind(1 << 20, (1 << 19) - 100, (1 << 19) - 100, 2) == PAIRS
    assert best_kind(1 << 20, 350_000, 350_000, 1) == WHOLE
    assert best_kind(1 << 20, 349_000, 349_000, 1) == PAIRS
    assert best_kind(64, 64, 1, 4) == WHOLE
    for item in (1, 2, 4):
        for changed in (1, 10, 1000):
            sizes = {
                kind: body_bytes(kind, 4096, entries, changed, item)
                for kind, entries in ((PAIRS, changed), (RUNS, 3), (WHOLE, 0))
            }
            assert sizes[best_kind(4096, changed, 3, item)] == min(sizes.values())


def test_wrong_or_cut_blob_is_refused_and_changes_nothing():
    old = [noise(500, torch.bfloat16), noise(70000, torch.float8_e4m3fn), noise(9, torch.float32)]
    new = [flipped_at(values, torch.arange(0, len(values), 50)) for values in old[:2]] + [old[2]]
    deltas = [*find_deltas((bits_of(now), bits_of(was)) for now, was in zip(new, old))]
    blob = make_blob(deltas, 7)
    assert len(blob) == blob_bytes(deltas)
    before = [values.clone() for values in old]
    for wrong, version in ((blob, 8), (blob[:-8], 7), (torch.zeros_like(blob), 7)):
        with pytest.raises(
            RuntimeError, match=rf"the changes from trainer rank 3 .* not of version {version}"
        ):
            spread_blob(wrong, version, old, "trainer rank 3")
    assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(old, before))
    # an inbox may be larger than its blob
    spread_blob(torch.cat([blob, torch.ones(64, dtype=torch.uint8)]), 7, old, "trainer rank 3")
    assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(old, new))


def test_delta_needs_a_common_base_and_a_saving():
    def offers(*sizes: int, base: int = 4) -> list[WeightsOffer]:
        return [WeightsOffer(5, base, size, size // 2, 100) for size in sizes]

    assert worth_it(offers(50, 1), 4) and not worth_it(offers(51, 1), 4)
    assert not worth_it(offers(1, 1), 3) and not worth_it(offers(1, 1, base=-1), -1)
    assert not worth_it([*offers(1), WeightsOffer(5)], 4)
    assert changed_fraction(offers(10, 30)) == 20 / 200
    assert changed_fraction([*offers(1), WeightsOffer(5)]) is None


@pytest.mark.parametrize("refresh, expected", [(3, "FddFddFd"), (1, "FFFFFFFF"), (50, "Fddddddd")])
def test_full_update_comes_every_delta_refresh(refresh, expected):
    assert updates_of(refresh) == expected


def test_too_many_changes_delay_the_next_comparison():
    assert updates_of(4, too_many=(2, 7)) == "FdDFFFFD"


def test_unconfirmed_update_is_followed_by_a_full_one():
    assert updates_of(50, unconfirmed=(2,)) == "FddFdddd"


def updates_of(
    refresh: int, too_many: tuple[int, ...] = (), unconfirmed: tuple[int, ...] = ()
) -> str:
    """Eight updates: F is full, d a delta, D full after a comparison."""
    box = Box((0,), (64,))
    copies = [Copy(0, "x", box, rank, "y", box, "cast", "bfloat16", 0) for rank in (0, 1)]
    deltas = Deltas(WeightsConfig(delta="auto", delta_refresh=refresh))
    payloads = Payloads()
    source = torch.zeros(64)
    engine = torch.zeros(64, dtype=torch.bfloat16)
    base = -1
    updates = ""
    for version in range(8):
        source[version] += 1
        payloads.begin({"x": source})
        changes = deltas.find(
            base, copies, {0: {"y": (64,)}, 1: {"y": (64,)}}, True, None, payloads
        )
        deltas.begin_write()
        if changes and version not in too_many:
            assert changes.by_rank.keys() == {0, 1} and changes.changed_bytes == 2 * 2
            (_, delta), *_ = changes.by_rank[1]
            spread(delta, engine)
            deltas.keep_changes(version, changes)
            updates += "d"
        else:
            engine.copy_(source)
            deltas.keep(version, copies, None, payloads, declined=changes is not None)
            updates += "D" if changes else "F"
        assert torch.equal(engine, source.bfloat16())
        base = base if version in unconfirmed else version
    return updates
