"""What the controlling process can ask of an engine's workers, and what they answer. Typed MessagePack both ways."""

from __future__ import annotations

import msgspec

from megarl.reshard.forwarding import Relay
from megarl.weight_sync.transports.base import Endpoint, Offer, RemoteTensor


class _Command(msgspec.Struct, frozen=True, tag=True):
    pass


class Connect(_Command, frozen=True):
    """First of all commands: where answers go. The worker of TP rank r is generator rank `first_rank` + r. Answer: its Host."""

    first_rank: int
    reply_address: str  # of the run's hub
    connection: str  # what the workers' names at the hub end with: never used before, so that nobody hears engines that were lost
    key_file: str  # of its RunKey, readable by this user alone


class Describe(_Command, frozen=True):
    """Answer: list[RemoteTensor], every live parameter as the engine shows it."""


class Arrange(_Command, frozen=True):
    """From now on parameters are spoken of in these shapes where the engine shows the same memory in another one: by generator rank
    and name. (Quantised weights that it keeps transposed, scales.)"""

    shapes: dict[int, dict[str, tuple[int, ...]]]


class Open(_Command, frozen=True):
    """Opens the parameters to one transport. Answer: an Endpoint; None from a rank that is offered nothing."""

    kind: str  # of transport
    memory: str  # import path of its end in the worker
    offers: dict[int, Offer]  # by generator rank, of one engine: of a large run, all of them are too much to tell every one


class Spread(_Command, frozen=True):
    """What lands is written: puts it from landing memory into its parameters. Others may still be written meanwhile."""


class Receive(_Command, frozen=True):
    """Receives all messages expected of an update, straight into the live parameters."""


class MeetNeighbours(_Command, frozen=True):
    """Opens the way to other generator ranks, to which this one will pass tensors on."""

    endpoints: list[Endpoint]  # of those
    relays: dict[int, list[Relay]]  # by generator rank that passes on: of one engine
    timeout_s: float  # of passing on


class PassOn(_Command, frozen=True):
    """All is written: passes on what this rank leads. Answered when it is there: list[int], the generator ranks that could not be
    reached."""


class Watch(_Command, frozen=True):
    """What no update writes is noted, to be compared with each audit; asked again, nothing. Answer: Watched."""


class Recall(_Command, frozen=True):
    """Parameters are about to be written. Answer: Changes, of those that are no longer what the last audit found; none where nothing was
    audited since this was last asked."""


class Audit(_Command, frozen=True):
    """Answer: Found, the audit hash of every live parameter, and what has changed that no update writes."""

    version: int = -1  # that was written


class End(_Command, frozen=True):
    """What the engine holds is half-written, and it shall be started again: its processes end. Not answered."""


Command = Connect | Describe | Arrange | Open | Receive | Spread | MeetNeighbours | PassOn | Watch | Recall | Audit | End


class Watched(msgspec.Struct, frozen=True):
    """How much of a worker's memory no update writes, though it computes with it."""

    tensors: int
    bytes: int


class Changes(msgspec.Struct, frozen=True):
    """Tensors that are not what they were at the last audit, of version `since`; -1: at the start."""

    tensors: list[str]
    since: int


class Found(msgspec.Struct, frozen=True):
    """What lies in a worker's memory."""

    hashes: dict[str, int] = {}  # of parameters
    changes: Changes = Changes([], -1)


Description = list[RemoteTensor]
Opened = Endpoint | None
Unwritten = list[int]

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Command).decode
