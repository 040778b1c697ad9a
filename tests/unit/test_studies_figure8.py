"""`python tests/studies figure8`: its runs, its rounded engines, its table. No test makes a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import quantise_reference
import torch
from figure8 import COMMON, RULES, Study, cells_of, fall_of, render
from offpolicy import held_out_of, write_model
from stale_loop import ENGINES, GROUP, Sampler, in_4_bits, in_fp8_blocks

from megarl.algorithms.recipes import recipe_of
from megarl.base.rollout_types import Prompt
from megarl.config.load import load_config
from megarl.data.tokenizer import load_tokenizer
from megarl.plan.resolve import resolve

CONFIG = "configs/offpolicy/chain.yaml"


def test_every_run_is_valid_and_has_its_own_folder(tmp_path: Path):
    study = Study(CONFIG, [], tmp_path)
    write_model(Path("configs/models/tiny-llama"), study.model, {"head_dim": 64})
    cells = cells_of(seeds=3)
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        if cell.seed == 0:
            config = load_config(CONFIG, study.of_run(cell))
            resolve(config, "sft")
            assert config.trainer.optimizer.lr == pytest.approx(8e-5 * cell.rate)
            assert cell.engine in ENGINES


def test_rules_differ_only_in_the_weight_of_a_token():
    weights = set()
    for rule in RULES.values():
        recipe = recipe_of(load_config(CONFIG, [*COMMON, *rule]).algorithm)
        weights.add((recipe.rule, recipe.rho_min, recipe.rho))
        assert (recipe.advantage, recipe.loss_mean) == ("mean", "token")
        assert recipe.beta is None
    assert len(weights) == len(RULES)


def test_policies_are_judged_on_all_held_out_prompts():
    config = load_config(CONFIG)
    assert config.eval.limit == 2
    assert len(held_out_of(config).prompts) == 512


def test_coarse_weights_are_the_nearest_of_fifteen_values():
    torch.manual_seed(0)
    weight = torch.randn(6, 3 * GROUP)
    groups = weight.view(-1, GROUP)
    coarse = in_4_bits(weight).view(-1, GROUP)
    steps = groups.abs().amax(1, keepdim=True) / 7
    codes = coarse / steps
    assert torch.allclose(codes, codes.round(), atol=1e-5)
    assert codes.abs().max() < 7.001
    assert ((coarse - groups).abs() <= steps / 2 + 1e-6).all()
    assert (coarse - groups).abs().mean() > 0.1 * steps.mean()
    assert torch.equal(in_4_bits(torch.zeros(2, GROUP)), torch.zeros(2, GROUP))


def test_fp8_weights_are_those_of_the_engines():
    torch.manual_seed(0)
    weight = torch.randn(200, 300)
    codes, scales = quantise_reference.quantise(weight, 128, 128, 1e-4)
    values = np.where(codes < 128, 1, -1) * quantise_reference.E4M3[codes & 127]
    tiles = scales.repeat(128, 0).repeat(128, 1)[:200, :300]
    expected = torch.from_numpy((values * tiles).astype(np.float32))
    assert torch.equal(in_fp8_blocks(weight), expected)


def test_sampler_reports_the_log_probs_of_its_rounded_weights(tmp_path: Path):
    """Each token's log-prob is compared with one pass over the whole response."""
    config = load_config(CONFIG)
    tokenizer = load_tokenizer(config.model)
    sampler = Sampler(config.model.path, "exact", tokenizer)
    prompts = [Prompt(0, [1, 5, 6], "", ""), Prompt(1, [1, 7], "", "")]
    judged = []

    def judge(text: str, prompt: Prompt) -> float:
        judged.append((text, prompt.ordinal))
        return float(len(judged))

    noise = torch.Generator().manual_seed(3)
    groups = sampler.groups(prompts, 3, 8, noise, version=5, judge=judge)
    assert [ordinal for _, ordinal in judged] == [0, 0, 0, 1, 1, 1]
    for group in groups:
        for sample in group.samples:
            ids = [*group.prompt.token_ids, *sample.token_ids]
            with torch.no_grad():
                logits = sampler.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            start = len(group.prompt.token_ids)
            expected = [logits[start - 1 + i, token] for i, token in enumerate(sample.token_ids)]
            assert list(sample.logprobs) == pytest.approx([float(x) for x in expected], abs=1e-4)
            assert list(sample.versions) == [5] * len(sample.token_ids)
            assert not set(sample.token_ids[:-1]) & set(tokenizer.eos_ids)


def test_a_run_has_fallen_only_if_it_ends_below_its_best():
    rise = [0.3 + 0.02 * step for step in range(30)]
    assert fall_of(rise) is None
    assert fall_of([*rise, *[0.2] * 10]) in range(30, 34)
    assert fall_of([*rise, *[0.2] * 10, *[0.9] * 10]) is None, "it has come back"
    assert fall_of([0.9, 0.0] * 20) is None, "noise of single steps is no fall"


def result(rule: str, seed: int, score: float, last_reward: float = 0.9) -> dict:
    series = {
        "reward/mean": [0.9] * 30 + [last_reward] * 30,
        "staleness/mean": [8.0] * 60,
        "agreement/abs_diff_mean": [0.2, None] * 30,
        "agreement/ess": [0.5] * 60,
    }
    setting = {"engine": "fp8", "lag": 8, "rate": 3}
    return setting | {"rule": rule, "seed": seed, "score": score, "series": series}


def test_table_compares_runs_of_equal_seeds():
    """Seeds differ by 0.4, but the two runs of a seed by 0.10 and 0.14 only."""
    rows = render(
        [
            result("none", 0, 0.4, last_reward=0.1),
            result("none", 1, 0.76),
            result("none", 2, 0.9),
            result("rho 4", 1, 0.9),
            result("rho 4", 0, 0.5),
        ]
    ).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0][3:7] == ["none", "0.40 0.76 0.90", "0.687", "-0.120 ± 0.040"]
    assert cells[0][7:] == ["1 of 3", "31", "8.0", "0.200", "0.50"]
    assert cells[1][3:8] == ["rho 4", "0.50 0.90", "0.700", "–", "0 of 2"]
