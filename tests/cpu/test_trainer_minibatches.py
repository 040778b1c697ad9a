"""Mini-batches and epochs on real gloo ranks, against a plain PyTorch loop with Hugging Face's
model in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import batch_of
from plain_training import (
    WARMED_UP,
    adamw,
    assert_same_weights,
    learning_rate,
    optimizer_step,
    policy_mask,
    weight_files,
    weights_of,
)
from trainer_cases import VOCAB, save_model
from trainer_processes import saved, spawn
from trainer_reference import load_float64

# after trainer_reference, which makes it importable without CUDA
from transformers import PreTrainedModel

from megarl.algorithms.batches import cut_into_minibatches
from megarl.base.rollout_types import Batch, Group, Prompt, Sample
from megarl.config.errors import RunError

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
GROUPS = 4
MINIBATCHES = 2
EPOCHS = 2
SEED = 5
TEMPERATURE = 0.7
CAP = 2.0
BETA = 0.5
BONUS = 0.05
ALGORITHMS = {
    "behavior": ["algorithm.name=aipo", "algorithm.rho=1.5"],
    "proximal": [
        "algorithm.name=aipo",
        "algorithm.rho=1.5",
        "algorithm.ratio=proximal",
        "algorithm.kl_coef=0.1",
    ],
    "decoupled": [
        "algorithm.name=grpo",
        "algorithm.ratio=decoupled",
        f"algorithm.behavior_cap={CAP}",
    ],
    "proximal_rloo": [
        "algorithm.name=proximal_rloo",
        "algorithm.ratio=proximal",
        "algorithm.kl=reward",
        f"algorithm.kl_coef={BETA}",
    ],
    "entropy": [
        "algorithm.name=aipo",
        "algorithm.rho=1.5",
        f"algorithm.entropy_coefficient={BONUS}",
        "algorithm.mask_truncated=true",
    ],
    "online_dpo": ["algorithm.name=online_dpo", f"algorithm.beta={BETA}"],
}
# with the KL divergence, which also acts if advantages are 0
PENALISED = ("proximal", "proximal_rloo")
LAYOUTS = {"dp2": {"dp": 2}, "tp2": {"tp": 2}}
# A loss sees only its own rank's samples, not the layout. So two of the losses suffice to test the
# sums over ranks.
CASES = [
    ("behavior", "dp2"), ("behavior", "tp2"), ("proximal", "tp2"), ("decoupled", "dp2"),
    ("proximal_rloo", "dp2"), ("proximal_rloo", "tp2"),
    ("entropy", "dp2"), ("online_dpo", "tp2"),
]  # fmt: skip
RESUMED = [("behavior", "dp2"), ("proximal", "tp2"), ("decoupled", "dp2"), ("online_dpo", "tp2")]


def logprobs_of(model: PreTrainedModel, prompt: Any, tokens: Any) -> torch.Tensor:
    """[T]: log-probs of the response's tokens."""
    ids = torch.tensor([*prompt, *tokens])
    scores = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(dim=-1)
    return scores.gather(-1, ids[1:, None])[len(prompt) - 1 :, 0]


def entropies_of(model: PreTrainedModel, prompt: Any, tokens: Any) -> torch.Tensor:
    """[T]: entropies over the whole vocabulary at the response's tokens."""
    scores = (
        model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    ).log_softmax(dim=-1)
    return -(scores.exp() * scores).sum(dim=-1)


