"""Hooks into SGLang, for all processes of an engine: logging, keys of sockets, quantised weights,
machines without CUDA.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from megarl.base.processes import cause, ended_for_memory, ending
from megarl.generator import cpu_support, seeds, torch_kernels
from megarl.messaging.host import loopback, with_port

if TYPE_CHECKING:
    import torch

# environment variable of all processes of an engine, on all its nodes
SOCKET_KEY = "MEGARL_ENGINE_SOCKET_KEY"
_NETWORK = "sglang.srt.utils.network."


def socket_key(admin_key: str) -> str:
    """Derives the secret CURVE key of an engine's sockets.

    `admin_key` cannot be recovered from it.
    """
    return z85.encode(hashlib.sha256(b"sockets of " + admin_key.encode()).digest()).decode()


def close_sockets() -> None:
    """Closes the sockets between SGLang's own processes to everybody else on the host and the
    network.

    With data-parallel attention, these processes communicate over TCP and unpickle what arrives.
    SGLang gives the sockets no key, so each gets one here.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_NETWORK + "get_zmq_socket", _with_key, HookType.AROUND)
    HookRegistry.register(_NETWORK + "get_zmq_socket_on_host", _bound_with_key, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.load_snapshot.shm_path_for", _in_own_folder, HookType.AROUND
    )


def check_hooks() -> None:
    """Raises RuntimeError if SGLang's sockets would have no key.

    SGLang itself only logs a hook that it could not apply.
    """
    from sglang.srt.utils import network

    with zmq.Context() as context:
        port, bound = network.get_zmq_socket_on_host(context, zmq.PULL, loopback())
        connected = network.get_zmq_socket(
            context, zmq.PUSH, f"tcp://{with_port(loopback(), port)}", False
        )
        assert isinstance(connected, zmq.Socket)  # would be a tuple if no endpoint were given
        keyed = all(socket.getsockopt(zmq.MECHANISM) == zmq.CURVE for socket in (bound, connected))
        bound.close(linger=0)
        connected.close(linger=0)
    if not keyed:
        raise RuntimeError(
            "this version of SGLang makes its sockets in a way that cannot be given keys: anybody "
            "could connect to them"
        )


class _KeyedContext:
    """A ZeroMQ context that gives every socket the engine's key.

    A CURVE handshake begins with a box that only holders of the binding side's public key can make.
    That key is secret here, so SGLang's contexts need no authenticator.
    """

    def __init__(self, context: zmq.Context, binds: bool):
        self._context = context
        self._binds = binds

    def socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        secret = os.environ[SOCKET_KEY].encode()
        socket.curve_secretkey = secret
        socket.curve_publickey = zmq.curve_public(secret)
        if self._binds:
            socket.curve_server = True
        else:
            socket.curve_serverkey = zmq.curve_public(secret)
        return socket


def _with_key(
    original: Callable[..., Any],
    context: zmq.Context,
    kind: int,
    endpoint: str | None = None,
    bind: bool = True,
) -> Any:
    """Runs around the creation of a socket.

    Sockets in the file system need no key, since only this user can open their folder.
    """
    if endpoint is not None and endpoint.startswith("ipc://"):
        return original(context, kind, endpoint, bind)
    return original(_KeyedContext(context, endpoint is None or bind), kind, endpoint, bind)


def _bound_with_key(
    original: Callable[..., Any], context: zmq.Context, *arguments: Any, **named: Any
) -> Any:
    return original(_KeyedContext(context, binds=True), *arguments, **named)


def _in_own_folder(original: Callable[[str], str], name: str) -> str:
    """Moves a file that an engine's processes map to the folder of their sockets, which is removed
    with them. In /dev/shm it would stay.
    """
    return os.path.join(tempfile.gettempdir(), os.path.basename(original(name)))


_ACTIVATIONS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": True,
    "symmetric": True,
}
_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}
# generator.quantization -> the quantization_config of a checkpoint in that format
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8_block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        # Layers of gated delta nets in which a rank has fewer rows than a block. The first is
        # Qwen3-Next's, the others are Qwen3.5's.
        "modules_to_not_convert": ["in_proj_ba", "in_proj_b", "in_proj_a"],
    },
    "fp8_channel": {"quant_method": "w8a8_fp8"},
    "fp8_tensor": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "all": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ACTIVATIONS}
        },
    },
}


