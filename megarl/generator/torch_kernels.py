"""Runs SGLang on a GPU that has PyTorch and Triton, but none of SGLang's compiled kernels
(docs/gpu.md).

With the environment variable of `TORCH_KERNELS`, an engine computes with torch and Triton alone.
This is SGLang's own reference code, which it calls `native`, so the model is the same. It is
slower.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TORCH_KERNELS = "MEGARL_TORCH_KERNELS"  # environment variable
PACKAGE = "sgl_kernel"
ENVIRONMENT = {
    # norms, activations, rotary embeddings, positions (kernels/fused_op.py:31)
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # entrypoints/engine.py:1948
    # the other is in Rust, over one version of PyTorch
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    # products of fp8 blocks (layers/quantization/fp8_utils.py:1173)
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
}
ARGUMENTS = {
    "attention_backend": "triton",
    "fp8_gemm_runner_backend": "triton",
    "disable_prefill_cuda_graph": True,  # its graphs are pieces around attention, and save little
    "grammar_backend": "none",
}


def enabled() -> bool:
    return bool(os.environ.get(TORCH_KERNELS))


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    quantise = "sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_group_quant_fp8"
    HookRegistry.register(quantise, quantised, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.layers.dual_gemm.DualGemm._select_mode", no_dual_product, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.kernels.ops.kvcache.kvcache.can_use_store_cache",
        no_compiled_store,
        HookType.REPLACE,
    )


def quantised(
    x: torch.Tensor, group_size: int, *arguments: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces the quantisation of activations, by SGLang's Triton kernel for machines without the
    compiled one.
    """
    from sglang.kernels.ops.quantization.fp8_kernel import _per_token_group_quant_8bit_raw

    return _per_token_group_quant_8bit_raw(x, group_size, *arguments, **named)


def no_compiled_store(*_: Any) -> bool:
    """Whether a compiled kernel writes keys and values to the cache.

    If not, SGLang indexes (mem_cache/memory_pool.py:219).
    """
    return False


def no_dual_product(*_: Any) -> None:
    """How a kernel in CUTLASS's Python dialect computes gate, up and activation together.

    If not at all, they are three steps.
    """


def is_arch_support_pdl() -> bool:
    """Whether kernels may begin before the last one has ended, which Triton's need not."""
    return False


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that does not keep its memory; here one that does."""
    return tensor


# of sgl_kernel and its modules
FUNCTIONS = {"is_arch_support_pdl": is_arch_support_pdl, "weak_ref_tensor": weak_ref_tensor}
