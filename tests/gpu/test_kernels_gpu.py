"""The Triton kernels against their torch references on a GPU, at real sizes. The references are checked on a CPU in tests/unit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl import kernels
from megarl.box import Box
from megarl.kernels import audit, chunked_logprobs, chunked_logprobs_triton, quantise
from megarl.kernels.quantise_rules import BLOCK, CHANNEL, TENSOR, Rule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(16384, 2048), (6656, 16384), (2304, 16384), (576, 7168), (1000, 1030), (1, 1)]  # 405B at TP8; DeepSeek's kv_a; ragged ones


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    return x * torch.exp2(3 * torch.randn((*shape[:-1], 1), generator=generator, device="cuda"))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu())


def quantised(x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    scales = quantise.scales_of(kernels.tile_amax(x, 0, 0, rule, "x"), rule)
    return kernels.quantise_with(x, 0, 0, scales, rule), scales


@pytest.mark.parametrize("rule", [BLOCK, CHANNEL, TENSOR], ids=lambda rule: rule.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantises_as_the_cpu_does(shape, rule):
    x = random(*shape).bfloat16()
    codes, scales = quantised(x, rule)
    wanted = quantise.quantise(x.cpu(), rule, "x")
    assert equal(codes, wanted[0]) and equal(scales, wanted[1])
    on_gpu = quantise.quantise(x, rule, "x")  # the reference on the same device: torch's own division and cast
    assert equal(on_gpu[0], wanted[0]) and equal(on_gpu[1], wanted[1])


def test_every_bf16_number_by_every_scale_it_can_meet():
    """All finite numbers, in tiles whose amax takes every significand and, within a tile, 2^16 numbers below it."""
    every = torch.arange(0x7F80, dtype=torch.int16).cuda()
    for significand in range(128):
        largest = torch.tensor(0x4000 | significand, dtype=torch.int16).cuda()  # 2 to 4
        row = torch.minimum(every, largest)
        x = torch.stack([row, row | -0x8000]).view(-1, 128).view(torch.bfloat16)
        scales = (x.max().float() / torch.tensor(448.0, device="cuda")).expand(BLOCK.scale_shape(tuple(x.shape)))
        wanted = quantise.quantise_with(x.cpu(), 0, 0, scales.cpu(), BLOCK)
        assert equal(kernels.quantise_with(x, 0, 0, scales, BLOCK), wanted), significand


def test_experts():
    x = random(8, 1536, 2048).bfloat16()
    (codes, scales), wanted = quantised(x, BLOCK), quantise.quantise(x.cpu(), BLOCK, "w13")
    assert equal(codes, wanted[0]) and equal(scales, wanted[1])


def test_cut_tiles_in_two_passes():
    x = random(2000, 3000).bfloat16()
    wanted = quantise.quantise(x.cpu(), BLOCK, "x")
    for box in (Box((37, 1001), (900, 1500)), Box((128, 64), (256, 128)), Box((1999, 0), (1, 3000))):
        part, tiles = x[box.slices()], BLOCK.tiles(box)
        amax = kernels.tile_amax(part, *box.start, BLOCK, "x")
        assert equal(amax, quantise.tile_amax(part.cpu(), *box.start, BLOCK, "x"))
        codes = kernels.quantise_with(part, *box.start, wanted[1][tiles.slices()].cuda(), BLOCK)
        assert equal(codes, wanted[0][box.slices()])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(bad):
    x = random(500, 500).bfloat16()
    x[400, 130] = bad
    with pytest.raises(RuntimeError, match=r"up: .*first in tile \(3, 1\)"):
        kernels.tile_amax(x, 0, 0, BLOCK, "up")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_hashes_as_the_cpu_does(dtype):
    x = torch.randint(0, 256, (4100, 3000 * dtype.itemsize), dtype=torch.uint8, device="cuda").view(dtype)
    for box in (Box((0, 0), (4100, 3000)), Box((7, 9), (3000, 2000)), Box((4099, 0), (1, 3000))):
        values = x[box.slices()]
        assert audit.hash_box(values, *box.start) == audit.hash_box(values.cpu(), *box.start)
    assert audit.hash_box(x.t(), 5, 6) == audit.hash_box(x.t().cpu(), 5, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("width", "real"), [(16032, 16032), (16032, 15000), (128256, 128256), (7, 5)])
def test_logprobs_and_entropy_of_a_slice(width, real, with_entropy, dtype):
    logits = 4 * torch.randn(64, width, device="cuda")
    targets = torch.randint(-1, real, (64,), device="cuda")
    found = chunked_logprobs_triton.local_forward(logits, targets, real, 0.7)
    wanted = chunked_logprobs.local_forward(logits.clone(), targets, real, 0.7)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)
    grad, entropy_grad = torch.randn(2, 64, device="cuda")
    arguments = targets, wanted[0] + 0.5, grad, (entropy_grad, wanted[1]) if with_entropy else None, real, 0.7, dtype
    found = chunked_logprobs_triton.local_backward(logits.clone(), *arguments)
    wanted = chunked_logprobs.local_backward(logits.clone(), *arguments)
    assert found.dtype == dtype and not found[:, real:].any()
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("into", [False, True], ids=["returned", "into main_grad"])
def test_linear_logprobs_equal_float64(dtype, into):
    """In bfloat16, too, logits are float32: log-probs are as exact as in float32."""
    hidden, weight = (torch.randn(rows, 512, device="cuda").to(dtype).requires_grad_() for rows in (300, 4096))
    targets, weights = torch.randint(0, 4000, (300,), device="cuda"), torch.randn(300, device="cuda")
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = torch.log_softmax(exact[0] @ exact[1][:4000].T / 8, -1)
    wanted, wanted_entropy = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((wanted + wanted_entropy) * weights).sum().backward()

    main_grad = torch.zeros(weight.shape, device="cuda") if into else None
    one = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    found, entropy = kernels.linear_logprobs(hidden, weight, targets, one, 4000, 8, 128, main_grad)
    ((found + entropy) * weights).sum().backward()
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy.detach(), rtol=1e-5, atol=1e-5)
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    for gradient, want in ((hidden.grad, exact[0].grad), (weight.grad if main_grad is None else main_grad, exact[1].grad)):
        torch.testing.assert_close(gradient.double(), want, rtol=rounding, atol=rounding * want.abs().max().item())
