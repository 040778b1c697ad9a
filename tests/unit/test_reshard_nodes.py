"""One copy per node and relays inside it, and how strided writes are carried out."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from copies_reference import apply_copy
from reshard_reference import full_tensors, megatron, sglang

from megarl.base.geometry import Box, GeneratorTopology, TrainerTopology
from megarl.models import ModelSpec
from megarl.reshard.forwarding import inside_hosts
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.schedule import lands, messages

SPEC = ModelSpec("llama", 4, 12, 16, 8, 4, 2, 100, 64, False, 1e-6, 1e4)


@pytest.mark.parametrize("engines, tp, per_node", [(4, 2, 4), (8, 1, 4), (3, 1, 2), (2, 2, 4)])
def test_one_copy_per_node_and_relays_fill_every_engine(engines, tp, per_node):
    topology = TrainerTopology(tp=2, dp=2)
    engine = GeneratorTopology(engines, tp)
    trainer = trainer_layout(SPEC, topology, "float32")
    generator = generator_layout(SPEC, engine, "float32")
    forwarding = inside_hosts(generator, per_node)
    map = ReshardMap.build(trainer, forwarding.leaders)
    prove_exactly_once(map)
    hf = full_tensors(SPEC, torch.float32)
    received = [
        {t.name: torch.full(t.shape, float("nan")) for t in generator.tensors(rank)}
        for rank in range(engine.world_size)
    ]
    over_network: dict[int, int] = defaultdict(int)
    for rank in range(topology.world_size):
        tensors = megatron(SPEC, hf, topology, rank, fill=7.0)
        for copy in map.writes_from(rank):
            apply_copy(
                copy,
                tensors.get(copy.source_tensor),
                received[copy.destination_rank][copy.destination_tensor],
            )
            over_network[copy.destination_rank] += copy.bytes
    for rank in range(engine.world_size):
        for relay in [relay for relay in forwarding.relays if relay.source_rank == rank]:
            assert relay.source_rank // per_node == relay.destination_rank // per_node
            target = received[relay.destination_rank][relay.tensor]
            assert target.isnan().all(), "written twice"
            target.copy_(received[rank][relay.tensor])
            assert relay.bytes == target.nbytes
    for rank, tensors in enumerate(received):
        expected = sglang(SPEC, hf, engine, rank % tp, "cuda")
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    nodes = range(-(-engines * tp // per_node))
    node_bytes = [
        sum(size for rank, size in over_network.items() if rank // per_node == node)
        for node in nodes
    ]
    engine_bytes = sum(t.nbytes for rank in range(tp) for t in received[rank].values())
    assert node_bytes == [engine_bytes] * len(node_bytes)


@pytest.mark.parametrize(
    "box, shape, item_bytes, packed, sent",
    [
        (Box((0, 0), (4, 8)), (16, 8), 2, False, 1),  # whole rows are contiguous
        (Box((3, 0), (1, 4)), (16, 8), 2, False, 1),  # a part of one row is contiguous too
        (Box((0, 0), (4, 4)), (16, 8), 2, True, 1),  # runs of 8 bytes
        (Box((0, 0), (4, 65536)), (16, 131072), 2, False, 4),  # runs of 128 KiB
        (Box((0, 0), (4, 32768)), (16, 65536), 1, True, 1),
        (Box((1, 0, 0), (1, 4, 8)), (4, 16, 8), 2, False, 1),  # of one expert
    ],
)
def test_many_short_messages_are_packed(box, shape, item_bytes, packed, sent):
    assert lands(box, shape, item_bytes) is packed
    assert messages(box, shape, item_bytes) == sent
