"""Replaces `transformer_engine_torch`, the compiled part of Transformer Engine 2.14.1.

Outputs have the right shapes, but no values.

The Python part is the real one. Its layers, attention, fused rotary embedding, permutations of
experts' tokens (in Triton) and Adam run as on a GPU. A name that is not here raises.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

# make rehearse installs Transformer Engine's Python part here
FOLDER = Path(__file__).resolve().parents[2] / "envs/rehearsal"


class DType(enum.IntEnum):
    (
        kByte,
        kInt16,
        kInt32,
        kInt64,
        kFloat32,
        kFloat16,
        kBFloat16,
        kFloat8E4M3,
        kFloat8E5M2,
        kFloat8E8M0,
        kFloat4E2M1,
    ) = range(11)


TORCH = {
    DType.kFloat32: torch.float32,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat16: torch.float16,
    DType.kByte: torch.uint8,
}


def _enum(name: str, *members: str) -> Any:
    return enum.IntEnum(name, {member: place for place, member in enumerate(members)})


class _Enumeration:
    """An enumeration that numbers its members at their first use."""

    def __init__(self) -> None:
        self._members: dict[str, int] = {}

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._members.setdefault(name, len(self._members))


FP8FwdTensors = _enum(
    "FP8FwdTensors",
    *(f"GEMM{n}_{role}" for n in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")),
)
FP8BwdTensors = _enum(
    "FP8BwdTensors",
    "GRAD_OUTPUT1",
    "GRAD_INPUT1",
    "GRAD_OUTPUT2",
    "GRAD_INPUT2",
    "GRAD_OUTPUT3",
    "GRAD_INPUT3",
)
NVTE_Fused_Attn_Backend = _enum(
    "NVTE_Fused_Attn_Backend",
    "NVTE_No_Backend",
    "NVTE_F16_max512_seqlen",
    "NVTE_F16_arbitrary_seqlen",
    "NVTE_FP8",
)
NVTE_QKV_Layout, NVTE_QKV_Format, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_Softmax_Type = (
    _Enumeration() for _ in range(5)
)
CommOverlapType, CommOverlapAlgo, Float8BlockScaleTensorFormat = (_Enumeration() for _ in range(3))


class CommOverlap: ...


class CommOverlapP2P: ...


class CommOverlapHelper: ...


def get_cublasLt_version() -> int:
    return 130100


def get_cudnn_version() -> int:
    return 92400


def get_num_cublas_streams() -> int:
    return 4


def _on_gpu(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cuda":
            raise RuntimeError(
                f"Transformer Engine is given a tensor {tuple(tensor.shape)} on {tensor.device}"
            )


def generic_gemm(
    A: torch.Tensor, transa: bool, B: torch.Tensor, transb: bool, D: torch.Tensor | None,
    quantizer: Any, out_dtype: DType | None,
    bias: torch.Tensor | None, bias_type: DType, gelu: bool, gelu_in: torch.Tensor | None,
    grad: bool, workspace: torch.Tensor,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0,
    beta: float | None = None,
) -> list[torch.Tensor | None]:  # fmt: skip
    """The product B · A of row-major matrices, in cuBLAS's terms: with layout TN, A [m, k] and B
    [.., k] give [.., m].
    """
    _on_gpu(A, B, D, bias, workspace)
    m, k = (A.shape[0], A.shape[-1]) if transa else (A.shape[-1], A.shape[0])
    rows = (B.flatten(0, -2).shape[1],) if transb else B.shape[:-1]
    inner = B.flatten(0, -2).shape[0] if transb else B.shape[-1]
    if transb:  # NT: A [n, m], B [n, rows]
        k = A.flatten(0, -2).shape[0]
    if inner != k:
        raise RuntimeError(f"a product of {tuple(A.shape)} and {tuple(B.shape)} does not fit")
    shape = (*rows, m)
    if D is None:
        D = torch.empty(
            shape, dtype=TORCH[out_dtype] if out_dtype is not None else A.dtype, device=A.device
        )
    elif D.numel() != torch.Size(shape).numel():
        raise RuntimeError(f"a product of shape {shape} into {tuple(D.shape)}")
    of_bias = torch.empty_like(bias) if grad and bias is not None else None
    return [D, of_bias, None, extra_output]


def te_general_grouped_gemm(
    A: list[torch.Tensor], transa: bool, B: list[torch.Tensor], transb: bool,
    D: list[torch.Tensor] | None, D_type: DType,
    m_splits: list[int], bias: list[torch.Tensor], bias_type: DType, single_output: bool,
    pre_gelu_out: list[torch.Tensor], grad: bool,
    workspace: list[torch.Tensor], workspaceSizes: int, accumulate: bool,
    use_split_accumulator: bool, math_sm_count: int,
) -> list[torch.Tensor] | None:  # fmt: skip
    _on_gpu(*A, *B, *(D or ()), *workspace)
    return bias


def rmsnorm_fwd(
    input: torch.Tensor, weight: torch.Tensor, eps: float, ln_out: torch.Tensor | None,
    quantizer: Any, otype: DType, sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:  # fmt: skip
    _on_gpu(input, weight)
    rows = input.numel() // input.shape[-1]
    out = (
        torch.empty(input.shape, dtype=TORCH[otype], device=input.device)
        if ln_out is None
        else ln_out
    )
    return out, None, torch.empty(rows, dtype=torch.float32, device=input.device)


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Any:
    _on_gpu(dz, x, rsigma, gamma)
    return torch.empty_like(x), torch.empty_like(gamma)


layernorm_fwd = layernorm_bwd = None  # a table looks them up beside the functions of RMSNorm


def fused_rope_forward(
    input: torch.Tensor, freqs: torch.Tensor, start: Any, format: Any, interleaved: bool,
    cu_seqlens: Any, cp_size: int, cp_rank: int
) -> torch.Tensor:  # fmt: skip
    _on_gpu(input, freqs, cu_seqlens)
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


fused_rope_backward = fused_rope_forward


def get_fused_attn_backend(*args: Any) -> Any:
    assert len(args) == 19
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float,
    set_zero: bool, qkv_layout: Any,
    bias_type: Any, attn_mask_type: Any, softmax_type: Any, window_size: Any,
    bottom_right_diagonal: bool, cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, fake_dtype: Any,
    cu_seqlens_q_padded: Any,
    cu_seqlens_kv_padded: Any, *further: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Layout thd.

    Returns the output [t, heads, d of V], the softmax's statistics [t, heads, 1] in fp32, and the
    random state.
    """
    _on_gpu(cu_seqlens_q, cu_seqlens_kv, Q, K, V, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    out = torch.empty(*Q.shape[:-1], V.shape[-1], dtype=Q.dtype, device=Q.device)
    stats = torch.empty(*Q.shape[:-1], 1, dtype=torch.float32, device=Q.device)
    return [out, stats, torch.empty(2, dtype=torch.int64, device=Q.device)]


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool,
    qkv_layout: Any, bias_type: Any,
    attn_mask_type: Any, softmax_type: Any, window_size: Any, bottom_right_diagonal: bool,
    deterministic: bool, cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, O: torch.Tensor,
    dO: torch.Tensor, *further: Any,
) -> list[torch.Tensor | None]:  # fmt: skip
    _on_gpu(cu_seqlens_q, cu_seqlens_kv, Q, K, V, O, dO)
    learnable = softmax_type == NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX
    of_sinks = (
        torch.empty(1, Q.shape[-2], 1, 1, dtype=torch.float32, device=Q.device)
        if learnable
        else None
    )
    return [torch.empty_like(Q), torch.empty_like(K), torch.empty_like(V), None, of_sinks]


