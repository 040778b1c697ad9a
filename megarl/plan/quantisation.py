"""Checks for runs with fp8 engines: SGLang's blocks must fit the sizes, and settings must not contradict the format."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.config.schema import RunConfig
from megarl.models import ModelSpec

BLOCK = 128  # rows and columns of fp8_block
_KEEP_BLOCKS = {  # arguments of SGLang: (its choice here on Blackwell, what keeps blocks as they are)
    "fp8_gemm_runner_backend": ("auto", ("flashinfer_trtllm", "triton")),
    "moe_runner_backend": ("triton", ("triton",)),
}
_DECIDED = ("json_model_override_args", "load_format")  # arguments that tell SGLang the format


def check_format_arguments(config: RunConfig) -> Iterable[str]:
    quantization = config.generator.quantization
    for name in _DECIDED if quantization else ():
        if name in config.generator.server_args:
            yield f"generator.server_args.{name}: must be left out with generator.quantization={quantization}, which decides it"


def check_ampere(config: RunConfig) -> Iterable[str]:
    if config.cluster.gpu == "A100" and config.generator.quantization is not None:
        yield f"generator.quantization={config.generator.quantization}: must be null with cluster.gpu=A100, which has no fp8"


def check_blackwell_blocks(config: RunConfig) -> Iterable[str]:
    return repacked_blocks(config, "cluster.gpu=B200") if config.cluster.gpu == "B200" else ()


def repacked_blocks(config: RunConfig, where: str) -> Iterable[str]:
    """Refuses DeepGEMM on GPUs of compute capability 10, `where`. After loading, SGLang (0.5.23) there quantises weights once more, by
    scales that are powers of two, and packs these (requant_block_scale_ue8m0_for_deepgemm): direct writes bring neither."""
    for name, (chosen, kept) in _KEEP_BLOCKS.items() if config.generator.quantization == "fp8_block" else ():
        if (backend := config.generator.server_args.get(name, chosen)) not in kept:
            needed = f"generator.server_args.{name} of {' or '.join(kept)}"
            yield f"generator.quantization=fp8_block: with {where} needs {needed}; it is {backend}, which repacks the scales"


def check_evaluated_format(config: RunConfig) -> Iterable[str]:
    """A quantised engine gets its weights from a trainer."""
    if config.generator.quantization is not None:
        quantization = f"generator.quantization={config.generator.quantization}"
        yield f"{quantization}: must be null for megarl eval, which serves the checkpoint as it is"


def check_latent_format(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """SGLang derives the tensors that latent attention computes with from kv_b_proj, and does not expect it to be transposed."""
    quantization = config.generator.quantization
    if spec.kv_lora_rank and quantization not in (None, "fp8_block"):
        yield f"generator.quantization={quantization}: must be null or fp8_block for a {spec.family} model"
