"""Computes the values that the copies of a reshard map write: as they are, cast, or quantised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megarl.box import Box
from megarl.reshard.map import Copy
from megarl.reshard.rows import IDENTITY, QUANTISE, SCALE, ZEROS

if TYPE_CHECKING:
    import torch

    from megarl.reshard.amax import AmaxPart

Entry = tuple[str, Box, "torch.Tensor"]  # (whose tiles, which of them, their amax)


class AmaxTable:
    """The amax of tiles that copies cut; `amax` says when to use it. `entries` are this rank's own, to be sent to its peers."""

    def __init__(self, entries: Iterable[Entry] = ()):
        self.entries = list(entries)
        self._known: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        self.merge(self.entries)

    @classmethod
    def measure(cls, parts: Iterable[AmaxPart], tensors: Mapping[str, torch.Tensor]) -> AmaxTable:
        """Measures this rank's tensors, given whole as in the layout. Raises RuntimeError on NaN or infinity."""
        from megarl import kernels

        entries = []
        for part in parts:
            values = tensors[part.source_tensor][part.source_box.slices()]
            amax = kernels.tile_amax(values.reshape(values.shape[-2:]), *part.origin, part.rule, part.tiles_of)
            entries.append((part.tiles_of, part.tiles, amax))
        return cls(entries)

    def merge(self, entries: Iterable[Entry]) -> None:
        for tiles_of, tiles, amax in entries:
            self._known[tiles_of].append((tiles, amax))

    def amax(self, tiles_of: str, tiles: Box) -> torch.Tensor:
        """The amax of `tiles`. Raises ValueError if a part of them was not measured or merged."""
        from megarl.kernels.quantise import merge_amax

        if tiles_of not in self._known:
            raise ValueError(f"no amax of {tiles_of} was measured")
        return merge_amax(self._known[tiles_of], tiles)


class Payloads:
    """`payload` for many updates. Views of values that are sent as they are get kept as long as their parameter stays where it is."""

    def __init__(self) -> None:
        self._sources: Mapping[str, torch.Tensor] = {}
        self._places: dict[str, tuple] = {}  # place of each parameter when its views were made
        self._views: dict[str, dict[tuple, torch.Tensor]] = {}  # by parameter and box
        self._measured: dict[tuple[str, Box], torch.Tensor] = {}  # of this update: amax by parameter and box, for codes and for scales

    def begin(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Begins an update. A view keeps its memory alive, so no other parameter can get the same address meanwhile."""
        places = {name: (values.data_ptr(), values.shape, values.stride(), values.dtype) for name, values in sources.items()}
        self._views = {name: views for name, views in self._views.items() if places.get(name) == self._places[name]}
        self._sources, self._places, self._measured = sources, places, {}

    def of(self, copy: Copy, amax: AmaxTable | None = None) -> torch.Tensor:
        if copy.source_tensor is None or copy.source_box is None:
            return payload(copy, None, amax).to(next(iter(self._sources.values())).device)  # a GPU stream copies only from its memory
        views = self._views.setdefault(copy.source_tensor, {})
        key = copy.source_box.start, copy.destination_box.shape, copy.transform
        if (known := views.get(key)) is not None:
            return known
        source = self._sources[copy.source_tensor].detach()
        values = payload(copy, source, amax, self._measured)
        if copy.transform == IDENTITY and values.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            views[key] = values
        return values


def payload(
    copy: Copy,
    source_tensor: torch.Tensor | None,
    amax: AmaxTable | None = None,
    measured: dict[tuple[str, Box], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The values for the copy's destination box, in its shape and dtype: a view of the source where possible.

    `amax` is needed if `copy.quantisation.cut`; `measured` keeps the amax of boxes that cut no tile. Raises ValueError if `amax`, or the
    source tensor, is missing.
    """
    import torch

    dtype = getattr(torch, copy.dtype)
    if copy.transform == ZEROS:
        return torch.zeros(copy.destination_box.shape, dtype=dtype)
    if source_tensor is None or copy.source_box is None:
        raise ValueError(f"{copy.destination_tensor}: a copy of transform {copy.transform!r} needs its source tensor")
    values = source_tensor[copy.source_box.slices()]
    if copy.transform in (QUANTISE, SCALE):
        return _quantised(copy, values.reshape(values.shape[-2:]), amax, {} if measured is None else measured).reshape(
            copy.destination_box.shape
        )
    return values.to(dtype).reshape(copy.destination_box.shape)


def _quantised(copy: Copy, values: torch.Tensor, amax: AmaxTable | None, measured: dict[tuple[str, Box], torch.Tensor]) -> torch.Tensor:
    from megarl import kernels
    from megarl.kernels.quantise import scales_of

    how = copy.quantisation
    if how is None or (how.cut and amax is None):
        raise ValueError(f"{copy.destination_tensor}: a copy of transform {copy.transform!r} that cuts tiles needs their amax")
    row, col = how.origin
    if how.cut and amax is not None:
        found = amax.amax(how.tiles_of, how.rule.tiles(Box((row, col), tuple(values.shape))))
    else:
        assert copy.source_tensor is not None and copy.source_box is not None
        key = copy.source_tensor, copy.source_box
        if (found := measured.get(key)) is None:
            found = measured[key] = kernels.tile_amax(values, row, col, how.rule, how.tiles_of)
    scales = scales_of(found, how.rule)
    return scales if copy.transform == SCALE else kernels.quantise_with(values, row, col, scales, how.rule)
