"""Computes the values that the copies of a reshard map write: unchanged, cast, or quantised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.base.geometry import Box
from megarl.kernels.quantise_rules import Rule
from megarl.models.parameters import EXPERT_FIELD, LAYER_FIELD
from megarl.reshard.layout import Kind, of_whole_tensor
from megarl.reshard.map import Copy, ReshardMap, one_expert, tile_space
from megarl.reshard.template import IDENTITY, QUANTISE, SCALE, ZEROS, Holder, stripes_of

if TYPE_CHECKING:
    import torch

Entry = tuple[str, Box, "torch.Tensor"]  # (Quantisation.tiles_of, which tiles, their amax)


class Payloads:
    """`payload` for many updates.

    Views of values that are sent unchanged are kept as long as the parameter's memory stays the
    same.
    """

    def __init__(self) -> None:
        self._sources: Mapping[str, torch.Tensor] = {}
        self._places: dict[str, tuple] = {}  # parameter -> its memory when its views were made
        self._views: dict[str, dict[tuple, torch.Tensor]] = {}  # parameter -> box -> view
        # of this update: (parameter, box) -> amax, for codes and for scales
        self._measured: dict[tuple[str, Box], torch.Tensor] = {}

    def begin(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Begins an update.

        A view keeps its memory alive, so that no other parameter can get the same address.
        """
        places = {}
        for name, values in sources.items():
            places[name] = (values.data_ptr(), values.shape, values.stride(), values.dtype)
        self._views = {
            name: views
            for name, views in self._views.items()
            if places.get(name) == self._places[name]
        }
        self._sources = sources
        self._places = places
        self._measured = {}

    def of(self, copy: Copy, amax: AmaxTable | None = None) -> torch.Tensor:
        if copy.source_tensor is None or copy.source_box is None:
            # since a GPU stream copies only from GPU memory
            return payload(copy, None, amax).to(next(iter(self._sources.values())).device)
        views = self._views.setdefault(copy.source_tensor, {})
        key = copy.source_box.start, copy.destination_box.shape, copy.transform
        view = views.get(key)
        if view is not None:
            return view
        source = self._sources[copy.source_tensor].detach()
        values = payload(copy, source, amax, self._measured)
        if (
            copy.transform == IDENTITY
            and values.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        ):
            views[key] = values
        return values


