"""Makes checkpoints with a layer for multi-token prediction from models with one layer more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# family → how the names of the layer's own tensors begin and end: norms of embedding and hidden
# states, projection, last norm
NAMES = {
    "glm4_moe": ("model.layers.{}.", "enorm hnorm eh_proj shared_head.norm"),
    "deepseek_v3": ("model.layers.{}.", "enorm hnorm eh_proj shared_head.norm"),
    "qwen3_next": ("mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
}


def own_names(family: str, layers: int) -> list[str]:
    prefix, suffixes = NAMES[family]
    return [f"{prefix.format(layers)}{suffix}.weight" for suffix in suffixes.split()]


def take_last_layer(family: str, folder: Path) -> Path:
    """From the model in folder/whole makes that in folder/model, whose layer for multi-token
    prediction is the last layer of the first; its own tensors are in folder/own.safetensors too.
    """
    shutil.copytree(folder / "whole", folder / "model")
    tensors = load_file(folder / "whole" / "model.safetensors")
    config = json.loads((folder / "whole" / "config.json").read_text())
    layers = config["num_hidden_layers"] - 1
    hidden = config["hidden_size"]
    dtype = tensors["model.norm.weight"].dtype
    renamed = {}
    torch.manual_seed(5)
    for name, shape in zip(
        own_names(family, layers), ((hidden,), (hidden,), (hidden, 2 * hidden), (hidden,))
    ):
        centre = 1.0 if len(shape) == 1 and family != "qwen3_next" else 0.0
        renamed[name] = (centre + 0.1 * torch.randn(shape)).to(dtype)
    save_file(renamed, folder / "own.safetensors")
    last = f"model.layers.{layers}."
    tensors = {
        key.replace(last, "mtp.layers.0.") if family == "qwen3_next" else key: value
        for key, value in tensors.items()
    } | renamed
    if family != "qwen3_next":
        tensors |= {last + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        tensors |= {last + "shared_head.head.weight": tensors["lm_head.weight"].clone()}
    changed: dict[str, Any] = {"num_hidden_layers": layers} | (
        {} if family == "qwen3_next" else {"num_nextn_predict_layers": 1}
    )
    if config.get("layer_types"):
        changed["layer_types"] = config["layer_types"][:layers]
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    (folder / "model" / "config.json").write_text(json.dumps(config | changed))
    return folder / "model"
