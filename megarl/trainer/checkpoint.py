"""Checkpoints by Megatron's dist_checkpointing: saved under one topology, loaded under any other.

A checkpoint is a folder: the torch_dist files of weights, optimizer and random generators, and `state.json`, which holds
the schedule's position and the caller's state. It is written under another name and renamed when all ranks are done.
"""

from __future__ import annotations

import dataclasses
import json
import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException

from megarl.trainer.folders import reason, written_together
from megarl.trainer.optimizer import load_state
from megarl.trainer.step import MegatronTrainer

STATE = "state.json"


def save(trainer: MegatronTrainer, path: str | Path, state: dict[str, Any], files: Mapping[str, bytes] = {}) -> None:
    """Weights, optimizer, random generators, schedule, the caller's JSON-able `state` and rank 0's `files` (name → content).

    Raises WriteError that names `path` and the bytes where they cannot be written; there is then nothing at `path`.
    """
    # For the results of asynchronous saves Megatron starts a server process, which imports the main module again, takes seconds,
    # and outlives a trainer that is killed. A synchronous save reads its results in the process that wrote them.
    filesystem_async._results_queue = queue.SimpleQueue()
    text = json.dumps({"topology": dataclasses.asdict(trainer.topology), "position": trainer.learning_rate.position, "state": state})
    tensors = _sharded_state(trainer, is_loading=False, with_random=True)
    with written_together(path, _size_bytes(tensors)) as folder:
        dist_checkpointing.save(tensors, str(folder), content_metadata=_content())
        if dist.get_rank() == 0:
            (folder / STATE).write_text(text)
        for name, content in files.items():
            (folder / name).write_bytes(content)


def load(trainer: MegatronTrainer, path: str | Path) -> dict[str, Any]:
    """Restores what `save` wrote, under any tp, pp and dp; returns the caller's state.

    Raises RuntimeError if there is no complete checkpoint at `path`, or a damaged one.
    """
    file = Path(path) / STATE
    if not file.exists():
        raise RuntimeError(f"{path}: no complete checkpoint ({STATE} is missing)")
    saved = json.loads(file.read_text())
    # Random states belong to ranks; under another topology there is nobody to give them to, and the seed of the start holds.
    same_ranks = saved["topology"] == dataclasses.asdict(trainer.topology)
    try:
        loaded = dist_checkpointing.load(_sharded_state(trainer, is_loading=True, with_random=same_ranks), str(path))
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        hint = "is it damaged? An older checkpoint serves when this one is moved away"
        raise RuntimeError(f"{path} cannot be loaded, {hint}: {reason(error)}") from error
    for i, chunk in enumerate(trainer.chunks):
        chunk.load_state_dict(loaded[f"model{i}"], strict=True)
    load_state(trainer.optimizer, loaded["optimizer"])
    if same_ranks:
        _set_random_state(loaded["random"])
    trainer.learning_rate.seek(saved["position"])
    return saved["state"]


def _content() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        # Replicas' shares of the optimizer's state meet in host memory, over gloo, on the ranks of the first replica. Otherwise every rank
        # gathers, in GPU memory, a float32 copy of all its parameters: 33 GiB at 70B on tp 8, beside the 58 that training keeps.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _sharded_state(trainer: MegatronTrainer, is_loading: bool, with_random: bool) -> dict[str, Any]:
    metadata = {**_content(), "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(trainer.chunks)}
    # The optimizer takes its shardings from the model's; dist_checkpointing.save then consumes both dictionaries.
    state["optimizer"] = trainer.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    if with_random:
        state["random"] = ShardedObject("random", _random_state(), (dist.get_world_size(),), (dist.get_rank(),))
    return state


def _size_bytes(state: dict[str, Any]) -> int:
    """Of the tensors, over all ranks, each counted once. Collective."""
    mine = sum(
        value.data.nbytes
        for value in nested_values(state)
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)) and is_main_replica(value.replica_id)
    )
    total = torch.tensor(mine, device=torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu"))
    dist.all_reduce(total)
    return int(total)


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
