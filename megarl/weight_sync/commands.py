"""The commands that the generator sends to its engines' workers, and their answers.

Typed MessagePack both ways.
"""

from __future__ import annotations

import msgspec

from megarl.reshard.forwarding import Relay
from megarl.weight_sync.transports.base import Offer, PackedEndpoint, RemoteTensor

WRITTEN = "written"  # written by each update, and compared with what was sent
DERIVED = "derived"  # derived again from the weights after each update
# unchanged since before the first weight was loaded; each audit compares its hash
CONSTANT = "constant"
WORKING = "working"  # made by forward passes, so not watched
# made while weights were loaded and not again by updates: perhaps a copy of old weights
UNPROVEN = "unproven"
# not reachable from the model, so not watched; unchanged since before the first weight was loaded
OUTSIDE = "outside"
# not reachable from the model; made or changed while weights were loaded
UNPROVEN_OUTSIDE = "unproven outside"
KINDS = (WRITTEN, DERIVED, CONSTANT, WORKING, UNPROVEN, OUTSIDE, UNPROVEN_OUTSIDE)
Description = list[RemoteTensor] | None
OpenedMemory = PackedEndpoint | None
UnreachedRanks = list[int]
encode = msgspec.msgpack.Encoder().encode


class _Command(msgspec.Struct, frozen=True, tag=True):
    pass


class Connect(_Command, frozen=True):
    """The first command: where to send answers.

    The worker of TP rank r is generator rank `first_rank` + r. Answer: its Host.
    """

    first_rank: int
    reply_address: str  # of the run's hub
    # suffix of the workers' names at the hub, unique, so that answers of lost engines are ignored
    connection: str
    key_file: str  # file of the hub's RunKey, which only this user can read


class Describe(_Command, frozen=True):
    """Answer: every live parameter in the engine's form; None if the digest of their forms is
    `known[generator rank]`.
    """

    known: dict[int, bytes] = {}


class Arrange(_Command, frozen=True):
    """Gives parameters another shape over the same memory for all later commands: generator rank ->
    name -> shape. The engine keeps some quantised weights transposed, and some scales in other
    shapes than the reshard map.
    """

    shapes: dict[int, dict[str, tuple[int, ...]]]


class Open(_Command, frozen=True):
    """Opens the parameters to one transport.

    Answer: a PackedEndpoint, or None from a rank without an offer.
    """

    kind: str  # kind of transport
    memory: str  # import path of its end in the worker
    # generator rank -> offer, of one engine only, since a large run has too many to send them all
    # to everyone
    offers: dict[int, Offer]
    known: dict[int, bytes] = {}  # generator rank -> digest of forms that need not be sent back


class Spread(_Command, frozen=True):
    """Copies boxes from landing memory into their parameters.

    Other boxes may still be written meanwhile.

    With `changes_to`, landing memory has the complete changes that lead to that version
    (weights.delta).
    """

    changes_to: int = -1
    adapters: bool = False  # only boxes of adapters


class Receive(_Command, frozen=True):
    """Receives all messages of one update, directly into live parameters.

    With `changes_to`, receives the changes that lead to that version.
    """

    changes_to: int = -1
    adapters: bool = False  # the update has only adapters


class ConnectRelays(_Command, frozen=True):
    """Connects to the generator ranks that this one will pass tensors on to."""

    endpoints: bytes  # of the ranks that receive relays; decoded by `decode_endpoints`
    relays: dict[int, list[Relay]]  # passing generator rank -> its relays, of one engine only
    timeout_s: float  # deadline of passing on


class PassOn(_Command, frozen=True):
    """Passes on the tensors that this rank leads, once all of them are written.

    Answered when they have arrived: list[int], the generator ranks that could not be reached.
    """

    adapters: bool = False  # only tensors of adapters


class Watch(_Command, frozen=True):
    """Hashes the tensors that no update writes, to be compared in every audit.

    Also rehearses the post-load work of an update, which creates some of them. Does nothing when
    repeated. Answer: WatchedMemory.
    """


class Inventory(_Command, frozen=True):
    """Sent after Watch.

    Answer: list[MemoryEntry], all memory of a worker; empty from ranks that are not asked.
    """

    ranks: list[int]


class Recall(_Command, frozen=True):
    """Sent before parameters are written.

    Answer: Changes, the parameters that have changed since the last audit. Empty if there was no
    audit since the last Recall. If no update will follow, `unwritten` also asks for the tensors
    that no update writes.
    """

    unwritten: bool = False


class Audit(_Command, frozen=True):
    """Answer: AuditResult."""

    version: int = -1  # the version that was written


class SendHashes(_Command, frozen=True):
    """Answer: bytes, the audit hashes of all live parameters from the last Audit (audit.packed)."""


class EmptyCache(_Command, frozen=True):
    """The last command of an update: SGLang then forgets the keys and values of older weights.

    `/flush_cache` would do the same, and also collect garbage: on a CPU that walks through every
    object of the process (70 ms), on a GPU it gives memory back that the next batch needs. Answer:
    None.
    """


class End(_Command, frozen=True):
    """Ends the processes of an engine whose weights are half-written, so that it is restarted.

    It has no answer.
    """


Command = (
    Connect
    | Describe
    | Arrange
    | Open
    | Receive
    | Spread
    | ConnectRelays
    | PassOn
    | Watch
    | Inventory
    | Recall
    | Audit
    | SendHashes
    | EmptyCache
    | End
)


class MemoryEntry(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a worker's memory, listed by its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: str
    detail: str  # for a constant its hash (megarl.kernels.audit), otherwise what made it, and when


class WatchedMemory(msgspec.Struct, frozen=True):
    """How much memory a worker computes with that no update writes.

    Workers with equal digests have equal inventories.
    """

    digest: bytes  # digest of the inventory
    tensors: int
    tensor_bytes: int


class Changes(msgspec.Struct, frozen=True):
    """Tensors that have changed since the last audit, of version `since` (-1: since the start)."""

    tensors: list[str]
    since: int


class AuditResult(msgspec.Struct, frozen=True):
    """The state of a worker's memory: the audit hashes of live parameters, and the changes among
    the tensors that no update writes.
    """

    digest: bytes = b""  # digest of the answer to SendHashes
    changes: Changes = Changes([], -1)
    high_water_bytes: int = 0  # most memory that the worker has held


decode = msgspec.msgpack.Decoder(Command).decode
