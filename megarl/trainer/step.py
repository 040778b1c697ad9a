"""The trainer: one optimizer step, and log-probs of given tokens, on Megatron's model, schedules
and optimizer.

Scaling of the gradient. A loss function returns a sum over tokens. The trainer divides it by
`denominator` before the backward pass. Afterwards gradients are only summed, over microbatches and
over data-parallel ranks. Three of Megatron's factors are turned off. calculate_per_token_loss=True
turns off the division by the number of microbatches, and makes the reduction over ranks a sum. A
3-tuple returned to the schedule turns off the factor cp. There is no division by the token count,
since finalize_model_grads gets none. So for any topology and any microbatches, the result is the
gradient of sum(loss) / denominator over the global batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

from megarl.algorithms.base import LossOutput
from megarl.algorithms.losses import segment_sums
from megarl.base.geometry import TrainerTopology
from megarl.base.rollout_types import RemoteSequence, TrainSequence
from megarl.config.errors import RunError
from megarl.config.schema import AdamConfig, TrainerConfig
from megarl.models.routing import RoutingFormat
from megarl.models.spec import ModelSpec
from megarl.observe.agreement import AGES, BINS, EDGES, MOST_LOG_RATIO, TOKENS, YOUNGEST, Totals
from megarl.reshard.layout import hf_layout
from megarl.teachers.trainer import TeacherOfStep, token_divergence
from megarl.trainer import fully_sharded, hf_io, multi_token, parallel
from megarl.trainer.distributed import to_device
from megarl.trainer.fully_sharded import FullyShardedChunk
from megarl.trainer.layers import RoutingReplay
from megarl.trainer.logprobs import scored_rows, token_logprobs
from megarl.trainer.microbatch import MicroBatch, build, predicted_tokens, predicting
from megarl.trainer.model import MegatronModel, output_weight, passed_on
from megarl.trainer.optimizer import LearningRate, build_optimizer, reload_masters

LossFn = Callable[[torch.Tensor, MicroBatch], LossOutput]
"""(outputs [t] float32, microbatch) -> LossOutput, with sums instead of means, and the same keys in
`sums` all through a step. The outputs are the log-probs of the tokens of `loss_mask`. With a scalar
head, they are the head's values for the tokens before each of these.
"""
# Keys of a step's sums, besides those of the loss function.
ENTROPY = "entropy"
ENTROPY_TOKENS = "entropy tokens"
POSITIONS = "positions"
MTP = "mtp"


class Tally:
    """The sums over the tokens of an optimizer step, from which the metrics of agreement are
    computed (observe/agreement.py). They cover the microbatches of one rank, and are on `device`.
    """

    def __init__(self, device: torch.device):
        zeros = {"dtype": torch.float64, "device": device}
        self._ages = to_device(torch.tensor(YOUNGEST[1:]), device)
        self._edges = to_device(torch.from_numpy(EDGES), device)
        # Tokens that do not count go into an additional row.
        self._sums = torch.zeros((len(AGES) + 1, 6), **zeros)
        self._bins = torch.zeros((len(AGES) + 1) * 2 * BINS, **zeros)
        self._largest = torch.zeros(len(AGES) + 1, **zeros)
        self._sequences = torch.zeros(3, **zeros)

    @torch.no_grad()
    def add(self, logprobs: torch.Tensor, microbatch: MicroBatch) -> None:
        """`logprobs`: [t] the trainer's. Nothing here waits for a GPU."""
        assert microbatch.ages is not None
        mask = microbatch.loss_mask
        age = torch.where(mask, torch.bucketize(microbatch.ages, self._ages, right=True), len(AGES))
        d = torch.where(mask, logprobs.double() - microbatch.mu_logprobs.double(), 0.0)
        size = d.abs()
        bounded = d.clamp(max=MOST_LOG_RATIO)
        ratio = bounded.exp()
        columns = [torch.ones_like(d), size, d, ratio, ratio.square(), torch.expm1(bounded) - d]
        self._sums.index_add_(0, age, torch.stack(columns, dim=1))
        place = (2 * age + (d < 0)) * BINS + torch.bucketize(size, self._edges, right=True)
        self._bins.index_add_(0, place, columns[TOKENS])
        self._largest.scatter_reduce_(0, age, size, "amax")
        is_scored = segment_sums(mask.double(), microbatch.boundaries) > 0
        sequence_ratio = torch.where(
            is_scored, segment_sums(d, microbatch.boundaries).clamp(max=MOST_LOG_RATIO).exp(), 0.0
        )
        self._sequences += torch.stack(
            [is_scored.sum(), sequence_ratio.sum(), sequence_ratio.square().sum()]
        )

    def totals(self, counts: bool) -> Totals:
        """The sums over all ranks with true `counts`, which together have seen each token once.

        Collective. The result is the same on every rank.
        """
        rows = len(AGES)
        largest = self._largest[:rows]
        flat = torch.cat(
            [self._sums[:rows].flatten(), self._bins[: 2 * rows * BINS], self._sequences]
        )
        if not counts:
            largest = torch.zeros_like(largest)
            flat = torch.zeros_like(flat)
        if dist.get_world_size() > 1:
            dist.all_reduce(flat)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        sums, bins, sequences = (
            part.numpy() for part in flat.cpu().split([6 * rows, 2 * rows * BINS, 3])
        )
        return Totals(
            sums.reshape(rows, 6), bins.reshape(rows, 2, BINS), largest.cpu().numpy(), sequences
        )


