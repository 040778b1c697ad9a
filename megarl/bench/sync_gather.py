"""A trainer rank's part in other stacks' way of updating an engine: a gather onto rank 0, then SGLang's own update paths."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.bench.sync_media import join_gloo
from megarl.reshard.kinds import Layout
from megarl.weight_sync.transports.two_sided import as_bytes


class Gather:
    """One rank's end; `sources` are its shards of the layout's tensors."""

    def __init__(self, rank: int, layout: Layout, sources: Mapping[str, torch.Tensor], timeout_s: float):
        self.rank, self.layout, self.sources, self.timeout_s = rank, layout, sources, timeout_s

    def join_trainers(self, address: str) -> None:
        self.group = join_gloo(address, self.rank, self.layout.world_size, self.timeout_s)

    def collect(self) -> None:
        """Gathers every whole tensor onto rank 0, under its Hugging Face name."""
        if self.rank:
            parts = [self.sources[tensor.name][piece.local.slices()] for tensor, piece in self.layout.owned_pieces(self.rank)]
            works = [self.group.send([as_bytes(part.contiguous())], 0, 0) for part in parts]
            for work in works:
                work.wait()
            return
        self.full: dict[str, torch.Tensor] = {}  # frees the last round's tensors first
        self.full = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in self.logical()}
        arriving = []
        for rank in range(self.layout.world_size):
            for tensor, piece in self.layout.owned_pieces(rank):
                target = self.full[piece.logical_name][piece.logical.slices()]
                if rank == 0:
                    target.copy_(self.sources[tensor.name][piece.local.slices()])
                else:
                    buffer = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
                    arriving.append((target, self.group.recv([as_bytes(buffer)], rank, 0), buffer))
        for target, work, buffer in arriving:
            work.wait()
            if buffer is not target:
                target.copy_(buffer)

    def logical(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        ends: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for rank in range(self.layout.world_size):
            for tensor, piece in self.layout.owned_pieces(rank):
                before = ends.get(piece.logical_name, ((0,) * len(piece.logical.end), None))[0]
                ends[piece.logical_name] = (tuple(map(max, before, piece.logical.end)), getattr(torch, tensor.dtype))
        return [(name, shape, dtype) for name, (shape, dtype) in ends.items()]

    def join_engines(self, port: int, size: int) -> None:
        from megarl.generator.sglang_updates import join_update_group

        self.engines = join_update_group(port, size)

    def broadcast(self, flattened: bool) -> None:
        tensors = list(self.full.values())
        if flattened:
            tensors = [torch.cat([as_bytes(tensor) for tensor in tensors])]
        works = [torch.distributed.broadcast(tensor, src=0, group=self.engines, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None  # it is asynchronous
            work.wait()

    def buckets(self, count: int) -> list[str]:
        """One bucket per worker of the engine."""
        from megarl.generator.sglang_updates import bucket_payload

        return [bucket_payload(list(self.full.items())) for _ in range(count)]
