"""`megarl bench sync`: how long new weights take to get into a live SGLang engine, by our direct writes and by other stacks' ways.

Two trainer ranks (processes with shards cut by the trainer layout at TP2) and one engine run on this host. The engine is paused with its
update session open; time is measured from the start until every byte is in its parameters:

    direct …             each rank writes its boxes into the live parameters, by the named transport
    gather + broadcast   gather onto rank 0, then SGLang's update_weights_from_distributed: as slime, verl and OpenRLHF do
    … flattened          the same, all tensors as one message (load_format flattened_bucket)
    gather + bucket      gather onto rank 0, then SGLang's update_weights_from_tensor: a flattened bucket in shared memory
    … % changed          each rank writes what has changed since the last update, if that is 1 % of the elements (weights.delta);
                         finding it, which comes before the engine is paused, is not in the time, but beside it
    … audited            a direct way that also hashes both sides and compares the hashes (weights.audit=on)
    … recalled           an audited way that also hashes, before writing, what is about to be overwritten (strict)
    ceiling …            as many bytes, from the same processes, over the bare medium: long memcpys, sends, or writes

Each way is run once to warm up, then checked: the engine's memory, scrambled before, must hash to what was sent. Then the ways take
turns, so that other load on the machine hits all of them alike. Times are medians, with the quartiles beside them. Ratios are taken
within each round, between runs that are close in time; their median counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.bench.sync_picture import draw, title
from megarl.bench.sync_ways import AUDITED, RECALLED, Bench, Way
from megarl.config.errors import ConfigError
from megarl.files import log_tail
from megarl.models.registry import load_spec
from megarl.reshard.layout import hf_layout
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY
from megarl.weight_sync.transports.choice import this_host

TRAINER_TP, ENGINE_TP = 2, 1
MODELS = {  # a random Llama: hidden, ffn, layers, heads, kv heads, vocabulary
    "tiny": (256, 704, 2, 4, 2, 1024),
    "small": (1024, 2816, 8, 16, 8, 8192),
    "medium": (2048, 5632, 8, 32, 8, 16384),
    "1b": (2048, 5632, 22, 32, 4, 32000),
}
TRANSPORTS = (SHARED_MEMORY, GLOO, MOONCAKE)


@dataclass(frozen=True)
class Timing:
    name: str
    median_s: float
    quartiles_s: tuple[float, float]
    best_s: float
    gb_per_s: float  # bytes of the model / median
    bytes_moved: int  # between processes
    messages: int
    of_ceiling: float | None  # the ceiling's time / this way's
    times_faster: float | None  # the fastest gather way's time / this way's
    times_fewer_bytes: float | None  # than that one
    audit_s: float | None  # what hashing on both sides adds
    recall_s: float | None  # what hashing the engine's memory before the update adds to that
    compare_s: float | None  # what finding the changes takes before the update


def run(model_size: str, dtype: str, transports: Sequence[str], repeats: int, as_json: bool, picture: str | None) -> None:
    """Prints a table, or one JSON object. Raises ConfigError for a wrong name, RuntimeError where a way gives wrong weights."""
    problems = [f"--transport {name}: choose from {', '.join(TRANSPORTS)}" for name in transports if name not in TRANSPORTS]
    if repeats < 1:
        problems.append(f"--repeats {repeats}: must be at least 1")
    if problems:
        raise ConfigError(problems)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder, ExitStack() as stack:
        stack.enter_context(errors_into(Path(folder) / "errors.log"))
        if MOONCAKE in transports:
            # Fails now, not after a minute, if it is missing.
            mooncake.open_engine("127.0.0.1", mooncake.protocol_of([this_host()]))
        model = make_model(Path(folder) / "model", dtype, *MODELS[model_size])
        bench = Bench((str(model), dtype, TRAINER_TP, ENGINE_TP), Path(folder), stack)
        ways, times = asyncio.run(bench.measure(transports, repeats))
    facts = {
        "hardware": f"{os.cpu_count()} CPU cores, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}",
        "model": f"{model_size}: random Llama, {dtype}",
        "bytes": bench.bytes,
        "trainer_tp": TRAINER_TP,
        "engine_tp": ENGINE_TP,
        "repeats": repeats,
        "ways": [asdict(timing) for timing in timings(ways, times, bench.bytes)],
    }
    if picture is not None:
        draw(facts, picture)
    print(json.dumps(facts) if as_json else render(facts))


@contextlib.contextmanager
def errors_into(log: Path) -> Iterator[None]:
    """Redirects file descriptor 2, also of child processes, to `log`: libraries such as Mooncake write there what is no error.

    If the body fails, the end of the log is shown.
    """
    terminal = os.dup(2)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except Exception:
        if last_words := log_tail(log):
            os.write(terminal, f"{last_words}\n".encode())
        raise
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def make_model(folder: Path, dtype: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Path:
    """A random Llama as an HF checkpoint."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = hf_layout(load_spec(config), dtype).tensors(0)
    values = {t.name: (0.02 * torch.randn(t.shape, generator=generator)).to(getattr(torch, dtype)) for t in tensors}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def timings(ways: Mapping[str, Way], times: Mapping[str, Sequence[float]], size: int) -> list[Timing]:
    """`times`: seconds of each way, by round; `size`: bytes of the model."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    gather = min((name for name in ways if name.startswith("gather")), key=lambda name: median[name], default=None)
    return [timing_of(name, ways, times, gather, size) for name in ways if not name.endswith((AUDITED, RECALLED))]


def timing_of(name: str, ways: Mapping[str, Way], times: Mapping[str, Sequence[float]], gather: str | None, size: int) -> Timing:
    def ratio(other: str) -> float:
        return statistics.median(theirs / own for theirs, own in zip(times[other], times[name]))

    way, median = ways[name], statistics.median(times[name])
    compared = gather if name.startswith("direct") else None
    audited, recalled = times.get(name + AUDITED), times.get(name + RECALLED)
    return Timing(
        name,
        median,
        quartiles(times[name]),
        min(times[name]),
        size / median / 1e9,
        way.bytes_moved,
        way.messages,
        ratio(way.ceiling) if way.ceiling else None,
        ratio(compared) if compared else None,
        ways[compared].bytes_moved / way.bytes_moved if compared else None,
        statistics.median(a - b for a, b in zip(audited, times[name])) if audited else None,
        statistics.median(a - b for a, b in zip(recalled, audited)) if recalled and audited else None,
        way.compare_s,
    )


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


def render(facts: dict[str, Any]) -> str:
    def row(way: dict[str, Any]) -> list[str]:
        share, times, fewer = way["of_ceiling"], way["times_faster"], way["times_fewer_bytes"]
        low, high = way["quartiles_s"]
        return [
            way["name"],
            f"{way['median_s'] * 1e3:.1f}",
            f"{low * 1e3:.1f}–{high * 1e3:.1f}",
            f"{way['gb_per_s']:.2f}",
            f"{way['bytes_moved'] / 1e6:.1f}",
            f"{way['messages']}",
            "" if share is None else f"{share:.0%}",
            "" if times is None else f"{times:.1f}x",
            "" if fewer is None else f"{fewer:.1f}x",
            *("" if way[key] is None else f"{way[key] * 1e3:.1f}" for key in ("audit_s", "recall_s", "compare_s")),
        ]

    header = [
        "",
        "median ms",
        "quartiles",
        "GB/s",
        "MB moved",
        "messages",
        "of ceiling",
        "vs gather",
        "fewer bytes",
        "audit ms",
        "strict ms",
        "compare ms",
    ]
    rows = [header, *map(row, facts["ways"])]
    widths = [max(len(line[i]) for line in rows) for i in range(len(header))]
    lines = ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]) for line in rows]
    return "\n".join([title(facts), *(line.rstrip() for line in lines)])
