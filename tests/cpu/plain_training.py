"""What plain PyTorch loops share: the optimizer as Megatron sets it up, and comparisons of weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import trainer_reference  # noqa: F401 (makes transformers importable without CUDA)
from transformers import AutoModelForCausalLM, PreTrainedModel

# Adam's eps is as large as the gradients' elements, so that a step on a gradient near zero does not
# amplify float32's rounding.
ADAM: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-3,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
}
WARMED_UP = ADAM | {"warmup_steps": 3, "schedule": "cosine"}


def adamw(model: PreTrainedModel, settings: dict[str, Any]) -> torch.optim.AdamW:
    """AdamW that decays matrices alone."""
    groups = [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": settings["weight_decay"],
        },
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings["lr"], betas=settings["betas"], eps=settings["eps"]
    )


def learning_rate(settings: dict[str, Any], position: int, total: int) -> float:
    """Of the optimizer step at `position`, counted from 1, by the cosine schedule."""
    warmup = settings["warmup_steps"]
    cosine = 0.5 * (1 + math.cos(math.pi * (position - warmup) / (total - warmup)))
    return settings["lr"] * (position / warmup if position <= warmup else 0.1 + 0.9 * cosine)


def optimizer_step(
    model: PreTrainedModel,
    optimizer: torch.optim.AdamW,
    settings: dict[str, Any],
    loss: torch.Tensor,
    rate: float,
) -> float:
    """Returns the gradient norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"]).item()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm


def policy_mask(sample: Any) -> torch.Tensor:
    """[T]: the response's tokens that the policy sampled."""
    mask = sample.policy_mask
    return torch.tensor(mask if mask is not None else [True] * len(sample.token_ids))


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(
    folder: Path, expected: dict[str, torch.Tensor], kind: Any = AutoModelForCausalLM
) -> None:
    exported = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            exported[name].double(),
            tensor,
            rtol=0,
            atol=2e-5,
            msg=lambda message, name=name: f"{folder.name} {name}: {message}",
        )


def weight_files(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert files
    return files
