"""Checkpoints that do not fit the model: one message that names every tensor, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.config.errors import ConfigError
from megarl.models.spec import ModelSpec
from megarl.reshard.layout import hf_layout, trainer_layout
from megarl.topology import TrainerTopology
from megarl.trainer.hf_io import load_hf

SPEC = ModelSpec("llama", 2, 16, 24, 4, 2, 4, 11, 64, False, 1e-5, 10000.0)


def load(folder: Path) -> None:
    load_hf(SPEC, trainer_layout(SPEC, TrainerTopology(), "float32"), {}, str(folder))


def test_missing_misshapen_and_quantised_tensors_are_named(tmp_path: Path) -> None:
    tensors = {t.name: torch.zeros(t.shape) for t in hf_layout(SPEC, "float32").tensors(0)}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(12, 16)
    tensors["model.norm.weight"] = torch.zeros(16).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        load(tmp_path)
    missing, quantised, misshapen = raised.value.problems
    assert "model.layers.1.mlp.up_proj.weight is missing" in missing
    assert "model.norm.weight is in F8_E4M3; can be read: F32, BF16, F16" in quantised
    assert "lm_head.weight has shape (12, 16), config.json says (11, 16)" in misshapen


@pytest.mark.parametrize("damage", ["cut", "no header", "long header", "index", "not in its file"])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    tensors = {t.name: torch.zeros(t.shape) for t in hf_layout(SPEC, "float32").tensors(0)}
    path, index = tmp_path / "model-1.safetensors", tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, path.name)}))
    if damage == "not in its file":
        del tensors["model.norm.weight"]
    save_file(tensors, path)
    data = path.read_bytes()
    if damage == "index":
        index.write_text("{}")
    elif damage != "not in its file":
        path.write_bytes({"cut": data[:-1], "no header": b"", "long header": b"\xff" * 7 + data[7:]}[damage])
    with pytest.raises(ConfigError) as raised:
        load(tmp_path)
    (problem,) = raised.value.problems
    assert {"index": f"{index}: is no index", "not in its file": f"{tmp_path}: tensor model.norm.weight is missing in {path.name}"}.get(
        damage, f"{path}: is no whole safetensors file: "
    ) in problem


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither model.safetensors nor"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("axes", [{}, dict(tp=2), dict(pp=2), dict(dp=2), dict(tp=2, pp=2, dp=2)])
def test_export_writes_every_element_once(tied: bool, axes: dict[str, int]) -> None:
    spec = ModelSpec(*[*(getattr(SPEC, name) for name in list(ModelSpec.__dataclass_fields__)[:9]), tied, 1e-5, 10000.0])
    topology = TrainerTopology(**axes)
    layout = trainer_layout(spec, topology, "float32")
    written = {t.name: torch.zeros(t.shape) for t in hf_layout(spec, "float32").tensors(0)}
    for rank in range(topology.world_size):
        for _, piece in layout.owned_pieces(rank):
            written[piece.logical_name][piece.logical.slices()] += 1
    for name, count in written.items():
        assert (count == 1).all(), name
