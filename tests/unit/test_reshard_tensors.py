"""Array forms against lists: of tensors, of landing boxes, and of tensors without pieces."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_cases import cases
from small_maps import tiny_map

from megarl.reshard.forwarding import INSIDE_HOSTS, RelayRule, SentTensors, relayed
from megarl.reshard.layout import ITEM_BYTES, Layout, generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.schedule import landings, lands


@settings(max_examples=25, deadline=None)
@given(case=cases(), relays=st.booleans())
def test_arrays_have_what_the_lists_of_writes_have(case, relays):
    spec, topology, generator, device = case
    full_map = map = ReshardMap.build(
        trainer_layout(spec, topology, "float32"),
        generator_layout(spec, generator, "bfloat16", device),
    )
    passed_on = []
    if relays:
        with contextlib.suppress(ValueError):
            map, forwarding = relayed(full_map, RelayRule(INSIDE_HOSTS, 2 * generator.tp))
            passed_on = forwarding.relays
    tensors = SentTensors(map, passed_on)
    for rank in range(map.source.world_size):
        written = sorted(
            {(write.destination_rank, write.destination_tensor) for write in map.writes_from(rank)}
        )
        assert [tensors.name(place) for place in tensors.sent_by(rank)] == written
    all_names = [tensors.name(place) for place in range(tensors.places[-1])]
    assert all_names == [
        (rank, name)
        for rank in range(generator.world_size)
        for name in names(full_map.destination, rank)
    ]
    assert [
        tuple(tensors.name(place)[0] for place in range(*ends))[:1]
        for ends in pairwise(tensors.places)
    ] == [(rank,) for rank in range(generator.world_size)]
    ends = [
        (tensors.name(leader), tensors.name(follower)) for leader, follower in zip(*tensors.relayed)
    ]
    assert ends == [
        ((relay.source_rank, relay.tensor), (relay.destination_rank, relay.tensor))
        for relay in passed_on
    ]


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_boxes_land_by_row_as_they_do_one_by_one(case):
    spec, topology, generator, device = case
    map = ReshardMap.build(
        trainer_layout(spec, topology, "float32"),
        generator_layout(spec, generator, "bfloat16", device),
    )
    for rank in range(generator.world_size):
        shapes = {tensor.name: tensor.shape for tensor in map.destination.tensors(rank)}
        one_by_one = [
            w
            for w in map.writes_to(rank)
            if lands(w.destination_box, shapes[w.destination_tensor], ITEM_BYTES[w.dtype])
        ]
        assert landings(map, rank) == one_by_one


@settings(max_examples=25, deadline=None)
@given(case=cases(fp8=True), quantization=st.sampled_from([None, "fp8_channel", "fp8_tensor"]))
def test_shapes_are_those_of_the_tensors(case, quantization):
    spec, _, generator, device = case
    layout = generator_layout(spec, generator, "bfloat16", device, quantization)
    for rank in range(generator.world_size):
        expected = [(t.name, t.shape, t.dtype, t.engine_shape) for t in layout.tensors(rank)]
        assert [(t.name, t.shape, t.dtype, t.engine_shape) for t in layout.shapes(rank)] == sorted(
            expected, key=lambda row: row[0]
        )


@pytest.mark.parametrize("engines", [1, 3])
def test_replicas_share_their_shapes(engines):
    layout = tiny_map(engines=engines, generator_tp=2).destination
    assert len({id(layout.shapes(rank)) for rank in range(layout.world_size)}) <= 2


def names(layout: Layout, rank: int) -> list[str]:
    return sorted(tensor.name for tensor in layout.tensors(rank))
