"""A rank's part in sending bytes over a bare medium: the ceilings of `megarl bench sync`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from megarl.messaging.stores import connect_store
from megarl.weight_sync.transports import gloo, mooncake
from megarl.weight_sync.transports.choice import this_host

BLOCK_BYTES = 128 << 20  # larger than any cache
CHUNK_BYTES = 16 << 20  # per gloo send: longer ones cost less CPU time
RUN_BYTES = 1 << 20  # per write by Mooncake's TCP


class BareMedia:
    """One rank's end; rank number `senders` is the far end. A block is sent again and again until as many bytes as asked have gone."""

    def __init__(self, rank: int, senders: int, timeout_s: float):
        self.rank, self.senders, self.timeout_s = rank, senders, timeout_s

    @cached_property
    def block(self) -> torch.Tensor:
        """The block to send from; at the far end, a block per trainer rank to receive into."""
        count = 1 if self.rank < self.senders else self.senders
        return torch.full((count * BLOCK_BYTES,), 1 + self.rank, dtype=torch.uint8)

    def map_file(self, path: str, size: int) -> None:
        file = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
        assert isinstance(file, torch.UntypedStorage)
        self.mapped = torch.empty(0, dtype=torch.uint8).set_(file, self.rank * BLOCK_BYTES, (BLOCK_BYTES,), (1,))

    def copy_blocks(self, size: int) -> None:
        for part in block_parts(size, BLOCK_BYTES):
            self.mapped[part].copy_(self.block[part])

    def join(self, address: str) -> None:
        self.bare = join_gloo(address, self.rank, self.senders + 1, self.timeout_s)

    def send_blocks(self, size: int) -> None:
        for work in [self.bare.send([self.block[part]], self.senders, 0) for part in block_parts(size, CHUNK_BYTES)]:
            work.wait()

    def receive_blocks(self, sizes: Sequence[int]) -> None:
        blocks = self.block.split(BLOCK_BYTES)
        parts = [(rank, blocks[rank][part]) for rank, size in enumerate(sizes) for part in block_parts(size, CHUNK_BYTES)]
        for work in [self.bare.recv([part], rank, 0) for rank, part in parts]:
            work.wait()

    def open_block(self) -> str:
        """Registers the block with Mooncake for one-sided writes; returns its address."""
        protocol = mooncake.protocol_of([this_host()])
        self.mooncake = mooncake.open_engine("127.0.0.1", protocol)
        mooncake.register(self.mooncake, [(self.block.data_ptr(), self.block.numel())])
        return mooncake.address_of("127.0.0.1", self.mooncake, protocol, self.block.data_ptr())

    def write_blocks(self, address: str, size: int) -> None:
        _, peer, base = mooncake.address_parts(address)
        own, there = self.block.data_ptr(), base + self.rank * BLOCK_BYTES
        runs = [(own + part.start, there + part.start, part.stop - part.start) for part in block_parts(size, RUN_BYTES)]
        if not mooncake.write_runs(self.mooncake, peer, runs, self.timeout_s):
            raise RuntimeError(f"Mooncake could not write to {peer}")


def block_parts(size: int, part_bytes: int) -> Iterator[slice]:
    """Slices of a block that cover `size` bytes, starting over at the block's end. part_bytes must divide BLOCK_BYTES."""
    for start in range(0, size, part_bytes):
        yield slice(start % BLOCK_BYTES, start % BLOCK_BYTES + min(part_bytes, size - start))


def join_gloo(address: str, rank: int, size: int, timeout_s: float) -> Any:
    """A gloo backend, typed Any: torch's annotations lack its `send` and `recv`."""
    return gloo.open_backend(connect_store(address, timeout_s), rank, size, address, timeout_s)
