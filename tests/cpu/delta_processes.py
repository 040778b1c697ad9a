"""A trainer rank as a bare process that makes optimizer steps, and sends the changes."""

from __future__ import annotations

import torch
from pair_processes import TIMEOUT_S, TrainerProcess, map_of, shards

from megarl.config.schema import WeightsConfig
from megarl.messaging.host import Host
from megarl.reshard.execute import AmaxTable, Payloads
from megarl.reshard.forwarding import RelayRule, relayed
from megarl.reshard.schedule import scheduled_writes
from megarl.weight_sync.transports.base import decode_endpoints
from megarl.weight_sync.transports.choice import PairwiseTransport
from megarl.weight_sync.writing import (
    Deltas,
    WrittenPart,
    landing_first,
    send,
    send_changes,
    shapes_of,
)


class DeltaTrainer(TrainerProcess):
    """Makes Adam's steps on float32 master weights, with noise as gradients."""

    def __init__(self, rank: int, case: str, lr: float):
        super().__init__(rank)
        self.map = map_of(case)
        self.copies = scheduled_writes(self.map, rank)
        self.model = shards(self.map.source, rank, seed=1)
        for name, values in self.model.items():
            if "norm" not in name:
                values.mul_(0.02)  # like a new model's
        self.masters = {name: values.float() for name, values in self.model.items()}
        self.adam = torch.optim.AdamW(self.masters.values(), lr=lr, weight_decay=0.01)
        self.deltas = Deltas(WeightsConfig(delta="auto", delta_refresh=1000))
        self.payloads = Payloads()
        self.version = 0

    def connect(self, setting: str, host: Host, endpoints: bytes, rule: RelayRule | None) -> None:
        if rule is not None:
            self.copies = scheduled_writes(relayed(self.map, rule)[0], self.rank)
        decoded = decode_endpoints(endpoints)
        self.shapes = shapes_of(decoded)
        self.parts = landing_first(self.copies, decoded)
        self.transport = PairwiseTransport(setting, host, self.rank, TIMEOUT_S)
        self.transport.connect(decoded)

    def step(self) -> None:
        for values in self.masters.values():
            values.grad = torch.randn(values.shape)
        self.adam.step()
        for name, values in self.model.items():
            values.copy_(self.masters[name])
        self.version += 1

    def find(self) -> tuple[int, int, int] | None:
        """(bytes of the delta, bytes of the changed elements, bytes of all elements)"""
        self.payloads.begin(self.model)
        self.changes = self.deltas.find(
            self.version - 1, self.copies, self.shapes, True, AmaxTable(), self.payloads
        )
        return (
            (sum(self.changes.sizes.values()), self.changes.changed_bytes, self.changes.full_bytes)
            if self.changes
            else None
        )

    def write_changes(self) -> dict[int, dict[str, int]]:
        self.deltas.begin_write()
        sent = send_changes(self.transport, self.changes, self.version, self.model)
        self.deltas.keep_changes(self.version, self.changes)
        return sent.shares

    def write_all(self, keeps: bool) -> list[dict[int, dict[str, int]]]:
        sent = [self.write_part(part) for part in (0, 1)]
        if keeps:
            self.deltas.keep(self.version, self.copies, AmaxTable(), self.payloads, declined=False)
        return [update.shares for update in sent]

    def write_part(self, part: int) -> WrittenPart:
        return send(
            self.transport,
            self.parts[part],
            self.model,
            self.shapes,
            True,
            AmaxTable(),
            self.payloads,
        )