class TokenRow(NamedTuple):
    """A step's numbers for the tokens that the policy wrote in one sequence; [n] each."""

    ids: np.ndarray
    positions: np.ndarray  # position of each token in the sequence
    logprobs: np.ndarray  # log pi, of the weights before the step
    mu_logprobs: np.ndarray
    advantages: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    loss: float  # sum over the global batch / denominator
    grad_norm: float  # before clipping
    sums: dict[str, float]  # the loss function's sums over the global batch
    sequences: int
    tokens: int  # number of tokens of `loss_mask` in the loss
    # mean over the tokens of `loss_mask`, in nats, before the step; NaN without tokens or with a
    # scalar head
    entropy: float
    learning_rate: float
    padded: int  # positions that the model computed besides those of the sequences (microbatch.py)
    routing: dict[str, float]  # metrics of routing replay; empty without it
    # of forward and backward passes over the sequences, from the model's shape; without
    # recomputation
    flops: float = 0.0
    # mean over the tokens that the layer for multi-token prediction predicts; NaN: not trained
    mtp_loss: float = math.nan
    # of the policy before the step with the behaviour policy, if the tokens' ages were given
    agreement: Totals | None = None
    # only this rank's, for the sequences in `keep`
    token_rows: dict[int, TokenRow] = field(default_factory=dict)

    def check_tokens(self, sample_tokens: int) -> None:
        """Raises RunError if the loss was not computed from `sample_tokens` tokens: a sequence was
        left out, trained on twice, or cut.
        """
        if self.tokens != sample_tokens:
            raise RunError(
                f"the step was made of {self.tokens} tokens, but its samples have {sample_tokens}; "
                "its weights are not used"
            )