def server_arguments(quantization: str | None, text_only: bool = False) -> dict[str, Any]:
    """The arguments of SGLang's server for `generator.quantization`; empty for null.

    SGLang reads the format from the checkpoint's config.json. The checkpoint here is the trainer's,
    in bf16 or float32. So its config is overridden and its weights are not loaded; the first weight
    update writes every tensor:

    fp8_block: SGLang's "fp8" in blocks of 128x128. weight [out, in], weight_scale_inv
        [out / 128, in / 128]
    fp8_channel: "w8a8_fp8", per channel, activations per token. weight.t(), weight_scale [out, 1];
        of experts not transposed, [E, out, 1]
    fp8_tensor: "compressed-tensors", strategy "tensor". weight.t(), weight_scale []; of experts not
        transposed, [E]

    SGLang's "fp8" without blocks is not used for the last two. On Hopper it expands a scale per
    tensor to all channels, and for experts it has no scales per channel.

    `text_only`: do not build a vision tower.
    """
    overrides: dict[str, Any] = {"language_model_only": True} if text_only else {}
    if quantization is None:
        return {"json_model_override_args": json.dumps(overrides)} if overrides else {}
    settings = CONFIGS[quantization]
    overrides["quantization_config"] = settings
    return {
        "quantization": settings["quant_method"],
        "json_model_override_args": json.dumps(overrides),
        "load_format": "dummy",
    }


def quantise_weights() -> None:
    """Registers the hooks with SGLang's plugin registry, on every device."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method",
        no_kv_scales,
        HookType.AROUND,
    )
    for method in (
        "w8a8_fp8.W8A8Fp8LinearMethod",
        "compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod",
        "compressed_tensors.compressed_tensors.CompressedTensorsFusedMoEMethod",
    ):
        target = f"sglang.srt.layers.quantization.{method}.process_weights_after_loading"
        HookRegistry.register(target, once, HookType.AROUND)


def no_kv_scales(
    original: Callable[..., Any], config: Any, layer: torch.nn.Module, prefix: str
) -> Any:
    """Runs around the choice of a layer's method.

    SGLang would give an fp8 model parameters for scales of keys and values, whatever the cache's
    dtype. No trainer has them, and here the cache has the model's dtype.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    return None if isinstance(layer, RadixAttention) else original(config, layer, prefix)


def once(original: Callable[..., None], method: Any, layer: Any) -> None:
    """Runs around work after loading that transposes weights or merges scales, and lets it happen
    only once. SGLang repeats it at the end of each update. But direct writes write the processed
    form, which must not be processed again.
    """
    if not getattr(layer, "megarl_processed", False):
        original(method, layer)
        layer.megarl_processed = True


LOOK_S = 0.05  # if a child dies sooner after its start, its exit status may be lost
# time for SGLang itself to end all processes of the engine, as it does for some failures
GRACE_S = 0.5


class Children:
    """The children of this process of an engine, which ends when one of them has died.

    Without data-parallel attention, SGLang notices a scheduler that dies before it is ready. But
    the error that it raises does not end the process, since Python waits for the remaining
    children.
    """

    def __init__(self) -> None:
        self._ended_before = ended_for_memory()
        self._children: dict[int, BaseProcess] = {}
        self._printing = threading.Lock()
        self._printed = False

    def watch(self) -> None:
        """Starts a thread that watches them."""
        threading.Thread(target=self._watch, name="children", daemon=True).start()

    def end_with_the_dead(self, wait_s: float) -> None:
        """If a child has died or dies within `wait_s`, says so and ends this process too.

        Otherwise returns.
        """
        deadline = time.monotonic() + wait_s
        failure = self._failure()
        while failure is None:
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_S / 5)
            failure = self._failure()
        with self._printing:
            # says it again: SGLang may have printed much since, and reports show the end of a log
            self._printed = False
        pid, code = failure
        self._tell(pid, code)
        os._exit(128 - code if code < 0 else code)

    def _watch(self) -> None:
        failure = self._failure()
        while failure is None:
            time.sleep(LOOK_S)
            failure = self._failure()
        pid, code = failure
        self._tell(pid, code)  # at once, since SGLang may kill this process too
        time.sleep(GRACE_S)
        self.end_with_the_dead(0.0)

    def _tell(self, pid: int, code: int) -> None:
        """Prints why this process ends, unless it has been printed."""
        with self._printing:
            if not self._printed:
                self._printed = True
                reason = cause(code, self._ended_before)
                print(
                    f"process {pid} of this engine {ending(code)}{reason and f': {reason}'}",
                    file=sys.stderr,
                    flush=True,
                )

    def _failure(self) -> tuple[int, int] | None:
        """The pid and exit code of the first child that has failed; None if none has."""
        self._children |= {
            child.pid: child for child in multiprocessing.active_children() if child.pid is not None
        }
        for pid, child in list(self._children.items()):
            code = child.exitcode
            if code:
                return pid, code
        return None


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.resolved_dict", _hide_keys, HookType.AFTER
    )
    close_sockets()
    quantise_weights()
    seeds.register_hooks(on_cpu=cpu_support.active())
    if cpu_support.active():
        cpu_support.register_hooks()
    elif torch_kernels.enabled():
        torch_kernels.register_hooks()


def _hide_keys(settings: dict[str, Any], *_: object) -> dict[str, Any]:
    """Hides the keys, since SGLang logs its settings, and shows them at /server_info to holders of
    the user key.
    """
    return {
        name: "hidden" if name.endswith("api_key") and value else value
        for name, value in settings.items()
    }
