"""Seeds of samples, and what makes engines on CPUs independent of the batch."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.base.rollout_types import Prompt
from megarl.config.load import load_config
from megarl.generator.completions import Completion, Sampling
from megarl.generator.cpu_support import attention, batch_invariance
from megarl.generator.fleet import Draft
from megarl.generator.seeds import (
    Seeds,
    drawn,
    filter_first,
    give_seeds,
    gumbel_noise,
    murmur_hash32,
    seed_of,
)
from megarl.plan.checks import check_deterministic
from megarl.rollouts.environments.base import RolloutContext, Transcript
from megarl.rollouts.rollout import CheckedRollout

MASK = 0xFFFFFFFF


def murmur(*blocks: int) -> int:
    """MurmurHash3 (32 bits) of 32-bit blocks, as Austin Appleby published it."""
    h = 0
    for block in blocks:
        k = block * 0xCC9E2D51 & MASK
        k = (k << 15 | k >> 17) * 0x1B873593 & MASK
        h ^= k
        h = ((h << 13 | h >> 19) & MASK) * 5 + 0xE6546B64 & MASK
    h ^= 4 * len(blocks)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def test_seed_is_the_same_in_every_process() -> None:
    """So it cannot depend on PYTHONHASHSEED."""
    assert seed_of(0, 7) == 5168729340229012721
    assert seed_of(0, "evaluation", "aime") == 7341731171221724262


def test_seeds_of_prompts_samples_and_turns_do_not_collide() -> None:
    seeds = {
        seed_of(seed_of(seed_of(0, prompt), sample), turn)
        for prompt in range(500)
        for sample in range(16)
        for turn in range(10)
    }
    assert len(seeds) == 80_000
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_requests_carry_seeds() -> None:
    assert Sampling(8, seed=5).parameters()["sampling_seed"] == 5
    assert "sampling_seed" not in Sampling(8).parameters()
    drawn = [Sampling(8, seed=5).of_sample(index).seed for index in range(4)]
    assert len({*drawn}) == 4
    assert Sampling(8).of_sample(1).seed is None


def test_continued_response_keeps_its_seed() -> None:
    draft = Draft(Sampling(8, seed=5))
    assert draft.next_sampling(3) == Sampling(3, seed=5)
    draft.add(Completion([1, 2, 3], [-1.0] * 3, [0] * 3, "length"))
    assert draft.next_sampling(None) == Sampling(5, seed=5)


def test_seeds_count_requests_of_the_same_tokens() -> None:
    first = Seeds(0)
    repeated = Seeds(0)
    assert (first.next([1]), first.next([2])) == (repeated.next([1]), repeated.next([2])), (
        "a run repeats them"
    )
    late = first.next([1])
    repeated.next([3])
    assert repeated.next([1]) == late, "whatever was asked for in between"
    assert len({Seeds(0).next([1]), late, Seeds(1).next([1])}) == 3


def seeds_asked(rollout: Any, run_seed: int | None = 0, ordinal: int = 3) -> list[int | None]:
    seeds = []

    async def generate(prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        seeds.append(sampling.seed)
        return [Completion([5], [-1.0], [0], "stop")] * n

    context = RolloutContext(
        SimpleNamespace(decode=str, decode_turn=str), generate, None, None, 1.0
    )  # type: ignore[arg-type]
    checked = CheckedRollout("own", rollout, context, timeout_s=5, vocab_size=10)
    asyncio.run(checked(Prompt(ordinal, [1, 2], "", ""), Sampling(4, seed=run_seed), 3))
    return seeds


@pytest.mark.parametrize("indexed", [True, False])
def test_samples_of_a_rollout_have_seeds_of_their_own(indexed: bool) -> None:
    """Also where a rollout knows nothing about seeds, and where it makes settings of its own."""

    async def rollout(
        context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[Any]:
        async def one(index: int) -> Any:
            transcript = Transcript(
                prompt, context.tokenizer, sampling.max_tokens, index if indexed else None
            )
            [completion] = await context.generate(
                transcript.token_ids, transcript.turn(sampling), 1
            )
            transcript.add_policy(completion)
            await context.generate(prompt.token_ids, Sampling(2), 1)
            return transcript.sample(0.0)

        return await asyncio.gather(*map(one, range(n)))

    seeds = seeds_asked(rollout)
    assert len({*seeds}) == 6
    assert seeds == seeds_asked(rollout)
    assert not {*seeds} & {*seeds_asked(rollout, ordinal=4)}
    assert not {*seeds} & {*seeds_asked(rollout, run_seed=1)}
    assert {*seeds_asked(rollout, run_seed=None)} == {None}


def test_hash_equals_murmur() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, 2**32])
    positions = torch.tensor([0, 7, 100_000, 3])
    hashes = murmur_hash32(seeds.to(torch.uint64), positions, torch.arange(5)).tolist()
    pairs = zip(seeds.tolist(), positions.tolist())
    assert hashes == [
        [murmur(seed & MASK, seed >> 32, position, column) for column in range(5)]
        for seed, position in pairs
    ]


def test_noise_is_gumbels() -> None:
    noise = gumbel_noise(torch.arange(100), torch.arange(100), 1000)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(1.645, abs=0.05)


@pytest.mark.parametrize(
    ("spread", "dtype"), [(0.1, torch.float32), (3.0, torch.float64), (30.0, torch.float32)]
)
def test_drawn_tokens_are_the_likeliest_under_noise(spread, dtype) -> None:
    """Also with tokens that a filter has excluded.

    SGLang gives float64 if one of a batch's distributions is truncated.
    """
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.log_softmax(spread * torch.randn(64, 3000, generator=generator), dim=-1).to(
        dtype
    )
    logprobs[::2, 100:] = -torch.inf
    seeds = torch.randint(2**63 - 1, (64,), generator=generator)
    positions = torch.randint(100_000, (64,), generator=generator)
    likeliest = gumbel_noise(seeds, positions, 3000).add_(logprobs).argmax(dim=1, keepdim=True)
    assert torch.equal(drawn(logprobs, seeds, positions), likeliest)


def test_requests_without_seed_get_random_ones() -> None:
    info = SimpleNamespace(temperatures=torch.ones(3, 1))
    requests = [
        SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed))
        for seed in (7, None, None)
    ]
    give_seeds(info, object, SimpleNamespace(reqs=requests))
    first, *random_seeds = info.sampling_seed.tolist()
    assert first == 7
    assert len({42, 7, *random_seeds}) == 4


def test_min_p_is_applied_before_the_other_filters() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]])

    def original(
        probs: torch.Tensor, top_ks: Any, top_ps: Any, min_ps: Any, need_min_p: bool
    ) -> torch.Tensor:
        assert not need_min_p
        return probs

    filtered = filter_first(original, probs, None, None, torch.tensor([0.2, 0.6]), True)
    assert (filtered > 0).tolist() == [[True, True, True, False], [True, True, False, False]]


def test_rows_of_a_product_do_not_depend_on_other_rows() -> None:
    torch.manual_seed(0)
    rows = torch.randn(70, 96)
    matrix = torch.randn(64, 96).t()
    bias = torch.randn(64)
    product = batch_invariance.mm(rows, matrix)
    assert torch.allclose(product, rows @ matrix, atol=1e-4)
    for first, last in ((0, 1), (0, 3), (5, 9), (16, 33), (1, 70), (0, 0)):
        part = rows[first:last]
        assert torch.equal(batch_invariance.mm(part, matrix), product[first:last])
        assert torch.equal(batch_invariance.addmm(bias, part, matrix), bias + product[first:last])


def test_deterministic_refuses_what_chance_would_decide() -> None:
    config = load_config("configs/quickstart.yaml", ["deterministic=true"])
    assert not [*check_deterministic(config)]
    several = ["deterministic=true", "generator.groups.a.engines=1", "generator.groups.b.engines=1"]
    drafts = ["deterministic=true", "generator.speculative.algorithm=ngram"]
    adapters = ["deterministic=true", "lora.rank=4"]
    for overrides, key in (
        (several, "generator.groups"),
        (drafts, "speculative"),
        (adapters, "lora.rank"),
    ):
        [problem] = check_deterministic(load_config("configs/quickstart.yaml", overrides))
        assert problem.startswith("deterministic=true: must be false with ")
        assert key in problem


def test_padding_of_keys_depends_on_the_own_length_alone() -> None:
    new = torch.tensor([1, 1, 1, 1])
    total = torch.tensor([5, 40, 16, 17])
    assert [*attention._chunks(new[:1], total[:1], elements_per_token=8, width=44)] == [
        (slice(None), 16)
    ], "without copies"
    chunks = [
        (part.tolist(), keys)
        for part, keys in attention._chunks(new, total, elements_per_token=8, width=44)
    ]
    assert chunks == [([0, 2], 16), ([1], 44), ([3], 32)]
