"""Trainer ranks and engine workers as bare processes: the real transports, commands and worker-side
code, without Megatron and SGLang.

The test declares the host of each process, so that one machine can play several hosts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from remote_object import RemoteObject

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.messaging.host import Host
from megarl.models import ModelSpec
from megarl.models.experts import Experts
from megarl.reshard.forwarding import RelayRule, relayed
from megarl.reshard.layout import Layout, generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.schedule import scheduled_writes
from megarl.weight_sync import commands
from megarl.weight_sync.transports.base import decode_endpoints
from megarl.weight_sync.transports.choice import PairwiseTransport
from megarl.weight_sync.writing import send, shapes_of

SPEC = ModelSpec("llama", 3, 64, 192, 16, 4, 2, 500, 64, False, 1e-6, 1e4)
TRAINERS = 2
ENGINES = 3
TIMEOUT_S = 60.0


class Case(NamedTuple):
    spec: ModelSpec
    trainer_dtype: str
    engine_dtype: str
    quantization: str | None = None
    trainer: TrainerTopology = TrainerTopology(tp=TRAINERS)


STAGES = TrainerTopology(pp=TRAINERS)  # no tile is cut, so no amax is exchanged
WIDE = {
    "num_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_kv_heads": 4,
    "head_dim": 128,
}
MOE = {"experts": Experts(count=4, per_token=2, intermediate_size=256)}
CASES = {
    "plain": Case(SPEC, "float32", "bfloat16"),
    "float32": Case(SPEC, "float32", "float32"),
    "bfloat16": Case(SPEC, "bfloat16", "bfloat16"),
    "fp8_block": Case(replace(SPEC, **WIDE), "bfloat16", "bfloat16", "fp8_block", STAGES),
    "fp8_channel-experts": Case(
        replace(SPEC, **WIDE, **MOE, family="qwen3_moe"),
        "bfloat16",
        "bfloat16",
        "fp8_channel",
        STAGES,
    ),
}


def map_of(case: str = "plain") -> ReshardMap:
    """The map from two trainer ranks to three engines of one rank."""
    source = trainer_layout(CASES[case].spec, CASES[case].trainer, CASES[case].trainer_dtype)
    return ReshardMap.build(source, engines_layout(case))


def engines_layout(case: str) -> Layout:
    spec, _, dtype, quantization, _ = CASES[case]
    return generator_layout(spec, GeneratorTopology(engines=ENGINES), dtype, "cpu", quantization)


plain_map = map_of


def shards(layout: Layout, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of one rank, cut out of the same random model on both sides. Padding is zero."""
    ends: dict[str, tuple[int, ...]] = {}
    for tensor in layout.tensors(rank) + layout.tensors(layout.world_size - 1):
        for piece in tensor.pieces:
            ends.setdefault(piece.logical_name, piece.logical.end)
            ends[piece.logical_name] = tuple(map(max, ends[piece.logical_name], piece.logical.end))
    model = {}
    for name, shape in ends.items():
        model[name] = torch.randn(
            shape, generator=torch.Generator().manual_seed(seed + sum(map(ord, name)))
        )
    result = {}
    for tensor in layout.tensors(rank):
        values = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for piece in tensor.pieces:
            values[piece.local.slices()] = model[piece.logical_name][piece.logical.slices()]
        result[tensor.name] = values
    return result


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


class TrainerProcess:
    """One trainer rank."""

    def __init__(self, rank: int):
        torch.set_num_threads(1)
        self.rank = rank

    def connect(self, setting: str, host: Host, endpoints: bytes, rule: RelayRule | None) -> None:
        map = plain_map()
        if rule is not None:
            map, _ = relayed(map, rule)
        self.map = map
        self.layout = map.source
        decoded = decode_endpoints(endpoints)
        self.shapes = shapes_of(decoded)
        self.transport = PairwiseTransport(setting, host, self.rank, TIMEOUT_S)
        self.transport.connect(decoded)

    def write(self, seed: int) -> tuple[Counter[int], dict[int, dict[str, int]]]:
        """Writes one update. Returns the bytes by generator rank, and the shares."""
        writes = scheduled_writes(self.map, self.rank)
        sent = send(
            self.transport, writes, shards(self.layout, self.rank, seed), self.shapes, audit=True
        )
        by_rank: Counter[int] = Counter()
        for write in writes:
            by_rank[write.destination_rank] += write.bytes
        assert sent.bytes == by_rank.total()
        return by_rank, sent.shares

    def close(self) -> None:
        self.transport.close()


class Model(torch.nn.Module):
    """Only the parameters of an engine's model, filled with noise."""

    def __init__(self, rank: int, case: str):
        super().__init__()
        for tensor in engines_layout(case).tensors(rank):  # under dotted names, like nested modules
            values = torch.randn(tensor.shape).to(getattr(torch, tensor.dtype))
            self._parameters[tensor.name] = torch.nn.Parameter(values, requires_grad=False)


class EngineWorker:
    """The only worker of an engine, driven by encoded commands like the loader."""

    def __init__(self, rank: int, case: str = "plain"):
        from megarl.weight_sync.engine.loader import EngineWorker

        torch.set_num_threads(1)
        self.host = Host()
        self.worker = EngineWorker(lambda: 0, lambda: self.host)
        self.model = Model(rank, case)

    def move_to(self, host: Host) -> None:
        self.host = host

    def command(self, encoded: bytes) -> None:
        self.worker.run(self.model, commands.decode(encoded))

    def scramble(self) -> None:
        for _, parameter in self.model.named_parameters():
            parameter.data.view(torch.uint8).random_(0, 120)

    def memory(self) -> dict[str, np.ndarray]:
        return {name: bits(parameter.data) for name, parameter in self.model.named_parameters()}


class PipedEngine:
    """The part of an EngineClient that Workers needs, for an EngineWorker."""

    url = "engine://piped"

    def __init__(self, process: RemoteObject):
        self.process = process
        self.commands = 0

    async def command(
        self, encoded: bytes, tp: int, timeout_s: float, empty_cache: bool = False
    ) -> None:
        self.process.start("command", encoded)
        self.commands += 1

    def settle(self) -> None:
        """Reads the pipe's answers to the commands.

        The commands' own answers came through the hub.
        """
        while self.commands:
            self.process.result()
            self.commands -= 1
