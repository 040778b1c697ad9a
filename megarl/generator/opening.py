"""Before the first update: which rank writes to which by what, and the engines' memory is opened accordingly.

Where a host has several engines and the trainer is elsewhere, weights are *relayed*: every byte crosses the network once per host. Of
the replicas of a shard on one host one leads; trainer ranks write to it alone, and its worker passes the tensor on inside the host
once everything is written (reshard.nodes says who leads, and who passes on what), by the transports that map memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Sequence

from megarl.config.schema import WeightsConfig
from megarl.generator.commands import MeetNeighbours
from megarl.generator.memory import open_memories, open_memory
from megarl.generator.workers import Workers
from megarl.messaging.host import Host
from megarl.reshard.kinds import Layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.nodes import Relay, forward_inside_nodes
from megarl.reshard.relays import relayed
from megarl.transports.base import CUDA_IPC, SHARED_MEMORY, Endpoint
from megarl.transports.choice import Pairs, describe_pairs, mooncake_protocol, transport_pairs

AUTO = "auto"


@dataclass(frozen=True)
class Opened:
    map: ReshardMap  # what the trainer ranks write: all, or what is not relayed
    endpoints: list[Endpoint]  # where they write it
    ranks_per_host: int  # of generator ranks that relay to each other; 0: nothing is relayed
    relays: list[Relay]

    @property
    def kinds(self) -> set[str]:
        """Of transports in use between trainer and generator."""
        return {endpoint.kind for endpoint in self.endpoints}


async def open_engines(
    workers: Workers, weights: WeightsConfig, map: ReshardMap, trainers: Sequence[Host], engines: Sequence[Host]
) -> Opened:
    """`trainers`, `engines`: where each trainer rank and each generator rank runs. Needs an open update session.

    Raises ConfigError for a transport that cannot work between two of the hosts, before anything is opened.
    """
    pairs = transport_pairs(weights.transport, trainers, engines)
    per_host = ranks_per_host(weights.relay, pairs, engines, map.destination)
    relays: list[Relay] = []
    if per_host:
        map, forwarding = relayed(map, per_host)
        relays = [relay for rank in range(len(engines)) for relay in forwarding.relays_from(rank)]
        await open_relays(workers, relays, engines)
    inside = sum(relay.bytes for relay in relays)
    print(f"weights go by {describe_pairs(pairs)}; {inside} bytes an update are passed on inside the engines' hosts", flush=True)
    endpoints = await open_memories(workers, pairs, map, mooncake_protocol([*trainers, *engines]))
    return Opened(map, endpoints, per_host, relays)


def ranks_per_host(relay: str, pairs: Pairs, generators: Sequence[Host], layout: Layout) -> int:
    """How many generator ranks share a host, when weights are to be relayed there; 0: they are not.

    `relay` is weights.relay, `pairs` the transports from trainer ranks. `auto` relays when hosts hold several replicas of a shard,
    alike on each, and every trainer rank reaches every one of them over the network.
    """
    runs = [len(list(ranks)) for _, ranks in groupby(generators, key=lambda host: (host.memory, host.network))]
    hosts = len({(host.memory, host.network) for host in generators})
    even = len(runs) == hosts and all(run == runs[0] for run in runs[:-1]) and runs[-1] <= runs[0]
    near = any(kind in (SHARED_MEMORY, CUDA_IPC) for kinds in pairs for kind in kinds)
    if relay != AUTO or near or not even:
        return 0
    try:
        forwarding = forward_inside_nodes(layout, runs[0])
    except ValueError:  # replicas are not spread alike over the hosts
        return 0
    return runs[0] if any(forwarding.relays_from(rank) for rank in range(len(generators))) else 0


async def open_relays(workers: Workers, relays: Sequence[Relay], generators: Sequence[Host]) -> None:
    """Lets the workers of each host write to each other. Moves parameters: comes before `open_memories`.

    `generators`: where each generator rank runs.
    """
    kind = CUDA_IPC if generators[0].cuda else SHARED_MEMORY
    endpoints = await open_memory(workers, kind, None, writers={rank: () for rank in range(workers.count)})
    of_rank = {rank: [relay for relay in relays if relay.source_rank == rank] for rank in range(workers.count)}
    await workers.run_all(MeetNeighbours(kind, endpoints, of_rank))
