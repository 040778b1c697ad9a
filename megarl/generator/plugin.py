"""SGLang's plugin door: the entry point `sglang.srt.plugins` calls `activate` in every process of an engine."""

from __future__ import annotations

from megarl.generator import cpu_support


def activate() -> None:
    """Registers what SGLang lacks on CPU. Does nothing where CUDA is present, or outside an engine of ours."""
    if cpu_support.active():
        cpu_support.register_hooks()
