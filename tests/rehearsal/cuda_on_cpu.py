"""Makes PyTorch's CUDA build compute on the CPU where a program asks for the GPU, so that a
program's path for GPUs runs with real numbers.

Tensors are on the CPU whatever device was asked for. Triton's kernels run in its interpreter
(TRITON_INTERPRET=1). A captured CUDA graph is the function that was captured, which SGLang hands
over; a replay calls it again. What only a GPU has is left out: streams, asynchronous copies,
compiled code.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from pretended_cuda import H100, TRITON_TYPES, Record, replace_cuda
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
# What waits for the GPU, and so may not be in a captured graph.
WAITS = {
    getattr(torch.Tensor, name)
    for name in (
        "item",
        "tolist",
        "numpy",
        "cpu",
        "nonzero",
        "masked_select",
        "__bool__",
        "__int__",
        "__index__",
    )
}
# environment variable: the file that gets a line of JSON for each kind of launch of a Triton kernel
LAUNCHES = "MEGARL_LAUNCHES"


def install() -> None:
    """Changes torch of this process for good."""
    record = Record()
    properties = replace_cuda(record, H100, devices=1)
    numbers = itertools.count(1)

    class Stream(torch.cuda.Stream):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any):
            super().__init__(*args, **named)
            self.cuda_stream = next(numbers)

    replacements = dict(
        CUDAGraph=Graph,
        graph=capturing,
        graph_pool_handle=lambda: (0, 0),
        get_arch_list=lambda: ["sm_90"],
        MemPool=object,
        use_mem_pool=_nothing,
        StreamContext=_nothing,
        utilization=lambda *args: 0,
        Stream=Stream,
    )
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.get_device_module = lambda *_: torch.cuda  # type: ignore[assignment]
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    _register_for_cpu()
    _meet_by_gloo()
    _know_triton(properties)
    compute_bfloat16()
    if LAUNCHES in os.environ:
        note_launches(Path(os.environ[LAUNCHES]))
    _OnCpu().__enter__()


@contextlib.contextmanager  # which torch._dynamo expects of such functions
def _nothing(*_: Any) -> Iterator[None]:
    """A context in which nothing is different."""
    yield


def _moved(value: Any) -> Any:
    """The CPU where `value` names a GPU; otherwise `value`."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    if isinstance(value, str) and value.startswith("cuda"):
        return CPU
    return value


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        if function in WAITS and torch.cuda.is_current_stream_capturing():
            caller = sys._getframe(1).f_code
            if "/triton/" not in caller.co_filename:
                raise RuntimeError(
                    f"{function.__name__} in {caller.co_filename}:{caller.co_name} waits for the "
                    "GPU in a captured graph"
                )
        kwargs = {
            name: _moved(value) for name, value in (kwargs or {}).items() if name != "pin_memory"
        }
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = CPU
        if function is torch.mm and (dtype := kwargs.pop("out_dtype", None)):  # only CUDA has it
            args = [matrix.to(dtype) for matrix in args]
        return function(*map(_moved, args), **kwargs)


class Graph:
    """A captured function. `captured` is set by the capture below."""

    captured: Callable[[], Any] | None = None
    output: Any = None

    def replay(self) -> None:
        assert self.captured is not None
        _copy(self.captured(), self.output)

    def reset(self) -> None:
        self.captured = None

    def pool(self) -> tuple[int, int]:
        return (0, 0)


def _copy(values: Any, places: Any) -> None:
    """Copies all tensors of one structure into those of another, as a replay writes into the memory
    of the capture.
    """
    if isinstance(places, torch.Tensor):
        places.copy_(values)
    elif isinstance(places, (list, tuple)):
        for value, place in zip(values, places, strict=True):
            _copy(value, place)
    elif isinstance(places, dict):
        for name, place in places.items():
            _copy(values[name], place)
    elif hasattr(places, "__dict__"):
        _copy(vars(values), vars(places))


@contextlib.contextmanager
def capturing(cuda_graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    """Nothing is captured here: see `capture_one`."""
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = lambda: False


def capture_one(
    original: Callable[..., None],
    backend: Any,
    key: Any,
    forward: Callable[[], Any],
    *args: Any,
    **named: Any,
) -> None:
    """Runs around the capture of one of SGLang's graphs, and gives the graph the function that it
    captures.

    A graph has read its attention's metadata once. Since then a prefill may have put others there.
    """
    original(backend, key, forward, *args, **named)
    attention = inspect.getclosurevars(forward).nonlocals["attn_backend"]
    metadata = getattr(attention, "forward_metadata", None)

    def replay() -> Any:
        with mock.patch.object(attention, "forward_metadata", metadata, create=True):
            return forward()

    graph = backend._graphs[key]
    graph.captured = replay
    graph.output = backend._outputs[key]


def _register_for_cpu() -> None:
    """What a library registers for tensors on GPUs is for those of CPUs."""
    original = torch.library.Library.impl

    def impl(
        library: torch.library.Library,
        op_name: Any,
        fn: Callable[..., Any],
        dispatch_key: str = "",
        **named: Any,
    ) -> None:
        key = "CPU" if dispatch_key == "CUDA" and library.ns == "sglang" else dispatch_key
        original(library, op_name, fn, key, **named)

    torch.library.Library.impl = impl  # type: ignore[method-assign]


def _meet_by_gloo() -> None:
    """A process group of GPUs is one of CPUs."""

    def by_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **named: Any) -> Any:
            named = {
                name: "gloo" if name == "backend" else value
                for name, value in named.items()
                if name not in ("device_id", "pg_options")
            }
            return original(*args, **named)

        return make

    for name in ("init_process_group", "new_group"):
        collective = by_gloo(getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, collective)


