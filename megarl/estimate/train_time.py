"""Seconds of one training step, from the model's matrix products and the ranks' traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megarl.config.schema import TrainerConfig
from megarl.estimate.communication import Group
from megarl.estimate.constants import CONSTANTS, Constants
from megarl.estimate.hardware import Cluster
from megarl.estimate.sizes import Held, largest_stage, stage_layers, trained_held
from megarl.estimate.workload import Workload
from megarl.models import ModelSpec
from megarl.models.adapters import Lora
from megarl.models.flops import active_elements, attention_flops, flops_per_token
from megarl.models.spec import SCALAR
from megarl.reshard.kinds import ITEM_BYTES

# Of attention's forward FLOPs: five products instead of two, as scores are made again (FlashAttention-2, arXiv 2307.08691, section 4.1).
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class TrainTime:
    """Seconds of a batch on the busiest rank."""

    compute: float
    tensor_parallel: float  # also context parallel
    expert_parallel: float
    pipeline: float  # the bubble, and what passes between stages
    data_parallel: float  # gradients and, if sharded, weights
    optimizer: float  # also what an optimizer step costs regardless of its tokens
    tflops: float  # per GPU over all optimizer steps, counting the model's products without recomputation

    @property
    def total(self) -> float:
        return self.compute + self.tensor_parallel + self.expert_parallel + self.pipeline + self.data_parallel + self.optimizer


@dataclass(frozen=True)
class TrainModel:
    """One trainer on one cluster."""

    spec: ModelSpec
    trainer: TrainerConfig
    dtype: str
    cluster: Cluster
    constants: Constants = CONSTANTS
    lora: Lora | None = None  # a frozen weight takes no product for its gradient; the adapters' own products count for nothing

    def seconds(self, workload: Workload, *, extra_forwards: int = 0) -> TrainTime:
        """Of a batch, in all its optimizer steps. `extra_forwards`: passes over it that only score. Sequences are packed to the token
        budget."""
        t, k = self.trainer, self.constants
        steps, workload = t.minibatches * t.epochs, replace(workload, sequences=workload.sequences // t.minibatches)
        scoring = extra_forwards / t.epochs  # a batch is scored once
        rows, squares = self._rows(workload), workload.tokens_per_square
        count = math.ceil(workload.tokens / t.dp / rows)
        count = math.ceil(count / t.pp) * t.pp if t.vpp > 1 else count
        backward = (1 if self.lora else 2) + t.recompute
        passes = 1 + backward + scoring
        layers = largest_stage(self.spec, t)
        products, attention = self._layer_s(rows), self._attention_s(rows, squares)
        of_attention = 1 + t.recompute + ATTENTION_BACKWARD
        per_layer = passes * products + (of_attention + scoring) * attention
        head = workload.response_tokens / workload.tokens_per_sequence * self._head_s(rows)  # of positions that the loss is about
        last = sum(stage_layers(self.spec, t)[-1])
        compute = max(layers * per_layer, last * per_layer + ((3 if self.lora else 4) + scoring) * head)
        exchanges = 3 + t.recompute + scoring
        tensor = exchanges * layers * (self._tensor_s(rows) + self._context_s(rows, attention))
        expert = exchanges * layers * self._expert_s(rows)
        between = (2 + scoring) * self._between_s(rows)
        bubble = (t.pp - 1) / t.vpp * (compute + tensor + expert + between) / count
        held = max(trained_held(self.spec, t, self.dtype, self.lora), key=lambda stage: stage.total)
        update_s = 30 * held.total / (t.dp * t.cp if t.zero else 1) / self._hbm  # Adam's reads and writes, bytes
        last_backward_s = layers * (backward * products + (of_attention - 1) * attention)
        longest = self._longest_share(workload)
        total = TrainTime(
            compute=steps * count * compute * longest,
            tensor_parallel=steps * count * tensor,
            expert_parallel=steps * count * expert,
            pipeline=steps * count * (between + bubble),
            data_parallel=steps * self._data_s(held, last_backward_s),
            optimizer=steps * (update_s + k.step_s),
            tflops=0.0,
        )
        flops = (2 if self.lora else 3) * steps * workload.tokens * flops_per_token(self.spec, squares) / (t.tp * t.cp * t.pp * t.dp)
        return TrainTime(**(vars(total) | {"tflops": flops / total.total / 1e12}))

    def scoring_s(self, workload: Workload) -> float:
        """Of one pass over a batch that only scores."""
        return self.seconds(workload, extra_forwards=1).total - self.seconds(workload).total

    @property
    def _hbm(self) -> float:
        return self.cluster.gpu.hbm_bytes_per_s * self.constants.hbm_efficiency

    def _rows(self, workload: Workload) -> float:
        """Tokens of a microbatch: whole sequences within the budget, at most a rank's share."""
        length = workload.tokens_per_sequence
        whole = max(1, math.floor(self.trainer.max_tokens_per_microbatch / length)) * length
        return min(whole, max(length, workload.tokens / self.trainer.dp))

    def _longest_share(self, workload: Workload) -> float:
        """The work of the rank that has the step's longest sequence, over the mean rank's: 1 unless that sequence alone is more. The
        trainer gives each rank an equal share of tokens plus attention (microbatch.plan_microbatches), but cuts no sequence over dp."""
        flops = flops_per_token(self.spec, 0)
        squares = (flops_per_token(self.spec, 1) - flops) / flops
        longest, mean = workload.prompt_tokens + workload.straggler, workload.tokens_per_sequence
        share = workload.sequences / self.trainer.dp * mean * (1 + squares * workload.tokens_per_square)
        return max(1.0, longest * (1 + squares * longest) / share)

    def _rate(self, rows: float, columns: float) -> float:
        """FLOP/s of a product with so many rows and columns."""
        k = self.constants
        return self.cluster.gpu.bf16_flops * k.gemm_efficiency / (1 + k.half_rows / rows + k.half_width / columns)

    def _head_s(self, rows: float) -> float:
        """One product of hidden states and output layer. Training takes four: logits are made again in the backward pass."""
        t, spec = self.trainer, self.spec
        chunk = min(rows / t.cp, t.logprob_chunk_tokens)
        if spec.head == SCALAR:  # one number a token
            return 0.0
        return 2 * rows * spec.vocab_size * spec.hidden_size / t.tp / t.cp / self._rate(chunk, spec.vocab_size / t.tp)

    def _attention_s(self, rows: float, length: float) -> float:
        """Scores and weighted values of one forward pass of one layer, for sequences of `length` tokens."""
        spec, t = self.spec, self.trainer
        return rows * attention_flops(spec, length) / (t.tp * t.cp) / self._rate(rows / t.cp, spec.head_dim * 4)

    def _layer_s(self, rows: float) -> float:
        """One forward pass of one layer but for `_attention_s`: the mean over dense and expert layers."""
        spec, t = self.spec, self.trainer
        dense, expert = active_elements(spec)
        share = t.tp * t.cp
        columns = min(spec.hidden_size, spec.num_attention_heads * spec.head_dim / t.tp)
        seconds = 2 * rows * dense / spec.num_layers / share / self._rate(rows / t.cp, columns)
        split = t.tp if t.sequence_parallel else 1
        touched = 4 * spec.hidden_size / split + (2 * spec.num_attention_heads * spec.head_dim + 3 * spec.intermediate_size) / t.tp
        if spec.num_experts:
            of_expert = rows / share * t.ep * t.etp * spec.experts_per_token / spec.num_experts
            width = min(spec.hidden_size, spec.expert_intermediate_size / t.etp)
            seconds += 2 * rows * expert / spec.num_layers / share / self._rate(of_expert, width) + self.constants.expert_pass_s
            touched += spec.experts_per_token * (3 * spec.hidden_size + 3 * spec.expert_intermediate_size / t.etp) / t.tp
        item = ITEM_BYTES[self.dtype]
        return seconds + self.constants.elementwise_passes / 4 * item * touched * rows / t.cp / self._hbm

    def _tensor_s(self, rows: float) -> float:
        """Two all-reduces over tp per layer, one if experts replace the MLP."""
        spec, t = self.spec, self.trainer
        over_tp = self._group(t.tp, 1).all_reduce_s(rows / t.cp * spec.hidden_size * ITEM_BYTES[self.dtype])
        return (1 if spec.num_experts else 2) * over_tp

    def _context_s(self, rows: float, attention_s: float) -> float:
        """What attention does not hide of passing keys and values around the cp ranks: Transformer Engine computes with one part while
        the next is on its way (cp_comm_type p2p)."""
        spec, t = self.spec, self.trainer
        part = rows / t.cp * 2 * spec.num_kv_heads * spec.head_dim / t.tp * ITEM_BYTES[self.dtype]
        step_s = self.constants.latency_s + part / self._group(t.cp, t.tp).bytes_per_s
        return max(0.0, (t.cp - 1) * step_s - attention_s)

    def _expert_s(self, rows: float) -> float:
        """Tokens travel to their experts and back."""
        spec, t = self.spec, self.trainer
        if not spec.num_experts:
            return 0.0
        sent = rows / (t.tp * t.cp) * spec.experts_per_token * spec.hidden_size * ITEM_BYTES[self.dtype]
        return 2 * self._group(t.ep * t.etp, 1).all_to_all_s(sent)

    def _between_s(self, rows: float) -> float:
        t = self.trainer
        if t.pp == 1:
            return 0.0
        sent = rows / t.cp * self.spec.hidden_size * ITEM_BYTES[self.dtype] / (t.tp if t.sequence_parallel else 1)
        group = self._group(t.pp, t.tp * t.cp * t.dp)
        return t.vpp * (group.latency_s + sent / group.bytes_per_s)

    def _data_s(self, held: Held, backward_s: float) -> float:
        """Once per optimizer step fp32 gradients are reduced, then weights gathered if the optimizer is split (else gradients).

        trainer.ddp.overlap_grad_reduce, the default on GPUs, reduces them bucket by bucket during the last microbatch's backward pass,
        which takes `backward_s`; only the last bucket is ready no sooner than its end. Nothing hides the gather of weights.
        """
        t, item = self.trainer, ITEM_BYTES[self.dtype]
        reduce_s = self._replicas_s(held, 4 if t.zero else 8)  # an all-reduce is a reduce-scatter and a gather
        if t.ddp.get("overlap_grad_reduce", self.cluster.gpu.name != "cpu" and t.dp * t.cp > 1):  # as trainer.parallel decides
            bucket = t.ddp.get("bucket_size") or max(40_000_000, 1_000_000 * t.dp * t.cp)  # elements: Megatron's default
            reduce_s = max(min(1.0, bucket / held.total) * reduce_s, reduce_s - backward_s)
        return reduce_s + (self._replicas_s(held, item) if t.zero else 0.0)

    def _replicas_s(self, held: Held, bytes_each: int) -> float:
        """A gather over the ranks with the same weights; experts have their own mesh."""
        t = self.trainer
        dense = self._group(t.dp * t.cp, t.tp).gather_s(bytes_each * held.dense)
        if not held.expert:
            return dense
        return dense + self._group(t.tp * t.cp * t.dp // (t.ep * t.etp), t.ep * t.etp).gather_s(bytes_each * held.expert)

    def _group(self, size: int, stride: int) -> Group:
        return Group(size, stride, self.cluster, self.constants)
