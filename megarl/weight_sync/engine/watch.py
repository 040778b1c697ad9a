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
state before the first weight was loaded (`Built`). If loading has made or changed it, the post-load
work of an update must make it again. If it does not, the tensor may be a copy of old weights, and
is *unproven*. `inventory` lists all memory.
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
    Held,
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


class Built:
    """The state of a model after its construction and before its weights are loaded.

    Create it at that moment. `before`: the tensors that existed before the model was constructed.
    """

    def __init__(self, model: torch.nn.Module, before: Iterable[weakref.ref[torch.Tensor]]):
        self.model = weakref.ref(model)
        tensors = {name: values for name, values, _ in _tensors(model)}
        self.prints = prints(model.parameters(), tensors)
        self._before = list(before)
        self._outside = [
            (weakref.ref(values), prints(model.parameters(), {"": values}))
            for values in self._elsewhere(model)
        ]

    def outside(self, model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yields the tensors that were made while the model was constructed or loaded, but are not
        reachable from it. Each comes with a flag: whether it is unchanged since before the first
        weight was loaded.
        """
        found = self._elsewhere(model)
        if found:
            del found
            gc.collect()  # loading may leave tensors without references
        known = [(values, before) for ref, before in self._outside if (values := ref()) is not None]
        for values in self._elsewhere(model):
            yield (
                values,
                any(
                    values is each and prints(model.parameters(), {"": values}) == before
                    for each, before in known
                ),
            )

    def _elsewhere(self, model: torch.nn.Module) -> list[torch.Tensor]:
        before = [
            values for ref in self._before if (values := ref()) is not None and _lies_here(values)
        ]
        inside = (values for _, values, _ in _tensors(model))
        known = _Memory(
            each for tensors in (before, inside, model.parameters()) for each in tensors
        )
        return [
            values
            for values in live_tensors()
            if _lies_here(values) and values.numel() and not known.holds(values)
        ]


def live_tensors() -> list[torch.Tensor]:
    """All tensors that Python knows of.

    (`isinstance` would call into objects, some of which then import modules.)
    """
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


class Watch:
    """Watches one live model.

    Construct it as soon as the model is loaded. Without `built`, everything counts as made from
    weights. With `dummy` weights, so do the buffers that a checkpoint has, since nothing has filled
    them.
    """

    def __init__(self, model: torch.nn.Module, built: Built | None = None, dummy: bool = False):
        self.model = model
        tensors = {name: values for name, values, _ in _tensors(model)}
        self._names = set(tensors)
        self._written = list[torch.Tensor]()
        self._slot = 0
        self._known = {_region(each) for each in tensors.values()}
        now = prints(model.parameters(), tensors)
        before = built.prints if built else {}
        as_built = {
            _region(each)
            for name, each in tensors.items()
            if now[name] == before.get(name) or _grown(model, name, each, before)
        }
        saved = model.state_dict().keys() if dummy else set[str]()
        unlike = {
            name: each
            for name, each in tensors.items()
            if name in saved or _region(each) not in as_built
        }
        self._made = {_region(each) for name, each in unlike.items() if now[name].hash is not None}
        # moved or cast later
        self._made_names = {name for name, each in unlike.items() if _region(each) in self._made}
        self.remade: set[str] = set()  # tensors that the post-load work of an update makes again
        self.moved: set[str] = set()  # among these, tensors that it has moved
        self.outside = (
            [(weakref.ref(values), same) for values, same in built.outside(model)] if built else []
        )
        # state of each at the last audit, or after later post-load work
        self._left: dict[str, Print] = {}
        self._casts: dict[str, list[Print]] = {}  # states that each may be cast to
        self.count = 0
        self.nbytes = 0  # number and bytes of watched tensors; memory with two names counts once

    def adapted(self, pool: Collection[torch.Tensor], slot: int = 0) -> None:
        """Call it before `start` if SGLang has wrapped layers, which renames their tensors.

        Updates then also write `slot` of the tensors in `pool`. Floating-point tensors of the
        wrappers count as made by loading, since they may depend on weights. Integers are indices of
        an output.
        """
        tensors = {name: values for name, values, _ in _tensors(self.model)}
        self._names = set(tensors)
        self._written = [*pool]
        self._slot = slot
        new = {
            name: each
            for name, each in tensors.items()
            if each.is_floating_point() and _region(each) not in self._known
        }
        self._made |= {
            _region(new[name])
            for name, state in self._prints(new).items()
            if state.hash is not None
        }

    def start(self) -> None:
        """Records the current state. Further calls do nothing."""
        if self._left:
            return
        tensors = self._tensors()
        self._left = self._prints(tensors)
        watched = {
            _region(values): values.nbytes
            for name, values in tensors.items()
            if self._left[name].hash is not None
        }
        self.count = len(watched)
        self.nbytes = sum(watched.values())
        single = {name: values for name, values in tensors.items() if values.dtype == torch.float32}
        self._casts = {
            name: [_cast(values, dtype) for dtype in CAST_TO] for name, values in single.items()
        }

    def changed(self) -> list[str]:
        """Names of the tensors that have changed: values, shape, dtype, or whether they share a
        parameter's memory.
        """
        found = self._prints(self._tensors())
        for name, casts in self._casts.items():
            if found.get(name) in casts and self._left[name] not in casts:
                self._left[name] = found[name]
        wrong = [name for name, left in self._left.items() if found.get(name) != left]
        self._left = {**found, **self._left}
        return wrong

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Wraps post-load work: the tensors that it creates or writes are recorded again.

        All others must stay unchanged.
        """
        if not self._left:
            yield
            return
        before = {name: _Place(values) for name, values, _ in _tensors(self.model)}
        yield
        after = {name: values for name, values, _ in _tensors(self.model)}
        self._names |= after.keys() - before.keys()
        touched = {
            name
            for name, values in after.items()
            if name not in before or before[name].left_by(values)
        }
        self.remade |= touched
        self.moved |= {
            name
            for name in touched & before.keys()
            if before[name].address != after[name].data_ptr()
        }
        # torch does not count writes to inference tensors
        rewritten = {
            name: each
            for name, each in after.items()
            if name in self._names and (name in touched or each.is_inference())
        }
        kept = {name: left for name, left in self._left.items() if name in after}
        self._left = {**kept, **self._prints(rewritten)}

    def all(self) -> Iterator[tuple[str, torch.Tensor, Print | None]]:
        """Yields (name, tensor, its state if it is watched) for every tensor of the model except
        its parameters.
        """
        for name, values, _ in _tensors(self.model):
            yield name, values, self._left.get(name)

    def slots(self, values: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
        """The slots of a tensor of the pool, and whether updates write each; empty for other
        tensors.
        """
        of_pool = _region(values) in map(_region, self._written)
        return (
            [(values[slot], slot == self._slot) for slot in range(len(values))] if of_pool else []
        )

    def unproven(self, name: str, values: torch.Tensor) -> bool:
        """Whether loading has made or changed the tensor, but the post-load work of an update does
        not make it again.
        """
        return name not in self.remade and (
            _region(values) in self._made or unwrapped(name) in self._made_names
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            name: values
            for name, values, made_by in _tensors(self.model)
            if name in self._names or made_by in MADE_LATER
        }

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
    found = dict(model.named_parameters())
    used = {unwrapped(name): parameter for name, parameter in found.items()}
    return {
        name: parameter
        for name, parameter in found.items()
        if used[unwrapped(name)] is not parameter
    }


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
    found = {}
    for name, values in tensors.items():
        region = None if memory.holds(values) else _region(values)
        if region and region not in hashes:
            hashes[region] = hash_tensor(values)
        found[name] = Print(values.dtype, tuple(values.shape), hashes[region] if region else None)
    return found


def _grown(
    model: torch.nn.Module, name: str, values: torch.Tensor, before: Mapping[str, Print]
) -> bool:
    """Whether the tensor is a rotary cache that has only grown, and still begins with its earlier
    values.
    """
    holder = dict(model.named_modules()).get(name.rpartition(".")[0])
    if name not in before or not type(holder).__module__.startswith(ROTARY):
        return False
    begin = values[: before[name].shape[0]]
    return Print(begin.dtype, tuple(begin.shape), hash_tensor(begin)) == before[name]


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
        at = bisect(self._spans, (start, float("inf"))) - 1
        return at >= 0 and end <= self._spans[at][1]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, tuple[str, str]]]:
    """Yields (name, tensor, class and attribute that contain it) for every tensor of a model except
    the parameters that updates write. The name is its path.
    """
    for name, parameter in out_of_use(model).items():
        yield name, parameter, ("", "")
    seen: set[int] = set()
    for name, module in model.named_modules():
        for own, values in module._buffers.items():
            if values is not None:
                yield _joined(name, own), values, (type(module).__name__, own)
        for own, value in vars(module).items():
            if type(value) not in PLAIN and own not in OF_TORCH:
                yield from _inside(_joined(name, own), value, (type(module).__name__, own), seen)


