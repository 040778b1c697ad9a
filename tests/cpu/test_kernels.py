"""megarl.kernels on a CPU: the torch references, and the kernels themselves, interpreted
(kernels_interpreted.py) and compiled (kernels_compiled.py)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from thread_groups import on_ranks

from megarl.trainer.logprobs import token_logprobs

torch.set_num_threads(1)
HERE = Path(__file__).parent
DEADLINE_S = 240


@pytest.mark.parametrize(("file", "interpret"), [("kernels_interpreted.py", "1"), ("kernels_compiled.py", "0")])
def test_kernels(file, interpret, tmp_path):
    """In a process of its own: TRITON_INTERPRET counts at the first import of Triton."""
    environment = dict(os.environ, TRITON_INTERPRET=interpret, TRITON_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, cwd=HERE.parents[1])
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_the_kernels_division_is_exact_for_every_bf16_number_and_scale():
    """Its formula in exact fractions. A power of two changes no significand, so one binade of each stands for all."""
    scales = [torch.tensor(1 + m / 128) / torch.tensor(448.0) for m in range(128)] + [torch.tensor(1e-4) / torch.tensor(448.0)]
    for scale in {Fraction(math.frexp(scale.item())[0]) for scale in scales}:
        reciprocal = float32(1 / scale)
        for m in range(128):
            x = 1 + Fraction(m, 128)
            quotient = float32(x * reciprocal)
            remainder = float32(x - quotient * scale)
            assert float32(quotient + remainder * reciprocal) == float32(x / scale), (x, scale)


def float32(x: Fraction) -> Fraction:
    """Nearest multiple of the unit in the last place (24 bits), ties to even: what `round` of a fraction does."""
    if not x:
        return x
    exponent = math.frexp(float(abs(x)))[1]  # of a float64, so it may be one too large just below a power of two
    if abs(x) < Fraction(2) ** (exponent - 1):
        exponent -= 1
    unit = Fraction(2) ** (exponent - 24)
    return round(x / unit) * unit


def test_no_triton_without_a_cuda_tensor():
    program = """if True:
        import sys, torch, megarl.kernels as k
        from megarl.kernels.audit import hash_box
        from megarl.kernels.quantise_rules import BLOCK
        assert "triton" not in sys.modules
        k.quantise_with(torch.ones(2, 2), 0, 0, k.tile_amax(torch.ones(2, 2), 0, 0, BLOCK, "x"), BLOCK)
        hash_box(torch.ones(2, 2), 0, 0)
        assert not [m for m in sys.modules if m.startswith("triton") or m.endswith("_triton")]
    """
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)


VOCAB, PADDED = 19, 24


@pytest.mark.parametrize("size", [1, 2, 4])  # at 4, the last rank holds one real token and five of padding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_their_gradients_equal_float64(size, dtype):
    generator = torch.Generator().manual_seed(2)
    full = (8 * torch.randn(2, 5, PADDED, generator=generator)).to(dtype)
    tokens = torch.randint(0, VOCAB, (2, 6), generator=generator)
    weights = torch.randn(2, 6, generator=generator)
    exact = full.double().requires_grad_()
    wanted = torch.log_softmax(exact[..., :VOCAB] / 0.7, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    (wanted * weights[:, 1:]).sum().backward()

    def on_rank(group):
        mine = full.chunk(size, -1)[group.rank()].clone().requires_grad_()
        found = token_logprobs(mine, tokens, group, VOCAB, 0.7)
        (found * weights).sum().backward()
        return found.detach(), mine.grad

    results = on_ranks(size, on_rank)
    for found, _ in results:
        assert found.dtype == torch.float32 and (found[:, 0] == 0).all()
        torch.testing.assert_close(found[:, 1:].double(), wanted.detach(), rtol=1e-6, atol=2e-6)
    gradient = torch.cat([gradient for _, gradient in results], -1)
    assert gradient.dtype == dtype and (gradient[..., VOCAB:] == 0).all()
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=rounding, atol=1e-6)
