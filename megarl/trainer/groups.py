"""Megatron's process groups, with usable types: its own getters are typed as if they could return None or a number."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def tensor_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_tensor_model_parallel_group())


def expert_tensor_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_expert_tensor_parallel_group())


def context_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_context_parallel_group())


def data_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_data_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    return _made(parallel_state.get_pipeline_model_parallel_group())


def _made(group: Any) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group
