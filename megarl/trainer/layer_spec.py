"""Says which of Megatron's layer specs a trainer on a machine like this one uses. Imports no Megatron: the generator asks too."""

from __future__ import annotations

import importlib.util

import torch


def layer_spec() -> str:
    """ "te" (Transformer Engine) or "local", as trainer_layout calls them: they keep the norms under different names."""
    fused = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    return "te" if fused else "local"
