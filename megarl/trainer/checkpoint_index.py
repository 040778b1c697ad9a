"""The index of a checkpoint folder, which tells whole files from damaged ones. It needs no torch, since the launcher uses it too.

`index.msgpack` is written last. It lists every other file with its size. For small files it has a digest; for those with tensors it says
which box of which tensor lies where, with that box's share in the tensor's hash (kernels/audit.py). It begins with a digest of itself. So
every byte of a checkpoint is accounted for.
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
CRITIC = "critic"  # the folder in a checkpoint that holds the critic's
FORMAT = 1
_DIGEST_BYTES = 32


class CheckpointError(RunError):
    """A checkpoint is damaged or missing. The message names it, the file, and what to do; `problem` is the middle part."""

    def __init__(self, message: str, problem: str = ""):
        super().__init__(message)
        self.problem = problem


def unusable(folder: Path | str, problem: str) -> CheckpointError:
    """The error about a checkpoint, or about a critic's in one: that folder alone must not be moved away."""
    folder = Path(folder)
    if folder.name == CRITIC:
        folder, problem = folder.parent, f"in {CRITIC}/: {problem}"
    return CheckpointError(f"checkpoint {folder} cannot be used: {problem}. Move it away, and the one before it serves", problem)


class StoredBox(msgspec.Struct, frozen=True, array_like=True):
    """The elements of a tensor's box at `start` of shape `shape`, stored row by row at `offset` of file number `file`."""

    file: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    share: int  # its part of the tensor's hash


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str  # "float32" | "uint8"
    shape: tuple[int, ...]
    boxes: list[StoredBox]  # of all ranks; together they hold every element once

    @property
    def elements(self) -> int:
        return sum(math.prod(box.shape) for box in self.boxes)

    @property
    def hash(self) -> int:
        return sum(box.share for box in self.boxes) % 2**64


class StoredFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size_bytes: int
    digest: bytes = b""  # of the whole file; empty if it consists of boxes


class _Head(msgspec.Struct):
    """The part of the index that every version has."""

    format: int


class Index(msgspec.Struct, frozen=True):
    format: int
    dtype: str  # of the model that was trained
    files: list[StoredFile]
    tensors: dict[str, StoredTensor]
    live: dict[str, int]  # hash of every logical tensor in the model's own dtype, by name with the kind `live`

    def write(self, folder: Path) -> None:
        body = msgspec.msgpack.encode(self)
        write_durably(folder / INDEX_FILE, digest(body) + body)

    @classmethod
    def read(cls, folder: Path | str) -> Index:
        """Reads the index of `folder`. Raises CheckpointError if it is missing or damaged."""
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
        """Checks that `files` (by default all) exist with their sizes, and that the small ones have their contents.

        Raises CheckpointError that names those that do not.
        """
        problems = [problem for file in (self.files if files is None else files) if (problem := _problem(Path(folder), file))]
        if problems:
            raise unusable(folder, "; ".join(problems))

    def content(self, folder: Path | str, name: str) -> bytes:
        """The content of a small file. Raises CheckpointError if it is missing or damaged."""
        file = next((file for file in self.files if file.name == name and file.digest), None)
        if file is None:
            raise unusable(folder, f"{name} is not among its files")
        self.check(folder, [file])
        return _content(Path(folder) / name, folder)


def check_checkpoint_files(folder: Path | str) -> None:
    """Makes all checks that need not read the tensors. Raises CheckpointError."""
    for part in (Path(folder), *(path.parent for path in Path(folder).glob(f"{CRITIC}/{INDEX_FILE}"))):
        Index.read(part).check(part)


def small_file(folder: Path, name: str, content: bytes) -> StoredFile:
    """Writes a small file, and returns its entry in the index."""
    write_durably(folder / name, content)
    return StoredFile(name, len(content), digest(content))


def listed_file(folder: Path, name: str) -> StoredFile:
    """The entry of a small file that is there."""
    content = (folder / name).read_bytes()
    return StoredFile(name, len(content), digest(content))


def write_durably(path: Path, content: bytes) -> None:
    """Returns when the content is on the disk; the file's name is only there once the folder is synchronised too."""
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
