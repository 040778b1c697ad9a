"""The kernels: checked against their references, then timed beside a measured ceiling and beside
other implementations.

`fraction` is the achieved fraction of the ceiling. For kernels that move memory: the least bytes
(each input read once, each output written once) over the time, relative to the measured copy
bandwidth. For kernels that multiply matrices: the unavoidable floating-point operations over the
time, relative to a measured matrix product. Tensors are larger than the L2 cache.
"""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megarl import kernels
from megarl.base.geometry import Box
from megarl.bench.gpu.measure import Bench
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
from megarl.kernels.quantise_rules import BLOCK, CHANNEL, E4M3_MAX, TENSOR, Rule

# shapes of Llama 405B at TP8, of DeepSeek's kv_a, and ragged ones
SHAPES = [(16384, 2048), (6656, 16384), (576, 7168), (1000, 1030), (1, 1)]
GROUP_OF_ONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a process group of one
TOY_SHAPES = [(130, 140), (20, 300), (1, 1)]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(
        a.contiguous().view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu()
    )


def random(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """A random tensor whose rows have very different magnitudes."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device)
    return x * torch.exp2(3 * torch.randn((*shape[:-1], 1), generator=generator, device=device))


def quantised(x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises by the kernels, if they support the rule."""
    module = quantise_triton if rule is BLOCK else quantise
    scales = quantise.scales_of(module.tile_amax(x, 0, 0, rule, "x"), rule)
    return module.quantise_with(x, 0, 0, scales, rule), scales


def quantises_as_the_cpu_does(device: torch.device, toy: bool) -> None:
    for shape in [(2, 130, 140), *TOY_SHAPES] if toy else [(8, 1536, 2048), *SHAPES]:
        x = random(*shape, device=device).bfloat16()
        for rule in (BLOCK, CHANNEL, TENSOR):
            codes, scales = quantised(x, rule)
            expected_codes, expected_scales = quantise.quantise(x.cpu(), rule, "x")
            assert equal(codes, expected_codes), f"{rule.name}, {shape}"
            assert equal(scales, expected_scales), f"{rule.name}, {shape}"


def every_number_by_every_scale(device: torch.device, toy: bool) -> None:
    """All finite bf16 numbers, in tiles whose amax takes every significand.

    Each tile has 2^16 numbers up to its amax.
    """
    magnitudes = torch.arange(0x7F80, dtype=torch.int16, device=device)
    for significand in (0, 93) if toy else range(128):
        # 2 to 4
        row = torch.minimum(
            magnitudes, torch.tensor(0x4000 | significand, dtype=torch.int16, device=device)
        )
        x = torch.stack([row, row | -0x8000]).view(-1, 128).view(torch.bfloat16)
        scales = (x.max().float() / torch.tensor(448.0, device=device)).expand(
            BLOCK.scale_shape(tuple(x.shape))
        )
        expected = quantise.quantise_with(x.cpu(), 0, 0, scales.cpu(), BLOCK)
        assert equal(quantise_triton.quantise_with(x, 0, 0, scales, BLOCK), expected), (
            f"significand {significand}"
        )


def quantises_boxes_that_cut_tiles(device: torch.device, toy: bool) -> None:
    rows, cols = (300, 400) if toy else (2000, 3000)
    x = random(rows, cols, device=device).bfloat16()
    expected = quantise.quantise(x.cpu(), BLOCK, "x")
    for box in (
        Box((37, 101), (rows // 2, cols // 3)),
        Box((128, 128), (128, 128)),
        Box((rows - 1, 0), (1, cols)),
    ):
        part = x[box.slices()]
        tiles = BLOCK.tiles(box)
        row, col = box.start
        amax = quantise_triton.tile_amax(part, row, col, BLOCK, "x")
        assert equal(amax, quantise.tile_amax(part.cpu(), row, col, BLOCK, "x")), f"amax of {box}"
        codes = quantise_triton.quantise_with(
            part, row, col, expected[1][tiles.slices()].to(device), BLOCK
        )
        assert equal(codes, expected[0][box.slices()]), f"codes of {box}"


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
        x = torch.randint(
            0, 256, (rows, cols * dtype.itemsize), dtype=torch.uint8, device=device
        ).view(dtype)
        boxes = (
            Box((0, 0), (rows, cols)),
            Box((7, 9), (rows // 2, cols // 2)),
            Box((rows - 1, 0), (1, cols)),
        )
        hashes = audit.Hashes()
        hashes.add("x", x[:, :7], Box((0, 0), (rows, 7)), (rows, cols))
        hashes.add("x", x[:, 7:], Box((0, 7), (rows, cols - 7)), (rows, cols))
        assert hashes.totals() == {"x": audit.hash_tensor(x.cpu())}, f"{dtype}, in two parts"
        for values, start in [*((x[box.slices()], box.start) for box in boxes), (x.t(), (5, 6))]:
            assert audit_triton.hash_box(values, *start) == audit.hash_box(values.cpu(), *start), (
                f"{dtype}, {tuple(values.shape)}"
            )


def logprobs_and_entropy_of_a_slice(device: torch.device, toy: bool) -> None:
    for width, real in [(300, 280), (7, 5)] if toy else [(16032, 15000), (128256, 128256), (7, 5)]:
        logits = 4 * torch.randn(64, width, device=device)
        targets = torch.randint(-1, real, (64,), device=device)
        actual = chunked_logprobs_triton.local_forward(logits, targets, real, 0.7)
        expected = chunked_logprobs.local_forward(logits.clone(), targets, real, 0.7)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)
        grad, entropy_grad = torch.randn(2, 64, device=device)
        for dtype, of_entropy in [
            (torch.float32, None),
            (torch.bfloat16, (entropy_grad, expected[1])),
        ]:
            log_z = expected[0] + 0.5
            gradient = chunked_logprobs_triton.local_backward(
                logits.clone(), targets, log_z, grad, of_entropy, real, 0.7, dtype
            )
            exact = chunked_logprobs.local_backward(
                logits.clone(), targets, log_z, grad, of_entropy, real, 0.7, dtype
            )
            assert gradient.dtype == dtype and not gradient[:, real:].any()
            rounding = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(gradient.float(), exact.float(), rtol=rounding, atol=1e-7)


def linear_logprobs_in_float64(device: torch.device, toy: bool) -> None:
    """Log-probs over the vocabulary and over sets of tokens.

    On a GPU they are as exact in bfloat16 as in float32: logits are float32.
    """
    width, vocabulary, real = (64, 300, 280) if toy else (512, 4096, 4000)
    cases = [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)][
        : 1 if device.type == "cpu" else 3
    ]
    for (dtype, into), part in itertools.product(cases, (False, True)):
        hidden, weight = (
            torch.randn(rows, width, device=device).to(dtype).requires_grad_()
            for rows in (300, vocabulary)
        )
        targets = torch.randint(0, real, (300,), device=device)
        weights = torch.randn(300, device=device)
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        inside = (torch.rand(300, real, device=device) < (0.1 if part else 2)).scatter(
            1, targets[:, None], True
        )
        allowed_sets = None
        if part:
            allowed_sets = (inside.sum(dim=1).cpu(), inside.nonzero()[:, 1].int())
        log_p = torch.log_softmax(
            (exact[0] @ exact[1][:real].T / 8).masked_fill(~inside, -torch.inf), -1
        )
        expected = log_p.gather(-1, targets[:, None])[:, 0]
        expected_entropy = -(log_p.exp() * log_p.masked_fill(~inside, 0)).sum(-1)
        ((expected + expected_entropy) * weights).sum().backward()
        main_grad = torch.zeros(weight.shape, device=device) if into else None
        logprobs, entropy = kernels.linear_logprobs(
            hidden, weight, targets, GROUP_OF_ONE, real, 8, 128, main_grad, allowed_sets
        )
        ((logprobs + entropy) * weights).sum().backward()
        torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            entropy.double(), expected_entropy.detach(), rtol=1e-5, atol=1e-5
        )
        rounding = 1e-5 if dtype == torch.float32 else 2**-7
        gradients = hidden.grad, weight.grad if main_grad is None else main_grad
        for gradient, expected_gradient in zip(gradients, (x.grad for x in exact)):
            assert gradient is not None and expected_gradient is not None
            torch.testing.assert_close(
                gradient.double(),
                expected_gradient,
                rtol=rounding,
                atol=rounding * expected_gradient.abs().max().item(),
            )


def finds_changes_as_the_cpu_does(device: torch.device, toy: bool) -> None:
    for count, dtype in itertools.product(
        [1, 70000] if toy else [1, 70000, 16384 * 2048 + 3], (torch.uint8, torch.int16, torch.int32)
    ):
        old = torch.randint(0, 100, (count,), dtype=dtype, device=device)
        for share in (0.0, 0.01, 1.0):
            new = old + (torch.rand(count, device=device) < share).to(dtype)
            [actual] = changes_triton.find_changes([(new, old)])
            expected = changes.find_changes(new.cpu(), old.cpu())
            assert all(equal(a, b) for a, b in zip(actual, expected, strict=True)), (
                f"{share} of {count} elements of {dtype}"
            )


# Checks of the Triton kernels against their torch references, at shapes that cut tiles, rows and
# vocabularies anywhere. Each raises AssertionError. On a CPU the kernels run in Triton's
# interpreter (TRITON_INTERPRET=1), at smaller shapes.
CHECKS: dict[str, Callable[[torch.device, bool], None]] = {
    "block, channel and tensor scales: codes and scales, bit for bit": quantises_as_the_cpu_does,
    "every bf16 number by every significand of a scale, bit for bit": every_number_by_every_scale,
    "boxes that cut tiles, in two passes, bit for bit": quantises_boxes_that_cut_tiles,
    "NaN and infinity are refused, and their tile named": refuses_nan_and_infinity,
    "audit hash of boxes and strides, bit for bit": hashes_as_the_cpu_does,
    "what has changed since the last update, place by place": finds_changes_as_the_cpu_does,
    "log-probs, entropy and gradients of a slice of the vocabulary, to float32 accuracy": (
        logprobs_and_entropy_of_a_slice
    ),
    "log-probs, entropy and gradients from hidden states, against float64": (
        linear_logprobs_in_float64
    ),
}


Run = Callable[[], Any]
TEMPERATURE = 0.9
ROWS_CHECKED = 256  # rows of log-probs that are checked in float64

# Other stacks' functions that quantise a weight. They are timed if they are installed.
PEERS = {
    "SGLang bf16_to_block_fp8_128": (
        "sglang.srt.layers.quantization.mxfp8_block_convert:bf16_to_block_fp8_128",
        (),
    ),
    "SGLang per_block_cast_to_fp8": (
        "sglang.srt.layers.quantization.fp8_utils:per_block_cast_to_fp8",
        (),
    ),
    "verl blockwise_cast_to_fp8_triton": (
        "verl.utils.kernel.fp8_kernel:blockwise_cast_to_fp8_triton",
        ([128, 128],),
    ),
    "slime blockwise_cast_to_fp8_triton": (
        "slime.backends.megatron_utils.kernels.fp8_kernel:blockwise_cast_to_fp8_triton",
        ([128, 128],),
    ),
}


@dataclass(frozen=True)
class KernelTask:
    """One task of a kernel, and other implementations of it."""

    name: str
    size_bytes: int  # bytes that must move at least
    kernel: Run
    error: Callable[[], float] | None = None  # ‖kernel - float64‖ / ‖float64‖
    limit: float = 0.0
    # name -> makes the function to run; raises if that is impossible
    peers: dict[str, Callable[[], Run]] = field(default_factory=dict)


def run(bench: Bench) -> None:
    for name, check in CHECKS.items():
        problem = ""
        try:
            check(bench.device, bench.toy)
        except Exception as error:  # the other checks still run
            problem = f"{type(error).__name__}: {error}"
        bench.row(name, by="ours", result="equal" if not problem else "WRONG", failed=problem)
    ceiling = bench.copy_bytes_per_s()
    bench.row(
        "copy within the device: the ceiling", by="torch", gb_per_s=ceiling / 1e9, fraction=1.0
    )
    for make in (quantising, hashing, scoring):
        for task in make(bench):
            time_task(bench, task, ceiling)
    flops = bench.matmul_flops()
    bench.row(
        "matrix product, bf16: the ceiling", by="torch", tflop_per_s=flops / 1e12, fraction=1.0
    )
    from_hidden_states(bench, flops)


def time_task(bench: Bench, task: KernelTask, ceiling: float) -> None:
    row: dict[str, Any] = {"what": task.name, "by": "ours"} | timing(
        bench, task.kernel, task.size_bytes, ceiling
    )
    if task.error is not None:
        row["error"] = task.error()
        if not row["error"] <= task.limit:  # NaN included
            row["failed"] = (
                f"{task.name}: error {row['error']:.2e} against float64, allowed is "
                f"{task.limit:.0e}"
            )
    bench.emit(row)
    for peer, make in task.peers.items():
        row = {"what": task.name, "by": peer}
        try:
            row |= timing(bench, make(), task.size_bytes, ceiling)
        except Exception as error:
            # a peer that is missing or fails is a result, not a failure of ours
            row["note"] = f"not available: {type(error).__name__}: {str(error)[:160]}"
        bench.emit(row)


def timing(bench: Bench, run: Run, size_bytes: int, ceiling: float) -> dict[str, float]:
    ms = bench.median_ms(run)
    return {
        "ms": ms,
        "gb_per_s": size_bytes / ms / 1e6,
        "fraction": size_bytes / ms * 1e3 / ceiling,
    }


def compiled(bench: Bench, function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="inductor" if bench.cuda else "eager")


def quantising(bench: Bench) -> Iterator[KernelTask]:
    rows, cols = (256, 256) if bench.toy else (16384, 6656)  # down_proj of Llama-3.1-405B at TP8
    weight = random(rows, cols, device=bench.device).bfloat16()
    scales = quantise.scales_of(quantise_triton.tile_amax(weight, 0, 0, BLOCK, "weight"), BLOCK)

    def quantised_by_kernels() -> Any:
        scales = quantise.scales_of(quantise_triton.tile_amax(weight, 0, 0, BLOCK, "weight"), BLOCK)
        return quantise_triton.quantise_with(weight, 0, 0, scales, BLOCK)

    def peer(path: str, arguments: tuple[Any, ...]) -> Run:
        function = pkgutil.resolve_name(path)
        return lambda: function(weight, *arguments)

    peers = {
        name: lambda path=path, arguments=arguments: peer(path, arguments)
        for name, (path, arguments) in PEERS.items()
    }
    torchs = {
        "torch eager": lambda: lambda: plain(weight),
        "torch.compile": lambda: (lambda f: lambda: f(weight))(compiled(bench, plain)),
    }
    yield KernelTask(
        "fp8 blocks: largest of each tile",
        2 * weight.numel(),
        lambda: quantise_triton.tile_amax(weight, 0, 0, BLOCK, "weight"),
    )
    yield KernelTask(
        "fp8 blocks: codes by given scales",
        3 * weight.numel(),
        lambda: quantise_triton.quantise_with(weight, 0, 0, scales, BLOCK),
    )
    yield KernelTask(
        "fp8 blocks: scales and codes",
        3 * weight.numel(),
        quantised_by_kernels,
        peers=torchs if bench.toy else torchs | peers,
    )


def plain(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch code for the same, without the check for NaN."""
    rows, cols = weight.shape
    tiles = weight.view(rows // 128, 128, cols // 128, 128).float()
    scales = tiles.abs().amax(dim=(1, 3), keepdim=True).clamp(min=BLOCK.floor) / E4M3_MAX
    codes = (tiles / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(rows, cols), scales[:, 0, :, 0]


def hashing(bench: Bench) -> Iterator[KernelTask]:
    rows, cols = (64, 256) if bench.toy else (16384, 16384)
    values = torch.randint(0, 256, (rows, 2 * cols), dtype=torch.uint8, device=bench.device)
    words = values.view(torch.int64)
    peers = {"torch: their plain sum": lambda: lambda: words.sum()}
    bf16 = values.view(torch.bfloat16)
    yield KernelTask(
        "audit hash, bf16", values.numel(), lambda: audit_triton.hash_sum(bf16, 0, 0), peers=peers
    )
    fp8 = values.view(torch.float8_e4m3fn)
    yield KernelTask("audit hash, fp8", values.numel(), lambda: audit_triton.hash_sum(fp8, 0, 0))
    yield KernelTask(
        "audit hash, fp8, a box at odd columns",
        values.numel() // 2,
        lambda: audit_triton.hash_sum(fp8[:, 3 : cols + 3], 0, 3),
    )


def scoring(bench: Bench) -> Iterator[KernelTask]:
    """The log-prob kernels on the logits of one chunk."""
    tokens, vocabulary = (8, 300) if bench.toy else (1024, 128256)
    logits = torch.randn(tokens, vocabulary, device=bench.device)
    targets = torch.randint(0, vocabulary, (tokens,), device=bench.device)
    grad = torch.randn(tokens, device=bench.device)
    log_z, entropy, at_target = chunked_logprobs_triton.local_forward(
        logits, targets, vocabulary, TEMPERATURE
    )
    exact = (logits.double() / TEMPERATURE).log_softmax(-1)

    def forward() -> torch.Tensor:
        return chunked_logprobs_triton.local_forward(logits, targets, vocabulary, TEMPERATURE)

    def backward() -> torch.Tensor:
        return chunked_logprobs_triton.local_backward(
            logits,
            targets,
            log_z,
            grad,
            (grad, entropy),
            vocabulary,
            TEMPERATURE,
            torch.bfloat16,
        )

    def forward_error() -> float:
        return relative(at_target - log_z, exact.gather(-1, targets[:, None])[:, 0])

    def backward_error() -> float:
        entropies = -(exact.exp() * exact).sum(-1, keepdim=True)
        exact_gradient = (
            F.one_hot(targets, vocabulary) - exact.exp() - exact.exp() * (exact + entropies)
        )
        return relative(backward(), exact_gradient * (grad[:, None].double() / TEMPERATURE))

    def eager() -> Any:
        scaled = logits / TEMPERATURE
        log_p = scaled.log_softmax(-1)
        return log_p.gather(-1, targets[:, None]), -(log_p.exp() * log_p).sum(-1)

    peers = {"torch eager": lambda: eager, "torch.compile": lambda: compiled(bench, eager)}
    yield KernelTask(
        "log-probs and entropy of a chunk of logits",
        4 * logits.numel(),
        forward,
        forward_error,
        1e-6,
        peers,
    )
    yield KernelTask("its gradient, in bf16", 6 * logits.numel(), backward, backward_error, 5e-3)


def from_hidden_states(bench: Bench, flops: float) -> None:
    """Log-probs from hidden states, forward and backward, relative to the time of the three
    unavoidable matrix products.
    """
    tokens, width, vocabulary = (40, 64, 300) if bench.toy else (8192, 4096, 128256)
    hidden, weight = (
        torch.randn(n, width, device=bench.device, dtype=torch.bfloat16).mul_(0.1).requires_grad_()
        for n in (tokens, vocabulary)
    )
    targets = torch.randint(0, vocabulary, (tokens,), device=bench.device)
    grad = torch.randn(tokens, device=bench.device)
    main_grad = torch.zeros(vocabulary, width, device=bench.device)

    def fused() -> torch.Tensor:
        chunk = 16 if bench.toy else 1024
        return kernels.linear_logprobs(
            hidden, weight, targets, GROUP_OF_ONE, vocabulary, TEMPERATURE, chunk, main_grad
        )[0]

    def plain() -> torch.Tensor:
        return (
            ((hidden @ weight.t()).float() / TEMPERATURE)
            .log_softmax(-1)
            .gather(-1, targets[:, None])[:, 0]
        )

    def liger() -> Callable[[], torch.Tensor]:
        function = pkgutil.resolve_name(
            "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy"
        )
        return lambda: function(hidden / TEMPERATURE, weight, targets, reduction="sum")

    def cut() -> Callable[[], torch.Tensor]:
        function = pkgutil.resolve_name("cut_cross_entropy:linear_cross_entropy")
        return lambda: function(hidden / TEMPERATURE, weight, targets, reduction="none")

    ways = {
        "ours": lambda: fused,
        "torch eager": lambda: plain,
        "torch.compile": lambda: compiled(bench, plain),
    }
    ways |= {"Liger fused linear cross-entropy": liger, "cut-cross-entropy": cut}
    with torch.no_grad():
        reference = (
            hidden[:ROWS_CHECKED].double() @ weight.double().t() / TEMPERATURE
        ).log_softmax(-1)
        error = relative(
            fused()[:ROWS_CHECKED], reference.gather(-1, targets[:ROWS_CHECKED, None])[:, 0]
        )
    del reference
    for by, make in ways.items():
        row: dict[str, Any] = {"what": "log-probs from hidden states, both ways", "by": by}
        try:
            row |= product_timing(
                bench, make(), (hidden, weight), grad, 6.0 * tokens * width * vocabulary, flops
            )
        except Exception as problem:
            if by == "ours":
                raise
            row["note"] = f"not available: {type(problem).__name__}: {str(problem)[:160]}"
        if by == "ours":
            # on a CPU, the matrix product rounds logits to bf16
            limit = 1e-5 if bench.cuda else 1e-2
            row["error"] = error
            if not error <= limit:  # NaN included
                row["failed"] = f"log-probs from hidden states: error {error:.2e}"
        bench.emit(row)


def product_timing(
    bench: Bench,
    forward: Run,
    leaves: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    operations: float,
    flops: float,
) -> dict[str, float]:
    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        result = forward()
        result.backward(grad if result.dim() else None)

    before = 0
    if bench.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ms = bench.median_ms(run)
    timing_row = {
        "ms": ms,
        "tflop_per_s": operations / ms / 1e9,
        "fraction": operations / ms * 1e3 / flops,
    }
    if bench.cuda:
        timing_row["extra_GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return timing_row


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()
