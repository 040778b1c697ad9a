"""One rank of a real gloo trainer that measures its memory, for test_planner_memory.py.

    plan_memory_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE CASES_JSON OUT_FILE

Writes a list with one entry per case: the bytes of weights, gradients and optimizer state, and the
bytes that autograd keeps of one microbatch.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.base import LossOutput
from megarl.base.rollout_types import TrainSequence
from megarl.config.schema import TrainerConfig
from megarl.models import load_spec
from megarl.plan.topologies import trainer_topology
from megarl.trainer import cpu_support


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes of all distinct storages."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def negative_sum(logprobs: torch.Tensor, microbatch: Any) -> LossOutput:
    return LossOutput(-logprobs[microbatch.loss_mask].sum(), {"tokens": microbatch.loss_mask.sum()})


def weigh(case: dict[str, Any]) -> dict[str, int]:
    from megarl.trainer.step import MegatronTrainer

    settings = TrainerConfig(**case["trainer"])
    spec = load_spec(case["model"])
    trainer = MegatronTrainer(
        spec,
        trainer_topology(settings),
        settings,
        case["dtype"],
        seed=1,
        total_steps=1,
        timeout_s=60,
    )
    trainer.init_random(0)
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    adams = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    masters = storages(p for adam in adams for group in adam.param_groups for p in group["params"])
    moments = storages(
        s[name] for adam in adams for s in adam.state.values() for name in ("exp_avg", "exp_avg_sq")
    )
    weights = storages(p.data for p in parameters)
    buffers = [
        buffer
        for chunk in trainer.ddp
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    return {
        "weights": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": sum(storages(buffer.grad_data for buffer in buffers).values()),
        "optimizer": sum(moments.values())
        + sum(size for place, size in masters.items() if place not in weights),
        "kept": storage_bytes(trainer, case["tokens"], weights),
    }


def storage_bytes(trainer: Any, tokens: int, weights: dict[int, int]) -> int:
    """The bytes that autograd holds at the end of the forward pass of one microbatch of `tokens` on
    this rank.
    """
    tensors_by_pointer: dict[int, torch.Tensor] = {}
    backward = False

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not backward and tensor.untyped_storage().data_ptr() not in weights:
            # held, so that its memory is not reused
            tensors_by_pointer[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal backward
        backward = True
        return tensor

    ids = [i % trainer.spec.vocab_size for i in range(tokens + 1)]
    mask = [False] + [True] * tokens
    zeros = [0.0] * (tokens + 1)
    ones = [1.0] * (tokens + 1)
    one = TrainSequence(token_ids=ids, loss_mask=mask, mu_logprobs=zeros, advantages=ones)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        trainer.train_step([one] * trainer.topology.dp, negative_sum, 1.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_by_pointer.values())


def main() -> None:
    rank, world_size, rendezvous, cases, out = sys.argv[1:]
    cpu_support.install()
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timeout,
    )
    weights = [weigh(case) for case in json.loads(Path(cases).read_text())]
    Path(out).write_text(json.dumps(weights))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
