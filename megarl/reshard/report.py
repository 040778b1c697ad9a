"""Reports a reshard map: its numbers as one JSON object, one rank's part as text, all copies as
JSON lines.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from msgspec.structs import asdict

from megarl.base.geometry import Box
from megarl.config.errors import ConfigError
from megarl.models.parameters import LAYER_FIELD, layers_text
from megarl.reshard.forwarding import (
    Forwarding,
    busiest_bytes,
    delta_bytes,
    summary,
    update_s,
    writes_s,
)
from megarl.reshard.layout import Kind
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.schedule import (
    SHORTEST_RUN_BYTES,
    batches_from,
    batches_to,
    lands,
    messages,
    run_bytes,
    written_memory,
)
from megarl.reshard.template import QUANTISE, SCALE, ZEROS, TemplateRow

Line = tuple[str, ...]
_HEADER = ("shards", "copies", "writes", "run", "messages", "bytes")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3"}
_LEGEND = f"""\
shards    with the shape of the first; names of a layer without model.layers.N. and \
decoder.layers.N.
copies    boxes of one parameter from one rank to one other; writes: copies joined where they are \
contiguous on both sides
run       bytes that are contiguous in the receiver's memory; messages: what one-sided transports \
send, one per run;
          runs below {SHORTEST_RUN_BYTES >> 10} KiB travel packed, as one message a write, and the \
