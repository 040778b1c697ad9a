"""SGLang's adapters without CUDA. Its layers and its native backend pin host memory, which fails without a device."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

_PINNING = ("empty", "tensor", "zeros")


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager", _pin_nothing, HookType.BEFORE)


def _pin_nothing(*_: object) -> None:
    import torch
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    unpinned = ModuleType("torch")
    vars(unpinned).update(vars(torch) | {name: _without(getattr(torch, name)) for name in _PINNING})
    for module in (layers, torch_backend):
        vars(module)["torch"] = unpinned
    torch.Tensor.pin_memory = lambda self, device=None: self


def _without(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, **settings: Any) -> Any:
        return make(*arguments, **{**settings, "pin_memory": False})

    return made
