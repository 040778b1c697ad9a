"""The Triton kernels against their torch references on a GPU, at real sizes. The references are checked on a CPU in tests/unit."""

from __future__ import annotations

import pytest
import torch

from megarl import kernels
from megarl.box import Box
from megarl.kernels import audit, logprobs, logprobs_triton, quantise
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
@pytest.mark.parametrize(("width", "real"), [(16032, 16032), (16032, 15000), (128256, 128256), (64, 0), (7, 5)])
def test_local_logprobs(dtype, width, real):
    logits = (4 * torch.randn(64, width, device="cuda")).to(dtype)
    targets = torch.randint(-1, max(real, 1), (64,), device="cuda") if real else torch.full((64,), -1, device="cuda")
    partial = logprobs_triton.local_forward(logits, targets, real, 0.7)[0]
    exact, kept = logprobs.local_forward(logits, targets, real, 0.7)
    torch.testing.assert_close(partial, exact, rtol=1e-6, atol=1e-5)
    log_z, grad = exact[0].clamp(min=-1e30) + 0.5, torch.randn(64, device="cuda")
    found = logprobs_triton.local_backward(None, logits, targets, log_z, grad, real, 0.7)
    wanted = logprobs.local_backward(kept, logits, targets, log_z, grad, real, 0.7)
    assert found.dtype == dtype and not found[:, real:].any()
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-7)
