"""The proof that a rank with the byte writes every destination byte once.

Damaged maps are refused, with the reason.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np
import pytest
from copies_reference import prove_copies
from msgspec import structs
from small_maps import all_copies, tiny_map

from megarl.base.geometry import Box
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import ProofError, prove_exactly_once
from megarl.reshard.turns import Assignment, Turns


def shift(box: Box) -> Box:
    return Box((box.start[0] + 1,) + box.start[1:], box.shape)


def is_gate(item: Copy) -> bool:
    return (
        item.destination_tensor == "model.layers.2.mlp.gate_up_proj.weight"
        and item.destination_rank == 5
    )


GATE = "model.layers.2.mlp.gate_up_proj.weight on generator rank 5"
CHANGES = {
    "dropped": (lambda copy: [], "elements are never written"),
    "doubled": (lambda copy: [copy, copy], "written twice"),
    "shifted at the destination": (
        lambda copy: [structs.replace(copy, destination_box=shift(copy.destination_box))],
        "written twice|not inside",
    ),
    "shifted at the source": (
        lambda copy: [structs.replace(copy, source_box=shift(copy.source_box))],
        "needs|not inside",
    ),
    "from another rank": (
        lambda copy: [structs.replace(copy, source_rank=copy.source_rank ^ 1)],
        "needs",
    ),
    "from another stage": (
        lambda copy: [structs.replace(copy, source_rank=0)],
        "trainer rank 0 has no decoder.layers.2",
    ),
    "from another layer": (
        lambda copy: [
            structs.replace(copy, source_tensor=copy.source_tensor.replace("layers.2", "layers.3"))
        ],
        "needs",
    ),
    "not cast": (
        lambda copy: [structs.replace(copy, transform="identity")],
        "identity from float32 to bfloat16",
    ),
    "zeroed": (lambda copy: [structs.replace(copy, transform="zeros")], "zeros in"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_proof_refuses_a_damaged_copy_and_names_tensor_and_rank(change):
    map = tiny_map()
    copies = all_copies(map)
    prove_copies(copies, map.source, map.destination)
    damaged = next(copy for copy in copies if is_gate(copy))
    damage, message = CHANGES[change]
    copies = [item for copy in copies for item in (damage(copy) if copy is damaged else [copy])]
    with pytest.raises(ProofError, match=message) as error:
        prove_copies(copies, map.source, map.destination)
    assert GATE in str(error.value)


def test_proof_refuses_copies_to_nowhere():
    map = tiny_map()
    copies = all_copies(map)
    with pytest.raises(
        ProofError, match="elsewhere on generator rank 0: written, but not in the layout"
    ):
        elsewhere = structs.replace(copies[0], destination_rank=0, destination_tensor="elsewhere")
        prove_copies(copies + [elsewhere], map.source, map.destination)
    with pytest.raises(ProofError, match="generator rank 8 is written"):
        prove_copies(
            copies + [structs.replace(copies[0], destination_rank=8)], map.source, map.destination
        )


@pytest.mark.parametrize(
    "change",
    ["dropped", "doubled", "shifted", "source shifted", "padding dropped", "padding from a tensor"],
)
def test_proof_of_the_template_refuses_a_damaged_row(change):
    map = tiny_map()
    prove_exactly_once(map)
    padding = change.startswith("padding")
    row_number = next(
        i
        for i, row in enumerate(map.rows)
        if (row.transform == "zeros") == padding and row.shard == (3 if padding else 1)
    )
    row = map.rows[row_number]
    moved = tuple(
        structs.replace(holder, box=shift(holder.box) if holder.box else row.box)
        for holder in row.holders
    )
    damaged = {
        "dropped": [],
        "doubled": [row, row],
        "shifted": [structs.replace(row, box=shift(row.box))],
        "source shifted": [structs.replace(row, holders=moved)],
        "padding dropped": [],
        "padding from a tensor": [structs.replace(row, transform="cast", holders=moved)],
    }[change]
    name = map.destination.kinds[row.kind].name_of(0)
    with pytest.raises(ProofError, match=f"{name} on generator rank {row.shard}"):
        prove_exactly_once(
            dataclasses.replace(
                map, rows=map.rows[:row_number] + tuple(damaged) + map.rows[row_number + 1 :]
            )
        )


def other_stage(assignment: Assignment) -> Assignment:
    senders = assignment.senders.copy()
    senders[-1, -1] = (senders[-1, -1] + 4) % 8
    return dataclasses.replace(assignment, senders=senders)


def other_receiver(assignment: Assignment) -> Assignment:
    return dataclasses.replace(assignment, receivers=np.roll(assignment.receivers, 1, axis=1))


def all_alike(assignment: Assignment) -> Assignment:
    """Takes layers of the second stage for layers of the first."""
    fields = {
        name: getattr(assignment, name)[:1] for name in ("first", "holders", "senders", "receivers")
    }
    return Assignment(class_of=np.zeros_like(assignment.class_of), **fields)


def nobody(assignment: Assignment) -> Assignment:
    return dataclasses.replace(assignment, holders=assignment.holders + 2)


@pytest.mark.parametrize(
    "damage, message",
    [
        (other_stage, r"on generator rank \d+: trainer rank \d does not hold"),
        (other_receiver, r"on generator rank \d+: trainer rank \d does not hold"),
        (all_alike, "layers of different stages are treated as equal"),
        (nobody, "does not hold"),
    ],
)
def test_proof_refuses_wrong_senders_and_wrong_receivers(damage, message):
    class WrongTurns(Turns):
        def assignment(self, row, replica=None, stages=None):
            return damage(super().assignment(row, replica, stages))

    class Wrong(ReshardMap):
        turns = cached_property(lambda map: WrongTurns(map.source, map.destination, map.rows))

    map = tiny_map()
    with pytest.raises(ProofError, match=message):
        prove_exactly_once(Wrong(map.source, map.destination, map.rows))
