"""SGLang's plugin door: the entry point `sglang.srt.plugins` calls `activate` in every process of an engine."""

from __future__ import annotations

from typing import Any

from megarl.generator import cpu_support, quantization, sockets

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."


def activate() -> None:
    """Registers our hooks into SGLang: to hide keys, to close its sockets to others, to know what a model has before its first request, to
    process what was written and nothing else, to keep quantised weights as written, and on machines without CUDA what SGLang lacks there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolved_dict", _hide_keys, HookType.AFTER)
    HookRegistry.register("sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights", _finish, HookType.AROUND)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _loaded, HookType.AFTER)
    HookRegistry.register(_UPDATER + "begin_weight_update", _settle, HookType.BEFORE)
    sockets.register_hooks()
    quantization.register_hooks()
    if cpu_support.active():
        cpu_support.register_hooks()


def _finish(*arguments: Any) -> None:
    from megarl.weight_sync.engine import loader as worker_loader  # only workers need it

    worker_loader.finish(*arguments)


def _loaded(*arguments: Any) -> None:
    from megarl.weight_sync.engine import loader as worker_loader

    worker_loader.loaded(*arguments)


def _settle(*_: Any) -> None:
    """Before a weight update: SGLang overlaps steps with its scheduling, and one may still run on the GPU when the scheduler has paused."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _hide_keys(settings: dict[str, Any], *_: object) -> dict[str, Any]:
    """SGLang logs its settings, and shows them at /server_info to holders of the user key: the admin key among them."""
    return {name: "hidden" if name.endswith("api_key") and value else value for name, value in settings.items()}
