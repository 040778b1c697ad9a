"""MegaRL's end inside every TP worker of an engine: the custom weight loader that SGLang calls with
the live model.

The named tensor that SGLang passes contains a typed command (see `commands`). An exception in
`run_command` would end the engine, so it is caught and sent back as the answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from megarl.base.geometry import Box
from megarl.base.processes import beating
from megarl.base.shared_gpu import high_water_bytes
from megarl.config.limits import find_callable
from megarl.generator.client import content_of
from megarl.kernels.audit import hash_tensors
from megarl.messaging.host import Host, address_towards
from megarl.messaging.link import Peer, RunKey
from megarl.messaging.messages import WorkerReply
from megarl.models.multi_token import DRAFT
from megarl.reshard.forwarding import Relay
from megarl.reshard.map import Copy
from megarl.weight_sync import commands
from megarl.weight_sync.audit import digest_of as digest_of_hashes
from megarl.weight_sync.audit import packed
from megarl.weight_sync.commands import (
    Arrange,
    Audit,
    AuditResult,
    Changes,
    Command,
    Connect,
    ConnectRelays,
    Describe,
    End,
    MemoryEntry,
    Open,
    PassOn,
    Recall,
    Receive,
    Spread,
    WatchedMemory,
)
from megarl.weight_sync.engine.watch import (
    BuiltModel,
    MemoryWatch,
    inventory,
    live_tensors,
    parameters_of,
)
from megarl.weight_sync.transports.base import (
    LiveParameters,
    Memory,
    PackedEndpoint,
    RemoteTensor,
    decode_endpoints,
    describe,
    digest_of,
    forms_of,
    pack,
)
from megarl.weight_sync.transports.choice import AUTO, PairwiseTransport, this_host

# parameters of the model, and the buffers of the adapters' pool
Parameters = dict[str, torch.Tensor]


class Pool(Protocol):
    """Memory beside the model's parameters. Updates write one slot of it (`megarl.lora.engine`)."""

    slot: int
    buffers: Mapping[str, torch.Tensor]  # name of a tensor -> memory of all slots

    def tensors(self) -> dict[str, torch.Tensor]:
        """The slot, by name. Raises RuntimeError if it has been lost."""
        ...


