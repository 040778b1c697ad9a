"""Watches the tensors that an engine's worker computes with but no update writes: rotary caches, tensors that post-load work derives from
parameters, scales of a quantisation method. They are hashed before the first update, and again with each audit.

They are the buffers of all modules, and all other tensors reachable from a module: through attributes, containers, and objects of SGLang's
layers that are not modules (quantisation methods, router settings). Parameters, and tensors that share a parameter's memory, are left out:
updates write those, and the audit compares them with the trainer's.

Forward passes create working memory that changes every time. So a tensor counts only if it exists as soon as the model is loaded, if
post-load work creates it, or if it is listed in `MADE_LATER`. KV caches, graph pools and the memory of collectives lie outside the model
and its layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from megarl.kernels.audit import hash_tensor

LAYERS = "sglang.srt.layers."  # objects of these classes belong to a module without being one
MADE_LATER = {("StandardDispatcher", "local_expert_mapping")}  # created by the first forward pass, then constant
CAST_TO = (torch.bfloat16, torch.float16)  # the first forward pass may cast a rotary cache to the dtype of queries

PLAIN = {type(None), bool, int, float, str}  # most attributes; skipped early, because engines are paused during the walk
OF_TORCH = frozenset(vars(torch.nn.Module()))  # parameters, buffers, hooks

Region = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]  # address, shape, strides


@dataclasses.dataclass(frozen=True)
class Print:
    """The state of a tensor. `hash` is None if it shares a parameter's memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    hash: int | None


class Watch:
    """Watches one live model. Construct it as soon as the model is loaded."""

    def __init__(self, model: torch.nn.Module, written: Collection[torch.Tensor] = ()):
        """`written`: what updates write besides the parameters."""
        self._model, self._written = model, written
        self._names = {name for name, _, _ in _tensors(model)}
        self._left: dict[str, Print] = {}  # their state at the last audit, or after post-load work since
        self._casts: dict[str, list[Print]] = {}  # the states they may be cast to
        self.count, self.nbytes = 0, 0  # of the watched tensors; memory with two names counts once

    def start(self) -> None:
        """Records the current state; further calls do nothing."""
        if self._left:
            return
        tensors = self._tensors()
        self._left = self._prints(tensors)
        watched = {_region(values): values.nbytes for name, values in tensors.items() if self._left[name].hash is not None}
        self.count, self.nbytes = len(watched), sum(watched.values())
        single = {name: values for name, values in tensors.items() if values.dtype == torch.float32}
        self._casts = {name: [_cast(values, dtype) for dtype in CAST_TO] for name, values in single.items()}

    def changed(self) -> list[str]:
        """Names of the tensors that have changed: values, shape, dtype, or whether they share a parameter's memory."""
        found = self._prints(self._tensors())
        for name, casts in self._casts.items():
            if found.get(name) in casts and self._left[name] not in casts:
                self._left[name] = found[name]
        wrong = [name for name, left in self._left.items() if found.get(name) != left]
        self._left = {**found, **self._left}
        return wrong

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Wraps post-load work: the tensors that it creates or writes are recorded anew. All others must stay unchanged."""
        if not self._left:
            yield
            return
        before = {name: _place(values) for name, values, _ in _tensors(self._model)}
        yield
        after = {name: values for name, values, _ in _tensors(self._model)}
        self._names |= after.keys() - before.keys()
        rewritten = {name: values for name, values in after.items() if name in self._names and not _untouched(values, before.get(name))}
        kept = {name: left for name, left in self._left.items() if name in after}
        self._left = {**kept, **self._prints(rewritten)}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: values for name, values, made_by in _tensors(self._model) if name in self._names or made_by in MADE_LATER}

    def _prints(self, tensors: dict[str, torch.Tensor]) -> dict[str, Print]:
        parameters, hashes = _Memory([*self._model.parameters(), *self._written]), {}
        prints = {}
        for name, values in tensors.items():
            region = None if parameters.holds(values) else _region(values)
            if region and region not in hashes:
                hashes[region] = hash_tensor(values)
            prints[name] = Print(values.dtype, tuple(values.shape), hashes[region] if region else None)
        return prints


class _Memory:
    """The address ranges that tensors occupy."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._spans: list[tuple[int, int]] = []
        for start, end in sorted(map(_span, tensors)):
            if self._spans and start <= self._spans[-1][1]:
                start, end = self._spans[-1][0], max(end, self._spans.pop()[1])
            self._spans.append((start, end))

    def holds(self, tensor: torch.Tensor) -> bool:
        start, end = _span(tensor)
        at = bisect(self._spans, (start, float("inf"))) - 1
        return at >= 0 and end <= self._spans[at][1]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, tuple[str, str]]]:
    """Yields (name, tensor, class and attribute that hold it) for every tensor of a model except its parameters. The name is its path."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for own, values in module._buffers.items():
            if values is not None:
                yield _joined(name, own), values, (type(module).__name__, own)
        for own, value in vars(module).items():
            if type(value) not in PLAIN and own not in OF_TORCH:
                yield from _inside(_joined(name, own), value, (type(module).__name__, own), seen)


def _inside(name: str, value: Any, held_by: tuple[str, str], seen: set[int]) -> Iterator[tuple[str, torch.Tensor, tuple[str, str]]]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type != "meta":
            yield name, value, held_by
        return
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": (part, held_by) for key, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {f"{name}[{index}]": (part, held_by) for index, part in enumerate(value)}
    elif type(value).__module__.startswith(LAYERS) and not isinstance(value, torch.nn.Module) and hasattr(value, "__dict__"):
        parts = {_joined(name, own): (part, (type(value).__name__, own)) for own, part in vars(value).items()}
    else:
        return
    if id(value) not in seen:
        seen.add(id(value))
        for part_name, (part, holder) in parts.items():
            yield from _inside(part_name, part, holder, seen)


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


def _region(values: torch.Tensor) -> Region:
    return values.data_ptr(), tuple(values.shape), values.stride(), values.dtype


def _span(values: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and one past its last."""
    reach = sum((extent - 1) * stride for extent, stride in zip(values.shape, values.stride())) + 1 if values.numel() else 0
    return values.data_ptr(), values.data_ptr() + reach * values.itemsize


def _place(values: torch.Tensor) -> tuple[int, int | None]:
    """Its address and torch's version counter, which is None for inference tensors."""
    return values.data_ptr(), None if values.is_inference() else values._version


def _untouched(values: torch.Tensor, before: tuple[int, int | None] | None) -> bool:
    return before is not None and before[1] is not None and _place(values) == before


def _cast(values: torch.Tensor, dtype: torch.dtype) -> Print:
    return Print(dtype, tuple(values.shape), hash_tensor(values.to(dtype)))
