"""What several engines get of one sender is computed and hashed once; what differs is not taken for
equal.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch

from megarl.base.geometry import Box
from megarl.config.load import load_config
from megarl.config.schema import WeightsConfig
from megarl.kernels.audit import hash_slice
from megarl.kernels.quantise_rules import BLOCK, CHANNEL
from megarl.plan.resolve import find_spec
from megarl.plan.topologies import engines_layout, trainer_topology
from megarl.reshard.execute import Payloads, payload
from megarl.reshard.layout import trainer_layout
from megarl.reshard.map import Copy, Quantisation, ReshardMap
from megarl.weight_sync import writing
from megarl.weight_sync.writing import Deltas, content_of, send

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


def test_precisions_are_different_contents():
    """Their codes have one dtype and one shape."""
    copy = copy_to(0)
    by_channel = msgspec.structs.replace(copy.quantisation, rule=CHANNEL)
    other = msgspec.structs.replace(copy, quantisation=by_channel)
    assert content_of(copy) != content_of(other)
    to_another_rank = msgspec.structs.replace(copy, destination_rank=9)
    assert content_of(copy) == content_of(to_another_rank)


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
