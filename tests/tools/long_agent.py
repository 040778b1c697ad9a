"""What weight updates cost an agent of many turns, with and without async.keep_kv_cache: the table
of docs/asynchrony.md.

One real engine on CPU, with a random Llama. In each turn the agent appends a tool's answer to its
conversation and samples a reply. After every few turns the engine goes through the steps of an
in_flight update; its weights stay as they are. Prints the tokens that the engine prefilled, as it
reports them, and the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
import torch
from sglang_engine import VOCABULARY, make_checkpoint

from megarl.generator.client import EngineClient
from megarl.generator.completions import Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.messaging.rendezvous import free_ports

TIMEOUT_S = 600.0


async def update(fleet: Fleet, client: EngineClient, version: int) -> None:
    """The steps of an update that keeps keys and values, without the writes."""
    await fleet.hold(TIMEOUT_S)
    await client.pause(TIMEOUT_S, "in_place")
    await client.begin_update(TIMEOUT_S)
    await client.end_update(TIMEOUT_S)
    await client.set_version(version, TIMEOUT_S)
    await client.resume(TIMEOUT_S)
    fleet.release(version)


async def episode(
    fleet: Fleet,
    client: EngineClient,
    turns: int,
    tokens: int,
    every: int | None,
    keeps: bool,
    seed: int,
) -> tuple[int, float]:
    """Prefilled tokens, and seconds without updates. `every`: turns between two updates."""
    rng = random.Random(seed)
    generate = fleet.keeping() if keeps else fleet.generate
    reply = tokens // 16
    conversation: list[int] = []
    seconds = 0.0
    fleet.take_prefill()
    for turn in range(turns):
        conversation += [rng.randrange(3, VOCABULARY) for _ in range(tokens - reply)]
        sampling = Sampling(max_tokens=reply, ignore_eos=True, seed=seed + turn)
        began_s = time.perf_counter()
        [completion] = await generate(conversation, sampling, 1)
        seconds += time.perf_counter() - began_s
        conversation += completion.token_ids
        if every and (turn + 1) % every == 0:
            assert fleet.version is not None
            await update(fleet, client, fleet.version + 1)
    computed, cached = fleet.take_prefill()
    return computed - cached, seconds


async def measure(client: EngineClient, turns: int, tokens: int, repeats: int) -> None:
    await client.wait_ready(TIMEOUT_S)
    fleet = Fleet([client], "in_flight")
    await update(fleet, client, 0)
    await episode(fleet, client, 2, tokens, 1, True, seed=0)  # warms up
    seed = 0
    print("| update after | keep_kv_cache | prefilled tokens | seconds |\n|---|---|---|---|")
    for every in (None, 8, 4, 2, 1):
        for keeps in (False, True):
            results = []
            for _ in range(repeats):
                seed += 1000
                results.append(await episode(fleet, client, turns, tokens, every, keeps, seed))
            prefilled = {count for count, _ in results}
            seconds = sorted(seconds for _, seconds in results)[repeats // 2]
            when = f"{every} turns" if every else "never"
            print(
                f"| {when} | {str(keeps).lower()} | {' '.join(map(str, sorted(prefilled)))} "
                f"| {seconds:.2f} |",
                flush=True,
            )
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of a turn")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    context = arguments.turns * arguments.tokens + 64
    with tempfile.TemporaryDirectory(prefix="long-agent-") as folder:
        model = make_checkpoint(
            Path(folder) / "model", 1, torch.float32, False, max_position_embeddings=context
        )
        [port] = free_ports(1)
        keys = EngineKeys.generate()
        settings = EngineSettings(
            str(model),
            "float32",
            port,
            context_length=context,
            max_running_requests=8,
            kv_cache_tokens=4 * context,
            family="llama",
        )
        asyncio.run(run(settings, keys, arguments))


async def run(settings: EngineSettings, keys: EngineKeys, arguments: argparse.Namespace) -> None:
    command, environment = server_command(settings, keys)
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})
    try:
        client = EngineClient(f"http://127.0.0.1:{settings.port}", keys.api, keys.admin)
        await measure(client, arguments.turns, arguments.tokens, arguments.repeats)
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    main()
