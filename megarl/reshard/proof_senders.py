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
    target, assignment = map.destination.kinds[row.kind], map.turns.assignment(row)
    coordinates = len(assignment.first), target.replicas
    if len(assignment.class_of) != target.instances or not assignment.holders.shape == assignment.senders.shape == coordinates:
        raise ProofError(f"{target.name}: senders of shape {assignment.senders.shape} for {target.instances} instances")
    alike = assignment.first[assignment.class_of]
    _check_same_stages(target, alike)
    wrong = assignment.receivers != target.ranks[target.stages[assignment.first], row.shard]
    known = np.zeros_like(wrong)
    for h, holder in enumerate(row.holders):
        origin = map.source.kinds[holder.kind]
        _check_same_stages(origin, alike)
        here = assignment.holders == h
        seated = np.zeros((coordinates[0], map.source.world_size), dtype=bool)
        np.put_along_axis(seated, origin.ranks[origin.stages[assignment.first], holder.shard], True, axis=1)
        known |= here
        wrong |= here & ~np.take_along_axis(seated, assignment.senders, axis=1)
    if (wrong | ~known).any():
        c, e = (int(x) for x in np.argwhere(wrong | ~known)[0])
        instance = int(assignment.first[c])
        receiver = target.ranks[target.stages[instance], row.shard, e]
        name = map.source.kinds[row.holders[0].kind].name_of(instance)
        raise ProofError(
            f"{target.name_of(instance)} on {map.destination.name} rank {receiver}: "
            f"{map.source.name} rank {assignment.senders[c, e]} does not hold {name}"
        )


def _check_same_stages(kind: Kind, alike: np.ndarray) -> None:
    """alike: [instances], the instance that represents each one."""
    if len(alike) != kind.instances or (kind.stages[alike] != kind.stages).any():
        raise ProofError(f"{kind.name}: layers of different stages are taken for alike")
