"""The commands that the generator sends to its engines' workers, and their answers. Typed MessagePack both ways."""

from __future__ import annotations

import msgspec

from megarl.reshard.forwarding import Relay
from megarl.weight_sync.transports.base import Offer, Packed, RemoteTensor


class _Command(msgspec.Struct, frozen=True, tag=True):
    pass


class Connect(_Command, frozen=True):
    """The first command: says where answers go. The worker of TP rank r is generator rank `first_rank` + r. Answer: its Host."""

    first_rank: int
    reply_address: str  # of the run's hub
    connection: str  # suffix of the workers' names at the hub; never used before, so that answers of lost engines are ignored
    key_file: str  # of its RunKey, readable by this user alone


class Describe(_Command, frozen=True):
    """Answer: Description, every live parameter as the engine shows it; None if the digest of their forms is `known[generator rank]`."""

    known: dict[int, bytes] = {}


class Arrange(_Command, frozen=True):
    """Gives parameters another shape over the same memory, for all later commands: by generator rank and name. The engine keeps some
    quantised weights transposed, and shapes some scales differently from the reshard map."""

    shapes: dict[int, dict[str, tuple[int, ...]]]


class Open(_Command, frozen=True):
    """Opens the parameters to one transport. Answer: a Packed endpoint, or None from a rank that is offered nothing."""

    kind: str  # of transport
    memory: str  # import path of its end in the worker
    offers: dict[int, Offer]  # by generator rank, of one engine only: a large run has too many to send them all to everyone
    known: dict[int, bytes] = {}  # by generator rank: the digest of forms that need not be answered


class Spread(_Command, frozen=True):
    """Copies the boxes that have landed into their parameters. Other boxes may still be written meanwhile.

    With `changes_to`, the changes that lead to that version have landed instead (weights.delta), all of them."""

    changes_to: int = -1
    adapters: bool = False  # only those of adapters


class Receive(_Command, frozen=True):
    """Receives all messages of one update, straight into the live parameters; with `changes_to`, the changes that lead to that version."""

    changes_to: int = -1
    adapters: bool = False  # only adapters come


class MeetNeighbours(_Command, frozen=True):
    """Opens the way to other generator ranks, to which this one will pass tensors on."""

    endpoints: bytes  # of the ranks that are passed on to, as `decode_endpoints` reads them
    relays: dict[int, list[Relay]]  # by generator rank that passes on, of one engine only
    timeout_s: float  # of passing on


class PassOn(_Command, frozen=True):
    """Passes on the tensors that this rank leads, once all of them are written. Answered when they have arrived: list[int], the
    generator ranks that could not be reached."""

    adapters: bool = False  # only those of adapters


class Watch(_Command, frozen=True):
    """Hashes the tensors that no update writes, for every audit to compare. Rehearses the post-load work of an update, which makes some of
    them. Does nothing when sent again. Answer: Watched."""


class Inventory(_Command, frozen=True):
    """After Watch. Answer: list[Held], all memory of a worker; empty from ranks that are not asked."""

    ranks: list[int]


class Recall(_Command, frozen=True):
    """Sent before parameters are written. Answer: Changes, the parameters that have changed since the last audit. It is empty when
    nothing has been audited since the last Recall. If no update will follow, `unwritten` asks for the tensors that no update writes too."""

    unwritten: bool = False


class Audit(_Command, frozen=True):
    """Answer: Found."""

    version: int = -1  # that was written


class Hashes(_Command, frozen=True):
    """Answer: bytes, the audit hash of every live parameter as the last Audit found it (audit.packed)."""


class End(_Command, frozen=True):
    """Ends the engine's processes, so that it is started again, because its weights are half-written. Not answered."""


Command = (
    Connect | Describe | Arrange | Open | Receive | Spread | MeetNeighbours | PassOn | Watch | Inventory | Recall | Audit | Hashes | End
)


WRITTEN = "written"  # by each update, and compared with what was sent
DERIVED = "derived"  # made again after each update, of what was written
CONSTANT = "constant"  # as before the first weight was loaded; each audit compares its hash
WORKING = "working"  # made by forward passes, so not watched
UNPROVEN = "unproven"  # made while weights were loaded, and not again by updates: perhaps a copy of old weights
OUTSIDE = "outside"  # nothing in the model leads to it, so not watched; as before the first weight was loaded
UNPROVEN_OUTSIDE = "unproven outside"  # the same, but made or changed while weights were loaded
KINDS = (WRITTEN, DERIVED, CONSTANT, WORKING, UNPROVEN, OUTSIDE, UNPROVEN_OUTSIDE)


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a worker's memory, listed by its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: str
    detail: str  # of a constant, its hash (megarl.kernels.audit); of other memory, what made it, and when


class Watched(msgspec.Struct, frozen=True):
    """How much memory a worker computes with that no update writes. Of workers with equal digests, one can list its memory for all."""

    digest: bytes  # of the inventory
    tensors: int
    tensor_bytes: int


class Changes(msgspec.Struct, frozen=True):
    """Tensors that have changed since the last audit, which was of version `since` (-1: since the start)."""

    tensors: list[str]
    since: int


class Found(msgspec.Struct, frozen=True):
    """The state of a worker's memory: the audit hashes of live parameters, and the changes among the tensors that no update writes."""

    digest: bytes = b""  # of what Hashes answers
    changes: Changes = Changes([], -1)


Description = list[RemoteTensor] | None
Opened = Packed | None
Unwritten = list[int]

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Command).decode
