"""megarl.kernels on a CPU: the torch references; the kernels, interpreted (kernels_interpreted.py)
and compiled (kernels_compiled.py).
"""

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

from megarl.kernels import linear_logprobs

torch.set_num_threads(1)
HERE = Path(__file__).parent
DEADLINE_S = 900


@pytest.mark.parametrize(
    ("file", "interpret"), [("kernels_interpreted.py", "1"), ("kernels_compiled.py", "0")]
)
def test_kernels(file, interpret, tmp_path):
    """In a process of its own, because Triton reads TRITON_INTERPRET at its first import."""
    environment = dict(
        os.environ, TRITON_INTERPRET=interpret, TRITON_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1"
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE / file),
    ]
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=HERE.parents[1],
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_kernels_division_is_exact_for_bf16():
    """Checks its formula in exact fractions.

    A power of two changes no significand, so one binade of each stands for all.
    """
    scales = [torch.tensor(1 + m / 128) / torch.tensor(448.0) for m in range(128)] + [
        torch.tensor(1e-4) / torch.tensor(448.0)
    ]
    for scale in {Fraction(math.frexp(scale.item())[0]) for scale in scales}:
        reciprocal = float32(1 / scale)
        for m in range(128):
            x = 1 + Fraction(m, 128)
            quotient = float32(x * reciprocal)
            remainder = float32(x - quotient * scale)
            assert float32(quotient + remainder * reciprocal) == float32(x / scale), (x, scale)


def float32(x: Fraction) -> Fraction:
    """The nearest multiple of the unit in the last place (24 bits), ties to even, by `round` of a
    fraction.
    """
    if not x:
        return x
    # of a float64: it may be one too large just below a power of two
    exponent = math.frexp(float(abs(x)))[1]
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


VOCAB = 19
PADDED = 24
HIDDEN = 7
ROWS = 11


def random_sets(
    targets: torch.Tensor, generator: torch.Generator
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Random sets that contain the targets: in `linear_logprobs`'s form, with unordered ids, and as
    truth values. The first two are the smallest and the largest possible.
    """
    inside = torch.rand(len(targets), VOCAB, generator=generator) < 0.3
    inside[0] = False
    inside[1] = True
    inside.scatter_(1, targets[:, None], True)
    sets = [
        row.nonzero()[:, 0][torch.randperm(int(row.sum()), generator=generator)] for row in inside
    ]
    return (inside.sum(dim=1), torch.cat(sets).int()), inside


# at 4, the last rank holds one real token and five of padding; at 8, only padding
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("part", [False, True])
def test_logprobs_entropy_and_gradients_equal_float64(size, dtype, entropy_weight, chunk, part):
    """`part`: each row's softmax is over a set of its own, of which some ranks hold nothing."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (
        torch.randn(rows, HIDDEN, generator=generator).to(dtype) for rows in (ROWS, PADDED)
    )
    hidden *= 3
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    weights = torch.randn(ROWS, generator=generator)
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logits = exact[0] @ exact[1].T
    if dtype == torch.bfloat16:  # the CPU rounds them; the gradient passes through the rounding
        rounded = [
            torch.cat([rows @ part.T for part in weight.chunk(size)], 1)
            for rows in hidden.split(chunk)
        ]
        logits = logits + (torch.cat(rounded).double() - logits).detach()
    sets_of_rows, inside = (
        random_sets(targets, generator)
        if part
        else (None, torch.ones(ROWS, VOCAB, dtype=torch.bool))
    )
    log_p = torch.log_softmax((logits[:, :VOCAB] / 0.7).masked_fill(~inside, -torch.inf), -1)
    expected = log_p.gather(-1, targets[:, None])[:, 0]
    expected_entropy = -(log_p.exp() * log_p.masked_fill(~inside, 0.0)).sum(-1)
    ((expected + entropy_weight * expected_entropy) * weights).sum().backward()

    def on_rank(group):
        x = hidden.clone().requires_grad_()
        w = weight.chunk(size)[group.rank()].clone().requires_grad_()
        logprobs, entropy = linear_logprobs(
            x, w, targets, group, VOCAB, 0.7, chunk, None, sets_of_rows
        )
        (
            (logprobs + entropy_weight * entropy if entropy_weight else logprobs) * weights
        ).sum().backward()
        main_grad = torch.ones(w.shape)
        x_again = hidden.clone().requires_grad_()
        w_again = w.detach().clone().requires_grad_()
        into, entropy = linear_logprobs(
            x_again, w_again, targets, group, VOCAB, 0.7, chunk, main_grad, sets_of_rows
        )
        ((into + entropy_weight * entropy) * weights).sum().backward()
        assert torch.equal(into, logprobs) and not w_again.grad.any()
        return logprobs.detach(), entropy.detach(), x.grad, w.grad, main_grad - 1

    results = on_ranks(size, on_rank)
    for logprobs, entropy, *_ in results:
        assert logprobs.dtype == entropy.dtype == torch.float32
        torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(
            entropy.double(), expected_entropy.detach(), rtol=1e-6, atol=5e-6
        )
    hidden_grad = sum(gradient.double() for _, _, gradient, _, _ in results)
    weight_grad, main_grad = (torch.cat([result[i] for result in results]) for i in (3, 4))
    assert weight_grad.dtype == dtype and not weight_grad[VOCAB:].any()
    for logprobs, want in (
        (hidden_grad, exact[0].grad),
        (weight_grad, exact[1].grad),
        (main_grad, exact[1].grad),
    ):
        rounding = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(
            logprobs.double(), want, rtol=rounding, atol=rounding * want.abs().max().item()
        )


def test_no_row_has_no_logprob_and_a_zero_gradient():
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.ones(PADDED, HIDDEN, requires_grad=True)

    def on_rank(group):
        logprobs, entropy = linear_logprobs(
            hidden, weight, torch.zeros(0, dtype=torch.int64), group, VOCAB
        )
        assert logprobs.shape == entropy.shape == (0,)
        logprobs.sum().backward()

    on_ranks(1, on_rank)
    assert hidden.grad.shape == (0, HIDDEN) and not weight.grad.any()


def test_memory_is_that_of_a_chunk():
    """Neither forward nor backward makes a tensor of rows times vocabulary."""
    rows = 96
    vocab = 4096
    chunk = 8
    hidden = torch.randn(rows, HIDDEN, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, requires_grad=True)
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.extend(
                x.numel()
                for x in torch.utils._pytree.tree_leaves(out)
                if isinstance(x, torch.Tensor)
            )
            return out

    def on_rank(group):
        with Sizes():
            logprobs, _ = linear_logprobs(
                hidden, weight, torch.arange(rows), group, vocab, 1.0, chunk
            )
            logprobs.sum().backward()

    on_ranks(1, on_rank)
    assert max(largest) == chunk * vocab
