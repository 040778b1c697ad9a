"""The map as a whole: hash, balance, schedule, report, and the size of Llama-3.1-405B."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from small_maps import LLAMA_405B, TINY, all_copies, tiny_map

from megarl.base.geometry import Box, GeneratorTopology, TrainerTopology
from megarl.models import ModelSpec
from megarl.models.experts import Experts
from megarl.models.registry import load_spec
from megarl.reshard.forwarding import RelayRule, relayed
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.report import render, to_json
from megarl.reshard.schedule import batches_from, batches_to, scheduled_writes
from megarl.reshard.template import Holder, TemplateRow, coalesce

CONFIGS = Path(__file__).parents[2] / "configs"


def test_plan_hash_is_reproducible_and_differs_with_every_input():
    changed = [{"tp": 4}, {"pp": 1}, {"dp": 3}, {"cp": 2}, {"engines": 1}, {"generator_tp": 2}]
    changed += [{"source": "bfloat16"}, {"wire": "float32"}, {"norms": "te"}]
    fields = {
        "num_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 32,
        "num_attention_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 4,
    }
    fields |= {"vocab_size": 99, "tie_word_embeddings": True}
    changed += [
        {"spec": dataclasses.replace(TINY, **{name: value})} for name, value in fields.items()
    ]
    maps = [tiny_map()] + [tiny_map(**change) for change in changed]
    hashes = [map.plan_hash for map in maps]
    assert len(set(hashes)) == len(hashes)
    assert tiny_map().plan_hash == hashes[0]
    swapped = structs.replace(maps[0].rows[0], fan=7)
    assert dataclasses.replace(maps[0], rows=(swapped,) + maps[0].rows[1:]).plan_hash != hashes[0]


@pytest.mark.parametrize(
    "dp, engines, generator_tp", [(2, 2, 2), (4, 8, 2), (2, 4, 4), (4, 4, 1), (4, 1, 4), (3, 2, 2)]
)
def test_replicas_share_the_sending_evenly(dp, engines, generator_tp):
    spec = dataclasses.replace(TINY, vocab_size=256)
    map = tiny_map(spec=spec, pp=1, dp=dp, engines=engines, generator_tp=generator_tp)
    sent = np.zeros(map.source.world_size)
    for copy in all_copies(map):
        sent[copy.source_rank] += copy.bytes
    summary = map.summary()
    assert summary.sender_max_over_mean == pytest.approx(sent.max() / sent.mean())
    # Only whole tensors are divided between ranks, and this model's two vocabulary tensors are as
    # large as its layers.
    largest = max(copy.bytes for copy in all_copies(map))
    for tp in range(2):
        assert np.ptp(sent[tp::2]) <= largest
    if engines % dp == 0:
        assert summary.sender_max_over_mean < 1.002


def test_both_copies_of_a_tied_embedding_send():
    map = tiny_map(spec=dataclasses.replace(TINY, tie_word_embeddings=True), dp=2, engines=4)
    prove_exactly_once(map)
    embedding = [
        c
        for c in all_copies(map)
        if c.destination_tensor == "model.embed_tokens.weight" and c.source_tensor
    ]
    senders = {(c.source_rank, c.source_tensor) for c in embedding}
    assert {name for _, name in senders} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }
    # tp 0 of both replicas on both stages holds all 100 real rows
    assert {rank for rank, _ in senders} == {0, 2, 4, 6}


def test_schedule_has_each_write_once_and_both_ends_agree():
    map = tiny_map(dp=2)
    sent = [batch for rank in range(8) for batch in batches_from(map, rank, wave_bytes=600)]
    received = [batch for rank in range(8) for batch in batches_to(map, rank, wave_bytes=600)]
    assert Counter(sent) == Counter(received)
    assert max(Counter(sent).values()) == 1
    assert Counter(write for batch in sent for write in batch.writes) == Counter(
        w for rank in range(8) for w in map.writes_from(rank)
    )
    for rank in range(8):
        rank_batches = [batch for batch in sent if batch.source_rank == rank]
        assert [batch.wave for batch in rank_batches] == sorted(
            batch.wave for batch in rank_batches
        )
        assert len({(batch.wave, batch.destination_rank) for batch in rank_batches}) == len(
            rank_batches
        )
        place = {write: n for n, write in enumerate(map.writes_from(rank))}
        for batch in rank_batches:
            assert [place[write] for write in batch.writes] == sorted(
                place[write] for write in batch.writes
            ), "forward order"
        depths = [
            (min(w.depth for w in b.writes), max(w.depth for w in b.writes)) for b in rank_batches
        ]
        for (_, last), (first, _), (batch_before, batch_after) in zip(
            depths, depths[1:], itertools.pairwise(rank_batches)
        ):
            assert batch_before.wave == batch_after.wave or last < first


MIXTURE = ModelSpec(
    "qwen3_moe",
    4,
    12,
    16,
    8,
    4,
    2,
    100,
    64,
    False,
    1e-6,
    1e4,
    experts=Experts(count=8, per_token=2, intermediate_size=8),
)
KINDS = {
    "dense": lambda: tiny_map(),
    "tied": lambda: tiny_map(spec=dataclasses.replace(TINY, tie_word_embeddings=True)),
    "experts": lambda: tiny_map(spec=MIXTURE),
    "one layer": lambda: tiny_map(spec=dataclasses.replace(TINY, num_layers=1), pp=1),
    "relayed": lambda: relayed(tiny_map(engines=4), RelayRule("inside_hosts", 8))[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_ends_of_a_pair_agree_on_the_order_of_messages(kind):
    map = KINDS[kind]()
    sent = [scheduled_writes(map, rank) for rank in range(map.source.world_size)]
    for rank in range(map.destination.world_size):
        awaited = map.writes_to(rank)
        for source, writes in enumerate(sent):
            assert [w for w in writes if w.destination_rank == rank] == [
                c for c in awaited if c.source_rank == source
            ]


def test_senders_to_the_same_receivers_start_with_different_ones():
    map = tiny_map(tp=1, pp=1, dp=4, engines=1, generator_tp=4)
    order = [[batch.destination_rank for batch in batches_from(map, rank)] for rank in range(4)]
    assert order == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]


def test_writes_join_what_continues_on_both_sides():
    map = tiny_map(tp=4, generator_tp=4, pp=1, dp=1, engines=1, source="bfloat16")
    qkv = [
        w
        for w in map.writes_from(1)
        if w.destination_tensor == "model.layers.0.self_attn.qkv_proj.weight"
    ]
    assert len(qkv) == 1
    assert qkv[0].source_box == Box((0, 0), (8, 12)) == qkv[0].destination_box
    assert (
        len([c for c in map.copies_from(1) if c.destination_tensor == qkv[0].destination_tensor])
        == 3
    )


def test_writes_along_different_dims_are_not_joined():
    corner = Box((0, 0), (2, 2))
    right = Box((0, 2), (2, 2))
    below = Box((2, 0), (2, 2))
    rows = [
        TemplateRow(0, 0, corner, (Holder(0, 0, corner),), "identity"),
        TemplateRow(0, 0, right, (Holder(0, 0, below),), "identity"),
    ]
    assert coalesce(rows) == tuple(rows)
    same = [rows[0], TemplateRow(0, 0, right, (Holder(0, 0, right),), "identity")]
    assert [row.box for row in coalesce(same)] == [Box((0, 0), (2, 4))]


def test_report_has_every_parameter_and_json_every_number():
    map = tiny_map()
    text = render(map, 50e9)
    for kind in map.destination.kinds:
        assert kind.name.removeprefix("model.layers.{layer}.") in text
    assert map.plan_hash in text
    assert "zeros" in text
    assert "relays" not in text
    part, forwarding = relayed(tiny_map(engines=4), RelayRule("inside_hosts", 8))
    assert "relays    " in render(part, 50e9, forwarding)
    facts = to_json(map)
    assert facts["copies"] == len(all_copies(map))
    assert facts["exactly_once"] is True
    assert facts["bytes"] == facts["bytes_minimum"]
    assert set(facts) == {
        "trainer_ranks",
        "generator_ranks",
        "tensors",
        "copies",
        "writes",
        "bytes",
        "bytes_minimum",
        "sender_max_over_mean",
        "receiver_max_over_mean",
        "relayed_bytes",
        "exactly_once",
        "plan_hash",
        "build_s",
        "predicted_s",
        "delta_predicted_s",
        "delta_changed",
        "link_bytes_per_s",
        "sender_bound",
        "messages",
    }


# 64 engines of 8 ranks. Counts and minima are from an independent prototype.
@pytest.mark.parametrize(
    "topology, balance",
    [
        (TrainerTopology(tp=8, pp=2, dp=32), 1.0001),
        # only by the stages' ownership
        (TrainerTopology(tp=8, pp=16, dp=4, last_stage_layers=6), 1.0887),
        (TrainerTopology(tp=8, pp=16, dp=4, first_stage_layers=7, last_stage_layers=7), 1.0054),
    ],
)
def test_405b_to_512_ranks(topology, balance):
    generator = generator_layout(LLAMA_405B, GeneratorTopology(64, 8), "bfloat16")
    map = ReshardMap.build(trainer_layout(LLAMA_405B, topology, "bfloat16"), generator)
    prove_exactly_once(map)
    summary = map.summary()
    assert (summary.tensors, summary.copies, summary.writes) == (388_608, 583_040, 389_504)
    assert summary.bytes == summary.bytes_minimum
    assert summary.receiver_max_over_mean == 1.0
    assert summary.sender_max_over_mean == pytest.approx(balance, abs=1e-4)
    assert len(map.copies_to(511)) == 583_040 // 512 + 1
    assert len(map.rows) < 200  # the template does not grow with layers or replicas


def test_peers_are_the_pairs_that_a_copy_goes_between():
    map = tiny_map(engines=3)
    pairs = {(copy.source_rank, copy.destination_rank) for copy in all_copies(map)}
    assert {tuple(pair) for pair in np.argwhere(map.peers()).tolist()} == pairs
    assert len(pairs) < map.source.world_size * map.destination.world_size


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "qwen3.5-397b-a17b"])
def test_rows_do_not_grow_with_alternating_layers(model):
    whole = load_spec(CONFIGS / "models" / model)
    row_counts = []
    for spec in (whole.cut(whole.period), whole):
        topology = TrainerTopology(tp=2, dp=8, ep=8)
        trainer = trainer_layout(spec, topology, "bfloat16", "te")
        engines = generator_layout(spec, GeneratorTopology(2, 4, ep=4), "bfloat16")
        map = ReshardMap.build(trainer, engines)
        prove_exactly_once(map)
        row_counts.append(len(map.rows))
    assert row_counts[0] == row_counts[1]
