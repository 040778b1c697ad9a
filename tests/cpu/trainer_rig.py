"""Shared by all scenarios: a real trainer of small models on gloo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megarl.algorithms.base import LossOutput
from megarl.base.geometry import TrainerTopology
from megarl.base.kept_sets import KeptSets
from megarl.base.rollout_types import TrainSequence
from megarl.config.schema import OptimizerConfig, TrainerConfig
from megarl.lora.settings import LoraConfig
from megarl.models.registry import load_spec
from megarl.models.routing import RoutingFormat
from megarl.models.spec import ModelSpec

DENOMINATOR = 37.0
TEMPERATURE = 0.7
LENGTHS = (3, 10, 17, 5, 12, 19, 7, 14, 21, 1, 2)


def sequences(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[TrainSequence]:
    """Random sequences.

    Every third one has zero advantage. Some have an environment's tokens in the middle, masked and
    with garbage values.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for i, length in enumerate(lengths):
        prompt = max(1, min(1 + i % 3, length - 1))
        weights = torch.randn(length, generator=generator) if i % 3 else torch.zeros(length)
        mask = [j >= prompt and not (i % 2 and prompt + 2 <= j < prompt + 5) for j in range(length)]
        batch.append(
            TrainSequence(
                token_ids=torch.randint(0, vocab, (length,), generator=generator).tolist(),
                loss_mask=mask,
                mu_logprobs=[0.0] * length,
                advantages=[w if j >= prompt else 0.0 for j, w in enumerate(weights.tolist())],
            )
        )
    return batch


def logprob_rows(trainer: Any, batch: list[TrainSequence], **settings: Any) -> list[list[float]]:
    return [row.tolist() for row in trainer.token_logprobs(batch, **settings)]


def with_random_experts(batch: list[TrainSequence], routing: RoutingFormat) -> list[TrainSequence]:
    """The sequences with random experts: at all positions, in every fourth sequence only in the
    first half, in every fifth at none.
    """
    random = np.random.default_rng(3)
    replayed_batch = []
    for i, sequence in enumerate(batch):
        positions = len(sequence.token_ids) - 1
        replayed = 0 if i % 5 == 4 else positions // 2 if i % 4 == 3 else positions
        ids = random.random((replayed, routing.shape[0], routing.num_experts)).argsort(axis=-1)[
            ..., : routing.top_k
        ]
        replayed_batch.append(msgspec.structs.replace(sequence, routing=routing.pack(ids)))
    return replayed_batch


def drawn_from_sets(batch: list[TrainSequence], vocab: int) -> list[TrainSequence]:
    """The sequences with a random set for each token of the loss: of one token, of all, or of any
    size between.
    """
    random = np.random.default_rng(4)
    drawn = []
    for sequence in batch:
        rows = [
            np.union1d(
                np.flatnonzero(random.random(vocab) < random.choice([0, 0.1, 0.5, 1])), token
            )
            if trained
            else np.empty(0)
            for token, trained in zip(sequence.token_ids, sequence.loss_mask)
        ]
        sizes = np.array([len(row) for row in rows], np.int32)
        ids = np.concatenate(rows).astype(np.int32)
        drawn.append(
            msgspec.structs.replace(
                sequence, kept=KeptSets.from_ids(vocab, sequence.token_ids, sizes, ids)
            )
        )
    return drawn


def weighted_nll(logprobs: torch.Tensor, microbatch: Any) -> LossOutput:
    assert logprobs.dtype == torch.float32
    loss = -(microbatch.advantages * logprobs)[microbatch.loss_mask].sum()
    return LossOutput(
        loss, {"tokens": microbatch.loss_mask.sum(), "weights": microbatch.advantages.sum()}
    )


def plain_adam(lr: float) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, clip_grad=0.0, weight_decay=0.01, eps=1e-4)


def make(
    scenario: dict[str, Any],
    optimizer: OptimizerConfig,
    total_steps: int = 10,
    spec: ModelSpec | None = None,
) -> Any:
    from megarl.lora.trainer import LoraTrainer
    from megarl.trainer.step import MegatronTrainer

    lora = LoraConfig(**scenario.get("lora", {}))
    make_trainer: Any = partial(LoraTrainer, lora=lora) if lora.rank else MegatronTrainer
    return make_trainer(
        spec or load_spec(scenario["model"]),
        TrainerTopology(**scenario["topology"]),
        # several chunks of a microbatch
        TrainerConfig(**{"logprob_chunk_tokens": 16, **scenario.get("trainer", {})}),
        scenario.get("dtype", "float32"),
        seed=1,
        total_steps=total_steps,
        timeout_s=60,
        optimizer=optimizer,
    )


