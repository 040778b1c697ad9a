"""Axis-aligned boxes of elements in N dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec


class Box(msgspec.Struct, frozen=True, gc=False):
    """The elements `start[d] <= index[d] < start[d] + shape[d]` of a tensor. (A struct is built in a tenth of a dataclass's time.)"""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple([s + n for s, n in zip(self.start, self.shape)])

    def slices(self) -> tuple[slice, ...]:
        """Index of the box: `tensor[box.slices()]` is a view."""
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape))

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None."""
        start, shape = [], []
        for a, m, b, n in zip(self.start, self.shape, other.start, other.shape):
            low = a if a > b else b
            extent = (a + m if a + m < b + n else b + n) - low
            if extent <= 0:
                return None
            start.append(low)
            shape.append(extent)
        return Box(tuple(start), tuple(shape))

    def contains(self, other: Box) -> bool:
        return all(a <= b and b + n <= a + m for a, m, b, n in zip(self.start, self.shape, other.start, other.shape))

    def move(self, origin: Box, target: Box) -> Box:
        """This box, which lies in `origin`, as seen when origin's first element is moved to target's."""
        return Box(tuple([s - a + b for s, a, b in zip(self.start, origin.start, target.start)]), self.shape)

    def drop(self) -> Box:
        """The same box without its first dim."""
        return Box(self.start[1:], self.shape[1:])

    def subtract(self, other: Box) -> Iterator[Box]:
        """Disjoint boxes that together are this box without `other`: at most two per dimension."""
        common = self.intersect(other)
        if common is None:
            yield self
            return
        start, shape = list(self.start), list(self.shape)
        for d in range(len(start)):
            before = common.start[d] - start[d]
            after = start[d] + shape[d] - common.start[d] - common.shape[d]
            if before:
                yield Box(tuple(start), tuple(shape[:d] + [before] + shape[d + 1 :]))
            if after:
                yield Box(tuple(start[:d] + [common.end[d]] + start[d + 1 :]), tuple(shape[:d] + [after] + shape[d + 1 :]))
            start[d], shape[d] = common.start[d], common.shape[d]

    def join(self, other: Box) -> tuple[int, Box] | None:
        """(dim, union) when `other` continues this box along exactly one dim, else None."""
        differing = [d for d in range(len(self.start)) if (self.start[d], self.shape[d]) != (other.start[d], other.shape[d])]
        if len(differing) != 1:
            return None
        d = differing[0]
        if self.start[d] + self.shape[d] != other.start[d]:
            return None
        return d, Box(self.start, self.shape[:d] + (self.shape[d] + other.shape[d],) + self.shape[d + 1 :])


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))
