"""The trainer's process groups, and MegaRL's own communication in these."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import distributed_c10d

from megarl.base.geometry import TrainerTopology
from megarl.trainer.distributed import groups_closed
from megarl.trainer.microbatch import MicrobatchPlan

# the topology of this process's groups, and the group that contains all of them
_made_for: list[Any] = []
Tensors = Any  # as in P2PCommunicator: a list with one tensor


def tensor_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_tensor_model_parallel_group())


def expert_tensor_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_expert_tensor_parallel_group())


def context_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_context_parallel_group())


def data_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_data_parallel_group())


def replica_group() -> dist.ProcessGroup:
    """The ranks with the same weights, in dense layers."""
    return _made(parallel_state.get_data_parallel_group(with_context_parallel=True))


def expert_replica_group() -> dist.ProcessGroup:
    """The ranks with the same experts."""
    return _made(parallel_state.get_expert_data_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_pipeline_model_parallel_group())


def _made(group: Any) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def initialize(topology: TrainerTopology, seed: int, timeout_s: float) -> None:
    """Makes Megatron's process groups, in its default order of axes (that of TrainerTopology), and
    seeds its generators.

    `timeout_s` limits every collective of these groups. A second model of the same topology shares
    the groups of the first, since Megatron keeps them as globals of the process.
    """
    if parallel_state.model_parallel_is_initialized():
        if _made_for == [topology, dist.group.WORLD]:
            return
        parallel_state.destroy_model_parallel()
    with groups_closed():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=topology.tp,
            pipeline_model_parallel_size=topology.pp,
            virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
            context_parallel_size=topology.cp,
            expert_model_parallel_size=topology.ep,
            expert_tensor_parallel_size=topology.etp,
            create_gloo_process_groups=True,
            distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
        )
    # Megatron sets no timeout for the gloo group of experts' replicas
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    model_parallel_cuda_manual_seed(seed)
    _made_for[:] = [topology, dist.group.WORLD]


def data_parallel(
    config: TransformerConfig,
    topology: TrainerTopology,
    settings: Mapping[str, Any],
    chunks: Sequence[torch.nn.Module],
) -> list[DistributedDataParallel]:
    """The model's chunks with buffers for gradients.

    These are reduced in float32, on GPUs already during the last microbatch's backward pass.
    `settings`: other fields of DistributedDataParallelConfig.
    """
    overlap = torch.cuda.is_available() and topology.dp * topology.cp > 1
    options = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": topology.zero == 1,
        "overlap_grad_reduce": overlap,
        **settings,
    }
    if options["use_distributed_optimizer"]:
        _give_up_zeros(chunks)
    of_chunks = []
    for chunk in chunks:
        of_chunks.append(
            DistributedDataParallel(config, DistributedDataParallelConfig(**options), chunk)
        )
    if options["overlap_grad_reduce"]:  # no reduction before the last microbatch
        config.no_sync_func = partial(_no_reduction, of_chunks)
    return of_chunks


def _give_up_zeros(chunks: Sequence[torch.nn.Module]) -> None:
    """Frees the memory of trained matrices that are zero, as all are until weights are loaded.

    With the distributed optimizer, DDP first makes a buffer and then moves every trained parameter
    into it. Weights would then be in memory twice, in addition to all gradients.
    """
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if parameter.requires_grad and parameter.dim() > 1 and not parameter.any():
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


@contextlib.contextmanager
def _no_reduction(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())
        yield


def global_sums(outputs: list[dict[str, torch.Tensor]], dp: int, pp: int) -> dict[str, float]:
    """The sums over all microbatches of all ranks, the same on every rank.

    outputs: scalars of each microbatch of this rank; empty except on the last pipeline stage, which
    alone knows the names.
    """
    sums: dict[str, float] = {}
    if outputs:
        total = torch.stack(
            [torch.stack([value.double() for value in output.values()]) for output in outputs]
        ).sum(dim=0)
        if dp > 1:
            dist.all_reduce(total, group=data_group())
        sums = dict(zip(outputs[0], total.tolist(), strict=True))
    if pp > 1:
        shared = [sums]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(shared, src=last, group=pipeline_group())
        sums = shared[0]
    return sums


class PlannedShapes(P2PCommunicator):
    """The shapes for one run of Megatron's schedule without virtual stages, which receives
    microbatches in their order in both directions. Megatron itself has one shape for all, or lets
    stages tell each other the shapes of every message, for which the host waits twice.
    """

    def __init__(self, config: TransformerConfig, plan: Sequence[MicrobatchPlan], split: int):
        """`split`: the number of ranks over which the positions of a microbatch are split."""
        super().__init__(pipeline_group(), config)
        shapes = [[(microbatch.positions // split, 1, config.hidden_size)] for microbatch in plan]
        self._forward = iter(shapes)
        self._backward = iter(shapes)

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Tensors:
        return super().recv_forward(next(self._forward), is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Tensors:
        return super().recv_backward(next(self._backward), is_last_stage)

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Any, is_last_stage: bool
    ) -> Tensors:
        return super().send_forward_recv_backward(
            output_tensors, next(self._backward), is_last_stage
        )

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Any, is_first_stage: bool
    ) -> Tensors:
        return super().send_backward_recv_forward(
            input_tensor_grads, next(self._forward), is_first_stage
        )
