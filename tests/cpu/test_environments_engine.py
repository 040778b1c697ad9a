"""Hundreds of concurrent samples of several turns, through one real SGLang engine."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_engine import hf_logprobs, hf_model, start_engine

from megarl.base.rollout_types import Prompt, Sample
from megarl.config.schema import ModelConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.generator.completions import Completion, Sampling
from megarl.generator.fleet import Fleet
from megarl.rewards.score import Score, ScoreRequest
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.environments.tool_calls import ToolCalls
from megarl.rollouts.rollout import CheckedRollout

GROUPS = 64
N = 4
# N samples of each group at once; RUNNING of them decode together, as start_engine sets it
RUNNING = 64
MAX_TOKENS = 48


class Watch:
    """Records requests in flight, and samples in the order in which they finish; holds one up."""

    def __init__(self) -> None:
        self.in_flight = self.peak = 0
        self.finished: list[int] = []
        self.held: list[int] = []
        self.all_others_are_done = asyncio.Event()


class WatchedToolCalls(ToolCalls):
    """Records when samples end."""

    watch: Watch

    async def _sample(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, index: int
    ) -> Sample:
        sample = await super()._sample(context, prompt, sampling, index)
        self.watch.finished.append(prompt.ordinal)
        if len(self.watch.finished) == GROUPS * N - 1:
            self.watch.all_others_are_done.set()
        return sample


async def hold_up_the_first(argument: str) -> str:
    """An async tool that answers at once, except its first call: that waits in one sample of 256
    until all others are done.
    """
    watch = WatchedToolCalls.watch
    if not watch.held:
        watch.held.append(len(watch.finished))
        await watch.all_others_are_done.wait()
    return argument[::-1]


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    log = tmp_path_factory.mktemp("engine") / "engine.0.log"
    yield from start_engine(model, "float32", 1, log, log_level="info", decode_log_interval=1)


async def roll_out(engine: Any, model: Path) -> tuple[Watch, list[list[Sample]]]:
    tokenizer = load_tokenizer(ModelConfig(path=str(model)))
    watch = WatchedToolCalls.watch = Watch()
    client = engine.client()
    fleet = Fleet([client])

    async def generate(prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        watch.in_flight += 1
        watch.peak = max(watch.peak, watch.in_flight)
        try:
            return await fleet.generate(prompt_ids, sampling, n)
        finally:
            watch.in_flight -= 1

    async def score(request: ScoreRequest) -> Score:
        return Score(float(request.answer in request.response))

    async def no_worker(*call: Any) -> Any:
        raise AssertionError("an async tool runs in the event loop")

    context = RolloutContext(tokenizer, generate, score, no_worker, tool_timeout_s=120)
    tool = f"{__name__}:hold_up_the_first"
    rollout = WatchedToolCalls(
        tokenizer,
        tool=tool,
        call_open="<",
        call_close=">",
        result="={result};",
        max_calls=3,
        max_result_tokens=8,
    )
    checked = CheckedRollout("tool_calls", rollout, context, timeout_s=150, vocab_size=500)
    sampling = Sampling(MAX_TOKENS, stop_token_ids=tokenizer.eos_ids)
    texts = [f"{i}*{i + 1}=" for i in range(GROUPS)]
    prompts = [
        Prompt(ordinal=i, token_ids=tokenizer.encode_prompt(text), text=text, answer="7")
        for i, text in enumerate(texts)
    ]
    try:
        await client.wait_ready(120, engine.log, engine.died)
        groups = await asyncio.gather(*(checked(prompt, sampling, N) for prompt in prompts))
    finally:
        await fleet.close()
    return watch, [(group.prompt, group.samples) for group in groups]


@pytest.mark.timeout(900)
def test_256_samples_run_at_once_each_at_its_own_pace(engine: Any, model: Path) -> None:
    watch, groups = asyncio.run(roll_out(engine, model))
    samples = [(prompt, sample) for prompt, group in groups for sample in group]
    assert len(samples) == len(watch.finished) == GROUPS * N and watch.in_flight == 0

    assert watch.peak == GROUPS * N, "no sample waited for another before it asked"
    running = [int(count) for count in re.findall(r"#running-req: (\d+)", engine.log.read_text())]
    assert max(running) == RUNNING, "the engine was full"
    [finished_before] = watch.held
    assert finished_before < GROUPS * N - 1, (
        "others were still to finish when the slow call began, and they did"
    )

    several = [(prompt, sample) for prompt, sample in samples if sample.summary().turns > 1]
    assert len(several) > GROUPS and max(sample.summary().turns for _, sample in several) > 2
    reference = hf_model(model, torch.float32)
    for prompt, sample in several[:24]:
        expected = hf_logprobs(reference, [*prompt.token_ids, *sample.token_ids])[
            len(prompt.token_ids) - 1 :
        ]
        expected = expected.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        trained = torch.tensor(sample.policy_mask, dtype=torch.bool)
        assert (torch.tensor(sample.logprobs) - expected)[trained].abs().max() < 1e-5, (
            "each turn continued just the tokens before it"
        )
        assert not torch.tensor(sample.logprobs)[~trained].any()
