"""The fp8 rules: against a reference in float64 and integers, against SGLang's own tools, and parts
against the whole.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import quantise_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantise_reference import block_rule

from megarl.base.geometry import Box, whole_box
from megarl.kernels import quantise as rules
from megarl.kernels.quantise import FP8, merge_amax, quantise, quantise_with, scales_of, tile_amax
from megarl.kernels.quantise_rules import BLOCK, CHANNEL, TENSOR, Rule

torch.set_num_threads(1)
SMALL = replace(block_rule(8, 4), name="small")
RULES = [BLOCK, SMALL, CHANNEL, TENSOR]
LARGEST = torch.finfo(torch.bfloat16).max


def bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def expected(x: torch.Tensor, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    return reference.quantise(x, rule.rows or x.shape[0], rule.cols or x.shape[1], rule.floor)


def equal(
    actual: tuple[torch.Tensor, torch.Tensor], expected_pair: tuple[np.ndarray, np.ndarray]
) -> None:
    assert actual[0].dtype == FP8
    assert actual[1].dtype == torch.float32
    np.testing.assert_array_equal(bits(actual[0]), expected_pair[0])
    np.testing.assert_array_equal(bits(actual[1]), expected_pair[1].view(np.uint8))


@st.composite
def weights(draw: st.DrawFn, largest: int = 40) -> torch.Tensor:
    """[R, C] in bf16 or float32: rows and columns of very different magnitude, zeros, subnormals
    and the largest numbers.
    """
    rows = draw(st.integers(1, largest))
    cols = draw(st.integers(1, largest))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, cols, generator=generator)
    span = draw(st.sampled_from([0, 3, 60]))
    x *= torch.exp2(span * torch.randn(rows, 1, generator=generator)).clamp(2.0**-120, 2.0**100)
    special = draw(
        st.sampled_from([0.0, 1e-40, 1e-39, -3e-38, 1e-4, 1e-12, 448.0, LARGEST, -LARGEST])
    )
    x[torch.rand(rows, cols, generator=generator) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = (
        special
    )
    return x.to(draw(st.sampled_from([torch.bfloat16, torch.float32])))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@settings(max_examples=25, deadline=None)
@given(x=weights())
def test_equals_the_float64_reference(rule, x):
    equal(quantise(x, rule, "x"), expected(x, rule))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_equals_the_float64_reference_on_full_tiles(rule):
    x = torch.randn(300, 270, generator=torch.Generator().manual_seed(1))
    equal(quantise(x, rule, "x"), expected(x, rule))
    equal(quantise(x.t()[:200], rule, "x"), expected(x.t()[:200], rule))


def test_every_code_and_every_tie_rounds_to_even():
    middles = (reference.E4M3[:-1] + reference.E4M3[1:]) / 2
    # bf16 represents all of them
    exact = torch.tensor(np.concatenate([reference.E4M3, middles]), dtype=torch.bfloat16)
    x = torch.cat([exact, -exact]).unsqueeze(0)
    codes, scales = quantise(x, TENSOR, "x")
    assert scales.item() == 1.0
    np.testing.assert_array_equal(bits(codes), reference.e4m3_codes(reference.bf16_values(x)))
    assert set(bits(codes).ravel()) == {c | s for c in range(127) for s in (0, 128)}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), x=weights(), rule=st.sampled_from([SMALL, CHANNEL, TENSOR]))
def test_parts_cut_anywhere_equal_gather_then_quantise(data, x, rule):
    def cuts(extent: int) -> list[tuple[int, int]]:
        inner = (
            sorted(data.draw(st.sets(st.integers(1, extent - 1), max_size=3))) if extent > 1 else []
        )
        return list(zip([0, *inner], [*inner, extent]))

    boxes = [
        Box((r, c), (r1 - r, c1 - c)) for r, r1 in cuts(x.shape[0]) for c, c1 in cuts(x.shape[1])
    ]
    parts = {box: x[box.slices()].clone() for box in boxes}
    amax = [
        (rule.tiles(box), tile_amax(part, *box.start, rule, "x")) for box, part in parts.items()
    ]
    scales = scales_of(merge_amax(amax, whole_box(rule.scale_shape(tuple(x.shape)))), rule)
    codes = torch.empty(x.shape, dtype=FP8)
    for box, part in parts.items():
        codes[box.slices()] = quantise_with(
            part, *box.start, scales[rule.tiles(box).slices()], rule
        )
        if rule.whole_tiles(box, tuple(x.shape)):
            alone = quantise(part, rule, "x")
            assert torch.equal(alone[0].view(torch.uint8), codes[box.slices()].view(torch.uint8))
            assert torch.equal(alone[1], scales[rule.tiles(box).slices()])
    equal((codes, scales), expected(x, rule))


def test_experts_are_quantised_separately():
    x = torch.randn(3, 20, 9, generator=torch.Generator().manual_seed(2)) * torch.tensor(
        [1.0, 1e3, 1e-3]
    ).view(3, 1, 1)
    for rule in RULES:
        codes, scales = quantise(x, rule, "experts")
        assert tuple(scales.shape) == rule.scale_shape(tuple(x.shape))
        for e in range(3):
            equal((codes[e], scales[e]), expected(x[e], rule))
        box = Box((0, 3, 2), (3, 9, 5))
        part = quantise_with(x[box.slices()], 3, 2, scales[rule.tiles(box).slices()], rule)
        np.testing.assert_array_equal(bits(part), bits(codes[box.slices()]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_and_infinity_are_refused_by_name(rule, dtype):
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.zeros(140, 260, dtype=dtype)
        x[131, 259] = bad
        tile = (131 // rule.rows if rule.rows else 0, 259 // rule.cols if rule.cols else 0)
        with pytest.raises(
            RuntimeError, match=rf"layers\.3\.up: .*in tile \({tile[0]}, {tile[1]}\)"
        ):
            quantise(x, rule, "layers.3.up")
    # a float32 number that bf16 cannot hold
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        quantise(torch.tensor([[3.4e38]]), rule, "x")


def test_a_missing_part_and_scales_of_another_shape_are_refused():
    amax = tile_amax(torch.ones(4, 8), 0, 0, SMALL, "x")
    with pytest.raises(ValueError, match="no amax for 2 of the tiles"):
        merge_amax([(Box((0, 0), (1, 2)), amax)], Box((0, 0), (2, 2)))
    with pytest.raises(ValueError, match="touches tiles"):
        quantise_with(torch.ones(4, 8), 6, 0, amax, SMALL)


def spread(rows: int, cols: int) -> torch.Tensor:
    """bf16 rows of different magnitude."""
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(rows, cols, generator=generator)
        * torch.exp2(4 * torch.randn(rows, 1, generator=generator))
    ).bfloat16()


def sglang_file(path: str) -> ModuleType:
    """Loads one file of SGLang that needs only torch: the import of SGLang would need CPU support."""
    root = importlib.util.find_spec("sglang").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(root) / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compressed(values: torch.Tensor, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales by compressed-tensors. SGLang serves its formats."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as vendor_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    values = values.float()  # then its scales are in float32 too
    least, most = (
        values.aminmax(dim=-1, keepdim=True) if strategy == "channel" else values.aminmax()
    )
    arguments = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
    scale, zero = calculate_qparams(least, most, arguments)
    return vendor_quantize(values, scale, zero, arguments, torch.float8_e4m3fn), scale


def test_block_equals_sglangs_conversion():
    convert = sglang_file("srt/layers/quantization/mxfp8_block_convert.py").bf16_to_block_fp8_128
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(300, 260, generator=generator) * torch.exp2(
        30 * torch.randn(300, 1, generator=generator)
    )
    x[:128, 128:256] = 0
    x[128:256] *= 1e-9
    converted = convert(x.bfloat16())
    equal(quantise(x, BLOCK, "x"), (bits(converted[0]), converted[1].numpy()))


@pytest.mark.parametrize(("rule", "strategy"), [(CHANNEL, "channel"), (TENSOR, "tensor")])
def test_channel_and_tensor_equal_compressed_tensors(rule, strategy):
    x = spread(200, 90)
    codes, scales = compressed(x, strategy)
    equal(quantise(x, rule, "x"), (bits(codes), scales.view(-1, 1).numpy()))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("start", [(0, 0), (5, 70)])
def test_strips_of_rows_change_nothing(rule, start, monkeypatch):
    """A large box is quantised strip by strip. All rows at once give the same bits, also if the
    first strip is a cut tile.
    """
    x = torch.randn(2, 300, 200, generator=torch.Generator().manual_seed(7)).bfloat16()

    def worked_through(elements: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(rules, "STRIP_ELEMENTS", elements)
        amax = tile_amax(x, *start, rule, "x")
        codes = quantise_with(x, *start, scales_of(amax, rule), rule)
        return len(list(rules._strips(x, start[0], rule))), amax, codes.view(torch.uint8)

    strips, amax, codes = worked_through(1 << 30)
    assert strips == 1
    for elements in (1, 60_000):
        strips, found_amax, found_codes = worked_through(elements)
        assert (strips > 1) == (rule.rows is not None)
        assert torch.equal(found_amax, amax)
        assert torch.equal(found_codes, codes)
