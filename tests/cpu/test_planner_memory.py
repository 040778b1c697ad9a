"""The planner's memory against real parts: a Megatron trainer on two gloo ranks that measures
itself, and HF's models on the meta device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_reference  # noqa: F401  makes transformers importable without CUDA
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.config.schema import TrainerConfig
from megarl.estimate.hardware import GPUS
from megarl.estimate.memory import stage_memory
from megarl.models import load_spec
from megarl.reshard.layout import parameter_count

pytestmark = pytest.mark.long

MODELS = Path(__file__).parents[2] / "configs" / "models"
DEADLINE_S = 150
TOKENS = 128
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 640, "vocab_size": 512, "max_position_embeddings": 512,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = dict(
    LLAMA, architectures=["Qwen3MoeForCausalLM"], moe_intermediate_size=128, num_experts=8,
    num_experts_per_tok=2, head_dim=32,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
DEEP = dict(LLAMA, num_hidden_layers=4)
SP_RECOMPUTE = {"tp": 2, "sequence_parallel": True, "recompute": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tp2_zero0": (LLAMA, {"tp": 2, "zero": 0}, "bfloat16"),
    "dp2_zero1": (LLAMA, {"dp": 2}, "bfloat16"),
    "dp2_zero0_float32": (LLAMA, {"dp": 2, "zero": 0}, "float32"),
    "dp2_zero1_float32": (LLAMA, {"dp": 2}, "float32"),
    "cp2": (LLAMA, {"cp": 2}, "bfloat16"),
    "pp2": (LLAMA, {"pp": 2}, "bfloat16"),
    "ep2": (EXPERTS, {"dp": 2, "ep": 2}, "bfloat16"),
    "tp2_ep2": (EXPERTS, dict(SP_RECOMPUTE, ep=2), "bfloat16"),
    "two_layers": (LLAMA, SP_RECOMPUTE, "bfloat16"),
    "four_layers": (DEEP, SP_RECOMPUTE, "bfloat16"),
    "two_layers_kept_bfloat16": (LLAMA, {"tp": 2}, "bfloat16"),
    "four_layers_kept_bfloat16": (DEEP, {"tp": 2}, "bfloat16"),
    "two_layers_kept_float32": (LLAMA, {"tp": 2}, "float32"),
    "four_layers_kept_float32": (DEEP, {"tp": 2}, "float32"),
}


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    """The measurements of both ranks, by case. All cases run in the same two processes."""
    folder = tmp_path_factory.mktemp("plan_memory")
    cases = [
        {"model": model, "trainer": trainer, "dtype": dtype, "tokens": TOKENS}
        for model, trainer, dtype in CASES.values()
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    worker = Path(__file__).with_name("plan_memory_worker.py")
    processes = []
    logs = []
    try:
        for rank in range(2):
            arguments = [
                str(rank),
                "2",
                str(folder / "rendezvous"),
                str(folder / "cases.json"),
                str(folder / f"{rank}.json"),
            ]
            logs.append(folder / f"{rank}.log")
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(worker), *arguments],
                    env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
                    stdout=logs[-1].open("w"), stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        for process, log in zip(processes, logs):
            assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_a_real_trainer_holds_what_was_planned(
    weighed: dict[str, list[dict[str, int]]], name: str
) -> None:
    """Weights are exact to the byte; gradients and Adam's state up to the padding of Megatron's
    buffers.
    """
    model, sizes, dtype = CASES[name]
    trainer = TrainerConfig(**sizes)
    stages = stage_memory(load_spec(model), trainer, dtype, GPUS["cpu"])
    for rank, measured in enumerate(weighed[name]):
        planned = stages[rank if trainer.pp == 2 else 0]
        assert measured["weights"] == planned.weights
        assert measured["gradients"] == pytest.approx(planned.gradients, rel=3e-4)
        assert measured["optimizer"] == pytest.approx(planned.optimizer, rel=3e-4)


def test_a_recomputed_layer_keeps_what_enters_it(weighed: dict[str, list[dict[str, int]]]) -> None:
    """Two more layers keep two more inputs, each half of the sequence, and nothing else."""
    for few, many in zip(weighed["two_layers"], weighed["four_layers"]):
        assert many["kept"] - few["kept"] == 2 * TOKENS // 2 * 256 * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layer_on_cpu_keeps_what_was_planned(
    weighed: dict[str, list[dict[str, int]]], dtype: str
) -> None:
    """A CPU does not fuse norms, rotary embeddings and SwiGLU, and keeps their parts: almost twice
    as much as a GPU.
    """
    trainer = TrainerConfig(tp=2, max_tokens_per_microbatch=TOKENS)
    extra: dict[str, float] = {}
    for gpu in ("cpu", "H100"):
        two, four = (
            stage_memory(load_spec(model), trainer, dtype, GPUS[gpu])[0] for model in (LLAMA, DEEP)
        )
        extra[gpu] = four.activations - two.activations
    for few, many in zip(weighed[f"two_layers_kept_{dtype}"], weighed[f"four_layers_kept_{dtype}"]):
        assert many["kept"] - few["kept"] == pytest.approx(extra["cpu"], rel=0.05)
    assert 1.5 * extra["H100"] < extra["cpu"] < 2.2 * extra["H100"]


@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "llama-3.1-405b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b"]
)
def test_parameters_are_those_of_hf_on_the_meta_device(model: str) -> None:
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS / model))
    assert parameter_count(load_spec(MODELS / model)) == sum(
        parameter.numel() for parameter in reference.parameters()
    )
