"""Measures the cost of a token on its way from an engine's answer to the tensors of a microbatch,
with 16 million tokens a step.

Real: answers as SGLang writes them, over HTTP, read by the generator's client; groups, messages,
hub and peer over encrypted loopback, the buffer, shares of two data-parallel ranks over gloo,
sequences, metrics, tensors. Left out: engines, tokenizer, rewards.

Costs are CPU times of whole processes with all their threads. The generator's cost is per token of
the step. A trainer rank's cost is per token that it trains on; rank 0's includes sending the other
rank its share. The result shows the rank that costs more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from aiohttp import web
from channel_samples import TIMEOUT_S, Trainer, joined_ranks, next_message

from megarl.algorithms.batches import batch_metrics, to_train_sequences
from megarl.base.rollout_types import Batch, Group, Prompt, Sample
from megarl.generator.client import EngineClient
from megarl.generator.completions import Sampling
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.rollouts.buffer import RolloutBuffer
from megarl.rollouts.channel import RolloutsReceiver, RolloutsSender, pack
from megarl.trainer.microbatch import build, plan_microbatches

PROMPTS = 128
N = 16
TOKENS = 8192
PROMPT_TOKENS = 256
DP = 2
MICROBATCH_TOKENS = 16384
VOCABULARY = 128_000
STEPS = 3  # the first does not count: in it, memory is new and code is loaded


@dataclass(frozen=True)
class TokenCosts:
    """CPU time in ns per token: the least of the steps, since other work on the machine can only
    add to it.
    """

    tokens: int  # tokens per step
    wire_bytes: float  # bytes of numbers per token
    generator: dict[str, float]  # activity -> cost
    trainer: dict[str, float]  # activity -> cost, of the rank that costs more

    def facts(self) -> dict[str, Any]:
        generator = sum(self.generator.values())
        trainer = sum(self.trainer.values())
        return {
            "tokens_per_step": self.tokens,
            "wire_bytes_per_token": self.wire_bytes,
            "generator_ns_per_token": generator,
            "generator_parts": self.generator,
            "generator_tokens_per_s": 1e9 / generator,
            "trainer_ns_per_token": trainer,
            "trainer_parts": self.trainer,
        }


def measure_tokens(
    prompts: int = PROMPTS, n: int = N, tokens: int = TOKENS, steps: int = STEPS
) -> TokenCosts:
    """Starts the server of answers, the generator, and the trainer's ranks."""
    context = multiprocessing.get_context("spawn")
    key = RunKey.generate()
    shape = (prompts, n, tokens)
    with (
        tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):

        def start(target: Callable[..., None], *arguments: Any) -> Connection:
            parent_end, child_end = context.Pipe()
            process = context.Process(target=target, args=(child_end, *arguments), daemon=True)
            process.start()
            child_end.close()
            stack.callback(process.join, 10)
            stack.callback(process.kill)
            return parent_end

        url = next_message(start(_serve, n, tokens))
        generator = start(_generate, key, url, shape)
        address = next_message(generator)
        trainers = [
            start(_train, rank, f"{folder}/store", key, address, shape, steps) for rank in range(DP)
        ]
        generated = []
        trained = []
        for step in range(steps):
            generator.send(step)
            trained.append([next_message(trainer) for trainer in trainers])
            generator.send(None)
            generated.append(next_message(generator))
    worst = max(range(DP), key=lambda rank: min(sum(costs[rank].values()) for costs in trained[1:]))
    wire_bytes = generated[-1].pop("wire_bytes")
    for costs in generated[:-1]:
        costs.pop("wire_bytes")
    return TokenCosts(
        prompts * n * tokens,
        wire_bytes,
        _least(generated[1:]),
        _least([costs[worst] for costs in trained[1:]]),
    )


def _least(costs: list[dict[str, float]]) -> dict[str, float]:
    return min(costs, key=lambda step_costs: sum(step_costs.values()))


class Clock:
    """CPU time of this process, lap by lap."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._since
        self._since = now

    def per_token(self, tokens: int) -> dict[str, float]:
        return {name: seconds / tokens * 1e9 for name, seconds in self.laps.items()}


def answer_of(n: int, tokens: int) -> bytes:
    """An engine's answer to n requests with responses of this length; always the same."""
    random = np.random.default_rng(0)
    answers = []
    for _ in range(n):
        logprobs = np.log(random.random(tokens, np.float32)).astype(np.float32).tolist()
        ids = random.integers(0, VOCABULARY, tokens).tolist()
        triples = list(zip(logprobs, ids, [None] * tokens))
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "length", "length": tokens},
            "weight_version": "0",
        }
        meta |= {
            "output_token_logprobs": triples,
            "output_token_logprobs_length": tokens,
            "prompt_tokens": PROMPT_TOKENS,
        }
        answers.append({"output_ids": ids, "meta_info": meta})
    return json.dumps(answers, separators=(",", ":")).encode()


