"""Compiles the Triton kernels for Hopper, without a GPU, and checks what the interpreter cannot
show. test_kernels.py runs it.
"""

from __future__ import annotations

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.kernels import audit_triton, changes_triton, chunked_logprobs_triton, quantise_triton

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = dict(
    codes="*u8", scales="*fp32", row_weights="*i64", word_weights="*i64", partial="*i64",
    targets="*i64", log_z="*fp32", grad="*fp32",
    temperature="fp32", BF16="constexpr", STEPS="constexpr", INTERPRETED="constexpr",
)  # fmt: skip
UNALIGNED = ("tiles_across", "strips", "temperature", "tokens")


def ptx(kernel, types: dict[str, str], **constants) -> str:
    """The PTX of a launch whose strides and extents are multiples of 16 and whose columns are
    contiguous, as Triton would specialise it.
    """
    signature = {
        name: "constexpr" if name in constants else {**TYPES, **types}.get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = [
        i
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and name not in UNALIGNED
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=HOPPER, options={"num_warps": 8}).asm["ptx"]


def accesses(text: str, kind: str) -> set[str]:
    return set(re.findall(rf"{kind}\.global\.([\w.]+)", text))


@pytest.mark.parametrize("amax", [True, False], ids=["amax", "codes"])
def test_quantise(amax):
    text = ptx(
        quantise_triton._tile_kernel, dict(values="*i16"), AMAX=amax, TILE_ROWS=128, TILE_COLS=128,
        PARTS=1, INTERPRETED=False,
        value_col=1, scale_col=1,
    )  # fmt: skip
    # 16 bytes at a time; b32 is a given scale
    assert accesses(text, "ld") <= {"v4.b32", "b32"} and "v4.b32" in accesses(text, "ld")
    if not amax:
        assert "v4.b32" in accesses(text, "st")
        # per element of a thread: 128 * 128 / 256
        assert len(re.findall(r"fma\.rn\.f32", text)) == 2 * 64
    assert set(re.findall(r"(?:div|rcp|mul|add|fma)[\w.]*\.f32", text)) <= {
        "div.rn.f32",
        "mul.f32",
        "add.f32",
        "fma.rn.f32",
    }


@pytest.mark.parametrize(("bits", "per_word"), [("*u64", 1), ("*u32", 2), ("*u16", 4), ("*u8", 8)])
def test_audit_hash(bits, per_word):
    blocks = {
        "STEPS": audit_triton.STEPS,
        "BLOCK_ROWS": audit_triton.BLOCK_ROWS,
        "BLOCK_COLS": audit_triton.BLOCK_COLS,
    }
    constants = dict(PER_WORD=per_word, MIX_SHIFT=31, col_stride=1, **blocks)
    loads = accesses(ptx(audit_triton._hash_kernel, {"values": bits}, **constants), "ld")
    assert loads & {"v4.b32", "v2.b64"}  # 16 bytes at a time


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("bits", ["*u8", "*i16", "*i32"])
def test_changes(bits, writes):
    types = {
        "new": bits,
        "old": bits,
        "counts": "*i32",
        "ends": "*i64" if writes else "*i32",
        "offsets": "*i16",
        "elements": "i64",
    }
    constants = dict(PIECE=changes_triton.PIECE, BLOCK=changes_triton.BLOCK, WRITES=writes)
    # 16 bytes at a time
    assert "v4.b32" in accesses(ptx(changes_triton._changes_kernel, types, **constants), "ld")


@pytest.mark.parametrize("gradient", ["*bf16", "*fp32"])
def test_logprobs(gradient):
    forward = ptx(
        chunked_logprobs_triton._forward_kernel, {"logits": "*fp32", "partial": "*fp32"}, BLOCK=4096
    )
    assert "v4.b32" in accesses(forward, "ld")
    bf16 = gradient == "*bf16"
    types = {
        "logits": "*fp32",
        "gradient": "*i16" if bf16 else gradient,
        "entropy": "*fp32",
        "entropy_grad": "*fp32",
    }
    backward = ptx(
        chunked_logprobs_triton._backward_kernel, types, ENTROPY=False, BF16=bf16, BLOCK=2048
    )
    assert "v4.b32" in accesses(backward, "ld") and "v4.b32" in accesses(backward, "st")
