"""The ranks of a real gloo trainer: they hold known values, save and load checkpoints, and compare
every element.

    checkpoint_worker.py CHAINS_JSON OUT_DIR

A chain is a model and a list of layouts. Under the first layout, every element of every logical
tensor and of both moments gets a value that depends only on its place; then all is saved. Under
each other layout it is loaded, compared, and saved again for the next. This file has index
arithmetic of its own to find each element in the buffers of model and optimizer: by Megatron's
buckets, and by the pieces of the layout. The ranks of each layout are forked from a process that
has imported everything.

Prints a JSON line for each layout: {"chain", "layout", "failures": [text of each rank that
failed]}.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.base.geometry import TrainerTopology
from megarl.config.schema import OptimizerConfig, TrainerConfig
from megarl.models.registry import load_spec
from megarl.reshard.layout import hf_layout
from megarl.trainer import cpu_support

WEIGHT, FIRST_MOMENT, SECOND_MOMENT = range(3)
POSITION = 5  # of the schedule in the saved state
STEPS = 7  # of the optimizer; more than planned
DEADLINE_S = 60


def value(kind: int, ids: torch.Tensor) -> torch.Tensor:
    """A different float32 for each element of `ids`, the elements' numbers in the whole model.

    Padding has number -1 and value 0.
    """
    bits = (ids * 3 + kind + 1) * 0x9E3779B97F4A7C1
    bits = (bits ^ (bits >> 29)) * 0x3F58476D1CE4E5B
    noise = ((bits >> 20) & 0xFFFFFF).double() / 2**24 + 2**-26
    return torch.where(ids < 0, 0.0, noise if kind == SECOND_MOMENT else noise - 0.5).float()


def ids_by_name(trainer: Any) -> dict[str, torch.Tensor]:
    """For each local parameter: the number of each of its elements in the whole model."""
    begins = {}
    begin = 0
    for tensor in hf_layout(trainer.spec, "float32").tensors(0):
        begins[tensor.name] = (begin, tensor.shape)
        begin += torch.Size(tensor.shape).numel()
    ids_of_names = {}
    for tensor in trainer.layout.tensors(dist.get_rank()):
        ids = torch.full(tensor.shape, -1)
        for piece in tensor.pieces:
            first, shape = begins[piece.logical_name]
            full_ids = first + torch.arange(torch.Size(shape).numel()).view(shape)
            ids[piece.local.slices()] = full_ids[piece.logical.slices()]
        ids_of_names[tensor.name] = ids
    return ids_of_names


def optimizer_states(
    trainer: Any,
) -> Iterator[tuple[torch.nn.Parameter, int, int, torch.Tensor, dict[str, torch.Tensor]]]:
    """(parameter, first and end of the flattened elements, their master weights, Adam's state) for
    all that this rank's optimizers hold.
    """
    from megarl.trainer.fully_sharded import local_shard

    for part in trainer.optimizer.chained_optimizers:
        adam = part.optimizer
        if adam is None:
            continue
        masters = [master for group in adam.param_groups for master in group["params"]]
        if trainer.topology.zero == 1:
            size = part.data_parallel_group.size()
            rank = part.data_parallel_group.rank()
            states = []
            for buffer in part.buffers:
                for parameter, (start, end, number) in buffer.param_index_map.items():
                    bucket = buffer.buckets[number]
                    share = bucket.grad_data.numel() // size
                    low = max(start, bucket.offset + rank * share)
                    high = min(end, bucket.offset + (rank + 1) * share)
                    if low < high:
                        states.append((parameter, low - start, high - start))
            assert len(states) == len(masters)
            for parameter, first, end in states:
                group, place = part.model_param_group_index_map[parameter]
                master = adam.param_groups[group]["params"][place]
                yield parameter, first, end, master, adam.state[master]
        else:
            owners = {
                id(p.main_param) if hasattr(p, "main_param") else id(p): p
                for chunk in trainer.ddp
                for p in chunk.parameters()
            }
            for master in masters:
                local = local_shard(master)
                state = {key: local_shard(values) for key, values in adam.state[master].items()}
                yield owners[id(master)], 0, local.numel(), local, state


def optimizer_tensors(trainer: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, tensor, its expected values) of all that this rank holds."""
    from megarl.trainer.model import parameters_by_name

    ids = ids_by_name(trainer)
    parameters = parameters_by_name(trainer.chunks)
    names = {parameter: name for name, parameter in parameters.items()}
    assert ids.keys() == parameters.keys()
    for name, parameter in parameters.items():
        live = trainer.live_weights(parameter)
        yield name, live, value(WEIGHT, ids[name]).to(live.dtype)
    trained = set()
    for parameter, first, end, master, state in optimizer_states(trainer):
        trained.add(parameter)
        local_ids = ids[names[parameter]].flatten()[first:end]
        yield f"master of {names[parameter]}", master.data, value(WEIGHT, local_ids).view_as(master)
        for kind, key in ((FIRST_MOMENT, "exp_avg"), (SECOND_MOMENT, "exp_avg_sq")):
            yield f"{key} of {names[parameter]}", state[key], value(kind, local_ids).view_as(master)
    if trainer.topology.zero == 0:
        assert trained == {p for p in parameters.values() if p.requires_grad}


def make(chain: dict[str, Any], layout: dict[str, Any]) -> Any:
    from megarl.trainer.step import MegatronTrainer

    topology = TrainerTopology(**layout)
    settings = TrainerConfig(sequence_parallel=topology.tp > 1)
    adam = OptimizerConfig(lr=1e-3)
    return MegatronTrainer(
        load_spec(chain["model"]),
        topology,
        settings,
        chain["dtype"],
        seed=1,
        total_steps=10,
        optimizer=adam,
        timeout_s=DEADLINE_S,
    )


def put(trainer: Any) -> None:
    for _, tensor, values in optimizer_tensors(trainer):
        tensor.copy_(values)
    for *_, state in optimizer_states(trainer):
        state["step"].fill_(STEPS)
    trainer.learning_rate.seek(POSITION, STEPS)


def compare(trainer: Any) -> None:
    """Raises AssertionError if an element, a moment or a step differs.

    Compares again after Megatron has copied the master weights to the model, as at the end of a
    step.
    """
    for again in ("", ", after the master weights were copied to the model"):
        wrong = [
            f"{state_name}: {int((tensor != values).sum())} elements"
            for state_name, tensor, values in optimizer_tensors(trainer)
            if not equal(tensor, values)
        ]
        assert not wrong, f"{len(wrong)} tensors differ{again}: {wrong[:8]}"
        for part in trainer.optimizer.chained_optimizers:
            if hasattr(part, "_copy_main_params_to_model_params") and part.optimizer is not None:
                part._copy_main_params_to_model_params()
        if trainer.topology.zero == 1:
            for chunk in trainer.ddp:
                chunk.start_param_sync(force_sync=True)
        trainer.round_masters()
    assert (trainer.learning_rate.position, trainer.learning_rate.steps) == (POSITION, STEPS)
    assert all(state["step"].item() == STEPS for *_, state in optimizer_states(trainer))


def equal(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    return tensor.dtype == values.dtype and torch.equal(tensor, values)


def run(chain: dict[str, Any], number: int, out: Path) -> None:
    from megarl.trainer import checkpoint

    trainer = make(chain, chain["layouts"][number])
    if number == 0:
        put(trainer)
    else:
        assert checkpoint.load(trainer, out / f"{number - 1}") == {"saved under": number - 1}
        compare(trainer)
    if number + 1 < len(chain["layouts"]):
        checkpoint.save(trainer, out / f"{number}", {"saved under": number})


def fork(rank: int, world_size: int, chain: dict[str, Any], number: int, out: Path) -> int:
    """Forks a rank and returns its process id.

    A rank that fails writes the text to OUT/failure.RANK.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=DEADLINE_S)
        store = dist.FileStore(str(out / f"rendezvous.{number}"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        run(chain, number, out)
        dist.barrier()
        status = 0
    except BaseException as error:
        (out / f"failure.{rank}").write_text(f"rank {rank}: {type(error).__name__}: {error}")
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # all is written, and the interpreter's own exit takes a second


def main() -> None:
    chains = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    cpu_support.install()
    import torch._dynamo  # noqa: F401  which the first optimizer would import

    import megarl.trainer.checkpoint
    import megarl.trainer.step  # noqa: F401  takes seconds, and so once for all

    for chain in chains:
        folder = out / chain["name"]
        folder.mkdir()
        for number, layout in enumerate(chain["layouts"]):
            ranks = [
                fork(rank, size, chain, number, folder)
                for size in [TrainerTopology(**layout).world_size]
                for rank in range(size)
            ]
            statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
            failures = [file.read_text() for file in sorted(folder.glob("failure.*"))]
            failures += [
                f"a rank ended with status {status}" for status in statuses if status not in (0, 1)
            ]
            print(
                json.dumps({"chain": chain["name"], "layout": number, "failures": failures}),
                flush=True,
            )
            if failures:
                break
            shutil.rmtree(folder / f"{number - 1}", ignore_errors=True)
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
