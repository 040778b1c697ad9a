"""Closes the sockets of SGLang's own processes to everybody else on the host and the network.

With data-parallel attention these processes communicate over TCP, and unpickle what arrives. SGLang gives the sockets no key, so each gets
one here.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from megarl.messaging.host import loopback, with_port

SOCKET_KEY = "MEGARL_ENGINE_SOCKET_KEY"  # environment variable of all processes of an engine, on all its nodes
_NETWORK = "sglang.srt.utils.network."


def socket_key(admin_key: str) -> str:
    """Derives the secret CURVE key of an engine's sockets. `admin_key` cannot be recovered from it."""
    return z85.encode(hashlib.sha256(b"sockets of " + admin_key.encode()).digest()).decode()


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_NETWORK + "get_zmq_socket", _with_key, HookType.AROUND)
    HookRegistry.register(_NETWORK + "get_zmq_socket_on_host", _bound_with_key, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", _in_own_folder, HookType.AROUND)


def check_hooks() -> None:
    """Raises RuntimeError if SGLang's sockets would have no key: SGLang only logs a hook that it could not apply."""
    from sglang.srt.utils import network

    with zmq.Context() as context:
        port, bound = network.get_zmq_socket_on_host(context, zmq.PULL, loopback())
        connected = network.get_zmq_socket(context, zmq.PUSH, f"tcp://{with_port(loopback(), port)}", False)
        assert isinstance(connected, zmq.Socket)  # a tuple only where no endpoint is given
        keyed = all(socket.getsockopt(zmq.MECHANISM) == zmq.CURVE for socket in (bound, connected))
        bound.close(linger=0)
        connected.close(linger=0)
    if not keyed:
        raise RuntimeError("this SGLang makes its sockets in another way than ours could be given keys: anybody could speak to them")


class _KeyedContext:
    """A ZeroMQ context that gives every socket the engine's key.

    A CURVE handshake begins with a box that takes the binding side's public key to make. That key is kept secret too, so SGLang's contexts
    need no authenticator.
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
    """Runs around the making of a socket. Sockets in the file system need no key: their folder is open to this user only."""
    if endpoint is not None and endpoint.startswith("ipc://"):
        return original(context, kind, endpoint, bind)
    return original(_KeyedContext(context, endpoint is None or bind), kind, endpoint, bind)


def _bound_with_key(original: Callable[..., Any], context: zmq.Context, *arguments: Any, **named: Any) -> Any:
    return original(_KeyedContext(context, binds=True), *arguments, **named)


def _in_own_folder(original: Callable[[str], str], name: str) -> str:
    """Moves a file that an engine's processes map to the folder of their sockets, so that it goes with them; in /dev/shm it would stay."""
    return os.path.join(tempfile.gettempdir(), os.path.basename(original(name)))
