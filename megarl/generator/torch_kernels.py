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
    for question in (
        "sglang.kernels.ops.kvcache.kvcache.can_use_store_cache",
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
    ):
        HookRegistry.register(question, no_compiled_store, HookType.REPLACE)
    HookRegistry.register(
        "sglang.kernels.ops.activation.activation.silu_and_mul", silu_and_mul, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.forward_native",
        experts_forward,
        HookType.REPLACE,
    )
    experts = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
    HookRegistry.register(
        f"{experts}.moe_sum_reduce_torch_compile", moe_sum_reduce, HookType.REPLACE
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
    """Whether a compiled kernel writes keys and values to the cache, alone or with the rotary
    embedding.

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


def experts_forward(method: Any, *arguments: Any, **named: Any) -> Any:
    """The products of experts, by Triton: SGLang's torch form waits for the GPU, which a CUDA graph
    may not.
    """
    return method.forward_cuda(*arguments, **named)


def silu_and_mul(
    gate_and_up: torch.Tensor, output: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """The activation of experts: [n, m] from [n, 2 m].

    The ignored arguments name rows whose result nobody reads.
    """
    import torch

    gate, up = gate_and_up.chunk(2, dim=-1)
    return torch.mul(torch.nn.functional.silu(gate), up, out=output)


def moe_sum_reduce(by_expert: torch.Tensor, output: torch.Tensor, factor: float) -> None:
    """Writes the sum over the experts of each token: [tokens, hidden] from [tokens, top k,
    hidden].
    """
    import torch

    torch.sum(by_expert, dim=1, out=output)
    output.mul_(factor)


def moe_align_block_size(
    expert_of: torch.Tensor,
    buckets: int,
    block_size: int,
    sorted_places: torch.Tensor,
    expert_of_block: torch.Tensor,
    padded_places: torch.Tensor,
    *_: Any,
) -> None:
    """Sorts (token, choice) pairs by expert, and pads each expert's to whole blocks.

    expert_of: [tokens, top k], with -1 for an expert of another rank; `buckets` counts this one
    too. Written are: `sorted_places`, places of `expert_of` or its size as padding;
    `expert_of_block`; and `padded_places` [1], with padding. Waits for nothing, since a CUDA graph
    captures it. Source: sgl_kernel's function, as SGLang calls it
    (moe_runner/triton_utils/moe_align_block_size.py).
    """
    import torch

    bucket_of = expert_of.flatten().long() + 1
    places = torch.arange(len(bucket_of), device=expert_of.device)
    counts = torch.zeros(buckets, dtype=torch.int64, device=expert_of.device)
    counts.scatter_add_(0, bucket_of, torch.ones_like(bucket_of))
    padded_counts = (counts + block_size - 1) // block_size * block_size
    ends = padded_counts.cumsum(0)
    order = bucket_of.argsort(stable=True)
    # by how much padding of earlier buckets moves each bucket
    shifts = (ends - padded_counts) - (counts.cumsum(0) - counts)
    sorted_places.fill_(len(bucket_of))
    sorted_places[places + shifts[bucket_of[order]]] = order.to(sorted_places.dtype)
    block_starts = block_size * torch.arange(len(expert_of_block), device=expert_of.device)
    bucket_of_block = torch.searchsorted(ends, block_starts, right=True)
    expert_of_block.copy_(bucket_of_block.clamp(max=buckets - 1) - 1)
    padded_places.copy_(ends[-1:])


# of sgl_kernel and its modules
FUNCTIONS = {
    "is_arch_support_pdl": is_arch_support_pdl,
    "weak_ref_tensor": weak_ref_tensor,
    "moe_align_block_size": moe_align_block_size,
    "moe_sum_reduce": moe_sum_reduce,
}
