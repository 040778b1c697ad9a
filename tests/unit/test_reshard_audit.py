"""The audit hash: additive over boxes, and changed by any flipped bit and any swap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard import audit
from megarl.reshard.audit import MASK, hash_box, hash_slice, hash_tensor
from megarl.reshard.box import Box

torch.set_num_threads(1)
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.uint8: torch.uint8}


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def splitmix64(state: int) -> int:
    """Independent scalar form of the generator."""
    z = state & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def written_out(tensor: torch.Tensor) -> int:
    """The formula of the module's docstring in Python integers."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    total = 0
    for r, row in enumerate(tensor.view(bits).tolist()):
        for c, x in enumerate(row):
            a = splitmix64((r + 1) * 0x9E3779B97F4A7C15 + audit.ROW_SEED) | 1
            b = splitmix64((c + 1) * 0x9E3779B97F4A7C15 + audit.COL_SEED) | 1
            total += x * a * b
    return total & MASK


@pytest.mark.parametrize("dtype", INTEGERS)
def test_equals_the_formula_on_both_paths(dtype, monkeypatch):
    x = values(dtype, 9, 13)
    expected = written_out(x)
    assert hash_tensor(x) == expected
    monkeypatch.setattr(audit, "_hash_numpy", audit._hash_torch)  # the path of other devices, in several chunks
    monkeypatch.setattr(audit, "_CHUNK_ELEMENTS", 30)
    assert hash_tensor(x) == expected


@pytest.mark.parametrize("dtype", INTEGERS)
def test_strides_do_not_matter_only_positions_do(dtype):
    x = values(dtype, 20, 30)
    view = x[2:18:1, 5:25]
    assert hash_box(view, 2, 5) == hash_box(view.clone(), 2, 5) != hash_box(view, 2, 6)
    assert hash_box(x.t(), 0, 0) == hash_tensor(x.t().contiguous()) != hash_tensor(x)


@settings(max_examples=25, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data())
def test_shares_of_disjoint_boxes_add_up(shape, data):
    x = values(torch.bfloat16, *shape)
    whole = Box((0,) * len(shape), tuple(shape))
    inner_start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    inner = Box(inner_start, tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, inner_start)))
    boxes = [inner, *whole.subtract(inner)]
    assert sum(box.numel for box in boxes) == whole.numel
    assert sum(hash_slice(x[box.slices()], box, tuple(shape)) for box in boxes) & MASK == hash_tensor(x)
    flat = x.reshape(1, -1) if len(shape) == 1 else x.flatten(0, -2)
    assert hash_tensor(x) == hash_box(flat, 0, 0)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_single_bit_flip_is_seen(dtype):
    x = values(dtype, 6, 5)
    expected, bits = hash_tensor(x), x.view(INTEGERS[dtype])
    width = 8 * x.element_size()
    for position in range(x.numel()):
        for bit in range(width):
            mask = (1 << bit) - (1 << width if bit == width - 1 and dtype in (torch.float32, torch.bfloat16) else 0)
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
            assert hash_tensor(x[order]) != expected and hash_tensor(x[:, order]) != expected


def test_zeros_add_nothing_and_negative_zero_is_not_zero():
    x = torch.zeros(4, 4)
    assert hash_tensor(x) == 0
    x[1, 2] = -0.0
    assert hash_tensor(x) != 0
