"""Seconds in which the engines generate a step's responses: prefill, decoding at full concurrency, and the tail of stragglers.

An engine keeps `max_concurrency` requests running while others wait; then they drain as their lengths decide. Lengths are exponential
with a cut, so the remaining lengths of running requests are distributed like fresh ones, and the drain needs no simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.config.schema import GeneratorConfig
from megarl.estimate.communication import Group
from megarl.estimate.constants import CONSTANTS, Constants
from megarl.estimate.generator_memory import kv_bytes_per_token, usable_static
from megarl.estimate.hardware import Cluster
from megarl.estimate.sizes import GeneratorWeights, generator_weights
from megarl.estimate.workload import Workload
from megarl.models import ModelSpec
from megarl.models.flops import active_elements, attention_flops
from megarl.reshard.kinds import ITEM_BYTES

TAIL_POINTS = 16


@dataclass(frozen=True)
class GenerateTime:
    """Seconds of the slowest engine."""

    prefill: float
    full: float  # decoding while requests wait
    tail: float  # decoding the last requests
    concurrency: float  # what is reached: max_concurrency, or what the KV cache or the requests allow
    token_s: float  # a decoding step at that concurrency
    memory_share: float  # share of that step for reading weights and KV cache; the rest is products, collectives and overheads

    @property
    def total(self) -> float:
        return self.prefill + self.full + self.tail


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of one decoding step of an engine."""

    memory: float
    compute: float
    collectives: float
    overhead: float

    @property
    def total(self) -> float:
        return max(self.memory, self.compute) + self.collectives + self.overhead


@dataclass(frozen=True)
class GenerateModel:
    """Engines on one cluster."""

    spec: ModelSpec
    generator: GeneratorConfig
    dtype: str
    cluster: Cluster
    constants: Constants = CONSTANTS

    @cached_property
    def weights(self) -> GeneratorWeights:
        return generator_weights(self.spec, self.generator, self.dtype)

    @cached_property
    def active(self) -> float:
        return sum(active_elements(self.spec)) + self.spec.vocab_size * self.spec.hidden_size

    def seconds(self, workload: Workload, *, carried_over: bool = False) -> GenerateTime:
        """`carried_over`: unfinished responses go on in the next step (partial rollouts), so engines stay full without a tail."""
        requests = workload.sequences / self.generator.engines
        wanted = self.generator.max_concurrency if carried_over else min(self.generator.max_concurrency, requests)
        running = max(1.0, min(wanted, self.room(workload)))
        context = workload.prompt_tokens + workload.response_tokens / 2
        step = self.decode_step(running, context)
        full_steps = (requests if carried_over else max(0.0, requests - running)) * workload.response_tokens / running
        return GenerateTime(
            prefill=self._prefill_s(workload, requests),
            full=full_steps * step.total,
            tail=0.0 if carried_over else self._tail_s(workload, running, context),
            concurrency=running,
            token_s=step.total,
            memory_share=step.memory / step.total,
        )

    def room(self, workload: Workload) -> float:
        """Requests of mean length that the KV cache holds at once."""
        per_token = kv_bytes_per_token(self.spec, self.generator, ITEM_BYTES[self.dtype])
        free = usable_static(self.generator, self.cluster.gpu) - self.weights.total
        tokens = self.generator.kv_cache_tokens or free / per_token
        return tokens / (workload.prompt_tokens + workload.response_tokens)

    def decode_step(self, running: float, context: float) -> DecodeStep:
        """Decodes one token for each of `running` requests with `context` tokens."""
        spec, k, tp = self.spec, self.constants, self.generator.tp
        read = self.weights.streamed + running * context * kv_bytes_per_token(spec, self.generator, ITEM_BYTES[self.dtype])
        if spec.num_experts:
            read += self.weights.expert * (1 - (1 - spec.experts_per_token / spec.num_experts) ** running)
        flops = running * (2 * self.active + 2 * spec.num_layers * attention_flops(spec, context)) / tp
        summed = Group(tp, 1, self.cluster, k).small_all_reduce_s(running * spec.hidden_size * ITEM_BYTES[self.dtype])
        return DecodeStep(
            memory=read / (self.cluster.gpu.hbm_bytes_per_s * k.hbm_efficiency),
            compute=flops / self._rate,
            collectives=2 * spec.num_layers * summed,
            overhead=k.decode_step_s + k.decode_layer_s * spec.num_layers,
        )

    @property
    def _rate(self) -> float:
        precision = "fp8" if self.generator.quantization else "bf16"
        return self.cluster.gpu.flops(precision) * self.constants.decode_gemm_efficiency

    def _prefill_s(self, workload: Workload, requests: float) -> float:
        """Responses to one prompt share its prefill if they are on the same engine."""
        prompts = min(requests, max(1.0, workload.prompts / self.generator.engines))
        per_token = 2 * self.active + self.spec.num_layers * attention_flops(self.spec, workload.prompt_tokens)
        return prompts * workload.prompt_tokens * per_token / self.generator.tp / self._rate

    def _tail_s(self, workload: Workload, running: float, context: float) -> float:
        """Integrates over the time to the step's longest response, by midpoints; at least one request runs until then."""
        span = workload.straggler / TAIL_POINTS
        points = ((i + 0.5) * span for i in range(TAIL_POINTS))
        return span * sum(self.decode_step(max(1.0, running * workload.survivors(point)), context).total for point in points)
