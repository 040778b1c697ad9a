"""The sockets between SGLang's own processes, which SGLang makes with our hooks."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from functools import partial
from pathlib import Path

import pytest
import zmq

from megarl.generator import cpu_support, hooks

ARRIVES_S = 10
NEVER_S = 1


class FileCreator:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def network(monkeypatch):
    cpu_support.install()
    from sglang.srt.utils import network

    monkeypatch.setenv(hooks.SOCKET_KEY, hooks.socket_key("the admin key"))
    return network


@pytest.fixture
def context():
    context = zmq.Context()
    context.linger = 0  # strangers' messages are never received
    yield context
    context.destroy()


def test_only_a_peer_with_the_key_gets_a_message_through(network, context, tmp_path, monkeypatch):
    make = partial(hooks._with_key, network.get_zmq_socket)
    port, bound = hooks._bound_with_key(network.get_zmq_socket_on_host, context, zmq.PULL)
    address = f"tcp://127.0.0.1:{port}"
    marker = tmp_path / "marker"
    payload = pickle.dumps(FileCreator(marker))

    keyless = network.get_zmq_socket(context, zmq.PUSH, address, False)  # SGLang's own way
    monkeypatch.setenv(hooks.SOCKET_KEY, hooks.socket_key("another key"))
    wrong_key = make(context, zmq.PUSH, address, False)
    for stranger in (keyless, wrong_key):
        stranger.sndtimeo = 1000  # after its refusal it would wait for ever for another peer
        with contextlib.suppress(zmq.Again):
            stranger.send(payload)
    assert not bound.poll(NEVER_S * 1000)

    monkeypatch.setenv(hooks.SOCKET_KEY, hooks.socket_key("the admin key"))
    right_key = make(context, zmq.PUSH, address, False)
    right_key.send(payload)
    assert bound.poll(ARRIVES_S * 1000)
    bound.recv_pyobj().close()
    assert marker.exists(), "what arrives is unpickled"
    assert not bound.poll(NEVER_S * 1000)


def test_engine_without_keys_of_sockets_does_not_start(network, monkeypatch):
    with pytest.raises(RuntimeError, match="anybody could connect to them"):
        hooks.check_hooks()
    monkeypatch.setattr(network, "get_zmq_socket", partial(hooks._with_key, network.get_zmq_socket))
    monkeypatch.setattr(
        network,
        "get_zmq_socket_on_host",
        partial(hooks._bound_with_key, network.get_zmq_socket_on_host),
    )
    hooks.check_hooks()


def test_socket_key_does_not_contain_the_admin_key():
    keys = {hooks.socket_key(admin) for admin in ("a", "b")}
    assert len(keys) == 2 and all(len(key) == 40 for key in keys)


def test_mapped_files_lie_beside_the_sockets():
    path = hooks._in_own_folder(lambda name: f"/dev/shm/{name}.shm", "x")
    assert os.path.dirname(path) == tempfile.gettempdir()