def random_batches(model: PreTrainedModel) -> list[Batch]:
    """Batches sampled from nearly the model's distribution; some responses were cut at their limit.

    In the second batch all groups except one have equal rewards, so one mini-batch trains nothing.
    """
    generator = torch.Generator().manual_seed(1)
    batches = []
    for step in range(3):
        groups = []
        for ordinal in range(GROUPS):
            prompt = torch.randint(VOCAB, (2 + ordinal % 2,), generator=generator).tolist()
            rewards = [1.0, 1.0, 1.0] if step == 1 and ordinal else [1.0, 0.5, -0.5]
            samples = []
            for number, reward in enumerate(rewards):
                tokens = torch.randint(
                    VOCAB, (2 + (3 * ordinal + 5 * number + step) % 9,), generator=generator
                ).tolist()
                with torch.no_grad():
                    mu = logprobs_of(model, prompt, tokens) + 0.6 * torch.randn(
                        len(tokens), generator=generator
                    )
                # the first response has an environment's tokens
                mask = [bool(number) or place % 3 < 2 for place in range(len(tokens))]
                samples.append(
                    Sample(
                        tokens,
                        mu.float().numpy(),
                        [0] * len(tokens),
                        "",
                        reward,
                        "length" if number == 1 and ordinal % 2 else "stop",
                        mask,
                    )
                )
            groups.append(Group(Prompt(GROUPS * step + ordinal, prompt, "", ""), samples))
        batches.append(batch_of(groups, step=step))
    return batches


def objective(
    ratio: str,
    now: torch.Tensor,
    prox: torch.Tensor,
    mu: torch.Tensor,
    first: torch.Tensor,
    advantage: float,
) -> torch.Tensor:
    """[T]: each token's objective, to be maximised, as published.

    `first`: the log-probs under the first weights.
    """
    if ratio != "decoupled":  # AIPO
        weight = (now - (prox if ratio == "proximal" else mu)).exp().clamp(max=1.5).detach()
        penalty = 0.0 if ratio != "proximal" else 0.1 * weight * (now - first).square() / 2
        return weight * advantage * now - penalty
    r = (now - prox).exp()
    lag = (prox - mu).exp()
    clipped = torch.minimum(r * advantage, r.clamp(0.8, 1.2) * advantage)
    return lag * (lag <= CAP) * (clipped if advantage > 0 else clipped.clamp(min=3 * advantage))


def of_responses(
    name: str, rewards: list[float], now: torch.Tensor, prox: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """A prompt's loss, as published, from the log-probs [n] of its whole responses."""
    if name == "online_dpo":
        gap = (now - first)[0] - (now - first)[2]  # between best and worst
        return -torch.log(torch.sigmoid(BETA * gap)) if len(set(rewards)) > 1 else 0 * gap
    r = (now - prox).exp()
    of_each = torch.tensor(rewards, dtype=torch.float64) - BETA * (prox - first)
    a = (3 * of_each - of_each.sum()) / 2  # minus the mean of the two others
    return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).mean()


