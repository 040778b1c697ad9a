"""Relays between engines, for a trainer with few ranks or unequal stages.

Only trainer ranks hold a shard at first, so they would send it once for each engine. With many engines their links are the bottleneck, and
with pipeline stages those of the fullest stage. Engines that have received a tensor can send it too. As in van de Geijn's broadcast
(scatter, then all-gather), the trainer writes every layer to some of the engines, different ones for each layer, and those pass it on.
Their number is chosen so that the two parts of the update, writing and then passing on, take the least time together.
"""

from __future__ import annotations

import math

import numpy as np

from megarl.models.parameters import FIRST, LAST, LAYER
from megarl.reshard.forwarding import Forwarding
from megarl.reshard.kinds import ITEM_BYTES, Kind, Layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.rows import ZEROS

PLACES = (FIRST, LAYER, LAST)
MOST_CANDIDATES = 64  # numbers of engines that are tried
RELAY_COST = 1.25  # of a relayed byte, relative to one that the trainer sends: relays wait until all of those are there. Set, not measured.


def between_engines(map: ReshardMap, tp: int) -> Forwarding:
    """The relays for `map`, which goes to all engines of `tp` ranks each. There are none where they would save no time.

    Pure: equal on all ranks.
    """
    return passed_on(map.destination, tp, *written_directly(map, map.destination.world_size // tp))


def passed_on(layout: Layout, tp: int, of_ends: int, of_layers: int) -> Forwarding:
    """The trainer writes each layer to `of_layers` engines, and the tensors before and after the layers to `of_ends`."""
    engines = layout.world_size // tp
    leader_of: list[np.ndarray] = []
    begins: list[int] = []
    passed = 0
    for kind in layout.kinds:
        followers = engines - (of_layers if kind.place == LAYER else of_ends)
        begins.append(passed if kind.scales_of is None else begins[kind.scales_of])  # scales follow their weights
        passed += followers if kind.scales_of is None else 0
        leader_of.append(_by_engine(kind, tp, engines, followers, begins[-1]) if followers else kind.ranks)
    return Forwarding.of(layout, tuple(leader_of))


def written_directly(map: ReshardMap, engines: int) -> tuple[int, int]:
    """Chooses `of_ends` and `of_layers` of `passed_on` so that the update takes the least time."""
    sent, held = _bytes_by_place(map)
    first, layer, last = range(len(PLACES))
    numbers = np.array(sorted(set(np.linspace(1, engines, min(engines, MOST_CANDIDATES)).round().astype(int).tolist())))
    of_ends, of_layers = numbers[:, None], numbers[None, :]
    written = (of_ends[..., None] * (sent[first] + sent[last]) + of_layers[..., None] * sent[layer]).max(axis=2) / engines
    by_ends = -(-(engines - of_ends) // of_ends) * (held[first] + held[last])  # each is one tensor, so some rank sends all of it
    by_layers = _turns(map, engines, of_layers) * held[layer]
    cost = written + RELAY_COST * (by_ends + by_layers)
    best = np.argwhere(cost <= cost.min() * (1 + 1e-9))[-1]  # among equals, the one that passes on least
    return int(numbers[best[0]]), int(numbers[best[1]])


def _turns(map: ReshardMap, engines: int, of_layers: np.ndarray) -> np.ndarray:
    """The layer bytes that the busiest engine passes on, as a multiple of those that it holds. Engines take turns, layer by layer; if there
    are more engines than layers, some lead one layer and others none."""
    layers = max((kind.instances for kind in map.destination.kinds if kind.place == LAYER), default=1)
    led = -(-layers * of_layers // engines)  # layers
    return led * -(-(engines - of_layers) // of_layers) / layers


def _bytes_by_place(map: ReshardMap) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that trainer ranks send to all engines, [places, ranks that differ], and bytes of the fullest generator rank, [places].

    It assumes that all holders of a box send it equally often, which the schedule comes close to. Padding is left out: any rank can send
    zeros.
    """
    sent = np.zeros((len(PLACES), map.source.world_size))
    held = np.zeros((len(PLACES), map.destination.world_size))
    for kind in map.destination.kinds:
        sizes = np.array([math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in kind.shards])
        np.add.at(held[PLACES.index(kind.place)], kind.ranks[0], kind.instances * sizes[:, None])
    for row in map.rows:
        target = map.destination.kinds[row.kind]
        for holder in row.holders if row.transform != ZEROS else ():
            kind = map.source.kinds[holder.kind]
            ranks = kind.ranks[:, holder.shard]  # [stages, replicas]
            share = map.row_bytes(row) * target.replicas / (len(row.holders) * ranks.shape[1])
            instances = np.bincount(kind.stages, minlength=len(ranks))
            np.add.at(sent[PLACES.index(target.place)], ranks, share * instances[:, None])
    return np.array(sorted(set(zip(*sent.tolist())))).T, held.max(axis=1)


def _by_engine(kind: Kind, tp: int, engines: int, followers: int, begin: int) -> np.ndarray:
    """The leader of every replica, [turns, shards, replicas]. The engines after a run of `followers` engines pass tensors on to it."""
    turns = min(engines, kind.instances)
    engine = kind.ranks[0] // tp
    start = (begin + followers * np.arange(turns))[:, None, None] % engines
    place = (engine - start) % engines
    leads = (start + followers + place % (engines - followers)) % engines
    return kind.ranks[0] + np.where(place < followers, leads - engine, 0) * tp
