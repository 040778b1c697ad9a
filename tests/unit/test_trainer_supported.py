"""Models that cannot be trained are refused when a run is planned; or by the trainer, if this
machine lacks something.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import TrainerConfig
from megarl.models.registry import load_spec
from megarl.plan.resolve import resolve
from megarl.trainer import cpu_support
from megarl.trainer.model import check_transformer_engine, passed_on

YARN = {
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            "mixtral-8x7b",
            ["trainer.tp=2", "generator.tp=8"],
            "trainer.sequence_parallel=false: must be true for a model with experts",
        ),
        (
            "glm-4.6",
            ["generator.tp=4", "generator.quantization=fp8_channel"],
            "fp8_channel: must be null or fp8_block",
        ),
        (
            "qwen3-next-80b-a3b",
            ["generator.tp=4", "generator.quantization=fp8_tensor"],
            "fp8_tensor: must be null or fp8_block",
        ),
        (
            "qwen3-next-80b-a3b",
            ["generator.tp=4", "lora.rank=8"],
            "lora.rank=8: must be null: no adapter is stated for the gated delta",
        ),
        (
            "qwen3-next-80b-a3b",
            ["trainer.cp=16"],
            "trainer.tp=2 * trainer.cp=16: must divide the model's 16 key heads",
        ),
        (
            "qwen3.5-397b-a17b",
            ["generator.tp=8", "lora.rank=8"],
            "lora.rank=8: must be null: no adapter is stated for the gated delta",
        ),
        (
            "qwen3.5-397b-a17b",
            ["generator.tp=8", "model.random_init=true"],
            "model.random_init=true: must be false for a model with a v",
        ),
        (
            "qwen3.5-397b-a17b",
            ["generator.tp=8", "generator.server_args.json_model_override_args='{}'"],
            "must be left out for a model",
        ),
        (
            "deepseek-v3",
            ["generator.tp=8", "generator.quantization=fp8_channel"],
            "fp8_channel: must be null or fp8_block",
        ),
    ],
)
def test_unsupported_settings_of_a_model_are_refused(
    model: str, settings: list[str], message: str
) -> None:
    spec = CONFIGS / "models" / model
    with pytest.raises(ConfigError) as raised:
        resolve(
            load_config(str(CONFIGS / "quickstart.yaml"), [f"model.path={spec}", *settings]),
            "train",
        )
    assert any(message in problem for problem in raised.value.problems), raised.value.problems


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 must be twice topk_group = 4"),
        ({"num_experts_per_tok": 300}, "= 300 must be at most the number of experts, 256"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be true for a router of sigmoid scores"),
        (
            {
                "rope_scaling": {
                    **YARN,
                    "rope_type": "llama3",
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            "its rope_scaling of type llama3 must be one of default, yarn",
        ),
    ],
)
def test_routers_and_rope_that_megatron_lacks_are_refused(
    tmp_path, change: dict[str, Any], message: str
) -> None:
    values = json.loads((CONFIGS / "models/deepseek-v3/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(ConfigError) as raised:
        resolve(
            load_config(
                str(CONFIGS / "quickstart.yaml"), [f"model.path={tmp_path}", "generator.tp=8"]
            ),
            "train",
        )
    assert any(message in problem for problem in raised.value.problems), raised.value.problems


@pytest.mark.parametrize(
    ("model", "needs_it"), [("llama-3.1-8b", False), ("mixtral-8x7b", True), ("deepseek-v3", True)]
)
def test_experts_and_mla_need_transformer_engine_on_gpus(
    monkeypatch, model: str, needs_it: bool
) -> None:
    spec = load_spec(CONFIGS / "models" / model)
    check_transformer_engine(spec, TrainerConfig())  # on CPUs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for installed in (False, True):
        monkeypatch.setattr(
            cpu_support.importlib.util, "find_spec", lambda name: object() if installed else None
        )
        with (
            pytest.raises(ConfigError, match="needs Transformer Engine on GPUs")
            if needs_it and not installed
            else nullcontext()
        ):
            check_transformer_engine(spec, TrainerConfig())


@pytest.mark.parametrize("setting", ["fp8", "tp_comm_overlap", "attention_backend"])
def test_settings_of_transformer_engine_are_refused_without_it(setting: str) -> None:
    spec = load_spec(CONFIGS / "models/llama-3.1-8b")
    with pytest.raises(
        ConfigError, match=f"trainer.megatron.{setting}=hybrid: needs GPUs with Transformer Engine"
    ):
        check_transformer_engine(spec, TrainerConfig(megatron={setting: "hybrid"}))
    check_transformer_engine(spec, TrainerConfig(megatron={setting: None}))


def test_recompute_of_transformer_engine_is_refused_without_it() -> None:
    spec = load_spec(CONFIGS / "models/llama-3.1-8b")
    with pytest.raises(
        ConfigError,
        match="trainer.megatron.recompute_modules: layernorm needs GPUs with Transformer Engine",
    ):
        check_transformer_engine(
            spec, TrainerConfig(megatron={"recompute_modules": ["core_attn", "layernorm"]})
        )


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("a and b"),
        ImportError("no module named apex"),
        RuntimeError("a and b"),
        ValueError(),
    ],
)
def test_errors_of_megatron_name_the_key_of_the_setting(error: Exception) -> None:
    with pytest.raises(ConfigError) as failure, passed_on("trainer.ddp", {"bucket_size": 5}):
        raise error
    assert (
        str(failure.value) == f'trainer.ddp={{"bucket_size": 5}}: Megatron refuses it: '
        f"{error if error.args else 'ValueError()'}"
    )
    with pytest.raises(type(error)) as failure, passed_on("trainer.ddp", {}):
        raise error
    assert failure.value is error, "without such fields it is no setting's fault"
