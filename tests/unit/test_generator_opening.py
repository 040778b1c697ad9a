"""When weights are relayed inside the engines' hosts, and by how many ranks. Relays themselves: tests/cpu/test_transports_pairs.py."""

from __future__ import annotations

import pytest

from megarl.generator.opening import ranks_per_host
from megarl.messaging.host import Host
from megarl.models import ModelSpec
from megarl.reshard.layout import generator_layout
from megarl.topology import GeneratorTopology

SPEC = ModelSpec("llama", 4, 12, 16, 8, 4, 2, 100, 64, False, 1e-6, 1e4)


@pytest.mark.parametrize(
    "relay, engines, tp, hosts, kind, expected",
    [
        ("auto", 4, 2, "aaaabbbb", "mooncake", 4),  # two engines on each of two hosts
        ("auto", 2, 1, "aa", "nccl", 2),
        ("auto", 3, 1, "aab", "gloo", 2),  # the last host is not full
        ("auto", 2, 2, "aabb", "mooncake", 0),  # one engine a host: no replicas there
        ("auto", 2, 2, "aaaa", "shared_memory", 0),  # no network to spare
        ("auto", 3, 1, "abb", "gloo", 0),  # uneven
        ("auto", 3, 1, "aba", "gloo", 0),  # not one after the other
        ("auto", 2, 2, "aaab", "gloo", 0),  # an engine cut unevenly
        ("off", 4, 2, "aaaabbbb", "mooncake", 0),
    ],
)
def test_relays_where_a_host_holds_replicas(relay, engines, tp, hosts, kind, expected):
    layout = generator_layout(SPEC, GeneratorTopology(engines, tp), "float32")
    generators = [Host(memory=name, network=name, name=name) for name in hosts]
    pairs = [[kind, kind] for _ in hosts]
    assert ranks_per_host(relay, pairs, generators, layout) == expected


def test_no_relays_where_one_trainer_rank_is_near():
    layout = generator_layout(SPEC, GeneratorTopology(2, 1), "float32")
    assert ranks_per_host("auto", [["gloo", "shared_memory"], ["gloo", "shared_memory"]], [Host("a"), Host("a")], layout) == 0
