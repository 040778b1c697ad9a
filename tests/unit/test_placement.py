"""The node of each process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import ConfigError
from megarl.config.schema import GeneratorConfig
from megarl.generator.groups import EngineGroup
from megarl.launch.nodes import EnginePart, place, slots_per_node
from megarl.messaging.rendezvous import ROLLOUTS, Purpose
from megarl.plan.topologies import generator_ranks


def group(engines: int, tp: int, purpose: Purpose = ROLLOUTS) -> EngineGroup:
    return EngineGroup("", GeneratorConfig(engines=engines, tp=tp), purpose=purpose)


def test_one_node_holds_all_trainer_first():
    (node,) = place(trainer_ranks=4, groups=[group(4, 1)], nodes=1, slots=8)
    assert list(node.trainer_ranks) == [0, 1, 2, 3]
    assert [part.first_slot for part in node.engines] == [4, 5, 6, 7]
    assert node.serves == (0, 1, 2, 3)


def test_the_405b_run_fills_its_nodes_exactly():
    placed = place(trainer_ranks=512, groups=[group(64, 8)], nodes=128, slots=8)
    assert [len(node.trainer_ranks) for node in placed] == [8] * 64 + [0] * 64
    assert [node.serves for node in placed[64:]] == [(engine,) for engine in range(64)]


def test_an_engine_is_not_cut_by_a_node_boundary():
    placed = place(trainer_ranks=6, groups=[group(3, 4)], nodes=3, slots=8)
    assert [node.serves for node in placed] == [(), (0, 1), (2,)]


def test_an_engine_larger_than_a_node_takes_whole_nodes():
    placed = place(trainer_ranks=3, groups=[group(1, 16)], nodes=3, slots=8)
    part = EnginePart(engine=0, part=0, parts=2, ranks=8, first_slot=0, group=group(1, 16))
    assert placed[1].engines == (part,)
    assert placed[2].engines == (replace(part, part=1),)
    assert (placed[1].serves, placed[2].serves) == ((0,), ())


def test_too_few_nodes_and_odd_engines_are_refused():
    with pytest.raises(
        ConfigError,
        match="need 3 nodes of 8 slots; the allocation has 2: ask for more .sbatch --nodes=3",
    ):
        place(trainer_ranks=16, groups=[group(1, 1)], nodes=2, slots=8)
    with pytest.raises(ConfigError, match="generator.tp=12"):
        place(trainer_ranks=0, groups=[group(1, 12)], nodes=2, slots=8)


@given(
    trainer=st.integers(0, 40),
    engines=st.integers(0, 12),
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    frozen=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 8])), max_size=2),
    slots=st.sampled_from([1, 2, 4, 8]),
)
def test_every_rank_has_a_slot_of_its_own(trainer, engines, tp, frozen, slots):
    groups = [
        group(engines, tp),
        *(group(*sizes, Purpose(f"rm{i}", "frozen")) for i, sizes in enumerate(frozen)),
    ]
    ranks = generator_ranks(groups)
    placed = place(trainer, groups, nodes=trainer + 2 * ranks + 1, slots=slots)
    used = [(node.node, slot) for node in placed for slot in range(len(node.trainer_ranks))]
    used += [
        (node.node, part.first_slot + i)
        for node in placed
        for part in node.engines
        for i in range(part.ranks)
    ]
    assert len(used) == len(set(used)) == trainer + ranks
    assert all(slot < slots for _, slot in used)
    assert [rank for node in placed for rank in node.trainer_ranks] == list(range(trainer))
    assert sorted(engine for node in placed for engine in node.serves) == list(range(engines))
    all_engines = [(one, engine) for one in groups for engine in one.numbers]
    for engines_group, engine in all_engines:
        parts = [
            part
            for node in placed
            for part in node.engines
            if (part.group, part.engine) == (engines_group, engine)
        ]
        assert [part.part for part in parts] == list(range(parts[0].parts))
        assert sum(part.ranks for part in parts) == engines_group.settings.tp


def test_slots_are_asked_for_or_gpus_or_spread():
    assert slots_per_node(ranks=4, nodes=4, gpus=0, ranks_per_node=None) == 1
    assert slots_per_node(ranks=3, nodes=1, gpus=0, ranks_per_node=None) == 3
    assert slots_per_node(ranks=3, nodes=1, gpus=8, ranks_per_node=None) == 8
    assert slots_per_node(ranks=3, nodes=1, gpus=8, ranks_per_node=4) == 4
    with pytest.raises(
        ConfigError, match="launch.ranks_per_node=8: must be at most the GPUs of a node, 4"
    ):
        slots_per_node(ranks=3, nodes=1, gpus=4, ranks_per_node=8)
