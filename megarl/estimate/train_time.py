"""Seconds of one training step, from the model's matrix products and the ranks' traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megarl.config.schema import TrainerConfig
from megarl.estimate.communication import Group
from megarl.estimate.constants import CONSTANTS, Constants
from megarl.estimate.hardware import Cluster
from megarl.estimate.sizes import Held, largest_stage, stage_layers, trainer_held
from megarl.estimate.workload import Workload
from megarl.models import ModelSpec
from megarl.models.flops import active_elements, attention_flops, flops_per_token
from megarl.reshard.kinds import ITEM_BYTES


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

    def seconds(self, workload: Workload, *, extra_forwards: int = 0) -> TrainTime:
        """Of a batch, in all its optimizer steps. `extra_forwards`: passes over it that only score. Sequences are packed to the token
        budget."""
        t, k = self.trainer, self.constants
        steps, workload = t.minibatches * t.epochs, replace(workload, sequences=workload.sequences // t.minibatches)
        scoring = extra_forwards / t.epochs  # a batch is scored once
        length, rows = workload.tokens_per_sequence, self._rows(workload)
        count = math.ceil(workload.tokens / t.dp / rows)
        count = math.ceil(count / t.pp) * t.pp if t.vpp > 1 else count
        passes = 3 + t.recompute + scoring
        layers = largest_stage(self.spec, t)
        per_layer = self._layer_s(rows, length)
        head = workload.response_tokens / length * self._head_s(rows)  # of positions that the loss is about
        last = sum(stage_layers(self.spec, t)[-1])
        compute = max(passes * layers * per_layer, passes * last * per_layer + (4 + scoring) * head)
        tensor = passes * layers * self._tensor_s(rows)
        expert = passes * layers * self._expert_s(rows)
        between = (2 + scoring) * self._between_s(rows)
        bubble = (t.pp - 1) / t.vpp * (compute + tensor + expert + between) / count
        held = max(trainer_held(self.spec, t, self.dtype), key=lambda stage: stage.total)
        update_s = 30 * held.total / (t.dp * t.cp if t.zero else 1) / self._hbm  # Adam's reads and writes, bytes
        total = TrainTime(
            compute=steps * count * compute,
            tensor_parallel=steps * count * tensor,
            expert_parallel=steps * count * expert,
            pipeline=steps * count * (between + bubble),
            data_parallel=steps * self._data_s(held),
            optimizer=steps * (update_s + k.step_s),
            tflops=0.0,
        )
        flops = 3 * steps * workload.tokens * flops_per_token(self.spec, length) / (t.tp * t.cp * t.pp * t.dp)
        return TrainTime(**(vars(total) | {"tflops": flops / total.total / 1e12}))

    @property
    def _hbm(self) -> float:
        return self.cluster.gpu.hbm_bytes_per_s * self.constants.hbm_efficiency

    def _rows(self, workload: Workload) -> float:
        """Tokens of a microbatch: whole sequences within the budget, at most a rank's share."""
        length = workload.tokens_per_sequence
        whole = max(1, math.floor(self.trainer.max_tokens_per_microbatch / length)) * length
        return min(whole, max(length, workload.tokens / self.trainer.dp))

    def _rate(self, rows: float, columns: float) -> float:
        """FLOP/s of a product with so many rows and columns."""
        k = self.constants
        return self.cluster.gpu.bf16_flops * k.gemm_efficiency / (1 + k.half_rows / rows + k.half_width / columns)

    def _head_s(self, rows: float) -> float:
        """One product of hidden states and output layer. Training takes four: logits are made again in the backward pass."""
        t, spec = self.trainer, self.spec
        chunk = min(rows / t.cp, t.logprob_chunk_tokens)
        return 2 * rows * spec.vocab_size * spec.hidden_size / t.tp / t.cp / self._rate(chunk, spec.vocab_size / t.tp)

    def _layer_s(self, rows: float, length: float) -> float:
        """One forward pass of one layer: the mean over dense and expert layers."""
        spec, t = self.spec, self.trainer
        dense, expert = active_elements(spec)
        share = t.tp * t.cp
        columns = min(spec.hidden_size, spec.num_attention_heads * spec.head_dim / t.tp)
        seconds = 2 * rows * dense / spec.num_layers / share / self._rate(rows / t.cp, columns)
        seconds += rows * attention_flops(spec, length) / share / self._rate(rows / t.cp, spec.head_dim * 4)
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
        """Two all-reduces over tp per layer, one if experts replace the MLP; a gather of keys and values over cp."""
        spec, t, item = self.spec, self.trainer, ITEM_BYTES[self.dtype]
        over_tp = self._group(t.tp, 1).all_reduce_s(rows / t.cp * spec.hidden_size * item)
        kv = rows * 2 * spec.num_kv_heads * spec.head_dim / t.tp * item
        return (1 if spec.num_experts else 2) * over_tp + self._group(t.cp, t.tp).gather_s(kv)

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

    def _data_s(self, held: Held) -> float:
        """Once per optimizer step fp32 gradients are reduced, then weights gathered."""
        t, item = self.trainer, ITEM_BYTES[self.dtype]
        dense = self._group(t.dp * t.cp, t.tp)
        expert = self._group(t.tp * t.cp * t.dp // (t.ep * t.etp), t.ep * t.etp)
        once = 4 + (item if t.zero else 4)
        return dense.gather_s(once * held.dense) + expert.gather_s(once * held.expert)

    def _group(self, size: int, stride: int) -> Group:
        return Group(size, stride, self.cluster, self.constants)