class EngineWorker:
    """State of one TP worker between commands."""

    def __init__(self, tp_rank: Callable[[], int], find_host: Callable[[], Host]) -> None:
        self.tp_rank = tp_rank
        self.find_host = find_host
        self.rank = -1  # generator rank
        self.host = Host()
        self.peer: Peer | None = None
        self.reply_address = ""
        # name -> shape, if it differs from the engine's
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.built: BuiltModel | None = None  # while the model is loading
        self.unwritten: MemoryWatch | None = None
        self.pool: Pool | None = None  # the pool of adapters, if the engine serves them
        # the model's layer for multi-token prediction, if the engine drafts with it
        self.draft: torch.nn.Module | None = None
        self.watched: WatchedMemory | None = None
        self.entries: list[MemoryEntry] = []  # inventory when `watched` was made
        # parameter -> hash at the last audit; `recall` empties it
        self.audited: dict[str, int] = {}
        self.since = -1  # the last audited version
        self.memories: dict[str, Memory] = {}  # import path -> transport end
        # kind of transport -> its end, opened for the connected generator
        self.opened: dict[str, Memory] = {}
        self.relay_transport: PairwiseTransport | None = None  # the way to other generator ranks
        self.relays: list[Relay] = []

    def run(self, model: torch.nn.Module, command: Command) -> None:
        """Executes a command and sends the answer."""
        error = ""
        payload = b""
        try:
            self.model_loaded(model)
            if isinstance(command, Connect):
                self.connect(command)
            payload = msgspec.msgpack.encode(
                _HANDLERS[type(command)](self, self.parameters(model), command)
            )
        except Exception:
            error = traceback.format_exc()
            # also in the engine's log, in case the answer does not arrive
            print(error, file=sys.stderr, flush=True)
        if self.peer is not None:
            self.peer.send(WorkerReply(self.rank, type(command).__name__, error, payload))

    def model_loaded(self, model: torch.nn.Module, dummy: bool = False) -> None:
        """Called as soon as the model is loaded; further calls do nothing."""
        if self.unwritten is None:
            built = self.built
            self.built = None
            self.unwritten = MemoryWatch(
                model, built if built and built.model() is model else None, dummy
            )

    def pool_added(self, model: torch.nn.Module, pool: Pool) -> None:
        """Called as soon as the pool of adapters exists, before the first request.

        The pool wraps layers, and so renames their tensors.
        """
        # it was loaded just before
        assert self.unwritten is not None and self.unwritten.model is model
        self.pool = pool
        self.unwritten.pool_added(pool.buffers.values(), pool.slot)

    def parameters(self, model: torch.nn.Module) -> Parameters:
        """All tensors that updates write."""
        return {
            **parameters_of(model),
            **self._draft_parameters(model),
            **(self.pool.buffers if self.pool else {}),
        }

    def _draft_parameters(self, model: torch.nn.Module) -> Parameters:
        """The draft model's own parameters, without the shared embedding and output layer."""
        if self.draft is None:
            return {}
        shared = set(map(id, model.parameters()))
        result = {}
        for name, parameter in self.draft.named_parameters():
            if id(parameter) not in shared:
                result[DRAFT + name] = parameter
        return result

    def connect(self, command: Connect) -> None:
        if self.peer is not None:
            self.peer.close()
        if self.relay_transport is not None:
            self.relay_transport.close()
            self.relay_transport = None
        self.rank = command.first_rank + self.tp_rank()
        self.reply_address = command.reply_address
        self.host = self.find_host()
        self.opened = {}
        self.relays = []
        self.peer = Peer(
            f"engine.{self.rank}.{command.connection}",
            RunKey.load(Path(command.key_file)),
            command.reply_address,
        )

    def describe(self, parameters: Parameters, command: Describe) -> list[RemoteTensor] | None:
        descriptions = []
        for name, values in self.memory_of_parameters(parameters).items():
            descriptions.append(describe(name, values))
        if digest_of(forms_of(descriptions)) == command.known.get(self.rank):
            return None
        return descriptions

    def arrange(self, parameters: Parameters, command: Arrange) -> None:
        self.shapes = command.shapes[self.rank]
        self.tensors(parameters)  # raises if a shape does not fit

    def tensors(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """The parameters' memory in the shapes of the reshard map."""
        result: dict[str, torch.Tensor] = {}
        for name, values in self.memory_of_parameters(parameters).items():
            result[name] = as_arranged(values, self.shapes.get(name))
        return result

    def in_pool(self, name: str) -> bool:
        return self.pool is not None and name in self.pool.buffers

    def memory_of_parameters(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """The parameters' memory. In the pool, it is the slot of the policy's adapter."""
        return {name: parameter.data for name, parameter in parameters.items()} | (
            self.pool.tensors() if self.pool else {}
        )

    def open(self, parameters: Parameters, command: Open) -> PackedEndpoint | None:
        offer = command.offers.get(self.rank)
        if offer is None:
            return None
        if command.memory not in self.memories:
            self.memories[command.memory] = find_callable(command.memory, "weights.transport")()
        memory = self.opened[command.kind] = self.memories[command.memory]
        address = address_towards(self.reply_address)
        live = LiveParameters(
            self.rank,
            command.kind,
            self.host,
            address,
            parameters,
            partial(self.tensors, parameters),
        )
        endpoint = memory.open(live, offer)
        if self.unwritten is not None:  # some transports move the parameters
            with self.unwritten.rewriting():
                _rebind(self.unwritten.model)
        return pack(endpoint, command.known.get(self.rank, b""))

    def receive(self, parameters: Parameters, command: Receive) -> None:
        tensors = self.tensors(parameters)
        for memory in self.opened.values():
            if command.changes_to >= 0:
                memory.receive_changes(tensors, command.changes_to)
            else:
                names = filter(self.in_pool, tensors) if command.adapters else tensors
                memory.receive({name: tensors[name] for name in names})

    def spread(self, parameters: Parameters, command: Spread) -> None:
        for memory in self.opened.values():
            if command.changes_to >= 0:
                memory.spread_changes(command.changes_to)
            else:
                memory.spread(self.in_pool if command.adapters else None)

    def connect_relays(self, parameters: Parameters, command: ConnectRelays) -> None:
        self.relays = command.relays.get(self.rank, [])
        reached = {relay.destination_rank for relay in self.relays}
        if reached:
            self.relay_transport = PairwiseTransport(
                AUTO, self.host, self.rank, command.timeout_s, may_lose=True
            )
            endpoints = decode_endpoints(command.endpoints)
            self.relay_transport.connect([way for way in endpoints if way.rank in reached])
            tensors = self.tensors(parameters)
            passed_on = dict.fromkeys(relay.tensor for relay in self.relays)
            self.relay_transport.prepare([tensors[name] for name in passed_on])

    def pass_on(self, parameters: Parameters, command: PassOn) -> list[int]:
        """Hashes whole tensors, even after an update of changes only: a worker whose memory is
        mapped does not know what was written.
        """
        if self.relay_transport is None:
            return []
        tensors = self.tensors(parameters)
        for relay in self.relays:
            if command.adapters and not self.in_pool(relay.tensor):
                continue
            values = tensors[relay.tensor]
            whole_box = Box((0,) * values.dim(), tuple(values.shape))
            dtype = str(values.dtype).removeprefix("torch.")
            copy = Copy(
                self.rank,
                relay.tensor,
                whole_box,
                relay.destination_rank,
                relay.tensor,
                whole_box,
                "identity",
                dtype,
                relay.depth,
            )
            self.relay_transport.write(copy, values)
        self.relay_transport.fence()
        return sorted(self.relay_transport.unwritten)

    def end(self, parameters: Parameters, command: End) -> None:
        print("asked to end: the weights are half-written", file=sys.stderr, flush=True)
        os._exit(1)  # SGLang ends an engine if one of its schedulers ends

    def watch(self, parameters: Parameters, command: commands.Watch) -> WatchedMemory:
        if self.watched is None:
            assert self.unwritten is not None  # since the model was loaded
            self.unwritten.start()
            _post_load(self.unwritten.model)
            self.entries = inventory(self.unwritten)
            digest = hashlib.blake2b(msgspec.msgpack.encode(self.entries), digest_size=16).digest()
            self.watched = WatchedMemory(digest, self.unwritten.count, self.unwritten.nbytes)
        return self.watched

    def inventory(self, parameters: Parameters, command: commands.Inventory) -> list[MemoryEntry]:
        if self.rank in command.ranks:
            return self.entries
        return []

    def recall(self, parameters: Parameters, command: Recall) -> Changes:
        tensors = self.tensors(parameters)
        audited = self.audited
        self.audited = {}
        hashes = hash_tensors({name: tensors[name] for name in audited})
        changed = sorted(name for name, hash in audited.items() if hashes[name] != hash)
        return Changes(
            changed + (self.unwritten.changed() if command.unwritten and self.unwritten else []),
            self.since,
        )

    def audit(self, parameters: Parameters, command: Audit) -> AuditResult:
        hashes = hash_tensors(self.tensors(parameters))
        changes = Changes(self.unwritten.changed() if self.unwritten else [], self.since)
        self.audited = hashes
        self.since = command.version
        return AuditResult(digest_of_hashes(packed(hashes)), changes, high_water_bytes())

    def hashes(self, parameters: Parameters, command: commands.SendHashes) -> bytes:
        return packed(self.audited)

    def finish(
        self, original: Callable[[Any, torch.device], None], model: Any, device: torch.device
    ) -> None:
        """Runs SGLang's post-load work on all modules, then the model's own.

        (DeepSeek's attention uses tensors derived from kv_b_proj. SGLang derives them again only if
        no loader has run, and a custom loader counts as one.)

        Direct writes do not change torch's version counters, so these are incremented here. SGLang
        keeps copies of some parameters, such as a router's bias in another dtype, and renews a copy
        when the counter of its parameter has changed.
        """
        with self.unwritten.rewriting() if self.unwritten else contextlib.nullcontext():
            torch.autograd.graph.increment_version(model.parameters())
            original(model, device)
            _rebind(model)
            if hasattr(model, "post_load_weights"):
                model.post_load_weights()


_HANDLERS: dict[type, Callable[[EngineWorker, Parameters, Any], Any]] = {
    Connect: lambda worker, parameters, command: worker.host,
    Describe: EngineWorker.describe,
    Arrange: EngineWorker.arrange,
    Open: EngineWorker.open,
    Receive: EngineWorker.receive,
    Spread: EngineWorker.spread,
    ConnectRelays: EngineWorker.connect_relays,
    PassOn: EngineWorker.pass_on,
    End: EngineWorker.end,
    commands.Watch: EngineWorker.watch,
    commands.Inventory: EngineWorker.inventory,
    Recall: EngineWorker.recall,
    Audit: EngineWorker.audit,
    commands.SendHashes: EngineWorker.hashes,
    commands.EmptyCache: lambda worker, parameters, command: None,
}


def as_arranged(values: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """The same memory in another shape.

    Raises RuntimeError if the values have gaps between them.
    """
    if shape is None:
        return values
    in_memory_order = values.t() if values.dim() == 2 and not values.is_contiguous() else values
    return in_memory_order.view(shape)


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


# SGLang knows the loader only by its import path, so its state must be global
_worker = EngineWorker(_tp_rank, this_host)


def _post_load(model: torch.nn.Module) -> None:
    """Does the post-load work that SGLang does at the end of an update and at the beginning of the
    next one.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    device = next(model.parameters()).device
    DefaultModelLoader.postprocess_weights(model, device)  # hooked: `finish`
    DefaultModelLoader.restore_weights_before_loading(model, device)


def _rebind(model: torch.nn.Module) -> None:
    """Renews values that SGLang keeps beside parameters: 1 + weight of zero-centred norms, and a
    view of the convolution's weight in gated delta nets. Call it also when a transport may have
    moved parameters.
    """
    # None: no SGLang model has been loaded here
    loader = sys.modules.get("sglang.srt.model_loader.loader")
    if loader is not None:
        loader.PreshardedModelLoader._rebind_parameter_aliases(model)


def build(
    construct: Callable[..., torch.nn.Module], *arguments: Any, **options: Any
) -> torch.nn.Module:
    """Runs around the construction of a model, before its weights are loaded."""
    earlier_tensors = list(map(weakref.ref, live_tensors()))
    model = construct(*arguments, **options)
    with torch.device("cpu"):  # otherwise new tensors would be on the model's device
        _worker.built = BuiltModel(model, earlier_tensors)
    return model


def model_loaded(result: Any, runner: Any) -> None:
    """Runs after SGLang has loaded a worker's model, or a draft model.

    Updates do not write a draft model that has its own folder.
    """
    if not runner.is_draft_worker:
        _worker.model_loaded(runner.model, runner.load_config.load_format == "dummy")
        return
    _worker.built = None
    arguments = runner.server_args
    if arguments.speculative_draft_model_path in (None, arguments.model_path):
        _worker.draft = runner.model


def pool_added(model: torch.nn.Module, pool: Pool) -> None:
    """See `Worker.pool_added`."""
    _worker.pool_added(model, pool)


def finish(original: Callable[..., None], model: torch.nn.Module, device: torch.device) -> None:
    """Runs around SGLang's post-load work."""
    with beating():
        _worker.finish(original, model, device)


def run_command(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """The custom weight loader, with SGLang's signature for it."""
    with beating():
        _worker.run(model, commands.decode(content_of(named_tensors)))
