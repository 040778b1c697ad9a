"""What the trainer refuses, with all problems at once, and what it must not refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.models.registry import load_spec
from megarl.plan.resolve import resolve
from megarl.topology import TrainerTopology
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
        ("llama-3.1-405b", dict(tp=8, pp=9, vpp=2, cp=2, dp=2)),
        ("llama-3.1-8b", dict(pp=4, first_stage_layers=6, last_stage_layers=6)),
        ("qwen2.5-7b", dict(tp=4, cp=2)),
        ("qwen3-8b", dict(tp=8)),
        ("qwen3-30b-a3b", dict(tp=4, ep=8, dp=2, pp=2, vpp=2)),
        ("mixtral-8x7b", dict(tp=2, etp=2, ep=4, dp=4)),
    ],
)
def test_builds(model: str, topology: dict[str, Any]) -> None:
    assert problems(model, **topology) == ""


@pytest.mark.parametrize(
    ("model", "topology", "wanted"),
    [
        ("deepseek-v3", dict(), "family 'deepseek_v3' cannot be trained"),
        ("llama-3.1-8b", dict(fsdp="rows"), "trainer.fsdp=rows"),
        ("llama-3.1-8b", dict(vpp=2), "trainer.vpp=2: needs trainer.pp"),
        ("llama-3.1-8b", dict(ep=2), "trainer.ep=2: must be 1: a llama model has no experts"),
        ("llama-3.1-8b", dict(tp=16), "key/value heads (8)"),
        ("llama-3.1-8b", dict(pp=3), "trainer.pp = 3 does not divide num_hidden_layers = 32"),
        ("mixtral-8x7b", dict(ep=3, dp=3), "trainer.ep = 3 does not divide num_experts = 8"),
        ("mixtral-8x7b", dict(tp=2, sequence_parallel=False), "trainer.sequence_parallel=false: must be true"),
    ],
)
def test_refuses(model: str, topology: dict[str, Any], wanted: str) -> None:
    assert wanted in problems(model, **topology)


@pytest.mark.parametrize(
    ("model", "settings", "wanted"),
    [
        ("mixtral-8x7b", ["trainer.tp=2", "generator.tp=8"], "trainer.sequence_parallel=false: must be true for a model with experts"),
        ("deepseek-v3", ["generator.tp=8"], "a deepseek_v3 model cannot be trained"),
        ("llama-3.1-8b", ["trainer.fsdp=flat"], "trainer.fsdp=flat: only null can be trained"),
    ],
)
def test_a_run_is_refused_before_it_starts(model: str, settings: list[str], wanted: str) -> None:
    spec = CONFIGS / "models" / model
    with pytest.raises(ConfigError) as raised:
        resolve(load_config(str(CONFIGS / "quickstart.yaml"), [f"model.path={spec}", *settings]), "train")
    assert any(wanted in problem for problem in raised.value.problems), raised.value.problems
