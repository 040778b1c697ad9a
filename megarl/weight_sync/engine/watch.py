"""Watches the tensors that an engine's worker computes with but no update writes: rotary caches,
tensors that post-load work derives from parameters, scales of a quantisation method. They are
hashed before the first update, and again in each audit.

They are the buffers of all modules, and all other tensors reachable from a module. The walk follows
attributes, containers, and objects of SGLang's layers that are not modules (quantisation methods,
router settings). It leaves out parameters, and tensors that share a parameter's memory: updates
write those, and the audit compares them with the trainer's.

Forward passes create working memory, which changes every time. So a tensor counts only if it exists
once the model is loaded, if post-load work creates it, or if `MADE_LATER` lists it. KV caches,
graph pools and the memory of collectives are outside the model and its layers.

A tensor may stay unchanged only if it does not depend on weights. So its state is compared with its
state before the first weight was loaded (`BuiltModel`). If loading has made or changed it, the
post-load work of an update must make it again. If it does not, the tensor may be a copy of old
weights, and is *unproven*. `inventory` lists all memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import types
import weakref
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from megarl.kernels.audit import hash_tensor
from megarl.weight_sync.commands import (
    CONSTANT,
    DERIVED,
    OUTSIDE,
    UNPROVEN,
    UNPROVEN_OUTSIDE,
    WORKING,
    WRITTEN,
    MemoryEntry,
)

LAYERS = "sglang.srt.layers."  # objects of these classes belong to a module without being one
LOADING = "made or changed while weights were loaded"
# created by the first forward pass, then constant
MADE_LATER = {("StandardDispatcher", "local_expert_mapping")}
# the first forward pass may cast a rotary cache to the dtype of queries
CAST_TO = (torch.bfloat16, torch.float16)
# modules whose caches depend only on config.json, and grow when the model is loaded
ROTARY = LAYERS + "rotary_embedding."
# most attributes; skipped early, because engines are paused during the walk
PLAIN = {type(None), bool, int, float, str}
OF_TORCH = frozenset(vars(torch.nn.Module()))  # parameters, buffers, hooks
Region = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]  # address, shape, strides


@dataclasses.dataclass(frozen=True)
class Print:
    """The state of a tensor. `hash` is None if the tensor is in memory that updates write."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    hash: int | None


