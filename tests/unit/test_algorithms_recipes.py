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

from megarl.algorithms.recipes import problems
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


class Published:
    """A batch of two prompts with four responses each, of different lengths; and the papers'
    objectives, response by response.
    """

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(LENGTHS)
        self.logits = torch.randn(tokens, VOCAB, generator=generator, dtype=F64).requires_grad_()
        chosen = torch.randint(VOCAB, (tokens, 1), generator=generator)
        scores = torch.log_softmax(self.logits, -1)
        self.logprobs = scores.gather(-1, chosen)[:, 0]
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

        def weighed_lag(matters) -> list[torch.Tensor]:
            of_prox = self.parts((self.logprobs - self.prox).exp())
            lag = self.parts((self.prox - self.mu).exp())
            return [
                matters(k) * clipped(ratio, a, 0.8, 1.2)
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
                return (
                    sum(clipped(mean, a, 0.9997, 1.0004) for mean, a in zip(means, normalized))
                    / count
                )
            case "cispo" | "aipo":
                most, advantages = (
                    (5.0, normalized) if name == "cispo" else (4.0, centred.flatten())
                )
                terms = zip(ratios, advantages, self.parts(self.logprobs))
                return (
                    sum(
                        (ratio.detach().clamp(max=most) * a * logprob).sum()
                        for ratio, a, logprob in terms
                    )
                    / total
                )
            case "icepop":
                return (
                    sum(s.mean() for s in weighed_lag(lambda k: k * ((k >= 0.5) & (k <= 5.0))))
                    / count
                )
            case "tis":
                return sum(s.sum() for s in weighed_lag(lambda k: k.clamp(max=2.0))) / total
            case "rloo":
                others = (r.sum(1, keepdim=True) - r) / (N - 1)
                return (
                    sum(
                        a * part.sum()
                        for a, part in zip((r - others).flatten(), self.parts(self.logprobs))
                    )
                    / count
                )
            case "reinforce_pp_baseline":
                return (
                    sum(s.sum() for s in surrogates((centred / (centred.std() + 1e-6)).flatten()))
                    / total
                )
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
def test_a_recipe_is_the_published_objective(recipe: str, seed: int, bonus: float) -> None:
    """Value and gradient over the whole batch, whose responses have different lengths.

    An entropy bonus has the same mean.
    """
    batch = Published(seed)
    settings = {**settings_of(recipe), "entropy_coefficient": bonus}
    algorithm = make_algorithm(AlgorithmConfig(**settings))
    advantages = (
        algorithm.advantages(batch.rewards).flatten().repeat_interleave(torch.tensor(LENGTHS))
    )
    tensors = [
        batch.logprobs,
        batch.mu,
        advantages,
        torch.ones(sum(LENGTHS), dtype=torch.bool),
        batch.ref,
        batch.prox,
        batch.entropy,
    ]
    loss = packed_loss_of(LENGTHS, *tensors, **settings).loss / algorithm.denominator(
        sum(LENGTHS), len(LENGTHS)
    )
    wanted = batch.of_name(recipe)
    if bonus:
        mean = {
            "token": batch.entropy.mean(),
            "sequence": sum(part.mean() for part in batch.parts(batch.entropy)) / len(LENGTHS),
        }
        wanted = wanted + bonus * mean.get(
            settings["loss_mean"], batch.entropy.sum() / len(LENGTHS)
        )
    torch.testing.assert_close(loss, -wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        gradient(loss, batch.logits), gradient(-wanted, batch.logits), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_is_seen_in_the_resolved_configuration_and_read_back(
    recipe: str, tmp_path: Path
) -> None:
    config = load_config(QUICKSTART, [f"algorithm.recipe={recipe}"])
    assert list(problems(config.algorithm)) == []
    written = yaml.safe_load(dump_config(config))
    assert written["algorithm"]["recipe"] == recipe
    for key, value in PUBLISHED[recipe].items():
        section, _, name = key.rpartition(".")
        assert written[section or "algorithm"][name] == value
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.yaml") == config


def test_settings_beside_a_recipe_win_and_one_on_the_command_line_replaces_the_files(
    tmp_path: Path,
) -> None:
    tree = yaml.safe_load(QUICKSTART.read_text())
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**tree, "algorithm": {"recipe": "dapo", "rho": 1.4}}))
    config = load_config(path, ["rollout.dynamic_sampling=false"])
    assert (config.algorithm.name, config.algorithm.rho, config.algorithm.rho_min) == (
        "grpo",
        1.4,
        0.8,
    )
    assert config.algorithm.mask_truncated and not config.rollout.dynamic_sampling
    other = load_config(path, ["algorithm.kl_coef=0.1", "algorithm.recipe=cispo"]).algorithm
    assert (other.name, other.rho, other.dual_clip, other.mask_truncated, other.kl_coef) == (
        "aipo",
        5.0,
        None,
        False,
        0.1,
    )
    assert load_config(path, ["algorithm.recipe=null"]).algorithm == AlgorithmConfig(rho=1.4)


@pytest.mark.parametrize(("override", "hint"), [
    ("algorithm.recipe=dpao", "did you mean dapo?"), ("algorithm.name=dapo", "did you mean "
                                                                             "algorithm.recipe=dapo?"),
    ("algorithm.name=cipso", "did you mean algorithm.recipe=cispo?"),
    ("algorithm.name=gpro", "did you mean grpo?"),
    ("algorithm.recipe=ppo", "did you mean algorithm.name=ppo?"),
])  # fmt: skip
def test_a_mistyped_name_leads_to_the_recipe(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(QUICKSTART, [override])
    assert hint in str(error.value) and (
        ", ".join(PUBLISHED) if ".recipe=" in override else ", ".join(ALGORITHMS)
    ) in str(error.value)


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_page_lists_what_a_recipe_sets(recipe: str) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{recipe}` (recipe) |"))
    for key, value in PUBLISHED[recipe].items():
        shown = (
            str(value).lower()
            if isinstance(value, bool)
            else f"{value:g}"
            if isinstance(value, float)
            else value
        )
        assert f"`{key}={shown}`" in row, f"{key}={shown}"


def test_entropy_has_no_gradient_where_it_does_not_count() -> None:
    batch = Published(0)
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
    found = gradient(out.loss, batch.logits)
    torch.testing.assert_close(
        found, gradient(-0.5 * batch.entropy[:5].sum(), batch.logits), rtol=1e-12, atol=0
    )
    assert (
        not found[5:].any()
        and not make_algorithm(AlgorithmConfig(entropy_coefficient=0.5)).skip_zero
    )
    assert math.isclose(out.loss.item(), -0.5 * batch.entropy[:5].sum().item())
