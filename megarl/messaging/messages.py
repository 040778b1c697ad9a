"""Every message that crosses a process boundary of a run. Decoding admits only these types."""

from __future__ import annotations

from typing import Literal

import msgspec

from megarl.base.kept_sets import KeptSets
from megarl.base.rollout_types import Ordinal, Version
from megarl.messaging.host import Host


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_Message, frozen=True):
    """A trainer rank's first message: it is up, where it runs, and the hash of the reshard map that
    it has computed.
    """

    plan_hash: str
    host: Host = Host()


class WeightsOffer(_Message, frozen=True):
    """Trainer rank: my shard of this version stays unchanged until the update is over.

    With `base`, it can send only the changes since that version (weights.delta). If it has compared
    the two, the numbers give their size.
    """

    version: int
    base: int = -1
    delta_bytes: int = 0
    changed_bytes: int = 0  # bytes of the changed elements
    full_bytes: int = 0  # 0: it has not compared


class WeightsGrant(_Message, frozen=True):
    """Generator: the engines are paused, write `version` now.

    With a `plan_hash`, the memory of the engines must be opened anew: `endpoints` are the generator
    ranks that this trainer rank writes to. Without, they stay the same. `engines`: how many engines
    of each group take part. If none do, there is nothing to write; with `later`, the version must
    be offered again. `delta`: write only the changes since the base that was offered.
    """

    version: int
    endpoints: bytes = b""  # decoded by transports.base.decode_endpoints
    engines: tuple[int, ...] = (-1,)
    relay: tuple[str, int] | None = None  # a RelayRule (reshard.relays), if engines pass on a part
    plan_hash: str = ""  # hash of the map, without copies that engines pass on
    delta: bool = False
    later: bool = False

    @property
    def is_empty(self) -> bool:
        return not any(self.engines)


class WeightsWritten(_Message, frozen=True):
    """Trainer rank: my copies are written, or `error` says why not.

    `shares`: this rank's shares of the audit hashes (weight_sync.audit.packed_shares), once
    everything is written.

    `unwritten`: generator ranks that could not be reached. `more`: only the copies to landing
    buffers (Mooncake) are written yet, so that the workers can scatter them while the other copies
    follow.
    """

    version: int
    bytes_written: int
    write_s: float
    shares: bytes = b""
    error: str = ""
    unwritten: list[int] = []
    more: bool = False


class WeightsApplied(_Message, frozen=True):
    """Generator: the engines serve `version`."""

    version: int
    audited: bool  # whether there was an audit; a failed one ends the run
    pause_s: float  # how long the engines were paused
    bytes_written: int  # by all trainer ranks together
    engines: int = 0  # engines that serve now
    # changed share of the bytes since the last version; None if not compared
    changed_fraction: float | None = None
    serving: dict[str, int] = {}  # engines that serve now, by group; empty without generator.groups
    sampled: dict[str, int] = {}  # tokens sampled since the generator started, by group
    # since the last version: drafted tokens, accepted ones, and verifying passes
    drafts: tuple[int, int, int] = (0, 0, 0)
    # since the last version: input tokens of requests, and those that the prefix cache had
    prefill: tuple[int, int] = (0, 0)
    high_water_bytes: int = 0  # most memory that a worker of an engine has held; 0: not measured


class WeightsWanted(_Message, frozen=True):
    """Generator, to trainer rank 0: an engine has come back; offer `version` again if it is still
    your newest.
    """

    version: int


class LookAgain(_Message, frozen=True):
    """Trainer rank 0, when the run stops: compare the engines' memory with the result of the last
    audit.
    """


class LookedAgain(_Message, frozen=True):
    """Generator, in answer to LookAgain: `problem` says which memory has changed, `obstacle` why it
    could not be compared.
    """

    problem: str = ""
    obstacle: str = ""


