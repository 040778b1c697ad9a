"""Adapters of the Megatron trainer in real gloo processes, against plain PyTorch adapters on
Hugging Face's model in float64.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_reference import lora_reference
from safetensors.torch import load_file
from trainer_cases import LAYOUTS, save_model
from trainer_processes import saved, spawn
from trainer_reference import assert_same_gradients, hf_loss, load_float64
from trainer_rig import TEMPERATURE, sequences

from megarl.base.geometry import TrainerTopology
from megarl.lora.layout import Lora
from megarl.lora.settings import LoraConfig
from megarl.models import load_spec
from megarl.plan.checkpoints import Index

pytestmark = pytest.mark.long

ALL: dict[str, Any] = {"rank": 3, "alpha": 5.0}
# name -> (model, settings, layouts)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": (
        "untied",
        ALL,
        "single tp2 tp2_sp_recompute pp2 pp2_vpp2 cp2 dp2_zero0 dp2_zero1 tp2_pp2 tp4_sp "
        "dp2_zero3 tp2_dp2_sp_zero3",
    ),
    "tied": ("tied", ALL, "pp2"),
    "some": ("qwen2", ALL | {"targets": ["q_proj", "v_proj", "up_proj"]}, "tp2_sp_recompute"),
    "norms_after": ("olmo2", ALL, "tp2_sp_recompute tp4"),
    "own": ("qwen3_moe", ALL, "single ep2 ep2_zero0 ep2_zero3 tp2_etp2 dp2_tp2_etp2_ep2"),
    "shared": (
        "qwen3_moe",
        ALL | {"experts": "shared"},
        "single ep2 tp2_etp2 tp2_ep2 ep2_zero3 pp2_vpp2_ep2",
    ),
    "latent": ("deepseek_v3", ALL, "single tp2_ep2 cp2_ep2"),
}
# case -> the layout that saves, layouts that load
CHECKPOINTS = {
    "llama": ("tp2_zero1", "single pp2 dp2_zero3"),
    "shared": ("ep2", "single pp2_vpp2_ep2"),
}
LOADS = [(case, layout) for case, (_, layouts) in CHECKPOINTS.items() for layout in layouts.split()]
DROPOUT = [("llama", "single"), ("llama", "recompute"), ("llama", "tp2"), ("own", "tp2_etp2")]
LAYOUTS = LAYOUTS | {"recompute": (1, {}, {"recompute": True})}
RUNS = [(case, layout) for case, (_, _, layouts) in CASES.items() for layout in layouts.split()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {
        name: tmp_path_factory.mktemp(f"hf_{name}")
        for name in {model for model, _, _ in CASES.values()}
    }
    for name, folder in folders.items():
        save_model(name, folder)
    for name in [*folders]:
        folders[f"other.{name}"] = tmp_path_factory.mktemp(f"other_{name}")
        save_model(name, folders[f"other.{name}"], initializer_range=0.1)
    return folders


@pytest.fixture(scope="module")
def expected(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("adapters")
    return {
        case: lora_reference(models[model], lora, out / case) | {"path": out / case}
        for case, (model, lora, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def runs(
    models: dict[str, Path],
    expected: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("runs")

    def scenario(case: str, layout: str) -> dict[str, Any]:
        _, topology, settings = LAYOUTS[layout]
        model, lora, _ = CASES[case]
        of_layout = {"model": str(models[model]), "topology": topology, "trainer": settings}
        return {
            "run": "lora",
            "name": f"{case}.{layout}",
            **of_layout,
            "lora": lora | {"init": str(expected[case]["path"])},
        }

    def new(run: str, case: str, layout: str, **changed: Any) -> dict[str, Any]:
        """A trainer with newly initialised adapters."""
        checkpoint = str(out / f"checkpoint.{case}")
        other_model = str(models[f"other.{CASES[case][0]}"])
        fields = {"lora": CASES[case][1] | changed, "checkpoint": checkpoint, "other": other_model}
        return (
            scenario(case, layout)
            | {"run": f"lora_{run}", "name": f"{run}.{case}.{layout}"}
            | fields
        )

    for world in (2, 1, 4):
        runs = [scenario(case, layout) for case, layout in RUNS if LAYOUTS[layout][0] == world]
        if world == 1:
            runs.append(new("te", "own", "single"))
            runs.append(new("te", "shared", "single"))
        if world == 2:
            runs += [new("save", case, layout) for case, (layout, _) in CHECKPOINTS.items()]
        runs += [new("load", case, layout) for case, layout in LOADS if LAYOUTS[layout][0] == world]
        for case, layout in DROPOUT:
            if LAYOUTS[layout][0] == world:
                dropped = scenario(case, layout)
                runs.append(
                    dropped
                    | {
                        "run": "lora_dropout",
                        "name": f"dropout.{case}.{layout}",
                        "lora": dropped["lora"] | {"dropout": 0.5},
                    }
                )
        spawn(world, out, runs)
    return out


def lora_of(case: str) -> Lora | None:
    return Lora.of(LoraConfig(**CASES[case][1]))


def joined_adapters(
    folder: Path, case: str, layout: str, ranks: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The ranks' parts of the adapters, joined. Copies must agree."""
    spec = load_spec(folder)
    lora = lora_of(case)
    full_tensors = {
        t.name: torch.full(t.shape, torch.nan, dtype=torch.float64)
        for t in lora.hf_layout(spec, "float32").tensors(0)
    }
    for rank, parts in enumerate(ranks):
        for tensor in lora.trainer_layout(
            spec, TrainerTopology(**LAYOUTS[layout][1]), "float32"
        ).tensors(rank):
            for piece in tensor.pieces:
                local = parts[tensor.name][piece.local.slices()].double()
                target = full_tensors[piece.logical_name][piece.logical.slices()]
                filled = ~local.isnan() & ~target.isnan()
                torch.testing.assert_close(local[filled], target[filled], rtol=1e-5, atol=1e-6)
                target[~local.isnan()] = local[~local.isnan()]
    return full_tensors


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_gradients_equal_plain_adapters(
    models: dict[str, Path], runs: Path, expected: dict[str, Any], case: str, layout: str
) -> None:
    want = expected[case]
    ranks = saved(runs, f"{case}.{layout}")
    norm = math.sqrt(sum((grad**2).sum().item() for grad in want["grads"].values()))
    for batching in ("all", "microbatches"):
        gradients = joined_adapters(
            models[CASES[case][0]], case, layout, [rank[batching]["grads"] for rank in ranks]
        )
        assert_same_gradients(gradients, want["grads"])
        for rank in ranks:
            assert rank[batching]["loss"] == pytest.approx(want["loss"], rel=1e-5)
            assert rank[batching]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_log_probs_with_adapters_and_without(
    runs: Path, expected: dict[str, Any], case: str, layout: str
) -> None:
    for rank in saved(runs, f"{case}.{layout}"):
        for scores, reference in (("logprobs", "logprobs"), ("reference", "base")):
            for row, want in zip(rank[scores], expected[case][reference], strict=True):
                assert row == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_three_steps_move_the_adapters_alone(
    models: dict[str, Path], runs: Path, expected: dict[str, Any], case: str, layout: str
) -> None:
    """Nothing else has a gradient, a gradient buffer, or optimizer state."""
    ranks = saved(runs, f"{case}.{layout}")
    for rank in ranks:
        assert set(rank["moved"]) == rank["adapters"].keys()
        assert not rank["served"], (
            "SGLang gets experts' B with alpha / rank in it, and all else as it is"
        )
        assert rank["gradients of frozen"] == []
        elements = sum(values.numel() for values in rank["adapters"].values())
        # padded to equal shares
        assert rank["optimized"] <= elements <= rank["buffers"] < elements + 64 * 128 * len(ranks)
    adapters = joined_adapters(
        models[CASES[case][0]], case, layout, [rank["adapters"] for rank in ranks]
    )
    for name, values in expected[case]["trained"].items():
        torch.testing.assert_close(
            adapters[name], values, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    ("case", "layout"),
    [run for run in RUNS if run[1] in ("single", "tp2", "tp2_etp2", "tp2_ep2", "pp2_vpp2")],
)
def test_exported_weights_have_the_adapters_merged(
    runs: Path, expected: dict[str, Any], case: str, layout: str
) -> None:
    model = load_float64(runs / f"{case}.{layout}.merged")
    _, logprobs = hf_loss(model, sequences(model.config.vocab_size), TEMPERATURE)
    for row, want in zip(logprobs, expected[case]["logprobs"], strict=True):
        assert row == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_exported_adapters_are_those_that_were_loaded(
    runs: Path, expected: dict[str, Any], case: str, layout: str
) -> None:
    want, got = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (expected[case]["path"], runs / f"{case}.{layout}.adapter")
    )
    assert want.keys() == got.keys()
    for name, values in want.items():
        assert torch.equal(got[name], values), name
    settings = json.loads((runs / f"{case}.{layout}.adapter" / "adapter_config.json").read_text())
    adapter_config = json.loads((expected[case]["path"] / "adapter_config.json").read_text())
    assert {key: settings[key] for key in adapter_config} == adapter_config


