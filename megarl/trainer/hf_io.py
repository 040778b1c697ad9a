"""Imports and exports HF checkpoints by the pieces of the trainer's layout.

No rank ever has more than its own part in memory.

Import: every rank reads its own boxes from the safetensors files.
Export: every rank writes its boxes at their offsets with pwrite, each element by one rank; then
rank 0 writes the headers. (Memory mapping would not work: on NFS, two hosts that map the same page
of a file overwrite each other's half.)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from msgspec import structs

from megarl.base.files import sync_folder
from megarl.base.geometry import Box
from megarl.config.errors import ConfigError, RunError
from megarl.data import contents
from megarl.models import multi_token
from megarl.models.registry import CAUSAL_LM, CLASSIFICATION, family
from megarl.models.spec import SCALAR, ModelSpec
from megarl.models.vocabulary import SCORE
from megarl.observe.status import counted, mib
from megarl.plan.weights import WARM_START
from megarl.reshard.layout import (
    ITEM_BYTES,
    FilePlace,
    Layout,
    LocalTensor,
    Piece,
    contiguous_strides,
    file_places,
    hf_layout,
)
from megarl.trainer.hf_files import (
    BLOCK,
    FP4_BLOCK,
    FP4_CODES,
    FP4_SCALES,
    FP4_VALUES,
    INDEX,
    SCALE,
    check_checkpoint,
    filed,
    not_finite,
)
from megarl.trainer.vision_tower import carry_through

NewHead = Literal["zeros", "random"]
INIT_STD = 0.02
MAX_FILE_BYTES = 5 * 2**30
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
# Files of a model folder that an export does not copy: weights in any format, their indices, and
# what a folder of Git or the hub has.
LEFT_OUT = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.onnx*",
    "*.h5",
    "*.msgpack",
    "*.npz",
    "*.index.json",
    "*.lock",
    WARM_START,
    contents.FILE,
    ".git*",
    ".cache",
    ".huggingface",
    "original",
    "*.partial",
)
MAX_COPIED_BYTES = 100 * 2**20  # larger files are not configuration


class WriteError(RunError):
    """A folder could not be written, and does not exist. Folders that existed before still do."""


class RanksFailed(RunError):
    """Some ranks failed at a common task.

    The message names them and the reasons, and is the same on every rank.
    """


def on_all_ranks[T](
    action: Callable[[], T],
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError),
    raises: type[RuntimeError] = RanksFailed,
) -> T:
    """Runs `action` on every rank, and returns this rank's result.

    Collective. `action` must not be collective, since it may fail on one rank alone.

    Raises `raises` on every rank if one of `failures` occurred on any rank.
    """
    failure: Exception | None = None
    results: list[T] = []  # one result, or none if it failed
    try:
        results.append(action())
    except failures as error:
        failure = error
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if failure is None else str(failure) or repr(failure))
    problems = {text: rank for rank, text in reversed(list(enumerate(errors))) if text is not None}
    if not problems:
        return results[0]
    is_common = len(problems) == 1 and None not in errors
    raise raises(
        "; ".join(
            text if is_common else f"rank {rank}: {text}"
            for text, rank in reversed(problems.items())
        )
    ) from failure


class Writing[T]:
    """A folder that all ranks write together. It is at `path`, complete, when `finish` returns.

    Each rank calls `write` with the folder's provisional name. With `beside`, `write` runs in a
    separate thread while the caller continues, so it must not communicate. `finish` calls
    `conclude` on all ranks with the folder and the result of `write`.

    A run that dies meanwhile leaves at most a .partial folder, which the next attempt replaces. It
    never changes the folder at `path`. An existing folder at `path` is replaced by two renames. The
    constructor, `written` and `finish` are collective.
    """

    def __init__(
        self,
        path: str | Path,
        write: Callable[[Path], T],
        conclude: Callable[[Path, T], None] = lambda folder, written: None,
        *,
        beside: bool,
        size_bytes: int | None = None,
    ):
        """`size_bytes`, the size of everything to be written, is for messages.

        Raises WriteError if the folder cannot be made.
        """
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._write = write
        self._conclude = conclude
        self._size_bytes = size_bytes
        self._result: list[T] = []  # one result, or none if it failed
        self._failure: BaseException | None = None
        try:
            on_all_ranks(self._make_partial)
        except RanksFailed as error:
            raise WriteError(f"{self.path} could not be written: {error}") from error
        self._free_bytes = shutil.disk_usage(self._partial).free
        # A daemon thread: a run that fails does not wait for a folder that will never be complete.
        self._thread = threading.Thread(
            target=self._run, name=f"writes {self.path.name}", daemon=True
        )
        if beside:
            self._thread.start()
        else:
            self._run()

    def written(self) -> bool:
        """Whether `finish` would not wait for the disk, since all ranks have written or failed."""
        alive = [self._thread.is_alive()] * dist.get_world_size()
        dist.all_gather_object(alive, alive[0])
        return not any(alive)

    def finish(self) -> None:
        """Returns when the folder is complete and on disk.

        Raises WriteError if any rank's `write` or `conclude` raised OSError or RuntimeError (a full
        disk), after removing the partial folder. Steps of `conclude` that may fail on single ranks
        must run in `on_all_ranks`; otherwise the other ranks would wait for them.
        """
        if self._thread.ident is not None:
            self._thread.join()
        try:
            result = on_all_ranks(self._outcome)
            self._conclude(self._partial, result)
            dist.barrier()
            on_all_ranks(self._rename)
        except BaseException as error:
            # it must never count as complete, and its space may be needed
            shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, (OSError, RanksFailed)):
                size = f"of {self._size_bytes} bytes " if self._size_bytes is not None else ""
                is_free = f"{self._free_bytes} bytes were free there before"
                raise WriteError(
                    f"{self.path} {size}could not be written; {is_free}: {error}"
                ) from error
            raise

    def _make_partial(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def _run(self) -> None:
        try:
            self._result.append(self._write(self._partial))
        except BaseException as error:  # raised again by `finish`
            self._failure = error

    def _outcome(self) -> T:
        if self._failure is not None:
            raise self._failure
        return self._result[0]

    def _rename(self) -> None:
        if dist.get_rank() != 0:
            return
        old = self.path.with_name(self.path.name + ".old")
        sync_folder(self._partial)
        if self.path.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
        self._partial.rename(self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


def load_hf(
    spec: ModelSpec,
    layout: Layout,
    parameters: Mapping[str, torch.Tensor],
    path: str,
    new_head: NewHead | None = None,
    seed: int = 0,
) -> None:
    """Fills this rank's parameters from the checkpoint folder (or hub name) `path`; vocabulary
    padding becomes zero.

    `new_head`: the checkpoint has no scalar head. The new head is zeros, or random with variance 1
    / (hidden size + 1) by `seed` (Stiennon et al. 2020, arXiv:2009.01325, appendix B.1).

    Every rank checks all tensors of the model, even those it does not hold, so that all ranks raise
    the same ConfigError (`check_checkpoint`). A rank that reads a value which is not finite also
    raises ConfigError, with the names of file and tensor. So does a rank that reads a different
    value where the layer for multi-token prediction must have a copy.
    """
    folder = _local_folder(path, ["*.safetensors", INDEX])
    files = check_checkpoint(spec, folder, without=(SCORE,) if new_head else ())
    places = file_places(filed(spec, files))
    tensors = layout.tensors(dist.get_rank())
    copies = {
        original: name
        for name, original in multi_token.copies(spec, family(spec)).items()
        if name in files
    }
    names = {places[piece.logical_name].name for tensor in tensors for piece in tensor.pieces}
    names |= {copies[name] for name in names if name in copies}
    checkpoint = _OpenCheckpoint(folder, files, names)
    for tensor in counted(
        tensors,
        "loading weights",
        lambda tensor: local_parameter(parameters, tensor).nbytes,
        show=mib,
    ):
        parameter = local_parameter(parameters, tensor)
        parameter.zero_()
        for piece in tensor.pieces:
            if new_head and piece.logical_name == SCORE:
                if new_head == "random":
                    values = _random_rows(piece, spec.hidden_size, seed)
                    parameter.copy_(values / INIT_STD / math.sqrt(spec.hidden_size + 1))
                continue
            place = places[piece.logical_name]
            box = place.place(piece.logical)
            local = parameter[piece.local.slices()]
            local.copy_(checkpoint.values(place, box).view(local.shape))
            if not local.isfinite().all():
                raise ConfigError(checkpoint.not_finite(place))
            copy = copies.get(piece.logical_name)
            if copy:
                copied_values = checkpoint.values(replace(place, name=copy), box)
                if copied_values.shape != piece.logical.shape or not torch.equal(
                    copied_values.to(local.dtype).view(local.shape), local
                ):
                    raise ConfigError(
                        multi_token.other_copy(folder / files[copy], copy, piece.logical_name)
                    )


class _OpenCheckpoint:
    """The files of a checkpoint that hold the tensors `names`. `files`: tensor -> its file."""

    def __init__(self, folder: Path, files: Mapping[str, str], names: Iterable[str]):
        # a compiled package that only this needs: a trainer with random weights runs without it
        from safetensors import safe_open

        self._folder = folder
        self._files = files
        stored_names = {
            name + suffix for name in names for suffix in ("", SCALE, FP4_CODES, FP4_SCALES)
        }
        self._opened = {}
        for file in sorted({files[name] for name in stored_names if name in files}):
            self._opened[file] = safe_open(folder / file, framework="pt")

    def values(self, stored: FilePlace, box: Box) -> torch.Tensor:
        """The values of a tensor within `box`, in whatever format the checkpoint has them."""
        if stored.name + FP4_CODES in self._files:  # tensors in this format are not transposed
            codes = partial(self._read, stored.name + FP4_CODES)
            return _of_fp4(box, codes, partial(self._read, stored.name + FP4_SCALES))
        if stored.transposed:
            return self._read(stored.name, box.transpose()).transpose(-1, -2)
        values = self._read(stored.name, box)
        if values.dtype == torch.float8_e4m3fn:
            return _dequantised(values, box, partial(self._read, stored.name + SCALE))
        return values

    def not_finite(self, stored: FilePlace) -> str:
        name = stored.name if stored.name in self._files else stored.name + FP4_SCALES
        return not_finite(self._folder / self._files[name], name)

    def _read(self, name: str, box: Box) -> torch.Tensor:
        return self._opened[self._files[name]].get_slice(name)[box.slices()]


def _dequantised(
    codes: torch.Tensor, box: Box, scales: Callable[[Box], torch.Tensor]
) -> torch.Tensor:
    """float32 values of a box of an fp8 weight.

    `scales` reads a box of block scales. As in DeepSeek-V3's own conversion, the product is
    computed in float32.
    """
    first = tuple(start // BLOCK for start in box.start)
    blocks = scales(
        Box(first, tuple(-(-end // BLOCK) - start for start, end in zip(first, box.end)))
    )
    for dim, (start, size) in enumerate(zip(box.start, box.shape)):
        blocks = blocks.repeat_interleave(BLOCK, dim).narrow(dim, start % BLOCK, size)
    return codes.float() * blocks


def _of_fp4(
    box: Box, codes: Callable[[Box], torch.Tensor], scales: Callable[[Box], torch.Tensor]
) -> torch.Tensor:
    """float32 values of a box [1, rows, columns] of an MXFP4 weight.

    `codes` reads blocks of FP4_BLOCK / 2 bytes; each byte has two values, the first in its lower
    half. `scales` reads a power of two for each block.
    """
    first = box.start[-1] // FP4_BLOCK
    end = -(-box.end[-1] // FP4_BLOCK)
    blocks = Box(box.start[:-1] + (first,), box.shape[:-1] + (end - first,))
    bytes_ = codes(Box(blocks.start + (0,), blocks.shape + (FP4_BLOCK // 2,)))
    values = torch.tensor(FP4_VALUES)[torch.stack([bytes_ & 15, bytes_ >> 4], -1).int()].flatten(-2)
    exponents = scales(blocks).int() - 127
    values = torch.ldexp(
        values, exponents[..., None].where(exponents[..., None] < 128, torch.inf)
    ).flatten(-2)
    return values.narrow(-1, box.start[-1] % FP4_BLOCK, box.shape[-1])


def init_random(
    spec: ModelSpec, layout: Layout, parameters: Mapping[str, torch.Tensor], seed: int
) -> None:
    """Initialises matrices from a normal distribution with standard deviation 0.02, norms to the
    identity, and biases, sinks and logarithms of decays to zero. Every row of every HF tensor has
    its own random stream. So the result does not depend on the layout, and a rank draws only its
    own rows.
    """
    shapes = {t.name: t.shape for t in hf_layout(spec, "float32").tensors(0)}
    for tensor in layout.tensors(dist.get_rank()):
        parameter = local_parameter(parameters, tensor)
        parameter.zero_()
        for piece in tensor.pieces:
            local = parameter[piece.local.slices()]
            name = piece.logical_name
            if local.dim() == 1:
                centred = spec.norms.zero_centred and "norm" in name and "linear_attn" not in name
                local.fill_(0.0 if centred or name.endswith(("bias", "sinks", "A_log")) else 1.0)
            else:
                local.copy_(
                    _random_rows(_as_matrix(piece), math.prod(shapes[name][1:]), seed).view(
                        local.shape
                    )
                )


def _as_matrix(piece: Piece) -> Piece:
    """The same piece, of the tensor as a matrix.

    A tensor of more dims (the weight of a convolution) must be cut only by rows.
    """
    first, *_ = piece.logical.start
    count, *trailing = piece.logical.shape
    if len(trailing) == 1:
        return piece
    return Piece(piece.local, piece.logical_name, Box((first, 0), (count, math.prod(trailing))))


def _random_rows(piece: Piece, columns: int, seed: int) -> torch.Tensor:
    return drawn_rows(
        piece, columns, seed, lambda row, generator: row.normal_(std=INIT_STD, generator=generator)
    )


def drawn_rows(
    piece: Piece, columns: int, seed: int, draw: Callable[[torch.Tensor, torch.Generator], object]
) -> torch.Tensor:
    """The piece's part of a random matrix with `columns` columns.

    `draw` fills each row from its own random stream.
    """
    generator = torch.Generator()
    first = piece.logical.start[0]
    count = piece.logical.shape[0]
    rows = torch.empty(count, columns)
    for i in range(count):
        digest = hashlib.sha256(f"{seed}/{piece.logical_name}/{first + i}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        draw(rows[i], generator)
    return rows[:, piece.logical.slices()[1]]


def export_hf(
    spec: ModelSpec,
    layout: Layout,
    parameters: Mapping[str, torch.Tensor],
    path: str,
    hf_config_dir: str,
    max_file_bytes: int = MAX_FILE_BYTES,
    files: Mapping[str, str] = {},
    beside: bool = False,
) -> Writing[None]:
    """Begins to write folder `path`: safetensors files of at most `max_file_bytes` (or one tensor),
    an index if there are several, the configuration and tokenizer files of `hf_config_dir`, and
    `files` (name -> text). The folder exists when `finish` of the result has returned. With
    `beside`, this rank's part of the weights is copied to host memory and written while training
    goes on.
    """
    dtype = layout.kinds[0].shards[0].dtype
    tensors = hf_layout(spec, dtype, fused=True).tensors(0)
    repeated = multi_token.copies(spec, family(spec))
    by_name = {tensor.name: tensor for tensor in tensors}
    copies = []
    for name, original in repeated.items():
        copies.append(structs.replace(by_name[original], name=name, pieces=()))
    plan = replace(
        file_plan([*tensors, *copies], max_file_bytes, indexed=spec.vision_tower), repeated=repeated
    )

    def complete(folder: Path) -> None:
        source = _local_folder(hf_config_dir, None, [] if spec.vision_tower else LEFT_OUT)
        carried = carry_through(spec, source, folder)
        if plan.indexed:
            sizes = {"total_size": sum(p.nbytes for p in plan.places.values())}
            index = {
                "metadata": sizes,
                "weight_map": {n: p.file for n, p in plan.places.items()} | carried,
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        _copy_configuration(source, folder, dtype, spec.head == SCALAR, mtp=spec.mtp_layers > 0)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    return write_tensors(plan, layout, parameters, path, complete, beside)


def write_tensors(
    plan: FilePlan,
    layout: Layout,
    parameters: Mapping[str, torch.Tensor],
    path: str,
    complete: Callable[[Path], None],
    beside: bool,
) -> Writing[None]:
    """Begins to write the tensors of `plan` to folder `path`.

    `complete` adds the other files, on rank 0.
    """
    pieces = []
    for tensor, piece in layout.owned_pieces(dist.get_rank()):
        pieces.extend(
            plan.places_of(
                piece, local_parameter(parameters, tensor)[piece.local.slices()].detach()
            )
        )
    if beside:
        pieces = [(place, box, values.to("cpu", copy=True)) for place, box, values in pieces]

    def conclude(folder: Path, written: None) -> None:
        def on_one_rank() -> None:
            if dist.get_rank() == 0:
                _write_headers(folder, plan.headers)
                complete(folder)

        # ValueError: `hf_config_dir` is gone, or not JSON
        on_all_ranks(on_one_rank, failures=(OSError, RuntimeError, ValueError))

    return Writing(path, lambda folder: _write_pieces(folder, pieces), conclude, beside=beside)


def _write_headers(folder: Path, headers: Mapping[str, bytes]) -> None:
    for name, header in headers.items():
        with open(folder / name, "r+b") as file:
            file.write(header)
            file.flush()
            os.fsync(file.fileno())


def _write_pieces(folder: Path, pieces: Sequence[tuple[_TensorPlace, Box, torch.Tensor]]) -> None:
    files: dict[str, int] = {}
    try:
        for place, box, values in counted(
            pieces, "exporting weights", lambda piece: piece[2].nbytes, line="saving", show=mib
        ):
            if place.file not in files:
                files[place.file] = os.open(folder / place.file, os.O_WRONLY | os.O_CREAT, 0o666)
            _write_box(files[place.file], place, box, values)
        for fd in files.values():
            os.fsync(fd)
    finally:
        for fd in files.values():
            os.close(fd)


@dataclass(frozen=True)
class _TensorPlace:
    """The place of a tensor: `nbytes` at `offset` of `file`."""

    file: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FilePlan:
    """Format: 8 bytes header length, JSON header, data."""

    places: dict[str, _TensorPlace]  # tensor -> its place
    headers: dict[str, bytes]  # file -> its header
    stored: dict[str, FilePlace]  # logical name -> where files have it
    indexed: bool = False  # whether the folder has an index of its files
    # tensors that repeat others: name -> logical tensor
    repeated: Mapping[str, str] = field(default_factory=dict)

    def places_of(
        self, piece: Piece, values: torch.Tensor
    ) -> Iterator[tuple[_TensorPlace, Box, torch.Tensor]]:
        """Yields the tensors in files that have the piece, the box in each, and its `values` in the
        form of the file.
        """
        stored = self.stored[piece.logical_name]
        box = stored.place(piece.logical)
        if stored.transposed:
            box = box.transpose()
            values = values.transpose(-1, -2)
        for name in (
            stored.name,
            *(name for name, original in self.repeated.items() if original == piece.logical_name),
        ):
            yield self.places[name], box, values


def file_plan(
    tensors: Sequence[LocalTensor],
    max_file_bytes: float,
    stem: str = "model",
    named_shape: Callable[[LocalTensor], tuple[str, tuple[int, ...]]] = lambda tensor: (
        tensor.name,
        tensor.file_shape,
    ),
    indexed: bool = False,
) -> FilePlan:
    """`stem`: prefix of the files' names; `named_shape`: gives a tensor's name and shape in files;
    `indexed`: write an index even for one file.
    """
    groups: list[list[LocalTensor]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = _bytes(tensor)
        if groups[-1] and size + nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes
    places = {}
    headers = {}
    indexed = indexed or len(groups) > 1
    for number, group in enumerate(groups, start=1):
        if not indexed:
            file = f"{stem}.safetensors"
        else:
            file = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # so that wide elements are aligned
        for tensor in sorted(group, key=lambda tensor: -ITEM_BYTES[tensor.dtype]):
            nbytes = _bytes(tensor)
            offsets = [offset, offset + nbytes]
            name, shape = named_shape(tensor)
            entries[name] = {
                "dtype": SAFETENSORS_DTYPES[tensor.dtype],
                "shape": shape,
                "data_offsets": offsets,
            }
            places[tensor.name] = _TensorPlace(file, offset, nbytes, tensor.file_shape)
            offset += nbytes
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
    places = {
        name: replace(place, offset=place.offset + len(headers[place.file]))
        for name, place in places.items()
    }
    return FilePlan(places, headers, file_places(tensors), indexed)


def _bytes(tensor: LocalTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _write_box(fd: int, place: _TensorPlace, box: Box, values: torch.Tensor) -> None:
    """Writes `values` as the elements `box` of the tensor at `place`, with one write for each
    contiguous run of elements.
    """
    data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    item_bytes = place.nbytes // math.prod(place.shape)
    strides = [stride * item_bytes for stride in contiguous_strides(place.shape)]
    # dims after it are whole
    cut = max(
        (dim for dim in range(len(box.shape)) if box.shape[dim] != place.shape[dim]), default=0
    )
    run = math.prod(box.shape[cut:]) * item_bytes
    first = place.offset + sum(start * stride for start, stride in zip(box.start, strides))
    for number, index in enumerate(np.ndindex(box.shape[:cut])):
        _pwrite(
            fd,
            data[number * run : (number + 1) * run],
            first + sum(i * stride for i, stride in zip(index, strides)),
        )


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset = offset + written


def _copy_configuration(source: Path, folder: Path, dtype: str, scores: bool, mtp: bool) -> None:
    """Copies all files but weights, so that what config.json and the tokenizer's files point to is
    there: code, templates.

    `scores`: whether the model has a scalar head. The model in `source` may have another head.
    `mtp`: whether the export has the layer for multi-token prediction.
    """
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        left_out = any(fnmatch(part, pattern) for part in name.parts for pattern in LEFT_OUT)
        if file.is_file() and not left_out and file.stat().st_size <= MAX_COPIED_BYTES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # from an fp8 checkpoint; the written weights are not quantised
    config.pop("quantization_config", None)
    # the language model beside a vision tower
    for part in (config, config.get("text_config", config)):
        part.pop("torch_dtype", None)  # its name before transformers 5
        part["dtype"] = dtype
        for key in multi_token.COUNTS:
            if part.get(key) and not mtp:
                part[key] = 0
    if scores:
        config["architectures"] = [config["architectures"][0].replace(CAUSAL_LM, CLASSIFICATION)]
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        ends = config.get("eos_token_id")
        if config.get("pad_token_id") in (ends if isinstance(ends, list) else [ends]):
            # Hugging Face reads the score at the last token that is not padding: it would skip the
            # end
            config["pad_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def local_parameter(parameters: Mapping[str, torch.Tensor], tensor: LocalTensor) -> torch.Tensor:
    parameter = parameters[tensor.name]
    assert tuple(parameter.shape) == tensor.shape, (
        f"{tensor.name}: layout says {tensor.shape}, Megatron has {tuple(parameter.shape)}"
    )
    return parameter


def _local_folder(path: str, patterns: list[str] | None, left_out: Sequence[str] = ()) -> Path:
    if Path(path).is_dir():
        return Path(path)
    # imported only for hub names, since local models need no network
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(path, allow_patterns=patterns, ignore_patterns=list(left_out))
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={path}: neither a folder nor reachable on the hub: {error}"
        ) from error