class GenerateFrom(_Message, frozen=True):
    """Trainer rank 0's first order: generate all prompts from `first` on except `skip`.

    Prompts in `skip` were trained on or dropped, have rested, or are held here. `dropped`: the
    prompts that were dropped or have rested so far; another prompt replaces each. `outside` and
    `scored`: the state of the curriculum so far (data/order.py).
    """

    first: Ordinal
    skip: list[Ordinal]
    dropped: list[Ordinal] = []
    outside: list[Ordinal] = []
    scored: list[Ordinal] = []


class GroupsStarted(_Message, frozen=True):
    """Generator: rollouts of these prompts have begun under weights of `version`."""

    ordinals: list[Ordinal]
    version: Version


class PromptsRested(_Message, frozen=True):
    """Generator: the curriculum has left out these prompts."""

    ordinals: list[Ordinal]


class GroupReady(_Message, frozen=True, gc=False):
    """Generator: a finished group. Times are seconds on the generator's monotonic clock; 0 in a
    group from an earlier process.

    gc=False keeps full buffers cheap for the garbage collector; nothing in a message can refer back
    to it.
    """

    ordinal: Ordinal
    oldest: Version  # oldest version among its tokens
    started_s: float
    ended_s: float
    # mean time that the generator's places in flight have waited for weights since its start
    idle_s: float
    summary: msgspec.Raw  # an encoded GroupSummary, for every trainer rank
    texts: msgspec.Raw  # an encoded GroupTexts, for trainer rank 0
    pieces: list[memoryview]  # the numbers of the prompt, then of each sample (rollouts/channel.py)
    # by dynamic sampling, or because it is unanswered; not trained on, so without pieces
    dropped: bool = False
    # whether the pass rate is outside the curriculum's band, so that the row rests
    outside: bool = False
    # how long rollouts had waited for scores when it began, and when it ended
    scoring_s: tuple[float, float] = (0.0, 0.0)
    newest: Version = -1  # newest version among its tokens


class Regenerate(_Message, frozen=True):
    """Trainer rank 0: these groups are too old; generate them again."""

    ordinals: list[Ordinal]


class ProbeReady(_Message, frozen=True):
    """Generator: log-probs of the probe sequences under `version`, for the trainer to compare with
    its own.
    """

    version: int
    token_ids: list[list[int]]
    prompt_lengths: list[int]
    logprobs: list[list[float]]
    routing: list[bytes]  # per sequence (models/routing.py); empty if not recorded
    # per sequence; None if its tokens were drawn from the whole vocabulary
    kept: list[KeptSets | None]
    # per sequence: the group whose engine sampled it; empty without generator.groups
    groups: list[str] = []


class FleetCall(_Message, frozen=True):
    """A call of `megarl engines` to the generator.

    `do` is one of: list; join: engines of `group` are starting at `urls`; here: the launcher of
    `engines` is alive; leave: `engines`, or the `count` newest, shall leave (their launcher ends
    them in any case if it `ends` them).
    """

    do: Literal["list", "join", "here", "leave"]
    urls: list[str] = []
    engines: list[int] = []
    count: int = 0
    ends: bool = False
    group: str = ""


class EngineRow(msgspec.Struct, frozen=True):
    number: int
    url: str
    text: str  # what the engine is doing
    serving: bool = False
    gone: bool = False  # whether it has left for good
    group: str = ""  # its group in generator.groups


class FleetAnswer(_Message, frozen=True):
    """The answer to a FleetCall.

    `error`: why the call is refused. `engines`: the engines concerned, or all engines.
    """

    do: str
    engines: list[EngineRow] = []
    error: str = ""


class WorkerReply(_Message, frozen=True):
    """One engine worker's answer to a loader command; `error` is empty on success."""

    generator_rank: int
    command: str
    error: str
    payload: bytes


Updates = Hello | WeightsOffer | WeightsWanted | WeightsGrant | WeightsWritten | WeightsApplied
Weights = Updates | LookAgain | LookedAgain | ProbeReady | WorkerReply
Rollouts = GenerateFrom | GroupsStarted | PromptsRested | GroupReady | Regenerate
Message = Weights | Rollouts | FleetCall | FleetAnswer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes) -> Message:
    """Raises msgspec.DecodeError for anything but a declared message."""
    return _decoder.decode(body)
