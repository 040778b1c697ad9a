"""Megatron to SGLang in fp8, for every way in which trainers cut tensors.

After an optimizer step, codes and scales of every live parameter equal a reference bit for bit: the
exported HF checkpoint, quantised tensor by tensor by independent code (fp8_reference.py).

Trainer ranks, engines and weights channels are real; the engines start in the format without
weights. Noise fills the memory before each update. Log-probs are compared bit for bit with those of
an engine that loaded the reference's checkpoint with SGLang's own loader, and with HF on the
dequantised weights.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_reference import Quantised
from sglang_engine import free_port, hf_difference, hf_rounding, make_checkpoint
from weights_rig import (
    SEQUENCES,
    TRANSPORTS,
    Generator,
    OneAtATime,
    Result,
    noted_grants,
    open_generator,
    receive,
    receiver,
    unequal,
)
from weights_worker import Job, Sync

from megarl.base.geometry import GeneratorTopology
from megarl.generator.hooks import server_arguments
from megarl.messaging.link import Hub, RunKey
from megarl.models.registry import load_spec
from megarl.reshard import layout as layout_module
from megarl.reshard.layout import LayoutError, generator_layout
from megarl.weight_sync.transports.base import SHARED_MEMORY
from megarl.weight_sync.workers import settle_layout

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
OF_FAMILY = {
    # its head width is hidden_size / num_attention_heads, not head_dim
    "qwen2": {"hidden_size": 512},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 256},
    "mixtral": {"hidden_size": 512},
    "glm4_moe": {"moe_intermediate_size": 256},
    "qwen3_next": {  # the queries of a head and its keys share blocks
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
            "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "deepseek_v3": {
        "num_attention_heads": 4, "head_dim": 64, "q_lora_rank": 128, "kv_lora_rank": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "moe_intermediate_size": 256,
    },
}  # fmt: skip
OF_FAMILY["qwen3_5_moe"] = OF_FAMILY["qwen3_next"]
OF_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe")
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {"tp": 2},
    "TP4": {"tp": 4},  # 64 rows of k, v, gate and up: blocks of 128 are cut
    "TP2xPP2": {"tp": 2, "pp": 2},
    "DP2-zero1": {"dp": 2, "zero": 1},
    "DP4-zero3": {"dp": 4, "zero": 3},  # blocks are cut
    "EP2": {"dp": 2, "ep": 2},
}


@dataclass(frozen=True)
class Fp8Setting:
    """Settings of one engine, and the dtype of its trainer."""

    family: str
    quantization: str
    tp: int
    ep: int = 1
    dtype: str = "float32"
    dp_attention: int = 1
    kv_heads: int = 4  # of the model; TP4 with fewer of them cuts what belongs to a head

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "EP": self.ep, "DPA": self.dp_attention}
        engine = "x".join(
            f"{name}{size}" for name, size in sizes.items() if name == "TP" or size > 1
        )
        heads = "" if self.kv_heads == 4 else f"-KV{self.kv_heads}"
        return f"{self.family}-{self.quantization}-{engine}{heads}"

    @property
    def layouts(self) -> list[str]:
        return [name for name in LAYOUTS if self.family in OF_EXPERTS or name != "EP2"]

    def trainer(self, layout: str) -> dict[str, Any]:
        """The trainer's sizes. Experts with tensor parallelism need sequence parallelism."""
        sizes = LAYOUTS[layout]
        return {**sizes, "sequence_parallel": self.family in OF_EXPERTS and sizes.get("tp", 1) > 1}


