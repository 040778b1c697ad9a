"""Measures how much one driver of many engines can carry: requests, tokens, and calls of a weight
update, in CPU time of its process.

Real: the client, the fleet, the stream and its admission, groups, packing, and the hub, which
encrypts. Emulated: engines, each an HTTP server on its own port that answers as SGLang does, after
the time it would decode; rewards; the trainer, which only receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web
from channel_samples import TIMEOUT_S, next_message
from channel_tokens import PROMPT_TOKENS, answer_of

from megarl.base.rollout_types import Group, Ordinal, Prompt, Sample
from megarl.generator.client import EngineClient
from megarl.generator.completions import Sampling
from megarl.generator.fleet import Fleet
from megarl.launch.processes import raise_limits
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.messaging.messages import GenerateFrom, GroupReady
from megarl.messaging.waiting import Background, Pulse
from megarl.rollouts.channel import RolloutsSender
from megarl.rollouts.stream import Admission, RolloutStream
from megarl.weight_sync.updates import WeightUpdate
from megarl.weight_sync.workers import Workers

LENGTHS = (128, 512, 2048)  # tokens of a response
N = 4  # responses to a prompt, in one request
IN_FLIGHT = 8  # requests at an engine
DECODING_S = 2.0  # seconds to decode a response
ROUNDS = 3  # requests per place in flight; the first makes connections and does not count
GROUP_S = 600.0  # deadline; this machine may have other work
UPDATES = 5
SERVERS = 2  # processes that the engines share


def run(engines: int, as_json: bool) -> None:
    facts = measure(engines)
    print(json.dumps(facts) if as_json else render(facts))


def measure(
    engines: int = 256, lengths: tuple[int, ...] = LENGTHS, decoding_s: float = DECODING_S
) -> dict[str, Any]:
    raise_limits()
    key = RunKey.generate()
    hub = Hub("generator.0", key)
    try:
        with _processes(engines, lengths, decoding_s, key, hub.address) as urls:
            return asyncio.run(_measure(urls, lengths, hub))
    finally:
        hub.close()


@contextlib.contextmanager
def _processes(
    engines: int, lengths: tuple[int, ...], decoding_s: float, key: RunKey, hub: str
) -> Iterator[list[str]]:
    """Starts engines and trainer; yields the addresses of the engines."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pipes = []
        groups = engines * IN_FLIGHT * ROUNDS
        parts = [engines // SERVERS + (number < engines % SERVERS) for number in range(SERVERS)]
        for target, *arguments in [
            *((_serve, part, lengths, decoding_s) for part in parts),
            (_take, key, hub, groups, len(lengths)),
        ]:
            parent_end, child_end = context.Pipe()
            process = context.Process(target=target, args=(child_end, *arguments), daemon=True)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(process.kill)
            pipes.append(parent_end)
        yield [url for pipe in pipes[:SERVERS] for url in next_message(pipe)]


def _serve(pipe: Connection, engines: int, lengths: tuple[int, ...], decoding_s: float) -> None:
    """A process with some of the engines. All answer requests of equal length in the same way."""
    raise_limits()
    bodies = {tokens: answer_of(N, tokens) for tokens in lengths}
    version = ["0"]

    async def generate(request: web.Request) -> web.Response:
        tokens = json.loads(await request.read())["sampling_params"][0]["max_new_tokens"]
        await asyncio.sleep(decoding_s)
        return web.Response(body=bodies[tokens], content_type="application/json")

    async def control(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path == "/update_weight_version":
            version[0] = json.loads(body)["new_version"]
        return web.json_response({"success": True, "message": "", "weight_version": version[0]})

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.post("/generate", generate), web.route("*", "/{path:.*}", control)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        sites = [web.TCPSite(runner, "127.0.0.1", 0) for _ in range(engines)]
        for site in sites:
            await site.start()
        pipe.send([f"http://127.0.0.1:{port}" for _, port in runner.addresses])
        await asyncio.Event().wait()

    asyncio.run(serve())


def _take(pipe: Connection, key: RunKey, hub: str, groups: int, times: int) -> None:
    """Trainer rank 0: asks for groups and receives them, `times` times."""
    peer = Peer("trainer.0", key, hub)
    for _ in range(times):
        peer.send(GenerateFrom(0, []))
        for _ in range(groups):
            peer.receive(GroupReady, GROUP_S, "a group")
    pipe.send(None)


async def _measure(urls: list[str], lengths: tuple[int, ...], hub: Hub) -> dict[str, Any]:
    clients = [EngineClient(url, "", "") for url in urls]
    fleet = Fleet(clients, "in_flight", elastic=True)
    fleet.release(0)
    rows = []
    for tokens in lengths:
        request_s = await _request_s(fleet, tokens, len(urls) * IN_FLIGHT, hub)
        costs = {
            "requests_per_s": 1 / request_s,
            "tokens_per_s": N * tokens / request_s,
            "ns_per_token": request_s / N / tokens * 1e9,
        }
        rows.append({"tokens": tokens, "request_ms": request_s * 1e3, **costs})
    update_s = [await _update_s(clients, version, hub) for version in range(UPDATES)]
    await fleet.close()
    return {
        "engines": len(urls),
        "responses_per_request": N,
        "lengths": rows,
        "update_ms": min(update_s) * 1e3,
    }


async def _request_s(fleet: Fleet, tokens: int, in_flight: int, hub: Hub) -> float:
    """CPU seconds per request, from its start until its group is sent to the trainer."""

    async def roll_out(ordinal: Ordinal) -> Group:
        prompt = Prompt(ordinal, list(range(PROMPT_TOKENS)), "", "")
        completions = await fleet.generate(prompt.token_ids, Sampling(tokens), N)
        return Group(
            prompt,
            [
                Sample(c.token_ids, c.logprobs, c.versions, "", float(i % 2), c.finish_reason)
                for i, c in enumerate(completions)
            ],
        )

    background = Background()
    pulse = Pulse()
    end = in_flight * ROUNDS
    stream = RolloutStream(
        Admission(end, None, in_flight, end), roll_out, RolloutsSender(hub), background, pulse
    )

    async def cpu_until(count: int) -> float:
        await pulse.until(lambda: stream.sent >= count)
        return time.process_time()

    background.start(stream.run(TIMEOUT_S), "rollout stream")
    stream.put_version(0)
    start_s = await background.beside(cpu_until(in_flight))
    cpu_s = await background.beside(cpu_until(end)) - start_s
    await background.close()
    return cpu_s / (end - in_flight)


async def _update_s(clients: list[EngineClient], version: int, hub: Hub) -> float:
    """CPU seconds of all calls to the engines' HTTP servers in an update."""
    start_s = time.process_time()
    update = WeightUpdate(
        Workers(clients, [1] * len(clients), hub, TIMEOUT_S), version + 1, in_place=True
    )
    await update.open(version)
    await update.close()
    return time.process_time() - start_s


def render(facts: dict[str, Any]) -> str:
    """One line for each length, and one for an update."""
    n = facts["responses_per_request"]
    lines = [
        f"{facts['engines']} engines, {IN_FLIGHT} requests of {n} responses at each; CPU time of "
        "their one driver"
    ]
    for row in facts["lengths"]:
        cost = f"{row['request_ms']:.2f} ms a request, {row['ns_per_token']:.0f} ns a token"
        capacity = (
            f"{row['requests_per_s']:,.0f} requests and {row['tokens_per_s'] / 1e6:.2f} "
            "million tokens a second"
        )
        lines.append(f"  {row['tokens']:>5} tokens a response: {cost}; a core carries {capacity}")
    return "\n".join(
        [
            *lines,
            f"  a weight update: {facts['update_ms']:.0f} ms for the calls that pause, open, "
            "close and resume",
        ]
    )
