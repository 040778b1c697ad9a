"""Engines on GPUs without SGLang's compiled kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from megarl.generator import torch_kernels
from megarl.generator.server import EngineKeys, EngineSettings, server_command


def command(device: str, **extra: str) -> tuple[dict, dict[str, str]]:
    settings = EngineSettings(
        "model", "bfloat16", 30000, context_length=64, max_running_requests=4, device=device
    )
    argv, environment = server_command(settings, EngineKeys("a", "b"), extra)
    return json.loads(argv[-1]), environment


def test_engine_computes_with_torch_and_triton_if_asked(monkeypatch):
    monkeypatch.setenv(torch_kernels.TORCH_KERNELS, "1")
    arguments, environment = command("cuda")
    assert arguments["attention_backend"] == "triton"
    assert environment["SGLANG_FORCE_FUSED_OP_BACKEND"] == "torch"


def test_engine_keeps_its_compiled_kernels_otherwise(monkeypatch):
    monkeypatch.delenv(torch_kernels.TORCH_KERNELS, raising=False)
    arguments, environment = command("cuda")
    assert "attention_backend" not in arguments
    assert "SGLANG_FORCE_FUSED_OP_BACKEND" not in environment


def test_torch_kernels_leave_room_for_own_arguments(monkeypatch):
    monkeypatch.setenv(torch_kernels.TORCH_KERNELS, "1")
    arguments, _ = command("cuda", attention_backend="fa3")
    assert arguments["attention_backend"] == "fa3"


@pytest.mark.parametrize("line, printed", [
    ("from sgl_kernel.utils import is_arch_support_pdl as f; print(f())", "False"),
    ("from sgl_kernel import weak_ref_tensor as f; print(f(7))", "7"),
    ("from sgl_kernel import silu_and_mul as f; f(1)", "NotImplementedError: "
                                                       "sgl_kernel.silu_and_mul is a compiled kernel"),
])  # fmt: skip
def test_stand_in_for_compiled_kernels_computes_or_raises(line, printed, monkeypatch):
    monkeypatch.setenv(torch_kernels.TORCH_KERNELS, "1")
    program = f"from megarl.generator import cpu_support; cpu_support.install(); {line}"
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert printed in result.stdout + result.stderr


def test_pairs_are_sorted_by_expert_and_padded_to_blocks():
    """The example of SGLang's docstring, with a pair of another rank's expert."""
    expert_of = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, -1]])
    sorted_places = torch.empty(32, dtype=torch.int32)
    expert_of_block = torch.empty(8, dtype=torch.int32)
    padded_places = torch.empty(1, dtype=torch.int32)
    torch_kernels.moe_align_block_size(
        expert_of, 6, 4, sorted_places, expert_of_block, padded_places
    )
    blocks = [[11, 12, 12, 12], [3, 6, 9, 12], [0, 4, 10, 12], [1, 7, 12, 12], [2, 5, 8, 12]]
    assert padded_places.item() == 20
    assert sorted_places[:20].view(5, 4).tolist() == blocks
    assert set(sorted_places[20:].tolist()) == {12}
    assert expert_of_block[:5].tolist() == [-1, 1, 2, 3, 4]


def test_experts_of_a_token_are_added_in_float32():
    by_expert = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    output = torch.empty(1, 1, dtype=torch.bfloat16)
    torch_kernels.moe_sum_reduce(by_expert, output, 0.5)
    assert output.item() == 129.0
