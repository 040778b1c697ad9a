"""The plugin for SGLang, which calls `activate` in every process of an engine (entry point
`sglang.srt.plugins`).
"""

from __future__ import annotations

from megarl.generator import hooks
from megarl.weight_sync.engine import hooks as update_hooks


def activate() -> None:
    hooks.register()
    update_hooks.register()
