"""The inventory of an engine's memory at the start of a run: every tensor is written, made again,
constant, or listed as none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import planted_engine
import pytest
import torch
from sglang_engine import make_checkpoint
from test_weights_fp8 import OF_FAMILY, SHAPE
from weights_rig import open_generator

from megarl.generator.hooks import server_arguments
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.workers import Workers, watch

DOWN = "model.layers.0.mlp.down_proj"
# of DOWN; SGLang 0.5.23 also gives it to the module before DOWN
SHARED = "model.layers.0.mlp.activation_quant.quant_method"
UNPROVEN = [f"{DOWN}.packed", f"{SHARED}.scales['orders'][0]", f"{DOWN}.repacked"]
CASES = [
    ("deepseek_v3", "fp8_block"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (("qwen3_moe", "fp8_tensor"), ("qwen2", None))
    ),
]
ELSEWHERE = ["outside the model, 0", "outside the model, 1"]


def listed_tensors(file: Path) -> Iterator[dict[str, Any]]:
    return (msgspec.json.decode(line) for line in file.read_bytes().splitlines())


def test_planted_tensors_are_refused_by_name_or_named(tmp_path, key_file, capsys):
    checkpoint = make_checkpoint(tmp_path / "model", 1, torch.float32, False)
    file = tmp_path / "memory.jsonl"

    async def strict(workers: Workers) -> None:
        with pytest.raises(AuditError) as refusal:
            await watch(workers, strict=True)
        messages = [
            line.partition(" [64, 192] float32 (")[0]
            for line in str(refusal.value).splitlines()[1:-1]
        ]
        assert sorted(messages) == sorted(UNPROVEN + ELSEWHERE)

    async def named(workers: Workers) -> None:
        await watch(workers, strict=False, file=file)

    with open_generator(
        checkpoint, "float32", 1, 1, tmp_path / "engine", entry=planted_engine.MAIN
    ) as generator:
        generator.in_update(key_file, strict)
        generator.in_update(key_file, named)
    assert "3 unproven (147456 bytes), 2 unproven outside (98304 bytes)" in (
        printed := capsys.readouterr().out
    )
    assert all(name in printed for name in UNPROVEN + ELSEWHERE)
    kinds = {entry["name"]: entry["kind"] for entry in listed_tensors(file)}
    assert {name for name, kind in kinds.items() if kind == "unproven"} == set(UNPROVEN)
    assert {name for name, kind in kinds.items() if "outside" in kind} == set(ELSEWHERE)
    assert kinds[f"{DOWN}.derived"] == "derived" and kinds[f"{DOWN}.weight"] == "written"
    assert kinds["model.layers.0.self_attn.rotary_emb.cos_sin_cache"] == "constant"


@pytest.mark.parametrize("family, quantization", CASES)
def test_an_engine_without_them_has_nothing_unproven(family, quantization, tmp_path, key_file):
    """Latent attention makes w_kc and w_vc again from kv_b_proj."""
    checkpoint = make_checkpoint(
        tmp_path / "model", 1, torch.float32, False, family, **SHAPE | OF_FAMILY.get(family, {})
    )
    file = tmp_path / "memory.jsonl"

    async def strict(workers: Workers) -> None:
        await watch(workers, strict=True, file=file)

    with open_generator(
        checkpoint, "bfloat16", 1, 1, tmp_path / "engine", **server_arguments(quantization)
    ) as generator:
        generator.in_update(key_file, strict)
    tensors = list(listed_tensors(file))
    kinds = {entry["name"]: entry["kind"] for entry in tensors}
    assert {"written", "constant"} <= set(kinds.values()) and not any(
        "unproven" in kind for kind in kinds.values()
    )
    if family == "deepseek_v3":
        assert all(
            kinds[f"model.layers.{i}.self_attn.{derived}"] == "derived"
            for i in (0, 1)
            for derived in ("w_kc", "w_vc")
        )
    assert all(
        entry["ranks"] == [0] and entry["bytes"] > 0
        for entry in tensors
        if entry["kind"] != "working"
    )
