"""A small model, its reshard map between two sides, and all copies of the map."""

from __future__ import annotations

from typing import Any

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import ModelSpec
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import Copy, ReshardMap

TINY = ModelSpec("llama", 4, 12, 16, 8, 4, 2, 100, 64, False, 1e-6, 1e4)
LLAMA_405B = ModelSpec("llama", 126, 16384, 53248, 128, 8, 128, 128256, 131072, False, 1e-5, 5e5)


def tiny_map(
    spec=TINY,
    tp=2,
    pp=2,
    dp=2,
    cp=1,
    engines=2,
    generator_tp=4,
    source="float32",
    wire="bfloat16",
    norms="local",
) -> ReshardMap:
    trainer = trainer_layout(spec, TrainerTopology(tp=tp, pp=pp, dp=dp, cp=cp), source, norms)
    return ReshardMap.build(
        trainer, generator_layout(spec, GeneratorTopology(engines, generator_tp), wire)
    )


def all_copies(map: ReshardMap) -> list[Copy]:
    return [copy for rank in range(map.source.world_size) for copy in map.copies_from(rank)]


class Discard:
    """A transport to nowhere."""

    unwritten = ()

    def connect(self, endpoints: Any) -> None: ...

    def prepare(self, sources: Any) -> None: ...

    def write(self, copy: Any, values: Any) -> None: ...

    def write_changes(self, rank: int, changes: Any, version: int) -> None: ...

    def fence(self) -> None: ...

    def room(self, rank: int) -> float:
        return 0

    def close(self) -> None: ...