receiver spreads them"""
LINK_BYTES_PER_S = 50e9  # one 400 Gb/s NIC per rank


def to_json(
    map: ReshardMap,
    forwarding: Forwarding | None = None,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    changed: float = 0.01,
) -> dict[str, Any]:
    """The summary numbers of a map and its relays. Proves the map first.

    `build_s`: time for planning and proof. `predicted_s`: see `update_s`. `delta_predicted_s`: by
    bytes, for an update that carries only the changes in a share `changed` of the elements
    (`delta_bytes`). `sender_bound`: the least `sender_max_over_mean` that the sizes of the
    trainer's stages allow. `messages`: see `schedule.messages`.

    Raises ProofError if the map does not write every destination byte exactly once.
    """
    begin = time.perf_counter()
    prove_exactly_once(map)
    proof_s = time.perf_counter() - begin
    return dataclasses.asdict(summary(map, forwarding)) | {
        "exactly_once": True,
        "plan_hash": map.plan_hash,
        "build_s": map.build_s + proof_s,
        "predicted_s": update_s(map, forwarding, link_bytes_per_s),
        "delta_predicted_s": delta_bytes(map, forwarding, changed) / link_bytes_per_s,
        "delta_changed": changed,
        "link_bytes_per_s": link_bytes_per_s,
        "sender_bound": sender_bound(map),
        "messages": sum_messages(map, map.write_rows),
    }


def render(
    map: ReshardMap,
    link_bytes_per_s: float,
    forwarding: Forwarding | None = None,
    changed: float = 0.01,
) -> str:
    """One line per destination parameter, totals over all ranks, how evenly ranks share them, and
    an explanation of the terms.

    The lines show what the trainer writes. A sum after them shows what engines pass on
    (`forwarding`).
    """
    rows = _by_kind(map.rows)
    write_rows = _by_kind(map.write_rows)
    sections: dict[str, list[Line]] = defaultdict(list)
    groups = 1 + max(kind.group for kind in map.destination.kinds)
    for k, kind in enumerate(map.destination.kinds):
        group = f"engines of group {kind.group + 1} of {groups}, " if groups > 1 else ""
        sections[group + _when(kind)].append(_line(map, kind, rows[k], write_rows[k]))
    copies, writes = map.counts
    message_count = sum_messages(map, map.write_rows)
    total_size = size(map.rank_bytes()[0].sum())
    counts = (f"{copies:,}", f"{writes:,}", "", f"{message_count:,}", total_size)
    total = ("total", "", "", "", *counts)
    header = map.destination.name, _HEADER[0], f"from {map.source.name}", *_HEADER
    lines = [header, *chain.from_iterable(sections.values()), total]
    widths = []
    for column in zip(*lines):
        widths.append(max(len(cell) for cell in column))
    rule = "  ".join("-" * width for width in widths)
    body = []
    for title, section in sections.items():
        body.append(title)
        body += [_aligned(line, widths) for line in section]
    facts = [f"{key:<9} {text}" for key, text in _facts(map, forwarding, link_bytes_per_s, changed)]
    table = [_aligned(header, widths), rule, *body, rule, _aligned(total, widths)]
    return "\n".join([*table, "", _LEGEND, "", *facts])


def _by_kind(rows: Sequence[TemplateRow]) -> dict[int, list[TemplateRow]]:
    rows_of_kind: dict[int, list[TemplateRow]] = defaultdict(list)
    for row in rows:
        rows_of_kind[row.kind].append(row)
    return rows_of_kind


def sender_bound(map: ReshardMap) -> float:
    """A lower bound on the busiest sender's bytes under any schedule, as a multiple of the mean
    sender's.

    Only a rank with an element can send it. So the bytes that only one pipeline stage has, divided
    by its ranks, are a lower bound. Zeros for padding do not count.
    """
    # kinds of the holders, whose ranks may send -> bytes of one instance and replica
    sizes: dict[tuple, int] = defaultdict(int)
    total = 0
    for row in map.rows:
        target = map.destination.kinds[row.kind]
        holder_kinds = tuple(sorted({holder.kind for holder in row.holders}))
        size = map.row_bytes(row) * target.replicas
        total += size * target.instances
        if row.transform != ZEROS:
            sizes[holder_kinds] += size
    # ranks -> bytes that only these have
    exclusive_bytes: dict[frozenset[int], int] = defaultdict(int)
    for holder_kinds, size in sizes.items():
        kinds = [map.source.kinds[kind] for kind in holder_kinds]
        for stages, instances in Counter(zip(*[kind.stages.tolist() for kind in kinds])).items():
            ranks = frozenset().union(
                *[kind.ranks[stage].ravel().tolist() for kind, stage in zip(kinds, stages)]
            )
            exclusive_bytes[ranks] += size * instances
    mean = total / map.source.world_size
    return max(1.0, *[size / len(ranks) / mean for ranks, size in exclusive_bytes.items()])


def _when(kind: Kind) -> str:
    if kind.layers is None:
        return "once:"
    return f"in each of {layers_text(kind.layers)}:"


def _line(
    map: ReshardMap, kind: Kind, rows: list[TemplateRow], write_rows: list[TemplateRow]
) -> Line:
    source_kinds: set[int] = set()
    for row in rows:
        if row.transform != ZEROS:
            source_kinds |= {holder.kind for holder in row.holders}
    sources = [map.source.kinds[k] for k in sorted(source_kinds)]
    if kind.scales_of is not None:
        names = "(scales of the above)"
        shards = ""
    else:
        names = "; ".join(_short(source.name) for source in sources)
        shards = "; ".join(dict.fromkeys(_shards(source) for source in sources))
        if any(row.cut for row in rows):
            shards += ", tiles cut"
    destination_shards = _shards(kind)
    if any(row.transform == ZEROS for row in rows):
        destination_shards += " with zeros"
    copies = sum(map.times(row) for row in rows)
    writes = sum(map.times(row) for row in write_rows)
    sent_bytes = kind.instances * kind.replicas * sum(map.row_bytes(row) for row in rows)
    return (
        _short(kind.name),
        destination_shards,
        names,
        shards,
        f"{copies:,}",
        f"{writes:,}",
        _run(map, write_rows),
        f"{sum_messages(map, write_rows):,}",
        size(sent_bytes),
    )


def _facts(
    map: ReshardMap, forwarding: Forwarding | None, link_bytes_per_s: float, changed: float
) -> Iterator[tuple[str, str]]:
    sent, received = map.rank_bytes()
    totals = summary(map, forwarding)
    forced = f", of which the sizes of the trainer's stages force {sender_bound(map):.4f}"
    yield "senders", f"{_shared(sent)}: max/mean {totals.sender_max_over_mean:.4f}{forced}"
    yield "receivers", f"{_shared(received)}: max/mean {received.max() / received.mean():.4f}"
    count = sum_messages(map, map.write_rows)
    yield (
        "messages",
        f"{count / len(sent):,.0f} a sender and {count / len(received):,.0f} a receiver on average",
    )
    if forwarding is not None:
        busiest_relay = forwarding.rank_bytes()[0].max()
        yield (
            "relays",
            f"{size(totals.relayed_bytes)} more go from engine to engine, {size(busiest_relay)} "
            "from the busiest rank",
        )
        yield "", f"receivers in all: max/mean {totals.receiver_max_over_mean:.4f}"
    busiest = busiest_bytes(map, forwarding)
    by_bytes = (
        f"{busiest / link_bytes_per_s:.3g} s for the busiest ranks' {size(busiest)} at "
        f"{link_bytes_per_s / 1e9:g} GB/s"
    )
    if writes_s(map) > busiest / link_bytes_per_s:
        writes = (
            f"{writes_s(map):.3g} s for the busiest sender's {map.rank_writes().max():,} writes"
        )
        yield "predicted", f"{writes}, beside {by_bytes}"
    else:
        yield "predicted", by_bytes
    delta = delta_bytes(map, forwarding, changed)
    yield (
        "",
        f"{delta / link_bytes_per_s:.3g} s for {size(delta)} if {changed:.3g} of the elements "
        "have changed (weights.delta=auto)",
    )
    yield (
        "bytes",
        f"{totals.bytes / totals.bytes_minimum:.4f} times the least possible, every destination "
        "byte once",
    )
    yield "plan", map.plan_hash


def _shared(of_ranks: np.ndarray) -> str:
    return (
        f"{len(of_ranks)}, {size(of_ranks.mean())} each on average, {size(of_ranks.max())} the "
        "busiest"
    )


def sum_messages(map: ReshardMap, joined: Sequence[TemplateRow]) -> int:
    """The number of messages of joined rows, over all ranks."""
    return sum(map.times(row) * messages(*written_memory(map, row)) for row in joined)


def _run(map: ReshardMap, joined: list[TemplateRow]) -> str:
    """The shortest contiguous run, such as `27 MiB` or `2 KiB packed`."""
    runs = []
    for row in joined:
        memory = written_memory(map, row)
        runs.append((run_bytes(*memory), lands(*memory)))
    run, packed = min(runs)
    return size(run) + (" packed" if packed else "")


def _short(name: str) -> str:
    """The name without the prefix that all names of a layer share."""
    _, layered, short_name = name.partition(LAYER_FIELD + ".")
    if layered:
        return short_name
    return name


def _shards(kind: Kind) -> str:
    """The shards, such as `8 x 18x64 bf16`, with the shape of the first one."""
    tensor = kind.shards[0]
    return (
        f"{len(kind.shards)} x {'x'.join(map(str, tensor.shape))} "
        f"{_SHORT.get(tensor.dtype, tensor.dtype)}"
    )


def _aligned(cells: Line, widths: list[int]) -> str:
    """Aligns a line: four columns of text, then numbers."""
    texts = map(str.ljust, cells[:4], widths)
    numbers = map(str.rjust, cells[4:], widths[4:])
    return "  ".join([*texts, *numbers]).rstrip()


def size(count: float) -> str:
    """A number of bytes, such as `47.76 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def copies_of(map: ReshardMap, rank: str) -> list[Copy]:
    """The copies that a rank such as "trainer:17" sends, or "generator:3" receives.

    Raises ConfigError for other texts.
    """
    sends, number = _parsed(map, rank)
    if sends:
        return map.copies_from(number)
    return map.copies_to(number)


def own_part_s(map: ReshardMap, rank: str) -> float:
    """Measures how long a rank takes to write out its own part: all writes, in the batches of a
    run. The time starts when the map is built and proven. Returns the median of several
    measurements, in seconds. Raises ConfigError, as `copies_of` does.
    """
    sends, number = _parsed(map, rank)
    batches = batches_from if sends else batches_to
    times = []
    for _ in range(5):
        fresh = dataclasses.replace(map)  # a copy without cached parts
        prove_exactly_once(fresh)
        begin = time.perf_counter()
        part = batches(fresh, number)
        times.append(time.perf_counter() - begin)
        del part  # a run keeps it, so freeing it does not count
    return statistics.median(times)


def _parsed(map: ReshardMap, rank: str) -> tuple[bool, int]:
    """(whether it is a trainer rank, its number)."""
    side, _, number = rank.partition(":")
    layouts = {"trainer": map.source, "generator": map.destination}
    if side not in layouts or not number.isdecimal():
        raise ConfigError(f"--rank {rank}: must be trainer:N or generator:N")
    if int(number) >= layouts[side].world_size:
        raise ConfigError(
            f"--rank {rank}: the {side} has ranks 0 to {layouts[side].world_size - 1}"
        )
    return side == "trainer", int(number)


def render_copies(rank: str, copies: list[Copy], part_s: float) -> Iterator[str]:
    """One line per copy, then their sum and the time that the rank takes to write them out."""
    sends = rank.startswith("trainer")
    for copy in copies:
        if sends:
            peer = f"to generator {copy.destination_rank}"
        else:
            peer = f"from trainer {copy.source_rank}"
        if copy.source_tensor is None:
            origin = "zeros"
        else:
            origin = f"{copy.source_tensor} {_indices(copy.source_box)}"
        transform = "" if copy.transform in ("identity", ZEROS) else f" {copy.transform}"
        if copy.quantisation is not None and copy.quantisation.cut:
            transform += " (tiles cut)"
        yield (
            f"{peer}: {copy.destination_tensor} {_indices(copy.destination_box)} <- "
            f"{origin}{transform}, {size(copy.bytes)}"
        )
    peers = {copy.destination_rank if sends else copy.source_rank for copy in copies}
    total = size(sum(copy.bytes for copy in copies))
    yield (
        f"{rank}: {len(copies):,} copies, {len(peers)} peers, {total}, planned in "
        f"{part_s * 1e3:.1f} ms"
    )


def dump_lines(map: ReshardMap) -> Iterator[str]:
    """The whole map as JSON lines: one for the map itself, then one per copy, sender by sender in
    forward order.
    """
    head = {
        "plan_hash": map.plan_hash,
        "trainer_ranks": map.source.world_size,
        "generator_ranks": map.destination.world_size,
    }
    yield json.dumps(head)
    for rank in range(map.source.world_size):
        for copy in map.copies_from(rank):
            yield json.dumps(copy_fields(copy))


def copy_fields(copy: Copy) -> dict[str, Any]:
    """A copy as plain values; boxes as [start, shape]."""
    fields = asdict(copy)
    quantisation = fields.pop("quantisation")
    fields["source_box"] = _pair(copy.source_box)
    fields["destination_box"] = _pair(copy.destination_box)
    fields["bytes"] = copy.bytes
    if copy.transform in (QUANTISE, SCALE) and quantisation is not None:
        fields["quantisation"] = asdict(quantisation) | {"rule": quantisation.rule.name}
    return fields


def _pair(box: Box | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if box is None:
        return None
    return (box.start, box.shape)


def _indices(box: Box | None) -> str:
    assert box is not None
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.end)) + "]"
