"""Lists all memory of an engine's worker that a model computes with, and why it is right after an update."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import torch

from megarl.weight_sync.commands import CONSTANT, DERIVED, OUTSIDE, UNPROVEN, UNPROVEN_OUTSIDE, WORKING, WRITTEN, Held
from megarl.weight_sync.engine.watch import LOADING, Watch, out_of_use, parameters_of


def inventory(watch: Watch) -> list[Held]:
    """Call it once the watch has started and post-load work has run. Memory with several names is listed once, by the first."""
    listed: dict[tuple, Held] = {}
    for held, values in _held(watch):
        listed.setdefault((values.data_ptr(), held.shape, values.stride(), held.dtype) if values.numel() else (held.name,), held)
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
                kind, detail = (WRITTEN, "") if written else (WORKING, "a slot for adapters that no request of a run has")
                yield _entry(f"{name}[{slot}]", part, kind, detail), part
        elif left.hash is None:
            yield _entry(name, values, WRITTEN, "in memory that updates write"), values
        elif id(values) in left_over or watch.unproven(name, values):
            yield _entry(name, values, UNPROVEN, LOADING), values
        elif name in watch.moved and values.is_cuda:
            yield _entry(name, values, UNPROVEN, "post-load work puts it elsewhere, and graphs of CUDA go on reading where it was"), values
        elif name in watch.remade:
            yield _entry(name, values, DERIVED, "made by post-load work"), values
        else:
            yield _entry(name, values, CONSTANT, f"{left.hash:016x}"), values
    for number, (ref, as_built) in enumerate(watch.outside):
        if (values := ref()) is not None:
            kind, when = (OUTSIDE, "made before weights were loaded") if as_built else (UNPROVEN_OUTSIDE, LOADING)
            yield _entry(f"outside the model, {number}", values, kind, when + _holder(values)), values


def _entry(name: str, values: torch.Tensor, kind: str, detail: str = "") -> Held:
    return Held(name, tuple(values.shape), str(values.dtype).removeprefix("torch."), values.nbytes, kind, detail)


def _holder(values: torch.Tensor) -> str:
    """What Python object holds the tensor, as far as the garbage collector tells: not if the object is older than the worker's fork. (No
    comprehension here: its cell would be one more holder.)"""
    modules = {id(vars(module)): name for name, module in list(sys.modules.items()) if isinstance(module, types.ModuleType)}
    where = ""
    for holder in gc.get_referrers(values):
        if isinstance(holder, dict):
            for key, value in holder.items():
                if value is values:
                    return f", {modules[id(holder)]}.{key}" if id(holder) in modules else f", in a dict under {key!r}"
        if not isinstance(holder, (types.FrameType, types.GeneratorType)):
            where = f", in a {type(holder).__qualname__}"
    return where
