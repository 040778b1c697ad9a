"""Checks the safetensors files of an HF checkpoint, mostly by their headers, without torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.errors import ConfigError
from megarl.models import load_spec, multi_token
from megarl.models.registry import family, fused_tensors, is_own
from megarl.models.spec import SCALAR, ModelSpec, differing
from megarl.models.vocabulary import EMBED, HEAD
from megarl.reshard.layout import LocalTensor, hf_layout

INDEX = "model.safetensors.index.json"
VISION = "model.visual."  # prefix of a vision tower's tensors
READ_DTYPES = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
BLOCK = 128
# weights in blocks of 128x128, each with a scale, as in DeepSeek-V3 and Kimi K2
SCALE = "_scale_inv"
# MXFP4, as in gpt-oss: instead of an (untransposed) tensor of experts, files have a tensor of codes
# and a tensor of scales (e8m0), one for each block of columns. A byte of codes has two values.
FP4 = "U8"
FP4_BLOCK = 32
FP4_CODES = "_blocks"
FP4_SCALES = "_scales"
FP4_VALUES = [
    sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
]
EXPONENTS = {  # all bits set: NaN or infinity
    "F32": ("<u4", 0x7F800000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    FP8: ("u1", 0x7F),
    FP4: ("u1", 0xFF),
}
SAMPLES = 32
SAMPLE_BYTES = 64 << 10
_CHUNK_BYTES = 64 << 20
_LONGEST_HEADER_BYTES = 100 << 20  # the format's own limit
_NAMED = 5  # the most names that a message lists
# older versions of Transformers saved this buffer
_ROTARY = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ConfigError."""
    if (folder / INDEX).exists():
        try:
            return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{folder / INDEX}: is not an index of safetensors files: {error!r}"
            ) from error
    file = folder / "model.safetensors"
    if not file.exists():
        raise ConfigError(f"{folder}: holds neither model.safetensors nor {INDEX}")
    return dict.fromkeys(header(file), file.name)


def filed(spec: ModelSpec, files: Collection[str]) -> tuple[LocalTensor, ...]:
    """The tensors of the model as the files have them.

    Qwen3.5 is published with the experts of a layer stacked or separate, and config.json does not
    say which.
    """
    specs = [spec]
    if spec.experts:
        experts = replace(spec.experts, stacked=not spec.experts.stacked)
        restacked = replace(spec, experts=experts)
        if fused_tensors(restacked) != fused_tensors(spec):
            specs.append(restacked)
    layouts = [hf_layout(variant, "float32", fused=True).tensors(0) for variant in specs]
    return min(layouts, key=lambda tensors: sum(tensor.name not in files for tensor in tensors))


def check_checkpoint(
    spec: ModelSpec, folder: Path, without: Collection[str] = ()
) -> dict[str, str]:
    """Checks all tensors of the model, except `without`, and returns `tensor_files`.

    Raises ConfigError that names every tensor that is missing, quantised, or of another shape than
    in config.json, and every damaged file.
    """
    files = tensor_files(folder)
    problems = list(_problems(spec, folder, files, without))
    if problems:
        raise ConfigError(problems)
    return files


def check_config(spec: ModelSpec, folder: Path) -> None:
    """Raises ConfigError if the config.json beside the weights cannot be read, or describes another
    model than `spec`. An engine builds its model from that file, while the run is planned for
    `spec`.
    """
    config = folder / "config.json"
    file_spec = load_spec(
        folder, own_family=spec.family if is_own(spec) else None, mtp=spec.mtp_layers > 0
    )
    file_spec = replace(file_spec, mtp_drafts=spec.mtp_drafts)  # a checkpoint does not say this
    differences = ", ".join(differing(file_spec, spec, compared=True))
    if differences:
        raise ConfigError(f"{config}: is of another model than the run's: it has {differences}")
    if not isinstance(json.loads(config.read_text(encoding="utf-8")).get("model_type"), str):
        raise ConfigError(f"{config}: model_type is missing")


def check_finite(spec: ModelSpec, folder: Path) -> None:
    """Raises ConfigError that names every tensor of the model with a NaN or an infinity, and its
    file. Reads all weights.
    """
    problems = []
    files = check_checkpoint(spec, folder)
    headers = {file: header(folder / file) for file in set(files.values())}
    names = sorted(tensor.name for tensor in filed(spec, files))
    names = [name if name in files else name + FP4_SCALES for name in names]
    for name in [
        *names,
        *(name + SCALE for name in names if headers[files[name]][name]["dtype"] == FP8),
    ]:
        path = folder / files[name]
        entry = headers[files[name]][name]
        word, exponent = EXPONENTS[entry["dtype"]]
        with open(path, "rb") as opened:
            begin = 8 + int.from_bytes(opened.read(8), "little")
        first, end = (begin + offset for offset in entry["data_offsets"])
        for offset_bytes in range(first, end, _CHUNK_BYTES):
            words = np.fromfile(
                path,
                word,
                min(_CHUNK_BYTES, end - offset_bytes) // np.dtype(word).itemsize,
                offset=offset_bytes,
            )
            if ((words & exponent) == exponent).any():
                problems.append(not_finite(path, name))
                break
    if problems:
        raise ConfigError(problems)


