"""Strangers cannot join process groups, and cannot reach stores.

The sockets are real ones of this host.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.messaging.members import members_only
from megarl.messaging.process_groups import connect_store, open_store

STRANGER = 54_321
CONNECTS = (
    f"import encodings.idna, os, socket, sys; os.setresuid({STRANGER}, {STRANGER}, {STRANGER}); "
    "s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print('connected', "
    "flush=True); sys.stdin.read()"
)


def gloo_group(store: dist.Store, size: int) -> list[dist.ProcessGroupGloo]:
    with ThreadPoolExecutor(size) as pool:
        opening = [
            pool.submit(dist.ProcessGroupGloo, store, rank, size, timedelta(seconds=20))
            for rank in range(size)
        ]
        return [group.result(20) for group in opening]


def listening_ports() -> set[int]:
    import psutil

    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_a_gloo_group_that_has_met_takes_no_further_connections():
    before = listening_ports()
    with members_only():
        groups = gloo_group(dist.HashStore(), 2)
    ports = listening_ports() - before
    assert len(ports) >= 2
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.3)
    values = [torch.full((1 << 20,), float(rank)) for rank in range(2)]
    for work in [group.allreduce([value]) for group, value in zip(groups, values)]:
        work.wait(timedelta(seconds=20))
    assert all((value == 1).all() for value in values)


def test_listeners_of_before_are_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with members_only():
            pass
        socket.create_connection(listener.getsockname(), timeout=5).close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: it takes a second user")
def test_a_stranger_who_connected_early_is_refused():
    """Gloo would accept it as the rank whose number it sends."""
    refused = pytest.raises(
        RuntimeError, match=f"user {STRANGER} of this host has connected to a process group"
    )
    with refused, members_only(), socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        argv = [sys.executable, "-c", CONNECTS, str(listener.getsockname()[1])]
        stranger = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        connection, _ = listener.accept()
        open_listener = socket.socket(fileno=os.dup(listener.fileno()))
        assert stranger.stdout.readline() == b"connected\n"
    stranger.communicate(timeout=10)
    connection.close()
    open_listener.close()


def test_on_one_host_a_store_is_a_file_that_nobody_else_can_open():
    ports = listening_ports()
    store, address = open_store("127.0.0.1")
    assert listening_ports() == ports
    folder = Path(address.removeprefix("file://127.0.0.1")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    second_store = connect_store(address, 5)
    second_store.set("key", b"value")
    assert store.get("key") == b"value"
    del store, second_store
    assert not folder.exists()


def test_between_hosts_a_store_listens_on_their_network_alone():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        host = probe.getsockname()[0]
    store, address = open_store(host)
    assert address == f"tcp://{host}:{store.port}"
    connect_store(address, 5).set("key", b"value")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5)
