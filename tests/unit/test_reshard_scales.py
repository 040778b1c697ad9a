"""Quantised destinations: the rank that makes each scale, refusals of the proof, and the exchange
of amax for cut tiles.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from copies_reference import prove_copies
from msgspec import structs
from quantise_reference import block_rule

from megarl.base.geometry import Box, GeneratorTopology, TrainerTopology
from megarl.kernels.quantise_rules import CHANNEL
from megarl.models import ModelSpec
from megarl.models.experts import Experts
from megarl.reshard.execute import AmaxTable, amax_parts, payload, peers
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import ProofError, prove_exactly_once

DENSE = ModelSpec("llama", 2, 12, 24, 8, 4, 4, 100, 64, False, 1e-6, 1e4)
MOE = dataclasses.replace(
    DENSE,
    family="mixtral",
    intermediate_size=0,
    experts=Experts(count=4, per_token=2, intermediate_size=24, module="block_sparse_moe"),
)
RULE = block_rule(4, 4)


def fp8_map(spec=DENSE, tp=2, rule=RULE, generator=GeneratorTopology(2, 2), **sizes) -> ReshardMap:
    trainer = trainer_layout(spec, TrainerTopology(tp=tp, **sizes), "bfloat16")
    return ReshardMap.build(trainer, generator_layout(spec, generator, "bfloat16", "cuda", rule))


def all_copies(map: ReshardMap) -> list[Copy]:
    return [copy for rank in range(map.source.world_size) for copy in map.copies_from(rank)]


def changed(copy: Copy, **fields) -> Copy:
    return structs.replace(copy, **fields)


DOWN = "model.layers.1.mlp.down_proj.weight"
W2 = "model.layers.1.block_sparse_moe.experts.w2_weight"
CHANGES = {
    "not quantised": (
        "",
        lambda c: [changed(c, transform="cast")],
        "cast from bfloat16 to float8_e4m3fn",
    ),
    "no scales": ("_scale_inv", lambda c: [], "elements are never written"),
    "scales twice": ("_scale_inv", lambda c: [c, c], "written twice"),
    "scales of other weights": (
        "_scale_inv",
        lambda c: [changed(c, source_box=moved(c.source_box))],
        "but is made from|is not inside",
    ),
    "scales elsewhere": (
        "_scale_inv",
        lambda c: [changed(c, destination_box=moved(c.destination_box))],
        "written twice|is not inside",
    ),
    "tiles counted wrong": (
        "",
        lambda c: [changed(c, quantisation=structs.replace(c.quantisation, origin=(1, 0)))],
        "counted from",
    ),
    "scales zeroed": ("_scale_inv", lambda c: [changed(c, transform="zeros")], "zeros in"),
}


def moved(box: Box) -> Box:
    return Box(box.start[:-2] + (box.start[-2] + 4, box.start[-1]), box.shape)


@pytest.mark.parametrize("spec, name", [(DENSE, DOWN), (MOE, W2)])
@pytest.mark.parametrize("change", CHANGES)
def test_proof_refuses_damaged_scales_and_names_the_tensor(spec, name, change):
    map = fp8_map(spec, ep=2 if spec.experts else 1)
    copies = all_copies(map)
    prove_copies(copies, map.source, map.destination)
    suffix, damage, message = CHANGES[change]
    target = next(
        c for c in copies if c.destination_tensor == name + suffix and c.destination_rank == 1
    )
    with pytest.raises(ProofError, match=message) as error:
        prove_copies(
            [new for copy in copies for new in (damage(copy) if copy is target else [copy])],
            map.source,
            map.destination,
        )
    assert f"{name}{suffix} on generator rank 1" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        "scale dropped",
        "tiles of another tensor",
        "cut not told",
        "wrong expert",
        "scale of other rows",
    ],
)
def test_proof_of_the_template_refuses_damaged_rows(change):
    # 24 / 4 = 6 rows a shard: blocks of 4 are cut
    map = fp8_map(MOE, tp=4, ep=1, etp=4, generator=GeneratorTopology(2, 1))
    prove_exactly_once(map)
    scale = change.startswith("scale")
    row_number = next(
        i
        for i, row in enumerate(map.rows)
        if row.transform == ("scale" if scale else "quantise") and row.cut
    )
    row = map.rows[row_number]
    further = tuple(
        structs.replace(h, box=Box((h.box.start[0] + 1,) + h.box.start[1:], h.box.shape))
        for h in row.holders
    )
    higher = tuple(
        structs.replace(
            h, box=Box(h.box.start[:1] + (h.box.start[1] + 2,) + h.box.start[2:], h.box.shape)
        )
        for h in row.holders
    )
    damaged = {
        "scale dropped": [],
        "tiles of another tensor": [structs.replace(row, logical_name="elsewhere")],
        "cut not told": [structs.replace(row, cut=False)],
        "wrong expert": [structs.replace(row, holders=further)],
        "scale of other rows": [structs.replace(row, holders=higher)],
    }[change]
    with pytest.raises(ProofError, match=map.destination.kinds[row.kind].name_of(0)):
        prove_exactly_once(
            dataclasses.replace(
                map, rows=map.rows[:row_number] + tuple(damaged) + map.rows[row_number + 1 :]
            )
        )


def test_uncut_tiles_need_no_exchange():
    map = fp8_map()
    assert not any(row.cut for row in map.rows)
    assert all(amax_parts(map, rank) == [] for rank in range(2))


def test_ranks_of_one_replica_exchange_the_amax_of_cut_rows():
    """With per-channel scales, both tp ranks have parts of each row of o_proj and down_proj.

    A row of qkv or gate_up is on one rank.
    """
    map = fp8_map(rule=CHANNEL, dp=2)
    for rank in range(4):
        parts = amax_parts(map, rank)
        assert [part.tiles_of.split(".", 3)[3] for part in parts] == [
            "self_attn.o_proj.weight",
            "mlp.down_proj.weight",
        ] * 2
        # tp varies fastest; the other replica (rank ^ 2) has its own exchange
        assert peers(parts) == (rank ^ 1,)
        assert {part.origin for part in parts} == {(0, 16 * (rank % 2)), (0, 12 * (rank % 2))}


def test_a_cut_tile_is_not_quantised_without_its_amax():
    map = fp8_map(rule=CHANNEL)
    source = {t.name: torch.randn(t.shape).bfloat16() for t in map.source.tensors(0)}
    copy = next(c for c in map.copies_from(0) if c.destination_tensor == DOWN)
    with pytest.raises(ValueError, match="needs their amax"):
        payload(copy, source[copy.source_tensor])
    table = AmaxTable.measure(amax_parts(map, 0), source)
    assert payload(copy, source[copy.source_tensor], table).dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="no amax of model.layers.1.mlp.down_proj.weight"):
        payload(copy, source[copy.source_tensor], AmaxTable())
