"""The state that checkpoints keep, as trainer ranks hold it: boxes of logical tensors, without padding.

A tensor of a checkpoint is named KIND/LOGICAL TENSOR: `master/model.norm.weight`, float32. LIVE is the model's own copy, which training
and generation compute with: the master weight rounded to the model's dtype. It is hashed, but not saved. Of a frozen
model it is all there is: a checkpoint of adapters has the hashes of their model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from megarl.box import Box, whole_box
from megarl.kernels.audit import Hashes
from megarl.reshard.kinds import LocalTensor, Piece
from megarl.reshard.layout import Layout, hf_layout
from megarl.reshard.shards import flat_boxes
from megarl.trainer.checkpoint_tensors import HeldBox
from megarl.trainer.model import parameters_by_name
from megarl.trainer.optimizer import optimizer_shards
from megarl.trainer.step import MegatronTrainer

MASTER, EXP_AVG, EXP_AVG_SQ, LIVE = "master", "exp_avg", "exp_avg_sq", "live"
SAVED = (MASTER, EXP_AVG, EXP_AVG_SQ)
RUN = 1 << 26  # elements of a parameter that are written or read at a time: 256 MiB of host memory


@dataclass(frozen=True)
class Run:
    """The elements first .. end of a flattened local tensor."""

    first: int
    values: dict[str, torch.Tensor]  # by kind, each [end - first]; untrained tensors have no moments
    is_share: bool  # whether replicas hold different elements; otherwise all hold the same

    @property
    def end(self) -> int:
        return self.first + self.values[LIVE].numel()


def runs(trainer: MegatronTrainer) -> dict[str, Run]:
    """The runs of this rank by the layout's names. Tensors of which its optimizers hold nothing are missing."""
    parameters = parameters_by_name(trainer.chunks)
    names = {parameter: name for name, parameter in parameters.items()}
    found = {}
    for shard in optimizer_shards(trainer.optimizer):
        values = {MASTER: shard.master, EXP_AVG: shard.exp_avg, EXP_AVG_SQ: shard.exp_avg_sq, LIVE: shard.live}
        found[names[shard.parameter]] = Run(shard.first, values, is_share=trainer.topology.zero == 1)
    for name, parameter in parameters.items():
        if not parameter.requires_grad:  # a router's bias, or frozen
            flat = parameter.detach().view(-1)
            found[name] = Run(0, {LIVE: flat} if trainer.lora else {MASTER: flat, LIVE: flat}, is_share=False)
    return found


def shared_boxes(trainer: MegatronTrainer, kinds: Iterable[str]) -> Iterator[HeldBox]:
    """The boxes that this rank saves: over all ranks every element once. Replicas that hold the same elements share them equally."""
    shapes, held = logical_shapes(trainer), runs(trainer)
    for layout in layouts(trainer):
        for tensor, piece, replica, replicas in layout.shared_pieces(dist.get_rank()):
            if run := held.get(tensor.name):
                part = (run.first, run.end) if run.is_share else (run.end * replica // replicas, run.end * (replica + 1) // replicas)
                yield from _boxes(run, *part, tensor, piece, shapes[piece.logical_name], kinds)


def held_boxes(trainer: MegatronTrainer) -> Iterator[HeldBox]:
    """All boxes that this rank's optimizers hold."""
    shapes, held = logical_shapes(trainer), runs(trainer)
    for tensor in trainer.saved_layout.tensors(dist.get_rank()):
        if run := held.get(tensor.name):
            for piece in tensor.pieces:
                yield from _boxes(run, run.first, run.end, tensor, piece, shapes[piece.logical_name], SAVED)


def live_boxes(trainer: MegatronTrainer) -> Iterator[HeldBox]:
    """All of the model's weights that this rank holds, by whole pieces, as the weights channel reads them."""
    shapes, parameters = logical_shapes(trainer), trainer.local_parameters()
    for tensor in (tensor for layout in layouts(trainer) for tensor in layout.tensors(dist.get_rank())):
        for piece in tensor.pieces:
            values = parameters[tensor.name][piece.local.slices()]
            yield HeldBox(f"{LIVE}/{piece.logical_name}", shapes[piece.logical_name], piece.logical, values)


def layouts(trainer: MegatronTrainer) -> tuple[Layout, ...]:
    """Of all that is held: the model, and its adapters where there are some."""
    return (trainer.layout, trainer.saved_layout) if trainer.lora else (trainer.layout,)


def logical_shapes(trainer: MegatronTrainer) -> dict[str, tuple[int, ...]]:
    return saved_shapes(trainer) | ({tensor.name: tensor.shape for tensor in hf_layout(trainer.spec, "float32").tensors(0)})


def saved_shapes(trainer: MegatronTrainer) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in hf_layout(trainer.spec, "float32", trainer.lora).tensors(0)}


