"""Our end inside every TP worker of an engine: the custom weight loader that SGLang calls with the live model.

What SGLang hands over as a named tensor is a typed command (see `commands`). An exception that left `run_command` would end
the engine, so each is caught here, once, and travels back as the answer.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Optional

import msgspec
import torch

from megarl.messaging.link import Peer, RunKey
from megarl.messaging.messages import WorkerReply
from megarl.generator import commands
from megarl.generator.commands import Audit, Command, Connect, Describe, ExpectMessages, Incoming, Receive, Register, ShareMemory, Spread
from megarl.generator.wire import content_of
from megarl.reshard.audit import hash_tensor
from megarl.reshard.box import Box
from megarl.transports import gloo, mooncake, shared_memory
from megarl.transports.base import GLOO, MOONCAKE, SHARED_MEMORY, Endpoint, Landing, RemoteTensor


class Worker:
    """State of one TP worker between commands."""

    def __init__(self) -> None:
        self.rank = -1  # generator rank
        self.peer: Optional[Peer] = None
        self.memory: Optional[torch.UntypedStorage] = None
        self.memory_file = -1  # kept open: the file lives as long as this process
        self.expected: Optional[ExpectMessages] = None
        self.group: Any = None
        self.engine: Any = None  # Mooncake's
        self.landed: list[tuple[Incoming, torch.Tensor]] = []  # a box, and the landing memory for it

    def run(self, model: torch.nn.Module, command: Command) -> None:
        """Executes a command and sends the answer."""
        error, payload = "", b""
        try:
            if isinstance(command, Connect):
                self.connect(command)
            payload = msgspec.msgpack.encode(_HANDLERS[type(command)](self, dict(model.named_parameters()), command))
        except Exception:
            error = traceback.format_exc()
            print(error, file=sys.stderr, flush=True)  # in the engine's log too, in case the answer does not get through
        if self.peer is not None:
            self.peer.send(WorkerReply(self.rank, type(command).__name__, error, payload))

    def connect(self, command: Connect) -> None:
        if self.peer is not None:
            self.peer.close()
        self.rank = command.first_rank + _tp_rank()
        self.peer = Peer(f"engine.{self.rank}", RunKey.load(Path(command.key_file)), command.reply_address)

    def describe(self, parameters: dict[str, torch.nn.Parameter], command: Command) -> list[RemoteTensor]:
        return [describe(name, parameter) for name, parameter in parameters.items()]

    def share_memory(self, parameters: dict[str, torch.nn.Parameter], command: ShareMemory) -> Endpoint:
        """Moves whole storages, so that parameters which share one go on sharing it."""
        storages = {parameter.data_ptr(): parameter.untyped_storage() for parameter in parameters.values()}
        storages = {storage.data_ptr(): storage for storage in storages.values()}
        offsets, total = shared_memory.aligned_offsets(storage.nbytes() for storage in storages.values())
        offset_of = dict(zip(storages, offsets))
        # An anonymous file: no name in /dev/shm that a killed engine would leave behind, and no limit on /dev/shm's size.
        # Others reach it through /proc, which admits only this user.
        self.memory_file = os.memfd_create("megarl-weights")
        os.posix_fallocate(self.memory_file, 0, total)  # too little memory is an error now, not a SIGBUS at the first write
        address = f"/proc/{os.getpid()}/fd/{self.memory_file}"
        self.memory = torch.UntypedStorage.from_file(address, shared=True, nbytes=total)
        tensors = []
        for name, parameter in parameters.items():
            offset = offset_of[parameter.untyped_storage().data_ptr()] + parameter.storage_offset() * parameter.itemsize
            place = msgspec.structs.replace(describe(name, parameter), offset_bytes=offset)
            moved = shared_memory.view_at(self.memory, place)
            moved.copy_(parameter.data)
            tensors.append((parameter, moved, place))
        for parameter, moved, _ in tensors:
            parameter.data = moved
        return Endpoint(self.rank, SHARED_MEMORY, address, total, [place for _, _, place in tensors])

    def expect_messages(self, parameters: dict[str, torch.nn.Parameter], command: ExpectMessages) -> Endpoint:
        self.expected = command
        return Endpoint(self.rank, GLOO, command.address, 0, self.describe(parameters, command))

    def receive(self, parameters: dict[str, torch.nn.Parameter], command: Receive) -> None:
        expected = self.expected
        if expected is None:
            raise RuntimeError("Receive before ExpectMessages")
        trainers = expected.group_size - len(expected.incoming)
        if self.group is None:
            self.group = gloo.join(expected.address, trainers + self.rank, expected.group_size, expected.timeout_s)
        pending = []
        for message in expected.incoming[self.rank]:
            target = parameters[message.tensor].data[box_of(message)]
            pending.append((message, target, *gloo.receive(self.group, target, message.source_rank)))
        for message, target, work, buffer in pending:
            whence = f"trainer rank {message.source_rank} to generator rank {self.rank}, {message.tensor}"
            gloo.wait(work, expected.timeout_s, whence)
            if buffer is not target:
                target.copy_(buffer)

    def register(self, parameters: dict[str, torch.nn.Parameter], command: Register) -> Endpoint:
        """Parameters must stay where they are from now on."""
        protocol = command.protocol or mooncake.default_protocol()
        self.engine = mooncake.open_engine(command.host, protocol, command.timeout_s)
        self.landed, landings = [], []
        sizes = [math.prod(box.shape) * parameters[box.tensor].itemsize for box in command.landing[self.rank]]
        offsets, total = shared_memory.aligned_offsets(sizes)
        device = next(iter(parameters.values())).device
        landing = torch.empty(max(1, total), dtype=torch.uint8, device=device)
        storages = [parameter.untyped_storage() for parameter in parameters.values()] + [landing.untyped_storage()]
        blocks = {storage.data_ptr(): storage.nbytes() for storage in storages}
        mooncake.register(self.engine, list(blocks.items()))
        base = min(blocks)
        for box, offset, size in zip(command.landing[self.rank], offsets, sizes):
            place = landing[offset : offset + size].view(parameters[box.tensor].dtype).view(box.shape)
            self.landed.append((box, place))
            landings.append(Landing(box.tensor, box.start, place.data_ptr() - base))
        tensors = [
            msgspec.structs.replace(describe(name, parameter), offset_bytes=parameter.data_ptr() - base)
            for name, parameter in parameters.items()
        ]
        address = mooncake.address_of(command.host, self.engine, protocol, base)
        return Endpoint(self.rank, MOONCAKE, address, sum(blocks.values()), tensors, landings)

    def spread(self, parameters: dict[str, torch.nn.Parameter], command: Spread) -> None:
        for box, place in self.landed:
            parameters[box.tensor].data[box_of(box)].copy_(place)

    def audit(self, parameters: dict[str, torch.nn.Parameter], command: Audit) -> dict[str, int]:
        return {name: hash_tensor(parameter.data) for name, parameter in parameters.items()}


_HANDLERS: dict[type, Callable[[Worker, dict[str, torch.nn.Parameter], Any], Any]] = {
    Connect: lambda worker, parameters, command: None,
    Describe: Worker.describe,
    ShareMemory: Worker.share_memory,
    ExpectMessages: Worker.expect_messages,
    Receive: Worker.receive,
    Register: Worker.register,
    Spread: Worker.spread,
    Audit: Worker.audit,
}

_worker = Worker()  # SGLang knows the loader by its import path alone: its state has nowhere else to live


def run_command(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """The loader itself, by SGLang's contract."""
    _worker.run(model, commands.decode(content_of(named_tensors)))


def describe(name: str, parameter: torch.Tensor) -> RemoteTensor:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return RemoteTensor(name, tuple(parameter.shape), dtype, tuple(parameter.stride()))


def box_of(message: Incoming) -> tuple[slice, ...]:
    return Box(message.start, message.shape).slices()


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank
