"""Checkpoints with a layer for multi-token prediction, and what it must compute: DeepSeek-V3's equations (arXiv 2412.19437, 21 to 25) in
float64, with Hugging Face's own decoder layer, one sequence at a time. Hugging Face's models leave out the layer itself."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import trainer_cases
from safetensors.torch import load_file, save_file
from trainer_reference import load_float64, tokens_of
from trainer_rig import TEMPERATURE, sequences

LAYERS = 4  # of the models of trainer_cases; in the folder "whole" the layer is one more
NAMES = {
    "glm4_moe": (f"model.layers.{LAYERS}.", "enorm hnorm eh_proj shared_head.norm"),
    "deepseek_v3": (f"model.layers.{LAYERS}.", "enorm hnorm eh_proj shared_head.norm"),
    "qwen3_next": ("mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
}


def save_with_layer(name: str, folder: Path) -> Path:
    """A model with random weights whose last layer is the one for multi-token prediction."""
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"]} if name == "qwen3_next" else {}
    trainer_cases.save_model(name, folder / "whole", num_hidden_layers=LAYERS + 1, **kinds)
    shutil.copytree(folder / "whole", folder / "model")
    tensors, config = load_file(folder / "whole" / "model.safetensors"), json.loads((folder / "whole" / "config.json").read_text())
    hidden = config["hidden_size"]
    torch.manual_seed(5)
    prefix, own = NAMES[name][0], {}
    for suffix, shape in zip(NAMES[name][1].split(), ((hidden,), (hidden,), (hidden, 2 * hidden), (hidden,))):
        centre = 1.0 if len(shape) == 1 and name != "qwen3_next" else 0.0
        own[f"{prefix}{suffix}.weight"] = centre + 0.1 * torch.randn(shape)
    save_file(own, folder / "own.safetensors")
    last = f"model.layers.{LAYERS}."
    tensors = {key.replace(last, "mtp.layers.0.") if name == "qwen3_next" else key: value for key, value in tensors.items()} | own
    if name != "qwen3_next":
        tensors |= {last + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        tensors |= {last + "shared_head.head.weight": tensors["lm_head.weight"].clone()}
        config["num_nextn_predict_layers"] = 1
    config["num_hidden_layers"] = LAYERS
    if kinds:
        config["layer_types"] = config["layer_types"][:LAYERS]
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


@cache
def layer_reference(name: str, folder: Path) -> dict[str, Any]:
    """Loss and gradients of the layer, by the names of the checkpoint `folder`, at the trainer's temperature."""
    whole = load_float64(folder.parent / "whole")
    own = {key: value.double().requires_grad_() for key, value in load_file(folder.parent / "own.safetensors").items()}
    prefix, suffixes = NAMES[name]
    norm_e, norm_h, projection, norm = (own[f"{prefix}{suffix}.weight"] for suffix in suffixes.split())
    layer, model = whole.model.layers[LAYERS], whole.model
    model.layers = model.layers[:LAYERS]
    centred, eps = float(name == "qwen3_next"), whole.config.rms_norm_eps

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (centred + weight)

    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in sequences(whole.config.vocab_size):
        tokens, mask = tokens_of(sequence), torch.tensor(sequence.loss_mask, dtype=torch.bool)[2:]
        if tokens.size(1) < 3:
            continue
        with torch.no_grad():
            h = model(tokens).last_hidden_state[:, :-2]  # h_i; the layer predicts t_(i + 2)
            e = model.embed_tokens(tokens[:, 1:-1])  # of t_(i + 1)
        x = torch.cat([rms(e, norm_e), rms(h, norm_h)], -1) @ projection.T
        positions = torch.arange(x.size(1))[None]
        causal = torch.full((x.size(1), x.size(1)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        x = layer(x, position_embeddings=model.rotary_emb(x, positions), attention_mask=causal, position_ids=positions)
        x = rms(x[0] if isinstance(x, tuple) else x, norm)
        logprobs = (x @ whole.lm_head.weight.detach().T / TEMPERATURE).log_softmax(-1)
        total = total - logprobs[0].gather(-1, tokens[0, 2:, None])[mask].sum()
        count += int(mask.sum())
    loss = total / count
    loss.backward()
    before = f"model.layers.{LAYERS}."
    grads = {before + key: parameter.grad for key, parameter in layer.named_parameters()}
    return {"loss": loss.item(), "grads": {**apart(grads, before, name), **{key: value.grad for key, value in own.items()}}}


def apart(grads: dict[str, torch.Tensor], before: str, name: str) -> dict[str, torch.Tensor]:
    """By the names of a checkpoint: transformers stacks the experts."""
    found = {}
    for key, grad in grads.items():
        if ".mlp.experts." not in key:
            found[key] = grad
            continue
        for expert, rows in enumerate(grad):
            parts = zip(("gate_proj", "up_proj"), rows.chunk(2)) if "gate_up" in key else [("down_proj", rows)]
            found |= {f"{before}mlp.experts.{expert}.{part}.weight": values for part, values in parts}
    return {key.replace(before, "mtp.layers.0.") if name == "qwen3_next" else key: grad for key, grad in found.items() if grad is not None}
