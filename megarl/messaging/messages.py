"""Every message that crosses a process boundary of a run. Decoding admits these types and nothing else."""

from __future__ import annotations

import msgspec

from megarl.messaging.host import Host
from megarl.types import Ordinal, Version


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_Message, frozen=True):
    """First word of a trainer rank: it is up, here, and this is the reshard map it computed."""

    plan_hash: str
    host: Host = Host()


class WeightsOffer(_Message, frozen=True):
    """Trainer rank: my shard of these weights is final until you tell me it is written."""

    version: int


class WeightsGrant(_Message, frozen=True):
    """Generator: the engines stand still, write `version` now.

    With a `plan_hash`, the engines' memory is opened anew: `endpoints` are those of the generator ranks that this trainer rank writes to.
    Without, all stays what it was. `engines` counts the engines that take part; 0: there is nothing to write.
    """

    version: int
    endpoints: list[str]
    engines: int = -1
    relay: tuple[str, int] | None = None  # a RelayRule (reshard.relays), where engines pass on a part
    plan_hash: str = ""  # of the map that leaves out what they pass on


class WeightsWritten(_Message, frozen=True):
    """Trainer rank: my copies are written. `shares[generator rank][tensor]` is their share of the audit hash of that tensor.

    Or they are not: `error` then says why, and is empty otherwise. `unwritten` are generator ranks that could not be reached. With `more`
    to come, only those copies are that land (Mooncake): the workers can spread them while the others are written.
    """

    version: int
    bytes_written: int
    write_s: float
    shares: dict[int, dict[str, int]]
    error: str = ""
    unwritten: list[int] = []
    more: bool = False


class WeightsApplied(_Message, frozen=True):
    """Generator: the engines serve `version`."""

    version: int
    audited: bool  # a failed audit never gets here: it ends the run
    pause_s: float  # how long the engines stood still
    bytes_written: int  # by all trainer ranks together


class WeightsWanted(_Message, frozen=True):
    """Generator, to trainer rank 0: an engine has come back; offer `version`, if it is still your newest, again."""

    version: int


class GenerateFrom(_Message, frozen=True):
    """Trainer rank 0, first of all: generate every prompt from `first` on but those of `skip`, which are trained on or held here."""

    first: Ordinal
    skip: list[Ordinal]


class GroupsStarted(_Message, frozen=True):
    """Generator: rollouts of these prompts have begun, under weights `version`."""

    ordinals: list[Ordinal]
    version: Version


class GroupReady(_Message, frozen=True, gc=False):
    """Generator: a finished group. Times are seconds of the generator's monotonic clock; all 0 in a group that an earlier process made.

    (Out of the garbage collector's sight, for the sake of full buffers: it holds nothing that could refer back to it.)
    """

    ordinal: Ordinal
    oldest: Version  # of its tokens
    started_s: float
    ended_s: float
    idle_s: float  # how long the generator has waited for weights since it was started, counted in places in flight
    group: msgspec.Raw  # an encoded Group: decoded by those who train on it, once


class Regenerate(_Message, frozen=True):
    """Trainer rank 0: these groups came too late to be trained on; generate them again."""

    ordinals: list[Ordinal]


class ProbeReady(_Message, frozen=True):
    """Generator: log-probs of the probe sequences under `version`, for the trainer to compare with its own."""

    version: int
    token_ids: list[list[int]]
    prompt_lengths: list[int]
    logprobs: list[list[float]]
    routing: list[bytes]  # of each sequence (models/routing.py), empty where it was not recorded


class WorkerReply(_Message, frozen=True):
    """Answer of one engine worker to a loader command; `error` is empty on success, else what went wrong there."""

    generator_rank: int
    command: str
    error: str
    payload: bytes


Weights = Hello | WeightsOffer | WeightsWanted | WeightsGrant | WeightsWritten | WeightsApplied | ProbeReady | WorkerReply
Rollouts = GenerateFrom | GroupsStarted | GroupReady | Regenerate
Message = Weights | Rollouts

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes) -> Message:
    """Raises msgspec.DecodeError on anything but a declared message."""
    return _decoder.decode(body)