def totals(trainer: MegatronTrainer, held: Iterable[HeldBox]) -> dict[str, tuple[int, int]]:
    """(elements, hash) of each tensor, summed over all ranks: one that is held k times counts k times. Collective."""
    names = [f"{kind}/{name}" for kind in (*SAVED, LIVE) for name in logical_shapes(trainer)]
    sums, hashes = {name: [0, 0, 0] for name in names}, Hashes()
    for part in held:
        sums[part.name][0] += part.box.numel
        hashes.add(part.name, part.values, part.box, part.shape)
    for name, share in hashes.totals().items():
        sums[name][1:] = share & 0xFFFFFFFF, share >> 32  # halves: their sums over ranks do not overflow
    total = torch.tensor(list(sums.values()), dtype=torch.int64, device=trainer.device)
    dist.all_reduce(total)
    return {name: (row[0], (row[1] + (row[2] << 32)) % 2**64) for name, row in zip(names, total.tolist()) if row[0]}


def _boxes(
    run: Run, first: int, end: int, tensor: LocalTensor, piece: Piece, shape: tuple[int, ...], kinds: Iterable[str]
) -> Iterator[HeldBox]:
    """The boxes of a logical tensor of shape `shape` that lie in `piece` and in elements first .. end of the flattened `tensor`."""
    for begin in range(first, end, RUN):
        for box in flat_boxes(tensor.shape, begin, min(begin + RUN, end)):
            if (common := piece.local.intersect(box)) is None:
                continue
            offset, inside = _position(box, tensor.shape) - run.first, common.move(box, whole_box(box.shape)).slices()
            for kind in kinds:
                if (values := run.values.get(kind)) is not None:
                    of_box = values[offset : offset + box.numel].view(box.shape)
                    yield HeldBox(f"{kind}/{piece.logical_name}", shape, common.move(piece.local, piece.logical), of_box[inside])


def _position(box: Box, shape: tuple[int, ...]) -> int:
    """The position of the box's first element in the flattened tensor."""
    position = 0
    for index, extent in zip(box.start, shape):
        position = position * extent + index
    return position


def random_boxes() -> Iterator[HeldBox]:
    """The states of this rank's random generators, as tensors of bytes that only this rank has."""
    states = {"torch": torch.get_rng_state(), **{f"tracker/{name}": s for name, s in _tracker().get_states().items()}}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in states.items():
        yield HeldBox(random_prefix() + name, tuple(state.shape), whole_box(tuple(state.shape)), state)


def set_random(states: dict[str, torch.Tensor]) -> None:
    """Restores the generators from `states`: what `random_boxes` yielded, by name."""
    found = {name.removeprefix(random_prefix()): state for name, state in states.items()}
    torch.set_rng_state(found.pop("torch"))
    if (cuda := found.pop("cuda", None)) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    _tracker().set_states({name.removeprefix("tracker/"): state for name, state in found.items()})


def _tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None  # made when Megatron's generators were seeded
    return tracker


def random_prefix() -> str:
    return f"random/{dist.get_rank()}/"
