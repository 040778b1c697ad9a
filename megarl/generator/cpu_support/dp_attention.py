"""Data-parallel attention in SGLang without CUDA: adds what `torch_native` attention lacks, and
replaces loops that spin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_IDLE_MS = 20


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
    managers = "sglang.srt.managers."
    HookRegistry.register(backend + "__init__", allow_padding, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv",
        reduce_scatter,
        HookType.AROUND,
    )
    HookRegistry.register(
        managers + "data_parallel_controller.DataParallelController.event_loop",
        wait_for_messages,
        HookType.AROUND,
    )
    HookRegistry.register(
        managers + "scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep",
        sleep_briefly,
        HookType.AROUND,
    )


def allow_padding(result: None, backend: Any, *_: Any) -> None:
    """Runs after the constructor.

    Replicas with fewer tokens pad their batches with sequences of this length, so it must be at
    least 1.
    """
    backend.get_cpu_graph_seq_len_fill_value = lambda: 1


def reduce_scatter(
    original: Callable[..., torch.Tensor],
    group: Any,
    values: torch.Tensor,
    output: torch.Tensor,
    sizes: list[int],
) -> torch.Tensor:
    """Replaces an operation that only NCCL has.

    Each replica gets the sums over all experts for its share (`sizes`) of the tokens.
    """
    return group._deterministic_reduce_scatterv(values, output, sizes)


def wait_for_messages(original: Callable[..., None], controller: Any) -> None:
    """Replaces the loop that gives requests to replicas, since the original polls without a
    pause.
    """
    from sglang.srt.managers.io_struct import sock_recv

    while True:
        controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))


def sleep_briefly(original: Callable[..., None], sleeper: Any) -> None:
    """Shortens the sleep of an idle rank.

    The original lasts a second, or until a request arrives for this rank. With replicas one may
    arrive for another rank, which then waits for this one.
    """
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().attn_dp_enabled:
        sleeper.poller.poll(_IDLE_MS)
    else:
        original(sleeper)
