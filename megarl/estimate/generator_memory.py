"""Bytes of memory on an engine's rank, as SGLang divides it: weights and KV cache within mem_fraction, all else beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.config.schema import GeneratorConfig
from megarl.estimate.hardware import GIB, Gpu
from megarl.estimate.sizes import generator_weights
from megarl.estimate.workload import Workload
from megarl.models import ModelSpec
from megarl.reshard.kinds import ITEM_BYTES

CHUNKED_PREFILL_TOKENS = ((60, 4096), (160, 8192), (math.inf, 16384))  # SGLang's default below so many GiB: memory_hook.py
CUDA_GRAPH_BYTES = 2 << 20  # per unit of batch size: sglang/srt/arg_groups/memory_hook.py
PAGE_SLACK = 1.02  # on average, a sequence's last page is half empty


@dataclass(frozen=True)
class GeneratorMemory:
    """Bytes on one rank. `kv_cache` holds max_concurrency requests at full length."""

    weights: float
    kv_cache: float
    landing: float  # where weights from other nodes arrive before they are scattered
    graphs: float
    activations: float  # a prefill chunk's, the logits of a full batch, and the table of where requests' tokens are in the cache
    runtime: float

    @property
    def static(self) -> float:
        """What must fit within SGLang's mem_fraction."""
        return self.weights + self.kv_cache

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def generator_memory(
    spec: ModelSpec, generator: GeneratorConfig, dtype: str, workload: Workload, gpu: Gpu, landing: float = 0.0, pool: float = 0.0
) -> GeneratorMemory:
    """`landing`: sizes.landing_bytes if `may_land`; `pool`: bytes of adapters. Raises ConfigError if the sizes do not divide the model."""
    item, tp = ITEM_BYTES[dtype], generator.tp
    kv_tokens = generator.kv_cache_tokens or generator.max_concurrency * workload.longest * PAGE_SLACK
    ffn = max(spec.intermediate_size / tp, spec.experts_per_token * spec.expert_intermediate_size * generator.ep / tp)
    table = 4 * (generator.max_concurrency + 1) * spec.max_position_embeddings  # int32, as long as the context that engines are given
    logits = 2 * 4 * generator.max_concurrency * spec.vocab_size  # fp32, gathered over tp, and a copy to sample from
    return GeneratorMemory(
        weights=generator_weights(spec, generator, dtype).total + pool,
        kv_cache=kv_tokens * kv_bytes_per_token(spec, generator, item),
        landing=landing,
        graphs=0.0 if gpu.name == "cpu" else CUDA_GRAPH_BYTES * generator.max_concurrency,
        activations=prefill_tokens(spec, generator, gpu) * item * (4 * spec.hidden_size + 3 * ffn) + logits + table,
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


def cache_tokens(spec: ModelSpec, generator: GeneratorConfig, dtype: str, gpu: Gpu) -> float:
    """Tokens that an engine's KV cache holds: as many as are asked for, else what is left beside the weights (negative: not even these)."""
    if generator.kv_cache_tokens is not None:
        return generator.kv_cache_tokens
    left = usable_static(generator, gpu) - generator_weights(spec, generator, dtype).total
    return left / kv_bytes_per_token(spec, generator, ITEM_BYTES[dtype])


def prefill_tokens(spec: ModelSpec, generator: GeneratorConfig, gpu: Gpu) -> int:
    """The most tokens that an engine prefills at once: a chunk of a longer prompt, or several shorter ones."""
    default = next(tokens for below_gib, tokens in CHUNKED_PREFILL_TOKENS if gpu.memory_gib < below_gib)
    chunk = generator.server_args.get("chunked_prefill_size") or default
    return spec.max_position_embeddings if chunk < 0 else min(chunk, spec.max_position_embeddings)  # -1: prompts are not cut


def usable_static(generator: GeneratorConfig, gpu: Gpu) -> float:
    """Bytes that weights and KV cache may take together: mem_fraction of what is free before the weights are loaded."""
    return generator.mem_fraction * (gpu.memory_gib - gpu.runtime_gib) * GIB
