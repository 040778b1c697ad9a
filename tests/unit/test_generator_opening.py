"""When weights are relayed inside the engines' hosts, and by how many ranks.

(tests/cpu/test_transports_pairs.py tests relays themselves.)
"""

from __future__ import annotations

import pytest

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.errors import ConfigError
from megarl.messaging.host import Host
from megarl.models import ModelSpec
from megarl.reshard.forwarding import Relay, RelayRule
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.opening import passing_on, relay_transports
from megarl.weight_sync.transports.choice import Pairs

SPEC = ModelSpec("llama", 4, 12, 16, 8, 4, 2, 100, 64, False, 1e-6, 1e4)


@pytest.mark.parametrize(
    "relay, engines, tp, hosts, kind, expected",
    [
        ("auto", 4, 2, "aaaabbbb", "mooncake", 4),  # two engines on each of two hosts
        ("auto", 2, 1, "aa", "nccl", 2),
        ("auto", 3, 1, "aab", "gloo", 2),  # the last host is not full
        ("auto", 2, 2, "aabb", "mooncake", 0),  # one engine a host: no replicas on a host
        ("auto", 2, 2, "aaaa", "shared_memory", 0),  # no network to spare
        ("auto", 3, 1, "abb", "gloo", 0),  # uneven
        ("auto", 3, 1, "aba", "gloo", 0),  # a host's engines are not consecutive
        ("auto", 2, 2, "aaab", "gloo", 0),  # one engine has an uneven cut
        ("off", 4, 2, "aaaabbbb", "mooncake", 0),
    ],
)
def test_relays_are_used_where_a_host_holds_replicas(relay, engines, tp, hosts, kind, expected):
    generators = [Host(memory=name, network=name, name=name) for name in hosts]
    map = map_to(engines, tp)
    rule, written, relays = passing_on(
        relay, Pairs.of([[kind, kind] for _ in hosts]), generators, map, tp
    )
    assert rule == (RelayRule("inside_hosts", expected) if expected else None)
    assert bool(relays) == (rule is not None) == (written is not map)


def test_trainer_rank_on_the_host_needs_no_relays():
    pairs = Pairs.of([["gloo", "shared_memory"], ["gloo", "shared_memory"]])
    assert passing_on("auto", pairs, [Host("a"), Host("a")], map_to(2, 1), 1)[0] is None


@pytest.mark.parametrize("engines, expected", [(6, RelayRule("between_engines", 1)), (1, None)])
def test_engines_pass_weights_on_if_set_and_faster(engines, expected):
    hosts = [Host(memory=str(n), network=str(n)) for n in range(engines)]
    pairs = Pairs.of([["mooncake"]] * engines)
    rule, *_ = passing_on("engines", pairs, hosts, map_to(engines, 1), 1)
    assert rule == expected


def test_transports_between_engines():
    near = Host(memory="a", network="a", name="a", has=("mooncake",))
    far = Host(memory="b", network="b", name="b", has=("mooncake",))
    without = Host(memory="c", network="c", name="c")
    relays = [Relay(0, 1, "norm", 0, 4), Relay(0, 2, "norm", 0, 4), Relay(2, 1, "norm", 0, 4)]
    assert relay_transports(relays, [near, near, far]) == {"shared_memory": {1}, "mooncake": {1, 2}}
    refused = (
        "weights.relay=engines: passing on from generator rank 0 on a to generator rank 2 "
        "on c needs Mooncake"
    )
    with pytest.raises(ConfigError, match=refused):
        relay_transports(relays, [near, near, without])


def map_to(engines: int, tp: int) -> ReshardMap:
    source = trainer_layout(SPEC, TrainerTopology(tp=1), "float32")
    return ReshardMap.build(
        source, generator_layout(SPEC, GeneratorTopology(engines, tp), "float32")
    )
