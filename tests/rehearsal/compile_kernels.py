"""Compiles MegaRL's Triton kernels for Hopper and Blackwell, without a GPU, at the shapes of real
runs.

    python tests/rehearsal/compile_kernels.py [--all]

prints a line for each kernel: registers and spilled bytes a thread, bytes of shared memory a block,
and the widest load and store of global memory in bytes a thread. Exit status 1 if a number is
beyond its limit. Without `--all`, only the kernels that a run launches most.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = (90, 100)  # H100, B200
MOST_REGISTERS = 255  # the hardware's limit for a thread
SPILLED_BYTES = 0
LEAST_WIDTH_BYTES = 16  # for the widest load of a kernel that is bound by memory


@dataclass(frozen=True)
class Launch:
    """A kernel as a run launches it. Arguments in `ragged` are not divisible by 16."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    ragged: frozenset[str] = frozenset()
    warps: int = 8
    wide: bool = True  # loads at least 16 bytes a thread


@dataclass(frozen=True)
class Compiled:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    load_bytes: int
    store_bytes: int


def launches() -> Iterator[Launch]:
    from megarl.kernels import (
        audit,
        audit_triton,
        changes_triton,
        chunked_logprobs_triton,
        quantise_triton,
    )

    scoring = {"logits": "*fp32", "targets": "*i64", "temperature": "fp32"}
    sizes = {"real": "i32", "row_stride": "i32", "width": "i32", "tokens": "i32"}
    # Each rank's share of the vocabularies of Llama 3.1, Qwen3 and DeepSeek-V3 is divisible by 16.
    forward = scoring | {
        "partial": "*fp32",
        "tokens": sizes["tokens"],
        "real": sizes["real"],
        "row_stride": sizes["row_stride"],
    }
    forward_kernel = chunked_logprobs_triton._forward_kernel
    backward_kernel = chunked_logprobs_triton._backward_kernel
    yield Launch("log-probs", forward_kernel, forward, {"BLOCK": 4096})
    yield Launch(
        "log-probs, odd vocabulary",
        forward_kernel,
        forward,
        {"BLOCK": 4096},
        frozenset({"real", "row_stride", "tokens"}),
        wide=False,
    )
    rows = dict.fromkeys(("log_z", "grad", "entropy_grad", "entropy"), "*fp32")
    backward = scoring | rows | {"real": "i32", "width": "i32", "row_stride": "i32"}
    for kind, type_, bf16 in (("bf16", "*i16", True), ("fp32", "*fp32", False)):
        for entropy in (False, True):
            constants = {"ENTROPY": entropy, "BF16": bf16, "BLOCK": 2048}
            name = f"log-probs' gradient, {kind}{', entropy' if entropy else ''}"
            yield Launch(name, backward_kernel, backward | {"gradient": type_}, constants)
    strides = dict.fromkeys(
        (
            "rows",
            "cols",
            "top",
            "left",
            "value_lead",
            "value_row",
            "scale_lead",
            "scale_row",
            "tiles_across",
        ),
        "i32",
    )
    quantise = {"values": "*i16", "codes": "*u8", "scales": "*fp32"} | strides
    tile = {
        "value_col": 1,
        "scale_col": 1,
        "TILE_ROWS": 128,
        "TILE_COLS": 128,
        "PARTS": 1,
        "INTERPRETED": False,
    }
    ragged = frozenset(strides)
    for name, amax in (("quantise", False), ("amax", True)):
        types = quantise | ({"codes": "*i16"} if amax else {})
        of_scales = frozenset({"scale_lead", "scale_row", "tiles_across"})
        yield Launch(
            f"{name}, whole tiles",
            quantise_triton._tile_kernel,
            types,
            tile | {"AMAX": amax},
            of_scales,
        )
        yield Launch(
            f"{name}, experts",
            quantise_triton._tile_kernel,
            types | {"value_lead": "i64"},
            tile | {"AMAX": amax},
            of_scales,
        )
        parts = {"AMAX": amax, "PARTS": 1 if amax else quantise_triton.PARTS}
        yield Launch(
            f"{name}, ragged", quantise_triton._tile_kernel, types, tile | parts, ragged, wide=False
        )
    box = dict.fromkeys(("rows", "cols", "lead", "row_stride", "strips"), "i32")
    hashed = {"row_weights": "*i64", "word_weights": "*i64", "partial": "*i64"} | box
    blocks = {
        "STEPS": audit_triton.STEPS,
        "BLOCK_ROWS": audit_triton.BLOCK_ROWS,
        "BLOCK_COLS": audit_triton.BLOCK_COLS,
    }
    for name, type_, per_word in (
        ("words", "*u64", 1),
        ("fp32", "*u32", 2),
        ("bf16", "*u16", 4),
        ("fp8", "*u8", 8),
    ):
        constants = {"col_stride": 1, "PER_WORD": per_word, "MIX_SHIFT": audit.MIX_SHIFT} | blocks
        for odd in (False, True):
            loose = frozenset({"strips", *(("rows", "cols", "lead", "row_stride") if odd else ())})
            label = f"hash, {name}{', odd rows' if odd else ''}"
            yield Launch(
                label,
                audit_triton._hash_kernel,
                hashed | {"values": type_},
                constants,
                loose,
                wide=not odd,
            )
    for name, type_ in (("fp8", "*u8"), ("bf16", "*i16"), ("fp32", "*i32")):
        for writes in (False, True):
            types = {
                "new": type_,
                "old": type_,
                "counts": "*i32",
                "ends": "*i64" if writes else "*i32",
            }
            types |= {"offsets": "*i16" if writes else "*i32", "elements": "i32"}
            constants = {
                "PIECE": changes_triton.PIECE,
                "BLOCK": changes_triton.BLOCK,
                "WRITES": writes,
            }
            yield Launch(
                f"changes, {name}{', written' if writes else ''}",
                changes_triton._changes_kernel,
                types,
                constants,
                warps=4,
            )


