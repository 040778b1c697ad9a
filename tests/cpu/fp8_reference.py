"""A reference for fp8: HF checkpoints, and the tensors that an engine must hold.

It quantises each tensor in float64 and integers, and slices it.

It does not use the reshard map, its rules or torch's float8 arithmetic.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import quantise_reference
import torch
from reshard_reference import HF, sglang
from safetensors.torch import load_file, save_file

from megarl.base.geometry import GeneratorTopology
from megarl.generator.hooks import CONFIGS
from megarl.models import ModelSpec

_SMALLEST_AMAX = 2.0**-40 * (1 + 13 / 128)
# rows, columns (None: all), floor of the amax
TILES: dict[str, tuple[int | None, int | None, float]] = {
    "fp8_block": (128, 128, 1e-4),
    "fp8_channel": (1, None, _SMALLEST_AMAX),
    "fp8_tensor": (None, None, _SMALLEST_AMAX),
}
_FUSED = [
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
]  # these share one scale per tensor
_ALONE = [
    (name,)
    for name in (
        "o_proj",
        "down_proj",
        "w2",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
    )
]
_ALONE += [("in_proj_qkvz",), ("out_proj",)]


def language_model(checkpoint: Path) -> HF:
    """The tensors of a checkpoint, by expert, and without a vision tower.

    Names are those of a model that has no vision tower.
    """
    tensors: HF = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= {
            name.replace("model.language_model.", "model."): values
            for name, values in load_file(file).items()
        }
    for name in [
        name
        for name in tensors
        if ".visual." in name or name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        module, _, kind = name.rpartition(".")
        values = tensors.pop(name)
        for expert, rows in enumerate(values) if module.endswith(".experts") else ():
            parts = (
                dict(zip(("gate_proj", "up_proj"), rows.chunk(2)))
                if kind == "gate_up_proj"
                else {kind: rows}
            )
            tensors |= {
                f"{module}.{expert}.{part}.weight": weight.clone() for part, weight in parts.items()
            }
    return tensors


class Quantised:
    """HF tensors, rounded to bf16 and quantised to fp8: for each weight its codes, the scale of
    each tile, and the scale of each element.
    """

    def __init__(self, tensors: HF, quantization: str):
        self.quantization = quantization
        self.tensors = {
            name: values if name.endswith("correction_bias") else values.bfloat16()
            for name, values in tensors.items()
        }
        self.codes: HF = {}
        self.scales: HF = {}
        self.spread: HF = {}
        for group in self._groups():
            self._quantise(group)

    @classmethod
    def load(cls, checkpoint: Path, quantization: str) -> Quantised:
        return cls(language_model(checkpoint), quantization)

    def _groups(self) -> list[tuple[str, ...]]:
        kinds = (
            _FUSED + _ALONE
            if self.quantization == "fp8_tensor"
            else [(name,) for kind in _FUSED + _ALONE for name in kind]
        )
        firsts = [
            (name, kind)
            for name in self.tensors
            for kind in kinds
            if name.endswith(f".{kind[0]}.weight")
        ]
        return [tuple(name.replace(kind[0], sibling) for sibling in kind) for name, kind in firsts]

    def _quantise(self, group: tuple[str, ...]) -> None:
        values = torch.cat([self.tensors[name] for name in group])
        rows, cols, floor = TILES[self.quantization]
        rows = rows or values.shape[0]
        cols = cols or values.shape[1]
        codes, scales = (
            torch.from_numpy(part)
            for part in quantise_reference.quantise(values, rows, cols, floor)
        )
        spread = scales.repeat_interleave(rows, 0)[: values.shape[0]].repeat_interleave(cols, 1)[
            :, : values.shape[1]
        ]
        sizes = [len(self.tensors[name]) for name in group]
        for name, code, of_elements in zip(group, codes.split(sizes), spread.split(sizes)):
            self.codes[name] = code
            self.spread[name] = of_elements.contiguous()
            self.scales[name] = scales[0, 0] if self.quantization == "fp8_tensor" else scales

    def in_engine(self, spec: ModelSpec, tp: int, ep: int, dp_attention: int = 1) -> list[HF]:
        """Every parameter by TP rank and SGLang's name, in the engine's shape."""
        topology = GeneratorTopology(tp=tp, ep=ep, dp_attention=dp_attention)
        rows, cols, _ = TILES[self.quantization]
        block = self.quantization == "fp8_block"
        suffix = "_scale_inv" if block else "_scale"
        result = []
        for rank in range(tp):
            weights = sglang(spec, {**self.tensors, **self.codes}, topology, rank, "cpu")
            spread = sglang(spec, {**self.tensors, **self.spread}, topology, rank, "cpu")
            for name, codes in list(weights.items()):
                if codes.dtype != torch.uint8:
                    continue
                scales = spread[name][
                    ..., :: rows or codes.shape[-2], :: cols or codes.shape[-1]
                ].contiguous()
                weights[name] = codes.t() if codes.dim() == 2 and not block else codes
                weights[name + suffix] = scales.view(codes.shape[:-2]) if rows is None else scales
            result.append(weights)
        return result

    def save(self, checkpoint: Path, folder: Path) -> Path:
        """Writes a checkpoint for SGLang's own loader.

        `checkpoint` is the source of the tensors.
        """
        suffix = "_scale_inv" if self.quantization == "fp8_block" else "_scale"
        tensors = {
            **self.tensors,
            **{
                name: codes.contiguous().view(torch.float8_e4m3fn)
                for name, codes in self.codes.items()
            },
        }
        tensors |= {name + suffix: scales.clone() for name, scales in self.scales.items()}
        return _save(
            checkpoint,
            folder,
            tensors,
            {"quantization_config": CONFIGS[self.quantization], "dtype": "bfloat16"},
        )

    def save_dequantised(self, checkpoint: Path, folder: Path) -> Path:
        """Writes a bf16 checkpoint of the values that the codes represent."""
        signs = {
            name: 1 - 2 * (codes.to(torch.float64) >= 128) for name, codes in self.codes.items()
        }
        magnitudes = {
            name: torch.from_numpy(quantise_reference.E4M3[codes.numpy() & 127])
            for name, codes in self.codes.items()
        }
        values = {
            name: (signs[name] * magnitudes[name] * self.spread[name]).bfloat16()
            for name in self.codes
        }
        return _save(checkpoint, folder, {**self.tensors, **values}, {"dtype": "bfloat16"})


def _save(checkpoint: Path, folder: Path, tensors: HF, config: dict[str, Any]) -> Path:
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(
        {name: values.contiguous() for name, values in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), **config})
    )
    return folder
