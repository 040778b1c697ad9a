"""Model families: one file each, stating its logical tensors and where Megatron and SGLang keep them."""

from __future__ import annotations

from megarl.models.registry import load_spec
from megarl.models.spec import ModelSpec

__all__ = ["ModelSpec", "load_spec"]
