"""Runs megatron-core 0.19.2 on CPU over gloo. Does nothing if CUDA is present.

`install()` must run before anything else of megatron.core is imported. It changes only Megatron's
own modules: the name `torch` in each of them becomes a thin proxy (`_CpuTorch`) that stands in for
CUDA devices and allocators. The exceptions are `torch.Tensor.cuda` and `torch.nn.Module.cuda`,
which return the object itself, and `torch.Tensor.type` while one of the functions in
`_CHECK_TYPE_NAMES` runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.kernels import gated_delta_rule

_CPU = torch.device("cpu")
# install() imports these, so that no module of Megatron escapes the proxy by a late import.
_MODULES = [
    "distributed",
    "distributed.finalize_model_grads",
    "distributed.param_and_grad_buffer",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "optimizer.clip_grads",
    "optimizer.cpu_offloading.hybrid_optimizer",
    "optimizer.distrib_optimizer",
    "optimizer.optimizer",
    "optimizer_param_scheduler",
    "parallel_state",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "ssm.gated_delta_net",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "transformer.moe.experts",
    "transformer.moe.moe_layer",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.shared_experts",
    "transformer.moe.token_dispatcher",
    "transformer.multi_latent_attention",
    "transformer.transformer_block",
    "transformer.utils",
    "utils",
]
# These functions compare `tensor.type()` with 'torch.cuda.FloatTensor' and refuse anything else.
_CHECK_TYPE_NAMES = (
    ("optimizer.distrib_optimizer", "DistributedOptimizer", "__init__"),
    ("optimizer.optimizer", "Float16OptimizerWithFloat16Params", "__init__"),
)
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "rand",
    "randn",
    "as_tensor",
)


def layer_spec() -> str:
    """ "te" (Transformer Engine) or "local", as trainer_layout calls them: they keep the norms
    under different names.
    """
    fused = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if fused:
        return "te"
    return "local"


def gather_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replaces megatron.core.tensor_parallel.mappings._gather_along_first_dim: pads all parts to
    the length of the longest.
    """

    @functools.wraps(original)
    def wrapper(
        x: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return original(x, group, sizes, *args)
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, max(sizes) - x.size(0)))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return wrapper


def reduce_scatter_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replaces megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim: sums
    everything, and takes this rank's part.
    """

    @functools.wraps(original)
    def wrapper(
        x: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return original(x, group, sizes, *args)
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()

    return wrapper


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    activation: str,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """x [1, t, c] and weight [c, w] -> [1, t, c]."""
    assert bias is None and activation == "silu"
    return F.silu(gated_delta_rule.causal_conv(x[0], weight, cu_seqlens.tolist()))[None], None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """q and k [1, t, h, dk], v [1, t, h, dv], g and beta [1, t, h] -> [1, t, h, dv]."""
    outputs, _states = gated_delta_rule.gated_delta_rule(
        q[0], k[0], v[0], g[0], beta[0], cu_seqlens.tolist()
    )
    return outputs[None], None


class _NullStream:
    """Stands in for a CUDA stream or event. On a CPU, every operation is done when it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _NullStream:
        return self


class _CpuCuda(types.ModuleType):
    """`torch.cuda` as Megatron sees it: one device, the CPU, with the CPU's random generator."""

    Stream = _NullStream
    Event = _NullStream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return _CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, *args: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *args: Any) -> None:
        torch.set_rng_state(state)

    def current_stream(self, *args: Any) -> _NullStream:
        return _NullStream()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield


class _CpuTorch(types.ModuleType):
    """`torch` as Megatron sees it: `device="cuda"` means the CPU, and host memory is not pinned."""

    def __init__(self) -> None:
        super().__init__("torch (CPU support)")
        self.cuda = _CpuCuda("torch.cuda (CPU support)")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
    """Keeps functions uncompiled that Megatron decorates with torch.compile at import.

    Otherwise they would call a C++ compiler in the middle of the first step. Even the decorator
    costs seconds of imports.
    """
    original = torch.compile
    torch.compile = lambda model=None, **kwargs: (
        model if model is not None else lambda function: function
    )
    try:
        yield
    finally:
        torch.compile = original


def _patch_type_checks() -> None:
    for module_name, class_name, method in _CHECK_TYPE_NAMES:
        owner = getattr(sys.modules[f"megatron.core.{module_name}"], class_name)
        setattr(owner, method, _with_cuda_type_names(getattr(owner, method)))
    original = sys.modules["megatron.core.optimizer.clip_grads"].clip_grad_by_total_norm_fp32
    replace_everywhere(original, _with_cuda_type_names(original))


