"""Engines on GPUs without SGLang's compiled kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
