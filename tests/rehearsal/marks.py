"""Checks, with Transformer Engine's layers, which elements count in the gradient norm, and over
which ranks each gradient is summed.

    python tests/rehearsal/marks.py [--plant NAME] [CASE…]

Megatron marks parameters for both (`tensor_model_parallel`, `allreduce`, `sequence_parallel`). This
program builds every rank of a small trainer on a pretended GPU. The trainer's layout says which
elements each rank holds. By that layout every element must count once, and a gradient must be
summed over all ranks that hold the same elements and have seen other tokens. Prints a line for each
case; exit status 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pretended_cuda

from megarl.models.attention import Attention
from megarl.models.experts import Experts
from megarl.models.latent_attention import MultiHeadLatentAttention

TINY: dict[str, Any] = dict(
    num_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_kv_heads=2,
    head_dim=16, vocab_size=200,
    max_position_embeddings=256, tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=1e4,
)  # fmt: skip
EXPERTS: dict[str, Any] = TINY | dict(
    family="qwen3_moe",
    attention=Attention(qk_norm=True),
    experts=Experts(count=4, per_token=2, intermediate_size=32),
    intermediate_size=0,
)
DENSE: dict[str, Any] = TINY | dict(family="qwen3", attention=Attention(qk_norm=True))
BIASED: dict[str, Any] = TINY | dict(family="qwen2", attention=Attention(qkv_bias=True))
LATENT: dict[str, Any] = TINY | dict(
    family="deepseek_v3",
    num_kv_heads=4,
    attention=MultiHeadLatentAttention(q_rank=16, kv_rank=12, nope_dim=8, rope_dim=8, v_dim=16),
    experts=Experts(
        count=4,
        per_token=2,
        intermediate_size=32,
        shared_size=32,
        first_layer=1,
        score_function="sigmoid",
        router_bias=True,
    ),
)
# name → (the model, TrainerTopology's sizes); sequence parallel if tp > 1, unless a case says
# otherwise
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "dense tp2": (DENSE, dict(tp=2, dp=2)),
    "dense tp2 whole sequences": (DENSE, dict(tp=2)),
    "biases tp2": (BIASED, dict(tp=2)),
    "experts tp2": (EXPERTS, dict(tp=2)),
    "experts tp2 dp2": (EXPERTS, dict(tp=2, dp=2)),
    "experts tp2 ep2": (EXPERTS, dict(tp=2, ep=2)),
    "experts tp2 dp2 ep2": (EXPERTS, dict(tp=2, dp=2, ep=2)),
    "experts tp2 etp2": (EXPERTS, dict(tp=2, etp=2)),
    "experts tp2 dp2 etp2": (EXPERTS, dict(tp=2, dp=2, etp=2)),
    "experts tp2 dp2 ep2 etp2": (EXPERTS, dict(tp=2, dp=2, ep=2, etp=2)),
    "experts tp2 dp2 ep2 zero0": (EXPERTS, dict(tp=2, dp=2, ep=2, zero=0)),
    "experts dp2 ep2 cp2": (EXPERTS, dict(dp=2, ep=2, cp=2)),
    "latent tp2": (LATENT, dict(tp=2)),
    "latent tp2 dp2 ep2": (LATENT, dict(tp=2, dp=2, ep=2)),
    "latent tp2 dp2 etp2": (LATENT, dict(tp=2, dp=2, etp=2)),
    "latent tp2 pp2": (LATENT, dict(tp=2, pp=2)),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--plant", metavar="NAME", help="a fault of planted.py")
    options = parser.parse_args(arguments)
    pretended_cuda.preload()
    record = pretended_cuda.Record()
    pretended_cuda.pretend(record)
    import te_extension

    te_extension.install()
    if options.plant:
        import planted

        getattr(planted, options.plant)()
    failed = 0
    with pretended_cuda.rehearsing(record):
        for name in options.cases or CASES:
            problems = list(wrong(name, *CASES[name]))
            failed |= bool(problems)
            print(f"{name}: {'; '.join(problems) or 'ok'}", flush=True)
    return failed


def wrong(name: str, model: dict[str, Any], sizes: dict[str, int]) -> Iterator[str]:
    import numpy as np

    from megarl.base.geometry import TrainerTopology
    from megarl.models.spec import ModelSpec
    from megarl.reshard.layout import hf_layout

    spec = ModelSpec(**model)
    topology = TrainerTopology(**sizes)
    sequence_parallel = topology.tp > 1 and "whole sequences" not in name
    ranks = [
        BuiltRank(spec, topology, rank, sequence_parallel) for rank in range(topology.world_size)
    ]
    counted = {
        tensor.name: np.zeros(tensor.shape, np.int8)
        for tensor in hf_layout(spec, "bfloat16").tensors(0)
    }
    trained: set[str] = set()
    for rank in ranks:
        for tensor in rank.tensors:
            flat = rank.counts.get(tensor.name)
            if flat is None:
                continue
            for piece in tensor.pieces:
                trained.add(piece.logical_name)
                counted[piece.logical_name][piece.logical.slices()] += flat.reshape(tensor.shape)[
                    piece.local.slices()
                ]
    for tensor_name in sorted(trained):
        times = sorted({*counted[tensor_name].ravel().tolist()})
        if times != [1]:
            yield f"{tensor_name} counts {' or '.join(map(str, times))} times in the norm"
    if (
        untrained := {
            tensor_name
            for tensor_name in counted
            if not tensor_name.endswith("e_score_correction_bias")
        }
        - trained
    ):
        yield f"no rank trains {', '.join(sorted(untrained))}"
    yield from _wrong_sums(ranks, sequence_parallel)


class BuiltRank:
    """One rank of a trainer, as far as this check needs it."""

    def __init__(self, spec: Any, topology: Any, rank: int, sequence_parallel: bool):
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from megarl.config.schema import TrainerConfig
        from megarl.trainer.model import parameters_by_name
        from megarl.trainer.step import MegatronTrainer

        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "fake", rank=rank, world_size=topology.world_size, store=FakeStore()
        )
        settings = TrainerConfig(
            tp=topology.tp, sequence_parallel=sequence_parallel, ddp={"overlap_grad_reduce": False}
        )
        trainer = MegatronTrainer(
            spec, topology, settings, "bfloat16", 0, total_steps=1, timeout_s=60
        )
        self.coordinate = trainer.coordinate
        self.tensors = trainer.layout.tensors(rank)
        self.names = {
            parameter: name for name, parameter in parameters_by_name(trainer.chunks).items()
        }
        self.counts, self.sums = self._counts(trainer), self._sums(trainer)

    def _counts(self, trainer: Any) -> dict[str, Any]:
        """How often each element of a flattened parameter counts in the norm.

        Without the distributed optimizer every replica of the model computes the same norm, so rank
        0's is checked.
        """
        import numpy as np
        import torch
        import torch.distributed as dist

        from megarl.trainer.optimizer import _masters

        counts: dict[str, Any] = {}
        for part in trainer.optimizer.chained_optimizers:
            masters = [*_masters(part)]
            for _, _, master in masters:
                master.grad = torch.empty_like(master)
            in_norm = (
                {id(gradient) for gradient in part.get_grads_for_grad_norm()} if masters else set()
            )
            is_reduced = 0 in dist.get_process_group_ranks(part.get_grad_stats_parallel_group())
            for parameter, begin, master in masters:
                flat = counts.setdefault(
                    self.names[parameter], np.zeros(parameter.numel(), np.int8)
                )
                flat[begin : begin + master.numel()] += id(master.grad) in in_norm and is_reduced
        return counts

    def _sums(self, trainer: Any) -> dict[str, tuple[list[int], bool]]:
        """For each parameter: the ranks of its gradient buffer, and whether Megatron also sums it
        over the tensor-parallel ranks.
        """
        import torch.distributed as dist

        megatron = sys.modules["megatron.core.distributed.finalize_model_grads"]
        flatten, summed = megatron._flatten_dense_tensors, set[tuple[int, int]]()

        def watched(gradients: Any) -> Any:
            summed.update(_place(gradient) for gradient in gradients)
            return flatten(gradients)

        megatron._flatten_dense_tensors = watched
        trainer.config.finalize_model_grads_func(trainer.ddp, None)
        megatron._flatten_dense_tensors = flatten
        return {
            self.names[parameter]: (
                dist.get_process_group_ranks(buffer.data_parallel_group),
                _place(parameter.main_grad) in summed,
            )
            for chunk in trainer.ddp
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            for parameter in buffer.params
        }


def _place(gradient: Any) -> tuple[int, int]:
    return gradient.untyped_storage()._cdata, gradient.storage_offset()


def _wrong_sums(ranks: list[BuiltRank], sequence_parallel: bool) -> Iterator[str]:
    """Gradients that are summed over the wrong ranks.

    Ranks that hold the same elements have seen other tokens. But without sequence parallelism,
    tensor-parallel ranks have seen the same tokens. Between them only the norms of heads are
    summed, since each rank has other heads.
    """
    holders: dict[Any, list[int]] = defaultdict(list)
    tensor_ranks: dict[Any, list[int]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        tensor_ranks[replace(rank.coordinate, tp=0)].append(number)
        for tensor in rank.tensors:
            holders[tensor.name, tensor.pieces].append(number)
    for number, rank in enumerate(ranks):
        for tensor in (tensor for tensor in rank.tensors if tensor.name in rank.sums):
            _, besides = rank.sums[tensor.name]
            members = tensor_ranks[replace(rank.coordinate, tp=0)] if besides else [number]
            summed_ranks = sorted(
                n for member in members for n in ranks[member].sums[tensor.name][0]
            )
            apart = sequence_parallel or tensor.name.endswith(
                ("q_layernorm.weight", "k_layernorm.weight")
            )
            holding = holders[tensor.name, tensor.pieces]
            expected = [n for n in holding if apart or ranks[n].coordinate.tp == rank.coordinate.tp]
            if summed_ranks != expected:
                yield (
                    f"the gradient of {tensor.name} on rank {number} is summed over ranks "
                    f"{summed_ranks}, not {expected}"
                )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