def poison_padding(trainer: Any) -> None:
    """Puts large garbage into the rows without a token. It must have no effect."""
    parameters = trainer.local_parameters()
    for tensor in trainer.layout.tensors(dist.get_rank()):
        used = max((piece.local.end[0] for piece in tensor.pieces), default=0)
        parameters[tensor.name][used:] = 5.0


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """main_grad of every local parameter.

    With the distributed optimizer, it is NaN if another rank has the sum.
    """
    parts = {}
    from megarl.trainer.fully_sharded import local_shard
    from megarl.trainer.model import parameters_by_name

    t = trainer.topology
    if trainer.trained_zero == 3:
        for name, parameter in parameters_by_name(trainer.chunks).items():
            if parameter.requires_grad:
                parts[name] = local_shard(parameter.grad).clone()
        return parts
    coordinate = trainer.coordinate
    dense = (coordinate.dp * t.cp + coordinate.cp, t.dp * t.cp)
    expert = (
        (dist.get_rank() // (t.etp * t.ep) % t.expert_dp, t.expert_dp)
        if trainer.spec.experts
        else dense
    )
    buffers = [(b, dense) for chunk in trainer.ddp for b in chunk.buffers]
    buffers += [(b, expert) for chunk in trainer.ddp for b in chunk.expert_parallel_buffers]
    for name, parameter in parameters_by_name(trainer.chunks).items():
        if not parameter.requires_grad:  # a router's bias
            continue
        grad = parameter.main_grad.detach().float().clone()
        ((buffer, (rank, size)),) = [
            entry for entry in buffers if parameter in entry[0].param_index_map
        ]
        if trainer.trained_zero == 1 and size > 1:
            start, end, number = buffer.param_index_map[parameter]
            bucket = buffer.buckets[number]
            shard = bucket.grad_data.numel() // size
            position = torch.arange(start, end) - bucket.offset
            inside = (position >= rank * shard) & (position < (rank + 1) * shard)
            grad = torch.where(inside.view_as(grad), grad, torch.nan)
        parts[name] = grad
    return parts


def all_logprobs(
    trainer: Any, batch: list[TrainSequence], model: Any = "policy", temperature: float = 1.0
) -> list[list[float]]:
    """Log-probs of all tokens, not only of the loss's."""
    full_sequences = [
        msgspec.structs.replace(s, loss_mask=[False] + [True] * (len(s.token_ids) - 1))
        for s in batch
    ]
    return logprob_rows(trainer, full_sequences, model=model, temperature=temperature)


def one_step(trainer: Any, batch: list[TrainSequence]) -> dict[str, Any]:
    result = trainer.train_step(batch, weighted_nll, DENOMINATOR, temperature=TEMPERATURE)
    result.check_tokens(sum(sum(sequence.loss_mask[1:]) for sequence in batch))
    return {**vars(result), "grads": gradients(trainer)}


def logits(trainer: Any, batch: list[TrainSequence]) -> Any:
    """[1, t, vocab] of one sequence on the last stage, gathered over the tensor-parallel ranks;
    None on other stages.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )

    from megarl.trainer import layers
    from megarl.trainer.microbatch import build, plan_microbatches
    from megarl.trainer.model import output_weight

    stages = trainer.topology.pp if trainer.topology.vpp > 1 else 1
    (plan,) = plan_microbatches(
        [len(batch[0].token_ids)], 1, 1000, trainer.alignment, count_multiple=stages
    )

    def head(microbatch: Any, hidden: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
        full_hidden = (
            gather_from_sequence_parallel_region(hidden[0])
            if trainer.sequence_parallel
            else hidden[0]
        )
        z = gather_from_tensor_model_parallel_region(
            full_hidden @ output_weight(trainer.chunks[-1]).T
        )
        return layers.join(
            z, microbatch.plan.boundaries, parallel_state.get_context_parallel_group()
        )[None]

    with torch.no_grad():
        results = trainer._run(
            plan,
            lambda p: build(p, batch, trainer.device, routing=trainer.routing),
            head,
            forward_only=True,
        )
    return (
        results[0][:, : len(batch[0].token_ids) - 1, : trainer.spec.vocab_size] if results else None
    )
