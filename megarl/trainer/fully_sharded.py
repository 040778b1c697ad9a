"""Sharded parameters (trainer.zero=3) by PyTorch's fully_shard (FSDP2).

Each data-parallel rank has some rows of every parameter. A layer's parameters are gathered for its
forward pass, and again for its backward pass. Its gradients are then reduce-scattered, in float32.
A trained model's shards are float32: they are the optimizer's master weights. They are rounded to
the model's dtype when they are gathered, and once after a step for the weight sync.

Megatron's own wrapper of FSDP2 (TorchFullyShardedDataParallel) reduces gradients in the model's
dtype, and has one process group for all parameters, so no expert parallelism. Megatron-FSDP
(megatron.core.distributed.fsdp) runs on CUDA alone, and cuts parameters at any element. But
Megatron's schedules, its reductions over tensor and pipeline ranks, and its optimizer all accept
the shards of FSDP2.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from megarl.trainer.parallel import expert_replica_group, replica_group


class FullyShardedChunk(_BaseDataParallel):
    """A chunk of a sharded model, as Megatron's schedules and optimizer expect it."""

    def __init__(self, config: TransformerConfig, chunk: GPTModel):
        super().__init__(config=config, module=chunk)
        self.ddp_config = DistributedDataParallelConfig()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """FSDP2 has reduced the gradients at the end of each backward pass."""


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Takes the memory of a layer's parameters as soon as its attention or MLP has been made: a GPU
    could not hold all layers before they are sharded. `shard` sets their values.
    """

    def take(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        if isinstance(parent, TransformerLayer) and module is not None:
            for parameter in module.parameters():
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    handle = register_module_module_registration_hook(take)
    try:
        yield
    finally:
        handle.remove()


def shard(
    chunks: Sequence[GPTModel],
    dtype: torch.dtype,
    *,
    trained: bool,
    whole: set[torch.nn.Parameter],
) -> None:
    """Cuts the parameters of the chunks in place, except those in `whole`, and sets them to zero.

    dtype: the model's, in which parameters are gathered. trained: whether the shards become master
    weights.
    """
    # GPTModel returns its hidden states transposed. Nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    group = replica_group()
    dense = of_experts = DeviceMesh.from_group(group, device_type)
    group_of_experts = expert_replica_group()
    # DTensor takes meshes of the same ranks for one, and Megatron asks which group one has.
    if dist.get_process_group_ranks(group_of_experts) != dist.get_process_group_ranks(group):
        of_experts = DeviceMesh.from_group(group_of_experts, device_type)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard_module = partial(_shard_module, policy=policy, trained=trained, whole=whole)
    for chunk in chunks:
        for layer in [module for module in chunk.modules() if isinstance(module, TransformerLayer)]:
            experts = getattr(layer.mlp, "experts", None)
            if experts is not None and any(map(_has_mesh_of_experts, experts.parameters())):
                shard_module(experts, of_experts)
            shard_module(layer, dense)
        # The rest is gathered from the forward pass to the end of the backward pass: the loss, too,
        # multiplies by the output layer's weight.
        shard_module(chunk, dense)


def _has_mesh_of_experts(parameter: torch.nn.Parameter) -> bool:
    """Megatron marks parameters of experts that have another mesh than dense layers."""
    return not getattr(parameter, "allreduce", True)


def _shard_module(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    policy: MixedPrecisionPolicy,
    trained: bool,
    whole: set[torch.nn.Parameter],
) -> None:
    """Shards the parameters of `module` that are not yet sharded, but for those in `whole`."""
    unsharded = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or parameter in whole:
            continue
        dtype = torch.float32 if trained else parameter.dtype
        parameter.data = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        unsharded[name] = parameter
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
    sharded = dict(module.named_parameters())
    for name, parameter in unsharded.items():
        # Megatron's marks, which fully_shard does not keep
        vars(sharded[name]).update(vars(parameter))
        # Until the next garbage collection, a cycle refers to the parameter.
        parameter.data = parameter.data.new_empty(0)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)  # gradients are sums (step.py)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    # A parameter without gradient on one rank, as of an expert without tokens, takes part.
    module.set_reduce_scatter_unused_params(True)


@contextlib.contextmanager
def gathered(chunk: torch.nn.Module) -> Iterator[None]:
    """Gathers what is outside of the chunk's layers: embedding, last norm, output layer.

    Does nothing if the parameters are not sharded.
    """
    if isinstance(chunk, FSDPModule):
        chunk.unshard()
    yield
    reshard([chunk])


def reshard(chunks: Sequence[torch.nn.Module]) -> None:
    """Frees what the last forward pass has left gathered."""
    for chunk in chunks:
        if isinstance(chunk, FSDPModule):
            chunk.reshard()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter, of its gradient or of its moments; otherwise the tensor.

    It shares their memory.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def local_rows(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of `values`, which has the parameter's whole shape."""
    if not isinstance(parameter, DTensor):
        return values
    group = parameter.device_mesh.get_group()
    most = -(-len(values) // group.size())
    return values[group.rank() * most : (group.rank() + 1) * most]


@contextlib.contextmanager
def replaced(weights: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Replaces the local shards of parameters, the keys, by other values for a while.

    The values keep their place, since FSDP2 gathers from there.
    """
    before = {parameter: local_shard(parameter).clone() for parameter in weights}
    try:
        for parameter, values in weights.items():
            local_shard(parameter).copy_(values)
        yield
    finally:
        for parameter, values in before.items():
            local_shard(parameter).copy_(values)
