"""Everything that real SGLang needs to run without a GPU. With CUDA present nothing here changes anything.

SGLang imports two packages that `make setup` leaves out: `sgl_kernel`, a wheel for CUDA only, and torchvision, whose wheel on PyPI is for
CUDA too, and whose mere presence beside another torch keeps transformers from importing a model. Stand-ins answer both imports, in
processes that called `install`.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from megarl.messaging.members import members_only

_ABSENT = {  # the release that this SGLang expects, and why a name of it cannot be called
    "sgl_kernel": ("0.4.7", "is a CUDA kernel; it has no CPU counterpart"),
    "torchvision": ("0.28.0", "is not there; language models read no images"),
}


def cuda_available() -> bool:
    if importlib.metadata.version("torch").endswith("+cpu"):
        return False  # without importing it, which takes seconds
    import torch

    return torch.cuda.is_available()


def install() -> None:
    """Puts the import finder in front. Idempotent; cheap, as torch is looked at only when a name in question is imported.

    Not for processes that run anything but SGLang: others are told that torchvision is there."""
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
    HookRegistry.register("sglang.srt.distributed.bootstrap._init_parallel_groups", _for_members_only, HookType.AROUND)
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


def _for_members_only(original: Callable[..., None], **settings: object) -> None:
    """Around the making of an engine's process groups: all of them are gloo's."""
    with members_only():
        original(**settings)


class _CpuFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        package, _, submodule = name.partition(".")
        if package not in _ABSENT or (package == "sgl_kernel" and submodule) or cuda_available():
            return None  # for submodules of sgl_kernel SGLang has fallbacks
        return importlib.util.spec_from_loader(name, _StandInLoader(), is_package=True)


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in _ABSENT:
            vars(module)["__version__"], _ = _ABSENT[module.__name__]


class _StandIn(ModuleType):
    """Every public name imports; calling one raises."""

    def __getattr__(self, name: str) -> _Missing:
        return _Missing(self.__name__, name)


class _Missing:
    def __init__(self, owner: str, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__name__ = f"{owner}.{name}"

    def __getattr__(self, name: str) -> _Missing:
        return _Missing(self.__name__, name)

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: object, **kwargs: object) -> object:
        _, why = _ABSENT[self.__name__.partition(".")[0]]
        raise NotImplementedError(f"{self.__name__} {why}")
