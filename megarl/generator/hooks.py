"""Hooks into SGLang, for all processes of an engine: logging, keys of sockets, quantised weights, machines without CUDA."""

from __future__ import annotations

from typing import Any

from megarl.generator import cpu_support, quantization, sockets


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolved_dict", _hide_keys, HookType.AFTER)
    sockets.register_hooks()
    quantization.register_hooks()
    if cpu_support.active():
        cpu_support.register_hooks()


def _hide_keys(settings: dict[str, Any], *_: object) -> dict[str, Any]:
    """Hides the keys: SGLang logs its settings, and shows them at /server_info to holders of the user key."""
    return {name: "hidden" if name.endswith("api_key") and value else value for name, value in settings.items()}
