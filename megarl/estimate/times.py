"""Seconds of a step's parts: collectives, training, generation and the weight update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megarl.config.schema import TRAIN, GeneratorConfig, RunConfig, TrainerConfig
from megarl.estimate.hardware import CONSTANTS, Cluster, Constants, constants_of
from megarl.estimate.memory import (
    AdapterElements,
    GeneratorWeights,
    WeightElements,
    Workload,
    generator_weights,
    kv_bytes_read,
    kv_tokens,
    largest_stage,
    shared_elements,
    stage_layers,
    state_bytes,
    trained_elements,
    trainer_elements,
)
from megarl.models import ModelSpec
from megarl.models.registry import active_elements, attention_flops, flops_per_token
from megarl.models.spec import SCALAR
from megarl.plan.topologies import engines_layout, gpus_of_run, trainer_topology
from megarl.reshard.forwarding import delta_bytes, planned_relays, update_s, writes_s
from megarl.reshard.layout import ITEM_BYTES, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.speculative.settings import NEXTN


@dataclass(frozen=True)
class CollectiveGroup:
    """`size` ranks, which are `stride` apart in the order in which ranks fill the nodes. Seconds
    of its collectives depend on the distribution over nodes.
    """

    size: int
    stride: int
    cluster: Cluster
    constants: Constants

    @property
    def per_node(self) -> int:
        """Members on one node, or on one rack that NVLink connects."""
        return min(self.size, max(1, self.cluster.nvlinked // self.stride))

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.per_node)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of a member in a ring.

        Rings across nodes use the NICs of all members on a node.
        """
        gpu = self.cluster.gpu
        wire = gpu.nvlink_bytes_per_s
        if self.nodes > 1:
            wire = min(wire, gpu.nic_bytes_per_s * self.per_node)
        return wire * self.constants.link_efficiency

    @property
    def latency_s(self) -> float:
        return self.constants.latency_s + self.constants.node_latency_s * math.log2(self.nodes)

    def gather_s(self, size_bytes: float) -> float:
        """An all-gather after which every member has `size_bytes`, or a reduce-scatter of this
        size.
        """
        if self.size == 1:
            return 0.0
        return self.latency_s + size_bytes * (self.size - 1) / self.size / self.bytes_per_s

    def all_reduce_s(self, size_bytes: float) -> float:
        """A reduce-scatter, then an all-gather."""
        return 2 * self.gather_s(size_bytes)

    def small_all_reduce_s(self, size_bytes: float) -> float:
        """A one-shot all-reduce of what a decoding step sums: at most about a megabyte, too small
        to be spread over all NICs of a node.
        """
        if self.size == 1:
            return 0.0
        gpu = self.cluster.gpu
        wire = gpu.nvlink_bytes_per_s if self.nodes == 1 else gpu.nic_bytes_per_s
        return (
            self.latency_s
            + 2 * size_bytes * (self.size - 1) / self.size / wire / self.constants.link_efficiency
        )

    def all_to_all_s(self, size_bytes: float, copies: int = 1) -> float:
        """Every member sends `size_bytes`, evenly to all members.

        Data for other nodes is sent over the sender's own NIC.

        `copies`: the number of members that get the same bytes. If it is above 1, a node or a
        member gets them only once.
        """
        if self.size == 1:
            return 0.0
        outside = _distinct(self.nodes, copies) / copies * (self.nodes - 1) / self.nodes
        inside = _distinct(self.size, copies) / copies * (self.per_node - 1) / self.size
        gpu = self.cluster.gpu
        wire_s = outside / gpu.nic_bytes_per_s + inside / gpu.nvlink_bytes_per_s
        return self.latency_s + size_bytes * wire_s / self.constants.link_efficiency


def _distinct(places: int, draws: int) -> float:
    """The mean number of `places` that `draws` random draws hit."""
    return places * (1 - (1 - 1 / places) ** draws)


