"""What a checkpoint folder holds, by which its files can be told whole from damaged. No torch: the launcher asks too.

`index.msgpack` is written last. It lists every other file with its size; of the small ones it has a digest, and of those with tensors it
says which box of which tensor lies where, with that box's share in the tensor's hash (kernels/audit.py). It begins with a digest
of itself. So every byte of a checkpoint is accounted for.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megarl.config.errors import RunError

INDEX_FILE = "index.msgpack"
FORMAT = 1
_DIGEST_BYTES = 32


class CheckpointError(RunError):
    """A checkpoint is damaged, or none. The message names it, the file, and what to do; `problem` is the middle of it."""

    def __init__(self, message: str, problem: str = ""):
        super().__init__(message)
        self.problem = problem


def unusable(folder: Path | str, problem: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} cannot be used: {problem}. Move it away, and the one before it serves", problem)


class StoredBox(msgspec.Struct, frozen=True, array_like=True):
    """Elements of a tensor: those of the box at `start` of shape `shape`, row by row, at `offset` of file number `file`."""

    file: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    share: int  # in the tensor's hash


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str  # "float32" | "uint8"
    shape: tuple[int, ...]
    boxes: list[StoredBox]  # of all ranks; together every element once

    @property
    def elements(self) -> int:
        return sum(math.prod(box.shape) for box in self.boxes)

    @property
    def hash(self) -> int:
        return sum(box.share for box in self.boxes) % 2**64


class StoredFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size_bytes: int
    digest: bytes = b""  # of the whole file; empty where all of it is boxes


class _Head(msgspec.Struct):
    """Of the index of any version."""

    format: int


class Index(msgspec.Struct, frozen=True):
    format: int
    dtype: str  # of the model that was trained
    files: list[StoredFile]
    tensors: dict[str, StoredTensor]
    live: dict[str, int]  # the hash of every logical tensor as the model held it, in its own dtype, by name with the kind `live`

    def write(self, folder: Path) -> None:
        body = msgspec.msgpack.encode(self)
        write_durably(folder / INDEX_FILE, digest(body) + body)

    @classmethod
    def read(cls, folder: Path | str) -> Index:
        """Raises CheckpointError where it is missing or damaged."""
        path = Path(folder) / INDEX_FILE
        if not path.exists():
            there = "it was written by an earlier version of MegaRL" if (path.parent / ".metadata").exists() else "it is not complete"
            raise unusable(folder, f"{there}: {INDEX_FILE} is missing")
        content = _content(path, folder)
        found, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest(body) != found:
            raise unusable(folder, f"{INDEX_FILE} is damaged")
        if (written := msgspec.msgpack.decode(body, type=_Head).format) != FORMAT:
            raise unusable(folder, f"{INDEX_FILE} has format {written}; this version of MegaRL reads format {FORMAT}")
        return msgspec.msgpack.decode(body, type=cls)

    def check(self, folder: Path | str, files: Iterable[StoredFile] | None = None) -> None:
        """That `files` (all of them, by default) are there, each of its size, and the small ones as they were written.

        Raises CheckpointError that names those which are not.
        """
        problems = [problem for file in (self.files if files is None else files) if (problem := _problem(Path(folder), file))]
        if problems:
            raise unusable(folder, "; ".join(problems))

    def content(self, folder: Path | str, name: str) -> bytes:
        """Of a small file. Raises CheckpointError where it is missing or damaged."""
        file = next((file for file in self.files if file.name == name and file.digest), None)
        if file is None:
            raise unusable(folder, f"{name} is not among its files")
        self.check(folder, [file])
        return _content(Path(folder) / name, folder)


def check_checkpoint_files(folder: Path | str) -> None:
    """All that can be told without reading the tensors. Raises CheckpointError."""
    Index.read(folder).check(folder)


def small_file(folder: Path, name: str, content: bytes) -> StoredFile:
    """Writes it."""
    write_durably(folder / name, content)
    return StoredFile(name, len(content), digest(content))


def write_durably(path: Path, content: bytes) -> None:
    """When it returns the content is on the disk; its name is there when the folder is synchronised, too."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _problem(folder: Path, file: StoredFile) -> str | None:
    path = folder / file.name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if size != file.size_bytes:
        return f"{file.name} is damaged: it has {size} bytes instead of {file.size_bytes}"
    if file.digest and digest(_content(path, folder)) != file.digest:
        return f"{file.name} is damaged: its bytes are not those that were written"
    return None


def _content(path: Path, folder: Path | str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unusable(folder, f"{path.name} cannot be read: {error.strerror}") from error
