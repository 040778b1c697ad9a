"""Pretends to PyTorch's CUDA build that this machine has GPUs.

Records what a program allocates and copies there, and what it waits for.

A tensor on a GPU is a fake one: it has a shape, a dtype and a device, but no values. FakeTensorMode
refuses operations on tensors of different devices. A collective moves nothing, and a Triton kernel
is not launched. Code that reads a GPU's values gets zeros or ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libcuda.so.1"
GIB = 2**30
KNOWN = 4096  # tensors of integers keep their values up to this many elements
TRITON_TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int8: "i8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.uint16: "u16",
    torch.uint32: "u32", torch.uint64: "u64",
    torch.bool: "i1",
}  # fmt: skip
H100 = ("NVIDIA H100 80GB HBM3", (9, 0), 132, 80)
B200 = ("NVIDIA B200", (10, 0), 148, 180)
# Reading these waits for the GPU.
_DATA_DEPENDENT = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::equal",
)
_OURS = {f"{ROOT}/megarl/": "megarl/", f"{ROOT}/kernels/": "kernels/"}
_VENDORS = ("megatron/core/", "transformer_engine/")


def preload() -> None:
    """Restarts this program with the pretended driver.

    Raises FileNotFoundError without a C compiler.
    """
    if LIBRARY in os.environ.get("LD_PRELOAD", ""):
        return
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_suffix(".c")
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{LIBRARY}",
            "-o",
            folder / LIBRARY,
            source,
        ],
        check=True,
    )
    os.execve(
        sys.executable,
        [sys.executable, *sys.argv],
        os.environ | {"LD_PRELOAD": str(folder / LIBRARY), "MEGARL_REHEARSAL": str(folder)},
    )


@dataclass(frozen=True)
class HostEvent:
    """A wait of the host for a GPU, or a copy to a GPU."""

    kind: str
    caller: str  # MegaRL's innermost function, as file:function
    inner: str  # the innermost function of MegaRL, Megatron or Transformer Engine
    line: str  # of `caller`


Launch = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""A Triton kernel, what it is compiled for (_specialisation), and its options."""


@dataclass
class Record:
    events: Counter[HostEvent] = field(default_factory=Counter)
    launches: Counter[Launch] = field(default_factory=Counter)
    held_bytes: int = 0
    peak_bytes: int = 0
    peak_at: str = ""

    def note(self, kind: str) -> None:
        caller, inner, line = call_site()
        self.events[HostEvent(kind, caller, inner, line)] += 1

    def take(self) -> Counter[HostEvent]:
        """The events since the last call. Resets the peak."""
        events = self.events
        self.events = Counter()
        self.peak_bytes = self.held_bytes
        return events


def call_site() -> tuple[str, str, str]:
    """Returns file:function of MegaRL's innermost frame; file:function of the innermost frame of
    MegaRL or a vendor; file:line of the first.
    """
    frame = sys._getframe(1)
    inner = ""
    while frame is not None:
        file = frame.f_code.co_filename
        name = next(
            (
                short + file.removeprefix(root)
                for root, short in _OURS.items()
                if file.startswith(root)
            ),
            "",
        )
        name = "" if name == "megarl/trainer/distributed.py" else name
        vendors = (
            ""
            if name
            else next(
                (vendor + file.split(vendor, 1)[1] for vendor in _VENDORS if vendor in file), ""
            )
        )
        inner = inner or (f"{name or vendors}:{frame.f_code.co_name}" if name or vendors else "")
        if name:
            return f"{name}:{frame.f_code.co_name}", inner, f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "", inner, ""


