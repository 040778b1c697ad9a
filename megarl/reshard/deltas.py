"""Deltas: the changes in a copy's values since they were last sent, in the form that takes the
fewest bytes.

An element counts as changed if any of its bits has changed. The *body* of a delta is one row of
bytes. Four numbers determine its parts: the kind, the elements of the copy, the changed elements,
and the *entries* (changed elements, or runs of them). There are four parts, each padded to a
multiple of 8 bytes: the number of entries in each block of 65,536 elements (4 bytes), the values,
the position of each entry in its block (2 bytes), and the length of each run (2 bytes). A run never
extends beyond its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from megarl.reshard.layout import ITEM_BYTES
from megarl.reshard.map import Copy, ReshardMap

if TYPE_CHECKING:
    import torch

NOTHING, PAIRS, RUNS, WHOLE = range(4)  # kinds
BLOCK_BYTES = 4
# for the number of entries of a block; for a position in it, or the length of a run
PLACE_BYTES = 2
BLOCK = 1 << 16  # elements, as in kernels.changes (which imports torch)
ALIGNMENT = 8
# of the full update's bytes: finding and spreading a larger delta costs more than it saves
# (docs/transports.md)
MOST_OF_FULL = 0.5
# room for a delta by Mooncake, as a share of the full bytes: enough if 6 % (bf16) or 4 % (fp8) of
# the elements change
INBOX_SHARE = 1 / 8
PIECE = 1 << 26  # elements that are copied at a time from host memory to the comparing GPU
# bytes compared before the host reads the results; quantised values are kept until then
AT_ONCE_BYTES = 1 << 29
HEADER_BYTES = 16
# of a blob. Header: version and length; row: kind, entries and changed elements of a copy
ROW_BYTES = 12


@dataclass(frozen=True)
class Delta:
    kind: int
    entries: int
    changed: int
    body: torch.Tensor  # [bytes] uint8, on the device of the values

    def moved_to(self, device: torch.device) -> Delta:
        return replace(self, body=self.body.to(device))


Changes = Sequence[tuple[Copy, Delta]]  # from one rank to another, in the order of the map


def parts(
    kind: int, elements: int, entries: int, changed: int, item_bytes: int
) -> tuple[int, int, int, int]:
    """The bytes of the four parts of a body."""
    values = item_bytes * (elements if kind == WHOLE else changed)
    if kind in (NOTHING, WHOLE):
        return 0, values, 0, 0
    return (
        BLOCK_BYTES * -(-elements // BLOCK),
        values,
        PLACE_BYTES * entries,
        PLACE_BYTES * entries * (kind == RUNS),
    )


def body_bytes(kind: int, elements: int, entries: int, changed: int, item_bytes: int) -> int:
    return sum(map(_filled_up, parts(kind, elements, entries, changed, item_bytes)))


def best_kind(elements: int, changed: int, runs: int, item_bytes: int) -> int:
    """The kind whose body takes the fewest bytes. Among equals, the simplest to spread."""
    if not changed:
        return NOTHING
    entries = {WHOLE: 0, PAIRS: changed, RUNS: runs}
    return min(
        entries, key=lambda kind: body_bytes(kind, elements, entries[kind], changed, item_bytes)
    )


def find_deltas(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], at_once_bytes: int = AT_ONCE_BYTES
) -> Iterator[Delta]:
    """For each pair, the values to write over `old` to make it `new`.

    Both: [n] integers (kernels.changes.bits_of), contiguous; all `new` are on one device. For every
    `at_once_bytes`, the host waits for a GPU twice: to learn the numbers of changes, and of runs.
    """
    import torch

    from megarl import kernels

    for batch in _batches(pairs, at_once_bytes):
        pieces = [list(_pieces(new, old)) for new, old in batch]
        changes = iter(kernels.find_changes(list(chain.from_iterable(pieces))))
        places = []
        for pair_pieces in pieces:
            changes_of_pair = [next(changes) for _ in pair_pieces]
            places.append(tuple(map(torch.cat, zip(*changes_of_pair))))
        begins = [_begins(counts, offsets) for counts, offsets in places]
        for pair, place, run_begins, runs in zip(batch, places, begins, totals(begins)):
            counts, offsets = place
            yield _delta(pair[0], counts, offsets, run_begins, runs)


def totals(begins: Sequence[torch.Tensor]) -> list[int]:
    """The number of runs of each pair."""
    import torch

    return torch.stack([run_begins.sum() for run_begins in begins]).tolist()


def _batches(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], most_bytes: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    batch = []
    size = 0
    for new, old in pairs:
        if batch and size + new.nbytes > most_bytes:
            yield batch
            batch = []
            size = 0
        batch.append((new, old))
        size += new.nbytes
    if batch:
        yield batch


def _pieces(new: torch.Tensor, old: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of both tensors on the device of `new`.

    There is one piece, unless `old` must be copied to that device.
    """
    if new.device == old.device:
        yield new, old
        return
    for new_piece, old_piece in zip(new.split(PIECE), old.split(PIECE)):
        yield new_piece, old_piece.to(new_piece.device, non_blocking=True)


