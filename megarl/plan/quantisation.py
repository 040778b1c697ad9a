"""Checks for runs with fp8 engines: SGLang's blocks must fit the sizes, and settings must not contradict the format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig
from megarl.models import ModelSpec
from megarl.models.parameters import EXPERT_FIELD, LAYER_FIELD, Parameter
from megarl.models.registry import family
from megarl.topology import GeneratorTopology

BLOCK = 128  # rows and columns of fp8_block
_KEEP_BLOCKS = ("flashinfer_trtllm", "triton")  # those of Blackwell's backends that keep blocks as they are
_DECIDED = ("json_model_override_args", "load_format")  # arguments that tell SGLang the format


def check_format_arguments(config: RunConfig) -> Iterable[str]:
    quantization = config.generator.quantization
    for name in _DECIDED if quantization else ():
        if name in config.generator.server_args:
            yield f"generator.server_args.{name}: must be left out with generator.quantization={quantization}, which decides it"


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


def check_blocks(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    """Fused or cut tensors must consist of whole blocks, as in SGLang's Fp8LinearMethod.validate_block_quant_shapes and Fp8MoEMethod."""
    generator = config.generator
    if generator.quantization != "fp8_block":  # for other formats the layout itself reports it
        return
    try:
        topology = GeneratorTopology(generator.engines, generator.tp, generator.ep, generator.dp_attention)
        parameters = family(spec).sglang_parameters(spec, topology, "cuda")
    except (ConfigError, ArithmeticError):
        return  # sizes that do not divide: other checks report them
    quantised = family(spec).quantised_parameters(spec)
    if fused := [text for parameter in parameters if parameter.name in quantised for text in _unevenly_fused(spec, parameter)]:
        must = f"at any generator.tp SGLang fuses rows that must be multiples of {BLOCK}, and are {', '.join(fused)}"
        yield f"generator.quantization=fp8_block: must be null for this model: {must}"
    found = [uneven for parameter in parameters if parameter.name in quantised for uneven in _uneven(spec, parameter, topology)]
    if found:
        sizes = f"generator.tp={generator.tp}" + (f", generator.ep={generator.ep}" if spec.num_experts else "")
        sizes += f", generator.dp_attention={generator.dp_attention}" if generator.dp_attention > 1 else ""
        yield f"generator.quantization=fp8_block: with {sizes} a rank must hold multiples of {BLOCK}; it holds {', '.join(found)}"


def _unevenly_fused(spec: ModelSpec, parameter: Parameter) -> Iterator[str]:
    """Finds parts whose last block would overlap the next part, in a tensor that every rank holds whole."""
    logical = {tensor.name: tensor.shape for tensor in family(spec).logical_tensors(spec)}
    for part in parameter.parts[:-1] if parameter.dim is None else ():
        if (rows := logical[part.logical_name][0]) % BLOCK:
            yield f"{rows} of {part.logical_name.replace(LAYER_FIELD, '*')}"


def _uneven(spec: ModelSpec, parameter: Parameter, topology: GeneratorTopology) -> Iterator[str]:
    if parameter.dim is None:  # whole on every rank: SGLang rounds up
        return
    dense = topology.attention_tp if parameter.of_attention else topology.tp
    shards = topology.tp // topology.ep if parameter.of_expert else dense
    logical = {tensor.name: tensor.shape for tensor in family(spec).logical_tensors(spec)}
    for part in parameter.parts:
        shape = list(logical[part.logical_name])
        shape[parameter.dim] = shape[parameter.dim] * part.replicas // shards
        fused = len(parameter.parts) > 1 or parameter.of_expert
        if (fused or shards > 1) and shape[parameter.dim] % BLOCK:
            name = part.logical_name.replace(LAYER_FIELD, "*").replace(EXPERT_FIELD, "*")
            yield f"{shape[parameter.dim]} {'columns' if parameter.dim else 'rows'} of {name}"