class _Stream:
    def __init__(self, record: Record, *args: Any, **kwargs: Any):
        self.record = record
        self.cuda_stream = 0
        self.stream_id = 0
        self.device_index = 0
        self.device_type = 1
        self.device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        self.record.note("stream.synchronize")

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Done:
        return _Done(self.record)

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _Done:
    def __init__(self, record: Record, *args: Any, **kwargs: Any):
        self._record = record

    def synchronize(self) -> None:
        self._record.note("event.synchronize")

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class _Work:
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def replace_cuda(
    record: Record, gpu: tuple[str, tuple[int, int], int, int], devices: int
) -> types.SimpleNamespace:
    """Replaces what torch.cuda says about devices, and its streams and events.

    Returns the properties of a device.
    """
    name, capability, multiprocessors, gib = gpu

    class Stream(_Stream):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(record)

    class Event(_Done):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(record)

    stream, generators = Stream(), tuple(torch.Generator() for _ in range(devices))
    properties = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=gib * GIB,
        multi_processor_count=multiprocessors,
        max_threads_per_multi_processor=2048, warp_size=32, gcnArchName="", uuid="GPU-0",
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536, is_integrated=False,
    )  # fmt: skip
    replaced = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        init=lambda: None,
        device_count=lambda: devices,
        current_device=lambda: 0,
        set_device=lambda device: None,
        _exchange_device=lambda index: 0,
        _maybe_exchange_device=lambda index: 0,
        synchronize=lambda *args: record.note("cuda.synchronize"),
        Stream=Stream,
        Event=Event,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda stream: contextlib.nullcontext(),
        get_device_capability=lambda *args: capability,
        get_device_name=lambda *args: name,
        get_device_properties=lambda *args: properties,
        empty_cache=lambda: None,
        memory_allocated=lambda *args: record.held_bytes,
        max_memory_allocated=lambda *args: record.peak_bytes,
        memory_reserved=lambda *args: record.held_bytes,
        mem_get_info=lambda *args: (gib * GIB - record.held_bytes, gib * GIB),
        reset_peak_memory_stats=lambda *args: None,
        get_rng_state=lambda *args, **kwargs: generators[0].get_state(),
        set_rng_state=lambda *args, **kwargs: None,
        default_generators=generators,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        initial_seed=lambda: 0,
        is_bf16_supported=lambda *args, **kwargs: True,
        can_device_access_peer=lambda *args: True,
        is_current_stream_capturing=lambda: False,
    )
    for attribute, value in replaced.items():
        setattr(torch.cuda, attribute, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    return properties


def pretend(
    record: Record, gpu: tuple[str, tuple[int, int], int, int] = H100, devices: int = 8
) -> None:
    """Changes torch.cuda, torch.distributed and Triton of this process for good.

    `preload` must have started it.
    """
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.CDLL(LIBRARY).pretend_devices(devices)
    properties = replace_cuda(record, gpu, devices)

    def tolist(self: FakeTensor) -> Any:
        if self.device.type == "cuda":
            record.note("tolist")
        host_values = getattr(self, "host_values", None)
        return (
            np.zeros(tuple(self.shape), _numpy_dtype(self.dtype)).tolist()
            if host_values is None
            else host_values.tolist()
        )

    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    torch.nn.Module.cuda = _to_gpu  # type: ignore[method-assign]
    _pretend_collectives(record)
    _pretend_triton(record, properties)


def _to_gpu(module: torch.nn.Module, *args: Any) -> torch.nn.Module:
    """nn.Module.cuda, which cannot exchange fake tensors."""
    for part in module.modules():
        for name, tensor in (
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
        ):
            if tensor.device.type != "cuda":
                moved = tensor.detach().to("cuda")
                if isinstance(tensor, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, tensor.requires_grad)
                    vars(moved).update(vars(tensor))  # such as Megatron's marks
                setattr(part, name, moved)
    return module


def _pretend_collectives(record: Record) -> None:
    """Makes every process group a fake one, whose collectives return at once.

    Collectives of objects return this rank's own.
    """
    original = dist.new_group

    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        *args: Any,
        group_desc: Any = None,
        **kwargs: Any,
    ) -> Any:
        return original(ranks=ranks, backend="fake", group_desc=group_desc)

    def all_gather_object(objects: list[Any], local: Any, group: Any = None) -> None:
        record.note("objects through the GPU")
        objects[:] = [local] * len(objects)

    def broadcast_object_list(objects: list[Any], *args: Any, **kwargs: Any) -> None:
        record.note("objects through the GPU")

    @contextlib.contextmanager
    def coalescing(*args: Any, **kwargs: Any) -> Iterator[_Work]:
        yield _Work()

    def barrier(*args: Any, **kwargs: Any) -> None:
        record.note("barrier")

    def nothing(*args: Any, **kwargs: Any) -> _Work:
        return _Work()

    replaced = dict(
        new_group=new_group,
        all_gather_object=all_gather_object,
        broadcast_object_list=broadcast_object_list,
        barrier=barrier,
    )
    coalesced = dict(
        _coalescing_manager=coalescing, batch_isend_irecv=lambda ops: [_Work() for _ in ops]
    )
    moving = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
        "broadcast", "all_gather", "reduce",
              "_all_gather_base", "_reduce_scatter_base", "isend", "irecv", "send", "recv",
              "scatter", "gather")  # fmt: skip
    replaced |= coalesced | {name: _checked(name, nothing) for name in moving}
    for module in (dist, dist.distributed_c10d):
        for name, value in replaced.items():
            setattr(module, name, value)


