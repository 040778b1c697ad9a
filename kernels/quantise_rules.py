"""The rules that convert bf16 weights to float8_e4m3fn: which elements share a scale, and the
arithmetic. Needs no torch.

A tensor is cut into tiles over its last two dims (output channels, input channels), each with one
float32 scale:

    amax   the tile's largest |x|, raised to `floor`
    scale  amax / 448                       rounded to float32
    code   x / scale        rounded to float32, clamped to +-448, then to e4m3

All roundings are to nearest even, so a rule defines one result, bit for bit, on any device. Other
software with the same results:

    BLOCK    weight_scale_inv [ceil(out / 128), ceil(in / 128)]. SGLang's `bf16_to_block_fp8_128`
             (0.5.23, quantization/mxfp8_block_convert.py), for every finite input. SGLang loads
             such checkpoints unchanged.
    CHANNEL  weight_scale [out, 1]. compressed-tensors (0.18, `calculate_qparams` and `quantize`),
             for float32 values, except in rows with amax < floor. SGLang loads such checkpoints
             unchanged.
    TENSOR   weight_scale [1, 1]. compressed-tensors, likewise. (For bf16 values its scale is bf16.)

On CUDA, torch's `tensor / 448.0` multiplies by the rounded reciprocal instead. So tools that use it
there may give scales that differ by one unit in the last place from those on a CPU. Here it is a
true division.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.base.geometry import Box

E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    rows: int | None  # rows of a tile; None: all rows of the tensor
    cols: int | None  # columns of a tile; None: all columns of the tensor
    floor: float  # the least amax that counts, so that the scale of an all-zero tile is not 0

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor of `shape` [..., rows, cols]: one scale per tile,
        with the same leading dims.
        """
        return (*shape[:-2], _count(shape[-2], self.rows), _count(shape[-1], self.cols))

    def tiles(self, box: Box) -> Box:
        """The tiles that `box` of a tensor [..., rows, cols] touches, as a box of the tensor of
        scales.
        """
        spans = []
        for d, size in ((-2, self.rows), (-1, self.cols)):
            spans.append(_span(box.start[d], box.shape[d], size))
        return Box(
            (*box.start[:-2], *(first for first, _ in spans)),
            (*box.shape[:-2], *(count for _, count in spans)),
        )

    def whole_tiles(self, box: Box, shape: tuple[int, ...]) -> bool:
        """Whether `box` of a tensor of `shape` cuts no tile: a rank can quantise it alone."""
        return all(
            _on_edge(box.start[d], shape[d], size)
            and _on_edge(box.start[d] + box.shape[d], shape[d], size)
            for d, size in ((-2, self.rows), (-1, self.cols))
        )


BLOCK = Rule("block", 128, 128, 1e-4)
# 1e-12 rounded to bf16, which is the result of clamping a bf16 amax
CHANNEL = Rule("channel", 1, None, 2.0**-40 * (1 + 13 / 128))
TENSOR = replace(CHANNEL, name="tensor", rows=None)


def _count(extent: int, size: int | None) -> int:
    if size is None:
        return 1
    return -(-extent // size)


def _span(start: int, extent: int, size: int | None) -> tuple[int, int]:
    """(first tile, number of tiles) of the `extent` elements from `start` on."""
    if size is None:
        return 0, 1
    first = start // size
    return first, -(-(start + extent) // size) - first


def _on_edge(position: int, extent: int, size: int | None) -> bool:
    return position in (0, extent) or (size is not None and position % size == 0)
