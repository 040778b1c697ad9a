"""Which tensors the safetensors files of a HF checkpoint hold, by their headers alone: without torch, and no weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterator

from megarl.config.errors import ConfigError
from megarl.models.spec import ModelSpec
from megarl.reshard.layout import hf_layout

INDEX = "model.safetensors.index.json"
READ_DTYPES = ("F32", "BF16", "F16")
_LONGEST_HEADER_BYTES = 100 << 20  # the format's own limit


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ConfigError."""
    if (folder / INDEX).exists():
        try:
            return dict(json.loads((folder / INDEX).read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder / INDEX}: is no index of safetensors files: {error!r}") from error
    file = folder / "model.safetensors"
    if not file.exists():
        raise ConfigError(f"{folder}: holds neither model.safetensors nor {INDEX}")
    return dict.fromkeys(_header(file), file.name)


def check_checkpoint(spec: ModelSpec, folder: Path) -> dict[str, str]:
    """`tensor_files`, after a look at all tensors of the model. Raises ConfigError naming every one that is missing, has another shape than
    config.json says, or is quantised, and every file that is damaged."""
    files = tensor_files(folder)
    if problems := list(_problems(spec, folder, files)):
        raise ConfigError(problems)
    return files


def _problems(spec: ModelSpec, folder: Path, files: dict[str, str]) -> Iterator[str]:
    expected = {tensor.name: tensor.shape for tensor in hf_layout(spec, "float32").tensors(0)}
    yield from (f"{folder}: tensor {name} is missing" for name in expected if name not in files)
    headers: dict[str, dict[str, Any]] = {}
    for file in sorted({files[name] for name in expected if name in files}):
        try:
            headers[file] = _header(folder / file)
        except ConfigError as error:
            yield from error.problems
    for name, shape in expected.items():
        if name not in files or files[name] not in headers:
            continue
        entry = headers[files[name]].get(name)
        if entry is None:
            yield f"{folder}: tensor {name} is missing in {files[name]}, where {INDEX} has it"
            continue
        if tuple(entry["shape"]) != shape:
            yield f"{folder}: tensor {name} has shape {tuple(entry['shape'])}, config.json says {shape}"
        if entry["dtype"] not in READ_DTYPES:  # its scales would be left out
            yield f"{folder}: tensor {name} is in {entry['dtype']}; can be read: {', '.join(READ_DTYPES)}"


def _header(path: Path) -> dict[str, Any]:
    """Tensor name -> dtype, shape, data_offsets. Format: 8 bytes header length, JSON header, data. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(min(length, _LONGEST_HEADER_BYTES)))
        tensors.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"it has {path.stat().st_size} bytes, its header says {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: is no whole safetensors file: {error}") from error
    return tensors
