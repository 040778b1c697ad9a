"""Files that other processes write or read: ends of logs, files written atomically, private
folders, files of the hub.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

_TRIED_BYTES = 4 << 10
_MOST_BYTES = 64 << 10  # the log of a long run may be larger than memory


def make_private_folder(path: Path) -> None:
    """Creates a folder that only this user can access.

    An existing folder keeps its permissions, which its creator has chosen.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically, by rename.

    If the process dies, the host loses power or the disk is full, the old content stays.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(half, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
        sync_folder(path.parent)
    finally:
        half.unlink(missing_ok=True)


def write_problem(folder: Path) -> str:
    """The reason why nothing can be written to `folder`, such as a full disk; empty if it can be
    written to.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def sync_folder(folder: Path) -> None:
    """Flushes the names in `path` to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def log_tail(path: Path, lines: int = 25) -> str:
    """Its last lines."""
    if not path.exists():
        return "(no log)"
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _MOST_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


OFFLINE = "HF_HUB_OFFLINE"  # environment variable of the hub's client
ANSWER_S = 5.0


class HubError(Exception):
    """The reason why a file cannot be had.

    It completes the sentence "model.path=owner/name: …".
    """


class HubAway(HubError):
    """A file that another machine or user may have: the hub cannot be reached here, or wants a
    login.
    """


def hub_file(repository: str, name: str, kind: str = "model") -> Path:
    """The path in the cache of a file of owner/name, which is a "model" or a "dataset".

    Raises HubError.
    """
    with _hub(name) as only_cached:
        # imported here, since it reads OFFLINE when it is imported
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repository, name, repo_type=kind, local_files_only=only_cached))


def hub_folder(repository: str, patterns: Sequence[str]) -> Path:
    """The folder in the cache with the files of the model owner/name that match.

    Raises HubError.
    """
    with _hub("it") as only_cached:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(repository, allow_patterns=[*patterns], local_files_only=only_cached)
        )


@contextlib.contextmanager
def _hub(name: str) -> Iterator[bool]:
    """Whether to look only in the cache. Errors of the hub's client become HubError."""
    use_cache = unreachable()
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield bool(use_cache)
    except LocalEntryNotFoundError as error:
        raise HubAway(
            f"{name} is not in the hub's cache, and {use_cache or _first_line(error)}"
        ) from error
    except EntryNotFoundError as error:
        raise HubError(f"has no {name} on the hub") from error
    except GatedRepoError as error:
        raise HubAway(
            "is gated on the hub: accept its terms there, and log in by `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            "is no local folder, and no repository on the hub; a private one needs `hf auth login`"
        ) from error
    except (OSError, ValueError) as error:  # the base classes of all errors of the hub
        raise HubError(f"cannot be read from the hub: {_first_line(error)}") from error


@functools.cache
def unreachable() -> str:
    """The reason why the hub cannot be reached; empty if it can.

    If not, also sets OFFLINE for processes that this one starts, so that they too look only in the
    cache. The hub's own client would try five times, for half a minute, for every file in every
    process.
    """
    if os.environ.get(OFFLINE, "").lower() in ("1", "true", "yes", "on"):
        return f"{OFFLINE} is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(
            urllib.request.Request(endpoint, method="HEAD"), timeout=ANSWER_S
        ).close()
    except urllib.error.HTTPError:
        return ""  # it has answered
    except (OSError, http.client.HTTPException, ValueError) as error:
        os.environ[OFFLINE] = "1"
        return f"{endpoint} cannot be reached ({getattr(error, 'reason', error)})"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


PICTURES = (".svg", ".png")


def file_problems(option: str, path: str, endings: Sequence[str] = ()) -> Iterator[str]:
    """Problems with writing a file at `path`, which may exist.

    `option` is the user's name for it, for the message.
    """
    if endings and not path.endswith(tuple(endings)):
        yield f"{option} {path}: must end in {' or '.join(endings)}"
    elif Path(path).is_dir():
        yield f"{option} {path}: is a folder, must be a file"
    elif not Path(path).parent.is_dir():
        yield f"{option} {path}: there is no folder {Path(path).parent}"
    elif not os.access(path if Path(path).exists() else Path(path).parent, os.W_OK):
        yield f"{option} {path}: may not be written"


def folder_problems(option: str, path: str) -> Iterator[str]:
    """Problems with writing a folder at `path`, and any missing folders above it."""
    existing = Path(path)
    if not existing.exists():
        existing = next(folder for folder in Path(path).absolute().parents if folder.exists())
    if not existing.is_dir():
        subject = "" if existing == Path(path) else f"{existing} "
        yield f"{option}{path}: {subject}is a file, must be a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{option}{path}: {existing} may not be written to"


def new_folder_problems(option: str, path: str) -> Iterator[str]:
    """Like `folder_problems`, but nothing may exist at `path`, since an export replaces everything
    there.
    """
    if Path(path).is_dir() and any(Path(path).iterdir()):
        yield f"{option}{path}: is there already, and is not empty; remove it, or name another"
    else:
        yield from folder_problems(option, path)
