"""The reference for the multi-token prediction layer: DeepSeek-V3's equations 21 to 25 (arXiv
2412.19437) in float64, with Hugging Face's decoder layer, one sequence at a time. Hugging Face's
models leave out the layer.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import trainer_cases
from multi_token_checkpoint import own_names, take_last_layer
from safetensors.torch import load_file
from trainer_reference import load_float64, tokens_of
from trainer_rig import TEMPERATURE, sequences

LAYERS = 4  # of the models of trainer_cases; the model in folder "whole" has one more


def save_with_layer(name: str, folder: Path) -> Path:
    """Saves a model with random weights whose last layer is for multi-token prediction."""
    kinds = (
        {"layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"]}
        if name == "qwen3_next"
        else {}
    )
    trainer_cases.save_model(name, folder / "whole", num_hidden_layers=LAYERS + 1, **kinds)
    return take_last_layer(name, folder)


@cache
def layer_reference(name: str, folder: Path) -> dict[str, Any]:
    """The layer's loss at the trainer's temperature, and its gradients by the names in the
    checkpoint `folder`.
    """
    full_tensors = load_float64(folder.parent / "whole")
    layer_tensors = {
        key: value.double().requires_grad_()
        for key, value in load_file(folder.parent / "own.safetensors").items()
    }
    norm_e, norm_h, projection, norm = (layer_tensors[key] for key in own_names(name, LAYERS))
    layer = full_tensors.model.layers[LAYERS]
    model = full_tensors.model
    model.layers = model.layers[:LAYERS]
    centred = float(name == "qwen3_next")
    eps = full_tensors.config.rms_norm_eps

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (centred + weight)

    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for sequence in sequences(full_tensors.config.vocab_size):
        tokens = tokens_of(sequence)
        mask = torch.tensor(sequence.loss_mask, dtype=torch.bool)[2:]
        if tokens.size(1) < 3:
            continue
        with torch.no_grad():
            h = model(tokens).last_hidden_state[:, :-2]  # h_i; the layer predicts t_(i + 2)
            e = model.embed_tokens(tokens[:, 1:-1])  # of t_(i + 1)
        x = torch.cat([rms(e, norm_e), rms(h, norm_h)], -1) @ projection.T
        positions = torch.arange(x.size(1))[None]
        causal = torch.full((x.size(1), x.size(1)), -torch.inf, dtype=torch.float64).triu(1)[
            None, None
        ]
        x = layer(
            x,
            position_embeddings=model.rotary_emb(x, positions),
            attention_mask=causal,
            position_ids=positions,
        )
        x = rms(x[0] if isinstance(x, tuple) else x, norm)
        logprobs = (x @ full_tensors.lm_head.weight.detach().T / TEMPERATURE).log_softmax(-1)
        total = total - logprobs[0].gather(-1, tokens[0, 2:, None])[mask].sum()
        count += int(mask.sum())
    loss = total / count
    loss.backward()
    before = f"model.layers.{LAYERS}."
    grads = {before + key: parameter.grad for key, parameter in layer.named_parameters()}
    return {
        "loss": loss.item(),
        "grads": {
            **by_checkpoint_names(grads, before, name),
            **{key: value.grad for key, value in layer_tensors.items()},
        },
    }


def by_checkpoint_names(
    grads: dict[str, torch.Tensor], before: str, name: str
) -> dict[str, torch.Tensor]:
    """The tensors by a checkpoint's names. (Transformers stacks the experts.)"""
    tensors = {}
    for key, grad in grads.items():
        if ".mlp.experts." not in key:
            tensors[key] = grad
            continue
        for expert, rows in enumerate(grad):
            parts = (
                zip(("gate_proj", "up_proj"), rows.chunk(2))
                if "gate_up" in key
                else [("down_proj", rows)]
            )
            tensors |= {
                f"{before}mlp.experts.{expert}.{part}.weight": values for part, values in parts
            }
    return {
        key.replace(before, "mtp.layers.0.") if name == "qwen3_next" else key: grad
        for key, grad in tensors.items()
        if grad is not None
    }
