"""What the controlling process can ask of an engine's workers, and what they answer. Typed MessagePack both ways."""

from __future__ import annotations

from typing import Optional, Union

import msgspec

from megarl.transports.base import RemoteTensor


class _Command(msgspec.Struct, frozen=True, tag=True):
    pass


class Connect(_Command, frozen=True):
    """First of all commands: where answers go. The worker of TP rank r is generator rank `first_rank` + r."""

    first_rank: int
    reply_address: str  # of the run's hub
    key_file: str  # of its RunKey, readable by this user alone


class Describe(_Command, frozen=True):
    """Answer: list[RemoteTensor], every live parameter."""


class ShareMemory(_Command, frozen=True):
    """Moves all parameters into one memory file. Answer: an Endpoint."""


class ExpectMessages(_Command, frozen=True):
    """Gets ready to receive over gloo. Answer: an Endpoint. `incoming[generator rank]` is in the order of the reshard map."""

    address: str  # see transports.gloo.address_of
    group_size: int
    incoming: dict[int, list[Incoming]]
    timeout_s: float


class Register(_Command, frozen=True):
    """Opens all parameters to one-sided writes by Mooncake, where they lie. Answer: an Endpoint."""

    host: str  # to listen on
    protocol: Optional[str]  # tcp | rdma; None: see transports.mooncake
    landing: dict[int, list[Incoming]]  # by generator rank: the boxes that are to be written in one piece and then spread
    timeout_s: float


class Spread(_Command, frozen=True):
    """Everything is written: puts what lies in landing memory into the parameters."""


class Incoming(msgspec.Struct, frozen=True, array_like=True):
    """One message: from `source_rank` of the trainer, into the box start .. start + shape of `tensor`."""

    source_rank: int
    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Receive(_Command, frozen=True):
    """Receives all expected messages, straight into the live parameters."""


class Audit(_Command, frozen=True):
    """Answer: dict[str, int], the audit hash of every live parameter."""


Command = Union[Connect, Describe, ShareMemory, ExpectMessages, Receive, Register, Spread, Audit]

Description = list[RemoteTensor]
Hashes = dict[str, int]

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Command).decode
