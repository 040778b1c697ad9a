"""A live engine with speculative decoding: whatever drafts, samples follow the policy, and
log-probs equal Hugging Face's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from multi_token_checkpoint import own_names, take_last_layer
from safetensors.torch import load_file, save_file
from sglang_engine import Engine, hf_logprobs, hf_model, make_checkpoint, start_engine

from megarl.config.schema import GeneratorConfig, RunConfig
from megarl.generator.completions import Completion, Sampling
from megarl.speculative.plan import arguments
from megarl.speculative.settings import SpeculativeConfig

pytestmark = pytest.mark.long

LAYERS = 2
STEPS = 3
TOKENS = 40
PROMPTS = [[1, *((3 + 37 * (i + j)) % 400 for j in range(6 + i))] for i in range(4)]


def bigrams(folder: Path) -> Path:
    """A model whose layers add nothing, so that a token depends only on the previous one.

    Its multi-token prediction layer knows that, and drafts the likeliest token.
    """
    make_checkpoint(
        folder / "whole", 1, torch.float32, False, "glm4_moe", num_hidden_layers=LAYERS + 1
    )
    file = take_last_layer("glm4_moe", folder) / "model.safetensors"
    tensors = load_file(file)
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values.zero_()
    norm, _, projection, last = (tensors[name] for name in own_names("glm4_moe", LAYERS))
    norm.fill_(1)
    projection.copy_(torch.eye(len(norm), 2 * len(norm)))
    last.copy_(tensors["model.norm.weight"])
    tensors["lm_head.weight"] *= 4
    save_file(tensors, file, {"format": "pt"})
    return folder / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bigrams(tmp_path_factory.mktemp("bigrams"))


def started(
    model: Path, algorithm: str, tp: int, log: Path
) -> contextlib.AbstractContextManager[Engine]:
    drafts = GeneratorConfig(speculative=SpeculativeConfig(algorithm, steps=STEPS))
    return contextlib.contextmanager(start_engine)(
        model, "float32", tp, log, **arguments(RunConfig(generator=drafts))
    )


@pytest.fixture(scope="module", params=[("nextn", 2), ("ngram", 1)], ids=["nextn", "ngram"])
def sampled(
    request: Any, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[float, list[list[Completion]]]]]:
    """Samples by temperature and prompt."""
    algorithm, tp = request.param
    log = tmp_path_factory.mktemp("log") / "engine.log"

    async def sample(engine: Engine) -> dict[float, list[list[Completion]]]:
        client = engine.client()
        completions = {}
        await client.wait_ready(180, log, engine.died)
        for temperature in (0.0, 1.0, 0.6):
            sampling = Sampling(max_tokens=TOKENS, temperature=temperature, ignore_eos=True)
            completions[temperature] = [
                await client.complete([prompt] * 12, [sampling] * 12, None) for prompt in PROMPTS
            ]
        await client.close()
        return completions

    with started(model, algorithm, tp, log) as engine:
        yield algorithm, asyncio.run(sample(engine))


def test_logprobs_are_the_models(sampled: Any, model: Path) -> None:
    reference = hf_model(model, torch.float32)
    for temperature, of_prompts in sampled[1].items():
        for prompt, completions in zip(PROMPTS, of_prompts, strict=True):
            for completion in completions[:2]:
                tokens = completion.token_ids.tolist()
                assert len(tokens) == TOKENS
                logprobs = hf_logprobs(reference, prompt + tokens, temperature or 1.0)[
                    len(prompt) - 1 :
                ]
                expected = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
                torch.testing.assert_close(
                    torch.tensor(completion.logprobs.tolist()), expected, rtol=0, atol=1e-5
                )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drafts_do_not_change_what_is_sampled(
    sampled: Any, model: Path, temperature: float
) -> None:
    """The mean log-prob of tokens sampled from a distribution is minus its entropy.

    The sum is off by less than four standard deviations. If drafts were accepted too often, or the
    likeliest tokens taken, it would be off by tens.
    """
    reference = hf_model(model, torch.float32)
    off = 0.0
    variance = 0.0
    for prompt, completions in zip(PROMPTS, sampled[1][temperature], strict=True):
        for completion in completions:
            tokens = completion.token_ids.tolist()
            logprobs = hf_logprobs(reference, prompt + tokens, temperature)[
                len(prompt) - 1 :
            ].double()
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            off += (logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0] + entropy).sum().item()
            variance += (
                ((logprobs.exp() * logprobs.square()).sum(-1) - entropy.square()).sum().item()
            )
    assert abs(off) < 4 * variance**0.5


def test_drafts_are_kept_where_they_are_right(sampled: Any) -> None:
    """Greedy decoding accepts all drafts of the layer, and n-grams that were seen before.

    With a temperature some drafts are accepted.
    """
    algorithm, completions = sampled
    for temperature, of_prompts in completions.items():
        drafted, accepted, verified = map(
            sum,
            zip(
                *(completion.drafts for same_prompt in of_prompts for completion in same_prompt),
                strict=True,
            ),
        )
        assert drafted == STEPS * verified and verified < len(PROMPTS) * 12 * TOKENS
        assert 0 < accepted < drafted or (algorithm == "nextn" and temperature == 0)
        if algorithm == "nextn" and temperature == 0:
            assert accepted == drafted
