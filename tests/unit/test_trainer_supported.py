"""What the trainer refuses, with all problems at once, and what it must not refuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.models.registry import load_spec
from megarl.plan.resolve import resolve
from megarl.topology import TrainerTopology
from megarl.trainer import norm_names
from megarl.trainer.supported import check_supported

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def problems(model: str, *, sequence_parallel: bool = True, dtype: str = "bfloat16", **topology: Any) -> str:
    try:
        check_supported(load_spec(CONFIGS / "models" / model), TrainerTopology(**topology), dtype, sequence_parallel)
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


@pytest.mark.parametrize(
    ("model", "topology"),
    [
        ("llama-3.1-405b", {"tp": 8, "pp": 9, "vpp": 2, "cp": 2, "dp": 2}),
        ("llama-3.1-8b", {"pp": 4, "first_stage_layers": 6, "last_stage_layers": 6}),
        ("qwen2.5-7b", {"tp": 4, "cp": 2}),
        ("qwen3-8b", {"tp": 8}),
        ("qwen3-30b-a3b", {"tp": 4, "ep": 8, "dp": 2, "pp": 2, "vpp": 2}),
        ("mixtral-8x7b", {"tp": 2, "etp": 2, "ep": 4, "dp": 4}),
        ("deepseek-v3", {"tp": 8, "pp": 4, "ep": 8, "dp": 2, "first_stage_layers": 15, "last_stage_layers": 14}),
    ],
)
def test_builds(model: str, topology: dict[str, Any]) -> None:
    assert problems(model, **topology) == ""


@pytest.mark.parametrize(
    ("model", "topology", "wanted"),
    [
        ("llama-3.1-8b", {"fsdp": "rows"}, "trainer.fsdp=rows"),
        ("llama-3.1-8b", {"vpp": 2}, "trainer.vpp=2: needs trainer.pp"),
        ("llama-3.1-8b", {"ep": 2}, "trainer.ep=2: must be 1: a llama model has no experts"),
        ("llama-3.1-8b", {"tp": 16}, "key/value heads (8)"),
        ("llama-3.1-8b", {"pp": 3}, "trainer.pp = 3 does not divide num_hidden_layers = 32"),
        ("mixtral-8x7b", {"ep": 3, "dp": 3}, "trainer.ep = 3 does not divide num_experts = 8"),
        ("mixtral-8x7b", {"tp": 2, "sequence_parallel": False}, "trainer.sequence_parallel=false: must be true"),
    ],
)
def test_refuses(model: str, topology: dict[str, Any], wanted: str) -> None:
    assert wanted in problems(model, **topology)


@pytest.mark.parametrize(
    ("model", "settings", "wanted"),
    [
        ("mixtral-8x7b", ["trainer.tp=2", "generator.tp=8"], "trainer.sequence_parallel=false: must be true for a model with experts"),
        ("deepseek-v3", ["generator.tp=8", "generator.quantization=fp8_channel"], "fp8_channel: must be null or fp8_block"),
        ("llama-3.1-8b", ["trainer.fsdp=flat"], "trainer.fsdp=flat: only null can be trained"),
    ],
)
def test_a_run_is_refused_before_it_starts(model: str, settings: list[str], wanted: str) -> None:
    spec = CONFIGS / "models" / model
    with pytest.raises(ConfigError) as raised:
        resolve(load_config(str(CONFIGS / "quickstart.yaml"), [f"model.path={spec}", *settings]), "train")
    assert any(wanted in problem for problem in raised.value.problems), raised.value.problems


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"experts_per_token": 6}, "num_experts_per_tok = 6 must be twice topk_group = 4"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be true for a router of sigmoid scores"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling type 'llama3' is not supported; supported are default, yarn"),
    ],
)
def test_refuses_routers_and_embeddings_that_megatron_computes_otherwise(change: dict[str, Any], wanted: str) -> None:
    spec = dataclasses.replace(load_spec(CONFIGS / "models" / "deepseek-v3"), **change)
    with pytest.raises(ConfigError) as raised:
        check_supported(spec, TrainerTopology(), "bfloat16", True)
    assert any(wanted in problem for problem in raised.value.problems), raised.value.problems


@pytest.mark.parametrize(("model", "needs_it"), [("llama-3.1-8b", False), ("mixtral-8x7b", True), ("deepseek-v3", True)])
def test_experts_and_latent_attention_need_transformer_engine_on_gpus(monkeypatch, model: str, needs_it: bool) -> None:
    assert problems(model) == "", "on CPUs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for installed in (False, True):
        monkeypatch.setattr(norm_names.importlib.util, "find_spec", lambda name: object() if installed else None)
        assert ("needs Transformer Engine on GPUs" in problems(model)) == (needs_it and not installed)
