"""The Triton kernels against their references. test_kernels.py runs it with TRITON_INTERPRET=1.

Shapes are small, because the interpreter is slow.
"""

from __future__ import annotations

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_kernels.py"

import pytest
import quantise_reference as reference
import torch
from quantise_reference import block_rule
from thread_groups import on_ranks

from megarl import kernels
from megarl.base.geometry import Box
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
from megarl.kernels.quantise_rules import BLOCK, Rule
from megarl.reshard.execute import AmaxTable, payload
from megarl.reshard.map import Copy, Quantisation
from megarl.reshard.template import QUANTISE, SCALE

torch.set_num_threads(1)
RULE = block_rule(8, 16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize(
    "count", [1, changes_triton.PIECE, changes.BLOCK + changes_triton.PIECE + 7]
)
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_changes(dtype, count, share):
    generator = torch.Generator().manual_seed(count)
    old = torch.randint(0, 100, (count,), dtype=dtype, generator=generator)
    new = old + (torch.rand(count, generator=generator) < share).to(dtype)
    pairs = [(new, old), (new[:1], old[:1]), (old, old), (new[:0], old[:0]), (old, new)]
    for changed, pair in zip(changes_triton.find_changes(pairs), pairs, strict=True):
        assert all(map(torch.equal, changed, changes.find_changes(*pair)))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_whole(x: torch.Tensor, rule: Rule) -> None:
    scales = quantise.scales_of(quantise_triton.tile_amax(x, 0, 0, rule, "x"), rule)
    expected = quantise.quantise(x, rule, "x")
    assert equal(quantise_triton.quantise_with(x, 0, 0, scales, rule), expected[0]) and equal(
        scales, expected[1]
    )


def test_every_bf16_number_in_tiles_of_its_own_size():
    """All 2^16 patterns except NaN and infinity, sorted by size, so that each tile has its own
    scale.
    """
    every = torch.arange(0x7F80, dtype=torch.int16)
    # few large tiles, since the interpreter takes time for each
    x = torch.stack([every, every | -0x8000]).T.reshape(-1, 1020)
    check_whole(x.contiguous().view(torch.bfloat16), block_rule(1, 1024))


def test_every_tie_between_two_codes():
    middles = (reference.E4M3[:-1] + reference.E4M3[1:]) / 2
    x = torch.tensor([*reference.E4M3, *middles, 1e-3, 448.0, 0.0]).view(2, 128)
    check_whole(x.bfloat16(), BLOCK)
    codes = quantise_triton.quantise_with(-x, 0, 0, torch.ones(1, 1), BLOCK)
    assert (
        codes.view(torch.uint8).numpy().tolist()
        == reference.e4m3_codes(-x.double().numpy()).tolist()
    )


@pytest.mark.parametrize("spread", [0.0, 3.0, 40.0])
def test_random_tiles_with_zeros_subnormals_and_huge_numbers(spread):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 70, generator=generator) * torch.exp2(
        spread * torch.randn(40, 1, generator=generator)
    ).clamp(2.0**-126, 2.0**100)
    x[:8, :16] = 0
    x[9, 20] = 1e-39
    x[17, 33] = torch.finfo(torch.bfloat16).max
    check_whole(x.bfloat16(), RULE)
    check_whole(x, RULE)
    check_whole(x.t(), RULE)


def test_experts():
    check_whole(torch.randn(2, 20, 33, generator=torch.Generator().manual_seed(2)).bfloat16(), RULE)


@pytest.mark.parametrize(
    "box",
    [Box((0, 0), (40, 70)), Box((3, 5), (30, 60)), Box((11, 17), (2, 3)), Box((8, 16), (9, 54))],
)
def test_cut_tiles_in_two_passes(box):
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = quantise.quantise(x, RULE, "x")
    part = x[box.slices()]
    amax = quantise_triton.tile_amax(part, *box.start, RULE, "x")
    assert equal(amax, quantise.tile_amax(part, *box.start, RULE, "x"))
    codes = quantise_triton.quantise_with(
        part, *box.start, expected[1][RULE.tiles(box).slices()], RULE
    )
    assert equal(codes, expected[0][box.slices()])


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("transform", [QUANTISE, SCALE])
def test_a_copy_of_a_map_that_quantises(transform, cut, monkeypatch):
    """Sends from a GPU equal sends from a CPU.

    The scales of cut tiles are strided views of the whole tensor's scales.
    """
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    box = Box((11, 16), (29, 48)) if cut else Box((8, 16), (32, 48))
    table = AmaxTable(
        [("w", RULE.tiles(Box((0, 0), (40, 64))), quantise.tile_amax(x, 0, 0, RULE, "w"))]
    )
    quantisation = Quantisation(RULE, "w", box.start, cut)
    read_box, dtype = (
        (box, "float8_e4m3fn") if transform == QUANTISE else (RULE.tiles(box), "float32")
    )
    copy = Copy(0, "w", box, 1, "w", read_box, transform, dtype, 0, quantisation)
    expected = payload(copy, x, table)
    requests = []
    monkeypatch.setattr(
        kernels, "_quantise", lambda values, rule: requests.append(rule) or quantise_triton
    )
    assert equal(payload(copy, x, table), expected)
    # scales of cut tiles follow from their amax
    assert bool(requests) == (transform == QUANTISE or not cut)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(bad):
    x = torch.ones(20, 40).bfloat16()
    x[18, 39] = bad
    with pytest.raises(RuntimeError, match=r"w2: .*first in tile \(5, 2\)"):
        quantise_triton.tile_amax(x, 24, 0, RULE, "w2")


