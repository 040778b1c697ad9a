"""The quantised parameters of an engine and the tensors of their scales.

Tiles that share a scale are those of the logical tensor, as in a quantised checkpoint, whatever the cuts on either side:

    fp8_block    <weight>_scale_inv  a scale for each 128x128 block of a logical tensor
    fp8_channel  <weight>_scale      a scale for each row of a logical tensor, even if an engine's rank holds only part of the row
    fp8_tensor   <weight>_scale      one scale for everything that an engine fuses into one parameter (for experts: one per expert)

After loading, SGLang keeps the weights of the last two transposed (dense layers only): the same memory with other strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.box import Box
from megarl.config.errors import ConfigError
from megarl.kernels.quantise_rules import Rule
from megarl.models.parameters import LogicalTensor
from megarl.reshard.kinds import Kind, LocalTensor, Piece

SCALE_DTYPE, QUANTISED_DTYPE = "float32", "float8_e4m3fn"


def with_scales(kinds: Sequence[Kind], names: Sequence[str], rule: Rule, logical: Mapping[str, LogicalTensor]) -> list[Kind]:
    """Returns `kinds` with those called `names` quantised by `rule`, each followed by the kind of its scales.

    Raises ConfigError if a padded tensor would be quantised. That no cut goes through a block is known (`sizes.generator_parameters`).
    """
    known = {kind.name for kind in kinds}
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"quantised parameters that the layout does not have: {', '.join(missing)}")
    result: list[Kind] = []
    for kind in kinds:
        if kind.name not in names:
            result.append(kind)
            continue
        scales = tuple(_scales(tensor, rule, logical) for tensor in kind.shards)
        own = replace(kind, shards=tuple(_quantised(tensor, rule) for tensor in kind.shards), rule=rule, scales=len(result) + 1)
        result += [own, replace(kind, name=scales[0].name, shards=scales, scales_of=len(result))]
    return result


def engine_view(tensor: LocalTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The (shape, strides in elements) that the live engine shows for a tensor of its layout."""
    shape = tensor.engine_shape
    if shape is None:
        return tensor.shape, contiguous_strides(tensor.shape)
    if len(shape) == 2:  # transposed
        return shape, contiguous_strides(tensor.shape)[::-1]
    return shape, contiguous_strides(shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def scale_name(name: str, rule: Rule) -> str:
    return name + ("_scale_inv" if is_block(rule) else "_scale")


def is_block(rule: Rule) -> bool:
    return rule.cols is not None


def of_whole_tensor(rule: Rule) -> bool:
    return rule.rows is None


def _quantised(tensor: LocalTensor, rule: Rule) -> LocalTensor:
    transposed = not is_block(rule) and len(tensor.shape) == 2
    return replace(tensor, dtype=QUANTISED_DTYPE, engine_shape=tensor.shape[::-1] if transposed else None)


def _scales(tensor: LocalTensor, rule: Rule, logical: Mapping[str, LogicalTensor]) -> LocalTensor:
    name = scale_name(tensor.name, rule)
    if sum(piece.local.numel for piece in tensor.pieces) != Box((0,) * len(tensor.shape), tensor.shape).numel:
        raise ConfigError(f"generator.quantization: {tensor.name} of shape {tensor.shape} is padded; padded tensors are not quantised")
    shape = rule.scale_shape(tensor.shape)
    if of_whole_tensor(rule):
        engine_shape = tensor.shape[:1] if tensor.experts else ()
        first = tensor.pieces[0]
        local = Box((0,) * len(shape), shape)
        logical_box = Box(first.logical.start[:-2] + (0, 0), shape)
        piece = Piece(local, scale_name(first.logical_name, rule), logical_box)
        return LocalTensor(name, shape, SCALE_DTYPE, (piece,), engine_shape, experts=tensor.experts)
    pieces, tile_row = [], 0
    by_rows = len({piece.local.start[-1] for piece in tensor.pieces}) == 1
    for piece in tensor.pieces:
        assert not is_block(rule) or rule.whole_tiles(piece.logical, logical[piece.logical_name].shape), tensor.name
        tiles = rule.tiles(piece.logical)
        assert by_rows  # no engine fuses parts side by side
        local = Box((0,) * (len(tiles.start) - 2) + (tile_row, 0), tiles.shape)
        pieces.append(Piece(local, scale_name(piece.logical_name, rule), tiles))
        tile_row += tiles.shape[-2]
    assert tile_row == shape[-2], tensor.name
    return LocalTensor(name, shape, SCALE_DTYPE, tuple(pieces), experts=tensor.experts)