def payload(
    copy: Copy,
    source_tensor: torch.Tensor | None,
    amax: AmaxTable | None = None,
    amax_cache: dict[tuple[str, Box], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The values for the copy's destination box, in its shape and dtype.

    If possible, they are a view of the source.

    `amax` is needed if `copy.quantisation.cut`. `amax_cache` caches the amax of boxes that cut no
    tile. Raises ValueError if `amax` or the source tensor is missing.
    """
    import torch

    dtype = getattr(torch, copy.dtype)
    if copy.transform == ZEROS:
        return torch.zeros(copy.destination_box.shape, dtype=dtype)
    if source_tensor is None or copy.source_box is None:
        raise ValueError(
            f"{copy.destination_tensor}: a copy of transform {copy.transform!r} needs its source "
            "tensor"
        )
    values = source_tensor[copy.source_box.slices()]
    if copy.transform in (QUANTISE, SCALE):
        return _quantised(
            copy, values.reshape(values.shape[-2:]), amax, {} if amax_cache is None else amax_cache
        ).reshape(copy.destination_box.shape)
    return values.to(dtype).reshape(copy.destination_box.shape)


def _quantised(
    copy: Copy,
    values: torch.Tensor,
    amax: AmaxTable | None,
    amax_cache: dict[tuple[str, Box], torch.Tensor],
) -> torch.Tensor:
    from megarl import kernels
    from megarl.kernels.quantise import scales_of

    quantisation = copy.quantisation
    if quantisation is None or (quantisation.cut and amax is None):
        raise ValueError(
            f"{copy.destination_tensor}: a copy of transform {copy.transform!r} that cuts tiles "
            "needs their amax"
        )
    row, col = quantisation.origin
    if quantisation.cut and amax is not None:
        maxima = amax.amax(
            quantisation.tiles_of, quantisation.rule.tiles(Box((row, col), tuple(values.shape)))
        )
    else:
        assert copy.source_tensor is not None and copy.source_box is not None
        key = copy.source_tensor, copy.source_box
        maxima = amax_cache.get(key)
        if maxima is None:
            maxima = amax_cache[key] = kernels.tile_amax(
                values, row, col, quantisation.rule, quantisation.tiles_of
            )
    scales = scales_of(maxima, quantisation.rule)
    if copy.transform == SCALE:
        return scales
    return kernels.quantise_with(values, row, col, scales, quantisation.rule)


class AmaxTable:
    """The amax of tiles that copies cut.

    `entries`: this rank's own, which must be sent to its peers.

        parts = amax_parts(map, rank)  # once
        # each update, before the first copy:
        table = AmaxTable.measure(parts, tensors)
        ...  # exchange `table.entries` with `peers(parts)`, by the transport's own means
        table.merge(entries)  # the entries of each peer
        payload(copy, source, table)

    Parts belong to source tensors, independently of the copies that are made of them. Every
    data-parallel replica computes its amax by itself, among the ranks that together have one whole
    model. So it does not matter which replica sends what.
    """

    def __init__(self, entries: Iterable[Entry] = ()):
        self.entries = list(entries)
        self._known: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        self.merge(self.entries)

    @classmethod
    def measure(cls, parts: Iterable[AmaxPart], tensors: Mapping[str, torch.Tensor]) -> AmaxTable:
        """Measures this rank's `tensors`, which are whole local tensors of the layout.

        Raises RuntimeError on NaN or infinity.
        """
        from megarl import kernels

        entries = []
        for part in parts:
            values = tensors[part.source_tensor][part.source_box.slices()]
            amax = kernels.tile_amax(
                values.reshape(values.shape[-2:]), *part.origin, part.rule, part.tiles_of
            )
            entries.append((part.tiles_of, part.tiles, amax))
        return cls(entries)

    def merge(self, entries: Iterable[Entry]) -> None:
        for tiles_of, tiles, amax in entries:
            self._known[tiles_of].append((tiles, amax))

    def amax(self, tiles_of: str, tiles: Box) -> torch.Tensor:
        """The amax of `tiles`. Raises ValueError if any of them was not measured or merged."""
        from megarl.kernels.quantise import merge_amax

        if tiles_of not in self._known:
            raise ValueError(f"no amax of {tiles_of} was measured")
        return merge_amax(self._known[tiles_of], tiles)


@dataclass(frozen=True, slots=True)
class AmaxPart:
    """A box of one of this rank's tensors that has parts of cut tiles."""

    tiles_of: str  # see Quantisation.tiles_of
    rule: Rule
    source_tensor: str
    source_box: Box
    origin: tuple[int, int]  # position of the box's first element in the logical tensor
    tiles: Box  # the tiles that it touches, [tile rows, tile columns]
    peers: tuple[int, ...]  # source ranks with other shares of these tiles


def amax_parts(map: ReshardMap, rank: int) -> list[AmaxPart]:
    """The parts that source rank `rank` must measure, in forward order.

    Empty if no copy on any rank cuts a tile.
    """
    return [part for _, part in sorted(_parts(map, rank), key=lambda entry: entry[0])]


def peers(parts: list[AmaxPart]) -> tuple[int, ...]:
    """The ranks to exchange with.

    The relation is mutual: every rank in a group has all others as peers.
    """
    return tuple(sorted({peer for part in parts for peer in part.peers}))


def _parts(map: ReshardMap, rank: int) -> Iterator[tuple[tuple, AmaxPart]]:
    stripes = stripes_of(map.source)
    coordinates = map.source.coordinates(rank)
    for number, kind in enumerate(map.destination.kinds):
        if kind.rule is None:
            continue
        cut = _cut_regions(map, number, kind.rule)
        # namespace of tiles -> (logical, box, holder)
        groups: dict[str, list[tuple[str, Box, Holder]]] = defaultdict(list)
        for name, regions in cut.items():
            space = tile_space(kind, name)
            for logical, holders in stripes[name, kind.layers].items():
                if any(logical.intersect(region) is not None for region in regions):
                    groups[space] += [(name, logical, holder) for holder in holders]
        for space, shares in groups.items():
            for _, logical, holder in shares:
                for stage, replica in coordinates.get((holder.kind, holder.shard), ()):
                    tile_holders = []
                    tiles = kind.rule.tiles(logical)
                    for _, other_box, other_holder in shares:
                        if tiles.intersect(kind.rule.tiles(other_box)) is not None:
                            tile_holders.append(other_holder)
                    yield from _layer_parts(
                        map, kind, number, space, logical, holder, tile_holders, stage, replica
                    )


def _cut_regions(map: ReshardMap, number: int, rule: Rule) -> dict[str, list[Box]]:
    """Logical tensor -> boxes of cut rows. If one scale covers a whole parameter, all boxes."""
    rows = [row for row in map.rows if row.kind == number and row.transform == QUANTISE]
    everything = of_whole_tensor(rule) and any(row.cut for row in rows)
    regions: dict[str, list[Box]] = defaultdict(list)
    for row in rows:
        if row.cut or everything:
            regions[row.logical_name].append(_grown(rule, row.logical_box))
    return regions


def _grown(rule: Rule, logical: Box) -> Box:
    """Grows the box to whole tiles, possibly beyond the tensor."""
    start = list(logical.start)
    shape = list(logical.shape)
    for dim, size in ((-2, rule.rows), (-1, rule.cols)):
        if size is None:
            start[dim] = 0
            shape[dim] = 1 << 40
        else:
            start[dim] = logical.start[dim] // size * size
            shape[dim] = -(-logical.end[dim] // size) * size - start[dim]
    return Box(tuple(start), tuple(shape))


def _layer_parts(
    map: ReshardMap,
    kind: Kind,
    number: int,
    space: str,
    logical: Box,
    holder: Holder,
    tile_holders: list[Holder],
    stage: int,
    replica: int,
) -> Iterator[tuple[tuple, AmaxPart]]:
    origin = map.source.kinds[holder.kind]
    tensor = origin.shards[holder.shard]
    rule = kind.rule
    source_box = holder.held_box
    first = (logical.start[-2], logical.start[-1])
    assert rule is not None
    tiles = rule.tiles(logical)
    for instance in origin.instances_on(stage):
        ranks = {_rank(map, tile_holder, instance, replica) for tile_holder in tile_holders}
        ranks.discard(_rank(map, holder, instance, replica))
        peers = tuple(sorted(ranks))
        tiles_of = space.replace(LAYER_FIELD, str(origin.layer(instance)))
        name = origin.name_of(instance)
        order = map.destination.depth(kind, instance), number, tiles_of, logical.start
        if len(logical.start) == 2:
            yield order, AmaxPart(tiles_of, rule, name, source_box, first, tiles, peers)
            continue
        for e in range(logical.shape[0]):
            expert, box = one_expert(tensor, source_box, e)
            part = AmaxPart(
                tiles_of=tiles_of.replace(EXPERT_FIELD, str(expert)),
                rule=rule,
                source_tensor=name.replace(EXPERT_FIELD, str(expert)),
                source_box=box,
                origin=first,
                tiles=tiles.drop(),
                peers=peers,
            )
            yield order, part


def _rank(map: ReshardMap, holder: Holder, instance: int, replica: int) -> int:
    kind = map.source.kinds[holder.kind]
    of_shard = kind.ranks[kind.stages[instance], holder.shard]
    return int(of_shard[replica % len(of_shard)])