def test_scales_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="need scales"):
        quantise_triton.quantise_with(torch.ones(4, 4), 6, 0, torch.ones(1, 1), RULE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_hash_of_strided_boxes(dtype, monkeypatch):
    monkeypatch.setattr(audit_triton, "STEPS", 2)
    monkeypatch.setattr(audit_triton, "BLOCK_ROWS", 8)
    monkeypatch.setattr(audit_triton, "BLOCK_COLS", 32)
    x = torch.randint(
        0,
        256,
        (50, 60 * dtype.itemsize),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(4),
    ).view(dtype)
    for box in (
        Box((0, 0), (50, 60)),
        Box((7, 9), (21, 37)),
        Box((49, 0), (1, 60)),
        Box((3, 3), (5, 1)),
    ):
        for values in (
            x[box.slices()],
            x[box.slices()].clone(),
            x.clone()[box.slices()].t().contiguous().t(),
        ):
            assert audit_triton.hash_box(values, *box.start) == audit.hash_box(values, *box.start)
    assert audit_triton.hash_box(x[:0], 5, 5) == 0
    assert audit_triton.hash_box(x[:9], 2**20, 7) == audit.hash_box(x[:9], 2**20, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "real"), [(0, 64), (20, 37), (60, 1)])
def test_logprobs_and_entropy_of_a_slice(first, real, dtype, monkeypatch):
    """Rows of several blocks with a partial last one, columns of padding, and targets on other
    ranks.
    """
    monkeypatch.setattr(chunked_logprobs_triton, "FORWARD_BLOCK", 8)
    monkeypatch.setattr(chunked_logprobs_triton, "BACKWARD_BLOCK", 4)
    generator = torch.Generator().manual_seed(5)
    logits = 8 * torch.randn(6, 64, generator=generator)
    targets = torch.randint(0, 64, (6,), generator=generator)
    grad, entropy_grad = torch.randn(2, 6, generator=generator)
    exact = (logits.double() / 1.3).requires_grad_()
    log_p = torch.log_softmax(exact, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (grad * log_p.gather(-1, targets[:, None])[:, 0] + entropy_grad * entropy).sum().backward()

    columns = slice(first, first + real)
    local_targets = torch.where((targets >= first) & (targets < first + real), targets - first, -1)
    padded = torch.full((6, 64), torch.nan)
    padded[:, :real] = logits[:, columns]
    statistics = chunked_logprobs_triton.local_forward(padded, local_targets, real, 1.3)
    part = exact.detach()[:, columns]
    local = torch.log_softmax(part, -1)
    at_target = torch.where(
        local_targets >= 0, exact.detach().gather(-1, targets[:, None])[:, 0], 0.0
    )
    expected = torch.stack([part.logsumexp(-1), -(local.exp() * local).sum(-1), at_target])
    torch.testing.assert_close(statistics.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(
        statistics,
        chunked_logprobs.local_forward(padded.clone(), local_targets, real, 1.3),
        rtol=1e-6,
        atol=2e-6,
    )

    log_z = exact.detach().logsumexp(-1).float()
    for of_entropy in (None, (entropy_grad, entropy.detach().float())):
        inputs = {
            "targets": local_targets,
            "log_z": log_z,
            "grad": grad,
            "of_entropy": of_entropy,
            "real": real,
            "temperature": 1.3,
            "dtype": dtype,
        }
        gradient = chunked_logprobs_triton.local_backward(padded.clone(), **inputs)
        assert gradient.dtype == dtype and not gradient[:, real:].any()
        rounding = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(
            gradient,
            chunked_logprobs.local_backward(padded.clone(), **inputs),
            rtol=rounding,
            atol=1e-6,
        )
    torch.testing.assert_close(
        gradient[:, :real].double(), exact.grad[:, columns] / 1.3, rtol=rounding, atol=2e-6
    )


def test_logprobs_over_sets(monkeypatch):
    """The whole function gives the same with the kernels as with the references.

    A row without columns on a rank adds nothing.
    """
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(7, 5, generator=generator)
    weight = torch.randn(24, 5, generator=generator)
    sizes = torch.tensor([1, 19, 2, 3, 5, 2, 9])
    sets = [torch.randperm(19, generator=generator)[:size] for size in sizes.tolist()]
    targets = torch.stack([token_set[-1] for token_set in sets])
    sets_of_rows = (sizes, torch.cat(sets).int())

    def run(group):
        x = hidden.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        logprobs, entropy = kernels.linear_logprobs(
            x, w, targets, group, 19, 0.7, 3, None, sets_of_rows
        )
        (logprobs * torch.arange(7) + 0.3 * entropy).sum().backward()
        return logprobs.detach(), entropy.detach(), x.grad, w.grad

    [expected] = on_ranks(1, run)
    monkeypatch.setattr(chunked_logprobs, "_local", lambda hidden: chunked_logprobs_triton)
    [logprobs] = on_ranks(1, run)
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=2e-6)
    absent = torch.full((2, 3), chunked_logprobs.ABSENT)
    absent[1, 1] = 2.0
    partial = chunked_logprobs_triton.local_forward(absent, torch.tensor([-1, 1]), 3, 0.5)
    torch.testing.assert_close(partial[:, 1], torch.tensor([4.0, 0.0, 4.0]))
    assert partial[0, 0] < -1e19 and partial[2, 0] == 0