def compiled(launch: Launch, target: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    signature = {
        name: "constexpr" if name in launch.constants else launch.types[name] for name in names
    }
    divisible = [
        name
        for name in names
        if name in launch.types and name not in launch.ragged and launch.types[name] != "fp32"
    ]
    source = ASTSource(
        launch.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    kernel = triton.compile(
        source, target=GPUTarget("cuda", target, 32), options={"num_warps": launch.warps}
    )
    ptx = kernel.asm["ptx"]
    metadata = kernel.metadata
    usage = resources(kernel.asm["cubin"])
    return Compiled(
        registers=usage["REG"],
        spilled_bytes=usage["LOCAL"] + usage["STACK"],
        shared_bytes=metadata.shared,
        load_bytes=widest(ptx, "ld"),
        store_bytes=widest(ptx, "st"),
    )


def resources(cubin: bytes) -> dict[str, int]:
    """The kernel's resources by cuobjdump, which comes with Triton.

    A thread has local memory only for spilled registers.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", listing)
    }


def widest(ptx: str, kind: str) -> int:
    """The bytes of a thread's widest access to global memory."""
    widths = re.findall(rf"{kind}\.global[\w.:]*?(?:\.v(\d))?\.[bufs](\d+)", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in widths), default=0)


def problems(launch: Launch, kernel: Compiled) -> list[str]:
    messages = []
    if kernel.spilled_bytes > SPILLED_BYTES:
        messages.append(f"spills {kernel.spilled_bytes} bytes")
    if launch.wide and kernel.load_bytes < LEAST_WIDTH_BYTES:
        messages.append(f"loads {kernel.load_bytes} bytes at once")
    return messages


def main() -> int:
    failed = 0
    print(
        f"{'kernel':34s} {'sm':>4s} {'registers':>9s} {'spilled':>7s} {'shared':>7s} {'load':>5s} "
        f"{'store':>5s}"
    )
    for launch in launches():
        for target in TARGETS:
            kernel = compiled(launch, target)
            messages = problems(launch, kernel)
            failed += bool(messages)
            numbers = (
                f"{kernel.registers:9d} {kernel.spilled_bytes:7d} {kernel.shared_bytes:7d} "
                f"{kernel.load_bytes:5d} {kernel.store_bytes:5d}"
            )
            print(f"{launch.name:34s} {target:4d} {numbers} {'; '.join(messages)}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