def _checked(name: str, nothing: Callable[..., _Work]) -> Callable[..., _Work]:
    """A collective that refuses tensors of the host, as NCCL does."""

    def collective(*args: Any, **kwargs: Any) -> _Work:
        for tensor in _tensors((args, [*kwargs.values()])):
            if tensor.device.type != "cuda":
                raise RuntimeError(
                    f"{name} of a tensor {tuple(tensor.shape)} on {tensor.device}: NCCL knows "
                    "GPUs alone"
                )
        return nothing()

    return collective


def _pretend_triton(record: Record, gpu: Any) -> None:
    """Makes a launch bind its arguments, check that every tensor is on a GPU, and note what the
    kernel would be compiled for.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    shown = {
        "max_shared_mem": gpu.shared_memory_per_block_optin,
        "multiprocessor_count": gpu.multi_processor_count,
    }
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 10 * gpu.major + gpu.minor, gpu.warp_size),
            get_current_device=lambda: 0,
            utils=types.SimpleNamespace(get_device_properties=lambda device: shown),
        )
    )

    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        """Takes the first configuration, since only a GPU would find the fastest one."""
        self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    Autotuner.run = first  # type: ignore[method-assign]

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {
            name: kwargs.pop(name)
            for name in ("num_warps", "num_stages", "num_ctas")
            if name in kwargs
        }
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cuda":
                raise RuntimeError(
                    f"kernel {self.__name__}: {name} {tuple(value.shape)} is on {value.device}"
                )
        record.launches[
            self, tuple(_specialisation(self, bound.arguments)), tuple(options.items())
        ] += 1

    JITFunction.run = run  # type: ignore[method-assign]


def _specialisation(kernel: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, type or "constexpr", the constant or whether it is divisible by 16) of each argument,
    as in Triton's launcher. PyTorch's allocations begin at multiples of 512 bytes, so a view's
    alignment follows from its offset in the storage.
    """
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            yield parameter.name, "constexpr", value
        elif isinstance(value, torch.Tensor):
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            yield parameter.name, "*" + TRITON_TYPES[value.dtype], aligned
        elif isinstance(value, bool):
            yield parameter.name, "u1", False
        elif isinstance(value, int):
            if value == 1:
                yield parameter.name, "constexpr", 1
            else:
                yield (
                    parameter.name,
                    "i32" if -(1 << 31) <= value < 1 << 31 else "i64",
                    value % 16 == 0,
                )
        else:
            yield parameter.name, "fp32", False


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _host_value(value: Any) -> Any:
    return value.host_values if isinstance(value, FakeTensor) else value


class _Functions(TorchFunctionMode):
    """Handles what FakeTensorMode cannot: tensors made from Python's numbers, values that the host
    reads, pinned memory.
    """

    def __init__(self, record: Record):
        super().__init__()
        self.record = record

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) and not isinstance(device, bool):
            device = kwargs["device"] = torch.device("cuda", device)
        sends = (
            device is not None
            and torch.device(device).type == "cuda"
            and function in (torch.tensor, torch.as_tensor)
        )
        if sends and not isinstance(args[0], torch.Tensor):
            self.record.note("blocking copy to the GPU")
            kwargs = {
                name: value
                for name, value in kwargs.items()
                if name not in ("device", "pin_memory")
            }
            tensor = torch.tensor(*args, **kwargs)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if function is torch.Tensor.numpy and isinstance(args[0], FakeTensor):
            if args[0].device.type != "cpu":
                raise TypeError("numpy() of a tensor on the GPU")
            return np.zeros(tuple(args[0].shape), _numpy_dtype(args[0].dtype))
        return function(*args, **kwargs)


