"""gpt-oss in SGLang without CUDA. Its attention runs on `torch_native`, to which attention.py adds sinks."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    checks = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
    HookRegistry.register(checks, allow_native_attention, HookType.AROUND)


def allow_native_attention(original: Callable[..., None], server_args: object) -> None:
    """Runs around SGLang's checks of a model's settings. On CPUs they allow gpt-oss only the AMX backend."""
    from sglang.srt.arg_groups import model_hook

    chosen = model_hook.attention_backends_of

    def named(settings: object) -> tuple[str, str]:
        backends = chosen(settings)
        return ("intel_amx", "intel_amx") if backends == ("torch_native", "torch_native") else backends

    with patch.object(model_hook, "attention_backends_of", named):
        original(server_args)
