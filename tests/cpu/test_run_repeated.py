"""With async.capacity=0 and deterministic, a run is a function of its seed: to the last bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_tools import OVERRIDES, environment, json_lines, make_model, rows, succeed
from safetensors.torch import load_file

from megarl.plan.checkpoints import complete_checkpoints

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

REPEATED = [
    *OVERRIDES,
    "async.capacity=0",
    "deterministic=true",
    "trainer.tp=1",
    "reward.name=reward_functions:by_chance",
    "trainer.optimizer.lr=1e-3",
    "observe.rollouts_per_step=4",
    "checkpoint.hf_every=6",
    "checkpoint.every=3",
    "checkpoint.keep=9",
]
VARIANTS = {  # family of the model, and settings
    "engine of two ranks": ("llama", ["generator.tp=2"]),
    "mixture of experts": ("qwen3_moe", []),
}
# so that requests meet others by chance
SMALL_BATCHES = ["generator.engines=2", "generator.max_concurrency=3"]


@pytest.fixture(scope="module")
def first(model, tmp_path_factory) -> Path:
    return train(model, tmp_path_factory.mktemp("first") / "run")


def train(model: Path, run_dir: Path, *overrides: str) -> Path:
    succeed(
        [
            "train",
            "configs/quickstart.yaml",
            f"model.path={model}",
            f"run_dir={run_dir}",
            *REPEATED,
            *overrides,
        ],
        # the second worker of an engine dies in a fork of a fork
        imported="generator.tp=2" not in overrides,
    )
    return run_dir


def numbers(run_dir: Path) -> list[dict]:
    """The metrics of each step, without times."""
    timed = (
        "time/",
        "eval/seconds",
        "samples_per_s",
        "tokens_per_s",
        "wall_s",
        "sync/",
        "flops",
        "memory/",
        "mfu",
        "engines/",
    )
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(timed) and not key.endswith("_s")
        }
        for row in rows(run_dir)
    ]


def samples(run_dir: Path) -> list[dict]:
    return json_lines(run_dir / "rollouts/samples.jsonl")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    [*_, last] = sorted(run_dir.glob("**/model*.safetensors"))
    return weights(last.parent)


def equal_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def test_run_is_repeated_bit_for_bit(model, first, tmp_path) -> None:
    second = train(model, tmp_path / "run", *SMALL_BATCHES)
    assert len(samples(first)) == 24 and samples(second) == samples(first)
    assert numbers(second) == numbers(first)
    assert equal_tensors(exported(second), exported(first)) and not equal_tensors(
        exported(first), weights(model)
    ), "the weights have moved"


@pytest.mark.parametrize("variant", VARIANTS)
def test_run_is_repeated_in_other_shapes(variant: str, tmp_path: Path) -> None:
    family, settings = VARIANTS[variant]
    model = make_model(tmp_path / "model", family)
    first = train(model, tmp_path / "first", *settings, "max_steps=4")
    second = train(
        model, tmp_path / "second", *settings, "max_steps=4", "generator.max_concurrency=3"
    )
    assert len(samples(first)) == 16 and samples(second) == samples(first)
    assert numbers(second) == numbers(first)


def test_resumed_run_equals_unbroken_one(model, first, tmp_path) -> None:
    run_dir = train(model, tmp_path / "run", "max_steps=3")
    assert complete_checkpoints(run_dir)
    train(model, run_dir)
    assert samples(run_dir) == samples(first)
    assert equal_tensors(exported(run_dir), exported(first))


def test_run_equals_plain_synchronous_loop(model, first, tmp_path) -> None:
    script = [
        sys.executable,
        str(Path(__file__).with_name("plain_loop.py")),
        "configs/quickstart.yaml",
        str(tmp_path),
    ]
    plain = subprocess.run(
        [*script, f"model.path={model}", *REPEATED],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert plain.returncode == 0, plain.stdout + plain.stderr
    steps = json_lines(tmp_path / "steps.jsonl")
    groups = [group for step in steps for group in step["groups"]]
    assert groups == [
        [[sample["text"], sample["reward"]] for sample in group["samples"]]
        for group in samples(first)
    ]
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [
        (row["loss"], row["grad_norm"]) for row in rows(first)
    ]
    assert equal_tensors(weights(tmp_path / "hf"), exported(first))
