"""One copy of a reshard map, carried out on tensors that lie in one address space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from megarl.reshard.map import Copy
from megarl.reshard.rows import ZEROS

if TYPE_CHECKING:
    import torch


def apply_copy(copy: Copy, source_tensor: Optional[torch.Tensor], destination_tensor: torch.Tensor) -> None:
    """Writes the copy's box of `destination_tensor`, both tensors whole as the layouts state them.

    A cast rounds to nearest even, as `Tensor.to` does. `source_tensor` is not looked at for zeros.
    """
    target = destination_tensor[copy.destination_box.slices()]
    if copy.transform == ZEROS:
        target.zero_()
        return
    if source_tensor is None or copy.source_box is None:
        raise ValueError(f"{copy.destination_tensor}: a copy of transform {copy.transform!r} needs its source tensor")
    target.copy_(source_tensor[copy.source_box.slices()])


def payload(copy: Copy, source_tensor: Optional[torch.Tensor]) -> torch.Tensor:
    """What the copy puts into its destination box: a view of the source where possible, in the destination's dtype."""
    import torch

    dtype = getattr(torch, copy.dtype)
    if copy.transform == ZEROS:
        return torch.zeros(copy.destination_box.shape, dtype=dtype)
    if source_tensor is None or copy.source_box is None:
        raise ValueError(f"{copy.destination_tensor}: a copy of transform {copy.transform!r} needs its source tensor")
    return source_tensor[copy.source_box.slices()].to(dtype)