def _know_triton(gpu: types.SimpleNamespace) -> None:
    """Gives Triton's questions about the device an answer."""
    from triton.backends.compiler import GPUTarget
    from triton.language.extra import cuda
    from triton.runtime import driver

    for name in ("gdc_wait", "gdc_launch_dependents"):  # order kernels, which here run in turn
        setattr(cuda, name, lambda: None)
    shown = {
        "max_shared_mem": gpu.shared_memory_per_block_optin,
        "multiprocessor_count": gpu.multi_processor_count,
    }
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 10 * gpu.major + gpu.minor, gpu.warp_size),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: CPU,
            get_device_interface=lambda: torch.cuda,
            utils=types.SimpleNamespace(get_device_properties=lambda device: shown),
        )
    )


def compute_bfloat16() -> None:
    """Makes Triton's interpreter compute with the values of bfloat16, in float32.

    It keeps them as uint16, and adds and multiplies these integers (Triton 3.6 to 3.8,
    runtime/interpreter.py: create_dot, binary_op). Its casts to bfloat16 truncate.
    """
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(value: Any) -> Any:
        if isinstance(value, TensorHandle) and value.dtype == tl.bfloat16:
            bits = value.data.astype(np.uint32) << 16
            return TensorHandle(bits.view(np.float32), tl.float32)
        return value

    def rounded(value: Any) -> Any:
        bits = value.data.view(np.uint32)
        to_nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return TensorHandle(to_nearest_even.astype(np.uint16), tl.bfloat16)

    def elementwise(original: Callable[..., Any]) -> Callable[..., Any]:
        def operate(builder: Any, first: Any, *operands: Any) -> Any:
            output = original(builder, widened(first), *map(widened, operands))
            is_number = output.data.dtype == np.float32
            return rounded(output) if first.dtype == tl.bfloat16 and is_number else output

        return operate

    def cast(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert(builder: Any, source: Any, target: Any) -> Any:
            if source.dtype == tl.float32 and target.scalar == tl.bfloat16:
                return rounded(source)
            return original(builder, source, target)

        return convert

    product = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = lambda builder, first, second, *operands: product(
        builder, widened(first), widened(second), *operands
    )
    InterpreterBuilder.binary_op = elementwise(InterpreterBuilder.binary_op)
    InterpreterBuilder.unary_op = elementwise(InterpreterBuilder.unary_op)
    InterpreterBuilder.cast_impl = cast(InterpreterBuilder.cast_impl)


def note_launches(path: Path) -> None:
    """Writes down what each kernel would be compiled for (compile_launches.py)."""
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run
    written = set[str]()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        line = json.dumps(described(kernel.fn, args, named), default=str)
        if line not in written:
            written.add(line)
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        return original(kernel, *args, grid=grid, warmup=warmup, **named)

    InterpretedFunction.run = run  # type: ignore[method-assign]


def described(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """The kernel, its options, and of each argument [type or constexpr, the constant or whether 16
    divides it].
    """
    options = {name: value for name, value in named.items() if name in ("num_warps", "num_stages")}
    parameters = inspect.signature(function).parameters
    bound = inspect.signature(function).bind(
        *args, **{name: value for name, value in named.items() if name in parameters}
    )
    bound.apply_defaults()
    kinds: dict[str, tuple[str, Any]] = {}
    for name, value in bound.arguments.items():
        constant = "constexpr" in str(parameters[name].annotation)
        if isinstance(value, torch.Tensor):
            kinds[name] = (
                "*" + TRITON_TYPES.get(value.dtype, "fp8e4nv"),
                value.data_ptr() % 16 == 0,
            )
        elif constant or value is None or (isinstance(value, int) and value == 1):
            kinds[name] = (
                "constexpr",
                str(value) if isinstance(value, torch.dtype) else getattr(value, "value", value),
            )
        elif isinstance(value, bool):
            kinds[name] = ("u1", False)
        elif isinstance(value, int):
            kinds[name] = ("i32" if abs(value) < 1 << 31 else "i64", value % 16 == 0)
        else:
            kinds[name] = ("fp32", False)
    return {
        "module": function.__module__,
        "kernel": function.__name__,
        "options": options,
        "arguments": kinds,
    }


def register_hooks() -> None:
    """Called by SGLang in all its processes (the entry point beside sitecustomize.py)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megarl.generator import seeds

    graphs = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
    HookRegistry.register(f"{graphs}.capture_one", capture_one, HookType.AROUND)
    # The sampler asks where a tensor is, and would take the hash of a library for CPUs that is not
    # there.
    HookRegistry.register(
        "sglang.srt.layers.sampler.multinomial_with_seed", seeds.drawn, HookType.REPLACE
    )
