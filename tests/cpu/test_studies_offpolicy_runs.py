"""The off-policy study in small, with a learned reward: two runs of few steps, and their reward
model in all programs that compute with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import plain_reward_model as plain
import pytest
import torch
from offpolicy import Cell, Study, render
from reward_models import served_scores

from megarl.config.load import load_config
from megarl.data.batches import evaluated_pairs, load_pairs, pair_tokens
from megarl.data.tokenizer import load_tokenizer
from megarl.observe.metrics import METRICS_FILE, read_metrics
from megarl.plan.resolve import find_spec

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = "configs/offpolicy/gold.yaml"
HELD_OUT = 64
SHORT = [
    "sft.steps=30", "reward_model.steps=12", "reward_model.batch_size=16",
    "reward_model.optimizer.warmup_steps=2",
    "reward_model.data.size=128", f"eval.limit={HELD_OUT}", f"reward_model.eval.size={HELD_OUT}",
]  # fmt: skip
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Short(Cell):
    @property
    def updates(self) -> int:
        return 4


CELLS = Short("online_dpo", minibatches=2), Short("ppo", minibatches=4)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[dict]]:
    """The study, and the quality of its reward models."""
    study = Study(CONFIG, SHORT, tmp_path_factory.mktemp("study"), learned=True)
    return study, study.prepare(CELLS)


def test_runs_are_measured_beside_their_warm_start(study) -> None:
    offpolicy_study, models = study
    results = [offpolicy_study.result(cell) for cell in CELLS]
    for cell, result in zip(CELLS, results):
        first, *_, last = result["curve"]
        assert (first["updates"], first["kl"], last["updates"]) == (0, 0.0, 4) and last["kl"] > 0
        assert all(
            -2 <= point["score"] <= 1 and 0 <= point["win_rate"] <= 1 and point["perplexity"] > 1
            for point in result["curve"]
        )
        # the engine's mean over other posts, and transformers' here
        assert result["reward"] == pytest.approx(first["proxy"], abs=1.0)
        assert not (offpolicy_study.folder(cell) / "hf").exists()
    assert results[0]["curve"][0] == results[1]["curve"][0]  # one warm start, measured twice
    text = render({"parts": {"losses": results}, "reward_models": models})
    assert "| online_dpo |" in text and "| ppo |" in text and "| medium | 0 |" in text
    # no run is repeated
    assert (
        offpolicy_study.prepare(CELLS) == models
        and [offpolicy_study.result(cell) for cell in CELLS] == results
    )


def test_the_reward_model_is_plain_pytorchs(study) -> None:
    """From the same warm start and on the same pairs, it is as good on held-out pairs, with nearly
    the same weights.
    """
    offpolicy_study, [facts] = study
    config = load_config(CONFIG, offpolicy_study.common(CELLS[0]))
    expected = plain.train(config, offpolicy_study.initial(CELLS[0])).state_dict()
    parameters = plain.load(offpolicy_study.reward_model(CELLS[0])).state_dict()
    assert facts["accuracy"] == pytest.approx(facts["accuracy_plain"], abs=1 / HELD_OUT)
    for name, weights in expected.items():
        torch.testing.assert_close(
            parameters[name],
            weights,
            rtol=0,
            atol=1e-3,
            msg=lambda message, name=name: f"{name}: {message}",
        )


@torch.no_grad()
def test_three_programs_give_held_out_pairs_equal_scores(study, tmp_path: Path) -> None:
    """Megatron, Transformers and SGLang."""
    offpolicy_study, _ = study
    config = load_config(CONFIG, offpolicy_study.common(CELLS[0]))
    folder = offpolicy_study.reward_model(CELLS[0])
    tokenizer = load_tokenizer(config.model)
    pairs = load_pairs(
        config, evaluated_pairs(config.reward_model), "reward_model.eval", find_spec(config)
    )
    preferred, rejected = zip(
        *(pair_tokens(pairs[place], tokenizer, 512) for place in range(len(pairs)))
    )
    scores = plain.scores(plain.load(folder), [*preferred, *rejected])
    megatrons = read_metrics(Path(f"{folder}.run") / "reward_model" / METRICS_FILE)[-1]
    means = {"chosen": scores[:HELD_OUT].mean().item(), "rejected": scores[HELD_OUT:].mean().item()}
    assert {name: megatrons[f"eval/score/{name}"] for name in means} == pytest.approx(
        means, abs=TOLERANCE
    )
    assert served_scores(folder, [*preferred, *rejected], tmp_path / "engine.log") == pytest.approx(
        scores.tolist(), abs=TOLERANCE
    )
    assert scores.std() > 0.05
