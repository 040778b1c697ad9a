"""What SGLang's own processes speak by, closed to everybody else on the host and on the network.

With data-parallel attention they speak over TCP, and unpickle what arrives. SGLang gives those sockets no key: here each gets one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

SOCKET_KEY = "MEGARL_ENGINE_SOCKET_KEY"  # environment of all processes of an engine, on all its nodes
_NETWORK = "sglang.srt.utils.network."


def socket_key(admin_key: str) -> str:
    """The secret CURVE key of an engine's sockets, by which the key it is made from cannot be found."""
    return z85.encode(hashlib.sha256(b"sockets of " + admin_key.encode()).digest()).decode()


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_NETWORK + "get_zmq_socket", _with_key, HookType.AROUND)
    HookRegistry.register(_NETWORK + "get_zmq_socket_on_host", _bound_with_key, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", _in_own_folder, HookType.AROUND)


def check_hooks() -> None:
    """SGLang logs a hook that it could not apply, and goes on. Raises RuntimeError where its sockets would have no key."""
    from sglang.srt.utils import network

    with zmq.Context() as context:
        port, bound = network.get_zmq_socket_on_host(context, zmq.PULL)
        connected = network.get_zmq_socket(context, zmq.PUSH, f"tcp://127.0.0.1:{port}", False)
        assert isinstance(connected, zmq.Socket)  # a tuple only where no endpoint is given
        keyed = all(socket.getsockopt(zmq.MECHANISM) == zmq.CURVE for socket in (bound, connected))
        bound.close(linger=0)
        connected.close(linger=0)
    if not keyed:
        raise RuntimeError("this SGLang makes its sockets in another way than ours could be given keys: anybody could speak to them")


class _KeyedContext:
    """A ZeroMQ context of which every socket has the engine's key.

    CURVE begins with a box that only who knows the public key of the binding side can make. That one is told to nobody either: so
    there need be no authenticator in each of SGLang's contexts.
    """

    def __init__(self, context: zmq.Context, binds: bool):
        self._context, self._binds = context, binds

    def socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        secret = os.environ[SOCKET_KEY].encode()
        socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
        if self._binds:
            socket.curve_server = True
        else:
            socket.curve_serverkey = zmq.curve_public(secret)
        return socket


def _with_key(original: Callable[..., Any], context: zmq.Context, kind: int, endpoint: str | None = None, bind: bool = True) -> Any:
    """Around the making of a socket. Those in the file system have its modes (the folder is this user's alone)."""
    if endpoint is not None and endpoint.startswith("ipc://"):
        return original(context, kind, endpoint, bind)
    return original(_KeyedContext(context, endpoint is None or bind), kind, endpoint, bind)


def _bound_with_key(original: Callable[..., Any], context: zmq.Context, *arguments: Any, **named: Any) -> Any:
    return original(_KeyedContext(context, binds=True), *arguments, **named)


def _in_own_folder(original: Callable[[str], str], name: str) -> str:
    """Around the path of a file that the processes of an engine map: beside their sockets it goes with them, in /dev/shm it would stay."""
    return os.path.join(tempfile.gettempdir(), os.path.basename(original(name)))
