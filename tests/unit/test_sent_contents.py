"""What several engines get of one sender is computed, hashed and staged once; what differs is not
taken for equal.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megarl.base.geometry import Box
from megarl.config.load import load_config
from megarl.config.schema import WeightsConfig
from megarl.kernels.audit import hash_slice
from megarl.kernels.quantise_rules import BLOCK
from megarl.plan.resolve import find_spec
from megarl.plan.topologies import engines_layout, trainer_topology
from megarl.reshard.execute import Payloads, payload
from megarl.reshard.layout import trainer_layout
from megarl.reshard.map import Copy, Quantisation, ReshardMap
from megarl.weight_sync import writing
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import Endpoint, RemoteTensor
from megarl.weight_sync.writing import Deltas, send

BOX = Box((0, 0), (128, 256))
SHAPES = {rank: {"w": BOX.shape} for rank in range(4)}


def weights(seed: int) -> torch.Tensor:
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()


def copy_to(rank: int) -> Copy:
    """Ranks 0 and 2 get the codes, ranks 1 and 3 other rows of the same shape."""
    quantisation = Quantisation(BLOCK, "w", (128 * (rank % 2), 0), cut=False)
    source_box = Box((128 * (rank % 2), 0), BOX.shape)
    return Copy(0, "x", source_box, rank, "w", BOX, "quantise", "float8_e4m3fn", 0, quantisation)


COPIES = [copy_to(rank) for rank in range(4)]


class Kept:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}

    def prepare(self, sources: object) -> None: ...

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        self.values[copy.destination_rank] = values

    def fence(self) -> None: ...


def test_equal_contents_are_computed_and_hashed_once(monkeypatch):
    source = weights(seed=0)
    computed = Counter[Box]()

    class Counting(Payloads):
        def of(self, copy, amax=None):
            computed[copy.source_box] += 1
            return super().of(copy, amax)

    hashed = []
    hash_slice_of = writing.Hashes.add
    monkeypatch.setattr(
        writing.Hashes,
        "add",
        lambda hashes, *parts: hashed.append(parts) or hash_slice_of(hashes, *parts),
    )
    kept = Kept()
    part = send(kept, COPIES, {"x": source}, SHAPES, audit=True, payloads=Counting())
    assert [*computed.values()] == [1, 1] and len(hashed) == 2
    for copy in COPIES:
        expected = payload(copy, source)
        rank = copy.destination_rank
        assert torch.equal(kept.values[rank].view(torch.uint8), expected.view(torch.uint8))
        assert part.shares[rank] == {"w": hash_slice(expected, BOX, BOX.shape)}
    codes = [kept.values[rank].view(torch.uint8) for rank in (0, 1)]
    assert not torch.equal(*codes)


def test_deltas_share_equal_contents_alone():
    deltas = Deltas(WeightsConfig(delta="auto"))
    payloads = Payloads()
    for version in range(2):
        source = weights(seed=version)
        payloads.begin({"x": source})
        changes = deltas.find(version - 1, COPIES, SHAPES, True, None, payloads)
        deltas.begin_write()
        if changes is None:
            deltas.keep(version, COPIES, None, payloads, declined=False)
    for copy in COPIES:
        expected = payload(copy, source)
        rank = copy.destination_rank
        assert changes.shares[rank] == {"w": hash_slice(expected, BOX, BOX.shape)}
        [(_, delta)] = changes.by_rank[rank]
        old = payload(copy, weights(seed=0)).view(torch.uint8).flatten()
        writing.spread(delta, old)
        assert torch.equal(old, expected.view(torch.uint8).flatten())


class InstantEngine:
    """Stands in for Mooncake's engine: keeps the runs, and all writes are complete at once."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int, int, int]] = []

    def batch_register_memory(self, addresses: object, sizes: object) -> int:
        return 0

    def transfer_submit_write(self, *run: object) -> int:
        self.runs.append(run)
        return 1

    def transfer_check_status(self, write: int) -> int:
        return 1


def test_mooncake_stages_equal_values_once_per_flush(monkeypatch):
    engine = InstantEngine()
    monkeypatch.setattr(mooncake, "open_engine", lambda host, protocol: engine)
    tensor = RemoteTensor("w", BOX.shape, "float8_e4m3fn", (256, 1))
    transport = mooncake.MooncakeTransport(0, timeout_s=20)
    transport.connect(
        [
            Endpoint(rank, "mooncake", f"tcp://127.0.0.1:{rank + 1}/0", 0, [tensor])
            for rank in range(4)
        ]
    )
    source = weights(seed=0)
    for _ in range(2):
        engine.runs.clear()
        send(transport, COPIES, {"x": source}, SHAPES, audit=False)
        sources = {peer: source for peer, source, _, _ in engine.runs}
        by_rows = [
            {sources[f"127.0.0.1:{rank + 1}"] for rank in ranks} for ranks in ((0, 2), (1, 3))
        ]
        assert len(engine.runs) == 4 and [len(addresses) for addresses in by_rows] == [1, 1]
        assert by_rows[0] != by_rows[1]
    transport.close()


@pytest.mark.parametrize("config", ["405b_aipo", "glm_4.6_aipo", "70b_aipo"])
def test_numbers_of_writes_are_those_of_the_lists(config):
    config = load_config(f"configs/{config}.yaml", [])
    spec = find_spec(config)
    source = trainer_layout(spec, trainer_topology(config.trainer), config.model.dtype)
    map = ReshardMap.build(source, engines_layout(config, spec, "cuda"))
    writes = map.rank_writes()
    assert writes.sum() == map.counts[1]
    for rank in {0, len(writes) - 1, int(writes.argmax()), int(writes.argmin())}:
        assert writes[rank] == len(map.writes_from(rank))
