"""The first process of a sandboxed program: sets limits, leads its calls out of the sandbox, and ends with the program's exit status.

It runs in the sandbox by a Python of its own choice, so it imports the standard library alone, and only this file.
Arguments: a JSON object with `limits` (RLIMIT_… name: value), `socket`, `port` and `network` (leave the host's?), and the command.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def _leave_network() -> None:
    """Goes on in a network of its own, in which there is a loopback device and nothing else. Raises OSError where the kernel forbids it."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no namespaces of users and networks")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return  # the other direction ends too
    finally:
        writer.close()


async def _main(settings: dict, command: list[str]) -> int:
    async def lead_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outer_reader, outer_writer = await asyncio.open_unix_connection(settings["socket"])
        await asyncio.gather(_pipe(reader, outer_writer), _pipe(outer_reader, writer))

    if settings["socket"]:  # the sandbox has a network of its own, in which nobody else listens
        await asyncio.start_server(lead_out, "127.0.0.1", settings["port"])
    try:
        program = await asyncio.create_subprocess_exec(*command, preexec_fn=lambda: _limit(settings["limits"]))
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return 127
    status = await program.wait()
    return status if status >= 0 else 128 - status  # as shells tell of a signal


if __name__ == "__main__":
    own = json.loads(sys.argv[1])
    if own["network"]:
        _leave_network()
    sys.exit(asyncio.run(_main(own, sys.argv[2:])))
