"""The study of old data: its runs, what it measures of a policy, its tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megarl.bench.offpolicy.cells import MINIBATCHES, PARTS, SAMPLES_PER_UPDATE, SIZES, Cell
from megarl.bench.offpolicy.tables import render
from megarl.config.load import load_config
from megarl.data.tokenizer import load_tokenizer
from megarl.plan.resolve import resolve
from megarl.types import Prompt

CONFIG = "configs/offpolicy/chain.yaml"
CELLS = {cell.name: cell for part in PARTS.values() for cell in part(0)}


def test_every_run_is_a_valid_one_of_as_many_samples():
    assert len(CELLS) == len({cell for part in PARTS.values() for cell in part(0)})  # no two runs share a folder
    for cell in CELLS.values():
        config = load_config(CONFIG, [*cell.overrides(8e-5), "seed=0"])
        resolve(config, "sft")
        per_update = config.rollout.prompts_per_step * config.rollout.n / config.trainer.minibatches
        assert per_update == SAMPLES_PER_UPDATE * cell.samples / 4
        assert config.max_steps * config.trainer.minibatches == cell.updates
        assert config.trainer.optimizer_steps == cell.minibatches * cell.epochs


def result(cell: Cell, score: float, kl: float) -> dict:
    return {**vars(cell), "curve": [{"score": 0.1, "kl": 0.0}, {"score": score, "kl": kl}], "step_s": 0.25}


def test_tables_have_a_mean_and_a_range_over_seeds_and_no_number_where_no_run_is():
    found = [result(Cell("rloo", 1, seed=seed), score, 1.5) for seed, score in enumerate((0.5, 0.7))]
    found.append(result(Cell("ppo", 16), 0.25, 3.0))
    text = render({"parts": {"losses": found, "lags": []}})
    assert "| rloo | 0.600 (0.50–0.70) at 1.50 | – |" in text
    assert "| ppo | – | 0.250 at 3.00 |" in text
    assert "without correction" not in text
    assert render({"parts": {"losses": []}}) == "no run is complete"


def test_sizes_and_minibatches_are_the_studies():
    assert len(SIZES) == 3 and MINIBATCHES == (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained("configs/models/tiny-llama")
        config.initializer_range = 0.2  # far from uniform
        folders.append(tmp_path_factory.mktemp("policies") / str(seed))
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[-1])
    return folders


def test_divergence_is_that_of_whole_distributions_and_0_of_equal_weights(checkpoints):
    """With one token to a response, it is known without sampling. Prompts of several lengths are padded."""
    from transformers import AutoModelForCausalLM

    from megarl.bench.offpolicy.measure import measure

    tokenizer = load_tokenizer(load_config(CONFIG, []).model)
    texts = ["1+2=", "7+0+9+1+5=", "3-"]
    prompts = [Prompt(number, tokenizer.encode_prompt(text), text, "3") for number, text in enumerate(texts)]
    rest = prompts, tokenizer, "last_number"
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in checkpoints]
    expected = []
    for prompt in prompts:
        pi, first = (model(torch.tensor([prompt.token_ids])).logits[0, -1].log_softmax(-1) for model in models)
        expected.append((pi.exp() * (pi - first)).sum().item())
    found = measure(*checkpoints, *rest, max_tokens=1, seed=0)
    assert found.kl == pytest.approx(sum(expected) / 3, rel=1e-4) and found.kl > 0.5
    assert found.tokens == 1
    same = measure(checkpoints[0], checkpoints[0], *rest, max_tokens=12, seed=0)
    assert same.kl == 0 and 1 < same.perplexity < 64 and 1 < same.tokens <= 12
    other = measure(*checkpoints, *rest, max_tokens=12, seed=0)
    assert other.perplexity > same.perplexity and math.isfinite(other.kl)
