"""Mooncake's transfer engine over TCP between two ends in one process: boxes arrive at the right
place, and nothing else changes.
"""

from __future__ import annotations

import time

import msgspec
import pytest
import torch

from megarl.base.geometry import Box
from megarl.config.errors import ConfigError
from megarl.reshard.map import Copy
from megarl.reshard.schedule import SHORTEST_RUN_BYTES, lands
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import MOONCAKE, Endpoint, Landing, RemoteTensor
from megarl.weight_sync.transports.mooncake import destination_runs, pieces
from megarl.weight_sync.writing import send, shapes_of

try:
    mooncake.open_engine("127.0.0.1", "tcp")
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)

LONG = SHORTEST_RUN_BYTES // 4  # elements of the shortest row that gets a write of its own
# more than both halves of the staging buffer can hold
ROWS = 2 * mooncake.HALF_BYTES // (4 * 2 * LONG) + 3


class Receiver:
    """Memory of 'generator rank' 0: `wide` [ROWS, 2 * LONG] f32, `thin` [40, 30] bf16, and a
    landing buffer for one box of thin.
    """

    def __init__(self) -> None:
        self.wide = torch.full((ROWS, 2 * LONG), -1.0)
        self.thin = torch.full((40, 30), -1.0, dtype=torch.bfloat16)
        self.landing = torch.zeros(40 * 10, dtype=torch.bfloat16)
        self.engine = mooncake.open_engine("127.0.0.1", "tcp")
        blocks = [
            (tensor.data_ptr(), tensor.nbytes) for tensor in (self.wide, self.thin, self.landing)
        ]
        mooncake.register(self.engine, blocks)
        base = min(address for address, _ in blocks)
        tensors = [
            RemoteTensor(
                "wide", tuple(self.wide.shape), "float32", self.wide.stride(), blocks[0][0] - base
            ),
            RemoteTensor(
                "thin", tuple(self.thin.shape), "bfloat16", self.thin.stride(), blocks[1][0] - base
            ),
        ]
        landings = [Landing("thin", (0, 20), blocks[2][0] - base)]
        address = mooncake.address_of("127.0.0.1", self.engine, "tcp", base)
        self.endpoint = Endpoint(
            0, MOONCAKE, address, sum(size for _, size in blocks), tensors, landings
        )


def copy(
    source: str | None, source_box: Box | None, target: str, box: Box, transform: str, dtype: str
) -> Copy:
    return Copy(0, source, source_box, 0, target, box, transform, dtype, 0)


def test_boxes_arrive_in_place_over_several_updates():
    receiver = Receiver()
    transport = mooncake.MooncakeTransport(0, 20)
    transport.connect([Endpoint.decode(receiver.endpoint.encode())])
    left_box = Box((1, 0), (ROWS - 2, LONG))
    full_box = Box((0, 0), (ROWS - 2, LONG))
    copies = [
        # rows of the shortest run, half of each row
        copy("x", full_box, "wide", left_box, "identity", "float32"),
        copy("y", Box((0, 0), (7, 30)), "thin", Box((3, 0), (7, 30)), "cast", "bfloat16"),
        # short rows without a landing buffer
        copy(None, None, "thin", Box((10, 0), (2, 20)), "zeros", "bfloat16"),
        # uses the landing buffer
        copy("y", Box((0, 0), (40, 10)), "thin", Box((0, 20), (40, 10)), "cast", "bfloat16"),
    ]
    for seed in (1, 2):
        torch.manual_seed(seed)
        sources = {"x": torch.randn(ROWS, 2 * LONG), "y": torch.randn(40, 30)}
        wide = torch.full_like(receiver.wide, -1)
        thin = torch.full_like(receiver.thin, -1)
        wide[1 : ROWS - 1, :LONG] = sources["x"][: ROWS - 2, :LONG]
        thin[3:10] = sources["y"][:7].bfloat16()
        thin[10:12, :20] = 0
        sent = send(transport, copies, sources, shapes_of([receiver.endpoint]), audit=False)
        assert sent.bytes == sum(copy_of_batch.bytes for copy_of_batch in copies)
        assert torch.equal(receiver.wide, wide) and torch.equal(receiver.thin, thin)
        assert torch.equal(receiver.landing.view(40, 10), sources["y"][:, :10].bfloat16())
    transport.close()


