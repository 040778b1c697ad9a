"""Which tensors each source rank of a reshard map writes to each destination rank, as arrays: a large model has a million such triples.

Both ends of an update number a rank's tensors in the order of their names, so that hashes and offsets travel without names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.models.parameters import EXPERT_FIELD
from megarl.reshard.forwarding import Relay
from megarl.reshard.map import ReshardMap
from megarl.reshard.rows import Row

_Span = tuple[int, int, int]  # a destination kind, and the first and end of its experts where each has a tensor of its own; otherwise 0, 0


class SentTensors:
    """Of `map`, and of `relays`, the tensors that its destination ranks get from each other instead.

    A *place* is one tensor of one destination rank: they are numbered rank by rank, and within a rank by name. A *sending* is a source rank
    that writes to a place: they are numbered source by source, and within a source by place.
    """

    def __init__(self, map: ReshardMap, relays: Sequence[Relay] = ()):
        self.map = map
        ranks, numbers = map.destination.world_size, _numbers(map)
        self.names = sorted({name for names in numbers.values() for name in names.ravel().tolist()})
        number = {name: i for i, name in enumerate(self.names)}
        count = len(self.names)
        numbered = {span: np.vectorize(number.__getitem__)(names) for span, names in numbers.items()}
        triples = _distinct(np.concatenate(_triples(map, numbered, count)))
        sources, pairs = np.divmod(triples, ranks * count)
        led, taken = (
            np.array([rank * count + number[relay.tensor] for rank, relay in zip(of, relays)], dtype=np.int64)
            for of in ([relay.source_rank for relay in relays], [relay.destination_rank for relay in relays])
        )
        self._pairs = _distinct(np.concatenate([pairs, taken]))  # destination rank and name of each place
        self.sendings = np.searchsorted(sources, np.arange(map.source.world_size + 1))  # the first of each source rank
        self.places = np.searchsorted(self._pairs, np.arange(ranks + 1) * count)  # the first of each destination rank
        self.place_of = np.searchsorted(self._pairs, pairs)  # of each sending
        self.relayed = np.searchsorted(self._pairs, led), np.searchsorted(self._pairs, taken)  # of leaders and followers

    def name(self, place: int) -> tuple[int, str]:
        """Destination rank and name of a place."""
        rank, number = divmod(int(self._pairs[place]), len(self.names))
        return rank, self.names[number]

    def names_of(self, places: np.ndarray) -> np.ndarray:
        """The numbers of their names in `names`."""
        return self._pairs[places] % len(self.names)

    def sent_by(self, source: int) -> np.ndarray:
        """The places that a source rank writes to, in order."""
        return self.place_of[self.sendings[source] : self.sendings[source + 1]]


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """In order. (np.unique takes ten times as long.)"""
    numbers = np.sort(numbers)
    return numbers[np.append(True, numbers[1:] != numbers[:-1])] if len(numbers) else numbers


def _span(map: ReshardMap, row: Row) -> _Span:
    kind = map.destination.kinds[row.kind]
    experts = kind.shards[row.shard].experts
    if experts is None or EXPERT_FIELD not in kind.name:
        return row.kind, 0, 0
    first = experts[0] + row.box.start[0]
    return row.kind, first, first + row.box.shape[0]


def _numbers(map: ReshardMap) -> dict[_Span, np.ndarray]:
    """The names of a span's tensors, [instances, experts or 1]."""
    found = {}
    for span in {_span(map, row) for row in map.rows}:
        kind, experts = map.destination.kinds[span[0]], range(*span[1:])
        names = [kind.name_of(i) for i in range(kind.instances)]
        found[span] = np.array([[name.replace(EXPERT_FIELD, str(e)) for e in experts] or [name] for name in names], dtype=object)
    return found


def _triples(map: ReshardMap, numbers: dict[_Span, np.ndarray], count: int) -> list[np.ndarray]:
    """(source * destination ranks + destination) * `count` + number of the name, of all rows, once for rows that are served alike."""
    ends: dict[tuple, np.ndarray] = {}  # [instances, replicas]
    found: dict[tuple, np.ndarray] = {}
    for row in map.rows:
        route, span = map.turns.alike(row), _span(map, row)
        if (route, span) in found:
            continue
        if route not in ends:
            served = map.turns.assignment(row)
            ends[route] = (served.senders.astype(np.int64) * map.destination.world_size + served.receivers)[served.class_of]
        found[route, span] = (ends[route][:, None, :] * count + numbers[span][:, :, None]).ravel()
    return list(found.values())
