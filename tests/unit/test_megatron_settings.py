"""`trainer.megatron`, `trainer.ddp`, `trainer.optimizer.megatron`: settings that the installed
Megatron's classes do not allow are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import vendor_arguments

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.plan.resolve import resolve
from megarl.plan.vendor_settings import (
    CLASSES,
    MEGATRON,
    MEGATRON_BY_KEY,
    MEGATRON_REFUSED,
    VENDOR_ARGUMENTS,
    version_of,
)
from megarl.plan.vendor_settings import (
    vendor_arguments as arguments_of,
)

CONFIG = Path(__file__).parents[2] / "configs/8b_aipo.yaml"


def problems(*overrides: str) -> list[str]:
    try:
        resolve(load_config(CONFIG, ["trainer.recompute=false", *overrides]), "plan")
    except ConfigError as error:
        return error.problems
    return []


def test_table_is_that_of_the_installed_packages() -> None:
    assert VENDOR_ARGUMENTS.read_text(encoding="utf-8") == vendor_arguments.text_of(
        vendor_arguments.table()
    ), "python tests/tools/vendor_arguments.py writes it anew"


@pytest.mark.parametrize("key", CLASSES)
def test_every_name_in_the_tables_is_a_field(key: str) -> None:
    assert set(MEGATRON_BY_KEY[key]) | set(MEGATRON_REFUSED[key]) <= set(
        arguments_of(MEGATRON, key)
    )
    assert not set(MEGATRON_BY_KEY[key]) & set(MEGATRON_REFUSED[key])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "trainer.megatron.hidden_size=64",
            "must be set by model.path, whose config.json decides it",
        ),
        ("trainer.megatron.tensor_model_parallel_size=2", "must be set by trainer.tp"),
        (
            "trainer.megatron.hidden_dropout=0.1",
            "must be left out; the trainer's log-probs would differ from those of the engines",
        ),
        (
            "trainer.megatron.glu_linear_offset=1.0",
            "must be left out; the engines do not compute it",
        ),
        (
            "trainer.megatron.moe_mlp_glu_interleave_size=32",
            "must be left out; weights are read where the layout has them, and this would put "
            "them elsewhere",
        ),
        (
            "trainer.megatron.softmax_type=learnable",
            "must be left out; the engines do not compute it",
        ),
        (
            "trainer.megatron.account_for_loss_in_pipeline_split=true",
            "must be set by trainer.last_stage_layers",
        ),
        ("trainer.megatron.recompute_granularity=some", "must be one of full, selective or null"),
        ("trainer.megatron.recompute_modules=core_attn", "must be Optional[List[str]]"),
        (
            "trainer.megatron.attention_backend=fast",
            "must be one of auto, flash, fused, local, unfused; did you mean flash?",
        ),
        (
            "trainer.megatron.grad_sync_func=f",
            "must be left out; it is a Optional[Callable], which a config cannot state",
        ),
        (
            "trainer.megatron.recompute_granularit=full",
            f"unknown to megatron-core {version_of(MEGATRON)}; did you mean recompute_granularity?",
        ),
        ("trainer.ddp.use_distributed_optimizer=true", "must be set by trainer.zero"),
        ("trainer.ddp.bucket_size=many", "must be an integer or null"),
        ("trainer.ddp.bucket_size=0", "must be at least 1"),
        (
            "trainer.ddp.zzz=1",
            f"unknown to megatron-core {version_of(MEGATRON)}; it is no field of "
            "DistributedDataParallelConfig",
        ),
        ("trainer.optimizer.megatron.lr=1", "must be set by trainer.optimizer.lr"),
        (
            "trainer.optimizer.megatron.decoupled_lr=0.1",
            "must be left out; all parameters have the same learning rate",
        ),
        (
            "trainer.optimizer.megatron.loss_scale=2",
            "must be left out; float16 is not trained in: model.dtype is float32 or bfloat16",
        ),
    ],
)
def test_setting_is_refused_with_its_reason(setting: str, message: str) -> None:
    assert problems(setting) == [f"{setting}: {message}"]


def test_ddp_has_no_effect_with_sharded_parameters() -> None:
    (problem,) = problems("trainer={zero: 3, ddp: {bucket_size: 9}}")
    assert problem.startswith('trainer.ddp={"bucket_size": 9}: has no effect with trainer.zero=3')


def test_sharded_parameters_need_gradients_of_autograd() -> None:
    setting = "trainer.megatron.gradient_accumulation_fusion=true"
    assert not problems(setting)
    (problem,) = problems(setting, "trainer.zero=3")
    assert problem.startswith(f"{setting}: must be left out with trainer.zero=3")


def test_recomputing_everything_and_a_part_exclude_each_other() -> None:
    (problem,) = problems(
        "trainer.recompute=true", "trainer.megatron.recompute_granularity=selective"
    )
    assert problem.startswith(
        "trainer.megatron.recompute_granularity: must be left out with trainer.recompute=true"
    )


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.megatron={recompute_granularity: selective, recompute_modules: [core_attn]}",
        "trainer.megatron.fp8=hybrid",
        "trainer.megatron.moe_enable_deepep=true",
        "trainer.megatron.attention_backend=flash",
        "trainer.ddp.overlap_grad_reduce=true",
        "trainer.ddp={bucket_size: 1000000}",
        "trainer.optimizer.megatron.log_num_zeros_in_grad=true",
    ],
)
def test_setting_of_megatron_is_passed_on(setting: str) -> None:
    assert problems(setting) == []