def not_finite(file: Path, tensor: str) -> str:
    return (
        f"{file}: tensor {tensor} holds values that are not finite (NaN or infinity): no model "
        "can be trained or served with them"
    )


def fingerprint(folder: Path) -> str:
    """A fingerprint of the weights in `folder`: equal for equal files in any place, and different
    for other weights. It covers the files' sizes and SAMPLES pieces of each file, which any
    training changes. To hash terabytes in full would take as long as loading them.
    """
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
    """The tensors of the layer for multi-token prediction, if all are absent, as in exports of runs
    that ignored the layer.
    """
    if not spec.mtp_layers:
        return set()
    other_names = set()
    for tensor in filed(replace(spec, mtp_layers=0, mtp_drafts=False), files):
        other_names.add(tensor.name)
    layer_names = {tensor.name for tensor in filed(spec, files)} - other_names
    if layer_names.isdisjoint(files):
        return layer_names
    return set()


def _problems(
    spec: ModelSpec, folder: Path, files: dict[str, str], without: Collection[str]
) -> Iterator[str]:
    absent = _absent_layer(spec, files)
    if absent:
        problem = (
            f"{len(absent)} tensors, such as {min(absent)}, are missing; trainer.mtp must be ignore"
        )
        yield f"{folder}: has no layer for multi-token prediction: {problem}"
    without = {*without, *absent}
    expected_shapes: dict[str, tuple[int, ...]] = {}
    in_fp4: set[str] = set()
    for tensor in filed(spec, files):
        if tensor.transposed and tensor.name + FP4_CODES in files:
            blocks = (*tensor.shape[:-1], -(-tensor.shape[-1] // FP4_BLOCK))
            fp4_shapes = {
                tensor.name + FP4_CODES: (*blocks, FP4_BLOCK // 2),
                tensor.name + FP4_SCALES: blocks,
            }
            expected_shapes |= fp4_shapes
            in_fp4 |= fp4_shapes.keys()
        elif tensor.name not in without:
            expected_shapes[tensor.name] = tensor.file_shape
    yield from (
        f"{folder}: tensor {name} is missing" for name in expected_shapes if name not in files
    )
    headers: dict[str, dict[str, Any]] = {}
    for file in sorted(set(files.values())):
        try:
            headers[file] = header(folder / file)
        except ConfigError as error:
            yield from error.problems
    entries = {}
    for name, file in files.items():
        if name in headers.get(file, {}):
            entries[name] = headers[file][name]
    for name, shape in expected_shapes.items():
        if name not in files or files[name] not in headers:
            continue
        entry = entries.get(name)
        if entry is None:
            yield f"{folder}: tensor {name} is missing in {files[name]}, where {INDEX} has it"
            continue
        if tuple(entry["shape"]) != shape:
            yield (
                f"{folder}: tensor {name} has shape {tuple(entry['shape'])}, config.json says "
                f"{shape}"
            )
        if entry["dtype"] == FP4 and name in in_fp4:
            continue
        if entry["dtype"] == FP8 and len(shape) == 2:
            yield from _scale_problems(folder, entries, name, shape)
        elif entry["dtype"] not in READ_DTYPES:  # the scales of such a tensor would be ignored
            yield (
                f"{folder}: tensor {name} is in {entry['dtype']}; can be read: "
                f"{', '.join(READ_DTYPES)}, and matrices in {FP8}"
            )
    yield from _unread(spec, folder, files, entries, {*expected_shapes, *without})


def _unread(
    spec: ModelSpec,
    folder: Path,
    files: dict[str, str],
    entries: Mapping[str, dict[str, Any]],
    read: Collection[str],
) -> Iterator[str]:
    """Problems with tensors that are in the files but not in the model, so that another model was
    saved. `read`: the tensors that are read, without scales.
    """
    idle = _idle_shapes(spec, entries)
    prefixes = (*family(spec).UNUSED, *([VISION] if spec.vision_tower else []))
    unread = []
    for name, entry in entries.items():
        shape = tuple(entry["shape"])
        of_weight = name.removesuffix(SCALE)
        is_scale = (
            of_weight != name
            and entries.get(of_weight, {}).get("dtype") == FP8
            and (of_weight in read or of_weight in idle)
        )
        is_empty = 0 in shape  # it says nothing
        if not (
            name in read
            or idle.get(name) == shape
            or is_scale
            or is_empty
            or name.startswith(prefixes)
        ):
            unread.append(name)
    if HEAD in unread and spec.tie_word_embeddings:
        unread.remove(HEAD)
        if not _same_values(folder, files, HEAD, _embedding(files)):
            yield (
                f"{folder}: tie_word_embeddings = true in config.json, but {HEAD} has other "
                "values than the embedding. Set it to false, to "
                f"use {HEAD}, or remove {HEAD} from the files"
            )
    if unread:
        listed = ", ".join(unread[:_NAMED]) + (
            "" if len(unread) <= _NAMED else f" and {len(unread) - _NAMED} more"
        )
        yield (
            f"{folder}: the model of config.json has no {listed}. Correct config.json, or "
            "remove the tensors from the files"
        )


def _idle_shapes(spec: ModelSpec, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Tensors in the files without which the model computes the same, and the shapes that they then
    have: buffers of rotary embeddings, the output layer of a model that has a scalar head now, and
    the layer for multi-token prediction if it is ignored.
    """
    rotated_dims = spec.attention.rotated_dims(spec)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        if _ROTARY.fullmatch(name):
            shapes[name] = (rotated_dims // 2,)
    if spec.head == SCALAR:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    prediction = family(spec).PREDICTION
    if prediction is None:
        return shapes
    extended = replace(spec, mtp_layers=1)
    around = {name.replace("{layer}", str(spec.num_layers)) for name in prediction.names}
    if around <= set(names):  # otherwise it is one more decoder layer
        shapes |= {tensor.name: tensor.file_shape for tensor in filed(extended, names)}
        shapes |= dict.fromkeys(
            multi_token.copies(extended, family(spec)), (spec.vocab_size, spec.hidden_size)
        )
    return shapes


def _embedding(files: Collection[str]) -> str:
    if EMBED in files:
        return EMBED
    return EMBED.replace("model.", "model.language_model.", 1)


def _same_values(folder: Path, files: dict[str, str], first: str, second: str) -> bool:
    """Whether two tensors have equal values, perhaps in different dtypes."""
    if second not in files:
        return False
    entries = [header(folder / files[name])[name] for name in (first, second)]
    if entries[0]["shape"] != entries[1]["shape"] or any(
        entry["dtype"] not in READ_DTYPES for entry in entries
    ):
        return False
    first_words, second_words = (_words(folder / files[name], name) for name in (first, second))
    elements = _CHUNK_BYTES // 4
    for start in range(0, len(first_words), elements):
        chunk = slice(start, start + elements)
        values = []
        for words, entry in zip((first_words, second_words), entries):
            values.append(_floats(words[chunk], entry["dtype"]))
        if not np.array_equal(*values, equal_nan=True):
            return False
    return True


def _words(path: Path, name: str) -> np.ndarray:
    """The elements of a tensor, mapped and not read; bf16 as unsigned integers."""
    entry = header(path)[name]
    begin, end = entry["data_offsets"]
    with open(path, "rb") as opened:
        data = 8 + int.from_bytes(opened.read(8), "little")
    bytes_ = np.memmap(path, np.uint8, "r", offset=data + begin, shape=(end - begin,))
    return bytes_.view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry["dtype"]])


def _floats(words: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (words.astype("<u4") << 16).view("<f4")
    return words.astype("<f4")


def _scale_problems(
    folder: Path, entries: Mapping[str, dict[str, Any]], name: str, shape: tuple[int, ...]
) -> Iterator[str]:
    """Problems with the block scales of an fp8 weight, without which it would have other values."""
    scale = name + SCALE
    blocks = [-(-size // BLOCK) for size in shape]
    if scale not in entries:
        yield f"{folder}: tensor {name} is in {FP8}, but {scale} is missing"
        return
    entry = entries[scale]
    if entry["dtype"] != "F32" or entry["shape"] != blocks:
        actual = f"{entry['dtype']} of shape {tuple(entry['shape'])}"
        yield (
            f"{folder}: tensor {scale} is {actual}; must be F32 of shape {tuple(blocks)}: a "
            f"scale for each {BLOCK}x{BLOCK} block"
        )


def header(path: Path) -> dict[str, Any]:
    """Tensor name -> dtype, shape, data_offsets.

    Format: 8 bytes header length, JSON header, data. Raises ConfigError.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(min(length, _LONGEST_HEADER_BYTES)))
        tensors.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(
                f"it has {path.stat().st_size} bytes, its header says {8 + length + end}"
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: is not a complete safetensors file: {error}") from error
    return tensors