# SGLang's Llama loader looks for `weight_scale_inv` under another name, and leaves the scales
# unchanged: only direct writes reach them.
NOT_LOADED = {("llama", "fp8_block")}
SAMPLE = {
    Fp8Setting("llama", "fp8_block", 1): ("TP4", "DP2-zero1", "DP4-zero3"),
    Fp8Setting("qwen3_moe", "fp8_channel", 2, 2, "bfloat16"): ("EP2",),
}
SETTINGS = [
    *SAMPLE,
    Fp8Setting("llama", "fp8_block", 2, dtype="bfloat16"),
    Fp8Setting("qwen2", "fp8_block", 2),
    Fp8Setting("qwen3_moe", "fp8_block", 1),
    Fp8Setting("qwen3_moe", "fp8_block", 2, dtype="bfloat16"),
    Fp8Setting("qwen3_moe", "fp8_block", 2, 2),
    Fp8Setting("llama", "fp8_channel", 2),
    Fp8Setting("llama", "fp8_tensor", 2),
    Fp8Setting("qwen3_moe", "fp8_tensor", 2, 2),
    Fp8Setting("mixtral", "fp8_block", 2),
    # its router is float32 in engines, not rounded to bf16 like others
    Fp8Setting("glm4_moe", "fp8_block", 2, 2, "bfloat16"),
    Fp8Setting("qwen3_next", "fp8_block", 2, 2, "bfloat16"),  # its decays are float32 too
    Fp8Setting("qwen3_5_moe", "fp8_block", 2, 2, "bfloat16"),
    Fp8Setting("deepseek_v3", "fp8_block", 2, 2),
    Fp8Setting("deepseek_v3", "fp8_block", 2, 2, dp_attention=2),
    Fp8Setting("llama", "fp8_block", 1, kv_heads=2),
    Fp8Setting("qwen3", "fp8_block", 2, dtype="bfloat16", kv_heads=2),
    Fp8Setting("llama", "fp8_channel", 2, kv_heads=2),
    Fp8Setting("llama", "fp8_tensor", 2, kv_heads=2),
    Fp8Setting("qwen3_next", "fp8_block", 1, dtype="bfloat16", kv_heads=2),
]
CASES = [
    pytest.param(
        setting,
        layout,
        marks=[pytest.mark.matrix] + [pytest.mark.sample] * (layout in SAMPLE.get(setting, ())),
        id=f"{setting}-from-{layout}",
    )
    for setting in SETTINGS
    for layout in setting.layouts
]


@dataclass
class SyncedInFp8:
    checkpoint: Path
    generator: Generator


@contextlib.contextmanager
def open_synced(setting: Fp8Setting, folder: Path, key_file: Path) -> Iterator[SyncedInFp8]:
    folder = folder / str(setting)
    shape = SHAPE | OF_FAMILY.get(setting.family, {}) | {"num_key_value_heads": setting.kv_heads}
    checkpoint = make_checkpoint(
        folder / "model", 1, getattr(torch, setting.dtype), False, setting.family, **shape
    )
    # The engine gets a folder without weights.
    shutil.copytree(
        checkpoint,
        folder / "config",
        ignore=shutil.ignore_patterns("*.safetensors"),
        dirs_exist_ok=True,  # the engine may have been open before
    )
    settings = dict(
        dp_attention=setting.dp_attention,
        **server_arguments(setting.quantization, load_spec(checkpoint).vision_tower),
    )
    with open_generator(
        folder / "config", "bfloat16", setting.tp, setting.ep, folder, **settings
    ) as generator:
        generator.map_memory(key_file)
        yield SyncedInFp8(checkpoint, generator)


@pytest.fixture(scope="module")
def engines(trainers, key_file, tmp_path_factory) -> Iterator[OneAtATime[Fp8Setting, SyncedInFp8]]:
    """Started after `trainers`, so that all start together."""
    folder = tmp_path_factory.mktemp("engines")
    with contextlib.closing(
        OneAtATime(lambda setting: open_synced(setting, folder, key_file))
    ) as engines:
        yield engines


def test_an_engine_that_quantises_another_set_is_refused_by_name(engines, key_file, monkeypatch):
    """Here one list is shorter."""
    synced = engines.of(SETTINGS[0])
    listed = layout_module.quantised_parameters
    monkeypatch.setattr(
        layout_module,
        "quantised_parameters",
        lambda spec: [name for name in listed(spec) if "down_proj" not in name],
    )
    layout = generator_layout(
        load_spec(synced.checkpoint),
        GeneratorTopology(),
        "bfloat16",
        "cpu",
        SETTINGS[0].quantization,
    )
    with pytest.raises(LayoutError) as error:
        synced.generator.in_update(key_file, lambda workers: settle_layout(workers, layout))
    live, planned = (
        f"((192, 256), (256, 1), '{dtype}')" for dtype in ("float8_e4m3fn", "bfloat16")
    )
    name = "model.layers.0.mlp.down_proj.weight"
    assert (
        f"generator rank 0, {name}: shape, strides, dtype {live}, in the layout {planned}"
        in str(error.value)
    )
    assert f"generator rank 0 has {name}_scale_inv, which the layout does not know" in str(
        error.value
    )


