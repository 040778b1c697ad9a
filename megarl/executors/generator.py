"""The generator executor: prompts in, a batch of scored groups out, from a fleet of SGLang engines."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from megarl.channels.messages import ProbeReady
from megarl.data.prompts import PromptStream
from megarl.data.tokenizer import load_tokenizer
from megarl.executors.rollout import SingleTurn
from megarl.generator.client import EngineClient, Sampling
from megarl.generator.fleet import Fleet
from megarl.launch.rendezvous import Rendezvous
from megarl.observe.status import StatusBoard
from megarl.observe.trace import TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.rewards.pool import RewardPool
from megarl.types import Batch, Version

PROBE_PROMPTS = 8
PROBE_TOKENS = 32


@dataclass
class GeneratorExecutor:
    """One process that drives all engines over HTTP: what an engine computes never passes through here but as tokens."""

    plan: RunPlan
    rendezvous: Rendezvous
    name: str = "generator"
    rank: int = 0
    curr_step: int = 0
    version: Version = -1  # of the weights in the engines; -1 until the trainer has sent its first

    def init(self) -> None:
        config = self.plan.config
        run_dir = Path(config.run_dir)
        self.status = StatusBoard(run_dir, "generator.0")
        self.trace = TraceWriter(run_dir, "generator.0")
        self.loop = asyncio.new_event_loop()
        self.tokenizer = load_tokenizer(config.model)
        self.prompts = PromptStream.from_config(config.data.train, config, self.tokenizer, self.plan.spec)
        self.rewards = RewardPool(config.reward)
        self.curr_step = self.rendezvous.start_step
        with self.status.waiting("the engines", "start-up"):
            self.loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        config = self.plan.config
        engines = [
            EngineClient(url, self.rendezvous.engine_key, self.rendezvous.engine_admin_key, config.timeouts.request_s)
            for url in self.rendezvous.engine_urls
        ]
        await asyncio.gather(*(engine.wait_ready(config.generator.startup_timeout_s) for engine in engines))
        self.fleet = Fleet(engines)
        self.rollout = SingleTurn(self.fleet, self.tokenizer, self.rewards)

    def set_step(self, step: int) -> None:
        self.status.set(f"batch {step}")

    def step(self) -> None:
        """Generates and scores the batch of `curr_step` under the weights the engines hold."""
        started = time.monotonic()
        with self.trace.span(f"generate batch {self.curr_step}"):
            groups = self.loop.run_until_complete(self._generate(self.curr_step))
        self._batch = Batch(
            step=self.curr_step, groups=groups, generate_s=time.monotonic() - started, generator_wait_s=self.waited_s
        )
        self.curr_step += 1

    async def _generate(self, step: int) -> list:
        rollout = self.plan.config.rollout
        first = step * rollout.prompts_per_step
        prompts = [self.prompts[ordinal] for ordinal in range(first, first + rollout.prompts_per_step)]
        return await asyncio.gather(*(self.rollout(prompt, self.sampling, rollout.n) for prompt in prompts))
