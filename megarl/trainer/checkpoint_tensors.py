"""Writes and reads the tensors of a checkpoint: each rank writes a file with its own boxes, and reads the boxes it needs from all files.

Nothing is gathered. Each box is written by itself, then read again and hashed before it counts as written. A box that is loaded is hashed
before it is used.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megarl.box import Box
from megarl.kernels.audit import hash_slice
from megarl.observe.status import counted, mib
from megarl.trainer.checkpoint_index import Index, StoredBox, StoredFile, StoredTensor, unusable

DTYPES = {"float32": torch.float32, "uint8": torch.uint8}
Written = tuple[StoredFile, dict[str, StoredTensor]]  # a rank's file, and what lies where in it
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class HeldBox:
    """A box of a tensor in this rank's memory."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    values: torch.Tensor  # of the box's shape, any strides

    def copied(self) -> HeldBox:
        """The box with a copy of its values in the host's memory."""
        return replace(self, values=self.values.detach().to("cpu", copy=True))

    @property
    def share(self) -> int:
        """The box's share in the tensor's hash."""
        return hash_slice(self.values, self.box, self.shape)


def write_boxes(path: Path, file: int, held: Iterable[HeldBox]) -> Written:
    """Writes the boxes to `path`, file number `file` of the index. Returns (the file's entry, the tensors it holds).

    Raises OSError if it cannot be written, or does not hold what was written.
    """
    stored: dict[str, StoredTensor] = {}
    with open(path, "w+b") as out:
        for part in counted([*held], "writing the checkpoint", lambda part: part.values.nbytes, line="saving", show=mib):
            tensor = stored.setdefault(part.name, StoredTensor(_NAMES[part.values.dtype], part.shape, []))
            tensor.boxes.append(StoredBox(file, out.tell(), part.box.start, part.box.shape, part.share))
            out.write(part.values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        size_bytes = out.tell()
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is read again from the disk
    for name, tensor in stored.items():
        for box in tensor.boxes:
            if hash_slice(_read(path, tensor, box), Box(box.start, box.shape), tensor.shape) != box.share:
                raise OSError(f"{path.name} does not hold what was written to it: {name} differs")
    return StoredFile(path.name, size_bytes), stored


def merged(parts: Iterable[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Merges the tensors that all ranks have written."""
    found: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.items():
            found.setdefault(name, StoredTensor(tensor.dtype, tensor.shape, [])).boxes.extend(tensor.boxes)
    return found


def read_boxes(folder: Path, index: Index, wanted: Iterable[HeldBox]) -> None:
    """Fills the values of the `wanted` boxes. Raises CheckpointError if the checkpoint lacks any of their elements, or is damaged."""
    by_name: dict[str, list[HeldBox]] = defaultdict(list)
    for part in wanted:
        by_name[part.name].append(part)
    for name, parts in counted(
        [*by_name.items()], "reading the checkpoint", lambda of: sum(part.values.nbytes for part in of[1]), show=mib
    ):
        tensor = index.tensors.get(name)
        if tensor is None or tensor.shape != parts[0].shape:
            there = "no such tensor" if tensor is None else f"it with shape {tensor.shape}"
            raise unusable(folder, f"{name} of shape {parts[0].shape} is wanted, but it has {there}: it belongs to another model")
        missing = sum(part.box.numel for part in parts)
        for stored in tensor.boxes:
            box = Box(stored.start, stored.shape)
            common = [(part, both) for part in parts if (both := part.box.intersect(box)) is not None]
            if not common:
                continue
            values = read_box(folder, index, name, stored)
            for part, both in common:
                part.values[_inside(both, part.box)].copy_(values[_inside(both, box)])
                missing -= both.numel
        if missing:
            raise unusable(folder, f"{missing} elements of {name} are missing")


def read_box(folder: Path, index: Index, name: str, stored: StoredBox) -> torch.Tensor:
    """Reads one box. Raises CheckpointError if its bytes are not those that were written."""
    file, tensor = index.files[stored.file], index.tensors[name]
    index.check(folder, [file])
    try:
        values = _read(folder / file.name, tensor, stored)
    except OSError as error:
        raise unusable(folder, f"{file.name} cannot be read: {error}") from error
    if hash_slice(values, Box(stored.start, stored.shape), tensor.shape) != stored.share:
        raise unusable(folder, f"{file.name} is damaged: its bytes of {name} are not those that were written")
    return values


def tensor_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}.bin"


def _read(path: Path, tensor: StoredTensor, stored: StoredBox) -> torch.Tensor:
    dtype = DTYPES[tensor.dtype]
    values = np.fromfile(path, np.uint8, math.prod(stored.shape) * dtype.itemsize, offset=stored.offset)
    return torch.from_numpy(values).view(dtype).view(stored.shape)


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of `box` in a tensor that holds `outer`."""
    return tuple(slice(s - o, s - o + n) for s, o, n in zip(box.start, outer.start, box.shape))
