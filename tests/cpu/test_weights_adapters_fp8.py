"""lora.sync=adapter with frozen weights in fp8: codes and scales stay, and an engine scores like
the dequantised weights with adapters.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fp8_reference import Quantised
from safetensors.torch import load_file, save_file
from sglang_engine import hf_difference, hf_rounding, make_checkpoint
from test_weights_adapters import EACH, EXPORTS, LAYERS, Served, channels, check_ways, empty_on
from test_weights_fp8 import SHAPE
from weights_rig import SEQUENCES, TRANSPORTS, Trainers, open_generator

from megarl.generator.hooks import server_arguments
from megarl.lora.files import TENSORS_FILE
from megarl.lora.settings import LoraConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def with_adapters(dequantised: Path, adapter: Path, scale: float, folder: Path) -> Path:
    """Writes a checkpoint of W + scale * B A."""
    shutil.copytree(dequantised, folder)
    weights = load_file(dequantised / "model.safetensors")
    factors = load_file(adapter / TENSORS_FILE)
    weights = {name: values.float() for name, values in weights.items()}
    for name, a in factors.items():
        if name.endswith(".lora_A.weight"):
            merged = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[merged] += (
                scale * factors[name.replace(".lora_A", ".lora_B")].float() @ a.float()
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class ServedInFp8(Served):
    dequantised: Path  # the frozen weights' values in the engine, in bf16

    def check_scores(self, folder: Path, version: int) -> None:
        adapter = folder / f"adapter{version}"
        scale = self.lora.alpha / self.lora.rank
        merged = with_adapters(self.dequantised, adapter, scale, folder / f"merged{version}")
        scores = self.generator.score(SEQUENCES)
        assert hf_difference(SEQUENCES, scores, merged) < hf_rounding(SEQUENCES, merged, "bfloat16")
        assert version == 0 or hf_difference(SEQUENCES, scores, self.dequantised) > hf_rounding(
            SEQUENCES, merged, "bfloat16"
        )


@pytest.mark.parametrize(
    ("quantization", "kv_heads", "layout"),
    [
        ("fp8_block", 4, "TP2"),
        ("fp8_channel", 4, "TP2"),
        ("fp8_tensor", 4, "TP2"),
        ("fp8_channel", 2, "TP4"),  # two ranks share a head
    ],
)
def test_adapters_beside_weights_in_fp8(
    quantization: str,
    kv_heads: int,
    layout: str,
    trainers: Trainers,
    key_file: Path,
    tmp_path: Path,
) -> None:
    config = LoraConfig(rank=4, alpha=8.0, targets=["all"])
    shape = SHAPE | {"num_hidden_layers": LAYERS, "num_key_value_heads": kv_heads}
    checkpoint = make_checkpoint(tmp_path / "model", 1, torch.float32, False, "llama", **shape)
    shutil.copytree(checkpoint, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    dequantised = Quantised.load(checkpoint, quantization).save_dequantised(
        checkpoint, tmp_path / "dequantised"
    )
    settings = dict(
        adapter=empty_on(checkpoint, config, tmp_path), **server_arguments(quantization)
    )
    with open_generator(tmp_path / "config", "bfloat16", 2, 1, tmp_path, **settings) as generator:
        generator.map_memory(key_file)
        served = ServedInFp8("llama-TP2", checkpoint, config, generator, dequantised)
        with channels(
            served,
            trainers,
            key_file,
            tmp_path,
            layout,
            EACH,
            TRANSPORTS,
            exports=EXPORTS,
            quantization=quantization,
        ) as ways:
            check_ways(ways, served, tmp_path)
