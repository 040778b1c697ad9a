"""Checks the safetensors files of an HF checkpoint, mostly by their headers, without torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.errors import ConfigError
from megarl.models import load_spec
from megarl.models.multi_token import PREDICTION
from megarl.models.registry import family, fused_tensors, is_own
from megarl.models.spec import LM, SCALAR, ModelSpec
from megarl.models.vocabulary import EMBED, HEAD
from megarl.reshard.layout import LocalTensor, hf_layout

INDEX = "model.safetensors.index.json"
VISION = "model.visual."  # prefix of a vision tower's tensors
READ_DTYPES = ("F32", "BF16", "F16")
FP8, BLOCK, SCALE = "F8_E4M3", 128, "_scale_inv"  # weights in blocks of 128x128, each with a scale, as in DeepSeek-V3 and Kimi K2
# MXFP4, as in gpt-oss: instead of an (untransposed) tensor of experts, files have a tensor of codes and a tensor of scales (e8m0), one for
# each block of columns. A byte of codes has two values.
FP4, FP4_BLOCK, FP4_CODES, FP4_SCALES = "U8", 32, "_blocks", "_scales"
FP4_VALUES = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
EXPONENTS = {  # all bits set: NaN or infinity
    "F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), FP8: ("u1", 0x7F), FP4: ("u1", 0xFF),
}  # fmt: skip
SAMPLES, SAMPLE_BYTES = 32, 64 << 10
_CHUNK_BYTES = 64 << 20
_LONGEST_HEADER_BYTES = 100 << 20  # the format's own limit


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ConfigError."""
    if (folder / INDEX).exists():
        try:
            return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder / INDEX}: is not an index of safetensors files: {error!r}") from error
    file = folder / "model.safetensors"
    if not file.exists():
        raise ConfigError(f"{folder}: holds neither model.safetensors nor {INDEX}")
    return dict.fromkeys(header(file), file.name)


def filed(spec: ModelSpec, files: Collection[str]) -> tuple[LocalTensor, ...]:
    """The tensors of the model as the files have them. Qwen3.5 is published with the experts of a layer stacked or separate, and
    config.json does not say which."""
    other = replace(spec, stacked_experts=not spec.stacked_experts)
    ways = [spec] if fused_tensors(other) == fused_tensors(spec) else [spec, other]
    found = [hf_layout(way, "float32", fused=True).tensors(0) for way in ways]
    return min(found, key=lambda tensors: sum(tensor.name not in files for tensor in tensors))


def check_checkpoint(spec: ModelSpec, folder: Path, without: Collection[str] = ()) -> dict[str, str]:
    """Checks all tensors of the model, except `without`, and returns `tensor_files`. Raises ConfigError that names every tensor that is
    missing, quantised, or of another shape than in config.json, and every damaged file."""
    files = tensor_files(folder)
    if problems := list(_problems(spec, folder, files, without)):
        raise ConfigError(problems)
    return files


def check_config(spec: ModelSpec, folder: Path) -> None:
    """Raises ConfigError if the config.json beside the weights cannot be read, or describes another model than `spec`. An engine builds its
    model from that file, while the run is planned for `spec`."""
    config = folder / "config.json"
    there = load_spec(folder, own_family=spec.family if is_own(spec) else None, mtp=spec.mtp_layers > 0)
    there = replace(there, mtp_drafts=spec.mtp_drafts)  # a checkpoint does not say this
    named = [(field.name, getattr(there, field.name), getattr(spec, field.name)) for field in fields(spec) if field.compare]
    differing = [f"{name} {value!r}, not {wanted!r}" for name, value, wanted in named if value != wanted]
    if differing:
        raise ConfigError(f"{config}: is of another model than the run's: it has {', '.join(differing)}")
    if not isinstance(json.loads(config.read_text(encoding="utf-8")).get("model_type"), str):
        raise ConfigError(f"{config}: model_type is missing")


