"""Saves and loads checkpoints in pieces of the trainer's layout.

A checkpoint saved under one topology loads under any other. A tensor of a checkpoint is named
KIND/LOGICAL TENSOR: `master/model.norm.weight`, float32. LIVE is the model's own copy, with which
training and generation compute: the master weight rounded to the model's dtype. It is hashed but
not saved. A frozen model has only this copy, so a checkpoint of adapters has only the hashes of
their model.

A checkpoint is a folder. For every logical tensor of the model it has the fp32 master weights and
both of Adam's moments, cut into the boxes of the ranks. Each rank writes its own boxes
(`rank_00003.bin`), without communication and without padding. `state.json` has the position of the
schedule and the caller's state; `index.msgpack` lists the place of everything. The folder is
written under a provisional name during the next steps. It is renamed when all ranks are done and
everything is on disk.

Three checks must pass before a checkpoint counts as saved, and again before a loaded one is used.
The hash of every box is the same on disk and in memory. The model's weights are the rounded master
weights. All ranks with the same elements agree, by the hash of every logical tensor, which does not
depend on how it is cut.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from megarl.base.files import sync_folder
from megarl.base.geometry import Box, whole_box
from megarl.kernels.audit import Hashes, hash_slice
from megarl.kernels.changes import BITS
from megarl.observe.status import counted, mib
from megarl.plan.checkpoints import (
    CRITIC,
    FORMAT,
    INDEX_FILE,
    STATE,
    CheckpointError,
    Index,
    StoredBox,
    StoredFile,
    StoredTensor,
    listed_file,
    small_file,
    unusable,
)
from megarl.reshard.layout import Layout, LocalTensor, Piece, flat_boxes, hf_layout
from megarl.trainer.hf_io import Writing, on_all_ranks
from megarl.trainer.model import parameters_by_name
from megarl.trainer.optimizer import optimizer_shards, set_steps_made, steps_made
from megarl.trainer.step import MegatronTrainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
# a rank's file, and the places of tensors in it
Written = tuple[StoredFile, dict[str, StoredTensor]]
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
LIVE = "live"
SAVED = (MASTER, EXP_AVG, EXP_AVG_SQ)
RUN = 1 << 26  # elements of a parameter that are written or read at a time: 256 MiB of host memory


@dataclass(frozen=True)
class HeldBox:
    """A box of a tensor in this rank's memory."""

    name: str  # name of the tensor
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


def write_boxes(path: Path, file: int, boxes: Iterable[HeldBox]) -> Written:
    """Writes the boxes to `path`, file number `file` of the index.

    Returns (the file's entry, the tensors in it).

    Raises OSError if the file cannot be written, or does not contain what was written.
    """
    stored: dict[str, StoredTensor] = {}
    with open(path, "w+b") as out:
        for part in counted(
            [*boxes],
            "writing the checkpoint",
            lambda part: part.values.nbytes,
            line="saving",
            show=mib,
        ):
            tensor = stored.setdefault(
                part.name, StoredTensor(_NAMES[part.values.dtype], part.shape, [])
            )
            tensor.boxes.append(
                StoredBox(file, out.tell(), part.box.start, part.box.shape, part.share)
            )
            out.write(
                part.values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            )
        size_bytes = out.tell()
        out.flush()
        os.fsync(out.fileno())
        # so that it is read back from the disk
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for name, tensor in stored.items():
        for box in tensor.boxes:
            if (
                hash_slice(_read_box(path, tensor, box), Box(box.start, box.shape), tensor.shape)
                != box.share
            ):
                raise OSError(f"{path.name} does not hold what was written to it: {name} differs")
    return StoredFile(path.name, size_bytes), stored


