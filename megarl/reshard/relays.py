"""A reshard map whose receivers are the leaders of each host alone."""

from __future__ import annotations

from megarl.reshard.map import ReshardMap
from megarl.reshard.nodes import Forwarding, forward_inside_nodes


def relayed(map: ReshardMap, ranks_per_host: int) -> tuple[ReshardMap, Forwarding]:
    """What crosses the network, and what generator ranks pass on. Pure: equal on all ranks of a run. Raises ValueError as
    forward_inside_nodes does."""
    forwarding = forward_inside_nodes(map.destination, ranks_per_host)
    return ReshardMap.build(map.source, forwarding.leaders), forwarding