def _numpy_dtype(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch."))


def _is_of_host(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether no GPU tensor takes part. Then the operation is a real one."""
    device = kwargs.get("device")
    on_gpu = device is not None and torch.device(device).type != "cpu"
    return not on_gpu and not any(
        isinstance(tensor, FakeTensor) for tensor in _tensors((args, [*kwargs.values()]))
    )


class _Operations(TorchDispatchMode):
    """Notes waits for the GPU, copies to it, and the bytes of all its storages."""

    def __init__(self, record: Record):
        super().__init__()
        self.record = record
        self.sizes = dict[int, int]()
        self.pinned: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        if name == "aten::_local_scalar_dense":
            if args[0].device.type == "cuda":
                self.record.note("item")
            if (host_values := getattr(args[0], "host_values", None)) is not None:
                with unset_fake_temporarily():
                    return host_values.item()
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if name in _DATA_DEPENDENT and args[0].device.type == "cuda":
            self.record.note(name.removeprefix("aten::"))
        if name == "aten::equal" and args[0].device.type == "cuda":
            return True
        if name == "aten::is_pinned":
            return args[0].untyped_storage()._cdata in self.pinned
        if name in ("aten::pin_memory", "aten::_pin_memory"):
            with unset_fake_temporarily():
                return self._pinned(args[0].clone())
        # then PyTorch fills by the mask, without a wait
        filled = name == "aten::index_put_" and args[2].numel() == 1
        if (
            name in ("aten::index", "aten::index_put_", "aten::_unsafe_index")
            and args[0].device.type == "cuda"
            and not filled
        ):
            for index in args[1]:
                if index is not None and index.device.type == "cpu" and index.dim():
                    self.record.note("blocking copy to the GPU")
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self.record.note("boolean index")
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            self._copy(args[0], torch.device(kwargs["device"]), kwargs.get("non_blocking", False))
        # a number from the host is filled in without a copy
        if name == "aten::copy_" and (args[1].dim() or args[1].device.type == "cuda"):
            self._copy(
                args[1],
                args[0].device,
                args[2] if len(args) > 2 else kwargs.get("non_blocking", False),
            )
        pins = kwargs.get("pin_memory")
        if pins:
            kwargs = kwargs | {"pin_memory": False}
        if (
            name == "aten::_to_copy"
            and not isinstance(args[0], FakeTensor)
            and torch.device(kwargs.get("device") or "cpu").type != "cpu"
        ):
            out = torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=kwargs["device"])
            if args[0].numel() <= KNOWN and not args[0].is_floating_point():
                with unset_fake_temporarily():
                    out.host_values = args[0].to(out.dtype, copy=True)
        elif _is_of_host(args, kwargs):
            with unset_fake_temporarily():
                out = function(*args, **kwargs)
        else:
            out = function(*args, **kwargs)
            self._know(function, args, kwargs, out)
        if pins:
            self._pinned(out)
        for tensor in _tensors(out):
            # a DTensor's own storage has no memory; its local tensor is another tensor
            if tensor.device.type == "cuda" and not isinstance(tensor, DTensor):
                self._track(tensor)
        return out

    def _know(self, function: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        """Keeps the values of small integer tensors from the host, such as the boundaries of
        sequences, and of tensors made from them, because Megatron splits by them.
        """
        tensors = [*_tensors((args, [*kwargs.values()]))]
        if function._schema.is_mutable:
            for tensor in tensors:
                tensor.__dict__.pop("host_values", None)
        elif (
            isinstance(out, FakeTensor)
            and tensors
            and all(hasattr(tensor, "host_values") for tensor in tensors)
        ):
            of_host = {name: _host_value(value) for name, value in kwargs.items()}
            if "device" in kwargs:
                of_host["device"] = torch.device("cpu")
            with unset_fake_temporarily():
                out.host_values = function(*map(_host_value, args), **of_host)

    def _copy(self, source: torch.Tensor, device: torch.device, asynchronous: bool) -> None:
        if source.device.type == "cuda" and device.type == "cpu":
            self.record.note(
                "copy to the host" if not asynchronous else "asynchronous copy to the host"
            )
        if source.device.type == "cpu" and device.type == "cuda":
            pinned = source.untyped_storage()._cdata in self.pinned
            self.record.note(
                "asynchronous copy to the GPU"
                if pinned and asynchronous
                else "blocking copy to the GPU"
            )

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.pinned.add(storage._cdata)
        weakref.finalize(storage, self.pinned.discard, storage._cdata)
        return tensor

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self._grow(self.sizes[key])
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.record.held_bytes -= self.sizes.pop(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP2 frees gathered parameters so, and makes room for them again."""
        if storage._cdata in self.sizes:
            self._grow(storage.nbytes() - self.sizes[storage._cdata])
            self.sizes[storage._cdata] = storage.nbytes()

    def _grow(self, size_bytes: int) -> None:
        record = self.record
        record.held_bytes += size_bytes
        if record.held_bytes > record.peak_bytes:
            record.peak_bytes = record.held_bytes
            record.peak_at = call_site()[1]


@contextlib.contextmanager
def rehearsing(record: Record) -> Iterator[None]:
    """In this context all GPU tensors are fake, and so are tensors made from them."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    operations = _Operations(record)
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
        resize(storage, size_bytes)
        operations.resized(storage)
        return storage

    with torch.autograd.set_multithreading_enabled(False), _Functions(record), fake, operations:
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
