"""Compiles for an H100 every Triton kernel that cuda_on_cpu.py has written down; no GPU is needed.

python tests/rehearsal/compile_launches.py FILE
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

TARGET = 90


def main(path: str) -> int:
    failed = 0
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        launch = json.loads(line)
        name = f"{launch['module'].removeprefix('sglang.')}.{launch['kernel']}"
        try:
            print(f"{name}: {compiled(launch)} bytes of machine code", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name}: {str(error).splitlines()[0] if str(error) else error!r}", flush=True)
    return int(failed > 0)


def compiled(launch: dict[str, Any]) -> int:
    """The size of the kernel's machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
    while not isinstance(kernel, triton.JITFunction):  # an autotuner, or heuristics
        kernel = kernel.fn
    kinds = {name: launch["arguments"][name] for name in kernel.arg_names}
    signature = {name: kind for name, (kind, _) in kinds.items()}
    constants = {
        (place,): _constant(value)
        for place, (kind, value) in enumerate(kinds.values())
        if kind == "constexpr"
    }
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, (kind, value) in enumerate(kinds.values())
        if kind != "constexpr" and value
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=divisible)
    kernel_code = triton.compile(
        source, target=GPUTarget("cuda", TARGET, 32), options=launch["options"]
    )
    return len(kernel_code.asm["cubin"])


def _constant(value: Any) -> Any:
    """A dtype of Triton, as JSON has it, or any other constant."""
    import triton.language as tl

    named = {
        str(dtype): dtype
        for dtype in (tl.bfloat16, tl.float16, tl.float32, tl.float8e4nv, tl.int32, tl.int64)
    }
    return named.get(value, value) if isinstance(value, str) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
