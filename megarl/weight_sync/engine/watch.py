"""What an engine's worker computes with though no update writes it: rotary caches, what post-load work makes of parameters, scales of a
quantisation method. Hashed before the first update, and again with each audit.

These are the buffers of all modules, and the tensors that hang on modules otherwise: as attributes, in containers, and in those objects of
SGLang's layers that are no modules (quantisation methods, settings of a router). Parameters are not among them, nor what lies in the memory
of one: those are written, and audited against the trainer.

What forward passes make is their working memory, and changes with each. So only those tensors count that are there as soon as the model is
loaded, those that post-load work makes, and `MADE_LATER`. Caches of keys and values, graph pools and the memory of collectives lie
outside of the model and of its layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from bisect import bisect
from collections.abc import Iterator
from typing import Any

import torch

from megarl.kernels.audit import hash_tensor

LAYERS = "sglang.srt.layers."  # classes of what belongs to a module, though it is none itself
MADE_LATER = {("StandardDispatcher", "local_expert_mapping")}  # by the first forward pass, and the same ever after
CAST_TO = (torch.bfloat16, torch.float16)  # the first forward pass may cast a rotary cache to the dtype of queries

PLAIN = {type(None), bool, int, float, str}  # most attributes: engines stand still while all are looked at
OF_TORCH = frozenset(vars(torch.nn.Module()))  # parameters, buffers, hooks

Region = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]  # address, shape, strides


@dataclasses.dataclass(frozen=True)
class Print:
    """A tensor as it was found. `hash` is None where it lies in the memory of a parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    hash: int | None


class Watch:
    """Over one live model. Make it as soon as the model is loaded."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._names = {name for name, _, _ in _tensors(model)}
        self._left: dict[str, Print] = {}  # as they were at the last audit, or were left by post-load work since
        self._casts: dict[str, list[Print]] = {}  # what they may be cast to
        self.count, self.nbytes = 0, 0  # of what is watched; memory that has two names counts once

    def start(self) -> None:
        """Notes what is there; called again, nothing."""
        if self._left:
            return
        tensors = self._tensors()
        self._left = self._prints(tensors)
        watched = {_region(values): values.nbytes for name, values in tensors.items() if self._left[name].hash is not None}
        self.count, self.nbytes = len(watched), sum(watched.values())
        single = {name: values for name, values in tensors.items() if values.dtype == torch.float32}
        self._casts = {name: [_cast(values, dtype) for dtype in CAST_TO] for name, values in single.items()}

    def changed(self) -> list[str]:
        """Names of those that are no longer what they were: other values, another shape or dtype, in a parameter's memory or out of it."""
        found = self._prints(self._tensors())
        for name, casts in self._casts.items():
            if found.get(name) in casts and self._left[name] not in casts:
                self._left[name] = found[name]
        wrong = [name for name, left in self._left.items() if found.get(name) != left]
        self._left = {**found, **self._left}
        return wrong

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Around post-load work: what it makes anew, or writes to, is what counts from then on. All else must stay as it was."""
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
        parameters, hashes = _Memory(self._model.parameters()), {}
        prints = {}
        for name, values in tensors.items():
            region = None if parameters.holds(values) else _region(values)
            if region and region not in hashes:
                hashes[region] = hash_tensor(values)
            prints[name] = Print(values.dtype, tuple(values.shape), hashes[region] if region else None)
        return prints


class _Memory:
    """Bytes that tensors take."""

    def __init__(self, tensors: Iterator[torch.Tensor]):
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
    """(name, tensor, class and attribute that hold it) of every tensor of a model but its parameters. A name is the way to it."""
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
    """Addresses of its first byte, and behind its last one."""
    reach = sum((extent - 1) * stride for extent, stride in zip(values.shape, values.stride())) + 1 if values.numel() else 0
    return values.data_ptr(), values.data_ptr() + reach * values.itemsize


def _place(values: torch.Tensor) -> tuple[int, int | None]:
    """Address, and how often this process has written to it; None where torch does not count that."""
    return values.data_ptr(), None if values.is_inference() else values._version


def _untouched(values: torch.Tensor, before: tuple[int, int | None] | None) -> bool:
    return before is not None and before[1] is not None and _place(values) == before


def _cast(values: torch.Tensor, dtype: torch.dtype) -> Print:
    return Print(dtype, tuple(values.shape), hash_tensor(values.to(dtype)))
