"""CPU support of the engines: batched attention against one sequence at a time in float64;
replacements of imports.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from quantise_reference import block_rule

from megarl.generator.cpu_support import attention, fp8, moe
from megarl.kernels.quantise import quantise

HEADS = 6
KV_HEADS = 2
DIM = 8
SLOTS = 200
# window in tokens, sinks
KINDS = [
    (None, None),
    (4, None),
    (None, torch.linspace(-2, 3, HEADS)),
    (4, torch.linspace(3, -2, HEADS)),
]


def setting(seed: int, totals: list[int], news: list[int]):
    """Sequences whose tokens are in shuffled cache slots.

    Unused slots and table entries hold garbage.
    """
    generator = torch.Generator().manual_seed(seed)
    k_cache, v_cache = (
        torch.randn(SLOTS, KV_HEADS, DIM, generator=generator) * 3 for _ in range(2)
    )
    req_to_token = torch.randint(0, SLOTS, (20, 64), generator=generator)
    rows = torch.randperm(20, generator=generator)[: len(totals)]
    free = torch.randperm(SLOTS, generator=generator)
    for row, total in zip(rows, totals):
        req_to_token[row, :total], free = free[:total], free[total:]
    query = torch.randn(sum(news), HEADS, DIM, generator=generator)
    return query, k_cache, v_cache, req_to_token, rows, torch.tensor(totals), torch.tensor(news)


def reference(
    query, k_cache, v_cache, req_to_token, rows, totals, news, scaling, window=None, sinks=None
) -> torch.Tensor:
    """softmax(q k / scale) v, written out token by token."""
    outputs = []
    first = 0
    for row, total, new in zip(rows, totals.tolist(), news.tolist()):
        slots = req_to_token[row, :total]
        for token in range(new):
            visible = slots[: total - new + token + 1][-(window or SLOTS) - 1 :]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores = (
                    k_cache[visible, kv].double() @ query[first + token, head].double() * scaling
                )
                beside = 0.0 if sinks is None else sinks[head].double().exp()
                outputs.append(
                    scores.exp() @ v_cache[visible, kv].double() / (scores.exp().sum() + beside)
                )
        first += new
    return torch.stack(outputs).view(-1, HEADS, DIM)


OPTIONS = {"scaling": 0.3, "enable_gqa": True, "is_cross_attn": False}


def unreachable(*_, **__):
    raise AssertionError("the loop of SGLang was used")


@pytest.mark.parametrize("chunk", [1 << 24, 600])  # 600: chunks of one or two sequences
@pytest.mark.parametrize(
    "totals, news", [([5], [5]), ([9, 1, 30, 12], [9, 1, 4, 7]), ([17, 17, 3], [1, 1, 1])]
)
@pytest.mark.parametrize("window, sinks", KINDS)
def test_extend_equals_reference(monkeypatch, totals, news, chunk, window, sinks):
    monkeypatch.setattr(attention, "_CHUNK_ELEMENTS", chunk)
    query, *cache, rows, total, new = setting(len(totals), totals, news)
    output = torch.full_like(query, float("nan"))
    options = OPTIONS | {"causal": True, "sliding_window_size": window}
    attention.extend(
        unreachable,
        SimpleNamespace(sinks=sinks, tree=None),
        query,
        output,
        *cache,
        rows,
        total,
        total - new,
        new,
        **options,
    )
    assert (
        output - reference(query, *cache, rows, total, new, 0.3, window, sinks)
    ).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [1 << 24, 600])
@pytest.mark.parametrize("window, sinks", KINDS)
def test_decode_equals_reference(monkeypatch, chunk, window, sinks):
    monkeypatch.setattr(attention, "_CHUNK_ELEMENTS", chunk)
    query, *cache, rows, total, new = setting(3, [1, 40, 7, 13, 13], [1] * 5)
    output = torch.full_like(query, float("nan"))
    options = OPTIONS | {"causal": False, "sliding_window_size": window}
    attention.decode(
        unreachable,
        SimpleNamespace(sinks=sinks),
        query,
        output,
        *cache,
        rows,
        total,
        None,
        **options,
    )
    assert (
        output - reference(query, *cache, rows, total, new, 0.3, window, sinks)
    ).abs().max() < 1e-5


def test_cross_attention_is_left_to_sglang():
    query, *cache, rows, total, _new = setting(0, [4], [1])
    options = {
        "scaling": 0.3,
        "enable_gqa": True,
        "causal": False,
        "is_cross_attn": True,
        "sliding_window_size": None,
    }
    assert (
        attention.decode(
            lambda *_, **__: "loop", None, query, query, *cache, rows, total, None, **options
        )
        == "loop"
    )


STAND_INS = """
import sys
from types import SimpleNamespace
from megarl.generator import cpu_support
assert not cpu_support.active()
cpu_support.install(); cpu_support.install()
assert cpu_support.active() and sum(type(f).__name__ == "_CpuFinder" for f in sys.meta_path) == 1
from sgl_kernel import rmsnorm
assert not rmsnorm
try:
    rmsnorm(1)
except NotImplementedError as error:
    print(error)
try:
    import sgl_kernel.scalar_type
except ImportError:
    print("no submodules")
