"""Summarises a reshard map as a readable table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from megarl.box import Box
from megarl.models.parameters import LAYER_FIELD
from megarl.reshard.balance import sender_bound
from megarl.reshard.forwarding import Forwarding
from megarl.reshard.kinds import ITEM_BYTES, Kind
from megarl.reshard.map import ReshardMap
from megarl.reshard.relays import busiest_bytes, delta_bytes, summary
from megarl.reshard.rows import ZEROS, Row
from megarl.reshard.schedule import SHORTEST_RUN_BYTES, lands, messages, run_bytes

Line = tuple[str, ...]
_HEADER = ("shards", "copies", "writes", "run", "messages", "bytes")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3"}
_LEGEND = f"""\
shards    with the shape of the first; names of a layer without model.layers.N. and decoder.layers.N.
copies    boxes of one parameter from one rank to one other; writes: copies joined where they go on on both sides
run       bytes that lie together in the receiver's memory; messages: what one-sided transports send, one per run;
          runs below {SHORTEST_RUN_BYTES >> 10} KiB travel packed, as one message a write, and the receiver spreads them"""


def render(map: ReshardMap, link_bytes_per_s: float, forwarding: Forwarding | None = None, changed: float = 0.01) -> str:
    """One line per destination parameter, totals over all ranks, how evenly ranks share them, and an explanation of the terms.

    The lines show what the trainer writes; a sum after them shows what engines pass on (`forwarding`).
    """
    rows: dict[int, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))  # kind → its rows, its joined rows
    for n, found in enumerate((map.rows, map.write_rows)):
        for row in found:
            rows[row.kind][n].append(row)
    sections: dict[str, list[Line]] = defaultdict(list)
    for k, kind in enumerate(map.destination.kinds):
        sections[_when(kind)].append(_line(map, kind, *rows[k]))
    counts = [f"{n:,}" for n in (*map.counts, sum_messages(map, map.write_rows))]
    total = "total", "", "", "", *counts[:2], "", counts[2], size(map.rank_bytes()[0].sum())
    header = map.destination.name, _HEADER[0], f"from {map.source.name}", *_HEADER
    lines = [header, *(line for section in sections.values() for line in section), total]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = "  ".join("-" * width for width in widths)
    body = [text for title, section in sections.items() for text in (title, *(_aligned(line, widths) for line in section))]
    facts = [f"{key:<9} {text}" for key, text in _facts(map, forwarding, link_bytes_per_s, changed)]
    return "\n".join([_aligned(header, widths), rule, *body, rule, _aligned(total, widths), "", _LEGEND, "", *facts])


def _when(kind: Kind) -> str:
    if kind.layers is None:
        return "once:"
    first, end = kind.layers
    return f"in each of layers {first} to {end - 1}:"


def _line(map: ReshardMap, kind: Kind, rows: list[Row], joined: list[Row]) -> Line:
    sources = [map.source.kinds[s] for s in sorted({holder.kind for row in rows for holder in row.holders if row.transform != ZEROS})]
    names, shards = "; ".join(_short(s.name) for s in sources), "; ".join(dict.fromkeys(_shards(s) for s in sources))
    if kind.scales_of is not None:
        names, shards = "(scales of the above)", ""
    own = _shards(kind) + (" with zeros" if any(row.transform == ZEROS for row in rows) else "")
    shards += ", tiles cut" if kind.scales_of is None and any(row.cut for row in rows) else ""
    copies, writes = (sum(map.times(row) for row in found) for found in (rows, joined))
    moved = kind.instances * kind.replicas * sum(map.row_bytes(row) for row in rows)
    numbers = f"{copies:,}", f"{writes:,}", _run(map, joined), f"{sum_messages(map, joined):,}", size(moved)
    return _short(kind.name), own, names, shards, *numbers


def _facts(map: ReshardMap, forwarding: Forwarding | None, link_bytes_per_s: float, changed: float) -> Iterator[tuple[str, str]]:
    (sent, received), found = map.rank_bytes(), summary(map, forwarding)
    forced = f", of which the sizes of the trainer's stages force {sender_bound(map):.4f}"
    yield "senders", f"{_shared(sent)}: max/mean {found.sender_max_over_mean:.4f}{forced}"
    yield "receivers", f"{_shared(received)}: max/mean {received.max() / received.mean():.4f}"
    count = sum_messages(map, map.write_rows)
    yield "messages", f"{count / len(sent):,.0f} a sender and {count / len(received):,.0f} a receiver on average"
    if forwarding is not None:
        most = forwarding.rank_bytes()[0].max()
        yield "relays", f"{size(found.relayed_bytes)} more go from engine to engine, {size(most)} from the busiest rank"
        yield "", f"receivers in all: max/mean {found.receiver_max_over_mean:.4f}"
    busiest = busiest_bytes(map, forwarding)
    yield "predicted", f"{busiest / link_bytes_per_s:.3g} s for the busiest ranks' {size(busiest)} at {link_bytes_per_s / 1e9:g} GB/s"
    delta = delta_bytes(map, forwarding, changed)
    yield "", f"{delta / link_bytes_per_s:.3g} s for {size(delta)} if {changed:.3g} of the elements have changed (weights.delta=auto)"
    yield "bytes", f"{found.bytes / found.bytes_minimum:.4f} times the least possible, every destination byte once"
    yield "plan", map.plan_hash


def _shared(of_ranks: np.ndarray) -> str:
    return f"{len(of_ranks)}, {size(of_ranks.mean())} each on average, {size(of_ranks.max())} the busiest"


def sum_messages(map: ReshardMap, joined: Sequence[Row]) -> int:
    """The number of messages of joined rows, over all ranks."""
    return sum(map.times(row) * messages(*_in_memory(map, row)) for row in joined)


def _run(map: ReshardMap, joined: list[Row]) -> str:
    """The shortest contiguous run, such as `27 MiB` or `2 KiB packed`."""
    run, packed = min((run_bytes(*memory), lands(*memory)) for memory in (_in_memory(map, row) for row in joined))
    return size(run) + (" packed" if packed else "")


def _in_memory(map: ReshardMap, row: Row) -> tuple[Box, tuple[int, ...], int]:
    """(a written box of the row, shape of the tensor it lies in, bytes of an element)"""
    tensor, box = map.destination.kinds[row.kind].shards[row.shard], row.box
    if tensor.experts is not None and row.transform != ZEROS:  # written expert by expert
        box = Box(box.start, (1, *box.shape[1:]))
    return box, tensor.shape, ITEM_BYTES[tensor.dtype]


def _short(name: str) -> str:
    """The name without the prefix that all names of a layer share."""
    _, layered, rest = name.partition(LAYER_FIELD + ".")
    return rest if layered else name


def _shards(kind: Kind) -> str:
    """The shards, such as `8 x 18x64 bf16`, with the shape of the first one."""
    tensor = kind.shards[0]
    return f"{len(kind.shards)} x {'x'.join(map(str, tensor.shape))} {_SHORT.get(tensor.dtype, tensor.dtype)}"


def _aligned(cells: Line, widths: list[int]) -> str:
    """Aligns a line: four columns of text, then numbers."""
    return "  ".join(cell.ljust(width) if i < 4 else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, widths))).rstrip()


def size(count: float) -> str:
    """A number of bytes, such as `47.76 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
