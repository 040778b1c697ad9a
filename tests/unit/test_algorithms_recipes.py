"""Recipes by name: their settings, and their losses over whole batches against autograd of the
published objectives in float64.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from losses import F64, gradient, packed_loss_of

from megarl.algorithms.recipes import ignores_age, problems
from megarl.algorithms.registry import make_algorithm
from megarl.config.algorithms import ALGORITHMS, PUBLISHED
from megarl.config.errors import ConfigError
from megarl.config.load import dump_config, load_config
from megarl.config.schema import AlgorithmConfig, published

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
LENGTHS = [3, 9, 1, 5, 2, 7, 4, 8]
N = 4
VOCAB = 6  # of the responses to two prompts


class PublishedObjectives:
    """A batch of two prompts with four responses each, of different lengths; and the papers'
    objectives, response by response.
    """

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(LENGTHS)
        self.logits = torch.randn(tokens, VOCAB, generator=generator, dtype=F64).requires_grad_()
        token_ids = torch.randint(VOCAB, (tokens, 1), generator=generator)
        scores = torch.log_softmax(self.logits, -1)
        self.logprobs = scores.gather(-1, token_ids)[:, 0]
        self.entropy = -(scores.exp() * scores).sum(-1)
        self.prox = self.logprobs.detach() + 0.3 * torch.randn(
            tokens, generator=generator, dtype=F64
        )
        self.mu = self.prox + 0.8 * torch.randn(tokens, generator=generator, dtype=F64)
        self.ref = self.logprobs.detach() + 0.5 * torch.randn(
            tokens, generator=generator, dtype=F64
        )
        self.rewards = torch.tensor([[1.0, 0.0, 0.5, -1.0], [2.0, 0.0, 0.0, 0.0]], dtype=F64)

    def parts(self, values: torch.Tensor) -> list[torch.Tensor]:
        return list(values.split(LENGTHS))

    def of_name(self, name: str) -> Any:
        """The objective, to be maximised."""
        r = self.rewards
        centred = r - r.mean(1, keepdim=True)
        normalized = (centred / (r.std(1, keepdim=True) + 1e-6)).flatten()
        ratios = [part.exp() for part in self.parts(self.logprobs - self.mu)]
        total = sum(LENGTHS)
        count = len(LENGTHS)

        def clipped(ratio: torch.Tensor, a: torch.Tensor, low: float, high: float) -> torch.Tensor:
            return torch.minimum(ratio * a, ratio.clamp(low, high) * a)

        def surrogates(advantages: torch.Tensor, high: float = 1.2) -> list[torch.Tensor]:
            return [clipped(ratio, a, 0.8, high) for ratio, a in zip(ratios, advantages)]

        def weighed_lag(weight) -> list[torch.Tensor]:
            of_prox = self.parts((self.logprobs - self.prox).exp())
            lag = self.parts((self.prox - self.mu).exp())
            return [
                weight(k) * clipped(ratio, a, 0.8, 1.2)
                for ratio, k, a in zip(of_prox, lag, normalized)
            ]

        match name:
            # DeepSeekMath, equation 3; the KL term's gradient has the token's ratio, since mu
            # samples the tokens
            case "grpo":
                kl = self.parts(
                    0.04 * ((self.ref - self.logprobs).exp() - 1 - (self.ref - self.logprobs))
                )
                weighed = [ratio.detach().clamp(max=1.2) * term for ratio, term in zip(ratios, kl)]
                return sum((s - k).mean() for s, k in zip(surrogates(normalized), weighed)) / count
            case "dr_grpo":  # without 1/|o| and the standard deviation
                return sum(s.sum() for s in surrogates(centred.flatten())) / count
            case "dapo":
                return sum(s.sum() for s in surrogates(normalized, 1.28)) / total
            case "gspo":
                means = [part.mean().exp() for part in self.parts(self.logprobs - self.mu)]
                terms = [clipped(mean, a, 0.9997, 1.0004) for mean, a in zip(means, normalized)]
                return sum(terms) / count
            case "cispo" | "aipo":
                cap = 5.0 if name == "cispo" else 4.0
                advantages = normalized if name == "cispo" else centred.flatten()
                terms = [
                    (ratio.detach().clamp(max=cap) * a * logprob).sum()
                    for ratio, a, logprob in zip(ratios, advantages, self.parts(self.logprobs))
                ]
                return sum(terms) / total
            case "icepop":
                weighed = weighed_lag(lambda k: k * ((k >= 0.5) & (k <= 5.0)))
                return sum(s.mean() for s in weighed) / count
            case "tis":
                return sum(s.sum() for s in weighed_lag(lambda k: k.clamp(max=2.0))) / total
            case "rloo":
                baseline = (r.sum(1, keepdim=True) - r) / (N - 1)
                advantages = (r - baseline).flatten()
                terms = [a * part.sum() for a, part in zip(advantages, self.parts(self.logprobs))]
                return sum(terms) / count
            case "reinforce_pp_baseline":
                advantages = (centred / (centred.std() + 1e-6)).flatten()
                return sum(s.sum() for s in surrogates(advantages)) / total
        raise AssertionError(name)


def settings_of(recipe: str) -> dict:
    return {
        key.removeprefix("algorithm."): value
        for key, value in published(recipe).items()
        if key.startswith("algorithm.")
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", PUBLISHED)
@pytest.mark.parametrize("bonus", [0.0, 0.02])
def test_recipe_is_the_published_objective(recipe: str, seed: int, bonus: float) -> None:
    """Value and gradient over the whole batch, whose responses have different lengths.

    An entropy bonus has the same mean.
    """
    batch = PublishedObjectives(seed)
    settings = {**settings_of(recipe), "entropy_coefficient": bonus}
    algorithm = make_algorithm(AlgorithmConfig(**settings))
    advantages = (
        algorithm.advantages(batch.rewards).flatten().repeat_interleave(torch.tensor(LENGTHS))
    )
    out = packed_loss_of(
        LENGTHS,
        batch.logprobs,
        batch.mu,
        advantages,
        torch.ones(sum(LENGTHS), dtype=torch.bool),
        batch.ref,
        batch.prox,
        batch.entropy,
        **settings,
    )
    loss = out.loss / algorithm.denominator(sum(LENGTHS), len(LENGTHS))
    objective = batch.of_name(recipe)
    if bonus:
        mean = {
            "token": batch.entropy.mean(),
            "sequence": sum(part.mean() for part in batch.parts(batch.entropy)) / len(LENGTHS),
        }
        objective = objective + bonus * mean.get(
            settings["loss_mean"], batch.entropy.sum() / len(LENGTHS)
        )
    torch.testing.assert_close(loss, -objective, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        gradient(loss, batch.logits), gradient(-objective, batch.logits), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_resolved_recipe_is_written_and_read_back(recipe: str, tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"algorithm.recipe={recipe}"])
    assert list(problems(config.algorithm)) == []
    written = yaml.safe_load(dump_config(config))
    assert written["algorithm"]["recipe"] == recipe
    for key, value in PUBLISHED[recipe].items():
        section, _, name = key.rpartition(".")
        assert written[section or "algorithm"][name] == value
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.yaml") == config


def test_settings_win_over_the_recipe(tmp_path: Path) -> None:
    """A recipe on the command line replaces that of the file."""
    tree = yaml.safe_load(QUICKSTART.read_text())
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**tree, "algorithm": {"recipe": "dapo", "rho": 1.4}}))
    config = load_config(path, ["rollout.dynamic_sampling=false"])
    dapo = config.algorithm
    assert (dapo.name, dapo.rho, dapo.rho_min) == ("grpo", 1.4, 0.8)
    assert dapo.mask_truncated and not config.rollout.dynamic_sampling
    cispo = load_config(path, ["algorithm.kl_coef=0.1", "algorithm.recipe=cispo"]).algorithm
    assert (cispo.name, cispo.rho, cispo.kl_coef) == ("aipo", 5.0, 0.1)
    assert cispo.dual_clip is None and not cispo.mask_truncated
    assert load_config(path, ["algorithm.recipe=null"]).algorithm == AlgorithmConfig(rho=1.4)


@pytest.mark.parametrize(("override", "hint"), [
    ("algorithm.recipe=dpao", "did you mean dapo?"),
    ("algorithm.name=dapo", "did you mean algorithm.recipe=dapo?"),
    ("algorithm.name=cipso", "did you mean algorithm.recipe=cispo?"),
    ("algorithm.name=gpro", "did you mean grpo?"),
    ("algorithm.recipe=ppo", "did you mean algorithm.name=ppo?"),
])  # fmt: skip
def test_mistyped_name_gets_the_recipe_as_a_hint(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(QUICKSTART, [override])
    names = PUBLISHED if ".recipe=" in override else ALGORITHMS
    assert hint in str(error.value) and ", ".join(names) in str(error.value)


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_page_of_algorithms_lists_the_settings_of_a_recipe(recipe: str) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{recipe}` (recipe) |"))
    for key, value in PUBLISHED[recipe].items():
        shown = value
        if isinstance(value, bool):
            shown = str(value).lower()
        elif isinstance(value, float):
            shown = f"{value:g}"
        assert f"`{key}={shown}`" in row, f"{key}={shown}"


def test_masked_entropy_has_no_gradient() -> None:
    batch = PublishedObjectives(0)
    mask = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    mask[:5] = True
    zeros = torch.zeros(sum(LENGTHS), dtype=F64)
    out = packed_loss_of(
        LENGTHS,
        batch.logprobs,
        batch.mu,
        zeros,
        mask,
        entropy=batch.entropy,
        entropy_coefficient=0.5,
    )
    loss_gradient = gradient(out.loss, batch.logits)
    torch.testing.assert_close(
        loss_gradient, gradient(-0.5 * batch.entropy[:5].sum(), batch.logits), rtol=1e-12, atol=0
    )
    assert not loss_gradient[5:].any()
    assert not make_algorithm(AlgorithmConfig(entropy_coefficient=0.5)).skip_zero
    assert math.isclose(out.loss.item(), -0.5 * batch.entropy[:5].sum().item())


MEASURED = ("aipo", "reinforce", "rloo", "grpo", "gspo", "icepop", "proximal_rloo", "ppo")


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        (name, ratio)
        for name in MEASURED
        for ratio in ALGORITHMS[name].ratios
        if ratio != "decoupled"
    ],
)
def test_losses_that_ignore_the_age_of_tokens_are_known(name: str, ratio: str):
    """The gradient tells: of tokens with pi/mu of 0.05, 1 and 20, good ones and bad ones."""
    gradients = []
    for advantage in (-1.0, 1.0):
        for mu in (-2.0, -5.0, -8.0):
            logprobs = torch.tensor([-5.0], dtype=F64, requires_grad=True)
            output = packed_loss_of(
                [1],
                logprobs,
                torch.tensor([mu], dtype=F64),
                torch.tensor([advantage], dtype=F64),
                torch.tensor([True]),
                proximal=logprobs.detach(),
                name=name,
                ratio=ratio,
            )
            gradients.append(abs(gradient(output.loss, logprobs).item()))
    is_ignored = max(gradients) == pytest.approx(min(gradients))
    assert ignores_age(AlgorithmConfig(name=name, ratio=ratio)) == is_ignored