@pytest.mark.parametrize("setting, layout", CASES)
def test_engine_holds_the_export_as_the_reference_quantises_it(
    setting: Fp8Setting, layout: str, engines, trainers, key_file, tmp_path, record_property
):
    kinds = [(0, SHARED_MEMORY), *((1, kind) for kind in TRANSPORTS)]
    record_property("matrix", (str(setting), layout, TRANSPORTS))
    synced = engines.of(setting)
    with contextlib.ExitStack() as stack:
        hubs = [
            stack.enter_context(contextlib.closing(Hub("generator.0", RunKey.load(key_file))))
            for _ in kinds
        ]
        job = Job(
            model=str(synced.checkpoint),
            dtype=setting.dtype,
            trainer=setting.trainer(layout),
            tp=setting.tp,
            ep=setting.ep,
            dp_attention=setting.dp_attention,
            syncs=[Sync(version, kind, hub.address) for (version, kind), hub in zip(kinds, hubs)],
            key_file=str(key_file),
            port=free_port(),
            folder=str(tmp_path),
            quantization=setting.quantization,
        )
        stack.enter_context(trainers.kept())
        trainers.begin(job)
        results = [receive(synced.generator, job, sync, hub) for sync, hub in zip(job.syncs, hubs)]

    for folder, updated in ((synced.checkpoint, results[:1]), (job.export, results[1:])):
        reference = Quantised.load(folder, setting.quantization)
        expected = reference.in_engine(
            load_spec(folder), setting.tp, setting.ep, setting.dp_attention
        )
        for parameters, logprobs in updated:
            assert unequal(parameters, expected) == []
            assert logprobs == updated[0][1]
    dequantised = reference.save_dequantised(job.export, tmp_path / "dequantised")
    rounding = hf_rounding(SEQUENCES, dequantised, "bfloat16")
    assert (
        hf_difference(SEQUENCES, logprobs, dequantised)
        < rounding
        < hf_difference(SEQUENCES, logprobs, synced.checkpoint)
    )
    if layout == setting.layouts[-1] and (setting.family, setting.quantization) not in NOT_LOADED:
        compare_with_fresh_engine(
            setting, reference.save(job.export, tmp_path / "fp8"), key_file, tmp_path, results[-1]
        )


@pytest.mark.long
@pytest.mark.timeout(1200)  # with the start of an engine
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.kv_heads == 2], ids=str)
def test_deltas_where_ranks_share_a_head(
    setting: Fp8Setting, engines, trainers, key_file, tmp_path
):
    """Strictly audited changes of three steps, by four tensor ranks of a model with two heads."""
    synced = engines.of(setting)
    with contextlib.closing(Hub("generator.0", RunKey.load(key_file))) as hub, trainers.kept():
        job = Job(
            model=str(synced.checkpoint),
            dtype=setting.dtype,
            trainer=setting.trainer("TP4"),
            tp=setting.tp,
            ep=setting.ep,
            syncs=[Sync(version, SHARED_MEMORY, hub.address) for version in range(4)],
            key_file=str(key_file),
            port=free_port(),
            folder=str(tmp_path),
            quantization=setting.quantization,
            audit="strict",
            delta="auto",
            lr=1e-6,  # small enough that most bits stay
        )
        granted = noted_grants(hub)
        trainers.begin(job)
        synced.generator.set_version(-1)
        end = receiver(job.plan(SHARED_MEMORY), hub, job.key_file)
        for _ in job.syncs:
            synced.generator.take(end)
    assert granted == ["F", "d", "d", "d"]
    reference = Quantised.load(job.export, setting.quantization)
    expected = reference.in_engine(load_spec(job.export), setting.tp, setting.ep)
    assert unequal(synced.generator.memory(), expected) == []


def compare_with_fresh_engine(
    setting: Fp8Setting, checkpoint: Path, key_file: Path, folder: Path, result: Result
) -> None:
    """Compares with an engine that SGLang's own loader has filled."""
    with open_generator(
        checkpoint, "bfloat16", setting.tp, setting.ep, folder, dp_attention=setting.dp_attention
    ) as fresh:
        logprobs = fresh.score(SEQUENCES)
        fresh.map_memory(key_file)
        assert unequal(fresh.memory(), result[0]) == []
        assert logprobs == result[1]
