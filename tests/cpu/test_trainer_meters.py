"""The meters of agreement on real gloo ranks, against their formulas on the same tokens with
Hugging Face's log-probs in float64.

The trainer's log-probs are within 1e-5 of Hugging Face's (test_trainer.py), so the meters may
differ by as much.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import batch_of
from meters_reference import meters
from test_trainer_minibatches import CONFIG, logprobs_of
from trainer_cases import VOCAB, save_model
from trainer_processes import saved, spawn
from trainer_reference import load_float64

from megarl.algorithms.batches import cut_into_minibatches
from megarl.base.rollout_types import Batch, Group, Prompt, Sample
from megarl.models.registry import flops_per_token, load_spec
from megarl.observe.agreement import LIMIT, LIMITS_BY_DTYPE, describe_agreement

pytestmark = pytest.mark.long

GROUPS = 4
SAMPLES = 3
STEP = 20
SEED = 5
TEMPERATURE = 0.7
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "single": (1, {}, {}),
    "dp2": (2, {"dp": 2}, {}),
    "tp2": (2, {"tp": 2}, {"sequence_parallel": True}),
    "cp2": (2, {"cp": 2}, {}),
    "pp2": (2, {"pp": 2}, {}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}, {}),
    "dp2_pp2": (4, {"dp": 2, "pp": 2}, {}),
    "tp2_cp2": (4, {"tp": 2, "cp": 2}, {"sequence_parallel": True}),
}
EVERY_AGE = torch.tensor([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 20])
SMALL = {"max_tokens_per_microbatch": 24}


def batch_of_policy(folder: Path, noise: float) -> Batch:
    """Sequences sampled at TEMPERATURE from nearly the model's distribution, under the weights of
    step 20 and of older steps.
    """
    generator = torch.Generator().manual_seed(1)
    model = load_float64(folder)
    groups = []
    for ordinal in range(GROUPS):
        prompt = torch.randint(VOCAB, (2 + ordinal % 2,), generator=generator).tolist()
        samples = []
        for number, reward in enumerate([1.0, 0.5, -0.5]):
            tokens = torch.randint(
                VOCAB, (3 + (3 * ordinal + 5 * number) % 9,), generator=generator
            ).tolist()
            with torch.no_grad():
                mu = logprobs_of(model, prompt, tokens) + noise * torch.randn(
                    len(tokens), generator=generator
                )
            ages = EVERY_AGE[torch.randint(len(EVERY_AGE), (len(tokens),), generator=generator)]
            versions = sorted((STEP - ages).tolist())
            # the first response has an environment's tokens
            mask = [bool(number) or place % 3 < 2 for place in range(len(tokens))]
            samples.append(
                Sample(tokens, mu.clamp(max=0).float().numpy(), versions, "", reward, "stop", mask)
            )
        groups.append(Group(Prompt(ordinal, prompt, "", ""), samples))
    return batch_of(groups, step=STEP)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("meters")
    (out / "hf").mkdir()
    save_model("untied", out / "hf")
    overrides = [f"rollout.prompts_per_step={GROUPS}", f"rollout.n={SAMPLES}", f"seed={SEED}"]
    for name, noise in (("near", 0.3), ("equal", 0.0)):
        torch.save(batch_of_policy(out / "hf", noise), out / f"{name}.pt")

    def scenario(name: str, batch: str, layout: str, *names: str) -> dict[str, Any]:
        _, topology, settings = LAYOUTS[layout]
        fields = {
            "model": str(out / "hf"),
            "batch": str(out / f"{batch}.pt"),
            "config": str(CONFIG),
            "overrides": [*overrides, *names],
        }
        return {
            "run": "meters",
            "name": name,
            "topology": topology,
            "trainer": {**SMALL, **settings},
            **fields,
        }

    right = f"rollout.temperature={TEMPERATURE}"
    for world in (1, 2, 4):
        cases = [
            scenario(f"near.{name}", "near", name, right)
            for name, layout in LAYOUTS.items()
            if layout[0] == world
        ]
        if world == 1:
            cases += [
                scenario(
                    "several", "near", "single", right, "trainer.minibatches=2", "trainer.epochs=2"
                )
            ]
            cases += [
                scenario("equal", "equal", "single", right),
                scenario("planted", "equal", "single", "rollout.temperature=1"),
            ]
        spawn(world, out, cases)
    return out


def expected(runs: Path, batch: str, places: Any) -> tuple[dict[str, float], dict[str, list[int]]]:
    batch = torch.load(runs / f"{batch}.pt", weights_only=False)
    model = load_float64(runs / "hf")
    rows = []
    for place in places:
        numbers = batch.numbers[place]
        runs_of = batch.samples[place].policy_versions
        with torch.no_grad():
            pi = logprobs_of(model, numbers.prompt_ids, numbers.token_ids).numpy()
        mask = np.ones(len(pi), bool) if numbers.policy_mask is None else numbers.policy_mask
        versions = np.concatenate([np.full(count, version) for version, count in runs_of])
        rows.append((pi[mask], numbers.logprobs[mask], STEP - versions))
    return meters(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meters_equal_their_formulas_in_every_layout(runs: Path, layout: str) -> None:
    metrics, histograms = expected(runs, "near", range(GROUPS * SAMPLES))
    assert len(histograms) == 8, "every class of ages"
    ranks = saved(runs, f"near.{layout}")
    assert len(ranks) == LAYOUTS[layout][0]
    (alone,) = saved(runs, "near.single")
    for rank in ranks:
        actual = {
            name: value for name, value in rank["metrics"].items() if name.startswith("agreement/")
        }
        assert (
            actual.keys() == metrics.keys()
            and rank["histograms"] == alone["histograms"] == histograms
        )
        for name, value in metrics.items():
            assert actual[name] == pytest.approx(
                value, rel=0.016 if "p99" in name else 1e-4, abs=1e-5
            ), name
            assert actual[name] == pytest.approx(alone["metrics"][name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_kept_of_tokens_is_what_the_step_knew(runs: Path, layout: str) -> None:
    """In any layout one rank gives each sample's numbers, for that sample's tokens."""
    batch = torch.load(runs / "near.pt", weights_only=False)
    model = load_float64(runs / "hf")
    ranks = saved(runs, f"near.{layout}")
    assert sorted(place for rank in ranks for place in rank["kept"]) == list(
        range(GROUPS * SAMPLES)
    )
    (alone,) = saved(runs, "near.single")
    for place, row in ((place, row) for rank in ranks for place, row in rank["kept"].items()):
        numbers = batch.numbers[place]
        local_places = np.flatnonzero(
            np.ones(len(numbers.token_ids), bool)
            if numbers.policy_mask is None
            else numbers.policy_mask
        )
        with torch.no_grad():
            pi = logprobs_of(model, numbers.prompt_ids, numbers.token_ids).numpy()
        assert (
            row.ids.tolist() == numbers.token_ids[local_places].tolist()
            and row.positions.tolist() == (local_places + len(numbers.prompt_ids)).tolist()
        )
        assert row.mu_logprobs.tolist() == numbers.logprobs[
            local_places
        ].tolist() and row.logprobs == pytest.approx(pi[local_places], abs=1e-5)
        assert (
            row.advantages.tolist() == alone["kept"][place].advantages.tolist()
            and len(set(row.advantages.tolist())) == 1
        )
    lengths = [
        len(batch.numbers[place].prompt_ids) + len(batch.numbers[place].token_ids)
        for place in range(GROUPS * SAMPLES)
    ]
    spec = load_spec(str(runs / "hf"))
    assert ranks[-1]["metrics"]["flops/policy"] == pytest.approx(
        sum(3 * length * flops_per_token(spec, length) for length in lengths)
    )


def test_of_several_optimizer_steps_the_first_is_measured(runs: Path) -> None:
    first = cut_into_minibatches(GROUPS, 2, 2, SEED, STEP)[0]
    metrics, _ = expected(
        runs, "near", [SAMPLES * group + number for group in first for number in range(SAMPLES)]
    )
    (rank,) = saved(runs, "several")
    actual = {
        name: value for name, value in rank["metrics"].items() if name.startswith("agreement/")
    }
    assert actual == {
        name: pytest.approx(value, rel=0.016, abs=1e-5) for name, value in metrics.items()
    }
    assert rank["metrics"]["optimizer_steps"] == 4


def test_a_planted_mismatch_is_seen_and_told(runs: Path) -> None:
    """The trainer computes log-probs at another temperature than the sampling temperature."""
    for name, agrees in (("equal", True), ("planted", False)):
        (rank,) = saved(runs, name)
        limit = LIMITS_BY_DTYPE["float32"]
        metrics = rank["metrics"]
        assert (metrics["agreement/age_0/abs_diff_mean"] < 1e-5) == agrees and (
            metrics["agreement/age_0/abs_diff_mean"] > 0.1
        ) != agrees
        assert (metrics["agreement/kl_k3"] < 1e-9) == agrees
        message = describe_agreement(
            [
                {
                    "step": STEP,
                    LIMIT: limit,
                    **metrics,
                    "agreement/tokens": 40,
                    "agreement/age_0/tokens": 40,
                }
            ]
        )
        assert (message == "") == agrees and (agrees or "they do not compute the same" in message)
