"""Changes a tensor in a live engine's memory while it serves, as a stray kernel, a faulty chip or
another program might.

Every engine of the tests has `arm` as a further custom weight loader. Within a session it starts a
thread in each worker. Later, when no session is open, that thread works unnoticed.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import torch
from weights_worker import DEADLINE_S

from megarl.generator.client import content_of, tensor_payload
from megarl.weight_sync.engine import watch

LOADER = "pokes.arm"
FLIP = "flip"
REPLACE = "replace"  # flip a bit in place; replace the tensor by a copy with a flipped bit


class Poke(msgspec.Struct, frozen=True):
    name: str
    rank: int  # TP rank
    action: str
    offset: int  # in bytes
    trigger: str


def arm(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """In a worker: SGLang's contract of a custom weight loader."""
    from sglang.srt.runtime_context import get_parallel

    poke = msgspec.json.decode(content_of(named_tensors), type=Poke)
    if poke.rank == get_parallel().tp_rank:
        Thread(target=_wait_and_do, args=(model, poke), daemon=True).start()


def _wait_and_do(model: torch.nn.Module, poke: Poke) -> None:
    trigger = Path(poke.trigger)
    while not trigger.exists():
        time.sleep(0.005)
    tensors = {
        **dict(model.named_parameters()),
        **{name: values for name, values, _ in watch._tensors(model)},
    }
    values = tensors[poke.name].detach()
    if poke.action == REPLACE:
        module, _, qualified_name = poke.name.rpartition(".")
        values = values.clone()
        setattr(model.get_submodule(module), qualified_name, values)
    byte = ctypes.c_ubyte.from_address(values.data_ptr() + poke.offset)  # without torch
    byte.value ^= 4
    trigger.unlink()


def poke(
    generator: Any, folder: Path, name: str, rank: int = 0, action: str = FLIP, offset: int = 5
) -> None:
    """Changes the tensor before it returns. A second call restores a flipped bit."""
    trigger = folder / "poke"
    payload = tensor_payload(msgspec.json.encode(Poke(name, rank, action, offset, str(trigger))))
    body = {
        "serialized_named_tensors": [payload] * generator.engine.tp,
        "load_format": LOADER,
        "flush_cache": False,
    }
    client = generator.client
    generator.run(client.begin_update(DEADLINE_S))
    generator.run(client.call("/update_weights_from_tensor", body, DEADLINE_S))
    generator.run(client.end_update(DEADLINE_S))
    trigger.touch()
    deadline = time.monotonic() + DEADLINE_S
    while trigger.exists():
        assert time.monotonic() < deadline, f"{name}: nobody has changed it"
        time.sleep(0.005)
