"""The multi-token prediction layer in real trainers: its loss and gradients, the policy without it,
and its checkpoints.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from multi_token_reference import LAYERS, layer_reference, save_with_layer
from safetensors.torch import load_file
from trainer_cases import LAYOUTS
from trainer_processes import saved, spawn
from trainer_reference import assert_same_gradients, hf_gradients

from megarl.base.geometry import TrainerTopology
from megarl.models.registry import load_spec

pytestmark = pytest.mark.long

TESTED = {
    "glm4_moe": "single pp2 tp2_ep2 cp2_ep2 pp2_vpp2_ep2 ep2_zero3 pp2_vpp2_dp2_zero3",
    "deepseek_v3": "tp2_ep2",
    "qwen3_next": "tp2_ep2",
}
CASES = [(model, layout) for model, layouts in TESTED.items() for layout in layouts.split()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_with_layer(name, tmp_path_factory.mktemp(name)) for name in TESTED}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")

    def of_case(model: str, layout: str, run: str = "multi_token", **fields: Any) -> dict[str, Any]:
        _, topology, settings = LAYOUTS[layout]
        name = fields.pop("name", f"{model}.{layout}")
        return {
            "run": run,
            "name": name,
            "model": str(models[model]),
            "topology": topology,
            "trainer": settings,
            **fields,
        }

    def checkpoint(name: str, layout: str, mode: str, load: bool, dtype: str) -> dict[str, Any]:
        saved_fields = {
            "mode": mode,
            "load": load,
            "dtype": dtype,
            "checkpoint": str(out / f"checkpoint.{mode}"),
        }
        return of_case(
            "glm4_moe", layout, "multi_token_checkpoint", name=f"{name}.{mode}", **saved_fields
        )

    modes = (("keep", "bfloat16"), ("train", "float32"))
    saves = [checkpoint("save", "ep2", mode, False, dtype) for mode, dtype in modes]
    loads = [checkpoint("load", "pp2", mode, True, dtype) for mode, dtype in modes]
    for world in (2, 1, 4):
        cases = [of_case(*case) for case in CASES if LAYOUTS[case[1]][0] == world]
        spawn(world, out, cases + (saves + loads if world == 2 else []))
    return out


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_loss_and_gradients_equal_the_equations(
    models: dict[str, Path], runs: Path, model: str, layout: str
) -> None:
    expected = layer_reference(model, models[model])
    spec = load_spec(models[model], mtp=True)
    ranks = saved(runs, f"{model}.{layout}")
    for rank in ranks:
        assert rank["train"]["step"]["mtp_loss"] == pytest.approx(expected["loss"], rel=2e-6)
    topology = TrainerTopology(**LAYOUTS[layout][1])
    gradients = hf_gradients(
        models[model], topology, [rank["train"]["step"]["grads"] for rank in ranks], spec
    )
    assert_same_gradients({name: gradients[name] for name in expected["grads"]}, expected["grads"])
    policy = {tensor for tensor in gradients if tensor not in expected["grads"]}
    assert (
        policy
        == hf_gradients(
            models[model], topology, [rank["ignore"]["step"]["grads"] for rank in ranks]
        ).keys()
    )


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_the_policy_is_the_same_without_it(runs: Path, model: str, layout: str) -> None:
    """Gradients, and weights after three clipped steps, are equal bit for bit.

    They would differ if the norms included the layer's gradients. If replicas share the optimizer
    state, the layer moves the cuts between their shares, and with them the order in which norms are
    summed.
    """
    for rank in saved(runs, f"{model}.{layout}"):
        without = rank["ignore"]
        shared = any(grad.isnan().any() for grad in without["step"]["grads"].values())
        for mode in ("keep", "train"):
            assert all(
                equal_where_filled(rank[mode]["step"]["grads"][name], grad)
                for name, grad in without["step"]["grads"].items()
            )
            close = {"rtol": 1e-5, "atol": 1e-6} if shared else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(
                {name: rank[mode]["after"][name] for name in without["after"]},
                without["after"],
                **close,
            )
            torch.testing.assert_close(
                *([*chain(*result["logprobs"])] for result in (rank[mode], without)), **close
            )
            torch.testing.assert_close(
                *(
                    [step["grad_norm"] for step in result["steps"]]
                    for result in (rank[mode], without)
                ),
                **close,
            )
        losses = [step["mtp_loss"] for step in rank["train"]["steps"]]
        assert losses == sorted(losses, reverse=True) and losses[2] < losses[0]


def equal_where_filled(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares the tensors that this rank has in both."""
    filled = ~a.isnan() & ~b.isnan()
    return torch.equal(a[filled], b[filled])


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.parametrize("mode", ["keep", "train"])
def test_exported_as_it_was_loaded(
    models: dict[str, Path], runs: Path, model: str, layout: str, mode: str
) -> None:
    loaded = load_file(models[model] / "model.safetensors")
    written = load_file(runs / f"{model}.{layout}.{mode}.hf" / "model.safetensors")
    assert written.keys() == loaded.keys() and all(
        torch.equal(written[name], values) for name, values in loaded.items()
    )
    config = json.loads((runs / f"{model}.{layout}.{mode}.hf" / "config.json").read_text())
    assert config.get("num_nextn_predict_layers") == (None if model == "qwen3_next" else 1)


@pytest.mark.parametrize("mode", ["keep", "train"])
def test_checkpoints_have_it(models: dict[str, Path], runs: Path, mode: str) -> None:
    """Saved under ep2 and loaded under pp2: the weights are the same, and the third step too, up to
    rounding.
    """
    first, then = (
        load_file(runs / f"{name}.{mode}.hf" / "model.safetensors") for name in ("save", "load")
    )
    assert first.keys() == then.keys() == load_file(models["glm4_moe"] / "model.safetensors").keys()
    assert all(torch.equal(first[name], then[name]) for name in first)
    if mode == "train":
        a, *_ = saved(runs, "save.train")
        b, *_ = saved(runs, "load.train")
        assert a["third"] == pytest.approx(b["third"], rel=1e-5)


@pytest.mark.parametrize("model", TESTED)
def test_transformers_passes_over_it(models: dict[str, Path], runs: Path, model: str) -> None:
    """Transformers misses no tensors.

    (For GLM-4.5 it knows the layer's number only in the published sizes, and otherwise names the
    tensors.)
    """
    from transformers import AutoModelForCausalLM

    folder = runs / f"{model}.{TESTED[model].split()[0]}.train.hf"
    _, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading_info["missing_keys"] and not loading_info["mismatched_keys"]
    assert all(
        name.startswith(f"model.layers.{LAYERS}.") for name in loading_info["unexpected_keys"]
    )
