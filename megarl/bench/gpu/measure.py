"""Shared by the parts: times on a device, its two ceilings, and the models to measure."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.models.registry import load_spec
from megarl.models.spec import ModelSpec

# hidden, ffn, layers, heads, kv heads, head dim, vocabulary, tied embedding: Llama 3.2 1B and 3B,
# and Llama 3.1 8B
LLAMAS = {
    "toy": (256, 384, 2, 8, 4, 32, 512, True),
    "1B": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "3B": (3072, 8192, 28, 24, 8, 128, 128256, True),
    "8B": (4096, 14336, 32, 32, 8, 128, 128256, False),
}
_LONG_MS = 300.0  # total time of the repeats after the first few


@dataclass(frozen=True)
class Bench:
    """The device of a part, and the function that takes its rows."""

    device: torch.device
    toy: bool  # a rehearsal on a CPU: sizes so small that every part runs in seconds
    # takes one row of the part's table; `failed` in it is the reason of a failure
    emit: Callable[[dict[str, Any]], None]
    deadline_s: float = math.inf  # the part is ended so long after `started_s`
    started_s: float = field(default_factory=time.monotonic)
    logs: Path | None = None  # where a part leaves the logs of programs that it starts

    def row(self, what: str, **values: Any) -> None:
        self.emit({"what": what, **values})

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def median_ms(self, run: Callable[[], Any]) -> float:
        """The median time of `run` after warm-up, on the device's own clock."""
        for _ in range(1 if self.toy else 3):
            run()
        self.wait()
        times_ms: list[float] = []
        while len(times_ms) < 3 or (
            len(times_ms) < 50 and sum(times_ms) < _LONG_MS and not self.toy
        ):
            times_ms.append(self._once_ms(run))
        return statistics.median(times_ms)

    def _once_ms(self, run: Callable[[], Any]) -> float:
        if not self.cuda:
            started_s = time.perf_counter()
            run()
            return (time.perf_counter() - started_s) * 1e3
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def copy_bytes_per_s(self) -> float:
        """Bandwidth of a long copy within the device: bytes read plus bytes written."""
        source = torch.randint(
            0, 256, (1 << 20 if self.toy else 1 << 31,), dtype=torch.uint8, device=self.device
        )
        target = torch.empty_like(source)
        return 2 * source.numel() / self.median_ms(lambda: target.copy_(source)) * 1e3

    def matmul_flops(self) -> float:
        """Speed of a large bf16 matrix product of random numbers (a GPU is faster on zeros)."""
        n = 64 if self.toy else 8192
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * n**3 / self.median_ms(lambda: a @ b) * 1e3


def llama(size: str) -> ModelSpec:
    hidden, ffn, layers, heads, kv_heads, head_dim, vocabulary, tied = LLAMAS[size]
    return load_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "vocab_size": vocabulary,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": tied,
        }
    )
