"""Proves that each sender of a row holds it, and that each receiver is to hold it."""

from __future__ import annotations

import numpy as np

from megarl.reshard.kinds import Kind
from megarl.reshard.map import ReshardMap
from megarl.reshard.rows import Row


class ProofError(RuntimeError):
    """The map would leave an element unwritten, write it twice, or write a wrong value."""


def check_senders(map: ReshardMap, row: Row) -> None:
    """Checks that every instance and replica has one sender, which holds the sending shard of that instance, and the right receiver.

    It goes class by class, after checking that the instances of a class live on the same stages.
    """
    target, service = map.destination.kinds[row.kind], map.turns.service(row)
    seats = len(service.first), target.replicas
    if len(service.class_of) != target.instances or not service.holders.shape == service.senders.shape == seats:
        raise ProofError(f"{target.name}: senders of shape {service.senders.shape} for {target.instances} instances")
    alike = service.first[service.class_of]
    _check_same_stages(target, alike)
    wrong = service.receivers != target.ranks[target.stages[service.first], row.shard]
    known = np.zeros_like(wrong)
    for h, holder in enumerate(row.holders):
        origin = map.source.kinds[holder.kind]
        _check_same_stages(origin, alike)
        here = service.holders == h
        seated = np.zeros((seats[0], map.source.world_size), dtype=bool)
        np.put_along_axis(seated, origin.ranks[origin.stages[service.first], holder.shard], True, axis=1)
        known |= here
        wrong |= here & ~np.take_along_axis(seated, service.senders, axis=1)
    if (wrong | ~known).any():
        c, e = (int(x) for x in np.argwhere(wrong | ~known)[0])
        instance = int(service.first[c])
        receiver = target.ranks[target.stages[instance], row.shard, e]
        name = map.source.kinds[row.holders[0].kind].name_of(instance)
        raise ProofError(
            f"{target.name_of(instance)} on {map.destination.name} rank {receiver}: "
            f"{map.source.name} rank {service.senders[c, e]} does not hold {name}"
        )


def _check_same_stages(kind: Kind, alike: np.ndarray) -> None:
    """alike: [instances], the instance that represents each one."""
    if len(alike) != kind.instances or (kind.stages[alike] != kind.stages).any():
        raise ProofError(f"{kind.name}: layers of different stages are taken for alike")
