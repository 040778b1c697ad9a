"""Where rows come from: files of JSON, comma-separated values or parquet, folders, the hub."""

from __future__ import annotations

import csv
import difflib
import json
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from megarl.config.data import SourceConfig
from megarl.config.errors import ConfigError
from megarl.data.benchmarks import files_of
from megarl.data.rows import RowProblem
from megarl.data.synthetic import PREFIX
from megarl.hub import HubError, hub_file, unreachable

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_LONGEST_VALUE = 2**31 - 1  # of a .csv file, in characters: more than memory has, where the module csv has 131,072 by default
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that stands for a character with its neighbour alone
_OTHER_FILES = (".txt", ".gz", ".zst", ".arrow")


def is_local(source: str) -> bool:
    """Whether reading it needs no network: it is a file or folder, even if missing, or a synthetic task."""
    path = Path(source).expanduser()
    looks_local = not _HUB_NAME.fullmatch(source) or path.suffix in (*_FILES, *_OTHER_FILES)
    return source.startswith(PREFIX) or looks_local or path.exists()


def records(config: SourceConfig, key: str) -> Iterator[tuple[str, Any]]:
    """(where, record) pairs; for a line that is not JSON the record is a RowProblem."""
    path, named = Path(config.source).expanduser(), f"{key}.source={config.source}"
    if (parts := files_of(config)) and (not is_local(config.source) or path.is_dir()):
        return chain.from_iterable(_jsonl(_part(config, name, key)) for name in parts)
    if not is_local(config.source) or path.is_dir():
        return _hub(config, key)
    if path.suffix not in _FILES:
        wanted = (
            f"a file must end in {', '.join(_FILES[:-1])} or {_FILES[-1]}"
            if path.exists() or path.suffix in _OTHER_FILES
            else "no such file or folder"
        )
        raise ConfigError(f"{named}: {wanted}")
    if not path.is_file():
        raise ConfigError(f"{named}: no such file{_near(path)}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{named}: may not be read")
    return _READERS[path.suffix](path)


def _part(config: SourceConfig, name: str, key: str) -> Path:
    """A file of a data set that has several, in a folder or on the hub, whose own client can no longer read sets that need a program."""
    folder = Path(config.source).expanduser()
    if folder.is_dir():
        if not (folder / name).is_file():
            raise ConfigError(f"{key}.source={config.source}: has no {name}, which {key}.subset={config.subset} needs")
        return folder / name
    try:
        return hub_file(config.source, name, "dataset")
    except HubError as error:
        raise ConfigError(f"{key}.source={config.source}: {error}") from error


def _near(path: Path) -> str:
    stems = {entry.stem: entry for entry in path.parent.iterdir() if entry.suffix in _FILES} if path.parent.is_dir() else {}
    found = difflib.get_close_matches(path.stem, stems, n=1)
    return f"; did you mean {stems[found[0]]}?" if found else ""


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = parsed(line)
            except RowProblem as problem:
                record = problem
            yield f"{path}, line {number}", record


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """One list of rows, or JSONL under another name."""
    text = path.read_bytes()
    try:
        found = parsed(text)
    except RowProblem as problem:
        if text.lstrip()[:1] == b"[" or text.strip().split(b"\n")[0].strip() == b"{":
            raise ConfigError(f"{path}: {problem}; it must be a list of rows, or have one row on each line") from problem
        yield from _jsonl(path)
        return
    if not isinstance(found, list):
        if b"\n" in text.strip():
            raise ConfigError(f"{path}: is one value, and must be a list of rows, or have one row on each line")
        found = [found]
    yield from ((f"{path}, row {number}", record) for number, record in enumerate(found, start=1))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """Comma-separated (.csv) or tab-separated values, whose first line names the columns. All values are texts. A column without a name,
    such as pandas writes for its index, is left out."""
    csv.field_size_limit(_LONGEST_VALUE)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t", strict=True)
            named = [name for name in rows.fieldnames or () if name]
            if len(set(named)) < len(named):
                raise ConfigError(f"{path}: its first line names a column twice")
            for record in rows:
                more = f"it has more values than the first line has columns: {len(rows.fieldnames or ())}"
                known = {name: record[name] for name in named}
                yield f"{path}, line {rows.line_num}", RowProblem(more) if rows.restkey in record else known
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as {path.suffix}: {error}") from error


def parsed(text: bytes) -> Any:
    """JSON. Raises RowProblem."""
    try:
        found = json.loads(text.decode("utf-8-sig").rstrip())
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeDecodeError as error:
        raise RowProblem(f"not UTF-8 at byte {error.start}", "not UTF-8") from error
    except json.JSONDecodeError as error:
        raise RowProblem(f"malformed JSON at column {error.colno}: {error.msg}", "malformed JSON") from error
    except UnicodeEncodeError as error:
        raise RowProblem(f"{error.object[error.start]!a} is half of a surrogate pair, and no character") from error
    except RecursionError as error:
        raise RowProblem("JSON that is nested too deeply") from error
    except ValueError as error:  # the only one that is left
        raise RowProblem("a number of too many digits") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        for number, record in enumerate((record for batch in batches for record in batch.to_pylist()), start=1):
            yield f"{path}, row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a parquet file ({error})") from error


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}


def _hub(config: SourceConfig, key: str) -> Iterator[tuple[str, Any]]:
    why = "" if Path(config.source).exists() else unreachable()  # must precede the import, which reads what this sets
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        rows = datasets.load_dataset(config.source, config.subset, split=config.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        subset = f", subset {config.subset}" if config.subset else ""
        what = f"{key}.source={config.source}{subset}, split {config.split}"
        reason = (why and f"it is not in the cache, and {why}") or (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{what}: cannot be loaded: {reason}") from error
    for number, record in enumerate(rows, start=1):
        yield f"{config.source}, split {config.split}, row {number}", record
