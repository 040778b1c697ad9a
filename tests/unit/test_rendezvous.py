"""Ports for processes that start later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megarl.messaging import rendezvous
from megarl.messaging.rendezvous import free_ports

LOW, HIGH = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())


@pytest.mark.skipif(
    LOW <= 20_000, reason="this host leaves few ports outside of the ephemeral range"
)
def test_free_ports_are_distinct_and_never_ephemeral():
    ports = free_ports(100)
    assert len(set(ports)) == 100
    assert not any(LOW <= port <= HIGH for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


def test_taken_ports_are_skipped_and_a_lack_is_reported(monkeypatch, tmp_path):
    (tmp_path / "range").write_text("10002 65535\n")
    monkeypatch.setattr(rendezvous, "EPHEMERAL_RANGE", tmp_path / "range")
    with socket.socket() as first, socket.socket() as second:
        for listener, port in ((first, 10_000), (second, 10_001)):
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue  # another process has it, so it is taken too
        with pytest.raises(
            RuntimeError, match="1 free ports are needed on 127.0.0.1, but there are only 0"
        ):
            free_ports(1)