def _inside(
    name: str, value: Any, held_by: tuple[str, str], seen: set[int]
) -> Iterator[tuple[str, torch.Tensor, tuple[str, str]]]:
    if isinstance(value, torch.Tensor):
        if _lies_here(value):
            yield name, value, held_by
        return
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": (part, held_by) for key, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {f"{name}[{index}]": (part, held_by) for index, part in enumerate(value)}
    elif (
        type(value).__module__.startswith(LAYERS)
        and not isinstance(value, torch.nn.Module)
        and hasattr(value, "__dict__")
    ):
        parts = {
            _joined(name, own): (part, (type(value).__name__, own))
            for own, part in vars(value).items()
        }
    else:
        return
    if id(value) not in seen:
        seen.add(id(value))
        for part_name, (part, holder) in parts.items():
            yield from _inside(part_name, part, holder, seen)


def _lies_here(values: torch.Tensor) -> bool:
    return values.layout == torch.strided and values.device.type != "meta"


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


def _region(values: torch.Tensor) -> Region:
    return values.data_ptr(), tuple(values.shape), values.stride(), values.dtype


def _span(values: torch.Tensor) -> tuple[int, int]:
    """The addresses of the tensor's first byte and one past its last."""
    reach = (
        sum((extent - 1) * stride for extent, stride in zip(values.shape, values.stride())) + 1
        if values.numel()
        else 0
    )
    return values.data_ptr(), values.data_ptr() + reach * values.itemsize


