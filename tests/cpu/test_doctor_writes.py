"""`megarl doctor`'s test write, by every transport that two processes on CPUs can use.

On GPUs the same code runs with other devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.launch.trial_writes import DTYPE, model, ring, write
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.engine_process import EngineProcess
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY

MISSING = pytest.mark.skipif(not mooncake.imports(), reason="Mooncake does not import")
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def map() -> ReshardMap:
    layout = generator_layout(model(gpu=False), GeneratorTopology(), DTYPE, "cpu")
    return ReshardMap.build(trainer_layout(model(gpu=False), TrainerTopology(), DTYPE), layout)


@pytest.fixture(scope="module")
def neighbour(map: ReshardMap) -> Iterator[EngineProcess]:
    with EngineProcess("cpu", map.destination, TIMEOUT_S) as process:
        yield process


@pytest.mark.parametrize("kind", [SHARED_MEMORY, pytest.param(MOONCAKE, marks=MISSING), GLOO])
def test_what_is_written_arrives(kind: str, map: ReshardMap, neighbour: EngineProcess) -> None:
    size, rate = write(kind, "cpu", map, neighbour)
    assert 15 << 20 < size < 17 << 20 and rate > 0


def test_a_write_that_brings_something_else_fails(
    map: ReshardMap, neighbour: EngineProcess
) -> None:
    with pytest.raises(
        AuditError, match=r"model\.norm\.weight on generator rank 0 is not what trainer rank 0 sent"
    ):
        write("losing_transport:LosingTransport", "cpu", map, neighbour)


def test_a_step_that_fails_there_is_told_here(neighbour: EngineProcess) -> None:
    with pytest.raises(
        RuntimeError,
        match="the engine's process failed at 'open':(.|\\n)*weights.transport=nowhere",
    ):
        neighbour.ask("open", "nowhere")


def test_a_process_that_is_gone_is_told(map: ReshardMap) -> None:
    with EngineProcess("cpu", map.destination, TIMEOUT_S) as process:
        process._process.kill()
        process._process.join(TIMEOUT_S)
        with pytest.raises(
            RuntimeError, match="the engine's process ended at 'hashes', with status -9"
        ):
            process.ask("hashes")


def test_each_gpu_writes_to_the_next() -> None:
    assert ring(["cuda:0"]) == [("cuda:0", "cuda:0")]
    assert ring(["cuda:0", "cuda:1", "cuda:2"]) == [
        ("cuda:0", "cuda:1"),
        ("cuda:1", "cuda:2"),
        ("cuda:2", "cuda:0"),
    ]


@pytest.mark.parametrize(("gpu", "size_bytes"), [(True, 1 << 30), (False, 16 << 20)])
def test_the_weights_are_as_large_as_is_said(gpu: bool, size_bytes: int) -> None:
    layout = generator_layout(model(gpu), GeneratorTopology(), DTYPE, "cuda")
    assert abs(sum(kind.bytes for kind in layout.kinds) - size_bytes) < size_bytes / 50
