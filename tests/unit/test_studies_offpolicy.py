"""The off-policy study: its runs, its measurements of a policy, its tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from offpolicy import (
    LOSSES,
    PARTS,
    SAMPLES_PER_UPDATE,
    Cell,
    HeldOut,
    judge_of,
    measure,
)
from plain_reward_model import scores

from megarl.algorithms.recipes import needs_reference
from megarl.base.rollout_types import Prompt
from megarl.config.load import load_config
from megarl.data.tokenizer import load_tokenizer
from megarl.plan.resolve import resolve

CONFIG = "configs/offpolicy/chain.yaml"
GOLD = "configs/offpolicy/gold.yaml"
CELLS = {cell.name: cell for part in PARTS.values() for cell in part(0)}


@pytest.mark.parametrize("path", [CONFIG, GOLD])
def test_every_run_is_a_valid_one_of_as_many_samples(path: str):
    # no two runs share a folder
    assert len(CELLS) == len({cell for part in PARTS.values() for cell in part(0)})
    for cell in CELLS.values():
        config = load_config(path, [*cell.overrides(8e-5, penalised=path == GOLD), "seed=0"])
        resolve(config, "sft")
        per_update = config.rollout.prompts_per_step * config.rollout.n / config.trainer.minibatches
        assert per_update == SAMPLES_PER_UPDATE * cell.samples / 4
        assert config.max_steps * config.trainer.minibatches == cell.updates
        assert config.trainer.optimizer_steps == cell.minibatches * cell.epochs


def test_learned_reward_has_a_penalty_in_all_losses_but_one():
    for path, referenced in ((CONFIG, {"online_dpo"}), (GOLD, set(LOSSES) - {"best_of_n"})):
        configs = {
            name: load_config(path, Cell(name).overrides(8e-5, penalised=path == GOLD))
            for name in LOSSES
        }
        assert {
            name for name, config in configs.items() if needs_reference(config.algorithm)
        } == referenced
    assert load_config(GOLD, Cell("ppo").overrides(8e-5, penalised=True)).algorithm.kl == "reward"


def test_the_rule_that_judges_may_be_any():
    prompt = Prompt(0, [], "badcfe=", "abcdef")
    assert judge_of(load_config(GOLD))("abcdef", prompt) == 1
    assert judge_of(load_config(CONFIG))("1,2", Prompt(0, [], "1+1=", "2")) == 1


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


def test_divergence_is_of_whole_distributions(checkpoints):
    """With one token a response, the divergence is known without sampling.

    Prompts of different lengths are padded.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(load_config(CONFIG, []).model)
    texts = ["1+2=", "7+0+9+1+5=", "3-"]
    prompts = [
        Prompt(number, tokenizer.encode_prompt(text), text, "3")
        for number, text in enumerate(texts)
    ]
    held_out = HeldOut(prompts, ["3", "", ""], tokenizer, judge_of(load_config(CONFIG)))
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in checkpoints
    ]
    expected = []
    for prompt in prompts:
        pi, first = (
            model(torch.tensor([prompt.token_ids])).logits[0, -1].log_softmax(-1)
            for model in models
        )
        expected.append((pi.exp() * (pi - first)).sum().item())
    measured = measure(*checkpoints, None, held_out, max_tokens=1, seed=0)
    assert measured.kl == pytest.approx(sum(expected) / 3, rel=1e-4)
    assert measured.kl > 0.5
    assert measured.tokens == 1
    assert measured.proxy is None
    assert measured.win_rate <= 0.5
    same = measure(checkpoints[0], checkpoints[0], None, held_out, max_tokens=12, seed=0)
    assert same.kl == 0
    assert 1 < same.perplexity < 64
    assert 1 < same.tokens <= 12
    longer = measure(*checkpoints, None, held_out, max_tokens=12, seed=0)
    assert longer.perplexity > same.perplexity
    assert math.isfinite(longer.kl)


def test_reward_model_scores_the_last_token_of_each_sequence(checkpoints, tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoints[0], num_labels=1, dtype=torch.float64
    ).eval()
    sequences = [[1, 5, 6, 2], [1, 2], [1, *range(4, 20), 2]]
    assert scores(model, sequences).tolist() == pytest.approx(
        [model(torch.tensor([sequence])).logits.item() for sequence in sequences], abs=1e-9
    )
    model.float().save_pretrained(tmp_path / "scores")
    tokenizer = load_tokenizer(load_config(CONFIG, []).model)
    held_out = HeldOut(
        [Prompt(0, [1, 4], "0", "7")] * 64,
        ["1,7"] * 64,
        tokenizer,
        lambda text, prompt: float(text == "1,7"),
    )
    with_proxy = measure(*checkpoints, tmp_path / "scores", held_out, max_tokens=1, seed=3)
    ends = [[1, 4, token] for token in range(64)]
    assert (
        min(scores(model, ends)).item() - 1e-5
        <= (with_proxy.proxy or 0)
        <= max(scores(model, ends)).item() + 1e-5
    )
    # one token is not the demonstration, which scores 1
    assert (with_proxy.score, with_proxy.win_rate) == (0, 0)
