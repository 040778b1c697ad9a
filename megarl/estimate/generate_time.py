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
from megarl.estimate.generator_memory import cache_tokens, kv_bytes_per_token
from megarl.estimate.hardware import Cluster
from megarl.estimate.sizes import GeneratorWeights, generator_weights
from megarl.estimate.workload import Workload
from megarl.models import ModelSpec
from megarl.models.flops import active_elements, attention_flops
from megarl.reshard.kinds import ITEM_BYTES

TAIL_POINTS = 16
# Reads and writes of fp32 logits per decoding step in SGLang's logits processor and sampler (srt/layers): to fp32 1.5, temperature 2,
# softmax 3 and its copy 2, a draw (exponentials, a quotient, the largest) 5, logarithms for log-probs 2.
LOGIT_PASSES = 15.5


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
    sampling: float  # passes over the logits
    launches: float  # small kernels of all layers
    host: float  # the engine's scheduler
    overlapped: bool  # whether the scheduler works on one step while the GPU computes the next

    @property
    def total(self) -> float:
        gpu = max(self.memory, self.compute) + self.collectives + self.sampling + self.launches
        return max(gpu, self.host) if self.overlapped else gpu + self.host


@dataclass(frozen=True)
class GenerateModel:
    """Engines on one cluster."""

    spec: ModelSpec
    generator: GeneratorConfig
    dtype: str
    cluster: Cluster
    constants: Constants = CONSTANTS
    overlapped: bool | None = None  # None: as SGLang does, by its overlap schedule on GPUs, unless generator.server_args turn it off

    @cached_property
    def weights(self) -> GeneratorWeights:
        return generator_weights(self.spec, self.generator, self.dtype)

    @cached_property
    def active(self) -> float:
        return sum(active_elements(self.spec)) + self.spec.vocab_size * self.spec.hidden_size

    def seconds(self, workload: Workload, *, carried_over: bool = False, prefilled_again: bool = False) -> GenerateTime:
        """`carried_over`: unfinished responses go on in the next step (partial rollouts), so engines stay full without a tail.
        `prefilled_again`: after each update keys and values of all running requests are computed anew."""
        requests = workload.sequences / self.generator.engines
        wanted = self.generator.max_concurrency if carried_over else min(self.generator.max_concurrency, requests)
        running = max(1.0, min(wanted, self.room(workload)))
        context = workload.prompt_tokens + workload.decoded
        step = self.decode_step(running, context)
        # Twice the mean: lengths so far are exponential like whole ones, so E[c^2] / E[c] = 2 E[c] (4/3 of it where all end equally long).
        again = self._prefilled_s(running * context, 2 * context) if prefilled_again else 0.0
        full_steps = (requests if carried_over else max(0.0, requests - running)) * workload.response_tokens / running
        return GenerateTime(
            prefill=self._prefill_s(workload, requests) + again,
            full=full_steps * step.total,
            tail=0.0 if carried_over else self._tail_s(workload, running, together=requests <= running),
            concurrency=running,
            token_s=step.total,
            memory_share=step.memory / step.total,
        )

    def room(self, workload: Workload) -> float:
        """Requests of mean length that the KV cache holds at once."""
        return cache_tokens(self.spec, self.generator, self.dtype, self.cluster.gpu) / workload.tokens_per_sequence

    def decode_step(self, running: float, context: float) -> DecodeStep:
        """Decodes one token for each of `running` requests with `context` tokens."""
        spec, k, tp = self.spec, self.constants, self.generator.tp
        read = self.weights.streamed + running * context * kv_bytes_per_token(spec, self.generator, ITEM_BYTES[self.dtype])
        if spec.num_experts:
            read += self.weights.expert * (1 - (1 - spec.experts_per_token / spec.num_experts) ** running)
        flops = running * (2 * self.active + 2 * spec.num_layers * attention_flops(spec, context)) / tp
        group, item = Group(tp, 1, self.cluster, k), ITEM_BYTES[self.dtype]
        summed = group.small_all_reduce_s(running * spec.hidden_size * item)
        hbm, logits = self.cluster.gpu.hbm_bytes_per_s * k.hbm_efficiency, running * spec.vocab_size
        overlapped = self.overlapped
        if overlapped is None:
            overlapped = self.cluster.gpu.name != "cpu" and not self.generator.server_args.get("disable_overlap_schedule", False)
        return DecodeStep(
            memory=read / hbm,
            compute=flops / self._rate,
            collectives=2 * spec.num_layers * summed + group.gather_s(item * logits),
            sampling=LOGIT_PASSES * 4 * logits / hbm,
            launches=k.decode_layer_s * spec.num_layers,
            host=k.decode_step_s + k.decode_request_s * running,
            overlapped=overlapped,
        )

    @property
    def _rate(self) -> float:
        precision = "fp8" if self.generator.quantization else "bf16"
        return self.cluster.gpu.flops(precision) * self.constants.decode_gemm_efficiency

    def _prefill_s(self, workload: Workload, requests: float) -> float:
        """Responses to one prompt share its prefill if they are on the same engine."""
        prompts = min(requests, max(1.0, workload.prompts / self.generator.engines))
        return self._prefilled_s(prompts * workload.prompt_tokens, workload.prompt_tokens)

    def _prefilled_s(self, tokens: float, length: float) -> float:
        """Of so many tokens in sequences of `length`. Chunks are large enough that products bind, not memory."""
        return tokens * (2 * self.active + self.spec.num_layers * attention_flops(self.spec, length)) / self.generator.tp / self._rate

    def _tail_s(self, workload: Workload, running: float, *, together: bool) -> float:
        """Integrates over the time to the step's longest response, by midpoints; at least one request runs until then.

        `together`: all requests began at once, so their responses are as long as the time; else as long as the mean when it began.
        """
        span, found = workload.straggler / TAIL_POINTS, 0.0
        for point in ((i + 0.5) * span for i in range(TAIL_POINTS)):
            context = workload.prompt_tokens + (point if together else max(point, workload.decoded))
            found += span * self.decode_step(max(1.0, running * workload.survivors(point)), context).total
        return found