def merged(parts: Iterable[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Merges the tensors that all ranks have written."""
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.items():
            tensors.setdefault(name, StoredTensor(tensor.dtype, tensor.shape, [])).boxes.extend(
                tensor.boxes
            )
    return tensors


def read_boxes(folder: Path, index: Index, boxes: Iterable[HeldBox]) -> None:
    """Fills the values of the `boxes` boxes.

    Raises CheckpointError if the checkpoint lacks any of their elements, or is damaged.
    """
    by_name: dict[str, list[HeldBox]] = defaultdict(list)
    for part in boxes:
        by_name[part.name].append(part)
    for name, parts in counted(
        [*by_name.items()],
        "reading the checkpoint",
        lambda entry: sum(part.values.nbytes for part in entry[1]),
        show=mib,
    ):
        tensor = index.tensors.get(name)
        if tensor is None or tensor.shape != parts[0].shape:
            mismatch = "no such tensor" if tensor is None else f"it with shape {tensor.shape}"
            raise unusable(
                folder,
                f"{name} of shape {parts[0].shape} is wanted, but it has {mismatch}: it belongs to "
                "another model",
            )
        missing = sum(part.box.numel for part in parts)
        for stored in tensor.boxes:
            box = Box(stored.start, stored.shape)
            common = [
                (part, common_box)
                for part in parts
                if (common_box := part.box.intersect(box)) is not None
            ]
            if not common:
                continue
            values = read_box(folder, index, name, stored)
            for part, common_box in common:
                part.values[_inside(common_box, part.box)].copy_(values[_inside(common_box, box)])
                missing -= common_box.numel
        if missing:
            raise unusable(folder, f"{missing} elements of {name} are missing")


def read_box(folder: Path, index: Index, name: str, stored: StoredBox) -> torch.Tensor:
    """Reads one box. Raises CheckpointError if its bytes are not those that were written."""
    file = index.files[stored.file]
    tensor = index.tensors[name]
    index.check(folder, [file])
    try:
        values = _read_box(folder / file.name, tensor, stored)
    except OSError as error:
        raise unusable(folder, f"{file.name} cannot be read: {error}") from error
    if hash_slice(values, Box(stored.start, stored.shape), tensor.shape) != stored.share:
        raise unusable(
            folder, f"{file.name} is damaged: its bytes of {name} are not those that were written"
        )
    return values


def tensor_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}.bin"


def _read_box(path: Path, tensor: StoredTensor, stored: StoredBox) -> torch.Tensor:
    dtype = DTYPES[tensor.dtype]
    values = np.fromfile(
        path, np.uint8, math.prod(stored.shape) * dtype.itemsize, offset=stored.offset
    )
    return torch.from_numpy(values).view(dtype).view(stored.shape)


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of `box` in a tensor with the elements `outer`."""
    return tuple(slice(s - o, s - o + n) for s, o, n in zip(box.start, outer.start, box.shape))


@dataclass(frozen=True)
class ElementRun:
    """The elements from `first` to `end` of a flattened local tensor."""

    first: int
    values: dict[str, torch.Tensor]  # kind -> [end - first]; untrained tensors have no moments
    is_share: bool  # whether replicas hold different elements; otherwise all hold the same

    @property
    def end(self) -> int:
        return self.first + self.values[LIVE].numel()


def runs(trainer: MegatronTrainer) -> dict[str, ElementRun]:
    """Name in the layout -> run of this rank.

    Tensors for which its optimizers have nothing are left out.
    """
    parameters = parameters_by_name(trainer.chunks)
    names = {parameter: name for name, parameter in parameters.items()}
    runs_by_name = {}
    for shard in optimizer_shards(trainer.optimizer, trainer.live_weights):
        values = {
            MASTER: shard.master,
            EXP_AVG: shard.exp_avg,
            EXP_AVG_SQ: shard.exp_avg_sq,
            LIVE: shard.live,
        }
        runs_by_name[names[shard.parameter]] = ElementRun(
            shard.first, values, is_share=trainer.trained_zero == 1
        )
    for name, parameter in parameters.items():
        if not parameter.requires_grad:  # a router's bias, or a frozen weight
            flat = trainer.live_weights(parameter).view(-1)
            runs_by_name[name] = ElementRun(
                0, {LIVE: flat} if trainer.frozen else {MASTER: flat, LIVE: flat}, is_share=False
            )
    return runs_by_name


def shared_boxes(trainer: MegatronTrainer, kinds: Iterable[str]) -> Iterator[HeldBox]:
    """The boxes that this rank saves.

    Over all ranks, every element is saved once; replicas with the same elements share them equally.
    """
    shapes = logical_shapes(trainer)
    rank_runs = runs(trainer)
    for layout in layouts(trainer):
        for tensor, piece, replica, replicas in layout.shared_pieces(dist.get_rank()):
            run = rank_runs.get(tensor.name)
            if run:
                first = run.first
                end = run.end
                if not run.is_share:
                    first = run.end * replica // replicas
                    end = run.end * (replica + 1) // replicas
                shape = shapes[piece.logical_name]
                yield from _boxes(run, first, end, tensor, piece, shape, kinds)


def held_boxes(trainer: MegatronTrainer) -> Iterator[HeldBox]:
    """All boxes in this rank's optimizers."""
    shapes = logical_shapes(trainer)
    rank_runs = runs(trainer)
    for tensor in trainer.saved_layout.tensors(dist.get_rank()):
        run = rank_runs.get(tensor.name)
        if run:
            for piece in tensor.pieces:
                yield from _boxes(
                    run, run.first, run.end, tensor, piece, shapes[piece.logical_name], SAVED
                )


def live_boxes(trainer: MegatronTrainer) -> Iterator[HeldBox]:
    """All weights of the model on this rank, by whole pieces, as the weights channel reads them."""
    shapes = logical_shapes(trainer)
    parameters = trainer.local_parameters()
    tensors = [layout.tensors(dist.get_rank()) for layout in layouts(trainer)]
    for tensor in itertools.chain.from_iterable(tensors):
        for piece in tensor.pieces:
            values = parameters[tensor.name][piece.local.slices()]
            yield HeldBox(
                f"{LIVE}/{piece.logical_name}", shapes[piece.logical_name], piece.logical, values
            )


def layouts(trainer: MegatronTrainer) -> tuple[Layout, ...]:
    """The layouts of all tensors of the trainer: the model, and if it is frozen, what is trained
    beside it.
    """
    if trainer.frozen:
        return (trainer.layout, trainer.saved_layout)
    return (trainer.layout,)


def logical_shapes(trainer: MegatronTrainer) -> dict[str, tuple[int, ...]]:
    return trainer.saved_shapes() | (
        {tensor.name: tensor.shape for tensor in hf_layout(trainer.spec, "float32").tensors(0)}
    )


def totals(trainer: MegatronTrainer, boxes: Iterable[HeldBox]) -> dict[str, tuple[int, int]]:
    """Tensor -> (elements, hash), summed over all ranks.

    Elements that k ranks have count k times. Collective.
    """
    names = []
    for kind in (*SAVED, LIVE):
        for name in logical_shapes(trainer):
            names.append(f"{kind}/{name}")
    sums = {name: [0, 0, 0] for name in names}
    hashes = Hashes()
    for part in boxes:
        sums[part.name][0] += part.box.numel
        hashes.add(part.name, part.values, part.box, part.shape)
    for name, share in hashes.totals().items():
        # in halves, whose sums over ranks do not overflow
        sums[name][1:] = share & 0xFFFFFFFF, share >> 32
    total = torch.tensor(list(sums.values()), dtype=torch.int64, device=trainer.device)
    dist.all_reduce(total)
    result: dict[str, tuple[int, int]] = {}
    for name, row in zip(names, total.tolist()):
        if row[0]:
            result[name] = (row[0], (row[1] + (row[2] << 32)) % 2**64)
    return result


def _boxes(
    run: ElementRun,
    first: int,
    end: int,
    tensor: LocalTensor,
    piece: Piece,
    shape: tuple[int, ...],
    kinds: Iterable[str],
) -> Iterator[HeldBox]:
    """The boxes of a logical tensor of shape `shape` in `piece` and in elements `first` to `end` of
    the flattened `tensor`.
    """
    for begin in range(first, end, RUN):
        for box in flat_boxes(tensor.shape, begin, min(begin + RUN, end)):
            common = piece.local.intersect(box)
            if common is None:
                continue
            offset = _position(box, tensor.shape) - run.first
            inside = common.move(box, whole_box(box.shape)).slices()
            for kind in kinds:
                values = run.values.get(kind)
                if values is not None:
                    of_box = values[offset : offset + box.numel].view(box.shape)
                    yield HeldBox(
                        f"{kind}/{piece.logical_name}",
                        shape,
                        common.move(piece.local, piece.logical),
                        of_box[inside],
                    )


def _position(box: Box, shape: tuple[int, ...]) -> int:
    """The position of the box's first element in the flattened tensor."""
    position = 0
    for index, extent in zip(box.start, shape):
        position = position * extent + index
    return position


def random_boxes() -> Iterator[HeldBox]:
    """The states of this rank's random generators, as byte tensors that only this rank has."""
    states = {
        "torch": torch.get_rng_state(),
        **{f"tracker/{name}": s for name, s in _tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in states.items():
        yield HeldBox(
            random_prefix() + name, tuple(state.shape), whole_box(tuple(state.shape)), state
        )


def set_random(states: dict[str, torch.Tensor]) -> None:
    """Restores the generators from `states`: name -> values that `random_boxes` has yielded."""
    generators = {name.removeprefix(random_prefix()): state for name, state in states.items()}
    torch.set_rng_state(generators.pop("torch"))
    cuda = generators.pop("cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    _tracker().set_states(
        {name.removeprefix("tracker/"): state for name, state in generators.items()}
    )


def _tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None  # made when Megatron's generators were seeded
    return tracker


def random_prefix() -> str:
    return f"random/{dist.get_rank()}/"


def save(
    trainer: MegatronTrainer,
    path: str | Path,
    state: dict[str, Any],
    files: Mapping[str, bytes] = {},
    critic: MegatronTrainer | None = None,
) -> None:
    """Saves a checkpoint and returns when it is complete; see `begin`."""
    begin(trainer, path, state, files, beside=False, critic=critic).finish()


def begin(
    trainer: MegatronTrainer,
    path: str | Path,
    state: dict[str, Any],
    files: Mapping[str, bytes] = {},
    *,
    beside: bool,
    critic: MegatronTrainer | None = None,
) -> Writing[list[Written]]:
    """Begins to save weights, optimizer, random generators, schedule, the caller's JSON-able
    `state`, and `files` of rank 0. `critic`, a trainer on the same ranks, becomes its own
    checkpoint in the folder CRITIC; the outer index has the hash of its index.

    With `beside`, this rank's boxes are copied to host memory and written from there while training
    goes on. The checkpoint exists when `finish` of the result has returned. `finish` raises
    WriteError, which names `path` and the bytes, if they cannot be written or differ from memory;
    then nothing is left at `path`. Raises RuntimeError before writing if the state is not
    consistent, as it must be between two steps.
    """
    parts = [_Part(critic, CRITIC, {}, {}, beside)] if critic is not None else []
    parts.append(_Part(trainer, "", state, files, beside))

    def conclude(folder: Path, written: list[Written]) -> None:
        vouched: list[str] = []
        for part, rank_boxes in zip(parts, written, strict=True):
            part.conclude(folder, rank_boxes, vouched)
            vouched.append(f"{part.name}/{INDEX_FILE}")

    size_bytes = sum(_size_bytes(part.trainer) for part in parts)
    return Writing(
        path,
        lambda folder: [part.write(folder) for part in parts],
        conclude,
        beside=beside,
        size_bytes=size_bytes,
    )


class _Part:
    """One trainer's part of a checkpoint, in its folder `name`."""

    def __init__(
        self,
        trainer: MegatronTrainer,
        name: str,
        state: dict[str, Any],
        files: Mapping[str, bytes],
        beside: bool,
    ):
        self.trainer = trainer
        self.name = name
        self._files = files
        on_all_ranks(lambda: _check_between_steps(trainer))
        self._totals = _totals(trainer)
        self._live = {
            name: total
            for name, (_, total) in totals(trainer, shared_boxes(trainer, [LIVE])).items()
        }
        place = {
            "topology": dataclasses.asdict(trainer.topology),
            "position": trainer.learning_rate.position,
            "steps": trainer.learning_rate.steps,
            "base": trainer.base,
        }
        self._state = json.dumps({**place, "state": state}).encode()
        boxes = [*shared_boxes(trainer, SAVED), *random_boxes()]
        self._boxes = [box.copied() for box in boxes] if beside else boxes

    def write(self, folder: Path) -> Written:
        rank = dist.get_rank()
        part_folder = folder / self.name
        part_folder.mkdir(exist_ok=True)
        return write_boxes(part_folder / tensor_file(rank), rank, self._boxes)

    def conclude(self, folder: Path, rank_boxes: Written, vouched: list[str]) -> None:
        """Writes the index, which also lists the files `vouched` in `folder`."""
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(rank_boxes, parts)
        on_all_ranks(lambda: None if parts is None else self._write_index(folder, parts, vouched))

    def _write_index(self, folder: Path, parts: list[Written], vouched: list[str]) -> None:
        part_folder = folder / self.name
        small = []
        for name, content in {STATE: self._state, **self._files}.items():
            small.append(small_file(part_folder, name, content))
        small += [listed_file(folder, name) for name in vouched]
        tensors = merged(stored for _, stored in parts)
        index = Index(
            FORMAT,
            str(self.trainer.dtype),
            [*(file for file, _ in parts), *small],
            tensors,
            self._live,
        )
        problem = _difference(self.trainer, self._totals, index)
        if problem:
            raise RuntimeError(problem)
        index.write(part_folder)
        sync_folder(part_folder)


def load_critic(critic: MegatronTrainer, path: str | Path) -> None:
    """Restores the critic from the checkpoint at `path`.

    Raises CheckpointError as `load` does, also if there is no critic.
    """

    def look() -> None:
        if not (Path(path) / CRITIC).is_dir():
            raise unusable(path, "it has no critic: the run that saved it trained none")

    on_all_ranks(look, failures=(CheckpointError,), raises=CheckpointError)
    load(critic, Path(path) / CRITIC)


def load(trainer: MegatronTrainer, path: str | Path) -> dict[str, Any]:
    """Restores a checkpoint under any topology, and returns the caller's state.

    Raises CheckpointError, on every rank, if the checkpoint at `path` is missing, incomplete or
    damaged.
    """
    folder = Path(path)
    index, saved_state = on_all_ranks(
        lambda: _read(trainer, folder), failures=(OSError, CheckpointError), raises=CheckpointError
    )
    for shard in optimizer_shards(trainer.optimizer, trainer.live_weights):
        shard.live.copy_(shard.master)
    if trainer.trained_zero == 1:
        for chunk in trainer.ddp:
            assert isinstance(chunk, DistributedDataParallel)
            chunk.start_param_sync(force_sync=True)
    problem = _difference(trainer, _totals(trainer), index)
    if problem:
        if trainer.frozen and problem.startswith(f"{LIVE}/"):
            now = (
                "the run has "
                f"{'others there now' if trainer.base == saved_state['base'] else trainer.base}"
            )
            problem += (
                f". Its adapters belong to the weights that were in {saved_state['base']}; {now}"
            )
        raise unusable(folder, f"once loaded, it is not what was saved: {problem}")
    steps = saved_state.get("steps", saved_state["position"])  # of earlier releases: as many
    set_steps_made(trainer.optimizer, steps)
    trainer.learning_rate.seek(saved_state["position"], steps)
    return saved_state["state"]


def _read(trainer: MegatronTrainer, folder: Path) -> tuple[Index, dict[str, Any]]:
    """Fills this rank's master weights, moments and untrained tensors; padding is zero.

    Returns (index, content of state.json).
    """
    index = Index.read(folder)
    index.check(folder, index.files[dist.get_rank() :: dist.get_world_size()])
    saved_state = json.loads(index.content(folder, STATE))
    if index.dtype != str(trainer.dtype):
        raise unusable(
            folder, f"the model was trained in {index.dtype}, and is now {trainer.dtype}"
        )
    for parameter in parameters_by_name(trainer.chunks).values():
        if parameter.requires_grad or not trainer.frozen:  # a frozen model is already loaded
            trainer.live_weights(parameter).zero_()
    for run in runs(trainer).values():
        for kind in run.values.keys() & SAVED:
            run.values[kind].zero_()
    read_boxes(folder, index, held_boxes(trainer))
    # Random states belong to ranks. Under another topology they fit no rank, so the generators keep
    # their initial seeds.
    if saved_state["topology"] == dataclasses.asdict(trainer.topology):
        random_states = {}
        for name, tensor in index.tensors.items():
            if name.startswith(random_prefix()):
                random_states[name] = tensor.boxes[0]
        set_random(
            {name: read_box(folder, index, name, box) for name, box in random_states.items()}
        )
    return index, saved_state


def _check_between_steps(trainer: MegatronTrainer) -> None:
    """Raises RuntimeError if the model differs from its rounded master weights, or if the optimizer
    has made other steps than were begun.
    """
    names = {parameter: name for name, parameter in parameters_by_name(trainer.chunks).items()}
    for shard in optimizer_shards(trainer.optimizer, trainer.live_weights):
        bits = BITS[shard.live.element_size()]
        if not torch.equal(
            shard.live.view(bits),
            shard.master.to(shard.live.dtype).to(shard.live.device).view(bits),
        ):
            raise RuntimeError(
                f"nothing is saved: {names[shard.parameter]} is not the optimizer's master "
                "weight, rounded"
            )
    steps = steps_made(trainer.optimizer)
    begun = trainer.learning_rate.steps
    if steps - {begun}:
        raise RuntimeError(
            f"nothing is saved: the optimizer has made {sorted(steps)} steps, {begun} were begun"
        )


def _totals(trainer: MegatronTrainer) -> dict[str, tuple[int, int]]:
    """Tensor -> (elements, hash) over all ranks, including the model's own weights, by whole
    pieces. Collective.
    """
    return totals(trainer, [*held_boxes(trainer), *live_boxes(trainer)])


def _difference(
    trainer: MegatronTrainer, totals: dict[str, tuple[int, int]], index: Index
) -> str | None:
    """A problem if the ranks' `totals` are not a whole multiple of the index's; None if they
    are.
    """
    shapes = logical_shapes(trainer)
    for name, (count, total) in totals.items():
        tensor = index.tensors.get(name)
        of_model = torch.Size(shapes[name.partition("/")[2]]).numel()
        copies, remainder = divmod(count, of_model)
        saved_hash = index.live.get(name) if tensor is None else tensor.hash
        if remainder or (tensor is not None and tensor.elements != of_model):
            return f"elements of {name} are missing or duplicated"
        if saved_hash is None or total != copies * saved_hash % 2**64:
            return (
                f"{name} differs between what is held and what is stored, or among the ranks that "
                "share it"
            )
    return None


def _size_bytes(trainer: MegatronTrainer) -> int:
    """The bytes of the tensors, over all ranks."""
    return (
        len(SAVED) * 4 * sum(torch.Size(shape).numel() for shape in trainer.saved_shapes().values())
    )