def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half: int) -> torch.Tensor:
    """One of the two halves of each sequence: of [t, heads, d], or of [2, t, heads, d]."""
    _on_gpu(tensor, cu_seqlens)
    dim = tensor.dim() - 3
    return torch.empty(
        (*tensor.shape[:dim], tensor.shape[dim] // 2, *tensor.shape[dim + 1 :]),
        dtype=tensor.dtype,
        device=tensor.device,
    )


def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, packed: bool, seqlen: int
) -> torch.Tensor:
    _on_gpu(lse, cu_seqlens)
    return torch.empty((lse.shape[0], seqlen), dtype=lse.dtype, device=lse.device)


def _corrected(*tensors: Any) -> None:
    """Works in place."""
    _on_gpu(*(tensor for tensor in tensors if isinstance(tensor, torch.Tensor)))


thd_second_half_lse_correction = thd_out_correction = thd_grad_correction = _corrected


def multi_tensor_l2norm(
    chunk_size: int, noop: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> Any:
    _on_gpu(noop, *(tensor for tensors in lists for tensor in tensors))
    return torch.empty(1, device=noop.device), torch.empty(
        len(lists[0]) if per_tensor else 0, device=noop.device
    )


def multi_tensor_scale(
    chunk_size: int, noop: torch.Tensor, lists: list[list[torch.Tensor]], scale: float
) -> None:
    _on_gpu(noop, *(tensor for tensors in lists for tensor in tensors))


def multi_tensor_scale_tensor(
    chunk_size: int, noop: torch.Tensor, lists: list[list[torch.Tensor]], scale: torch.Tensor
) -> None:
    _on_gpu(noop, scale, *(tensor for tensors in lists for tensor in tensors))


def multi_tensor_adam(
    chunk_size: int, noop: torch.Tensor, lists: list[list[torch.Tensor]], lr: float, beta1: float,
    beta2: float, epsilon: float, step: int,
    mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    _on_gpu(noop, *(tensor for tensors in lists for tensor in tensors))


def swap_first_dims(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    _on_gpu(tensor, out)
    return tensor.transpose(0, 1).contiguous() if out is None else out


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in in {__file__}")

    return refuse


def install() -> None:
    """Imports the real Transformer Engine over this module.

    Raises FileNotFoundError if it is not installed.
    """
    package = FOLDER / "transformer_engine"
    if not package.is_dir():
        raise FileNotFoundError(f"no Transformer Engine in {FOLDER}: make rehearse installs it")
    sys.path.append(str(FOLDER))
    module = sys.modules["transformer_engine_torch"] = sys.modules[__name__]
    module.__getattr__ = _missing  # type: ignore[method-assign]
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # then it does not look for its libraries
    spec = importlib.util.spec_from_file_location(
        "transformer_engine", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    parent = sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
    parent.__path__ = [str(package)]
    parent.__spec__ = spec
    parent.__file__ = str(package / "__init__.py")
    parent.__version__ = importlib.import_module("importlib.metadata").version("transformer_engine")  # type: ignore[attr-defined]
    onnx = sys.modules["transformer_engine.pytorch.onnx_extensions"] = types.ModuleType(
        "transformer_engine.pytorch.onnx_extensions"
    )
    onnx.__getattr__ = _missing  # type: ignore[method-assign]  # it needs packages for exports alone
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    parent.common = common
    parent.pytorch = importlib.import_module("transformer_engine.pytorch")  # type: ignore[attr-defined]
    utils = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.utils"
    )
    backend_of = utils.get_attention_backend  # type: ignore[attr-defined]
    # It takes tensors of exactly this type.
    utils.get_attention_backend = lambda parameters: backend_of(
        dataclasses.replace(parameters, qkv_type=torch.Tensor)
    )  # type: ignore[attr-defined]
