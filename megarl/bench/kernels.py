"""How close the kernels come to the memory's bandwidth: `python -P -m megarl.bench.kernels [--json]`, on one GPU.

Every time is the median of many runs on tensors larger than the L2 cache. The ceiling is the bandwidth of a device-to-device copy,
bytes read plus bytes written, measured in the same run. `fraction` is a kernel's bandwidth (each input read once, each output written
once) as a fraction of the ceiling. Other projects' quantisers run on the same tensor if they are installed.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROWS, COLS = 16384, 6656  # down_proj of Llama-3.1-405B at TP8
TOKENS, VOCAB = 4096, 16032  # one rank's share of 128,256 at TP8
REPEATS = 50

# Other stacks' quantisers of weights: only this program imports them, and only if they are installed.
PEERS = {
    "SGLang per_block_cast_to_fp8": ("sglang.srt.layers.quantization.fp8_utils:per_block_cast_to_fp8", ()),
    "SGLang bf16_to_block_fp8_128": ("sglang.srt.layers.quantization.mxfp8_block_convert:bf16_to_block_fp8_128", ()),
    "SGLang converter block_fp8": ("sglang.multimodal_gen.tools.convert_hf_to_fp8:block_fp8", ([128, 128],)),
    "verl blockwise_cast_to_fp8_triton": ("verl.utils.kernel.fp8_kernel:blockwise_cast_to_fp8_triton", ([128, 128],)),
    "slime blockwise_cast_to_fp8_triton": ("slime.backends.megatron_utils.kernels.fp8_kernel:blockwise_cast_to_fp8_triton", ([128, 128],)),
}


@dataclass(frozen=True)
class Result:
    name: str
    ms: float | None  # None: could not be run, see note
    gb_per_s: float | None
    fraction: float | None  # of the measured copy bandwidth
    note: str = ""


def median_ms(run: Callable[[], Any]) -> float:
    import torch

    for _ in range(5):
        run()
    times_ms = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return statistics.median(times_ms)


def copy_bytes_per_ms() -> float:
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source))


def quantisers(weight: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any] | None, str]]:
    """(name, what to run or None, note)."""
    import torch

    from megarl.kernels import quantise, quantise_triton
    from megarl.kernels.quantise_rules import BLOCK

    wanted = quantise.quantise(weight, BLOCK, "weight")
    yield "quantise by given scales", lambda: quantise_triton.quantise_with(weight, 0, 0, wanted[1], BLOCK), ""
    yield "tile amax alone", lambda: quantise_triton.tile_amax(weight, 0, 0, BLOCK, "weight"), "reads only, with its check for NaN"
    yield "torch reference", lambda: quantise.quantise(weight, BLOCK, "weight"), ""
    for name, (path, arguments) in PEERS.items():
        try:
            function = pkgutil.resolve_name(path)
            found, found_scales = function(weight, *arguments)[:2]
        except Exception as error:  # whatever it is, the note reports it
            yield name, None, f"not available: {type(error).__name__}: {error}"
            continue
        same_codes = (found.view(torch.uint8) == wanted[0].view(torch.uint8)).float().mean().item()
        same_scales = (found_scales.reshape(wanted[1].shape) == wanted[1]).float().mean().item()
        note = f"codes equal to ours {same_codes:.4%}, scales {same_scales:.2%}"
        yield name, partial(function, weight, *arguments), note


def others(weight: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """(name, what to run, bytes that must move)."""
    import torch

    from megarl.kernels import audit_triton, chunked_logprobs, chunked_logprobs_triton

    fp8 = weight.to(torch.float8_e4m3fn)
    yield "audit hash, bf16", lambda: audit_triton.hash_sum(weight, 0, 0), 2 * weight.numel()
    yield "audit hash, fp8", lambda: audit_triton.hash_sum(fp8, 0, 0), fp8.numel()
    logits = torch.randn(TOKENS, VOCAB, device="cuda")
    targets = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
    grad = torch.randn(TOKENS, device="cuda")
    for name, module in (("", chunked_logprobs_triton), (", torch", chunked_logprobs)):  # torch's overwrites them: other numbers, same time
        log_z = module.local_forward(logits, targets, VOCAB, 0.9)[0]
        yield f"log-probs forward{name}", partial(module.local_forward, logits, targets, VOCAB, 0.9), 4 * logits.numel()
        backward = partial(module.local_backward, logits, targets, log_z, grad, None, VOCAB, 0.9, torch.bfloat16)
        yield f"log-probs backward{name}", backward, 6 * logits.numel()


def measure() -> list[Result]:
    import torch

    ceiling = copy_bytes_per_ms()
    results = [Result("copy (the ceiling)", 2 * (1 << 30) / ceiling, ceiling / 1e6, 1.0)]

    def add(name: str, run: Callable[[], Any], size_bytes: int, note: str = "") -> None:
        ms = median_ms(run)
        results.append(Result(name, ms, size_bytes / ms / 1e6, size_bytes / ms / ceiling, note))

    weight = torch.randn(ROWS, COLS, device="cuda", dtype=torch.bfloat16)
    for name, run, note in quantisers(weight):
        if run is None:
            results.append(Result(name, None, None, None, note))
        else:
            add(name, run, (2 if name == "tile amax alone" else 3) * weight.numel(), note)
    for name, run, size_bytes in others(weight):
        add(name, run, size_bytes)
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -P -m megarl.bench.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("megarl.bench.kernels: no CUDA device here, so there is nothing to measure", file=sys.stderr)
        return 1
    results = measure()
    if options.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "weight": [ROWS, COLS], "results": [asdict(r) for r in results]}))
        return 0
    print(f"{torch.cuda.get_device_name()}, weight {ROWS} x {COLS} bf16, median of {REPEATS}")
    for r in results:
        figures = "-" if r.ms is None else f"{r.ms:9.3f} ms {r.gb_per_s:8.0f} GB/s {r.fraction:7.1%}"
        print(f"{r.name:40s} {figures:>32s}  {r.note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
