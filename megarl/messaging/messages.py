"""Every message that crosses a process boundary of a run. Decoding admits only these types."""

from __future__ import annotations

from typing import Literal

import msgspec

from megarl.base.rollout_types import KeptSets, Ordinal, Version
from megarl.messaging.host import Host


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_Message, frozen=True):
    """A trainer rank's first message: it is up; where it runs; which reshard map it has computed."""

    plan_hash: str
    host: Host = Host()


class WeightsOffer(_Message, frozen=True):
    """Trainer rank: my shard of this version stays unchanged until the update is over.

    With `base`, it can send the changes since that version (weights.delta). If it has compared, the numbers say how large these are.
    """

    version: int
    base: int = -1
    delta_bytes: int = 0
    changed_bytes: int = 0  # of the elements that have changed
    full_bytes: int = 0  # 0: it has not compared


class WeightsGrant(_Message, frozen=True):
    """Generator: the engines are paused, write `version` now.

    With a `plan_hash`, the engines' memory is opened anew: `endpoints` are those of the generator ranks that this trainer rank writes to.
    Without, they stay the same. `engines`: how many engines of each group take part; none: there is nothing to write, or with `later`: the
    version is to be offered again. `delta`: write only the changes since the base that was offered.
    """

    version: int
    endpoints: bytes = b""  # as transports.base.decode_endpoints reads them
    engines: tuple[int, ...] = (-1,)
    relay: tuple[str, int] | None = None  # a RelayRule (reshard.relays), if engines pass on a part
    plan_hash: str = ""  # of the map without what engines pass on
    delta: bool = False
    later: bool = False

    @property
    def is_empty(self) -> bool:
        return not any(self.engines)


class WeightsWritten(_Message, frozen=True):
    """Trainer rank: my copies are written, or `error` says why not. `shares`: those of the audit hashes (weight_sync.audit.packed_shares),
    once all is written.

    `unwritten`: generator ranks that could not be reached. `more`: only the copies that land (Mooncake) are written yet, so the workers
    can scatter them while the others follow.
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
    engines: int = 0  # that serve now
    changed_fraction: float | None = None  # of the bytes, since the version before; None if not compared
    serving: dict[str, int] = {}  # engines that serve now, by group; empty without generator.groups
    sampled: dict[str, int] = {}  # tokens since the generator has started, likewise
    drafts: tuple[int, int, int] = (0, 0, 0)  # tokens drafted, those of them kept, and passes that verified them, since the version before


class WeightsWanted(_Message, frozen=True):
    """Generator, to trainer rank 0: an engine has come back; offer `version` again if it is still your newest."""

    version: int


class LookAgain(_Message, frozen=True):
    """Trainer rank 0, when the run stops: compare the engines' memory again with the result of the last audit."""


class LookedAgain(_Message, frozen=True):
    """Generator, in answer: `problem` says what memory has changed; `obstacle` why it could not be compared."""

    problem: str = ""
    obstacle: str = ""


class GenerateFrom(_Message, frozen=True):
    """Trainer rank 0's first order: generate all prompts from `first` on except `skip`.

    Prompts in `skip` were trained on or dropped, have rested, or are held here. `dropped`: the prompts that were dropped or have rested so
    far; another prompt replaces each. `outside` and `scored`: what the curriculum has learned so far (data/order.py)."""

    first: Ordinal
    skip: list[Ordinal]
    dropped: list[Ordinal] = []
    outside: list[Ordinal] = []
    scored: list[Ordinal] = []


class GroupsStarted(_Message, frozen=True):
    """Generator: rollouts of these prompts have begun, under weights `version`."""

    ordinals: list[Ordinal]
    version: Version


class PromptsRested(_Message, frozen=True):
    """Generator: the curriculum has left out these prompts."""

    ordinals: list[Ordinal]


class GroupReady(_Message, frozen=True, gc=False):
    """Generator: a finished group. Times are seconds on the generator's monotonic clock; 0 in a group that an earlier process made.

    gc=False keeps full buffers cheap for the garbage collector; nothing in a message can refer back to it.
    """

    ordinal: Ordinal
    oldest: Version  # of its tokens
    started_s: float
    ended_s: float
    idle_s: float  # how long the generator's places in flight have waited for weights since its start, averaged over them
    summary: msgspec.Raw  # an encoded GroupSummary, for every trainer rank
    texts: msgspec.Raw  # an encoded GroupTexts, for trainer rank 0
    pieces: list[memoryview]  # the numbers (rollouts/channel.py): of the prompt, then of each sample, for the ranks that train on it
    dropped: bool = False  # by dynamic sampling, or because it is unanswered; it is not trained on, so it has no pieces
    outside: bool = False  # the pass rate is outside the band that the curriculum trains on, so the row rests
    scoring_s: tuple[float, float] = (0.0, 0.0)  # how long rollouts had waited for scores by then, when it began and when it ended


class Regenerate(_Message, frozen=True):
    """Trainer rank 0: these groups are too old to be trained on; generate them again."""

    ordinals: list[Ordinal]


class ProbeReady(_Message, frozen=True):
    """Generator: log-probs of the probe sequences under `version`, for the trainer to compare with its own."""

    version: int
    token_ids: list[list[int]]
    prompt_lengths: list[int]
    logprobs: list[list[float]]
    routing: list[bytes]  # per sequence (models/routing.py); empty if not recorded
    kept: list[KeptSets | None]  # per sequence; None if its tokens were drawn from the whole vocabulary
    groups: list[str] = []  # per sequence: the group whose engine sampled it; empty without generator.groups


class FleetCall(_Message, frozen=True):
    """`megarl engines`, to the generator. What `do` takes: list; join: `urls` of engines of `group` that are starting; here: `engines`,
    whose launcher is alive; leave: `engines`, or the `count` newest, after which the launcher `ends` them in any case."""

    do: Literal["list", "join", "here", "leave"]
    urls: list[str] = []
    engines: list[int] = []
    count: int = 0
    ends: bool = False
    group: str = ""


class EngineState(msgspec.Struct, frozen=True):
    number: int
    url: str
    text: str  # what it is doing
    serving: bool = False
    gone: bool = False  # it has left for good
    group: str = ""  # of generator.groups


class FleetAnswer(_Message, frozen=True):
    """The answer to a FleetCall. `error`: why it is refused; `engines`: the engines concerned, or all."""

    do: str
    engines: list[EngineState] = []
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
