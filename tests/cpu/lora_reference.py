"""The reference for adapters: plain PyTorch on Hugging Face's model in float64.

Every nn.Linear is wrapped. Transformers stacks a layer's experts in one parameter, so they get
their adapters by a parametrization.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize
from trainer_reference import hf_loss, load_float64, tokens_of
from trainer_rig import TEMPERATURE, sequences
from transformers import PreTrainedModel

Factors = dict[str, torch.Tensor]  # by their names in a PEFT folder, without the prefix
PREFIX = "base_model.model."


class PlainLora(nn.Module):
    def __init__(self, base: nn.Linear, a: nn.Parameter, b: nn.Parameter, scale: float):
        super().__init__()
        self.base = base
        self.a = a
        self.b = b
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


class OfExperts(nn.Module):
    """W[e] + scale * B[e] A[e] of every expert; for gate and up, one below the other."""

    def __init__(
        self, pairs: list[list[tuple[nn.Parameter, nn.Parameter] | None]], rows: int, scale: float
    ):
        super().__init__()
        self.pairs = pairs
        self.rows = rows
        self.scale = scale

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        zeros = weights.new_zeros(self.rows, weights.size(2))
        deltas = [
            torch.cat([zeros if pair is None else pair[1] @ pair[0] for pair in parts])
            for parts in self.pairs
        ]
        return weights + self.scale * torch.stack(deltas)


def random_factors(model: PreTrainedModel, rank: int, targets: list[str], shared: bool) -> Factors:
    """Random A and B of every target, by their names."""
    generator = torch.Generator().manual_seed(11)
    factors = {}

    def pair(stem: str, out: int, into: int, outer: str = "") -> None:
        """Random A and B. `outer`: the factor that the experts share."""
        for letter, shape in (("A", (rank, into)), ("B", (out, rank))):
            name = f"{_of_all(stem) if letter == outer else stem}.lora_{letter}.weight"
            if name not in factors:
                factors[name] = nn.Parameter(0.2 * torch.randn(shape, generator=generator).double())

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and _is_target(name, targets):
            pair(name, module.out_features, module.in_features)
        if name.endswith("mlp.experts"):
            rows = module.gate_up_proj.size(1) // 2
            hidden = module.gate_up_proj.size(2)
            for expert in range(len(module.gate_up_proj)):
                for part, shape, outer in (
                    ("gate_proj", (rows, hidden), "A"),
                    ("up_proj", (rows, hidden), "A"),
                    ("down_proj", (hidden, rows), "B"),
                ):
                    if _is_target(part, targets):
                        pair(f"{name}.{expert}.{part}", *shape, outer=outer if shared else "")
    return factors


def _of_all(stem: str) -> str:
    """The name without the expert's number."""
    return re.sub(r"(\.experts)\.\d+", r"\1", stem)


def _is_target(name: str, targets: list[str]) -> bool:
    last = name.rpartition(".")[2]
    return last not in ("lm_head", "gate") and (targets == ["all"] or last in targets)


def adapt(model: PreTrainedModel, factors: Factors, scale: float) -> None:
    """Freezes the model and adds the adapters."""
    model.requires_grad_(False)

    def pair(stem: str) -> tuple[Any, Any] | None:
        pair_tensors = [
            factors.get(f"{stem}.lora_{x}.weight", factors.get(f"{_of_all(stem)}.lora_{x}.weight"))
            for x in "AB"
        ]
        return None if pair_tensors[0] is None else (pair_tensors[0], pair_tensors[1])

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and f"{name}.lora_A.weight" in factors:
            owner, _, last = name.rpartition(".")
            setattr(
                model.get_submodule(owner),
                last,
                PlainLora(
                    module,
                    factors[f"{name}.lora_A.weight"],
                    factors[f"{name}.lora_B.weight"],
                    scale,
                ),
            )
        if name.endswith("mlp.experts"):
            experts = range(len(module.gate_up_proj))
            for target, parts in (
                ("gate_up_proj", ("gate_proj", "up_proj")),
                ("down_proj", ("down_proj",)),
            ):
                pairs = [[pair(f"{name}.{expert}.{part}") for part in parts] for expert in experts]
                rows = getattr(module, target).size(1) // len(parts)
                parametrize.register_parametrization(module, target, OfExperts(pairs, rows, scale))


def lora_reference(
    folder: Path, lora: dict[str, Any], adapter: Path, weights: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Gradients and log-probs at random adapters, and three steps of AdamW from there.

    The adapters are written to `adapter` in PEFT's format. `weights`: the precision to which
    weights and adapters are rounded first.
    """
    model = load_float64(folder, weights)
    base = [[0.0, *row] for row in _logprobs(model)]
    rank = lora["rank"]
    scale = lora["alpha"] / lora["rank"]
    targets = lora.get("targets", ["all"])
    factors = random_factors(model, rank, targets, lora.get("experts") == "shared")
    write_peft(adapter, factors, lora)
    factors = {
        name: nn.Parameter(values.detach().to(weights).double()) for name, values in factors.items()
    }
    adapt(model, factors, scale)
    batch = sequences(model.config.vocab_size)
    loss, logprobs = hf_loss(model, batch, TEMPERATURE)
    loss.backward()
    results = {
        "loss": loss.item(),
        "logprobs": logprobs,
        "base": base,
        "grads": {name: values.grad.clone() for name, values in factors.items()},
    }
    adam = torch.optim.AdamW(
        factors.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.01
    )
    for seed in (1, 2, 3):
        adam.zero_grad()
        hf_loss(model, sequences(model.config.vocab_size, seed=seed), TEMPERATURE)[0].backward()
        adam.step()
    return results | {
        "trained": {name: values.detach().clone() for name, values in factors.items()}
    }


@torch.no_grad()
def _logprobs(model: PreTrainedModel) -> list[list[float]]:
    rows = []
    for sequence in sequences(model.config.vocab_size):
        tokens = tokens_of(sequence)
        scores = (model(tokens).logits[0, :-1] / TEMPERATURE).log_softmax(dim=-1)
        rows.append(scores.gather(-1, tokens[0, 1:, None])[:, 0].tolist())
    return rows


def write_peft(folder: Path, factors: Factors, lora: dict[str, Any]) -> None:
    folder.mkdir()
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in factors})
    settings = {
        "peft_type": "LORA",
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": modules,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    outer = {
        name: ".experts." in name and not re.search(r"\.experts\.\d", name) for name in factors
    }
    tensors = {
        PREFIX + name: (values.detach()[None] if outer[name] else values.detach())
        .float()
        .contiguous()
        for name, values in factors.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
