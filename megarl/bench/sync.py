"""`megarl bench sync`: how long new weights take into a live SGLang engine: our direct writes, and what other stacks do, in one run.

Two trainer ranks (processes with shards cut by the trainer layout at TP2) and one engine, on this host. Measured while the engine
stands still with its update session open, from the start until every byte is in its parameters:

    direct …             each rank writes its boxes into the live parameters, by that transport
    gather + broadcast   gather onto rank 0, then SGLang's update_weights_from_distributed: as slime, verl and OpenRLHF do
    … flattened          the same, all tensors as one message (load_format flattened_bucket)
    gather + bucket      gather onto rank 0, then SGLang's update_weights_from_tensor: a flattened bucket in shared memory
    ceiling …            as many bytes, from the same processes, over the bare medium: long memcpys, sends, or writes

Each way is run once to warm up, then checked: the engine's memory, scrambled before, must hash to what was sent. Then all of them
take turns, so that whatever else the machine does hits all alike, and the median counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

from megarl.bench.sync_ways import TIMEOUT_S, Bench, Way
from megarl.config.errors import ConfigError
from megarl.models.registry import load_spec
from megarl.reshard.layout import hf_layout
from megarl.transports import mooncake
from megarl.transports.base import GLOO, MOONCAKE, SHARED_MEMORY

TRAINER_TP, ENGINE_TP = 2, 1
DTYPE = "float32"
MODELS = {  # a random Llama: hidden, ffn, layers, heads, kv heads, vocabulary
    "tiny": (256, 704, 2, 4, 2, 1024),
    "small": (1024, 2816, 8, 16, 8, 8192),
    "medium": (2048, 5632, 8, 32, 8, 16384),
}
TRANSPORTS = (SHARED_MEMORY, GLOO, MOONCAKE)


@dataclass(frozen=True)
class Timing:
    name: str
    median_s: float
    best_s: float
    gb_per_s: float  # bytes of the model, once, over the median
    bytes_moved: int  # between processes
    messages: int
    of_ceiling: Optional[float]  # the ceiling's median over this one's
    times_faster: Optional[float]  # than the fastest of the gather ways
    audit_s: Optional[float]  # what hashing on both sides adds


def run(model_size: str, transports: Sequence[str], repeats: int, as_json: bool) -> None:
    """Prints a table, or one JSON object. Raises ConfigError for a wrong name, RuntimeError where a way gives wrong weights."""
    problems = [f"--transport {name}: choose from {', '.join(TRANSPORTS)}" for name in transports if name not in TRANSPORTS]
    if repeats < 1:
        problems.append(f"--repeats {repeats}: must be at least 1")
    if problems:
        raise ConfigError(problems)
    if MOONCAKE in transports:
        mooncake.open_engine("127.0.0.1", None, TIMEOUT_S)  # where it is missing: a message now, not after a minute
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder, ExitStack() as stack:
        model = make_model(Path(folder) / "model", *MODELS[model_size])
        bench = Bench((str(model), DTYPE, TRAINER_TP, ENGINE_TP), Path(folder), stack)
        ways, times, audit_s = asyncio.run(bench.measure(transports, repeats))
    facts = {
        "hardware": f"{os.cpu_count()} CPU cores, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}",
        "model": f"{model_size}: random Llama, {DTYPE}",
        "bytes": bench.bytes,
        "trainer_tp": TRAINER_TP,
        "engine_tp": ENGINE_TP,
        "repeats": repeats,
        "ways": [asdict(timing) for timing in timings(ways, times, audit_s, bench.bytes)],
    }
    print(json.dumps(facts) if as_json else render(facts))


def make_model(folder: Path, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Path:
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
        "torch_dtype": DTYPE,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = hf_layout(load_spec(config), DTYPE).tensors(0)
    values = {tensor.name: 0.02 * torch.randn(tensor.shape, generator=generator) for tensor in tensors}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def timings(ways: dict[str, Way], times: dict[str, list[float]], audit_s: dict[str, float], size: int) -> list[Timing]:
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    gather = min((median[name] for name in ways if name.startswith("gather")), default=None)
    return [
        Timing(
            name,
            median[name],
            min(times[name]),
            size / median[name] / 1e9,
            way.bytes_moved,
            way.messages,
            median[way.ceiling] / median[name] if way.ceiling else None,
            gather / median[name] if gather and name.startswith("direct") else None,
            audit_s.get(name),
        )
        for name, way in ways.items()
    ]


def render(facts: dict[str, Any]) -> str:
    def row(way: dict[str, Any]) -> list[str]:
        share, times, audit = way["of_ceiling"], way["times_faster"], way["audit_s"]
        return [
            way["name"],
            f"{way['median_s'] * 1e3:.1f}",
            f"{way['best_s'] * 1e3:.1f}",
            f"{way['gb_per_s']:.2f}",
            f"{way['bytes_moved'] / 1e6:.1f}",
            f"{way['messages']}",
            "" if share is None else f"{share:.0%}",
            "" if times is None else f"{times:.1f}x",
            "" if audit is None else f"{audit * 1e3:.1f}",
        ]

    header = ["", "median ms", "best ms", "GB/s", "MB moved", "messages", "of ceiling", "vs gather", "audit ms"]
    rows = [header, *map(row, facts["ways"])]
    widths = [max(len(line[i]) for line in rows) for i in range(len(header))]
    lines = ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]) for line in rows]
    title = (
        f"{facts['model']}, {facts['bytes'] / 1e6:.1f} MB; trainer TP{facts['trainer_tp']} -> engine TP{facts['engine_tp']}; "
        f"{facts['hardware']}; median of {facts['repeats']}"
    )
    return "\n".join([title, *(line.rstrip() for line in lines)])
