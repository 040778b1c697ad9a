"""The audit hash is additive over boxes. Any flipped bit and any swap changes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.base.geometry import Box, whole_box
from megarl.kernels import audit
from megarl.kernels.audit import MASK, hash_box, hash_slice, hash_tensor

torch.set_num_threads(1)
INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.uint8: torch.uint8,
}


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def splitmix64(state: int) -> int:
    """An independent scalar form of the generator."""
    z = state & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def written_out(tensor: torch.Tensor) -> int:
    """The formula in the module's docstring, in Python integers."""
    rows = tensor.view(torch.uint8).reshape(len(tensor), -1).tolist()
    total = 0
    for r, row in enumerate(rows):
        for w in range(0, len(row), 8):
            x = int.from_bytes(bytes(row[w : w + 8]), "little")
            a = splitmix64((r + 1) * 0x9E3779B97F4A7C15 + audit.ROW_SEED) | 1
            b = splitmix64((w // 8 + 1) * 0x9E3779B97F4A7C15 + audit.COL_SEED) | 1
            total += (x + (x >> 31)) * a * b
    return total & MASK


# several rows, one row, part of a row
@pytest.mark.parametrize("tile_words", [audit.TILE_WORDS, 8, 2])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_equals_the_formula(dtype, tile_words, monkeypatch):
    monkeypatch.setattr(audit, "TILE_WORDS", tile_words)
    for x in (values(dtype, 9, 32), values(dtype, 9, 13)):  # whole words, and padded ones
        assert hash_tensor(x) == hash_tensor(x.t().contiguous().t()) == written_out(x)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_compiled_loop_gives_the_same(dtype, monkeypatch):
    x = values(dtype, 40, 64)
    boxes = [
        Box((0, 0), (40, 64)),
        Box((3, 8), (20, 16)),
        Box((39, 0), (1, 64)),
        Box((0, 56), (40, 8)),
        Box((4, 3), (7, 50)),
    ]
    expected = [hash_box(x[box.slices()], *box.start) for box in boxes]
    monkeypatch.setattr(audit, "COMPILED_BYTES", 0)
    monkeypatch.setattr(
        audit,
        "_hash_tiles",
        lambda bits, *_: pytest.fail("not compiled") if bits.dtype == torch.int64 else None,
    )
    assert [hash_box(x[box.slices()], *box.start) for box in boxes[:4]] == expected[:4]
    assert hash_box(x[boxes[4].slices()], *boxes[4].start) is None  # cut words are not for the loop


@pytest.mark.parametrize("dtype", INTEGERS)
def test_hash_depends_on_positions_and_not_on_strides(dtype):
    x = values(dtype, 20, 30)
    view = x[2:18:1, 5:25]
    assert hash_box(view, 2, 5) == hash_box(view.clone(), 2, 5) != hash_box(view, 2, 6)
    assert hash_box(x.t(), 0, 0) == hash_tensor(x.t().contiguous()) != hash_tensor(x)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(list(INTEGERS)),
    tile_words=st.sampled_from([1, 3, audit.TILE_WORDS]),
    data=st.data(),
)
def test_shares_of_disjoint_boxes_add_up(shape, dtype, tile_words, data):
    """For any cuts: boxes begin and end inside words, and are views or copies."""
    x = values(dtype, *shape)
    full_box = Box((0,) * len(shape), tuple(shape))
    inner_start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    inner = Box(
        inner_start, tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, inner_start))
    )
    boxes = [inner, *full_box.subtract(inner)]
    assert sum(box.numel for box in boxes) == full_box.numel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "TILE_WORDS", tile_words)
        for place in (torch.Tensor.detach, torch.Tensor.clone):
            shares = [hash_slice(place(x[box.slices()]), box, tuple(shape)) for box in boxes]
            assert sum(shares) & MASK == hash_tensor(x)
    assert hash_tensor(x) == written_out(x.reshape(1, -1) if len(shape) == 1 else x.flatten(0, -2))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_single_bit_flip_is_seen(dtype):
    x = values(dtype, 6, 5)
    expected = hash_tensor(x)
    bits = x.view(INTEGERS[dtype])
    width = 8 * x.element_size()
    for position in range(x.numel()):
        for bit in range(width):
            mask = (1 << bit) - (
                1 << width if bit == width - 1 and dtype in (torch.float32, torch.bfloat16) else 0
            )
            bits.view(-1)[position] ^= mask
            assert hash_tensor(x) != expected
            bits.view(-1)[position] ^= mask
    assert hash_tensor(x) == expected


def test_every_swap_of_elements_rows_and_columns_is_seen():
    x = values(torch.float32, 8, 8)
    expected = hash_tensor(x)
    for i in range(64):
        for j in range(i):
            y = x.clone().view(-1)
            y[[i, j]] = y[[j, i]]
            assert hash_tensor(y.view(8, 8)) != expected
    for i in range(8):
        for j in range(i):
            order = list(range(8))
            order[i], order[j] = j, i
            assert hash_tensor(x[order]) != expected
            assert hash_tensor(x[:, order]) != expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flipped_signs_do_not_cancel(dtype):
    """For every pair of elements of two rows, at any place in their words: also if one word loses
    as much as another gains.
    """
    x = values(dtype, 2, 16)
    expected = hash_tensor(x)
    for i in range(32):
        for j in range(i):
            y = x.clone().view(-1)
            y[[i, j]] = -y[[i, j]]
            assert hash_tensor(y.view(2, 16)) != expected
    assert (
        len({hash_tensor(x), hash_tensor(-x), hash_tensor(x.roll(1, 0)), hash_tensor(x.roll(1, 1))})
        == 4
    )
    for rows in ([0], [1], [0, 1]):
        y = x.clone()
        y[rows] = -y[rows]
        assert hash_tensor(y) != expected


def test_zeros_add_nothing_and_negative_zero_is_not_zero():
    x = torch.zeros(4, 4)
    assert hash_tensor(x) == 0
    x[1, 2] = -0.0
    assert hash_tensor(x) != 0


def test_shares_that_lie_on_a_device_are_read_many_at_a_time(monkeypatch):
    """Kernels leave such shares: the bits of int64, in any order and number."""
    monkeypatch.setattr(audit, "MOST_LEFT", 3)
    x = values(torch.float32, 6, 10)
    y = values(torch.bfloat16, 2, 3, 4)
    full_box = whole_box(tuple(x.shape))
    hashes = audit.Hashes()
    hashes.add("y", y, whole_box(tuple(y.shape)), tuple(y.shape))
    parts = [Box((row, 0), (1, 10)) for row in range(6)]
    shares = [hash_slice(x[part.slices()], part, full_box.shape) for part in parts]
    hashes.defer("x", (torch.tensor(share - (share >> 63 << 64)) for share in shares))
    assert (
        hashes.totals()
        == {"x": hash_tensor(x), "y": hash_tensor(y)}
        == audit.hash_tensors({"x": x, "y": y})
    )