def plain_loop(
    folder: Path, batches: list[Batch], ratio: str
) -> list[tuple[list[tuple[float, float, float]], dict[str, torch.Tensor]]]:
    """For each batch: (loss, gradient norm, learning rate) of each optimizer step, and the weights
    after the last one.
    """
    model = load_float64(folder)
    start = load_float64(folder)
    batch_results = []
    position = 0
    adam = adamw(model, WARMED_UP)
    for batch in batches:
        optimizer_steps = []
        numbers = batch.numbers
        n = 3
        masks = {place: policy_mask(sample) for place, sample in numbers.items()}
        mu = {place: torch.tensor(s.logprobs, dtype=torch.float64) for place, s in numbers.items()}
        with torch.no_grad():
            prox = {
                place: logprobs_of(model, s.prompt_ids, s.token_ids) for place, s in numbers.items()
            }
            first = {
                place: logprobs_of(start, s.prompt_ids, s.token_ids) for place, s in numbers.items()
            }
        rewards = torch.tensor(
            [sample.reward for sample in batch.samples], dtype=torch.float64
        ).view(GROUPS, n)
        advantages = rewards - rewards.mean(dim=1, keepdim=True)
        if ratio == "decoupled":
            advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-6)
        for minibatch in cut_into_minibatches(GROUPS, MINIBATCHES, EPOCHS, SEED, batch.step):
            loss = torch.zeros((), dtype=torch.float64)
            tokens = 0
            for place in (n * group + i for group in minibatch for i in range(n)):
                if ratio == "entropy" and batch.samples[place].finish_reason == "length":
                    continue
                now = logprobs_of(model, numbers[place].prompt_ids, numbers[place].token_ids)
                terms = objective(
                    ratio,
                    now,
                    prox[place],
                    mu[place],
                    first[place],
                    advantages.flatten()[place].item(),
                )[masks[place]]
                if ratio == "entropy":
                    terms = (
                        terms
                        + BONUS
                        * entropies_of(model, numbers[place].prompt_ids, numbers[place].token_ids)[
                            masks[place]
                        ]
                    )
                loss = loss - (terms.mean() if ratio == "decoupled" else terms.sum())
                tokens += int(masks[place].sum())
            loss = loss / (n * len(minibatch) if ratio == "decoupled" else tokens)
            if ratio in ("online_dpo", "proximal_rloo"):
                loss = torch.zeros((), dtype=torch.float64)
                for places in ([n * group + i for i in range(n)] for group in minibatch):
                    now = [
                        logprobs_of(model, numbers[place].prompt_ids, numbers[place].token_ids)
                        for place in places
                    ]
                    scores = (
                        now,
                        [prox[place] for place in places],
                        [first[place] for place in places],
                    )
                    sums = [
                        torch.stack([row[masks[place]].sum() for place, row in zip(places, rows)])
                        for rows in scores
                    ]
                    loss = loss + of_responses(
                        ratio, [batch.samples[place].reward for place in places], *sums
                    ) / len(minibatch)
            position += 1
            rate = learning_rate(WARMED_UP, position, total=12)
            norm = optimizer_step(model, adam, WARMED_UP, loss, rate)
            optimizer_steps.append((loss.item(), norm, rate))
        batch_results.append((optimizer_steps, weights_of(model)))
    return batch_results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all files of the ranks, and their model and batches."""
    out = tmp_path_factory.mktemp("minibatches")
    (out / "hf").mkdir()
    save_model("untied", out / "hf")
    torch.save(random_batches(load_float64(out / "hf")), out / "batches.pt")
    of_all = {
        "model": str(out / "hf"),
        "batches": str(out / "batches.pt"),
        "config": str(CONFIG),
        "optimizer": WARMED_UP,
    }
    common = [
        f"rollout.prompts_per_step={GROUPS}",
        "rollout.n=3",
        f"rollout.temperature={TEMPERATURE}",
        f"seed={SEED}",
    ]
    several = [*common, f"trainer.minibatches={MINIBATCHES}", f"trainer.epochs={EPOCHS}"]
    small = {"max_tokens_per_microbatch": 24}

    def scenario(run: str, name: str, layout: str, overrides: list[str]) -> dict[str, Any]:
        return {
            "run": run,
            "name": name,
            "topology": LAYOUTS[layout],
            "trainer": small,
            "overrides": overrides,
            **of_all,
        }

    cases = [
        scenario(
            "several_steps", f"{ratio}.{layout}{suffix}", layout, [*several, *ALGORITHMS[ratio]]
        )
        for suffix, cases_of_suffix in (("", CASES), (".resumed", RESUMED))
        for ratio, layout in cases_of_suffix
    ]
    alone = [
        scenario("one_optimizer_step", f"one.{layout}", layout, [*common, *ALGORITHMS["decoupled"]])
        for layout in LAYOUTS
    ]
    spawn(2, out, [*cases, *alone])
    return out


@pytest.fixture(scope="module")
def batches(runs: Path) -> list[Batch]:
    return torch.load(runs / "batches.pt", weights_only=False)


@pytest.mark.parametrize(("ratio", "layout"), CASES)
def test_batches_of_several_steps_equal_a_plain_loop(
    runs: Path, batches: list[Batch], ratio: str, layout: str
) -> None:
    """Compares losses, gradient norms and learning rates of every optimizer step, and the weights
    after every batch.
    """
    ranks = saved(runs, f"{ratio}.{layout}")
    assert len(ranks) == 2
    # the ratio of a whole response multiplies the errors of up to ten tokens
    rel = 1e-3 if ratio == "proximal_rloo" else 1e-4
    for step, (expected, weights) in enumerate(plain_loop(runs / "hf", batches, ratio)):
        assert max(norm for _, norm, _ in expected) > WARMED_UP["clip_grad"]
        for rank in ranks:
            optimizer_steps, metrics = rank["told"][step]
            for actual, want in zip(optimizer_steps, expected, strict=True):
                # terms of about 1 may cancel
                assert actual == pytest.approx(want, rel=rel, abs=rel / 100)
            assert metrics["optimizer_steps"] == 4 and metrics["optimizer_steps/empty"] == (
                EPOCHS if step == 1 and ratio not in (*PENALISED, "entropy") else 0
            )
            assert ("kl/mean" in metrics) == (ratio in (*PENALISED, "online_dpo")), (
                "which have a reference"
            )
            assert metrics.get("pairs/fraction") == (
                (0.25 if step == 1 else 1.0) if ratio == "online_dpo" else None
            )
            if ratio == "decoupled":
                assert (
                    0 < metrics["behavior_ratio/capped_fraction"] < 0.5
                    and 0 < metrics["is_ratio/clipped_fraction"] < 0.9
                )
        assert_same_weights(runs / f"{ratio}.{layout}.{step}.hf", weights)


@pytest.mark.parametrize(("ratio", "layout"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(runs: Path, ratio: str, layout: str) -> None:
    """Bit for bit."""
    for uninterrupted, resumed in zip(
        saved(runs, f"{ratio}.{layout}"), saved(runs, f"{ratio}.{layout}.resumed"), strict=True
    ):
        assert (
            resumed["told"] == uninterrupted["told"][2:]
            and resumed["held"] == uninterrupted["held"][2:]
        )
    last = f"{ratio}.{layout}"
    assert weight_files(runs / f"{last}.2.hf") == weight_files(runs / f"{last}.resumed.2.hf")


def test_ranks_held_no_more_than_they_trained_on(runs: Path) -> None:
    first, second = saved(runs, "behavior.dp2")
    for first_held, second_held in zip(first["held"], second["held"], strict=True):
        assert first_held and second_held and first_held != second_held
    assert set(first["held"][0]) | set(second["held"][0]) == set(range(3 * GROUPS))
    assert set(first["held"][1]) | set(second["held"][1]) == {0, 1, 2}, (
        "only one group has unequal rewards"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_optimizer_step_needs_no_proximal_scores(runs: Path, layout: str) -> None:
    for rank in saved(runs, f"one.{layout}"):
        scored = rank["scored"]
        left_out = rank["left_out"]
        assert scored["loss"] == pytest.approx(left_out["loss"], rel=1e-6)
        assert scored["sums"] == pytest.approx(left_out["sums"], rel=1e-6)
        assert scored["sums"]["behavior_ratio_capped"] > 0
        for name, grad in scored["grads"].items():
            torch.testing.assert_close(
                grad, left_out["grads"][name], rtol=1e-5, atol=1e-7, equal_nan=True
            )


def test_step_of_other_tokens_than_its_samples_is_refused() -> None:
    """Every optimizer step of these tests checks that the count itself is right."""
    from megarl.trainer.step import StepResult

    result = StepResult(
        loss=0.0,
        grad_norm=0.0,
        sums={},
        sequences=2,
        tokens=36,
        entropy=0.0,
        learning_rate=0.0,
        padded=0,
        routing={},
    )
    result.check_tokens(36)
    with pytest.raises(
        RunError, match="made of 36 tokens, but its samples have 37; its weights are not used"
    ):
        result.check_tokens(37)
