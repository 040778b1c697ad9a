"""The section `lora`: refused settings, the layouts of adapters, and their costs in the plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resolving import MODEL, config, problems_of, with_weights

from megarl.base.geometry import TrainerTopology
from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig, TrainerConfig
from megarl.estimate.estimate import estimate
from megarl.estimate.hardware import GPUS
from megarl.estimate.memory import trainer_memory
from megarl.lora.estimate import adapter_elements, adapter_elements_by_stage
from megarl.lora.files import adapter_settings, check_adapter, shown
from megarl.lora.layout import Lora, lora_tensors, targets
from megarl.lora.plan import check_lora
from megarl.lora.settings import LoraConfig
from megarl.models import load_spec
from megarl.plan.resolve import resolve
from megarl.plan.weights import begin_with, find_weights
from megarl.reshard.layout import parameter_count

pytestmark = pytest.mark.usefixtures("hub_offline")

MODELS = MODEL.parent
RANK8 = Lora(8, 32.0, ("all",))


def test_contradictory_settings_of_lora_are_refused(tmp_path: Path) -> None:
    wrong = ["lora.rank=8", "lora.experts=shared", "lora.targets=[q_proj,gate,lm_head]"]
    assert problems_of(tmp_path, *wrong, "trainer.megatron.tp_comm_overlap=true") == [
        'lora.targets=["q_proj", "gate", "lm_head"]: gate, lm_head is no linear layer of a llama '
        "model; it has q_proj, k_proj, v_proj, "
        "o_proj, gate_proj, up_proj, down_proj, or all",
        "lora.experts=shared: must be own: no target is of an expert",
        "trainer.megatron.tp_comm_overlap=true: must be left out with lora.rank=8",
    ]
    assert resolve(config(tmp_path, *wrong[1:])), "without a rank the section has no effect"
    assert resolve(config(tmp_path, *wrong[1:], "lora.rank=0")).config.lora.rank is None
    with pytest.raises(
        ConfigError, match="lora.targets=\\[\\]: must be a list of at least one name, or all"
    ):
        config(tmp_path, "lora.targets=[]")
    assert config(tmp_path, "lora.targets=all").lora.targets == ["all"]


def test_ranks_that_share_a_head_need_adapters_of_all_projections(tmp_path: Path) -> None:
    """A rank's rows would otherwise be another number of adapted rows than its neighbour's."""
    sizes = ["lora.rank=8", "trainer.tp=16"]
    assert problems_of(tmp_path, *sizes, "lora.targets=[q_proj,v_proj]") == [
        'lora.targets=["q_proj", "v_proj"]: must have all or none of q_proj, k_proj and v_proj with '
        "trainer.tp=16 above the model's 8 key-value heads, as ranks then hold unlike parts of them"
    ]
    assert resolve(config(tmp_path, *sizes, "lora.targets=[q_proj,k_proj,v_proj]"))
    assert resolve(config(tmp_path, *sizes, "lora.targets=[down_proj]"))


def test_fused_projections_cannot_have_adapters() -> None:
    [problem] = check_lora(RunConfig(lora=LoraConfig(rank=8)), load_spec(MODELS / "phi-4"))
    fused = "model.layers.*.self_attn.qkv_proj.weight and model.layers.*.mlp.gate_up_proj.weight"
    assert (
        problem
        == f"lora.rank=8: must be null: PEFT has one adapter each for {fused} of a phi3 checkpoint"
    )


def test_a_warm_start_of_all_weights_or_of_adapters(tmp_path: Path) -> None:
    first = ["lora.rank=8", f"lora.init={tmp_path}/adapter", "sft.steps=1"]
    (twice,) = problems_of(tmp_path, with_weights(tmp_path / "model"), *first, command="sft")
    assert (
        twice
        == f"lora.init={tmp_path}/adapter: must be null for megarl sft, since the run would begin "
        "with it once more"
    )
    (random,) = problems_of(
        tmp_path, "lora.rank=8", "model.random_init=true", "sft.steps=1", command="sft"
    )
    assert (
        random == "model.random_init=true: adapters cannot make a model of random weights; set "
        "sft.adapters=false to train all of them"
    )
    full = resolve(
        config(
            tmp_path, "lora.rank=8", "model.random_init=true", "sft.steps=1", "sft.adapters=false"
        ),
        "sft",
    )
    assert full.config.lora.rank is None


def test_resumed_run_needs_the_weights_below_its_adapters(tmp_path: Path) -> None:
    settings = config(tmp_path, with_weights(tmp_path / "model"), "lora.rank=8")
    (tmp_path / "run/checkpoints/step_000001").mkdir(parents=True)
    begin_with(settings, find_weights(settings, None), "0")
    assert find_weights(settings, "export").fingerprint == "0"
    next((tmp_path / "model").glob("*.safetensors")).unlink()
    for command in ("train", "export"):
        with pytest.raises(ConfigError) as refused:
            resolve(settings, command)
        reason = f"but {tmp_path}/model holds no weights any more"
        assert (
            f"lora.rank=8: the weights that its adapters belong to are what the run began with, {reason}"
            in refused.value.problems
        )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layer_spec", ["local", "te"])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("llama-3.1-8b", {"tp": 2, "pp": 2, "vpp": 2}),
        ("qwen3-30b-a3b", {"tp": 2, "ep": 2, "etp": 2, "dp": 4}),
        ("mixtral-8x7b", {"dp": 2, "ep": 2}),
        ("deepseek-v3", {"tp": 2, "dp": 2, "ep": 2}),
    ],
)
def test_every_element_of_an_adapter_has_one_owner(
    model: str, sizes: dict[str, int], layer_spec: str, shared: bool
) -> None:
    spec = load_spec(MODELS / model)
    experts = replace(spec.experts, count=8) if spec.experts else None
    spec = replace(
        spec, num_layers=max(4, experts.first_layer + 1) if experts else 4, experts=experts
    )
    for names in (("all",), ("v_proj", "o_proj", "up_proj", "w1", "kv_b_proj")):
        lora = Lora(4, 8.0, names, shared)
        layout = lora.trainer_layout(spec, TrainerTopology(**sizes), "bfloat16", layer_spec)
        owned = {}
        for rank in range(layout.world_size):
            for _, piece in layout.owned_pieces(rank):
                owned[piece.logical_name] = owned.get(piece.logical_name, 0) + piece.logical.numel
        assert owned == {
            tensor.name: math.prod(tensor.shape)
            for tensor in lora.hf_layout(spec, "bfloat16").tensors(0)
        }


def test_adapters_of_latent_attention_and_of_shared_factors() -> None:
    spec = load_spec(MODELS / "deepseek-v3")
    assert targets(spec) == (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    shapes = {
        tensor.name: (tensor.shape, tensor.experts)
        for tensor in lora_tensors(spec, replace(RANK8, shared=True))
    }
    layer = "model.layers.{layer}."
    assert shapes[layer + "self_attn.kv_a_proj_with_mqa.lora_B.weight"] == ((576, 8), 0)
    assert shapes[layer + "mlp.experts.gate_proj.lora_A.weight"] == ((8, 7168), 0)
    assert shapes[layer + "mlp.experts.{expert}.gate_proj.lora_B.weight"] == ((2048, 8), 256)
    assert shapes[layer + "mlp.experts.{expert}.down_proj.lora_A.weight"] == ((8, 2048), 256)
    assert shapes[layer + "mlp.experts.down_proj.lora_B.weight"] == ((7168, 8), 0)
    assert shown("model.layers.3.mlp.experts.down_proj.lora_B.weight", (7168, 8))[1] == (1, 7168, 8)
    assert shown("model.layers.3.mlp.experts.7.down_proj.lora_A.weight", (8, 2048))[1] == (8, 2048)
    assert shown("model.layers.3.mlp.shared_experts.down_proj.lora_B.weight", (7168, 8))[1] == (
        7168,
        8,
    )


def test_trainer_memory_has_gradients_of_adapters_alone(tmp_path: Path) -> None:
    spec = load_spec(MODEL)
    trainer = TrainerConfig(tp=8, dp=2)
    merges = adapter_elements(
        config(tmp_path, "lora.rank=8", "lora.sync=merge"), spec, trainer, "cuda"
    )
    full = trainer_memory(spec, trainer, "bfloat16", GPUS["H100"], reference=True)
    with_adapters = trainer_memory(
        spec, trainer, "bfloat16", GPUS["H100"], reference=True, adapter_elements=merges
    )
    ((adapters, merged),) = adapter_elements_by_stage(spec, trainer, "bfloat16", RANK8)
    # qkv, o, gate and up, down
    inner = [
        3 * 4096 + (4096 + 2 * 1024) // 8,
        4096 // 8 + 4096,
        2 * 4096 + 2 * 14336 // 8,
        14336 // 8 + 4096,
    ]
    assert adapters.total == 32 * 8 * sum(inner)
    assert merged.total == pytest.approx((parameter_count(spec) - 2 * 128256 * 4096) / 8, rel=1e-3)
    assert with_adapters.gradients == 4 * adapters.total
    assert with_adapters.optimizer == 12 * adapters.total / 2
    assert with_adapters.weights == full.weights + 2 * (adapters.total + merged.total)
    assert (with_adapters.reference, full.reference) == (
        0,
        full.weights,
    )
    assert with_adapters.activations == full.activations


def test_a_plan_with_adapters_takes_less_time_and_memory(tmp_path: Path) -> None:
    spec = load_spec(MODEL)
    sizes = ["trainer.tp=8", "trainer.dp=2"]
    full = estimate(config(tmp_path, *sizes), spec)
    with_adapters = estimate(config(tmp_path, *sizes, "lora.rank=8"), spec)
    assert with_adapters.saving < full.saving / 100
    assert with_adapters.trainer.total < full.trainer.total
    assert 0.6 < with_adapters.train.compute / full.train.compute < 0.75, "two products of three"
    assert with_adapters.train.data_parallel < full.train.data_parallel / 10
    assert with_adapters.generate == full.generate


def test_a_plan_with_adapters_alone_or_merged(tmp_path: Path) -> None:
    spec = load_spec(MODEL)
    sizes = ["trainer.tp=8", "trainer.dp=2", "generator.tp=2"]
    full = estimate(config(tmp_path, *sizes), spec)
    alone = estimate(config(tmp_path, *sizes, "lora.rank=8"), spec)
    merged = estimate(config(tmp_path, *sizes, "lora.rank=8", "lora.sync=merge"), spec)
    ((_, copies),) = adapter_elements_by_stage(spec, TrainerConfig(tp=8, dp=2), "bfloat16", RANK8)
    assert merged.trainer.weights - alone.trainer.weights == 2 * copies.total
    assert merged.trainer.weights > full.trainer.weights
    inner = [
        3 * 4096 + (4096 + 2 * 1024) // 2,
        4096 // 2 + 4096,
        2 * 4096 + 2 * 14336 // 2,
        14336 // 2 + 4096,
    ]
    assert alone.generator.weights - full.generator.weights == 2 * (2 * 32 * 8 * sum(inner)), (
        "two slots in bf16"
    )
    assert merged.generator == full.generator
    assert merged.sync_s == full.sync_s
    assert alone.sync_s < full.sync_s / 50


class TestAdapterFolder:
    """lora.init."""

    LORA = LoraConfig(rank=2, alpha=4.0, targets=["q_proj", "down_proj"])

    def spec(self):
        return replace(load_spec(MODELS / "tiny-llama"), num_layers=1)

    def write(self, folder: Path, **settings: Any) -> LoraConfig:
        import numpy as np
        from safetensors.numpy import save_file

        lora = Lora.of(self.LORA)
        assert lora is not None
        folder.mkdir()
        tensors = dict(
            shown(tensor.name, tensor.shape)
            for tensor in lora.hf_layout(self.spec(), "float32").tensors(0)
        )
        save_file(
            {name: np.zeros(shape, np.float32) for name, shape in tensors.items()},
            folder / "adapter_model.safetensors",
        )
        written = adapter_settings(lora, ["down_proj", "q_proj"], "base", 0.0) | settings
        (folder / "adapter_config.json").write_text(json.dumps(written))
        return replace(self.LORA, init=str(folder))

    def problems(self, lora: LoraConfig) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            check_adapter(self.spec(), lora)
        return [
            problem.removeprefix(f"lora.init={lora.init}: ") for problem in refused.value.problems
        ]

    def test_folder_of_the_same_adapters_is_accepted(self, tmp_path: Path) -> None:
        check_adapter(self.spec(), self.write(tmp_path / "adapter"))

    def test_every_difference_of_an_adapter_is_named(self, tmp_path: Path) -> None:
        lora = self.write(
            tmp_path / "adapter",
            r=4,
            use_dora=True,
            use_bdlora={"nblocks": 2},
            bias="all",
            target_modules=["q_proj"],
        )
        assert self.problems(replace(lora, alpha=8.0)) == [
            "its r is 4; lora.rank=2",
            "its lora_alpha is 4; lora.alpha=8",
            'its target_modules are q_proj; lora.targets=["q_proj", "down_proj"] are down_proj, q_proj',
            "its bias is all; it must be none",
            "its use_dora is true, which is not supported",
            'its use_bdlora is {"nblocks": 2}, which is not supported',
        ]

    @pytest.mark.parametrize(
        "initialisation", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"]
    )
    def test_initialisation_that_changes_base_weights_is_refused(
        self, initialisation: str, tmp_path: Path
    ) -> None:
        (problem,) = self.problems(
            self.write(tmp_path / "adapter", init_lora_weights=initialisation)
        )
        assert problem.startswith(f"its init_lora_weights is {initialisation}: ")
        check_adapter(self.spec(), self.write(tmp_path / "ordinary", init_lora_weights="gaussian"))

    def test_tensors_that_do_not_fit_are_named(self, tmp_path: Path) -> None:
        lora = self.write(tmp_path / "adapter", r=3, target_modules=["q_proj", "o_proj"])
        of_others = self.problems(replace(lora, rank=3, targets=["o_proj", "q_proj"]))
        stem = "base_model.model.model.layers.0."
        assert len(of_others) == 6
        assert (
            f"tensor {stem}self_attn.q_proj.lora_A.weight is F32 of shape (2, 128); it must have "
            "shape (3, 128)" in of_others
        )
        assert (
            f"tensor {stem}self_attn.o_proj.lora_A.weight is missing in adapter_model.safetensors"
            in of_others
        )
        assert f"tensor {stem}mlp.down_proj.lora_B.weight belongs to no target" in of_others
        folder = tmp_path / "many"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(
            (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
        )
        (folder / "adapter_config.json").write_text(
            json.dumps(adapter_settings(RANK8, targets(self.spec()), None, 0.0))
        )
        of_many = self.problems(LoraConfig(rank=8, init=str(folder)))
        assert len(of_many) == 11
        assert of_many[-1] == "4 more tensors"

    def test_folder_without_an_adapter_is_refused(self, tmp_path: Path) -> None:
        (problem,) = self.problems(replace(self.LORA, init=str(tmp_path)))
        assert problem.startswith("is not the folder of a PEFT adapter: ")
        assert "adapter_config.json" in problem
