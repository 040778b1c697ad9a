"""An engine whose model has tensors that no update writes.

A hook of SGLang's plugin registry plants them when the weights are loaded. The process begins here
(`start_engine(entry=MAIN)`), so that its workers have the hook too.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.generator import server

MAIN = "planted_engine:main"
KEPT: list[torch.Tensor] = []  # no attribute of the model refers to these


class Hidden(torch.nn.Module):
    """A module that its parent keeps in a list, where torch does not look for modules."""

    def __init__(self, values: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(values)


def main() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.models.llama.LlamaForCausalLM.load_weights", plant, HookType.AFTER
    )
    server.main()


def plant(result: Any, model: Any, *_: Any) -> None:
    """After the weights are loaded, plants copies of one tensor, as repacking makes them, and one
    that post-load work makes each time.
    """
    layer = model.model.layers[0].mlp.down_proj
    weight = layer.weight.detach()
    layer.register_buffer("packed", weight * 2, persistent=False)
    layer.repacked = weight * 3
    layer.quant_method.scales = {"orders": [weight * 4]}
    layer.experts = [Hidden(weight * 5)]
    KEPT.append(weight * 6)
    original = layer.quant_method.process_weights_after_loading

    def process(process_layer: Any) -> None:
        original(process_layer)
        if process_layer is layer:
            layer.derived = weight * 7

    layer.quant_method.process_weights_after_loading = process
