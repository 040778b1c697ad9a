"""Everything that real SGLang needs to run without a GPU. With CUDA present nothing here changes anything.

Two imports of SGLang fail on a machine without CUDA: torchvision (its operators' schemas live in a CUDA library) and
`sgl_kernel` (a CUDA-only wheel). `install` answers both, lazily, at the moment they are imported.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing
import sys
from types import ModuleType
from typing import Optional, Sequence

_STAND_IN = "sgl_kernel"


def cuda_available() -> bool:
    if importlib.metadata.version("torch").endswith("+cpu"):
        return False  # without importing it, which takes seconds
    import torch

    return torch.cuda.is_available()


def install() -> None:
    """Puts the import finder in front. Idempotent; cheap, as torch is looked at only when a name in question is imported."""
    if not any(isinstance(finder, _CpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CpuFinder())


def active() -> bool:
    """True in a process that called `install` and has no CUDA."""
    return any(isinstance(finder, _CpuFinder) for finder in sys.meta_path) and not cuda_available()


def register_hooks() -> None:
    """Hooks into SGLang itself, by its plugin registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megarl.generator.cpu_support import attention, deepseek_v3, dp_attention, fp8, moe

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_workers, HookType.AFTER)
    HookRegistry.register(native + "_run_sdpa_forward_decode", attention.decode, HookType.AROUND)
    HookRegistry.register(native + "_run_sdpa_forward_extend", attention.extend, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", moe.forward, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.pool_host.common._cuda_host_register", _not_pinned, HookType.AROUND)
    dp_attention.register_hooks()
    fp8.register_hooks()
    deepseek_v3.register_hooks()


def _fork_workers(result: None, server_args: object) -> None:
    """SGLang has just chosen to spawn its workers, as CUDA demands.

    Without CUDA they can be forked: ten seconds less to start, and one copy of the imported code instead of three.
    """
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)


def _not_pinned(*_: object) -> None:
    """Around the pinning of host memory, that of recorded expert ids: without CUDA nothing reads it directly."""


class _CpuFinder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._torchvision_library: object = None  # keeps the schemas alive

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name == "torchvision" and self._torchvision_library is None and not cuda_available():
            self._torchvision_library = _declare_torchvision_schemas()
        if name == _STAND_IN and not cuda_available():  # its submodules stay missing: SGLang has fallbacks for those
            return importlib.util.spec_from_loader(name, _StandInLoader(), is_package=True)
        return None


def _declare_torchvision_schemas() -> object:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0.4.7"  # the sgl_kernel release this SGLang expects


class _StandIn(ModuleType):
    """Every public name imports; calling one raises."""

    def __getattr__(self, name: str) -> _MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self.__name__}.{name}")


class _MissingKernel:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self.__name__} is a CUDA kernel; it has no CPU counterpart")
