"""The first process of a sandboxed program: sets limits, leads its calls out of the sandbox, and ends with the program's exit status.

It runs in the sandbox by a Python of its own choice, so it imports the standard library alone, and only this file.
Arguments: a JSON object with `limits` (RLIMIT_… name: value), `socket` and `port`, and the command.
"""

import asyncio
import json
import resource
import sys


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
    sys.exit(asyncio.run(_main(json.loads(sys.argv[1]), sys.argv[2:])))
