"""The engine worker's end of Mooncake: parameters that can be written where they lie, and landing memory for boxes of short rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megarl.box import Box
from megarl.messaging.host import Host
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import MOONCAKE, Endpoint, Landing, describe
from megarl.weight_sync.transports.shared_memory import aligned_offsets


class MooncakeMemory:
    """Tensors must stay where they are from now on. `landing`: (tensor, box) each, to be written in one piece and then spread."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        landing: Sequence[tuple[str, Box]],
        listen_on: str,
        protocol: str,
    ):
        self._tensors, self._landing = tensors, landing
        self._engine = mooncake.open_engine(listen_on, protocol)
        self._listen_on, self._protocol = listen_on, protocol
        self._offsets, total = aligned_offsets(box.numel * tensors[name].itemsize for name, box in landing)
        self._memory = landing_memory(max(1, total), next(iter(tensors.values())).device)
        storages = [tensor.untyped_storage() for tensor in tensors.values()] + [self._memory.untyped_storage()]
        self._blocks = {storage.data_ptr(): storage.nbytes() for storage in storages}
        mooncake.register(self._engine, list(self._blocks.items()))

    def endpoint(self, rank: int, host: Host) -> Endpoint:
        """Of generator rank `rank`."""
        base = min(self._blocks)
        tensors = [describe(name, values, values.data_ptr() - base) for name, values in self._tensors.items()]
        begins = [self._memory.data_ptr() + offset - base for offset in self._offsets]
        landings = [Landing(name, box.start, begin) for (name, box), begin in zip(self._landing, begins)]
        address = mooncake.address_of(self._listen_on, self._engine, self._protocol, base)
        return Endpoint(rank, MOONCAKE, address, sum(self._blocks.values()), tensors, landings, host=host)

    def spread(self) -> None:
        """Puts what lies in landing memory into the tensors."""
        for (name, box), offset in zip(self._landing, self._offsets):
            tensor = self._tensors[name]
            landed = self._memory[offset : offset + box.numel * tensor.itemsize]
            tensor[box.slices()].copy_(landed.view(tensor.dtype).view(box.shape))


def landing_memory(size: int, device: torch.device) -> torch.Tensor:
    """[size] bytes, out of what SGLang has left. Raises RuntimeError that says what to lower where that is too little."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # on a GPU torch.OutOfMemoryError, which is one
        needed = f"{size / 2**30:.2f} GiB for boxes of short rows to land in"
        raise RuntimeError(f"Mooncake needs {needed}, beside what SGLang holds: lower generator.mem_fraction ({error})") from error
