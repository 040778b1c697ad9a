"""The sending side of SGLang's own update paths, for comparison with direct writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.generator import cpu_support

GROUP = "weight_update_group"
FLATTENED = "flattened_bucket"  # a value of SGLang's load_format


def join_update_group(port: int, size: int) -> dist.ProcessGroup:
    """Joins, as rank 0, the group over which `/update_weights_from_distributed` receives.

    Its store listens on `port` of this host.
    """
    cpu_support.install()
    from sglang.srt.utils import init_custom_process_group

    address = f"tcp://127.0.0.1:{port}"
    group = init_custom_process_group(
        backend="gloo", init_method=address, world_size=size, rank=0, group_name=GROUP
    )
    assert isinstance(group, dist.ProcessGroup)  # rank 0 is a member
    return group


def bucket_payload(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Encodes `tensors` as an entry of `/update_weights_from_tensor` with load_format FLATTENED: a
    handle to shared memory, as text.

    The memory exists as long as the handle, so exactly one worker must take each bucket.
    """
    cpu_support.install()
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    # by default only related processes can open it
    torch.multiprocessing.set_sharing_strategy("file_system")
    bucket = FlattenedTensorBucket(named_tensors=list(tensors))
    content: dict[str, Any] = {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
    }
    payload = MultiprocessingSerializer.serialize(content, output_str=True)
    assert isinstance(payload, str)
    return payload