class BuiltModel:
    """The state of a model after its construction and before its weights are loaded.

    Create it at that moment. `earlier_tensors`: the tensors that existed before the model was
    constructed.
    """

    def __init__(
        self, model: torch.nn.Module, earlier_tensors: Iterable[weakref.ref[torch.Tensor]]
    ):
        self.model = weakref.ref(model)
        self.prints = prints(model.parameters(), _named_tensors(model))
        self._before = list(earlier_tensors)
        self._outside = [
            (weakref.ref(values), prints(model.parameters(), {"": values}))
            for values in self._tensors_outside(model)
        ]

    def outside(self, model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yields the tensors that were made while the model was constructed or loaded, but are not
        reachable from it. Each comes with a flag: whether it is unchanged since before the first
        weight was loaded.
        """
        outside_tensors = self._tensors_outside(model)
        if outside_tensors:
            del outside_tensors
            gc.collect()  # loading may leave tensors without references
        built = [(ref(), state) for ref, state in self._outside]  # alive, so that ids are unique
        states = {id(values): state for values, state in built}
        for values in self._tensors_outside(model):
            state = states.get(id(values))
            is_unchanged = state is not None and prints(model.parameters(), {"": values}) == state
            yield values, is_unchanged

    def _tensors_outside(self, model: torch.nn.Module) -> list[torch.Tensor]:
        inside: list[torch.Tensor] = list(model.parameters())
        for ref in self._before:
            values = ref()
            if values is not None and _lies_here(values):
                inside.append(values)
        inside += _named_tensors(model).values()
        memory = _Memory(inside)
        result = []
        for values in live_tensors():
            if _lies_here(values) and values.numel() and not memory.holds(values):
                result.append(values)
        return result


def live_tensors() -> list[torch.Tensor]:
    """All tensors that Python knows of.

    (`isinstance` would call into objects, some of which then import modules.)
    """
    result: list[torch.Tensor] = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor):
            result.append(candidate)
    return result


class MemoryWatch:
    """Watches one live model.

    Construct it as soon as the model is loaded. Without `built`, everything counts as made from
    weights. With `dummy` weights, so do the buffers that a checkpoint has, since nothing has filled
    them.
    """

    def __init__(
        self, model: torch.nn.Module, built: BuiltModel | None = None, dummy: bool = False
    ):
        self.model = model
        tensors = _named_tensors(model)
        self._names = set(tensors)
        self._written = list[torch.Tensor]()
        self._slot = 0
        self._regions_so_far = set(map(_region, tensors.values()))
        current = prints(model.parameters(), tensors)
        built_prints = built.prints if built else {}
        unchanged_regions = set()
        for name, values in tensors.items():
            if current[name] == built_prints.get(name) or _grown(model, name, values, built_prints):
                unchanged_regions.add(_region(values))
        saved_names = model.state_dict().keys() if dummy else set[str]()
        changed_tensors = {}
        self._changed_regions: set[Region] = set()
        for name, values in tensors.items():
            if name in saved_names or _region(values) not in unchanged_regions:
                changed_tensors[name] = values
                if current[name].hash is not None:
                    self._changed_regions.add(_region(values))
        self._changed_names: set[str] = set()  # they may be moved or cast later
        for name, values in changed_tensors.items():
            if _region(values) in self._changed_regions:
                self._changed_names.add(name)
        self.remade: set[str] = set()  # tensors that the post-load work of an update makes again
        self.moved: set[str] = set()  # among these, tensors that it has moved
        self.outside: list[tuple[weakref.ref[torch.Tensor], bool]] = []
        if built:
            for values, is_unchanged in built.outside(model):
                self.outside.append((weakref.ref(values), is_unchanged))
        # state of each at the last audit, or after later post-load work
        self._states: dict[str, Print] = {}
        self._casts: dict[str, list[Print]] = {}  # states that each may be cast to
        self.count = 0
        self.nbytes = 0  # number and bytes of watched tensors; memory with two names counts once

    def pool_added(self, pool: Collection[torch.Tensor], slot: int = 0) -> None:
        """Call it before `start` if SGLang has wrapped layers, which renames their tensors.

        Updates then also write `slot` of the tensors in `pool`. Floating-point tensors of the
        wrappers count as made by loading, since they may depend on weights. Integers are indices of
        an output.
        """
        tensors = _named_tensors(self.model)
        self._names = set(tensors)
        self._written = [*pool]
        self._slot = slot
        new = {}
        for name, values in tensors.items():
            if values.is_floating_point() and _region(values) not in self._regions_so_far:
                new[name] = values
        for name, state in self._prints(new).items():
            if state.hash is not None:
                self._changed_regions.add(_region(new[name]))

    def start(self) -> None:
        """Records the current state. Further calls do nothing."""
        if self._states:
            return
        tensors = self._tensors()
        self._states = self._prints(tensors)
        watched = {}
        for name, values in tensors.items():
            if self._states[name].hash is not None:
                watched[_region(values)] = values.nbytes
            if values.dtype == torch.float32:
                self._casts[name] = [_print(values.to(dtype)) for dtype in CAST_TO]
        self.count = len(watched)
        self.nbytes = sum(watched.values())

    def changed(self) -> list[str]:
        """Names of the tensors that have changed: values, shape, dtype, or whether they share a
        parameter's memory.
        """
        current = self._prints(self._tensors())
        for name, casts in self._casts.items():
            if current.get(name) in casts and self._states[name] not in casts:
                self._states[name] = current[name]
        changed_names = []
        for name, state in self._states.items():
            if current.get(name) != state:
                changed_names.append(name)
        self._states = {**current, **self._states}
        return changed_names

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Wraps post-load work: the tensors that it creates or writes are recorded again.

        All others must stay unchanged.
        """
        if not self._states:
            yield
            return
        places = {name: _MemoryPosition(values) for name, values, _ in _tensors(self.model)}
        yield
        tensors = _named_tensors(self.model)
        self._names |= tensors.keys() - places.keys()
        rewritten = {}
        for name, values in tensors.items():
            place = places.get(name)
            is_touched = place is None or place.is_rewritten(values)
            if is_touched:
                self.remade.add(name)
            if place is not None and is_touched and place.address != values.data_ptr():
                self.moved.add(name)
            # torch does not count writes to inference tensors
            if name in self._names and (is_touched or values.is_inference()):
                rewritten[name] = values
        for name in self._states.keys() - tensors.keys():
            del self._states[name]
        self._states |= self._prints(rewritten)

    def all(self) -> Iterator[tuple[str, torch.Tensor, Print | None]]:
        """Yields (name, tensor, its state if it is watched) for every tensor of the model except
        its parameters.
        """
        for name, values, _ in _tensors(self.model):
            yield name, values, self._states.get(name)

    def slots(self, values: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
        """The slots of a tensor of the pool, and whether updates write each; empty for other
        tensors.
        """
        of_pool = _region(values) in map(_region, self._written)
        if of_pool:
            return [(values[slot], slot == self._slot) for slot in range(len(values))]
        return []

    def unproven(self, name: str, values: torch.Tensor) -> bool:
        """Whether loading has made or changed the tensor, but the post-load work of an update does
        not make it again.
        """
        return name not in self.remade and (
            _region(values) in self._changed_regions or unwrapped(name) in self._changed_names
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        for name, values, made_by in _tensors(self.model):
            if name in self._names or made_by in MADE_LATER:
                result[name] = values
        return result

    def _prints(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Print]:
        return prints([*parameters_of(self.model).values(), *self._written], tensors)


def parameters_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The model's parameters, by their names without adapters.

    A wrapper and its layer both have a `weight`. The layer's comes later and counts: it is the one
    in use if post-load work has replaced it.
    """
    return {unwrapped(name): parameter for name, parameter in model.named_parameters()}


def out_of_use(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that wrappers still have although post-load work has replaced them in their
    layers. No update writes them.
    """
    parameters = dict(model.named_parameters())
    parameters_in_use = {unwrapped(name): parameter for name, parameter in parameters.items()}
    result: dict[str, torch.nn.Parameter] = {}
    for name, parameter in parameters.items():
        if parameters_in_use[unwrapped(name)] is not parameter:
            result[name] = parameter
    return result


def unwrapped(name: str) -> str:
    """The name without wrappers.

    SGLang wraps each layer that gets an adapter, and keeps the layer as `base_layer`.
    """
    return name.replace(".base_layer.", ".")


def prints(
    written: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Print]:
    """The states of tensors.

    `written`: tensors that updates write, such as a model's parameters.
    """
    memory = _Memory(written)
    hashes = {}
    states = {}
    for name, values in tensors.items():
        region = None if memory.holds(values) else _region(values)
        if region and region not in hashes:
            hashes[region] = hash_tensor(values)
        states[name] = Print(values.dtype, tuple(values.shape), hashes[region] if region else None)
    return states


def _grown(
    model: torch.nn.Module, name: str, values: torch.Tensor, built_prints: Mapping[str, Print]
) -> bool:
    """Whether the tensor is a rotary cache that has only grown, and still begins with its earlier
    values.
    """
    holder = dict(model.named_modules()).get(name.rpartition(".")[0])
    if name not in built_prints or not type(holder).__module__.startswith(ROTARY):
        return False
    return _print(values[: built_prints[name].shape[0]]) == built_prints[name]


def _print(values: torch.Tensor) -> Print:
    return Print(values.dtype, tuple(values.shape), hash_tensor(values))


class _Memory:
    """The address ranges that tensors occupy."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._spans: list[tuple[int, int]] = []
        for start, end in sorted(map(_span, tensors)):
            if self._spans and start <= self._spans[-1][1]:
                start = self._spans[-1][0]
                end = max(end, self._spans.pop()[1])
            self._spans.append((start, end))

    def holds(self, tensor: torch.Tensor) -> bool:
        start, end = _span(tensor)
        index = bisect(self._spans, (start, float("inf"))) - 1
        return index >= 0 and end <= self._spans[index][1]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, tuple[str, str]]]:
    """Yields (name, tensor, class and attribute that contain it) for every tensor of a model except
    the parameters that updates write. The name is its path.
    """
    for name, parameter in out_of_use(model).items():
        yield name, parameter, ("", "")
    visited: set[int] = set()
    for name, module in model.named_modules():
        for attribute, values in module._buffers.items():
            if values is not None:
                yield _joined(name, attribute), values, (type(module).__name__, attribute)
        for attribute, value in vars(module).items():
            if type(value) not in PLAIN and attribute not in OF_TORCH:
                yield from _inside(
                    _joined(name, attribute), value, (type(module).__name__, attribute), visited
                )


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: values for name, values, _ in _tensors(model)}


def _inside(
    name: str, value: Any, holder: tuple[str, str], visited: set[int]
) -> Iterator[tuple[str, torch.Tensor, tuple[str, str]]]:
    if isinstance(value, torch.Tensor):
        if _lies_here(value):
            yield name, value, holder
        return
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": (part, holder) for key, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {f"{name}[{index}]": (part, holder) for index, part in enumerate(value)}
    elif (
        type(value).__module__.startswith(LAYERS)
        and not isinstance(value, torch.nn.Module)
        and hasattr(value, "__dict__")
    ):
        parts = {}
        for attribute, part in vars(value).items():
            parts[_joined(name, attribute)] = (part, (type(value).__name__, attribute))
    else:
        return
    if id(value) not in visited:
        visited.add(id(value))
        for part_name, (part, part_holder) in parts.items():
            yield from _inside(part_name, part, part_holder, visited)


def _lies_here(values: torch.Tensor) -> bool:
    return values.layout == torch.strided and values.device.type != "meta"


def _joined(name: str, attribute: str) -> str:
    if name:
        return f"{name}.{attribute}"
    return attribute


def _region(values: torch.Tensor) -> Region:
    return values.data_ptr(), tuple(values.shape), values.stride(), values.dtype


def _span(values: torch.Tensor) -> tuple[int, int]:
    """The addresses of the tensor's first byte and one past its last."""
    reach = 0
    if values.numel():
        reach = 1
        for extent, stride in zip(values.shape, values.stride()):
            reach += (extent - 1) * stride
    return values.data_ptr(), values.data_ptr() + reach * values.itemsize


class _MemoryPosition:
    """The earlier address of a tensor, and torch's count of the writes to it (none for inference
    tensors).
    """

    def __init__(self, values: torch.Tensor):
        self._values = weakref.ref(values)
        self._position = self._place(values)

    @property
    def address(self) -> int:
        return self._position[0]

    def is_rewritten(self, values: torch.Tensor) -> bool:
        """Whether `values`, under the same name, is another tensor, is at another address, or has
        been written to.
        """
        return self._values() is not values or self._place(values) != self._position

    @staticmethod
    def _place(values: torch.Tensor) -> tuple[int, int | None]:
        return values.data_ptr(), None if values.is_inference() else values._version


def inventory(watch: MemoryWatch) -> list[MemoryEntry]:
    """All memory of the model.

    Call it once the watch has started and post-load work has run. Lists memory once, under its
    first name.
    """
    entries: dict[tuple, MemoryEntry] = {}
    for entry, values in _entries_with_values(watch):
        region = _region(values) if values.numel() else (entry.name,)
        entries.setdefault(region, entry)
    return list(entries.values())


def _entries_with_values(watch: MemoryWatch) -> Iterator[tuple[MemoryEntry, torch.Tensor]]:
    for name, values in parameters_of(watch.model).items():
        yield _entry(name, values, WRITTEN), values
    replaced = set(map(id, out_of_use(watch.model).values()))
    for name, values, state in watch.all():
        if state is None:
            yield _entry(name, values, WORKING, "made by forward passes"), values
        elif state.hash is None and (slots := watch.slots(values)):
            for slot, (part, written) in enumerate(slots):
                if written:
                    kind, detail = (WRITTEN, "")
                else:
                    kind, detail = (WORKING, "a slot for adapters that no request of a run uses")
                yield _entry(f"{name}[{slot}]", part, kind, detail), part
        elif state.hash is None:
            yield _entry(name, values, WRITTEN, "in memory that updates write"), values
        elif id(values) in replaced or watch.unproven(name, values):
            yield _entry(name, values, UNPROVEN, LOADING), values
        elif name in watch.moved and values.is_cuda:
            detail = "post-load work moves it, and CUDA graphs still read the old place"
            yield _entry(name, values, UNPROVEN, detail), values
        elif name in watch.remade:
            yield _entry(name, values, DERIVED, "made by post-load work"), values
        else:
            yield _entry(name, values, CONSTANT, f"{state.hash:016x}"), values
    for number, (ref, as_built) in enumerate(watch.outside):
        values = ref()
        if values is None:
            continue
        name = f"outside the model, {number}"
        origin = "made before weights were loaded" if as_built else LOADING
        kind = OUTSIDE if as_built else UNPROVEN_OUTSIDE
        yield _entry(name, values, kind, origin + _holder(values)), values


def _entry(name: str, values: torch.Tensor, kind: str, detail: str = "") -> MemoryEntry:
    return MemoryEntry(
        name,
        tuple(values.shape),
        str(values.dtype).removeprefix("torch."),
        values.nbytes,
        kind,
        detail,
    )


def _holder(values: torch.Tensor) -> str:
    """The Python object that references the tensor, if the garbage collector knows it.

    It does not know objects older than the worker's fork. (No comprehension here, since its cell
    would be one more reference.)
    """
    modules = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            modules[id(vars(module))] = name
    holder_text = ""
    for holder in gc.get_referrers(values):
        if isinstance(holder, dict):
            for key, value in holder.items():
                if value is values:
                    if id(holder) in modules:
                        return f", {modules[id(holder)]}.{key}"
                    return f", in a dict under {key!r}"
        if not isinstance(holder, (types.FrameType, types.GeneratorType)):
            holder_text = f", in a {type(holder).__qualname__}"
    return holder_text