def check_finite(spec: ModelSpec, folder: Path) -> None:
    """Raises ConfigError that names every tensor of the model with a NaN or an infinity, and its file. Reads all weights."""
    problems, files = [], check_checkpoint(spec, folder)
    headers = {file: header(folder / file) for file in set(files.values())}
    names = sorted(tensor.name for tensor in filed(spec, files))
    names = [name if name in files else name + FP4_SCALES for name in names]
    for name in [*names, *(name + SCALE for name in names if headers[files[name]][name]["dtype"] == FP8)]:
        path, entry = folder / files[name], headers[files[name]][name]
        word, exponent = EXPONENTS[entry["dtype"]]
        with open(path, "rb") as opened:
            begin = 8 + int.from_bytes(opened.read(8), "little")
        first, end = (begin + offset for offset in entry["data_offsets"])
        for at in range(first, end, _CHUNK_BYTES):
            words = np.fromfile(path, word, min(_CHUNK_BYTES, end - at) // np.dtype(word).itemsize, offset=at)
            if ((words & exponent) == exponent).any():
                problems.append(not_finite(path, name))
                break
    if problems:
        raise ConfigError(problems)


def not_finite(file: Path, tensor: str) -> str:
    return f"{file}: tensor {tensor} holds values that are not finite (NaN or infinity): no model can be trained or served with them"


def fingerprint(folder: Path) -> str:
    """A fingerprint of the weights in `folder`: equal for equal files in any place, and different for other weights. It covers the files'
    sizes and SAMPLES pieces of each file, which any training changes. To hash terabytes in full would take as long as loading them."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size};".encode())
        with open(path, "rb") as file:
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _absent_layer(spec: ModelSpec, files: Collection[str]) -> set[str]:
    """The tensors of the layer for multi-token prediction, if all are absent, as in exports of runs that ignored the layer."""
    if not spec.mtp_layers:
        return set()
    alone = {tensor.name for tensor in filed(replace(spec, mtp_layers=0, mtp_drafts=False), files)}
    own = {tensor.name for tensor in filed(spec, files)} - alone
    return own if own.isdisjoint(files) else set()


def _problems(spec: ModelSpec, folder: Path, files: dict[str, str], without: Collection[str]) -> Iterator[str]:
    if absent := _absent_layer(spec, files):
        told = f"{len(absent)} tensors, such as {min(absent)}, are missing; trainer.mtp must be ignore"
        yield f"{folder}: has no layer for multi-token prediction: {told}"
    without = {*without, *absent}
    yield from _unread(spec, folder, files)
    expected: dict[str, tuple[int, ...]] = {}
    in_fp4: set[str] = set()
    for tensor in filed(spec, files):
        if tensor.transposed and tensor.name + FP4_CODES in files:
            blocks = (*tensor.shape[:-1], -(-tensor.shape[-1] // FP4_BLOCK))
            own = {tensor.name + FP4_CODES: (*blocks, FP4_BLOCK // 2), tensor.name + FP4_SCALES: blocks}
            expected |= own
            in_fp4 |= own.keys()
        elif tensor.name not in without:
            expected[tensor.name] = tensor.file_shape
    yield from (f"{folder}: tensor {name} is missing" for name in expected if name not in files)
    headers: dict[str, dict[str, Any]] = {}
    for file in sorted({files[name] for name in expected if name in files}):
        try:
            headers[file] = header(folder / file)
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
        if entry["dtype"] == FP4 and name in in_fp4:
            continue
        if entry["dtype"] == FP8 and len(shape) == 2:
            yield from _scale_problems(folder, files, headers, name, shape)
        elif entry["dtype"] not in READ_DTYPES:  # the scales of such a tensor would be ignored
            yield f"{folder}: tensor {name} is in {entry['dtype']}; can be read: {', '.join(READ_DTYPES)}, and matrices in {FP8}"


# Tensors that do not change what a model computes. Older versions of Transformers saved buffers of rotary embeddings and masks.
_IDLE = re.compile(r".*(rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq|attn\.masked_bias|attn\.bias|num_batches_tracked)")
_NAMED = 5  # at most so many names are in one message


def _unread(spec: ModelSpec, folder: Path, files: dict[str, str]) -> Iterator[str]:
    """Problems with tensors that are in the files but not in the model, so that another model was saved."""
    whole = replace(spec, mtp_layers=getattr(family(spec), PREDICTION, None) is not None and spec.head == LM)
    read = {tensor.name for tensor in (*filed(spec, files), *filed(whole, files))}
    unread = [name for name in files if name not in read and not _is_idle(spec, name, read)]
    headers = {file: header(folder / file) for file in {files[name] for name in unread}}
    unread = [name for name in unread if 0 not in headers[files[name]].get(name, {}).get("shape", ())]  # an empty tensor says nothing
    if HEAD in unread and spec.tie_word_embeddings:
        unread.remove(HEAD)
        if not _same_values(folder, files, HEAD, _embedding(files)):
            yield (
                f"{folder}: tie_word_embeddings = true in config.json, but {HEAD} has other values than the embedding. Set it to false, to "
                f"use {HEAD}, or remove {HEAD} from the files"
            )
    if unread:
        listed = ", ".join(unread[:_NAMED]) + ("" if len(unread) <= _NAMED else f" and {len(unread) - _NAMED} more")
        yield f"{folder}: the model of config.json has no {listed}. Correct config.json, or remove the tensors from the files"


def _is_idle(spec: ModelSpec, name: str, read: Collection[str]) -> bool:
    """Whether the model computes the same without the tensor. A layer for multi-token prediction, and a vision tower, are other models."""
    if _IDLE.fullmatch(name) or any(name.removesuffix(suffix) in read for suffix in (SCALE, FP4_CODES, FP4_SCALES)):
        return True
    prediction = getattr(family(spec), PREDICTION, None)
    if name.startswith("mtp.") or (prediction and prediction.counted and name.startswith(f"model.layers.{spec.num_layers}.")):
        return True
    return (spec.vision_tower and name.startswith(VISION)) or (spec.head == SCALAR and name == HEAD)


def _embedding(files: Collection[str]) -> str:
    return EMBED if EMBED in files else EMBED.replace("model.", "model.language_model.", 1)


def _same_values(folder: Path, files: dict[str, str], first: str, second: str) -> bool:
    """Whether two tensors are equal byte for byte."""
    if second not in files:
        return False
    dtypes = {header(folder / files[name])[name]["dtype"] for name in (first, second)}
    return len(dtypes) == 1 and np.array_equal(_raw(folder / files[first], first), _raw(folder / files[second], second))


def _raw(path: Path, name: str) -> np.ndarray:
    """The bytes of a tensor, mapped and not read."""
    begin, end = header(path)[name]["data_offsets"]
    with open(path, "rb") as opened:
        data = 8 + int.from_bytes(opened.read(8), "little")
    return np.memmap(path, np.uint8, "r", offset=data + begin, shape=(end - begin,))


def _scale_problems(
    folder: Path, files: dict[str, str], headers: dict[str, dict[str, Any]], name: str, shape: tuple[int, ...]
) -> Iterator[str]:
    """Problems with the block scales of an fp8 weight, without which it would have other values."""
    scale, wanted = name + SCALE, [-(-size // BLOCK) for size in shape]
    if scale not in files:
        yield f"{folder}: tensor {name} is in {FP8}, but {scale} is missing"
        return
    if files[scale] not in headers:
        try:
            headers[files[scale]] = header(folder / files[scale])
        except ConfigError as error:
            yield from error.problems
            return
    entry = headers[files[scale]].get(scale, {"dtype": "nothing", "shape": []})
    if entry["dtype"] != "F32" or entry["shape"] != wanted:
        found = f"{entry['dtype']} of shape {tuple(entry['shape'])}"
        yield f"{folder}: tensor {scale} is {found}; must be F32 of shape {tuple(wanted)}: a scale for each {BLOCK}x{BLOCK} block"


def header(path: Path) -> dict[str, Any]:
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
        raise ConfigError(f"{path}: is not a complete safetensors file: {error}") from error
    return tensors
