"""Hooks into an engine's workers.

They see a model before its first request, and control post-load work after direct writes.
"""

from __future__ import annotations

from typing import Any

from megarl.lora import engine as lora

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights",
        _finish,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.model_loader.loader._initialize_model", _build, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", _loaded, HookType.AFTER
    )
    HookRegistry.register(_UPDATER + "begin_weight_update", _settle, HookType.BEFORE)
    lora.register()


def _finish(*arguments: Any) -> None:
    from megarl.weight_sync.engine import loader  # imported here, since only workers need it

    loader.finish(*arguments)


def _build(*arguments: Any, **options: Any) -> Any:
    from megarl.weight_sync.engine import loader

    return loader.build(*arguments, **options)


def _loaded(*arguments: Any) -> None:
    from megarl.weight_sync.engine import loader

    loader.model_loaded(*arguments)


def _settle(*_: Any) -> None:
    """Runs before a weight update.

    Waits for the GPU: SGLang overlaps steps with scheduling, so a step may still run after the
    pause.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