def _delta(
    new: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, begins: torch.Tensor, runs: int
) -> Delta:
    """`counts` and `offsets`: the positions of the changes (kernels.changes.Places); `begins`:
    which changes begin one of the `runs` runs.
    """
    import torch

    from megarl.kernels.changes import positions_of

    changed = len(offsets)
    kind = best_kind(len(new), changed, runs, new.element_size())
    if kind == NOTHING:
        return Delta(kind, 0, 0, torch.empty(0, dtype=torch.uint8, device=new.device))
    if kind == WHOLE:
        return Delta(kind, 0, changed, _joined([new]))
    values = new[positions_of(counts, offsets)]
    if kind == PAIRS:
        return Delta(kind, changed, changed, _joined([counts, values, offsets]))
    # (torch.nonzero and torch.bincount would make the host wait for a GPU.)
    first = torch.searchsorted(begins.cumsum(0), torch.arange(1, runs + 1, device=new.device))
    lengths = torch.diff(first, append=first.new_full((1,), changed))
    of_block = torch.diff(
        torch.searchsorted(first, counts.cumsum(0)), prepend=first.new_zeros(1)
    ).to(torch.int32)
    return Delta(
        kind,
        runs,
        changed,
        _joined([of_block, values, offsets[first], (lengths - 1).to(torch.int16)]),
    )


def spread(delta: Delta, target: torch.Tensor) -> None:
    """Writes the changed values to their positions in `target`: the copy's destination box, with
    any strides, on the body's device.
    """
    import torch

    from megarl.kernels.changes import bits_of, positions_of, put, put_at

    # (memory of a process that has ended is on the meta device)
    if delta.kind == NOTHING or target.is_meta:
        return
    bits = bits_of(target)
    sizes = parts(delta.kind, bits.numel(), delta.entries, delta.changed, bits.element_size())
    counts, values, offsets, lengths = _parted(delta.body, sizes)
    values = values.view(bits.dtype)
    if delta.kind == WHOLE:
        bits.copy_(values.view(bits.shape))
        return
    counts = counts.view(torch.int32)
    offsets = offsets.view(torch.int16)
    if delta.kind == PAIRS:
        put(bits, counts, offsets, values)
        return
    run_lengths = (lengths.view(torch.int16).long() & 0xFFFF) + 1
    # start of each run among the changed elements
    begins = run_lengths.cumsum(0) - run_lengths
    positions = torch.repeat_interleave(
        positions_of(counts, offsets) - begins, run_lengths, output_size=delta.changed
    )
    put_at(bits, positions + torch.arange(delta.changed, device=positions.device), values)


def blob_bytes(deltas: Sequence[Delta]) -> int:
    return (
        HEADER_BYTES
        + _filled_up(ROW_BYTES * len(deltas))
        + sum(len(delta.body) for delta in deltas)
    )


def make_blob(deltas: Sequence[Delta], version: int) -> torch.Tensor:
    """All deltas from one rank to another, in the order of the map, as one row of bytes."""
    import torch

    rows = []
    for delta in deltas:
        rows += [delta.kind, delta.entries, delta.changed]
    head = _joined(
        [torch.tensor([version, blob_bytes(deltas)]), torch.tensor(rows, dtype=torch.int32)]
    )
    return torch.cat(
        [head.to(deltas[0].body.device), *(delta.body for delta in deltas if len(delta.body))]
    )


def spread_blob(
    blob: torch.Tensor, version: int, targets: Sequence[torch.Tensor], source: str
) -> None:
    """Writes the changes in a blob to the boxes of its copies.

    Raises RuntimeError if `blob`, from `source`, is not of `version`.
    """
    import torch

    table_bytes = _filled_up(ROW_BYTES * len(targets))
    head = blob[: HEADER_BYTES + table_bytes].cpu()
    blob_version, length = head[:HEADER_BYTES].view(torch.int64).tolist()
    rows = (
        head[HEADER_BYTES : HEADER_BYTES + ROW_BYTES * len(targets)]
        .view(torch.int32)
        .view(-1, 3)
        .tolist()
    )
    sizes = []
    for (kind, entries, changed), target in zip(rows, targets):
        sizes.append(body_bytes(kind, target.numel(), entries, changed, target.element_size()))
    if blob_version != version or length != len(head) + sum(sizes) or length > len(blob):
        raise RuntimeError(
            f"the changes from {source} are those of version {blob_version}, {length} bytes, not "
            f"of version {version}"
        )
    bodies = blob[len(head) : length].to(targets[0].device, non_blocking=True).split(sizes)
    for (kind, entries, changed), body, target in zip(rows, bodies, targets):
        spread(Delta(kind, entries, changed, body), target)


def delta_share(map: ReshardMap, changed: float) -> float:
    """The bytes of a delta relative to the full update, if a random share `changed` of the elements
    has changed; at most 1.
    """
    full = delta = 0.0
    for kind in map.destination.kinds:
        item = ITEM_BYTES[kind.shards[0].dtype]
        full += kind.bytes
        delta += kind.bytes * min(
            1.0, (changed * (item + PLACE_BYTES) + BLOCK_BYTES / BLOCK) / item
        )
    return delta / full


def _begins(counts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Whether each changed element begins a run, [changed]."""
    import torch

    begins = torch.ones(len(offsets) + 1, dtype=torch.bool, device=offsets.device)
    begins[1:-1] = offsets[1:] != offsets[:-1] + 1
    # The first change of each block. For a block without changes it is the first of the next block,
    # or one past the last.
    return begins.index_fill_(0, counts.cumsum(0) - counts, True)[:-1]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts as one row of bytes, each padded."""
    import torch

    sizes = [_filled_up(tensor.nbytes) for tensor in tensors]
    joined = torch.zeros(sum(sizes), dtype=torch.uint8, device=tensors[-1].device)
    for tensor, space in zip(tensors, joined.split(sizes)):
        space[: tensor.nbytes] = tensor.view(torch.uint8)
    return joined


def _parted(body: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    begin = 0
    for size in sizes:
        yield body[begin : begin + size]
        begin += _filled_up(size)


def _filled_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
