"""A process that has only the parameters of an engine, to test or time direct writes without
SGLang.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from megarl.base.processes import end_with_parent
from megarl.kernels.audit import hash_tensors
from megarl.messaging.host import Host
from megarl.reshard.layout import Layout
from megarl.weight_sync.transports.base import LiveParameters, Memory, Offer
from megarl.weight_sync.transports.choice import transport_class


class EngineProcess:
    """A handle to that process, which is generator rank 0, for the process that writes.

    A context manager: leaving it ends the process.
    """

    def __init__(self, device: str, layout: Layout, timeout_s: float):
        context = multiprocessing.get_context("spawn")
        self._timeout_s = timeout_s
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_pipe, os.getpid(), device, layout), daemon=True
        )
        self._process.start()
        child_pipe.close()

    def start(self, method: str, *arguments: Any) -> None:
        """Makes the process call a method of EngineMemory."""
        self._method = method
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `answer` will report it
            self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """The method's result.

        Raises TimeoutError, or RuntimeError with the error of the other process.
        """
        if not self._pipe.poll(self._timeout_s):
            raise TimeoutError(
                f"the engine's process did not answer {self._method!r} within "
                f"{self._timeout_s:.0f} s"
            )
        try:
            succeeded, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(1.0)
            raise RuntimeError(
                f"the engine's process ended at {self._method!r}, with status "
                f"{self._process.exitcode}"
            ) from error
        if not succeeded:
            raise RuntimeError(f"the engine's process failed at {self._method!r}:\n{answer}")
        return answer

    def ask(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.answer()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(10)


class EngineMemory:
    """The content of the process: the parameters of generator rank 0."""

    def __init__(self, device: str, layout: Layout):
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        tensors = {}
        for t in layout.tensors(0):
            tensors[t.name] = torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=device)
        self.parameters: dict[str, Any] = {
            name: torch.nn.Parameter(values, requires_grad=False)
            for name, values in tensors.items()
        }
        self.memory: Memory

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.parameters.items()}

    def open(self, kind: str, offer: Offer = Offer(), address: str = "") -> str:
        """Opens the parameters to one kind of transport instead of the previous one.

        Returns the encoded Endpoint.
        """
        self.memory = transport_class(kind).memory()
        return self.memory.open(
            LiveParameters(0, kind, Host(), address, self.parameters, self.tensors), offer
        ).encode()

    def receive(self) -> None:
        self.memory.receive(self.tensors())

    def spread(self) -> None:
        self.memory.spread()

    def scramble(self) -> None:
        for values in self.tensors().values():
            values.view(torch.uint8).fill_(1)

    def hashes(self) -> dict[str, int]:
        return hash_tensors(self.tensors())


def _serve(pipe: Connection, parent: int, device: str, layout: Layout) -> None:
    end_with_parent(parent)
    memory: EngineMemory | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            memory = memory or EngineMemory(device, layout)
            answer = getattr(memory, method)(*arguments)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            pipe.send((True, answer))
        except Exception:
            pipe.send((False, traceback.format_exc()))
