"""The Triton kernels against their torch references, at shapes that cut tiles, rows and vocabularies anywhere.

Each check raises AssertionError. On a CPU they run in Triton's interpreter (TRITON_INTERPRET=1), at smaller shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megarl import kernels
from megarl.box import Box
from megarl.kernels import (
    audit,
    audit_triton,
    changes,
    changes_triton,
    chunked_logprobs,
    chunked_logprobs_triton,
    quantise,
    quantise_triton,
)
from megarl.kernels.quantise_rules import BLOCK, CHANNEL, TENSOR, Rule

# 405B at TP8, DeepSeek's kv_a, ragged ones
SHAPES = [(16384, 2048), (6656, 16384), (576, 7168), (1000, 1030), (1, 1)]
ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a process group of one
TOY_SHAPES = [(130, 140), (20, 300), (1, 1)]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(a.contiguous().view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu())


def random(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device)
    return x * torch.exp2(3 * torch.randn((*shape[:-1], 1), generator=generator, device=device))


def quantised(x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernels, where they handle the rule."""
    module = quantise_triton if rule is BLOCK else quantise
    scales = quantise.scales_of(module.tile_amax(x, 0, 0, rule, "x"), rule)
    return module.quantise_with(x, 0, 0, scales, rule), scales


def quantises_as_the_cpu_does(device: torch.device, toy: bool) -> None:
    for shape in [(2, 130, 140), *TOY_SHAPES] if toy else [(8, 1536, 2048), *SHAPES]:
        x = random(*shape, device=device).bfloat16()
        for rule in (BLOCK, CHANNEL, TENSOR):
            (codes, scales), wanted = quantised(x, rule), quantise.quantise(x.cpu(), rule, "x")
            assert equal(codes, wanted[0]) and equal(scales, wanted[1]), f"{rule.name}, {shape}"


def every_number_by_every_scale(device: torch.device, toy: bool) -> None:
    """All finite bf16 numbers, in tiles whose amax takes every significand and, within a tile, 2^16 numbers below it."""
    every = torch.arange(0x7F80, dtype=torch.int16, device=device)
    for significand in (0, 93) if toy else range(128):
        row = torch.minimum(every, torch.tensor(0x4000 | significand, dtype=torch.int16, device=device))  # 2 to 4
        x = torch.stack([row, row | -0x8000]).view(-1, 128).view(torch.bfloat16)
        scales = (x.max().float() / torch.tensor(448.0, device=device)).expand(BLOCK.scale_shape(tuple(x.shape)))
        wanted = quantise.quantise_with(x.cpu(), 0, 0, scales.cpu(), BLOCK)
        assert equal(quantise_triton.quantise_with(x, 0, 0, scales, BLOCK), wanted), f"significand {significand}"


