"""Real gloo groups of several ranks in one process, with a thread for each: enough for one
collective, without processes to start.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 30


def on_ranks(size: int, body: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """The results of `body(group)` on each of `size` ranks."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=TIMEOUT_S)
        )
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return body(group)

    with ThreadPoolExecutor(size) as pool:
        return [
            future.result(TIMEOUT_S) for future in [pool.submit(run, rank) for rank in range(size)]
        ]
