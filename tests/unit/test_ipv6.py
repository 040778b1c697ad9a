"""Processes of a run reach each other over IPv6 if hosts have no IPv4.

(tests/cpu has a whole run on such hosts.)
"""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from aiohttp import web

from megarl.config.errors import ConfigError
from megarl.generator.client import EngineClient
from megarl.launch import nodes
from megarl.launch.start import network
from megarl.messaging import host as hosts
from megarl.messaging.host import address_towards, in_url, is_loopback, loopback, with_port
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.messaging.messages import WeightsOffer
from megarl.messaging.process_groups import connect_store, listening_store, open_store
from megarl.messaging.rendezvous import EngineAddress, free_ports
from megarl.weight_sync.workers import Workers

pytestmark = pytest.mark.skipif(not hosts._is_here("::1"), reason="this host has no ::1")


def test_addresses_before_a_port_are_in_brackets():
    assert in_url("::1") == "[::1]"
    assert with_port("fd00::7", 80) == "[fd00::7]:80"
    assert with_port("10.0.0.7", 80) == "10.0.0.7:80"
    assert EngineAddress("fd00::7", 80, 81).url == "http://[fd00::7]:80"
    assert address_towards("[::1]:80") == address_towards("http://[::1]:80/path") == "::1"
    assert address_towards("127.0.0.1:80") == "127.0.0.1"
    assert is_loopback("::1") and not is_loopback("fd00::7")


def test_hub_and_peer_meet_at_an_ipv6_address():
    key = RunKey.generate()
    hub = Hub("hub", key, "::1")
    peer = Peer("peer", key, hub.address)
    peer.send(WeightsOffer(3))
    assert hub.receive(WeightsOffer, 10, "an offer") == ("peer", WeightsOffer(3))
    assert hub.address.startswith("tcp://[::1]:") and Workers([], [], hub, 1).address == "::1"
    peer.close()
    hub.close()


def test_stores_and_free_ports_are_at_an_ipv6_address():
    store = listening_store("::1", *free_ports(1, "::1"))
    store.set("key", "value")
    assert connect_store(f"tcp://[::1]:{store.port}", 10).get("key") == b"value"
    file_store, address = open_store("::1")
    file_store.set("key", "of a file")
    assert address.startswith("file://[::1]/")
    assert connect_store(address, 10).get("key") == b"of a file"


async def test_client_reaches_an_engine_at_an_ipv6_address():
    async def version(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": "7"})

    app = web.Application()
    app.router.add_get("/model_info", version)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1, "::1")
    await web.TCPSite(runner, "::1", port).start()
    client = EngineClient(EngineAddress("::1", port, 0).url, "", "")
    try:
        assert await client.version(10) == 7
    finally:
        await client.close()
        await runner.cleanup()


def test_ipv6_address_is_used_only_without_ipv4(monkeypatch):
    def entry(family, address):
        return SimpleNamespace(family=family, address=address)

    linked = entry(socket.AF_INET6, "fe80::1%ib0")
    local = entry(socket.AF_INET6, "fd00::7")
    interfaces = {
        "ib0": [linked, local],
        "ib1": [entry(socket.AF_INET, "10.0.0.7")],
        "eth0": [linked],
    }
    monkeypatch.setattr(nodes.psutil, "net_if_addrs", lambda: interfaces)
    assert nodes.address_of("ib0", 2) == "fd00::7"
    assert nodes.address_of("ib*", 2) == "10.0.0.7"
    assert nodes.interface_with("fd00::7") == "ib0"
    with pytest.raises(ConfigError, match="no network interface"):
        nodes.address_of("eth0", 2)
    assert loopback() == "127.0.0.1"
    monkeypatch.setattr(hosts, "_is_here", lambda address: address == "::1")
    assert loopback() == nodes.address_of(None, 1) == "::1"
    assert network("lo", False, "::1") == {"GLOO_SOCKET_IFNAME": "lo", "MC_USE_IPV6": "1"}
    assert "MC_USE_IPV6" not in network(None, False)
