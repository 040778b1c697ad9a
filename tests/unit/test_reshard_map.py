"""The map as a whole: proof, hash, balance, schedule, report, and the size of Llama-3.1-405B."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from copies_reference import prove_copies
from msgspec import structs

from megarl.box import Box
from megarl.models import ModelSpec, load_spec
from megarl.reshard.fleet import passed_on
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import ProofError, prove_exactly_once
from megarl.reshard.relays import RelayRule, busiest_bytes, foreseen, relayed, summary
from megarl.reshard.report import to_json
from megarl.reshard.rows import Holder, Row, coalesce
from megarl.reshard.schedule import batches_from, batches_to, scheduled_writes
from megarl.reshard.table import render
from megarl.reshard.turns import Service, Turns
from megarl.topology import GeneratorTopology, TrainerTopology

CONFIGS = Path(__file__).parents[2] / "configs"

TINY = ModelSpec("llama", 4, 12, 16, 8, 4, 2, 100, 64, False, 1e-6, 1e4)
LLAMA_405B = ModelSpec("llama", 126, 16384, 53248, 128, 8, 128, 128256, 131072, False, 1e-5, 5e5)


def tiny_map(spec=TINY, tp=2, pp=2, dp=2, cp=1, engines=2, generator_tp=4, source="float32", wire="bfloat16", norms="local") -> ReshardMap:
    trainer = trainer_layout(spec, TrainerTopology(tp=tp, pp=pp, dp=dp, cp=cp), source, norms)
    return ReshardMap.build(trainer, generator_layout(spec, GeneratorTopology(engines, generator_tp), wire))


def all_copies(map: ReshardMap) -> list[Copy]:
    return [copy for rank in range(map.source.world_size) for copy in map.copies_from(rank)]


def shift(box: Box) -> Box:
    return Box((box.start[0] + 1,) + box.start[1:], box.shape)


def is_gate(item: Copy) -> bool:
    return item.destination_tensor == "model.layers.2.mlp.gate_up_proj.weight" and item.destination_rank == 5


GATE = "model.layers.2.mlp.gate_up_proj.weight on generator rank 5"
CHANGES = {
    "dropped": (lambda copy: [], "elements are never written"),
    "doubled": (lambda copy: [copy, copy], "written twice"),
    "shifted at the destination": (
        lambda copy: [structs.replace(copy, destination_box=shift(copy.destination_box))],
        "written twice|not inside",
    ),
    "shifted at the source": (lambda copy: [structs.replace(copy, source_box=shift(copy.source_box))], "needs|not inside"),
    "from another rank": (lambda copy: [structs.replace(copy, source_rank=copy.source_rank ^ 1)], "needs"),
    "from another stage": (lambda copy: [structs.replace(copy, source_rank=0)], "trainer rank 0 has no decoder.layers.2"),
    "from another layer": (
        lambda copy: [structs.replace(copy, source_tensor=copy.source_tensor.replace("layers.2", "layers.3"))],
        "needs",
    ),
    "not cast": (lambda copy: [structs.replace(copy, transform="identity")], "identity from float32 to bfloat16"),
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
    with pytest.raises(ProofError, match="elsewhere on generator rank 0: written, but not in the layout"):
        elsewhere = structs.replace(copies[0], destination_rank=0, destination_tensor="elsewhere")
        prove_copies(copies + [elsewhere], map.source, map.destination)
    with pytest.raises(ProofError, match="generator rank 8 is written"):
        prove_copies(copies + [structs.replace(copies[0], destination_rank=8)], map.source, map.destination)


@pytest.mark.parametrize("change", ["dropped", "doubled", "shifted", "source shifted", "padding dropped", "padding from a tensor"])
def test_proof_of_the_template_refuses_a_damaged_row(change):
    map = tiny_map()
    prove_exactly_once(map)
    padding = change.startswith("padding")
    at = next(i for i, row in enumerate(map.rows) if (row.transform == "zeros") == padding and row.shard == (3 if padding else 1))
    row = map.rows[at]
    moved = tuple(structs.replace(holder, box=shift(holder.box) if holder.box else row.box) for holder in row.holders)
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
        prove_exactly_once(dataclasses.replace(map, rows=map.rows[:at] + tuple(damaged) + map.rows[at + 1 :]))


def other_stage(service: Service) -> Service:
    senders = service.senders.copy()
    senders[-1, -1] = (senders[-1, -1] + 4) % 8
    return dataclasses.replace(service, senders=senders)


def other_receiver(service: Service) -> Service:
    return dataclasses.replace(service, receivers=np.roll(service.receivers, 1, axis=1))


def all_alike(service: Service) -> Service:
    """Layers of the second stage taken for layers of the first."""
    fields = {name: getattr(service, name)[:1] for name in ("first", "holders", "senders", "receivers")}
    return Service(class_of=np.zeros_like(service.class_of), **fields)


def nobody(service: Service) -> Service:
    return dataclasses.replace(service, holders=service.holders + 2)


@pytest.mark.parametrize(
    "damage, message",
    [
        (other_stage, r"on generator rank \d+: trainer rank \d does not hold"),
        (other_receiver, r"on generator rank \d+: trainer rank \d does not hold"),
        (all_alike, "layers of different stages are taken for alike"),
        (nobody, "does not hold"),
    ],
)
def test_proof_refuses_senders_that_do_not_hold_the_layer_and_other_receivers(damage, message):
    class WrongTurns(Turns):
        def service(self, row, replica=None, stages=None):
            return damage(super().service(row, replica, stages))

    class Wrong(ReshardMap):
        turns = cached_property(lambda map: WrongTurns(map.source, map.destination, map.rows))

    map = tiny_map()
    with pytest.raises(ProofError, match=message):
        prove_exactly_once(Wrong(map.source, map.destination, map.rows))


def test_plan_hash_is_reproducible_and_differs_with_every_input():
    changed = [{"tp": 4}, {"pp": 1}, {"dp": 3}, {"cp": 2}, {"engines": 1}, {"generator_tp": 2}]
    changed += [{"source": "bfloat16"}, {"wire": "float32"}, {"norms": "te"}]
    fields = {"num_layers": 2, "hidden_size": 8, "intermediate_size": 32, "num_attention_heads": 16, "num_kv_heads": 8, "head_dim": 4}
    fields |= {"vocab_size": 99, "tie_word_embeddings": True}
    changed += [{"spec": dataclasses.replace(TINY, **{name: value})} for name, value in fields.items()]
    maps = [tiny_map()] + [tiny_map(**change) for change in changed]
    hashes = [map.plan_hash for map in maps]
    assert len(set(hashes)) == len(hashes)
    assert tiny_map().plan_hash == hashes[0]
    swapped = structs.replace(maps[0].rows[0], fan=7)
    assert dataclasses.replace(maps[0], rows=(swapped,) + maps[0].rows[1:]).plan_hash != hashes[0]


@pytest.mark.parametrize("dp, engines, generator_tp", [(2, 2, 2), (4, 8, 2), (2, 4, 4), (4, 4, 1), (4, 1, 4), (3, 2, 2)])
def test_replicas_share_the_sending_evenly(dp, engines, generator_tp):
    spec = dataclasses.replace(TINY, vocab_size=256)
    map = tiny_map(spec=spec, pp=1, dp=dp, engines=engines, generator_tp=generator_tp)
    sent = np.zeros(map.source.world_size)
    for copy in all_copies(map):
        sent[copy.source_rank] += copy.bytes
    summary = map.summary()
    assert summary.sender_max_over_mean == pytest.approx(sent.max() / sent.mean())
    # Nothing finer than one tensor is shared out, and in this model the two vocabulary tensors weigh as much as its layers.
    largest = max(copy.bytes for copy in all_copies(map))
    for tp in range(2):
        assert np.ptp(sent[tp::2]) <= largest
    if engines % dp == 0:
        assert summary.sender_max_over_mean < 1.002


def test_both_copies_of_a_tied_embedding_send():
    map = tiny_map(spec=dataclasses.replace(TINY, tie_word_embeddings=True), dp=2, engines=4)
    prove_exactly_once(map)
    embedding = [c for c in all_copies(map) if c.destination_tensor == "model.embed_tokens.weight" and c.source_tensor]
    senders = {(c.source_rank, c.source_tensor) for c in embedding}
    assert {name for _, name in senders} == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert {rank for rank, _ in senders} == {0, 2, 4, 6}  # tp 0 of both replicas on both stages: it holds all 100 real rows


def test_schedule_covers_every_write_once_and_both_ends_agree():
    map = tiny_map(dp=2)
    sent = [batch for rank in range(8) for batch in batches_from(map, rank, wave_bytes=600)]
    received = [batch for rank in range(8) for batch in batches_to(map, rank, wave_bytes=600)]
    assert Counter(sent) == Counter(received) and max(Counter(sent).values()) == 1
    assert Counter(write for batch in sent for write in batch.writes) == Counter(w for rank in range(8) for w in map.writes_from(rank))
    for rank in range(8):
        own = [batch for batch in sent if batch.source_rank == rank]
        assert [batch.wave for batch in own] == sorted(batch.wave for batch in own)
        assert len({(batch.wave, batch.destination_rank) for batch in own}) == len(own)
        place = {write: n for n, write in enumerate(map.writes_from(rank))}
        for batch in own:
            assert [place[write] for write in batch.writes] == sorted(place[write] for write in batch.writes), "forward order"
        depths = [(min(w.depth for w in b.writes), max(w.depth for w in b.writes)) for b in own]
        for (_, last), (first, _), (one, two) in zip(depths, depths[1:], itertools.pairwise(own)):
            assert one.wave == two.wave or last < first


MIXTURE = ModelSpec(
    "qwen3_moe", 4, 12, 16, 8, 4, 2, 100, 64, False, 1e-6, 1e4, num_experts=8, experts_per_token=2, expert_intermediate_size=8
)
KINDS = {
    "dense": lambda: tiny_map(),
    "tied": lambda: tiny_map(spec=dataclasses.replace(TINY, tie_word_embeddings=True)),
    "experts": lambda: tiny_map(spec=MIXTURE),
    "one layer": lambda: tiny_map(spec=dataclasses.replace(TINY, num_layers=1), pp=1),
    "relayed": lambda: relayed(tiny_map(engines=4), RelayRule("inside_hosts", 8))[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_ends_of_a_pair_know_the_order_of_its_messages_which_carry_no_names(kind):
    map = KINDS[kind]()
    sent = [scheduled_writes(map, rank) for rank in range(map.source.world_size)]
    for rank in range(map.destination.world_size):
        awaited = map.writes_to(rank)
        for source, writes in enumerate(sent):
            assert [w for w in writes if w.destination_rank == rank] == [c for c in awaited if c.source_rank == source]


def test_senders_that_feed_the_same_receivers_begin_with_different_ones():
    map = tiny_map(tp=1, pp=1, dp=4, engines=1, generator_tp=4)
    order = [[batch.destination_rank for batch in batches_from(map, rank)] for rank in range(4)]
    assert order == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]


def test_writes_join_what_continues_on_both_sides():
    map = tiny_map(tp=4, generator_tp=4, pp=1, dp=1, engines=1, source="bfloat16")
    qkv = [w for w in map.writes_from(1) if w.destination_tensor == "model.layers.0.self_attn.qkv_proj.weight"]
    assert len(qkv) == 1 and qkv[0].source_box == Box((0, 0), (8, 12)) == qkv[0].destination_box
    assert len([c for c in map.copies_from(1) if c.destination_tensor == qkv[0].destination_tensor]) == 3


def test_writes_do_not_join_what_continues_along_different_dims():
    left, right, below = Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (2, 2))
    rows = [Row(0, 0, left, (Holder(0, 0, left),), "identity"), Row(0, 0, right, (Holder(0, 0, below),), "identity")]
    assert coalesce(rows) == tuple(rows)
    same = [rows[0], Row(0, 0, right, (Holder(0, 0, right),), "identity")]
    assert [row.box for row in coalesce(same)] == [Box((0, 0), (2, 4))]


def test_report_names_every_parameter_and_json_every_number():
    map = tiny_map()
    text = render(map, 50e9)
    for kind in map.destination.kinds:
        assert kind.name.removeprefix("model.layers.{layer}.") in text
    assert map.plan_hash in text and "zeros" in text and "relays" not in text
    part, forwarding = relayed(tiny_map(engines=4), RelayRule("inside_hosts", 8))
    assert "relays    " in render(part, 50e9, forwarding)
    found = to_json(map)
    assert found["copies"] == len(all_copies(map)) and found["exactly_once"] is True and found["bytes"] == found["bytes_minimum"]
    assert set(found) == {
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
        "link_bytes_per_s",
        "sender_bound",
        "messages",
    }


# 64 engines of 8; counts and minima from an independent prototype.
@pytest.mark.parametrize(
    "topology, balance",
    [
        (TrainerTopology(tp=8, pp=2, dp=32), 1.0001),
        (TrainerTopology(tp=8, pp=16, dp=4, last_stage_layers=6), 1.0887),  # stage ownership alone
        (TrainerTopology(tp=8, pp=16, dp=4, first_stage_layers=7, last_stage_layers=7), 1.0054),
    ],
)
def test_405b_to_512_ranks(topology, balance):
    generator = generator_layout(LLAMA_405B, GeneratorTopology(64, 8), "bfloat16")
    map = ReshardMap.build(trainer_layout(LLAMA_405B, topology, "bfloat16"), generator)
    prove_exactly_once(map)
    summary = map.summary()
    assert (summary.tensors, summary.copies, summary.writes) == (388_608, 583_040, 389_504)
    assert summary.bytes == summary.bytes_minimum and summary.receiver_max_over_mean == 1.0
    assert summary.sender_max_over_mean == pytest.approx(balance, abs=1e-4)
    assert len(map.copies_to(511)) == 583_040 // 512 + 1
    assert len(map.rows) < 200  # the template does not grow with layers or replicas


def test_405b_in_fp8_with_relays_is_even():
    """Embedding and output layer stay bf16: without relays the first and the last stage send 3.5 % more than the mean."""
    topology = TrainerTopology(tp=8, pp=16, dp=4, first_stage_layers=7, last_stage_layers=7)
    generator = generator_layout(LLAMA_405B, GeneratorTopology(64, 8), "bfloat16", quantization="fp8_block")
    whole = ReshardMap.build(trainer_layout(LLAMA_405B, topology, "bfloat16"), generator)
    map, forwarding = foreseen(whole, "engines", 8)
    prove_exactly_once(map)
    found, alone = summary(map, forwarding), whole.summary()
    assert alone.sender_max_over_mean == pytest.approx(1.0356, abs=1e-4)
    assert found.sender_max_over_mean < 1.001 and found.receiver_max_over_mean == 1.0
    assert found.bytes == found.bytes_minimum == alone.bytes and found.relayed_bytes < 0.01 * found.bytes
    assert busiest_bytes(map, forwarding) < 0.98 * busiest_bytes(whole, None)


def test_many_engines_beside_few_trainer_ranks():
    """One node of 8 trains, 16 nodes generate: alone, its ranks would send all weights 16 times."""
    generator = generator_layout(LLAMA_405B, GeneratorTopology(16, 8), "bfloat16")
    whole = ReshardMap.build(trainer_layout(LLAMA_405B, TrainerTopology(tp=8), "bfloat16"), generator)
    map, forwarding = foreseen(whole, "engines", 8)
    prove_exactly_once(map)
    of_one_engine_rank = whole.rank_bytes()[1].max()
    assert busiest_bytes(whole, None) > 15.9 * of_one_engine_rank
    assert busiest_bytes(map, forwarding) < 2.1 * of_one_engine_rank
    given, taken = forwarding.rank_bytes()
    assert max(given.max(), taken.max()) < of_one_engine_rank  # layers take turns: no engine passes on more than it holds


def test_peers_are_the_pairs_that_a_copy_goes_between():
    map = tiny_map(engines=3)
    pairs = {(copy.source_rank, copy.destination_rank) for copy in all_copies(map)}
    assert {tuple(pair) for pair in np.argwhere(map.peers()).tolist()} == pairs
    assert len(pairs) < map.source.world_size * map.destination.world_size


def test_nothing_is_passed_on_where_that_gains_nothing():
    map, forwarding = foreseen(tiny_map(dp=4, engines=2), "engines", 4)
    assert forwarding.relays == [] and map.plan_hash == tiny_map(dp=4, engines=2).plan_hash
    assert foreseen(tiny_map(), "auto", 4)[1] is None


def tamper_leaves_one_out(leader_of):
    leader_of[0, 0, 1] = leader_of[0, 0, 0] = 0


def tamper_from_one_without(leader_of):
    followers = np.argwhere(leader_of[0, 0] != np.unique(leader_of[0, 0])[0]).ravel()
    leader_of[0, 0, followers[0]] = 999


@pytest.mark.parametrize("tamper", [tamper_leaves_one_out, tamper_from_one_without])
def test_a_wrong_forwarding_is_found(tamper):
    forwarding = passed_on(tiny_map(engines=4).destination, 4, of_ends=2, of_layers=2)
    forwarding.prove()
    tables = [table.copy() for table in forwarding.leader_of]
    tamper(tables[1])
    with pytest.raises(ProofError):
        dataclasses.replace(forwarding, leader_of=tuple(tables)).prove()


@pytest.mark.parametrize("layers, engines, tp, trainer", [
    (2, 64, 1, TrainerTopology(tp=4, dp=8)), (8, 64, 4, TrainerTopology(tp=4, pp=2, dp=8)), (2, 32, 4, TrainerTopology(tp=4, dp=16)),
    (8, 32, 1, TrainerTopology(dp=16)), (8, 16, 2, TrainerTopology(tp=2)), (2, 2, 1, TrainerTopology(pp=2)),
])  # fmt: skip
def test_relays_between_engines_never_make_the_busiest_rank_busier(layers, engines, tp, trainer):
    """Where engines outnumber layers, some pass on a layer and others none."""
    spec = dataclasses.replace(load_spec(CONFIGS / "models/llama-3.1-8b"), num_layers=layers)
    source, destination = trainer_layout(spec, trainer, "bfloat16"), generator_layout(spec, GeneratorTopology(engines, tp), "bfloat16")
    map = ReshardMap.build(source, destination)
    assert busiest_bytes(*foreseen(map, "engines", tp)) <= busiest_bytes(map, None)
