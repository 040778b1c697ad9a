"""Bytes of memory on an engine's rank, as SGLang divides it: weights and KV cache within mem_fraction, all else beside it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import GeneratorConfig
from megarl.estimate.hardware import GIB, Gpu
from megarl.estimate.sizes import generator_weights
from megarl.estimate.workload import Workload
from megarl.models import ModelSpec
from megarl.reshard.kinds import ITEM_BYTES

CHUNKED_PREFILL_TOKENS = 8192  # SGLang's default on GPUs of 60 to 160 GB
CUDA_GRAPH_BYTES = 2 << 20  # per unit of batch size: sglang/srt/arg_groups/memory_hook.py
PAGE_SLACK = 1.02  # on average, a sequence's last page is half empty


@dataclass(frozen=True)
class GeneratorMemory:
    """Bytes on one rank. `kv_cache` holds max_concurrency requests at full length."""

    weights: float
    kv_cache: float
    landing: float  # where weights from other nodes arrive before they are scattered
    graphs: float
    activations: float  # a prefill chunk's, and the logits of a full batch
    runtime: float

    @property
    def static(self) -> float:
        """What must fit within SGLang's mem_fraction."""
        return self.weights + self.kv_cache

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def generator_memory(
    spec: ModelSpec, generator: GeneratorConfig, dtype: str, workload: Workload, gpu: Gpu, landing: float = 0.0
) -> GeneratorMemory:
    """`landing`: sizes.landing_bytes if `may_land`. Raises ConfigError if the sizes do not divide the model."""
    item, tp = ITEM_BYTES[dtype], generator.tp
    kv_tokens = generator.kv_cache_tokens or generator.max_concurrency * workload.longest * PAGE_SLACK
    ffn = max(spec.intermediate_size / tp, spec.experts_per_token * spec.expert_intermediate_size * generator.ep / tp)
    chunk = min(CHUNKED_PREFILL_TOKENS, spec.max_position_embeddings)
    logits = 2 * 4 * generator.max_concurrency * spec.vocab_size  # fp32, gathered over tp, and a copy to sample from
    return GeneratorMemory(
        weights=generator_weights(spec, generator, dtype).total,
        kv_cache=kv_tokens * kv_bytes_per_token(spec, generator, item),
        landing=landing,
        graphs=0.0 if gpu.name == "cpu" else CUDA_GRAPH_BYTES * generator.max_concurrency,
        activations=chunk * item * (4 * spec.hidden_size + 3 * ffn) + logits,
        runtime=gpu.runtime_gib * GIB,
    )


def kv_bytes_per_token(spec: ModelSpec, generator: GeneratorConfig, item: int) -> float:
    """KV bytes of all layers on one rank, per token of an engine's request: a mean, as an attention replica keeps only its own requests.

    Ranks beyond the number of key-value heads hold copies; latent attention keeps its latent on every rank of a replica.
    """
    replicas = generator.dp_attention
    if spec.kv_lora_rank:
        return item * spec.num_layers * (spec.kv_lora_rank + spec.qk_rope_head_dim) / replicas
    heads = max(1.0, spec.num_kv_heads / (generator.tp / replicas))
    return item * spec.num_layers * 2 * heads * spec.head_dim / replicas


def usable_static(generator: GeneratorConfig, gpu: Gpu) -> float:
    """Bytes that weights and KV cache may take together: mem_fraction of what is free before the weights are loaded."""
    return generator.mem_fraction * (gpu.memory_gib - gpu.runtime_gib) * GIB