# Relative to attention's forward FLOPs: five products instead of two, since scores are computed
# again (FlashAttention-2, arXiv 2307.08691, section 4.1).
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class TrainTime:
    """Seconds of a batch on the busiest rank."""

    compute: float
    tensor_parallel: float  # also context parallel
    expert_parallel: float
    pipeline: float  # the bubble, and traffic between stages
    data_parallel: float  # gradients and, if sharded, weights
    optimizer: float  # also the costs of an optimizer step that do not depend on its tokens
    # per GPU over all optimizer steps, counting the model's products without recomputation
    tflops: float

    @property
    def total(self) -> float:
        return (
            self.compute
            + self.tensor_parallel
            + self.expert_parallel
            + self.pipeline
            + self.data_parallel
            + self.optimizer
        )


@dataclass(frozen=True)
class TrainModel:
    """One trainer on one cluster: the model's matrix products, and the ranks' traffic."""

    spec: ModelSpec
    trainer: TrainerConfig
    dtype: str
    cluster: Cluster
    constants: Constants = CONSTANTS
    # frozen weights need no product for gradients; the work of what is trained beside them is
    # neglected
    adapters: AdapterElements | None = None

    def seconds(self, workload: Workload, *, extra_forwards: int = 0) -> TrainTime:
        """Seconds of a batch in all its optimizer steps.

        `extra_forwards`: number of passes over it that only score. Sequences are packed up to the
        token limit.
        """
        t = self.trainer
        k = self.constants
        steps = t.minibatches * t.epochs
        workload = replace(workload, sequences=workload.sequences // t.minibatches)
        scoring = extra_forwards / t.epochs  # a batch is scored once
        rows = self._rows(workload)
        squares = workload.tokens_per_square
        count = math.ceil(workload.tokens / t.dp / rows)
        count = math.ceil(count / t.pp) * t.pp if t.vpp > 1 else count
        # of each weight: one for the gradient of its input, and if it is trained one for its own
        backward_products = 1 if self.adapters else 2
        backward = backward_products + t.recompute
        passes = 1 + backward + scoring
        layers = largest_stage(self.spec, t)
        products = self._layer_s(rows)
        attention = self._attention_s(rows, squares)
        attention_passes = 1 + t.recompute + ATTENTION_BACKWARD
        per_layer = passes * products + (attention_passes + scoring) * attention
        # for positions of the loss
        head = workload.response_tokens / workload.tokens_per_sequence * self._head_s(rows)
        last_stage_layers = sum(stage_layers(self.spec, t)[-1])
        # The layer for multi-token prediction: a forward and a backward pass, and three products
        # with the output layer, which it does not train.
        predicting = (
            (3 * products + (1 + ATTENTION_BACKWARD) * attention + 3 * head)
            * self.spec.mtp_layers
            * (t.mtp == TRAIN)
        )
        compute = max(
            layers * per_layer,
            last_stage_layers * per_layer + (2 + backward_products + scoring) * head + predicting,
        )
        repeated_forwards = t.recompute + scoring
        # its backward pass also gathers each product's input again, for the weight gradients
        sums = 2 + repeated_forwards + t.sequence_parallel / 2
        tensor = layers * (
            sums * self._tensor_s(rows) + (3 + repeated_forwards) * self._context_s(rows, attention)
        )
        expert = layers * (2 + repeated_forwards) * self._expert_s(rows)
        between = (2 + scoring) * self._between_s(rows)
        last_backward_s = layers * (backward * products + (attention_passes - 1) * attention)
        waiting = 0.0
        if t.zero == 3:
            forward_s = layers * (products + attention)
            waiting = self._gathers_s(1 + scoring, forward_s, last_backward_s)
        bubble = (t.pp - 1) / t.vpp * (compute + tensor + expert + between + waiting) / count
        trained = trained_elements(self.spec, t, self.dtype)
        if self.adapters:
            trained = self.adapters.trained
        fullest_stage = max(trained, key=lambda stage: stage.total)
        optimizer_elements = fullest_stage.total
        if t.zero:
            optimizer_elements = shared_elements(fullest_stage, t)
        # Adam's reads and writes, bytes
        update_s = 30 * optimizer_elements / self._hbm
        if t.optimizer.offload:
            update_s = self._host_update_s(optimizer_elements)
        longest = self._longest_share(workload)
        total = TrainTime(
            compute=steps * count * compute * longest,
            tensor_parallel=steps * count * tensor,
            expert_parallel=steps * count * expert,
            pipeline=steps * count * (between + bubble),
            data_parallel=steps * (count * waiting + self._data_s(fullest_stage, last_backward_s)),
            optimizer=steps * (update_s + k.step_s),
            tflops=0.0,
        )
        flops = (
            (1 + backward_products)
            * steps
            * workload.tokens
            * flops_per_token(self.spec, squares)
            / (t.tp * t.cp * t.pp * t.dp)
        )
        return TrainTime(**(vars(total) | {"tflops": flops / total.total / 1e12}))

    def _host_update_s(self, parameters: float) -> float:
        """A step of the optimizer on the host: gradients go there, AdamW reads 16 and writes 12
        bytes, and bf16 weights come back.
        """
        t = self.trainer
        k = self.constants
        ranks = min(self.cluster.gpus_per_node, t.tp * t.cp * t.pp * t.dp)
        links_s = 4 / k.host_link_bytes_per_s + 2 / k.pageable_bytes_per_s
        return parameters * (links_s + 28 * ranks / k.host_adam_bytes_per_s)

    def scoring_s(self, workload: Workload) -> float:
        """Seconds of a pass over a batch that only scores."""
        return self.seconds(workload, extra_forwards=1).total - self.seconds(workload).total

    @property
    def _hbm(self) -> float:
        return self.cluster.gpu.hbm_bytes_per_s * self.constants.hbm_efficiency

    def _rows(self, workload: Workload) -> float:
        """Tokens of a microbatch: whole sequences up to the limit, but not more than a rank's
        share.
        """
        length = workload.tokens_per_sequence
        full_rows = max(1, math.floor(self.trainer.max_tokens_per_microbatch / length)) * length
        return min(full_rows, max(length, workload.tokens / self.trainer.dp))

    def _longest_share(self, workload: Workload) -> float:
        """The work of the rank that has the step's longest sequence, relative to the mean rank's: 1
        unless this sequence alone is more. The trainer gives each rank an equal share of tokens and
        attention (microbatch.plan_microbatches), but does not split sequences over dp.
        """
        flops = flops_per_token(self.spec, 0)
        squares = (flops_per_token(self.spec, 1) - flops) / flops
        longest = workload.prompt_tokens + workload.straggler
        mean = workload.tokens_per_sequence
        share = (
            workload.sequences / self.trainer.dp * mean * (1 + squares * workload.tokens_per_square)
        )
        return max(1.0, longest * (1 + squares * longest) / share)

    def _rate(self, rows: float, columns: float, fp8: bool = False) -> float:
        """FLOP/s of a product with these numbers of rows and columns.

        `fp8`: whether trainer.megatron.fp8 applies to it, as to all products of layers except
        attention's.
        """
        k = self.constants
        gpu = self.cluster.gpu
        peak = gpu.bf16_flops
        if fp8 and self.trainer.megatron.get("fp8"):
            peak = max(peak, k.fp8_gemm_gain * gpu.fp8_flops)
        return peak * k.gemm_efficiency / (1 + k.half_rows / rows + k.half_width / columns)

    def _head_s(self, rows: float) -> float:
        """One product of hidden states and output layer.

        Training needs four, because the backward pass computes logits again.
        """
        t = self.trainer
        spec = self.spec
        chunk = min(rows / t.cp, t.logprob_chunk_tokens)
        if spec.head == SCALAR:  # one number per token
            return 0.0
        return (
            2
            * rows
            * spec.vocab_size
            * spec.hidden_size
            / t.tp
            / t.cp
            / self._rate(chunk, spec.vocab_size / t.tp)
        )

    def _attention_s(self, rows: float, length: float) -> float:
        """Scores and weighted values of one forward pass of one layer, for sequences of `length`
        tokens.
        """
        spec = self.spec
        t = self.trainer
        return (
            rows
            * attention_flops(spec, length)
            / (t.tp * t.cp)
            / self._rate(rows / t.cp, spec.head_dim * 4)
        )

    @property
    def _experts_share(self) -> float:
        """The share of layers with experts."""
        return 1 - self.spec.dense_layers / self.spec.num_layers

    def _layer_s(self, rows: float) -> float:
        """One forward pass of one layer without `_attention_s`, as a mean over dense and expert
        layers.
        """
        spec = self.spec
        t = self.trainer
        dense, expert = active_elements(spec)
        share = t.tp * t.cp
        columns = min(spec.hidden_size, spec.num_attention_heads * spec.head_dim / t.tp)
        seconds = (
            2 * rows * dense / spec.num_layers / share / self._rate(rows / t.cp, columns, fp8=True)
        )
        split = t.tp if t.sequence_parallel else 1
        touched = (
            4 * spec.hidden_size / split
            + (2 * spec.num_attention_heads * spec.head_dim + 3 * spec.intermediate_size) / t.tp
        )
        if spec.experts:
            expert_rows = rows / share * t.ep * t.etp * spec.experts.per_token / spec.experts.count
            width = min(spec.hidden_size, spec.experts.intermediate_size / t.etp)
            seconds += (
                2
                * rows
                * expert
                / spec.num_layers
                / share
                / self._rate(expert_rows, width, fp8=True)
            )
            seconds += self._experts_share * self.constants.expert_pass_s
            experts_per_token = self._experts_share * spec.experts.per_token
            touched += (
                experts_per_token
                * (3 * spec.hidden_size + 3 * spec.experts.intermediate_size / t.etp)
                / t.tp
            )
        item = ITEM_BYTES[self.dtype]
        return (
            seconds
            + self.constants.elementwise_passes / 4 * item * touched * rows / t.cp / self._hbm
        )

    def _tensor_s(self, rows: float) -> float:
        """Two all-reduces over tp per layer, or one if experts replace the MLP, and what attention
        gathers: half an all-reduce. A mean over layers.
        """
        spec = self.spec
        t = self.trainer
        group = self._group(t.tp, 1)
        row_bytes = rows / t.cp * ITEM_BYTES[self.dtype]
        sums_s = (2 - self._experts_share) * group.all_reduce_s(row_bytes * spec.hidden_size)
        gathered = sum(
            len(layers) * mixer.gathered_elements(spec, t.tp) for mixer, layers in spec.mixers
        )
        if not gathered:
            return sums_s
        return sums_s + group.all_reduce_s(row_bytes * gathered / spec.num_layers) / 2

    def _context_s(self, rows: float, attention_s: float) -> float:
        """Seconds in which keys and values are sent around the cp ranks, as far as attention does
        not hide them. Transformer Engine computes with one part while it sends the next
        (cp_comm_type p2p).
        """
        spec = self.spec
        t = self.trainer
        heads = max(1.0, spec.num_kv_heads / t.tp)
        part = rows / t.cp * 2 * heads * spec.head_dim * ITEM_BYTES[self.dtype]
        step_s = self.constants.latency_s + part / self._group(t.cp, t.tp).bytes_per_s
        return max(0.0, (t.cp - 1) * step_s - attention_s)

    def _expert_s(self, rows: float) -> float:
        """Tokens are sent to their experts and back. A mean over layers."""
        spec = self.spec
        t = self.trainer
        if not spec.experts:
            return 0.0
        sent_bytes = (
            rows
            / (t.tp * t.cp)
            * spec.experts.per_token
            * spec.hidden_size
            * ITEM_BYTES[self.dtype]
        )
        copies = 1
        if t.megatron.get("moe_token_dispatcher_type") == "flex":
            # DeepEP and HybridEP send a token to each node once
            copies = spec.experts.per_token
        dispatch_s = self._group(t.ep * t.etp, 1).all_to_all_s(sent_bytes, copies)
        return 2 * self._experts_share * dispatch_s

    def _between_s(self, rows: float) -> float:
        t = self.trainer
        if t.pp == 1:
            return 0.0
        sent_bytes = rows / t.cp * self.spec.hidden_size * ITEM_BYTES[self.dtype]
        if t.sequence_parallel:
            sent_bytes /= t.tp
        group = self._group(t.pp, t.tp * t.cp * t.dp)
        return t.vpp * (group.latency_s + sent_bytes / group.bytes_per_s)

    def _data_s(self, elements: WeightElements, backward_s: float) -> float:
        """In each optimizer step, fp32 gradients are reduced, and weights gathered if the optimizer
        is split (otherwise gradients).

        trainer.ddp.overlap_grad_reduce, the default on GPUs, reduces them bucket by bucket during
        the last microbatch's backward pass, which takes `backward_s`. Only the last bucket is not
        ready before this ends. Nothing hides the gather of weights.
        """
        t = self.trainer
        if t.zero == 3 and not self.adapters:  # in every microbatch: _gathers_s
            return 0.0
        item = ITEM_BYTES[self.dtype]
        reduce_s = self._replicas_s(elements, 4)
        gather_s = self._replicas_s(elements, item)
        if not t.zero:  # an all-reduce is a reduce-scatter and a gather
            reduce_s = self._replicas_s(elements, 8)
            gather_s = 0.0
        # as in trainer.parallel
        if t.ddp.get("overlap_grad_reduce", self.cluster.gpu.name != "cpu" and t.dp * t.cp > 1):
            # elements: Megatron's default
            bucket = t.ddp.get("bucket_size") or max(40_000_000, 1_000_000 * t.dp * t.cp)
            reduce_s = max(min(1.0, bucket / elements.total) * reduce_s, reduce_s - backward_s)
        return reduce_s + gather_s

    def _gathers_s(self, forwards: float, forward_s: float, backward_s: float) -> float:
        """In each microbatch, FSDP2 gathers the layers for each of `forwards` forward passes and
        again for the backward pass, and reduces fp32 gradients. It does so for one layer while
        another is computed. Returns the seconds that computing does not hide, which include the
        first layer's gather and the last layer's reduction.

        forward_s, backward_s: of one pass over the stage's layers.
        """
        layers = largest_stage(self.spec, self.trainer)
        weights = max(
            trainer_elements(self.spec, self.trainer, self.dtype), key=lambda stage: stage.total
        )
        gather_s = self._replicas_s(weights, ITEM_BYTES[self.dtype])
        reduce_s = 0.0 if self.adapters else self._replicas_s(weights, 4)
        both_s = gather_s + reduce_s
        return forwards * max(gather_s / layers, gather_s - forward_s) + max(
            both_s / layers, both_s - backward_s
        )

    def _replicas_s(self, elements: WeightElements, bytes_each: int) -> float:
        """A gather over the ranks with the same weights. Experts have their own mesh."""
        t = self.trainer
        dense = self._group(t.dp * t.cp, t.tp).gather_s(bytes_each * elements.dense)
        if not elements.expert:
            return dense
        return dense + self._group(t.tp * t.cp * t.dp // (t.ep * t.etp), t.ep * t.etp).gather_s(
            bytes_each * elements.expert
        )

    def _group(self, size: int, stride: int) -> CollectiveGroup:
        return CollectiveGroup(size, stride, self.cluster, self.constants)


TAIL_POINTS = 16
# Reads and writes of fp32 logits in each decoding step by SGLang's logits processor and sampler
# (srt/layers): conversion to fp32 1.5, temperature 2, softmax 3 and its copy 2, a draw
# (exponentials, a quotient, the largest) 5, logarithms for log-probs 2.
LOGIT_PASSES = 15.5


@dataclass(frozen=True)
class GenerateTime:
    """Seconds of the slowest engine."""

    prefill: float
    full: float  # decoding while requests wait
    tail: float  # decoding the last requests
    # actual value: max_concurrency, or less if the KV cache or the requests limit it
    concurrency: float
    token_s: float  # a decoding step at that concurrency
    # share of this step for reading weights and KV cache; the rest is products, collectives and
    # overheads
    memory_share: float

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
    """Engines on one cluster. They generate a step's responses: prefill, decoding at full
    concurrency, and the last, longest responses.

    An engine has `max_concurrency` running requests while others wait. Then running requests end,
    in a time given by their lengths. Lengths are exponential with a cut, so the remaining lengths
    of running requests are distributed like new lengths, and no simulation is needed.
    """

    spec: ModelSpec
    generator: GeneratorConfig
    dtype: str
    cluster: Cluster
    constants: Constants = CONSTANTS
    # None: SGLang's default, the overlap schedule on GPUs, unless generator.server_args turn it off
    overlapped: bool | None = None
    accept_length: float | None = None  # plan.accept_length

    @cached_property
    def weights(self) -> GeneratorWeights:
        return generator_weights(self.spec, self.generator, self.dtype)

    @cached_property
    def active(self) -> float:
        return sum(active_elements(self.spec)) + self.spec.vocab_size * self.spec.hidden_size

    def seconds(
        self,
        workload: Workload,
        *,
        carried_over: bool = False,
        prefilled_again: bool = False,
        ahead: float = math.inf,
    ) -> GenerateTime:
        """`carried_over`: unfinished responses continue in the next step (partial rollouts), so
        engines are always full, with the responses of at most `ahead` steps. `prefilled_again`:
        after each update, keys and values of all running requests are computed again.
        """
        requests = workload.sequences / self.generator.engines
        waiting = requests * ahead if carried_over else requests
        admitted = min(self.generator.max_concurrency, waiting)
        running = max(1.0, min(admitted, self.room(workload)))
        context = workload.prompt_tokens + workload.decoded
        step = self.decode_step(running, context)
        # Twice the mean: lengths so far are exponential like whole lengths, so E[c^2] / E[c] = 2
        # E[c] (4/3 E[c] if all end equally long).
        repeated_prefill_s = (
            self.prefilled_s(running * context, 2 * context) if prefilled_again else 0.0
        )
        if carried_over:
            full_requests = requests
            tail_s = 0.0
        else:
            full_requests = max(0.0, requests - running)
            tail_s = self._tail_s(workload, running, together=requests <= running)
        full_steps = full_requests * workload.response_tokens / running
        return GenerateTime(
            prefill=self._prefill_s(workload, requests) + repeated_prefill_s,
            full=full_steps * step.total,
            tail=tail_s,
            concurrency=running,
            token_s=step.total,
            memory_share=step.memory / step.total,
        )

    def room(self, workload: Workload) -> float:
        """The number of requests of mean length that the KV cache holds at once."""
        return (
            kv_tokens(self.spec, self.generator, self.dtype, workload, self.cluster.gpu)
            / workload.tokens_per_sequence
        )

    def decode_step(self, running: float, context: float) -> DecodeStep:
        """Decodes one token for each of `running` requests with `context` tokens.

        This is a pass, or the part of a pass that gives a token.
        """
        drafts = self.generator.speculative
        if not drafts.drafts or self.accept_length is None:
            return self._pass(running, context, 1)
        full_pass = self._pass(running, context, 1 + drafts.steps)
        if drafts.algorithm == NEXTN:  # a layer and the output layer for each drafted token
            weights = self.weights
            item = ITEM_BYTES[self.dtype]
            layer = (
                (weights.streamed + weights.expert) / self.spec.num_layers
                + item * self.spec.vocab_size * self.spec.hidden_size / self.generator.tp
            )
            read_s = (
                drafts.steps
                * layer
                / (self.cluster.gpu.hbm_bytes_per_s * self.constants.hbm_efficiency)
            )
            full_pass = replace(
                full_pass,
                memory=full_pass.memory + read_s,
                launches=full_pass.launches + drafts.steps * self.constants.decode_layer_s,
            )
        parts = {
            name: value / self.accept_length
            for name, value in vars(full_pass).items()
            if name != "overlapped"
        }
        return DecodeStep(**parts, overlapped=full_pass.overlapped)

    def _pass(self, running: float, context: float, tokens: int) -> DecodeStep:
        """A pass over `tokens` tokens of each request."""
        spec = self.spec
        k = self.constants
        tp = self.generator.tp
        read = self.weights.streamed + running * kv_bytes_read(
            spec, self.generator, ITEM_BYTES[self.dtype], context
        )
        # read and written
        read += 2 * running * state_bytes(spec, self.generator, ITEM_BYTES[self.dtype])
        if spec.experts:
            read += self.weights.expert * (
                1 - (1 - spec.experts.per_token / spec.experts.count) ** (running * tokens)
            )
        flops = (
            running
            * tokens
            * (2 * self.active + 2 * spec.num_layers * attention_flops(spec, context))
            / tp
        )
        group = CollectiveGroup(tp, 1, self.cluster, k)
        item = ITEM_BYTES[self.dtype]
        summed = group.small_all_reduce_s(running * tokens * spec.hidden_size * item)
        hbm = self.cluster.gpu.hbm_bytes_per_s * k.hbm_efficiency
        logits = running * tokens * spec.vocab_size
        overlapped = self.overlapped
        if overlapped is None:
            overlapped = self.cluster.gpu.name != "cpu" and not self.generator.server_args.get(
                "disable_overlap_schedule", False
            )
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
        return self.prefilled_s(prompts * workload.prompt_tokens, workload.prompt_tokens)

    def prefilled_s(self, tokens: float, length: float) -> float:
        """Seconds to prefill `tokens` tokens in sequences of `length`.

        In chunks of this size, products take longer than memory traffic.
        """
        return (
            tokens
            * (2 * self.active + self.spec.num_layers * attention_flops(self.spec, length))
            / self.generator.tp
            / self._rate
        )

    def _tail_s(self, workload: Workload, running: float, *, together: bool) -> float:
        """Integrates by midpoints over the time to the step's longest response.

        At least one request runs until then.

        `together`: all requests began at once, so a running response has one token per step so far.
        Otherwise its length is at least the mean at the beginning of the tail.
        """
        span = workload.straggler / TAIL_POINTS
        seconds = 0.0
        for point in ((i + 0.5) * span for i in range(TAIL_POINTS)):
            response_tokens = point if together else max(point, workload.decoded)
            context = workload.prompt_tokens + response_tokens
            seconds += (
                span
                * self.decode_step(max(1.0, running * workload.survivors(point)), context).total
            )
        return seconds


# share of the elements that change in a step, for predictions of deltas; published: 0.9 to 3 % of
# bf16, 8B to 70B
CHANGED = 0.01


class UpdateSeconds(NamedTuple):
    full: float  # of an update of all weights
    delta: float  # of only the changed weights, if the share CHANGED has changed
    writes: float  # the part of `full` in which the busiest sender prepares its writes


def sync_s(spec: ModelSpec, config: RunConfig, cluster: Cluster) -> UpdateSeconds:
    """The seconds of updates, by the map of the run.

    Ranks of one node write over NVLink, others over their NICs, and those of a single GPU inside
    its memory. A sender prepares its next writes while others are under way, so the longer of the
    two counts. A delta is one write to each engine.
    """
    source = trainer_layout(spec, trainer_topology(config.trainer), config.model.dtype)
    destination = engines_layout(config, spec, cluster.gpu.device)
    map, forwarding = planned_relays(
        ReshardMap.build(source, destination), config.weights.relay, config.generator.tp
    )
    rate = update_bytes_per_s(config, cluster)
    return UpdateSeconds(
        full=update_s(map, forwarding, rate),
        delta=delta_bytes(map, forwarding, CHANGED) / rate,
        writes=writes_s(map),
    )


def control_s(trainer_ranks: int, engines: int, tp: int, constants: Constants) -> float:
    """Seconds in which the generator, which is one process, handles an update's messages and calls
    while engines are paused.
    """
    rank_messages_s = (
        trainer_ranks * constants.trainer_message_s + engines * tp * constants.worker_message_s
    )
    return rank_messages_s + engines * constants.engine_calls_s


def balanced_sync_s(
    engine_bytes: float,
    generator_ranks: int,
    trainer_ranks: int,
    cluster: Cluster,
    relaying: int = 0,
) -> float:
    """Seconds without a map, for a search.

    Every generator rank gets `engine_bytes`, and the trainer ranks send equal shares.

    `relaying`: the number of engines that pass weights on to each other (weights.relay=engines).
    Each gets its part from the trainer in turn.
    """
    fan_out = generator_ranks / trainer_ranks
    busiest = max(1.0, fan_out)
    if relaying:
        busiest = min(busiest, fan_out / relaying + (1 - 1 / relaying))
    return engine_bytes * busiest / link_bytes_per_s(generator_ranks + trainer_ranks, cluster)


def update_bytes_per_s(config: RunConfig, cluster: Cluster) -> float:
    """The rate at which a rank sends or receives weights.

    A copy inside a GPU's memory reads and writes it.
    """
    ranks = gpus_of_run(config)
    if config.cluster.share_gpus and ranks == 1:
        return cluster.gpu.hbm_bytes_per_s * constants_of(cluster.gpu.name).hbm_efficiency / 2
    return link_bytes_per_s(ranks, cluster)


def link_bytes_per_s(ranks: int, cluster: Cluster) -> float:
    gpu = cluster.gpu
    return gpu.nvlink_bytes_per_s if ranks <= cluster.gpus_per_node else gpu.nic_bytes_per_s
