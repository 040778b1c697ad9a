"""Quantises bf16 to float8_e4m3fn with scales, whole or in parts: the torch definition of the rules
(kernels/quantise_rules.py).

A rank that has a whole tensor, or a box that cuts no tile, calls `quantise`. Ranks that share tiles
each call `tile_amax` on their box, and `merge_amax` (or an all-reduce by maximum) joins the
results. Then each calls `quantise_with` with the scales of the tiles it touches. Both ways give the
same bits, since a maximum does not depend on order, and codes are computed element by element.

Float32 values are rounded to bf16 first, so that the bf16 weight is quantised in any case. Dims
before the last two (experts) are kept. NaN and infinity raise an error that names the tensor;
otherwise they would spoil a whole tile, or be clamped to 448.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from megarl.base.geometry import Box, whole_box
from megarl.kernels.quantise_rules import E4M3_MAX, Rule

FP8 = torch.float8_e4m3fn
STRIP_ELEMENTS = 128 << 10  # 256 KiB in bf16, 512 KiB in float32


def quantise(values: torch.Tensor, rule: Rule, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes [..., R, C] e4m3 and scales `rule.scale_shape` float32 of a tensor, or of a box
    of whole tiles.

    Raises RuntimeError, with `name`, on NaN or infinity.
    """
    scales = scales_of(tile_amax(values, 0, 0, rule, name), rule)
    return quantise_with(values, 0, 0, scales, rule), scales


def tile_amax(
    values: torch.Tensor, row_start: int, col_start: int, rule: Rule, name: str
) -> torch.Tensor:
    """The largest |x| in each tile that a box touches, float32, of shape `rule.tiles(box).shape`.

    values: [..., R, C], any strides; its first element is at (row_start, col_start) of the whole
    tensor. Raises RuntimeError, with `name` and the tile, on NaN or infinity.
    """
    strips = []
    for rows in _strips(values, row_start, rule):
        strips.append(_amax(values[..., rows, :], row_start + rows.start, col_start, rule))
    amax = torch.cat(strips, dim=-2).float()
    require_finite(amax, name, touched_tiles(values, row_start, col_start, rule))
    return amax


def merge_amax(parts: Sequence[tuple[Box, torch.Tensor]], tiles: Box) -> torch.Tensor:
    """The amax of `tiles`, merged from several boxes, each given as (tiles it touches, their amax).

    Raises ValueError on a gap.
    """
    merged = torch.full(tiles.shape, -1.0, device=parts[0][1].device)
    for touched, amax in parts:
        common = touched.intersect(tiles)
        if common is not None:
            target = merged[common.move(tiles, whole_box(tiles.shape)).slices()]
            part = amax[common.move(touched, whole_box(touched.shape)).slices()]
            torch.maximum(target, part, out=target)
    if (merged < 0).any():
        raise ValueError(f"no amax for {int((merged < 0).sum())} of the tiles in {tiles}")
    return merged


def scales_of(amax: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The scale of each tile, float32."""
    # The divisor is a tensor, since on CUDA torch replaces division by a number with multiplication
    # by its rounded reciprocal.
    return amax.clamp(min=rule.floor) / torch.full((), E4M3_MAX, device=amax.device)


def quantise_with(
    values: torch.Tensor, row_start: int, col_start: int, scales: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """The codes of a box [..., R, C], given the scales of the tiles it touches (of the shape that
    `tile_amax` returns).

    Raises ValueError on scales of another shape.
    """
    touched = touched_tiles(values, row_start, col_start, rule)
    if tuple(scales.shape) != touched.shape:
        raise ValueError(
            f"box at ({row_start}, {col_start}) of shape {tuple(values.shape)} "
            f"touches tiles {touched}; "
            f"got scales of shape {tuple(scales.shape)}"
        )
    codes = torch.empty(values.shape, dtype=FP8, device=values.device)
    tile = 0
    for rows in _strips(values, row_start, rule):
        strip = values[..., rows, :]
        start = row_start + rows.start
        end_tile = tile + touched_tiles(strip, start, col_start, rule).shape[-2]
        strip_scales = scales[..., tile:end_tile, :]
        codes[..., rows, :] = _codes(strip, start, col_start, strip_scales, rule)
        tile = end_tile
    return codes


def require_finite(amax: torch.Tensor, name: str, tiles: Box) -> None:
    """Raises RuntimeError if an amax, or a scale, is NaN or infinite.

    `tiles` says which tiles of the tensor `name` they belong to.
    """
    bad = ~amax.isfinite()
    if bad.any():
        first = tuple(start + int(i) for start, i in zip(tiles.start, bad.nonzero()[0]))
        raise RuntimeError(
            f"{name}: not quantised: NaN or infinity in {int(bad.sum())} of {bad.numel()} tiles, "
            f"first in tile {first}"
        )


def _amax(values: torch.Tensor, row_start: int, col_start: int, rule: Rule) -> torch.Tensor:
    """Reduces bit patterns, which is faster.

    Without signs they have the order of the bf16 numbers, with NaN above infinity.
    """
    tiled = _tiled(values.detach().to(torch.bfloat16), row_start, col_start, rule)
    return (tiled.view(torch.int16) & 0x7FFF).amax(dim=-3).amax(dim=-1).view(torch.bfloat16)


def _codes(
    values: torch.Tensor, row_start: int, col_start: int, scales: torch.Tensor, rule: Rule
) -> torch.Tensor:
    scaled = _tiled(values.detach().to(torch.bfloat16), row_start, col_start, rule).float()
    per_tile = scales.unsqueeze(-1).unsqueeze(-3)
    codes = scaled.div_(per_tile).clamp_(-E4M3_MAX, E4M3_MAX).to(FP8)
    top = _offset(row_start, rule.rows)
    left = _offset(col_start, rule.cols)
    rows, cols = values.shape[-2:]
    return codes.flatten(-4, -3).flatten(-2)[..., top : top + rows, left : left + cols]


def _strips(values: torch.Tensor, row_start: int, rule: Rule) -> Iterator[slice]:
    """Splits the rows at tile edges into strips whose intermediate results fit a CPU's cache.

    On other devices there is one strip.
    """
    rows = values.shape[-2]
    step = rows
    if rule.rows is not None and values.device.type == "cpu":
        tile_row_elements = values.numel() // max(1, rows) * rule.rows
        step = max(1, STRIP_ELEMENTS // max(1, tile_row_elements)) * rule.rows
    start = 0
    while start < rows:
        end = min(rows, start + step - _offset(row_start + start, rule.rows))
        yield slice(start, end)
        start = end


def touched_tiles(values: torch.Tensor, row_start: int, col_start: int, rule: Rule) -> Box:
    lead = (0,) * (values.dim() - 2)
    return rule.tiles(Box((*lead, row_start, col_start), tuple(values.shape)))


def _tiled(values: torch.Tensor, row_start: int, col_start: int, rule: Rule) -> torch.Tensor:
    """[..., tile rows, rows of a tile, tile cols, cols of a tile]: a view, unless a cut tile must
    be padded with zeros.
    """
    rows, cols = values.shape[-2:]
    tile_rows = rule.rows or rows
    tile_cols = rule.cols or cols
    top = _offset(row_start, rule.rows)
    left = _offset(col_start, rule.cols)
    bottom = -(top + rows) % tile_rows
    right = -(left + cols) % tile_cols
    if top or left or bottom or right:
        values = F.pad(values, (left, right, top, bottom))
    return values.unflatten(-1, (-1, tile_cols)).unflatten(-3, (-1, tile_rows))


def _offset(start: int, size: int | None) -> int:
    if size is None:
        return 0
    return start % size
