"""The parts of a reshard map's template: rows, and the stripes of the source that they are cut from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator

from msgspec import Struct

from megarl.box import Box
from megarl.models.parameters import Layers
from megarl.reshard.kinds import Layout

IDENTITY, CAST, ZEROS, QUANTISE, SCALE = "identity", "cast", "zeros", "quantise", "scale"

LogicalKey = tuple[str, Layers | None]
Stripes = dict[LogicalKey, dict[Box, list["Holder"]]]


class Holder(Struct, frozen=True, gc=False):
    """A shard of a source kind that holds the elements, in `box`. It is None for zeros, where only the sender matters."""

    kind: int  # index into source.kinds
    shard: int
    box: Box | None

    @property
    def held_box(self) -> Box:
        """`box`, which must not be None: not for zeros."""
        assert self.box is not None
        return self.box


class Row(Struct, frozen=True, gc=False):
    """`box` of shard `shard` of destination kind `kind` comes from any one of `holders`.

    `fan` is the number of destination shards that the sending shard feeds with this kind, `index` this one's place among them. For a
    quantised kind, `logical` is the box in the logical tensor, which defines the tiles; `cut` says that some tile reaches beyond it, so
    that its amax needs other ranks. A row of scales has the box of the weights that they are made from.
    """

    kind: int  # index into destination.kinds
    shard: int
    box: Box
    holders: tuple[Holder, ...]
    transform: str  # IDENTITY | CAST | ZEROS | QUANTISE | SCALE
    fan: int = 1
    index: int = 0
    logical_name: str = ""
    logical: Box | None = None
    cut: bool = False
    travels_with: int | None = None  # kind of the weights that a row of scales belongs to

    @property
    def weights(self) -> int:
        """The row's kind; for a row of scales, the kind of their weights."""
        return self.kind if self.travels_with is None else self.travels_with

    @property
    def logical_box(self) -> Box:
        """`logical`, which must not be None: only for rows that quantise or make scales."""
        assert self.logical is not None
        return self.logical

    @property
    def route(self) -> tuple:
        """A key: rows with equal routes have the same senders and receivers."""
        return self.weights, self.shard, tuple([(h.kind, h.shard) for h in self.holders]), self.fan, self.index


def stripes_of(source: Layout) -> Stripes:
    """Logical tensor → logical box → all holders of exactly that box."""
    stripes: Stripes = defaultdict(lambda: defaultdict(list))
    for k, kind in enumerate(source.kinds):
        for s, tensor in enumerate(kind.shards):
            for piece in tensor.pieces:
                stripes[piece.logical_name, kind.layers][piece.logical].append(Holder(k, s, piece.local))
    return stripes


class SortedStripes:
    """The stripes of one logical tensor, sorted so that those within a box are found without looking at all of them."""

    def __init__(self, boxes: dict[Box, list[Holder]]):
        self.sorted = sorted(boxes.items(), key=lambda entry: entry[0].start)
        first = self.sorted[0][0]
        others = [box for box, _ in self.sorted]
        dims = range(len(first.start))
        cut = [d for d in dims if any(box.start[d] != first.start[d] or box.shape[d] != first.shape[d] for box in others)]
        self.dim = cut[0] if cut else 0
        self.starts = [box.start[self.dim] for box in others] if cut else [0]
        self.ends = [box.start[self.dim] + box.shape[self.dim] for box in others] if cut else [1]
        self.ordered = len(cut) == 1 and all(a <= b for a, b in zip(self.ends, self.starts[1:]))

    def within(self, box: Box) -> Iterator[tuple[Box, list[Holder], Box]]:
        """Yields (stripe, its holders, its intersection with `box`)."""
        candidates = self.sorted
        if self.ordered:
            start = box.start[self.dim]
            candidates = candidates[bisect_right(self.ends, start) : bisect_left(self.starts, start + box.shape[self.dim])]
        for logical, holders in candidates:
            common = logical.intersect(box)
            if common is not None:
                yield logical, holders, common
