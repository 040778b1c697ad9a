"""Checks for runs with fp8 engines: SGLang's blocks must fit the sizes, and settings must not contradict the format."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.config.schema import RunConfig
from megarl.models import ModelSpec

BLOCK = 128  # rows and columns of fp8_block
_KEEP_BLOCKS = ("flashinfer_trtllm", "triton")  # those of Blackwell's backends that keep blocks as they are
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
    """Refuses DeepGEMM, SGLang's choice on Blackwell: with it scales of blocks are rounded to powers of two and packed after loading."""
    backend = config.generator.server_args.get("fp8_gemm_runner_backend", "auto")
    if config.cluster.gpu == "B200" and config.generator.quantization == "fp8_block" and backend not in _KEEP_BLOCKS:
        needed = f"generator.server_args.fp8_gemm_runner_backend of {' or '.join(_KEEP_BLOCKS)}"
        yield f"generator.quantization=fp8_block: with cluster.gpu=B200 needs {needed}; it is {backend}, which repacks the scales"


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