@pytest.mark.parametrize("case", ["llama", "some"])
def test_peft_reads_an_exported_adapter(
    models: dict[str, Path], runs: Path, expected: dict[str, Any], case: str
) -> None:
    import peft

    folder = next(runs.glob(f"{case}.*.adapter"))
    model = peft.PeftModel.from_pretrained(load_float64(models[CASES[case][0]]), folder).double()
    _, logprobs = hf_loss(model, sequences(model.config.vocab_size), TEMPERATURE)
    for row, want in zip(logprobs, expected[case]["logprobs"], strict=True):
        assert row == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(("case", "layout"), LOADS)
def test_a_checkpoint_of_adapters_goes_on_under_other_sizes(
    models: dict[str, Path], runs: Path, case: str, layout: str
) -> None:
    """A checkpoint loads only over its own base weights.

    Initial adapters depend only on seed and names.
    """
    first = CHECKPOINTS[case][0]
    model = CASES[case][0]
    before = saved(runs, f"save.{case}.{first}")
    after = saved(runs, f"load.{case}.{layout}")
    for stage, tolerance in (("first", 0.0), ("third", 1e-5)):
        want = joined_adapters(models[model], case, first, [rank[stage] for rank in before])
        adapters = joined_adapters(models[model], case, layout, [rank[stage] for rank in after])
        for name, values in want.items():
            torch.testing.assert_close(
                adapters[name],
                values,
                rtol=0,
                atol=tolerance,
                msg=lambda m, name=name: f"{name}: {m}",
            )
            bound = 1 / math.sqrt(values.size(1))
            if stage == "first" and name.endswith("lora_A.weight"):
                assert values.abs().max() <= bound and values.abs().mean() > 0.3 * bound
            elif stage == "first":
                assert not values.any()
    for rank in after:
        assert "differs between what is held and what is stored" in rank["refused"]
        assert (
            f"weights that were in {models[model]}; the run has {models[f'other.{model}']}"
            in rank["refused"]
        )


