"""The generator executor: prompts in, a batch of scored groups out, from a fleet of SGLang engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megarl.messaging.messages import ProbeReady
from megarl.data.prompts import eval_prompts, train_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.executors.evaluate import pass_at_1
from megarl.executors.rollout import eval_sampling, open_fleet, open_rollout, train_sampling
from megarl.generator.fleet import Fleet
from megarl.launch.rendezvous import Rendezvous
from megarl.observe.evaluations import write_result
from megarl.observe.status import StatusBoard
from megarl.observe.trace import TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.types import Batch, Group, Version

T = TypeVar("T")

PROBE_PROMPTS = 8
PROBE_TOKENS = 32


@dataclass
class GeneratorExecutor:
    """One process that drives all engines over HTTP. Of what they compute, only tokens and log-probs pass through here."""

    plan: RunPlan
    rendezvous: Rendezvous
    name: str = "generator"
    rank: int = 0
    curr_step: int = 0
    version: Version = -1  # of the weights in the engines; -1 until the trainer has sent its first
    waited_s: float = 0.0  # held back before the coming batch; the weights channel adds to it
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def init(self) -> None:
        config = self.plan.config
        self.status = StatusBoard(Path(config.run_dir), "generator.0")
        self.trace = TraceWriter(Path(config.run_dir), "generator.0")
        self.tokenizer = load_tokenizer(config.model)
        self.prompts = train_prompts(config, self.tokenizer)
        self.eval_prompts = eval_prompts(config, self.tokenizer)
        self.sampling = train_sampling(self.plan, self.tokenizer)
        self.curr_step = self.rendezvous.start_step
        self._resources = AsyncExitStack()
        with self.status.waiting("the engines", "start-up"):
            self.fleet = self.run(open_fleet(self.plan, self.rendezvous, self._resources))
        self.rollout = self.run(open_rollout(self.plan, self.fleet, self.tokenizer, self._resources))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs one coroutine of this process to its end."""
        return self.loop.run_until_complete(coroutine)

    def set_step(self, step: int) -> None:
        self.status.set(f"batch {step}")

    def step(self) -> None:
        """Generates and scores the batch of `curr_step` under the weights that the engines hold."""
        if self._evaluation_due():
            self._evaluate()
        started = time.monotonic()
        with self.trace.span(f"generate batch {self.curr_step}"):
            groups = self.run(self._generate(self.curr_step))
        generate_s = time.monotonic() - started
        self._batch = Batch(step=self.curr_step, groups=groups, generate_s=generate_s, generator_wait_s=self.waited_s)
        self.waited_s = 0.0
        self.curr_step += 1

    async def _generate(self, step: int) -> list[Group]:
        """All prompts of a step at once: the engines batch continuously, and scoring overlaps with what still runs."""
        rollout = self.plan.config.rollout
        ordinals = range(step * rollout.prompts_per_step, (step + 1) * rollout.prompts_per_step)
        return await asyncio.gather(*(self.rollout(self.prompts[ordinal], self.sampling, rollout.n) for ordinal in ordinals))

    def get_output(self) -> Batch:
        return self._batch

    def get_model(self) -> Fleet:
        """The engines: where the weights channel writes to."""
        return self.fleet

    def probe(self) -> ProbeReady:
        """A few fresh samples with their log-probs, for the trainer to score under the same weights."""
        sampling = msgspec.structs.replace(self.sampling, max_tokens=min(PROBE_TOKENS, self.sampling.max_tokens))
        prompts = [self.prompts[ordinal] for ordinal in range(PROBE_PROMPTS)]

        async def sample() -> list[Any]:
            return await asyncio.gather(*(self.fleet.generate(prompt.token_ids, sampling, 1) for prompt in prompts))

        completions = [completion for (completion,) in self.run(sample())]
        return ProbeReady(
            version=self.version,
            token_ids=[prompt.token_ids + completion.token_ids for prompt, completion in zip(prompts, completions)],
            prompt_lengths=[len(prompt.token_ids) for prompt in prompts],
            logprobs=[completion.logprobs for completion in completions],
        )

    def _evaluation_due(self) -> bool:
        every = self.plan.config.eval.every
        return bool(self.eval_prompts) and (self.curr_step == 0 or (every > 0 and self.curr_step % every == 0))

    def _evaluate(self) -> None:
        self.status.set(f"evaluating version {self.version}")
        with self.trace.span(f"evaluate version {self.version}"):
            result = self.run(pass_at_1(self.rollout, self.eval_prompts, eval_sampling(self.plan, self.tokenizer)))
        write_result(self.plan.config.run_dir, self.version, result)

    def save_checkpoint(self) -> None:
        """The trainer's checkpoint holds all: batches are made anew from their prompts' ordinals."""

    def shutdown(self) -> None:
        if self.eval_prompts:
            self._evaluate()
        self.status.set("done")
        self.run(self._resources.aclose())
        self.trace.close()