from torchvision.transforms import InterpolationMode, functional
try:
    functional.resize(InterpolationMode.BICUBIC)
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the stand-ins are not active")
def test_stand_ins_import_and_raise_when_called():
    result = subprocess.run(
        [sys.executable, "-c", STAND_INS], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "sgl_kernel.rmsnorm is a CUDA kernel; it has no CPU counterpart",
        "no submodules",
        "torchvision.transforms.functional.resize is not there; language models read no images",
    ]


def test_importing_the_package_changes_nothing():
    before = list(sys.meta_path)
    importlib.reload(importlib.import_module("megarl.generator.cpu_support"))
    assert sys.meta_path == before


def test_experts_of_other_ranks_add_nothing():
    generator = torch.Generator().manual_seed(4)
    x, w13, w2 = (
        torch.randn(shape, generator=generator) for shape in ((5, 8), (2, 12, 8), (2, 8, 6))
    )
    ids = torch.tensor([[0, -1, 1], [-1, -1, -1], [1, 0, -1], [-1, 1, -1], [-1, -1, 0]])
    weights = torch.rand(ids.shape, generator=generator)
    expected = torch.zeros(5, 8, dtype=torch.float64)
    for t, k in (ids >= 0).nonzero().tolist():
        gate, up = (w13[ids[t, k]].double() @ x[t].double()).chunk(2)
        expected[t] += weights[t, k] * (w2[ids[t, k]].double() @ (gate * torch.sigmoid(gate) * up))
    config = SimpleNamespace(activation="silu", gemm1_alpha=None)
    topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
    assert (
        moe.forward(None, SimpleNamespace(w13_weight=w13, w2_weight=w2), x, topk, config) - expected
    ).abs().max() < 1e-5


def test_experts_of_gpt_oss_equal_its_formula():
    """Rows of gate and up alternate; there are biases and a clamped activation.

    Some experts are on other ranks.
    """
    drawn = torch.Generator().manual_seed(4)
    limit = 0.7
    x, w13, w2, b13, b2 = (
        torch.randn(shape, generator=drawn)
        for shape in ((5, 8), (2, 12, 8), (2, 8, 6), (2, 12), (2, 8))
    )
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0], [0, -1]])
    weights = torch.rand(5, 2, generator=drawn)
    expected = torch.zeros(5, 8, dtype=torch.float64)
    for t, k in (ids >= 0).nonzero().tolist():
        gate_up = w13[ids[t, k]].double() @ x[t].double() + b13[ids[t, k]]
        gate = gate_up[::2].clamp(max=limit)
        up = gate_up[1::2].clamp(-limit, limit)
        expected[t] += weights[t, k] * (
            w2[ids[t, k]].double() @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + b2[ids[t, k]]
        )
    layer = SimpleNamespace(w13_weight=w13, w2_weight=w2, w13_weight_bias=b13, w2_weight_bias=b2)
    config = SimpleNamespace(activation="silu", gemm1_alpha=1.702, gemm1_clamp_limit=limit)
    topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
    output = moe.forward(unreachable, layer, x, topk, config)
    assert (output - expected).abs().max() < 1e-5


def test_dequantised_weights_are_within_the_rounding():
    values = torch.randn(2, 50, 70, generator=torch.Generator().manual_seed(5)).bfloat16()
    codes, scales = quantise(values, block_rule(16, 32), "values")
    dequantised = fp8.dequantised(codes, scales, (16, 32))
    for i in range(0, 50, 16):
        for j in range(0, 70, 32):
            block = dequantised[:, i : i + 16, j : j + 32].double()
            original = values[:, i : i + 16, j : j + 32].double()
            largest = original.abs().amax((1, 2), keepdim=True)
            # 3 bits of mantissa; subnormals
            assert ((block - original).abs() <= original.abs() / 16 + largest / 448 / 512).all()


def test_products_of_fp8_weights_are_those_of_their_values():
    """In SGLang's forms: linear layers transposed with scales [out, 1] or [], experts [E, out, in]
    with scales [E, out, 1] or [E].
    """
    generator = torch.Generator().manual_seed(6)
    codes = torch.randn(3, 8, 5, generator=generator).to(torch.float8_e4m3fn)
    x = torch.randn(4, 5, generator=generator)
    bias = torch.randn(8, generator=generator)
    for scale in (torch.rand(8, 1, generator=generator), torch.tensor(0.3)):
        layer = SimpleNamespace(weight=codes[0].t(), weight_scale=scale)
        expected = x.double() @ (codes[0].double() * scale.double()).t() + bias.double()
        assert (fp8.apply_linear(unreachable, None, layer, x, bias) - expected).abs().max() < 1e-5
    for scale in (torch.rand(3, 8, 1, generator=generator), torch.rand(3, generator=generator)):
        expected = torch.stack([codes[e].double() * scale[e].double() for e in range(3)])
        assert (fp8.of_experts(codes, scale) - expected).abs().max() < 1e-5


def test_parts_of_a_fused_weight_are_brought_to_one_scale():
    values = torch.tensor([[1.0, -3.2], [600.0, 0.01]])
    codes, scale = fp8.scaled_fp8_quant(unreachable, values, torch.tensor(0.5))
    assert scale == 0.5 and codes.double().tolist() == [[2.0, -6.5], [448.0, 0.01953125]]