def test_a_checkpoint_of_adapters_has_nothing_of_the_model(
    models: dict[str, Path], runs: Path
) -> None:
    for case in CHECKPOINTS:
        tensors = {
            t.name: math.prod(t.shape)
            for t in lora_of(case)
            .hf_layout(load_spec(models[CASES[case][0]]), "float32")
            .tensors(0)
        }
        index = Index.read(runs / f"checkpoint.{case}")
        names = {name for name in index.tensors if not name.startswith("random/")}
        assert names == {
            f"{kind}/{name}" for kind in ("master", "exp_avg", "exp_avg_sq") for name in tensors
        }
        assert json.loads((runs / f"checkpoint.{case}/state.json").read_text())["base"] == str(
            models[CASES[case][0]]
        )


@pytest.mark.parametrize(("case", "layout"), DROPOUT)
def test_dropout_is_the_seeds_and_of_training_alone(
    models: dict[str, Path], runs: Path, expected: dict[str, Any], case: str, layout: str
) -> None:
    ranks = saved(runs, f"dropout.{case}.{layout}")
    one, again = (
        joined_adapters(
            models[CASES[case][0]], case, layout, [rank[name]["grads"] for rank in ranks]
        )
        for name in ("one", "again")
    )
    scale = max(grad.abs().max().item() for grad in expected[case]["grads"].values())
    for name, grad in one.items():
        torch.testing.assert_close(again[name], grad, rtol=0, atol=1e-6 * scale, equal_nan=True)
    assert (
        max(
            (grad - expected[case]["grads"][name]).abs().nan_to_num().max().item()
            for name, grad in one.items()
        )
        > 0.05 * scale
    )
    for rank in ranks:
        for row, want in zip(rank["logprobs"], expected[case]["logprobs"], strict=True):
            assert row == pytest.approx(want, abs=1e-5)
    if layout == "recompute":  # recomputation drops the same elements
        for name, grad in joined_adapters(
            models["untied"],
            case,
            "single",
            [saved(runs, f"dropout.{case}.single")[0]["one"]["grads"]],
        ).items():
            torch.testing.assert_close(one[name], grad, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("case", ["own", "shared"])
def test_adapters_on_layers_of_transformer_engine(runs: Path, case: str) -> None:
    (result,) = saved(runs, f"te.{case}.single")
    assert result["held"] == result["layout"]
    for (got, bias), (merged, _), (plain, _) in result["pairs"]:
        assert bias is None
        torch.testing.assert_close(got, merged, rtol=1e-4, atol=1e-3)
        assert not torch.allclose(got, plain, rtol=1e-2, atol=1e-1)
