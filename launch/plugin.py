"""SGLang's plugin door: the entry point `sglang.srt.plugins` calls `activate` in every process of an engine."""

from __future__ import annotations

from megarl.generator import hooks
from megarl.weight_sync.engine import hooks as update_hooks


def activate() -> None:
    hooks.register()
    update_hooks.register()