class _Place:
    """The earlier address of a tensor, and torch's count of the writes to it (none for inference
    tensors).
    """

    def __init__(self, values: torch.Tensor):
        self._values, self._at = weakref.ref(values), self._place(values)

    @property
    def address(self) -> int:
        return self._at[0]

    def left_by(self, values: torch.Tensor) -> bool:
        """Whether `values`, under the same name, is another tensor, is at another address, or has
        been written to.
        """
        return self._values() is not values or self._place(values) != self._at

    @staticmethod
    def _place(values: torch.Tensor) -> tuple[int, int | None]:
        return values.data_ptr(), None if values.is_inference() else values._version


def _cast(values: torch.Tensor, dtype: torch.dtype) -> Print:
    return Print(dtype, tuple(values.shape), hash_tensor(values.to(dtype)))


# Lists all memory that a model in an engine's worker computes with, and why each piece is correct
# after an update.


def inventory(watch: Watch) -> list[Held]:
    """All memory of the model.

    Call it once the watch has started and post-load work has run. Lists memory once, under its
    first name.
    """
    listed: dict[tuple, Held] = {}
    for held, values in _held(watch):
        listed.setdefault(
            (values.data_ptr(), held.shape, values.stride(), held.dtype)
            if values.numel()
            else (held.name,),
            held,
        )
    return list(listed.values())


def _held(watch: Watch) -> Iterator[tuple[Held, torch.Tensor]]:
    for name, values in parameters_of(watch.model).items():
        yield _entry(name, values, WRITTEN), values
    left_over = {id(parameter) for parameter in out_of_use(watch.model).values()}
    for name, values, left in watch.all():
        if left is None:
            yield _entry(name, values, WORKING, "made by forward passes"), values
        elif left.hash is None and (slots := watch.slots(values)):
            for slot, (part, written) in enumerate(slots):
                kind, detail = (
                    (WRITTEN, "")
                    if written
                    else (WORKING, "a slot for adapters that no request of a run uses")
                )
                yield _entry(f"{name}[{slot}]", part, kind, detail), part
        elif left.hash is None:
            yield _entry(name, values, WRITTEN, "in memory that updates write"), values
        elif id(values) in left_over or watch.unproven(name, values):
            yield _entry(name, values, UNPROVEN, LOADING), values
        elif name in watch.moved and values.is_cuda:
            yield (
                _entry(
                    name,
                    values,
                    UNPROVEN,
                    "post-load work moves it, and CUDA graphs still read the old place",
                ),
                values,
            )
        elif name in watch.remade:
            yield _entry(name, values, DERIVED, "made by post-load work"), values
        else:
            yield _entry(name, values, CONSTANT, f"{left.hash:016x}"), values
    for number, (ref, as_built) in enumerate(watch.outside):
        if (values := ref()) is not None:
            kind, when = (
                (OUTSIDE, "made before weights were loaded")
                if as_built
                else (UNPROVEN_OUTSIDE, LOADING)
            )
            yield (
                _entry(f"outside the model, {number}", values, kind, when + _holder(values)),
                values,
            )


def _entry(name: str, values: torch.Tensor, kind: str, detail: str = "") -> Held:
    return Held(
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
    modules = {
        id(vars(module)): name
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
    }
    where = ""
    for holder in gc.get_referrers(values):
        if isinstance(holder, dict):
            for key, value in holder.items():
                if value is values:
                    return (
                        f", {modules[id(holder)]}.{key}"
                        if id(holder) in modules
                        else f", in a dict under {key!r}"
                    )
        if not isinstance(holder, (types.FrameType, types.GeneratorType)):
            where = f", in a {type(holder).__qualname__}"
    return where