def _serve(pipe: Connection, n: int, tokens: int) -> None:
    """An engine."""
    body = answer_of(n, tokens)

    async def serve() -> None:
        async def answer(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(body=body, content_type="application/json")

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None and isinstance(site._server, asyncio.Server)
        pipe.send(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        await asyncio.Event().wait()

    asyncio.run(serve())


def _generate(pipe: Connection, key: RunKey, url: str, shape: tuple[int, int, int]) -> None:
    """The generator's process.

    For a step number from the pipe it sends that step's groups; for None it returns their costs.
    """
    prompts, n, tokens = shape
    hub = Hub("generator.0", key)
    channel = RolloutsSender(hub)
    pipe.send(hub.address)
    hub.wait(TIMEOUT_S)

    async def generate(step: int, clock: Clock) -> int:
        wire_bytes = 0
        client = EngineClient(url, "", "")
        clock.lap("start")
        for ordinal in range(step * prompts, (step + 1) * prompts):
            prompt = Prompt(ordinal, list(range(PROMPT_TOKENS)), "", "")
            completions = await client.complete([prompt.token_ids] * n, [Sampling(tokens)] * n, 0)
            clock.lap("read answers")
            samples = [
                Sample(c.token_ids, c.logprobs, c.versions, "", float(i % 2), c.finish_reason)
                for i, c in enumerate(completions)
            ]
            packed = pack(Group(prompt, samples))
            wire_bytes += sum(map(len, packed.pieces))
            channel.begun([ordinal], 0)
            channel.finished(packed)
            clock.lap("pack and send")
        await client.close()
        return wire_bytes

    with contextlib.suppress(EOFError):
        while True:
            step = pipe.recv()
            clock = Clock()
            wire_bytes = asyncio.run(generate(step, clock))
            assert pipe.recv() is None
            clock.lap("pack and send")  # includes what was encrypted and written meanwhile
            clock.laps.pop("start")
            count = prompts * n * tokens
            pipe.send({**clock.per_token(count), "wire_bytes": wire_bytes / count})
    hub.close()


class _PlanningTrainer(Trainer):
    """Trainer ranks that plan as the trainer does."""

    def assign(self, batch: Batch) -> list[list[int]]:
        lengths = [
            group.prompt_tokens + sample.tokens
            for group in batch.groups
            for sample in group.samples
        ]
        plans = plan_microbatches(lengths, DP, MICROBATCH_TOKENS)
        return [
            sorted(index for microbatch in plan for index in microbatch.indices) for plan in plans
        ]

    def put_batch(self, batch: Batch, waited_s: float) -> None:
        self.batch = batch
        self.curr_step += 1


def _train(
    pipe: Connection,
    rank: int,
    store: str,
    key: RunKey,
    address: str,
    shape: tuple[int, int, int],
    steps: int,
) -> None:
    torch.set_num_threads(1)
    prompts, n, _ = shape
    trainer: Any = _PlanningTrainer(rank, 0)
    with joined_ranks(store, rank):
        link: Any = Peer("trainer.0", key, address) if rank == 0 else None
        receiver = RolloutsReceiver(
            link, TIMEOUT_S, RolloutBuffer(prompts, None) if rank == 0 else None
        )
        advantages = torch.linspace(-1, 1, prompts * n).view(prompts, n)
        for _ in range(steps):
            clock = Clock()
            receiver.recv(trainer)
            clock.lap("receive a share")
            sequences = [*to_train_sequences(trainer.batch, advantages, False).values()]
            clock.lap("make sequences")
            if rank == 0:
                batch_metrics(trainer.batch, 0)
            clock.lap("metrics")
            lengths = [len(sequence) for sequence in sequences]
            for microbatch in plan_microbatches(lengths, DP, MICROBATCH_TOKENS)[rank]:
                build(microbatch, sequences, torch.device("cpu"))
            clock.lap("make tensors")
            rank_tokens = sum(len(numbers.token_ids) for numbers in trainer.batch.numbers.values())
            pipe.send(clock.per_token(rank_tokens))
        pipe.poll(TIMEOUT_S)  # until the other side has received everything
        if link is not None:
            link.close()


def render_tokens(facts: dict[str, Any]) -> str:
    head = (
        f"of numbers, CPU time a token; a step has {facts['tokens_per_step']:,} tokens of "
        f"{facts['wire_bytes_per_token']:.1f} bytes"
    )
    lines = [head]
    for side in ("generator", "trainer"):
        parts = ", ".join(f"{name} {ns:.1f}" for name, ns in facts[f"{side}_parts"].items())
        line = f"  {side}: {facts[f'{side}_ns_per_token']:.0f} ns ({parts})"
        if side == "generator":
            line += f"; {facts['generator_tokens_per_s'] / 1e6:.1f} million tokens a second"
        lines.append(line)
    return "\n".join(lines)
