"""Models with a scalar head (reward models, critics) in the Megatron trainer, against Hugging
Face's model in float64.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_cases import LAYOUTS, MODELS, save_model
from trainer_processes import saved, spawn
from trainer_reference import assert_same_gradients, checkpoint_tensors, hf_gradients, tokens_of
from trainer_rig import DENOMINATOR, sequences
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from value_scenarios import targets_of

from megarl.base.geometry import TrainerTopology
from megarl.models.registry import load_spec

pytestmark = pytest.mark.long

TESTED = {
    "tied": "single tp2 tp2_sp_recompute pp2 pp2_vpp2 dp2_zero0 dp2_zero1 cp2 tp2_cp2",
    "qwen2": "single tp2_sp_recompute pp2",
    "qwen3": "tp2 dp2_zero1 cp2",
    "qwen3_moe": "single tp2_ep2 cp2_ep2",
    "mixtral": "ep2",
    "deepseek_v3": "tp2_ep2",
}
CASES = [(model, layout) for model, layouts in TESTED.items() for layout in layouts.split()]
TWINS = ("tp2_sp_recompute", "dp2_zero1", "pp2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(f"scores_{name}") for name in TESTED}
    for name, folder in folders.items():
        save_model(name, folder, scores=True)
    folders["policy"] = tmp_path_factory.mktemp("policy")
    save_model("tied", folders["policy"])
    return folders


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")

    def of_layout(layout: str, run: str, name: str, **fields: Any) -> dict[str, Any]:
        return {
            "run": run,
            "name": name,
            "topology": LAYOUTS[layout][1],
            "trainer": LAYOUTS[layout][2],
            **fields,
        }

    for world in (1, 2, 4):
        scenarios = [of_layout(layout, "values", f"{model}.{layout}",
            model=str(models[model])) for model, layout in CASES
                     if LAYOUTS[layout][0] == world]  # fmt: skip
        if world == 2:
            both_models = {"policy": str(models["policy"]), "critic": str(models["tied"])}
            scenarios += [
                of_layout(layout, "policy_and_critic", f"twins.{layout}", **both_models)
                for layout in TWINS
            ]
        if world < 4:
            scenarios.append(
                of_layout(
                    "tp2" if world == 2 else "single",
                    "new_head",
                    f"new.{world}",
                    model=str(models["policy"]),
                )
            )
        spawn(world, out, scenarios)
    return out


@cache
def reference(folder: Path) -> dict[str, Any]:
    """Values, and loss and gradients by autograd of the written-out sum, one sequence at a time."""
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, **settings
    ).double()
    values = []
    loss = torch.zeros((), dtype=torch.float64)
    batch = sequences(model.config.vocab_size)
    for sequence, targets in zip(batch, targets_of(batch)):
        outputs = model.score(model.model(tokens_of(sequence)).last_hidden_state)[0, :-1, 0]
        mask = torch.tensor(sequence.loss_mask[1:])
        target = torch.from_numpy(targets[1:]).double()
        loss = (
            loss + ((outputs - target).square() * (1 + target.square()))[mask].sum() / DENOMINATOR
        )
        values.append(np.concatenate([[0.0], torch.where(mask, outputs, 0.0).detach().numpy()]))
    loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"values": values, "loss": loss.item(), "grads": checkpoint_tensors(folder, named)}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_values_and_gradients_equal_hf(
    models: dict[str, Path], runs: Path, model: str, layout: str
) -> None:
    expected = reference(models[model])
    ranks = saved(runs, f"{model}.{layout}")
    assert len(ranks) == LAYOUTS[layout][0]
    norm = math.sqrt(sum((grad**2).sum().item() for grad in expected["grads"].values()))
    for rank in ranks:
        for row, want in zip(rank["values"], expected["values"], strict=True):
            np.testing.assert_allclose(row, want, rtol=0, atol=1e-5)
        for batching in ("all", "microbatches"):
            assert rank[batching]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert rank[batching]["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert rank[batching]["sums"]["values"] == pytest.approx(
                sum(row.sum() for row in expected["values"]), rel=1e-4, abs=1e-4
            )
            assert math.isnan(rank[batching]["entropy"])
        assert rank["none"]["loss"] == rank["none"]["grad_norm"] == 0.0
    for batching in ("all", "microbatches"):
        gradients = hf_gradients(
            models[model],
            TrainerTopology(**LAYOUTS[layout][1]),
            [rank[batching]["grads"] for rank in ranks],
        )
        assert_same_gradients(gradients, expected["grads"])


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_exported_critic_gives_the_same_scores(
    models: dict[str, Path], runs: Path, model: str, layout: str
) -> None:
    """It is a sequence classification model of Transformers."""
    want, got = (AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
                 for path in (models[model], runs / f"{model}.{layout}.hf"))  # fmt: skip
    assert load_spec(runs / f"{model}.{layout}.hf") == load_spec(models[model])
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name
    tokens = torch.arange(1, 12)[None]
    torch.testing.assert_close(got(tokens).logits, want(tokens).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head", ["zeros", "random"])
def test_a_causal_models_checkpoint_gets_a_new_head(
    models: dict[str, Path], runs: Path, head: str
) -> None:
    """The head depends only on the seed.

    All else is from the checkpoint, which has tied embeddings. The export loads as a model with a
    scalar head.
    """
    source = AutoModelForCausalLM.from_pretrained(
        models["policy"], dtype=torch.float32
    ).state_dict()
    heads = [
        AutoModelForSequenceClassification.from_pretrained(
            runs / f"new.{n}.{head}.hf", dtype=torch.float32
        )
        for n in (1, 2)
    ]
    assert all(model.config.num_labels == 1 for model in heads)
    one, two = (model.state_dict() for model in heads)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(
        torch.equal(one[name], source[name]) for name in source if name in one
    ) and one.keys() - source.keys() == {"score.weight"}
    hidden = MODELS["tied"].hidden_size
    spread = one["score.weight"].std().item() * math.sqrt(hidden + 1)
    assert one["score.weight"].shape == (1, hidden) and (
        spread == 0 if head == "zeros" else 0.6 < spread < 1.4
    )


@pytest.mark.parametrize("layout", TWINS)
def test_policy_and_critic_share_a_process_undisturbed(
    models: dict[str, Path], runs: Path, layout: str
) -> None:
    """Losses and last outputs equal those of each model alone.

    The critic continues from its own checkpoint.
    """
    for rank in saved(runs, f"twins.{layout}"):
        assert rank["together"]["scalar"][0][0] == pytest.approx(
            reference(models["tied"])["loss"], rel=1e-5
        )
        for head, (losses, outputs) in rank["together"].items():
            assert len(set(losses)) == 3 and losses == rank["alone"][head][0]
            assert all(
                np.array_equal(together, alone)
                for together, alone in zip(outputs, rank["alone"][head][1], strict=True)
            )
        assert rank["state"] == {"step": 3}
        assert rank["resumed"] == pytest.approx(rank["after"], rel=1e-5)