def _host_copies(
    optimizer: Any, offload_fraction: float
) -> tuple[list[dict], list[dict], dict, dict, dict]:
    """HybridDeviceOptimizer._get_sub_optimizer_param_groups where the CPU takes the place of the
    GPU, for offload_fraction=1.
    """
    assert offload_fraction == 1
    groups: list[dict] = []
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        masters = [parameter.detach().clone().float() for parameter in group["params"]]
        copies |= zip(group["params"], masters)
        groups += [{**group, "params": masters}] if masters else []
    rounded = {}
    for parameter, master in copies.items():
        if parameter.dtype != torch.float32:
            rounded[parameter] = master
    return groups, [], copies, {master: parameter for parameter, master in copies.items()}, rounded


def _patch_offloading() -> None:
    owner = sys.modules[
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
    ].HybridDeviceOptimizer
    owner._get_sub_optimizer_param_groups = _host_copies


def _patch_experts() -> None:
    """Fixes places in Megatron's mixture of experts that fail without CUDA tensors or NCCL."""
    original = _module("megatron.core.transformer.moe.moe_utils").maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        # the original converts only CUDA tensors
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return tensor

    replace_everywhere(original, maybe_move_tensor_to_cpu)
    mappings = _module("megatron.core.tensor_parallel.mappings")
    mappings._gather_along_first_dim = gather_uneven(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = reduce_scatter_uneven(
        mappings._reduce_scatter_along_first_dim
    )


def _patch_gated_delta_nets() -> None:
    """Replaces Flash Linear Attention by the functions above, which support packed sequences."""
    common = _module("megatron.core.ssm.gated_delta_net.common")
    gdn = _module("megatron.core.ssm.gated_delta_net.gdn")
    common.HAVE_FLA = True
    common.l2norm = gated_delta_rule.l2norm
    gdn.causal_conv1d = causal_conv1d
    gdn.chunk_gated_delta_rule = chunk_gated_delta_rule


def replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replaces a function of Megatron also in its modules that imported it by name."""
    for module in _megatron_modules():
        if module.__dict__.get(original.__name__) is original:
            setattr(module, original.__name__, replacement)


def _patch_random() -> None:
    """Makes the random tracker and activation recomputation save the state of the CPU generator
    instead of a GPU's.
    """
    random = _module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(
        new_state
    )

    class CpuRngStatesTracker(random.CudaRNGStatesTracker):
        """The original also restores the CPU generator's state, which here would undo the effect of
        `fork`.
        """

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    random.CudaRNGStatesTracker = CpuRngStatesTracker


def _module(name: str) -> Any:
    """A module of Megatron to patch.

    It has type Any, since its new attributes are unknown to type checkers.
    """
    return sys.modules[name]


def _megatron_modules() -> list[types.ModuleType]:
    result: list[types.ModuleType] = []
    for name, m in list(sys.modules.items()):
        if name.startswith("megatron.core") and m is not None:
            result.append(m)
    return result


def installed() -> bool:
    """Whether Megatron can run here: CUDA is present, or `install()` has been called."""
    utils = sys.modules.get("megatron.core.utils")
    return torch.cuda.is_available() or (
        utils is not None and isinstance(utils.__dict__.get("torch"), _CpuTorch)
    )


def install() -> None:
    """Makes megatron.core run on this machine's CPU; call it before importing megatron.core.

    Repeated calls do nothing.

    Raises RuntimeError if parts of megatron.core that compile functions at import were imported
    before.
    """
    if installed():
        return
    if "megatron.core.tensor_parallel" in sys.modules:
        raise RuntimeError("cpu_support.install() must be called before megatron.core is imported")
    # Megatron reads this variable to warn about the order of kernels on GPUs, which does not matter
    # here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with _no_compilation(), warnings.catch_warnings():
        # these are for CUDA only, so their absence is fine
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        for name in _MODULES:
            importlib.import_module(f"megatron.core.{name}")
    sys.modules["megatron.core.jit"].disable_jit_fuser()  # type: ignore[attr-defined]  # for later imports
    proxy = _CpuTorch()
    for module in _megatron_modules():
        if module.__dict__.get("torch") is torch:
            module.torch = proxy  # type: ignore[attr-defined]
    _patch_random()
    _patch_experts()
    _patch_gated_delta_nets()
    _patch_type_checks()
    _patch_offloading()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
