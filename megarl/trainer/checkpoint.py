"""Saves and loads checkpoints by the pieces of the trainer's layout, so that one saved under any topology loads under any other.

A checkpoint is a folder. For every logical tensor of the model it holds the fp32 master weights and both of Adam's moments, cut into the
boxes that the ranks held: each rank writes its own (`rank_00003.bin`), without communication, and without padding, which no box covers.
`state.json` has the position of the schedule and the caller's state; `index.msgpack` says what lies where. The folder is written under
another name, beside the next steps, and renamed when all ranks are done and everything is on the disk.

Three things must agree before a checkpoint counts as saved, and again before a loaded one is used: the data on the disk and in memory, by
the hash of every box; the model's weights and the master weights that they are rounded from; and all ranks that hold the same elements, by
the hash of every logical tensor, which does not depend on how it is cut.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.files import sync_folder
from megarl.kernels.audit import BITS
from megarl.plan.checkpoints import STATE
from megarl.trainer import checkpoint_state as held
from megarl.trainer.checkpoint_index import CRITIC, FORMAT, INDEX_FILE, CheckpointError, Index, listed_file, small_file, unusable
from megarl.trainer.checkpoint_tensors import Written, merged, read_box, read_boxes, tensor_file, write_boxes
from megarl.trainer.folders import Writing, together
from megarl.trainer.model import parameters_by_name
from megarl.trainer.optimizer import optimizer_shards, set_steps_made, steps_made
from megarl.trainer.step import MegatronTrainer


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
    """Begins to save weights, optimizer, random generators, schedule, the caller's JSON-able `state`, and `files` of rank 0; and `critic`,
    a trainer on the same ranks, as a checkpoint of its own in the folder CRITIC of this one, whose index vouches for its index.

    If `beside`, this rank's boxes are copied to the host's memory and written from there, while training goes on; the checkpoint is there
    when `finish` of the result has returned. That raises WriteError, which names `path` and the bytes, if they cannot be written or differ
    from what was in memory here; then nothing is left at `path`.
    Raises RuntimeError, before it writes, if the state is not consistent, as it must be between two steps.
    """
    parts = [_Part(critic, CRITIC, {}, {}, beside)] if critic is not None else []
    parts.append(_Part(trainer, "", state, files, beside))

    def conclude(folder: Path, written: list[Written]) -> None:
        vouched: list[str] = []
        for part, mine in zip(parts, written, strict=True):
            part.conclude(folder, mine, vouched)
            vouched.append(f"{part.name}/{INDEX_FILE}")

    size_bytes = sum(_size_bytes(part.trainer) for part in parts)
    return Writing(path, lambda folder: [part.write(folder) for part in parts], conclude, beside=beside, size_bytes=size_bytes)


class _Part:
    """One trainer's part of a checkpoint, in the folder `name` of it."""

    def __init__(self, trainer: MegatronTrainer, name: str, state: dict[str, Any], files: Mapping[str, bytes], beside: bool):
        self.trainer, self.name, self._files = trainer, name, files
        together(lambda: _check_between_steps(trainer))
        self._totals = _totals(trainer)
        self._live = {name: total for name, (_, total) in held.totals(trainer, held.shared_boxes(trainer, [held.LIVE])).items()}
        place = {"topology": dataclasses.asdict(trainer.topology), "position": trainer.learning_rate.position, "base": trainer.base}
        self._state = json.dumps({**place, "state": state}).encode()
        boxes = [*held.shared_boxes(trainer, held.SAVED), *held.random_boxes()]
        self._boxes = [box.copied() for box in boxes] if beside else boxes

    def write(self, folder: Path) -> Written:
        rank, own = dist.get_rank(), folder / self.name
        own.mkdir(exist_ok=True)
        return write_boxes(own / tensor_file(rank), rank, self._boxes)

    def conclude(self, folder: Path, mine: Written, vouched: list[str]) -> None:
        """Writes the index, which lists the files `vouched` of `folder` too."""
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, parts)
        together(lambda: None if parts is None else self._write_index(folder, parts, vouched))

    def _write_index(self, folder: Path, parts: list[Written], vouched: list[str]) -> None:
        own = folder / self.name
        small = [small_file(own, name, content) for name, content in {STATE: self._state, **self._files}.items()]
        small += [listed_file(folder, name) for name in vouched]
        tensors = merged(stored for _, stored in parts)
        index = Index(FORMAT, str(self.trainer.dtype), [*(file for file, _ in parts), *small], tensors, self._live)
        if problem := _difference(self.trainer, self._totals, index):
            raise RuntimeError(problem)
        index.write(own)
        sync_folder(own)