def quantises_boxes_that_cut_tiles(device: torch.device, toy: bool) -> None:
    rows, cols = (300, 400) if toy else (2000, 3000)
    x = random(rows, cols, device=device).bfloat16()
    wanted = quantise.quantise(x.cpu(), BLOCK, "x")
    for box in (Box((37, 101), (rows // 2, cols // 3)), Box((128, 128), (128, 128)), Box((rows - 1, 0), (1, cols))):
        part, tiles, (row, col) = x[box.slices()], BLOCK.tiles(box), box.start
        amax = quantise_triton.tile_amax(part, row, col, BLOCK, "x")
        assert equal(amax, quantise.tile_amax(part.cpu(), row, col, BLOCK, "x")), f"amax of {box}"
        codes = quantise_triton.quantise_with(part, row, col, wanted[1][tiles.slices()].to(device), BLOCK)
        assert equal(codes, wanted[0][box.slices()]), f"codes of {box}"


def refuses_nan_and_infinity(device: torch.device, toy: bool) -> None:
    for bad in (float("nan"), float("inf")):
        x = random(500, 500, device=device).bfloat16()
        x[400, 130] = bad
        try:
            quantise_triton.tile_amax(x, 0, 0, BLOCK, "up")
        except RuntimeError as error:
            assert "first in tile (3, 1)" in str(error), error
        else:
            raise AssertionError(f"{bad} passed")


def hashes_as_the_cpu_does(device: torch.device, toy: bool) -> None:
    rows, cols = (40, 600) if toy else (4100, 3000)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        x = torch.randint(0, 256, (rows, cols * dtype.itemsize), dtype=torch.uint8, device=device).view(dtype)
        boxes = Box((0, 0), (rows, cols)), Box((7, 9), (rows // 2, cols // 2)), Box((rows - 1, 0), (1, cols))
        hashes = audit.Hashes()
        hashes.add("x", x[:, :7], Box((0, 0), (rows, 7)), (rows, cols))
        hashes.add("x", x[:, 7:], Box((0, 7), (rows, cols - 7)), (rows, cols))
        assert hashes.totals() == {"x": audit.hash_tensor(x.cpu())}, f"{dtype}, in two parts"
        for values, start in [*((x[box.slices()], box.start) for box in boxes), (x.t(), (5, 6))]:
            assert audit_triton.hash_box(values, *start) == audit.hash_box(values.cpu(), *start), f"{dtype}, {tuple(values.shape)}"


def logprobs_and_entropy_of_a_slice(device: torch.device, toy: bool) -> None:
    for width, real in [(300, 280), (7, 5)] if toy else [(16032, 15000), (128256, 128256), (7, 5)]:
        logits = 4 * torch.randn(64, width, device=device)
        targets = torch.randint(-1, real, (64,), device=device)
        found = chunked_logprobs_triton.local_forward(logits, targets, real, 0.7)
        wanted = chunked_logprobs.local_forward(logits.clone(), targets, real, 0.7)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)
        grad, entropy_grad = torch.randn(2, 64, device=device)
        for dtype, of_entropy in [(torch.float32, None), (torch.bfloat16, (entropy_grad, wanted[1]))]:
            arguments = targets, wanted[0] + 0.5, grad, of_entropy, real, 0.7, dtype
            gradient = chunked_logprobs_triton.local_backward(logits.clone(), *arguments)
            exact = chunked_logprobs.local_backward(logits.clone(), *arguments)
            assert gradient.dtype == dtype and not gradient[:, real:].any()
            rounding = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(gradient.float(), exact.float(), rtol=rounding, atol=1e-7)


def linear_logprobs_in_float64(device: torch.device, toy: bool) -> None:
    """In bfloat16, too, logits are float32 on a GPU: log-probs are as exact as in float32. Over the vocabulary, and over sets of tokens."""
    width, vocabulary, real = (64, 300, 280) if toy else (512, 4096, 4000)
    cases = [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)][: 1 if device.type == "cpu" else 3]
    for (dtype, into), part in itertools.product(cases, (False, True)):
        hidden, weight = (torch.randn(rows, width, device=device).to(dtype).requires_grad_() for rows in (300, vocabulary))
        targets, weights = torch.randint(0, real, (300,), device=device), torch.randn(300, device=device)
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        inside = (torch.rand(300, real, device=device) < (0.1 if part else 2)).scatter(1, targets[:, None], True)
        kept = (inside.sum(dim=1).cpu(), inside.nonzero()[:, 1].int()) if part else None
        log_p = torch.log_softmax((exact[0] @ exact[1][:real].T / 8).masked_fill(~inside, -torch.inf), -1)
        wanted, wanted_entropy = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p.masked_fill(~inside, 0)).sum(-1)
        ((wanted + wanted_entropy) * weights).sum().backward()
        main_grad = torch.zeros(weight.shape, device=device) if into else None
        found, entropy = kernels.linear_logprobs(hidden, weight, targets, ALONE, real, 8, 128, main_grad, kept)
        ((found + entropy) * weights).sum().backward()
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), wanted_entropy.detach(), rtol=1e-5, atol=1e-5)
        rounding = 1e-5 if dtype == torch.float32 else 2**-7
        gradients = hidden.grad, weight.grad if main_grad is None else main_grad
        for gradient, want in zip(gradients, (each.grad for each in exact)):
            assert gradient is not None and want is not None
            torch.testing.assert_close(gradient.double(), want, rtol=rounding, atol=rounding * want.abs().max().item())


def finds_changes_as_the_cpu_does(device: torch.device, toy: bool) -> None:
    for count, dtype in itertools.product([1, 70000] if toy else [1, 70000, 16384 * 2048 + 3], (torch.uint8, torch.int16, torch.int32)):
        old = torch.randint(0, 100, (count,), dtype=dtype, device=device)
        for share in (0.0, 0.01, 1.0):
            new = old + (torch.rand(count, device=device) < share).to(dtype)
            (found,), wanted = changes_triton.find_changes([(new, old)]), changes.find_changes(new.cpu(), old.cpu())
            assert all(equal(one, other) for one, other in zip(found, wanted, strict=True)), f"{share} of {count} elements of {dtype}"


CHECKS: dict[str, Callable[[torch.device, bool], None]] = {
    "block, channel and tensor scales: codes and scales, bit for bit": quantises_as_the_cpu_does,
    "every bf16 number by every significand of a scale, bit for bit": every_number_by_every_scale,
    "boxes that cut tiles, in two passes, bit for bit": quantises_boxes_that_cut_tiles,
    "NaN and infinity are refused, and their tile named": refuses_nan_and_infinity,
    "audit hash of boxes and strides, bit for bit": hashes_as_the_cpu_does,
    "what has changed since the last update, place by place": finds_changes_as_the_cpu_does,
    "log-probs, entropy and gradients of a slice of the vocabulary, to float32 accuracy": logprobs_and_entropy_of_a_slice,
    "log-probs, entropy and gradients from hidden states, against float64": linear_logprobs_in_float64,
}