class MegatronTrainer(MegatronModel):
    """One rank's part of the trainer: a model with gradients and an optimizer.

    Weights are zero until a call of load_hf, init_random or checkpoint.load.
    """

    TRAINED = True

    def __init__(
        self,
        spec: ModelSpec,
        topology: TrainerTopology,
        trainer: TrainerConfig,
        dtype: str,
        seed: int,
        *,
        total_steps: int,
        timeout_s: float,
        optimizer: AdamConfig | None = None,
    ):
        """`optimizer` replaces trainer.optimizer, except for trainer.optimizer.megatron, which
        applies to every optimizer.
        """
        super().__init__(spec, topology, trainer, dtype, seed, timeout_s=timeout_s)
        self.saved_layout = self.layout  # the layout of checkpoints
        # whether the model is frozen, and something beside it is trained (`LoraTrainer`)
        self.frozen = False
        self.base: str | None = None  # the checkpoint that a frozen model comes from
        config = self.config
        config.finalize_model_grads_func = lambda model, num_tokens, **kwargs: finalize_model_grads(
            model, None, **kwargs
        )
        # Adapters of a sharded model stay whole.
        self.trained_zero = topology.zero if self.TRAINED else min(topology.zero, 1)
        self.ddp: list[DistributedDataParallel] | list[FullyShardedChunk]
        if self.trained_zero == 3:
            self.ddp = [FullyShardedChunk(config, chunk) for chunk in self.chunks]
        else:
            with passed_on("trainer.ddp", trainer.ddp):
                self.ddp = parallel.data_parallel(
                    config,
                    replace(topology, zero=self.trained_zero),
                    trainer.ddp,
                    self.chunks,
                )
        self.modules = [*self.ddp]
        self.routing = RoutingFormat.of(spec) if trainer.routing_replay else None
        if self.routing:
            self.replay = RoutingReplay(
                self.routing, self.ddp, config.sequence_parallel, trainer.recompute
            )
        else:
            self.replay = None
        settings = optimizer or trainer.optimizer
        with passed_on("trainer.optimizer.megatron", trainer.optimizer.megatron):
            self.optimizer = build_optimizer(
                settings, trainer.optimizer, self.ddp, self.dtype, self.trained_zero
            )
        self.learning_rate = LearningRate(settings, self.optimizer, total_steps)
        self._reference: dict[torch.Tensor, torch.Tensor] | MegatronModel | None = None

    # -- training

    def train_step(
        self,
        sequences: Sequence[TrainSequence | RemoteSequence],
        loss: LossFn,
        denominator: float,
        *,
        temperature: float = 1.0,
        reference_logprobs: Sequence[np.ndarray] | None = None,
        proximal_logprobs: Sequence[np.ndarray] | None = None,
        old_values: Sequence[np.ndarray] | None = None,
        returns: Sequence[np.ndarray] | None = None,
        ages: Sequence[np.ndarray] | None = None,
        teachers: Sequence[TeacherOfStep] = (),
        keep: Collection[int] = (),
    ) -> StepResult:
        """Makes one optimizer step on the gradient of sum(loss) / denominator.

        `temperature`: that of the behaviour policy. `reference_logprobs`, `proximal_logprobs`,
        `old_values`, `returns` and `ages`, one array per sequence, become MicroBatch's fields of
        these names, as do the outputs of `teachers`. With `ages`, the result has the agreement with
        the behaviour policy. `keep`: sequences for which the result has the TokenRow, on one of the
        ranks that train on them. Without sequences, the gradient is zero, and the optimizer still
        makes a step. Raises RuntimeError if the gradient is not finite.
        """
        assert denominator > 0
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.replay is not None:
            self.replay.reset()
        row_inputs = {
            "reference_logprobs": reference_logprobs,
            "proximal_logprobs": proximal_logprobs,
        }
        row_inputs |= {"old_values": old_values, "returns": returns, "ages": ages}
        mtp_tokens = self._begin_mtp(sequences) if self.mtp_trained else 0.0
        tally = None if ages is None else Tally(self.device)
        # other tensor and context ranks have seen the same tokens
        is_first = self.coordinate.tp == self.coordinate.cp == 0
        kept_logprobs: dict[int, torch.Tensor] = {}
        watch = partial(_keep, keep if is_first else (), kept_logprobs)
        outputs = self._run(
            self._plan(sequences),
            partial(
                build, sequences=sequences, device=self.device, **row_inputs, routing=self.routing
            ),
            partial(self._loss, loss, denominator, mtp_tokens, temperature, tally, watch, teachers),
            forward_only=False,
        )
        learning_rate = self.learning_rate.advance()
        _, grad_norm, _ = self.optimizer.step()
        self.round_masters()
        assert grad_norm is not None  # it is None only with loss scaling, which bf16 does not need
        grad_norm = float(grad_norm)
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"the gradient of step {self.learning_rate.steps} is not finite (norm {grad_norm})"
            )
        sums = parallel.global_sums(outputs, self.topology.dp, self.topology.pp)
        mean_loss = sums.pop("loss") / denominator
        tokens = int(sums.pop(ENTROPY_TOKENS))
        entropy = sums.pop(ENTROPY) / (tokens or math.nan)
        positions = sum(len(s) - 1 for s in sequences)
        padded = int(sums.pop(POSITIONS)) - positions
        mtp_loss = sums.pop(MTP, math.nan)
        routing = self.replay.metrics(positions, self.device) if self.replay is not None else {}
        agreement = None if tally is None else tally.totals(is_first)
        return StepResult(
            loss=mean_loss,
            grad_norm=grad_norm,
            sums=sums,
            sequences=len(sequences),
            tokens=tokens,
            entropy=entropy,
            learning_rate=learning_rate,
            padded=padded,
            routing=routing,
            flops=self._flops([len(s) for s in sequences]),
            mtp_loss=mtp_loss,
            agreement=agreement,
            token_rows=_token_rows(kept_logprobs, sequences),
        )

    def _flops(self, lengths: Sequence[int]) -> float:
        """A backward pass costs twice a forward pass, less the gradients of frozen matrices, which
        are not computed.
        """
        passes = 2 if self.frozen else 3
        return self.flops * sum(length * (passes + 3 * self.squares * length) for length in lengths)

    def _loss(
        self,
        loss: LossFn,
        denominator: float,
        mtp_tokens: float,
        temperature: float,
        tally: Tally | None,
        watch: Callable[[MicroBatch, torch.Tensor], None],
        teachers: Sequence[TeacherOfStep],
        microbatch: MicroBatch,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        outputs, entropy = self._outputs(hidden, microbatch, temperature)
        if tally is not None:
            tally.add(outputs, microbatch)
        watch(microbatch, outputs)
        if teachers:
            microbatch = self._taught(hidden, microbatch, temperature, teachers)
        out = loss(outputs, replace(microbatch, entropy=entropy))
        computed = (
            hidden.size(1) * self.topology.cp * (self.topology.tp if self.sequence_parallel else 1)
        )
        token_sums = {
            ENTROPY_TOKENS: microbatch.loss_mask.sum(),
            POSITIONS: torch.full((), computed, device=self.device),
        }
        sums = {
            "loss": out.loss.detach(),
            ENTROPY: entropy.detach().sum(),
            **token_sums,
            **out.sums,
        }
        # Megatron would divide by this token count; see the head of this file.
        total = out.loss / denominator
        if self.mtp is not None:
            mtp_loss = self._mtp_loss(self.mtp, hidden, microbatch, temperature) / mtp_tokens
            total = total + mtp_loss
            sums[MTP] = mtp_loss.detach()
        return total, torch.zeros((), dtype=torch.int, device=self.device), sums

    def _begin_mtp(self, sequences: Sequence[TrainSequence | RemoteSequence]) -> float:
        """Prepares the layer for multi-token prediction for a step. Returns the number of tokens
        that it predicts, but at least 1.
        """
        multi_token.bring_embedding(self.chunks[0], self.mtp)
        rank_sequences = []
        for microbatch in self._plan(sequences):
            for index in microbatch.indices:
                rank_sequences.append(cast(TrainSequence, sequences[index]))
        return max(1.0, *self.summed([predicted_tokens(rank_sequences)]))

    def _mtp_loss(
        self,
        mtp: multi_token.MultiToken,
        hidden: torch.Tensor,
        microbatch: MicroBatch,
        temperature: float,
    ) -> torch.Tensor:
        """A sum over tokens."""
        predicted = predicting(microbatch)
        logprobs, _ = token_logprobs(
            scored_rows(mtp.hidden(microbatch, hidden)[0], predicted, self.sequence_parallel),
            output_weight(self.chunks[-1]).detach(),
            predicted,
            self.spec.vocab_size,
            temperature=temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )
        return -logprobs.sum()

    def _taught(
        self,
        hidden: torch.Tensor,
        microbatch: MicroBatch,
        temperature: float,
        teachers: Sequence[TeacherOfStep],
    ) -> MicroBatch:
        divergence = partial(
            token_divergence,
            rows=scored_rows(hidden[0], microbatch, self.sequence_parallel),
            weight=output_weight(self.chunks[-1]),
            microbatch=microbatch,
            vocab_size=self.spec.vocab_size,
            temperature=temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )
        return replace(
            microbatch, teachers=tuple(teacher(microbatch, divergence) for teacher in teachers)
        )

    # -- the reference model

    def token_logprobs(
        self,
        sequences: Sequence[TrainSequence | RemoteSequence],
        temperature: float = 1.0,
        model: Literal["policy", "reference"] = "policy",
    ) -> list[np.ndarray]:
        """Like MegatronModel's method, under the policy or the reference, as `model` says."""
        if model == "policy":
            return super().token_logprobs(sequences, temperature)
        if isinstance(self._reference, MegatronModel):
            return self._reference.token_logprobs(sequences, temperature)
        with self._reference_weights():
            return super().token_logprobs(sequences, temperature)

    def hold_reference(self, model: MegatronModel | None = None) -> None:
        """Keeps `model`, or else a frozen copy of the current weights, as the reference of the KL
        penalty.
        """
        self._reference = model or {p: self.live_weights(p).clone() for p in self._parameters()}

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if not isinstance(self._reference, dict):
            raise RuntimeError("there is no reference model: call hold_reference() first")
        if self.topology.zero == 3:
            with fully_sharded.replaced(self._reference):
                yield
            return
        policy = {parameter: parameter.data for parameter in self._reference}
        try:
            for parameter, data in self._reference.items():
                parameter.data = data
            yield
        finally:
            for parameter, data in policy.items():
                parameter.data = data

    # -- weights

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """The logical tensors that checkpoints hold."""
        return {tensor.name: tensor.shape for tensor in hf_layout(self.spec, "float32").tensors(0)}

    def reload_masters(self) -> None:
        """Sets the master weights to the live weights."""
        if self.trained_zero < 3:
            reload_masters(self.optimizer)
        for parameter, rounded in self._rounded.items():
            fully_sharded.local_shard(parameter).copy_(rounded)

    def init_random(self, seed: int) -> None:
        """Sets random weights. They depend only on the seed, not on the topology."""
        hf_io.init_random(self.spec, self.layout, self.local_parameters(), seed)
        self.reload_masters()

    def load_hf(self, path: str, new_head: hf_io.NewHead | None = None) -> None:
        """Loads the weights of an HF checkpoint folder.

        Raises ConfigError for missing tensors and wrong shapes.

        `new_head`: initial values of the scalar head if the checkpoint has none; None: it has one.
        """
        super().load_hf(path, new_head)
        self.reload_masters()


def _keep(
    indices: Collection[int],
    kept_logprobs: dict[int, torch.Tensor],
    microbatch: MicroBatch,
    logprobs: torch.Tensor,
) -> None:
    """Keeps in `kept_logprobs` the log-probs of the sequences `indices` of a microbatch.

    They stay on the device: to read them here would make the host wait for the GPU.
    """
    plan = microbatch.plan
    for index, begin, end in zip(plan.indices, plan.boundaries, plan.boundaries[1:]):
        if index in indices:
            kept_logprobs[index] = logprobs.detach()[begin:end]


def _token_rows(
    kept_logprobs: Mapping[int, torch.Tensor], sequences: Sequence[TrainSequence | RemoteSequence]
) -> dict[int, TokenRow]:
    """The TokenRow of each of these sequences. `kept_logprobs`: of their positions."""
    if not kept_logprobs:
        return {}
    host = (
        torch.cat([*kept_logprobs.values()])
        .cpu()
        .split([len(logprobs) for logprobs in kept_logprobs.values()])
    )
    rows = {}
    for index, logprobs in zip(kept_logprobs, host):
        sequence = sequences[index]
        assert isinstance(sequence, TrainSequence)
        positions = np.flatnonzero(np.asarray(sequence.loss_mask)[1:])
        typed_rows = (
            (sequence.token_ids, np.int64),
            (sequence.mu_logprobs, np.float32),
            (sequence.advantages, np.float32),
        )
        ids, mu_logprobs, advantages = (
            np.asarray(row, dtype)[positions + 1] for row, dtype in typed_rows
        )
        rows[index] = TokenRow(
            ids, positions + 1, logprobs.numpy()[positions], mu_logprobs, advantages
        )
    return rows
