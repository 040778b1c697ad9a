"""Hosts on one machine: network namespaces that reach each other over shaped links.

They share the file system. For tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack

RATE = "200mbit"
BURST = "128kb"
LATENCY = "50ms"
INTERFACE = "eth0"


def missing() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(
        ["ip", "netns", "add", f"megarl-{os.getpid()}-try"], capture_output=True, text=True
    )
    if tried.returncode != 0:
        return f"no network namespaces: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", f"megarl-{os.getpid()}-try"], check=True)
    return ""


class Hosts:
    """Namespaces 0, 1, …, whose `INTERFACE`s have the addresses 10.77.0.1, 10.77.0.2, …; one more
    namespace is the switch between them. With `ipv6` the addresses are fd77::1, fd77::2, …, and
    there is no IPv4.
    """

    def __init__(self, count: int = 2, rate: str = RATE, ipv6: bool = False) -> None:
        self.count = count
        self.rate = rate
        self.ipv6 = ipv6
        self.names = [f"megarl-{os.getpid()}-{host}" for host in range(count + 1)]

    def __enter__(self) -> Hosts:
        with ExitStack() as undo:
            for name in self.names:
                _run("ip", "netns", "add", name)
                undo.callback(_run, "ip", "netns", "delete", name)
            self._inside(self.count, "ip", "link", "add", "switch", "type", "bridge")
            self._inside(self.count, "ip", "link", "set", "switch", "up")
            for host in range(self.count):
                self._connect(host)
            self._undo = undo.pop_all()
        return self

    def _connect(self, host: int) -> None:
        port = f"port{host}"
        switch = self.names[self.count]
        pair = f"ip link add {INTERFACE} type veth peer name {port} netns {switch}"
        self._inside(host, *pair.split())
        self._inside(self.count, "ip", "link", "set", port, "master", "switch")
        self._inside(self.count, "ip", "link", "set", port, "up")
        address = [f"fd77::{host + 1}/64", "nodad"] if self.ipv6 else [f"10.77.0.{host + 1}/24"]
        self._inside(host, "ip", "address", "add", *address, "dev", INTERFACE)
        self._inside(host, "ip", "link", "set", INTERFACE, "up")
        self._inside(host, "ip", "link", "set", "lo", "up")
        if self.ipv6:
            self._inside(host, "ip", "address", "delete", "127.0.0.1/8", "dev", "lo")
        shape = f"tc qdisc add dev {INTERFACE} root tbf rate {self.rate}"
        self._inside(host, *shape.split(), "burst", BURST, "latency", LATENCY)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def command(self, host: int, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *argv]

    def cut(self) -> None:
        """From now on packets are silently lost."""
        self._inside(0, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "blackhole")

    def sent_bytes(self, host: int) -> int:
        shown = self._inside(host, "cat", f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
        return int(shown)

    def _inside(self, host: int, *argv: str) -> str:
        return _run(*self.command(host, list(argv)))


def _run(*argv: str) -> str:
    completed = subprocess.run(argv, capture_output=True, text=True)
    if completed.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {completed.stderr.strip()}")
    return completed.stdout
