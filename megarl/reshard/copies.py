"""One copy of a reshard map, as ranks carry it out."""

from __future__ import annotations

from msgspec import Struct

from megarl.box import Box
from megarl.kernels.quantise_rules import Rule
from megarl.reshard.kinds import ITEM_BYTES


class Quantisation(Struct, frozen=True, gc=False):
    """How a copy's weights are quantised: whose tiles they use, and where the copy's source box begins in that tensor."""

    rule: Rule
    tiles_of: str  # the logical tensor; or the parameter, if one scale covers all of it
    origin: tuple[int, int]  # row and column of the first element in the logical tensor
    cut: bool  # whether a tile reaches beyond this copy: its amax then comes from `amax.amax_parts`


class Copy(Struct, frozen=True, gc=False):
    """`source_box` of a tensor on `source_rank` goes to `destination_box`, of the same shape, on `destination_rank`.

    transform: "identity"; "cast" (the sender converts to `dtype` first); "zeros" (padding, which has a sender but no source tensor);
    "quantise" (bf16 to e4m3 by `quantisation`); "scale" (float32 scales of the tiles in the source box, so the shapes differ).
    A stacked tensor has a leading dim for experts, of size 1 in the box, which the other side may lack.
    """

    source_rank: int
    source_tensor: str | None
    source_box: Box | None
    destination_rank: int
    destination_tensor: str
    destination_box: Box
    transform: str
    dtype: str  # of the destination, and of the values sent
    depth: int  # position of the destination tensor in the forward pass: 0, then 1 + layer, then num_layers + 1
    quantisation: Quantisation | None = None

    @property
    def bytes(self) -> int:
        return self.destination_box.numel * ITEM_BYTES[self.dtype]