def test_engines_that_get_equal_values_share_their_staged_copy():
    """Also after an update that ended before its fence, and whose source has changed since."""
    receivers = [Receiver(), Receiver()]
    endpoints = [
        msgspec.structs.replace(receiver.endpoint, rank=rank)
        for rank, receiver in enumerate(receivers)
    ]
    transport = mooncake.MooncakeTransport(0, 20)
    transport.connect(endpoints)
    box = Box((0, 0), (40, 30))
    # a view with strides of its source, so it has to be staged
    to_thin = copy("y", box, "thin", box, "identity", "bfloat16")
    copies = [msgspec.structs.replace(to_thin, destination_rank=rank) for rank in (0, 1)]
    sources = {"y": torch.randn(40, 60).bfloat16()}
    shapes = shapes_of(endpoints)
    send(transport, copies, sources, shapes, audit=False)
    transport.write(copies[0], sources["y"][:, :30])
    assert transport._filled == box.numel * 2
    transport.write(copies[1], sources["y"][:, :30])
    assert transport._filled == box.numel * 2
    sources["y"] += 1
    send(transport, copies, sources, shapes, audit=False)
    for receiver in receivers:
        assert torch.equal(receiver.thin, sources["y"][:, :30])
    transport.close()


def test_dead_engine_is_an_error_with_both_ranks_in_time():
    receiver = Receiver()
    transport = mooncake.MooncakeTransport(3, 2)
    transport.connect([receiver.endpoint])
    receiver.engine = None  # ends it
    start_s = time.monotonic()
    with pytest.raises(
        RuntimeError, match="trainer rank 3 could not write to generator rank 0 at 127.0.0.1"
    ):
        for _ in range(2):
            transport.write(
                copy(None, None, "wide", Box((0, 0), (1, 2 * LONG)), "zeros", "float32"),
                torch.zeros(1, 2 * LONG),
            )
            transport.fence()
    assert time.monotonic() - start_s < 40
    transport.close()


class BrokenEngine:
    def transfer_submit_write(self, peer, *run):
        raise ValueError(f"no such segment: {peer}")


def test_what_the_sending_thread_dies_of_is_told_at_the_fence():
    receiver = Receiver()
    transport = mooncake.MooncakeTransport(3, 20)
    transport.connect([receiver.endpoint])
    transport.prepare([values := torch.zeros(1, 2 * LONG)])
    transport._engine = BrokenEngine()
    transport.write(
        copy(
            "x",
            Box((0, 0), (1, 2 * LONG)),
            "wide",
            Box((0, 0), (1, 2 * LONG)),
            "identity",
            "float32",
        ),
        values,
    )
    with pytest.raises(
        RuntimeError,
        match="3 could not write to generator rank 0 at .* by Mooncake: ValueError..no such "
        "segment: 127",
    ):
        transport.fence()
    transport.close()


@pytest.mark.parametrize(
    "start, shape, extent, runs, through_landing",
    [
        ((0, 0), (8, 64), (64, 64), 1, False),  # whole rows
        ((8,), (8,), (64,), 1, False),
        ((0, 0), (64, 32), (64, 64), 64, True),  # half of each row: runs of 128 bytes
        ((0, 0), (1, 32), (64, 64), 1, False),  # a single short run
        ((0, 0), (64, LONG), (64, 2 * LONG), 64, False),
        ((0, 0, 0), (4, 8, 64), (4, 16, 64), 4, True),  # 2 KiB of each expert
    ],
)
def test_which_boxes_land(start, shape, extent, runs, through_landing):
    assert lands(Box(start, shape), extent, 4) is through_landing
    remote = RemoteTensor("t", extent, "float32", torch.empty(extent).stride(), 256)
    run_sizes = [run.nbytes for _, run in destination_runs(torch.zeros(shape), start, remote)]
    assert len(run_sizes) == runs and sum(run_sizes) == 4 * torch.Size(shape).numel()


def test_runs_name_every_byte_of_the_box_once():
    tensor = torch.arange(3 * 5 * 8.0).view(3, 5, 8)
    remote = RemoteTensor("t", (3, 5, 8), "float32", tensor.stride(), 0)
    for box in (Box((1, 1, 2), (2, 3, 4)), Box((0, 2, 0), (3, 2, 8)), Box((2, 0, 0), (1, 5, 8))):
        memory = torch.full_like(tensor, -1)
        for offset, run in destination_runs(tensor[box.slices()], box.start, remote):
            memory.view(-1)[offset // 4 : offset // 4 + run.numel()] = run.reshape(-1)
        expected = torch.full_like(tensor, -1)
        expected[box.slices()] = tensor[box.slices()]
        assert torch.equal(memory, expected)


@pytest.mark.parametrize("shape", [(7,), (3, 5, 8), (2, 1, 100), (9, 2)])
@pytest.mark.parametrize("most", [4, 20, 40, 64, 10_000])
def test_pieces_are_short_and_in_order(shape, most):
    values = torch.arange(2.0 * torch.Size(shape).numel()).view(*shape, 2)[..., 1]  # not contiguous
    cut = list(pieces(values, most))
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in cut]), values.reshape(-1))
    assert max(piece.nbytes for piece in cut) <= most and all(piece.numel() for piece in cut)
