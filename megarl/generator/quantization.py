"""Makes SGLang hold its weights in one of the fp8 formats of `generator.quantization`, and keep them so.

SGLang reads the format from the checkpoint's config.json. The checkpoint here is the trainer's, in bf16 or float32. So its config is
overridden, no weights are loaded from it, and the first weight update writes every tensor.

    fp8_block    quantization "fp8", blocks of 128x128           weight [out, in], weight_scale_inv [out / 128, in / 128]
    fp8_channel  "w8a8_fp8": per channel, activations per token  weight.t(), weight_scale [out, 1]; of experts not transposed, [E, out, 1]
    fp8_tensor   "compressed-tensors", strategy "tensor"         weight.t(), weight_scale []; of experts not transposed, [E]

SGLang's "fp8" without blocks is not used for the last two: on Hopper it expands a scale per tensor to the channels, and it has no
per-channel scales for experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the launcher imports this module, and torch takes seconds
    import torch

_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True, "symmetric": True}
_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {  # by generator.quantization: the quantization_config of a checkpoint in that format
    "fp8_block": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8_channel": {"quant_method": "w8a8_fp8"},
    "fp8_tensor": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ACTIVATIONS}},
    },
}


def server_arguments(quantization: str | None) -> dict[str, Any]:
    """The arguments of SGLang's server for `generator.quantization`; none for null."""
    if quantization is None:
        return {}
    how = CONFIGS[quantization]
    overrides = json.dumps({"quantization_config": how})
    return {"quantization": how["quant_method"], "json_model_override_args": overrides, "load_format": "dummy"}


def register_hooks() -> None:
    """Hooks into SGLang by its plugin registry, on every device."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method", no_kv_scales, HookType.AROUND)
    for method in (
        "w8a8_fp8.W8A8Fp8LinearMethod",
        "compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod",
        "compressed_tensors.compressed_tensors.CompressedTensorsFusedMoEMethod",
    ):
        target = f"sglang.srt.layers.quantization.{method}.process_weights_after_loading"
        HookRegistry.register(target, once, HookType.AROUND)


def no_kv_scales(original: Callable[..., Any], config: Any, layer: torch.nn.Module, prefix: str) -> Any:
    """Runs around the choice of a layer's method. SGLang would give an fp8 model scales of its keys and values as parameters, whatever the
    cache's dtype; no trainer has them, and here the cache has the model's dtype."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return None if isinstance(layer, RadixAttention) else original(config, layer, prefix)


def once(original: Callable[..., None], method: Any, layer: Any) -> None:
    """Runs around post-load work that transposes weights or merges scales, and lets it happen only once. SGLang repeats it at the end of
    each update; but direct writes write the processed form, which processing again would spoil."""
    if not getattr(layer, "megarl_processed", False):
        original(method, layer)
        layer.megarl_processed = True
