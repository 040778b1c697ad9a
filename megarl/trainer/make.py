"""Makes the trainer of a policy."""

from __future__ import annotations

from typing import Any

from megarl.config.lora import LoraConfig
from megarl.trainer.lora import LoraTrainer
from megarl.trainer.step import MegatronTrainer


def make_trainer(*arguments: Any, lora: LoraConfig, **settings: Any) -> MegatronTrainer:
    """With the arguments of MegatronTrainer: that, or one that trains adapters alone."""
    return LoraTrainer(*arguments, lora=lora, **settings) if lora.rank else MegatronTrainer(*arguments, **settings)
