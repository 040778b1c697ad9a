"""Makes real SGLang run without a GPU.

If there is CUDA, nothing here has any effect, except for `torch_kernels`.

SGLang imports two packages that `make setup` does not install. `sgl_kernel` is a wheel for CUDA
only. torchvision's wheel on PyPI is also for CUDA; beside another build of torch it would keep
transformers from importing models. In processes that have called `install`, stand-ins replace both
packages.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from megarl.generator import torch_kernels
from megarl.messaging.members import members_only

ABSENT = {  # package -> (release in requirements/gpu.txt, why its functions cannot be called)
    "sgl_kernel": ("0.4.10", "is a CUDA kernel; it has no CPU counterpart"),
    "torchvision": ("0.29.2", "is not there; language models read no images"),
}
GATED_DELTA_NETS = "sgl_kernel.mamba"
SPECULATIVE = "sgl_kernel.speculative"


def cuda_available() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver
    except OSError:
        return False  # tested without importing torch, which takes seconds
    import torch

    return torch.cuda.is_available()


def install() -> None:
    """Installs the import finder.

    Idempotent and cheap: torch is imported only when one of the two packages is.

    Only for processes that run SGLang, since it makes other code believe that torchvision is
    installed.
    """
    if not any(isinstance(finder, _CpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CpuFinder())


def active() -> bool:
    """Whether this process has called `install` and has no CUDA."""
    return (
        not torch_kernels.enabled()
        and any(isinstance(finder, _CpuFinder) for finder in sys.meta_path)
        and not cuda_available()
    )


def register_hooks() -> None:
    """Registers the hooks into SGLang itself, with its plugin registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megarl.generator.cpu_support import (
        attention,
        batch_invariance,
        deepseek_v3,
        dp_attention,
        fp8,
        gated_delta_net,
        moe,
        speculative,
    )

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", _fork_workers, HookType.AFTER
    )
    paused = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
    HookRegistry.register(paused, _sleep_while_paused, HookType.AFTER)
    for name in ("forward_decode", "forward_extend"):
        HookRegistry.register(native + name, attention.forward, HookType.AROUND)
    HookRegistry.register(native + "_run_sdpa_forward_decode", attention.decode, HookType.AROUND)
    HookRegistry.register(native + "_run_sdpa_forward_extend", attention.extend, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        attention.allow_gpt_oss,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native", moe.forward, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register", _not_pinned, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager",
        _pin_nothing,
        HookType.BEFORE,
    )
    HookRegistry.register(
        "sglang.srt.distributed.bootstrap._init_parallel_groups", _for_members_only, HookType.AROUND
    )
    batch_invariance.register_hooks()
    dp_attention.register_hooks()
    fp8.register_hooks()
    deepseek_v3.register_hooks()
    gated_delta_net.register_hooks()
    speculative.register_hooks()


def _fork_workers(result: None, server_args: object) -> None:
    """Runs after SGLang has chosen to spawn its workers, which CUDA requires.

    Without CUDA they can be forked. That saves ten seconds at start-up, and two of three copies of
    the imported code.
    """
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)


def _sleep_while_paused(result: None, scheduler: Any) -> None:
    """Runs in each turn of a paused scheduler's loop, and makes it sleep. SGLang sleeps when idle
    (`sleep_on_idle`) but spins when paused, which would slow down an update on the same core.
    """
    scheduler.maybe_sleep_on_idle()


def _not_pinned(*_: object) -> None:
    """Replaces pinning of host memory for recorded expert ids.

    Without CUDA no device reads that memory.
    """


def _pin_nothing(*_: object) -> None:
    """Runs before SGLang makes its adapters' layers and native backend, which pin host memory
    too.
    """
    import torch
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    unpinned = ModuleType("torch")
    vars(unpinned).update(
        vars(torch)
        | {name: _without_pinning(getattr(torch, name)) for name in ("empty", "tensor", "zeros")}
    )
    for module in (layers, torch_backend):
        vars(module)["torch"] = unpinned
    torch.Tensor.pin_memory = lambda self, device=None: self


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_unpinned(*arguments: Any, **settings: Any) -> Any:
        return make(*arguments, **{**settings, "pin_memory": False})

    return make_unpinned


def _for_members_only(original: Callable[..., None], **settings: object) -> None:
    """Runs around the creation of an engine's process groups, which all use gloo.

    Admits only their members.
    """
    with members_only():
        original(**settings)


class _CpuFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, submodule = name.partition(".")
        if torch_kernels.enabled() and package == torch_kernels.PACKAGE:
            return importlib.machinery.ModuleSpec(name, _TorchKernelsLoader(), is_package=True)
        if name == GATED_DELTA_NETS and not cuda_available():
            return importlib.util.spec_from_loader(name, _GatedDeltaNetLoader())
        if name == SPECULATIVE and not cuda_available():
            return importlib.util.spec_from_loader(name, _SpeculativeLoader())
        if package not in ABSENT or (package == "sgl_kernel" and submodule) or cuda_available():
            return None  # SGLang has fallbacks for submodules of sgl_kernel
        return importlib.util.spec_from_loader(name, _StandInLoader(), is_package=True)


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in ABSENT:
            vars(module)["__version__"], _ = ABSENT[module.__name__]
        if module.__name__ == "sgl_kernel":
            from megarl.generator.cpu_support import speculative

            vars(module).update(
                {name: value for name, value in vars(speculative).items() if name.endswith("_cpu")}
            )


class _GatedDeltaNetLoader(importlib.abc.Loader):
    """Loads gated_delta_net.py, from which SGLang takes some functions.

    It takes others from torch's operators.
    """

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        import torch

        from megarl.generator.cpu_support import gated_delta_net

        vars(module).update(
            {name: value for name, value in vars(gated_delta_net).items() if name.endswith("_cpu")}
        )
        for operator in gated_delta_net.OPERATORS:
            setattr(torch.ops.sgl_kernel, operator.__name__, operator)


class _SpeculativeLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from megarl.generator.cpu_support import speculative

        vars(module)["reconstruct_indices_from_tree_mask"] = (
            speculative.reconstruct_indices_from_tree_mask
        )


class _TorchKernelsLoader(_StandInLoader):
    """Loads a stand-in for sgl_kernel, or for a module of it, on a GPU."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(torch_kernels.FUNCTIONS)


class _StandIn(ModuleType):
    """A module in which every public name can be imported, and raises when called."""

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
        _, reason = ABSENT[self.__name__.partition(".")[0]]
        if torch_kernels.enabled():
            reason = (
                f"is a compiled kernel, which {torch_kernels.TORCH_KERNELS} replaces by nothing"
            )
        raise NotImplementedError(f"{self.__name__} {reason}")