def load_critic(critic: MegatronTrainer, path: str | Path) -> None:
    """Restores the critic of the checkpoint at `path`. Raises CheckpointError as `load` does, and if it has none."""

    def look() -> None:
        if not (Path(path) / CRITIC).is_dir():
            raise unusable(path, "it has no critic: the run that saved it trained none")

    together(look, failures=(CheckpointError,), raises=CheckpointError)
    load(critic, Path(path) / CRITIC)


def load(trainer: MegatronTrainer, path: str | Path) -> dict[str, Any]:
    """Restores what `save` wrote, under any topology, and returns the caller's state.

    Raises CheckpointError, on every rank, if the checkpoint at `path` is missing, incomplete or damaged.
    """
    folder = Path(path)
    index, saved = together(lambda: _read(trainer, folder), failures=(OSError, CheckpointError), raises=CheckpointError)
    for shard in optimizer_shards(trainer.optimizer):
        shard.live.copy_(shard.master)
    if trainer.topology.zero == 1:
        for chunk in trainer.ddp:
            chunk.start_param_sync(force_sync=True)
    if problem := _difference(trainer, _totals(trainer), index):
        if trainer.lora and problem.startswith(f"{held.LIVE}/"):
            now = f"the run has {'others there now' if trainer.base == saved['base'] else trainer.base}"
            problem += f". Its adapters belong to the weights that were in {saved['base']}; {now}"
        raise unusable(folder, f"once loaded, it is not what was saved: {problem}")
    set_steps_made(trainer.optimizer, saved["position"])
    trainer.learning_rate.seek(saved["position"])
    return saved["state"]


def _read(trainer: MegatronTrainer, folder: Path) -> tuple[Index, dict[str, Any]]:
    """Fills this rank's master weights, moments and untrained tensors; padding is zero. Returns (index, content of state.json)."""
    index = Index.read(folder)
    index.check(folder, index.files[dist.get_rank() :: dist.get_world_size()])
    saved = json.loads(index.content(folder, STATE))
    if index.dtype != str(trainer.dtype):
        raise unusable(folder, f"the model was trained in {index.dtype}, and is now {trainer.dtype}")
    for parameter in parameters_by_name(trainer.chunks).values():
        if parameter.requires_grad or not trainer.lora:  # a frozen model has been loaded
            parameter.data.zero_()
    for run in held.runs(trainer).values():
        for kind in run.values.keys() & held.SAVED:
            run.values[kind].zero_()
    read_boxes(folder, index, held.held_boxes(trainer))
    # Random states belong to ranks. Under another topology they fit no rank, so the generators stay as seeded at the start.
    if saved["topology"] == dataclasses.asdict(trainer.topology):
        own = {name: tensor.boxes[0] for name, tensor in index.tensors.items() if name.startswith(held.random_prefix())}
        held.set_random({name: read_box(folder, index, name, box) for name, box in own.items()})
    return index, saved


def _check_between_steps(trainer: MegatronTrainer) -> None:
    """Raises RuntimeError if the model does not equal its rounded master weights, or if optimizer and schedule differ in their steps."""
    names = {parameter: name for name, parameter in parameters_by_name(trainer.chunks).items()}
    for shard in optimizer_shards(trainer.optimizer):
        bits = BITS[shard.live.element_size()]
        if not torch.equal(shard.live.view(bits), shard.master.to(shard.live.dtype).view(bits)):
            raise RuntimeError(f"nothing is saved: {names[shard.parameter]} is not the optimizer's master weight, rounded")
    steps, position = steps_made(trainer.optimizer), trainer.learning_rate.position
    if steps - {position}:
        raise RuntimeError(f"nothing is saved: the optimizer has made {sorted(steps)} steps, the schedule {position}")


def _totals(trainer: MegatronTrainer) -> dict[str, tuple[int, int]]:
    """(elements, hash) of each tensor over all ranks, including the model's own weights, by whole pieces. Collective."""
    return held.totals(trainer, [*held.held_boxes(trainer), *held.live_boxes(trainer)])


def _difference(trainer: MegatronTrainer, totals: dict[str, tuple[int, int]], index: Index) -> str | None:
    """Says what is wrong if the ranks' `totals` are not a whole multiple of those in the index; None if they are."""
    shapes = held.logical_shapes(trainer)
    for name, (count, total) in totals.items():
        tensor, of_model = index.tensors.get(name), torch.Size(shapes[name.partition("/")[2]]).numel()
        copies, rest = divmod(count, of_model)
        saved = index.live.get(name) if tensor is None else tensor.hash
        if rest or (tensor is not None and tensor.elements != of_model):
            return f"elements of {name} are missing or duplicated"
        if saved is None or total != copies * saved % 2**64:
            return f"{name} differs between what is held and what is stored, or among the ranks that share it"
    return None


def _size_bytes(trainer: MegatronTrainer) -> int:
    """The bytes of the tensors, over all ranks."""
    return len(held.SAVED) * 4 * sum(torch.Size(shape).numel() for shape in held.saved_shapes(trainer).values())
