"""The trainer: one optimizer step, and log-probs of given tokens, on Megatron's model, schedules and optimizer.

Scaling of the gradient. A loss function returns a sum over tokens. The trainer divides it by `denominator` before the backward pass, and
everything after that is a plain sum: over microbatches (calculate_per_token_loss=True turns off Megatron's division by their number, and
returning a 3-tuple to the schedule turns off the factor cp) and over data-parallel ranks (the same flag makes the reduction a sum);
finalize_model_grads gets no token count to divide by. So the gradient is that of sum(loss) / denominator over the global batch, whatever
the topology and the microbatches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.algorithms.base import LossOutput
from megarl.config.errors import RunError
from megarl.config.schema import OptimizerConfig, TrainerConfig
from megarl.models.flops import flops_per_token
from megarl.models.routing import RoutingFormat
from megarl.models.spec import LM, SCALAR, ModelSpec
from megarl.observe.agreement import Totals
from megarl.reshard.layout import trainer_layout
from megarl.topology import TrainerTopology
from megarl.trainer import context, cpu_support, hf_io, parallel
from megarl.trainer.agreement import Tally
from megarl.trainer.folders import Writing
from megarl.trainer.groups import context_group, data_group
from megarl.trainer.layer_spec import layer_spec
from megarl.trainer.logprobs import token_logprobs
from megarl.trainer.microbatch import Alignment, MicroBatch, MicrobatchPlan, build, plan_microbatches
from megarl.trainer.model import DTYPES, build_chunks, output_weight, parameters_by_name, transformer_config
from megarl.trainer.optimizer import LearningRate, build_optimizer
from megarl.trainer.packing import packed_sequences
from megarl.trainer.routing_replay import RoutingReplay
from megarl.trainer.supported import check_transformer_engine
from megarl.trainer.values import token_values
from megarl.trainer.vendor_warnings import refuse_corruption
from megarl.types import Elsewhere, TrainSequence

LossFn = Callable[[torch.Tensor, MicroBatch], LossOutput]
"""(outputs [t] float32, microbatch) -> LossOutput; sums, not means; the same keys in `sums` at every call of a step. The outputs are the
log-probs of the tokens of `loss_mask` or, with a scalar head, values: what the head makes of the tokens before each of these."""

# Among a step's sums, beside the loss function's own.
ENTROPY, ENTROPY_TOKENS, POSITIONS = "entropy", "entropy tokens", "positions"


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    loss: float  # sum over the global batch / denominator
    grad_norm: float  # before clipping
    sums: dict[str, float]  # the loss function's sums over the global batch
    sequences: int
    tokens: int  # of `loss_mask` that the loss was taken of
    entropy: float  # the policy's mean over the tokens of `loss_mask`, in nats, before the step; NaN without any, and of a scalar head
    learning_rate: float
    padded: int  # positions that the model computed beside those of the sequences (microbatch.py)
    routing: dict[str, float]  # metrics of routing replay; empty without it
    agreement: Totals | None = None  # of the policy before the step with what sampled the tokens, if their ages were given

    def check_tokens(self, expected: int) -> None:
        """Raises RunError if the loss was not taken of `expected` tokens: a sequence was left out, trained on twice, or cut."""
        if self.tokens != expected:
            raise RunError(f"the step was made of {self.tokens} tokens, but its samples have {expected}; its weights are not used")


class MegatronTrainer:
    """One rank's part of the trainer. Every method is collective: all ranks call it, with the same arguments.

    torch.distributed must be initialised with `topology.world_size` ranks, and, without CUDA, cpu_support.install()
    must have been called before this module was imported. Weights are zero until load_hf, init_random or checkpoint.load.
    """

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
        optimizer: OptimizerConfig | None = None,
    ):
        """`optimizer` replaces trainer.optimizer; `timeout_s` bounds every wait of one rank for another, in each of Megatron's groups.

        Raises ConfigError for what this trainer cannot build, RuntimeError for a wrong number of processes.
        """
        if not cpu_support.installed():
            raise RuntimeError("no CUDA here: call megarl.trainer.cpu_support.install() before importing the trainer")
        refuse_corruption()
        check_transformer_engine(spec, trainer)
        if dist.get_world_size() != topology.world_size:
            raise RuntimeError(f"the trainer's topology has {topology.world_size} ranks, torch.distributed has {dist.get_world_size()}")
        self.spec = spec
        self.layout = trainer_layout(spec, topology, dtype, layer_spec())
        self.topology = topology
        self.coordinate = topology.coordinate(dist.get_rank())
        self.seed = seed
        self.dtype = DTYPES[dtype]
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.max_tokens = trainer.max_tokens_per_microbatch
        self.logprob_chunk_tokens = trainer.logprob_chunk_tokens
        self.alignment = Alignment.of(topology, trainer.sequence_parallel)
        flops = flops_per_token(spec, 0)
        self.squares = (flops_per_token(spec, 1) - flops) / flops  # attention's part of what a sequence costs; see plan_microbatches

        parallel.initialize(topology, seed, timeout_s)
        config = transformer_config(spec, topology, self.dtype, trainer)
        self.sequence_parallel = bool(config.sequence_parallel)
        config.finalize_model_grads_func = lambda model, num_tokens, **kwargs: finalize_model_grads(model, None, **kwargs)
        self.chunks = build_chunks(spec, topology, config)
        self.ddp = parallel.data_parallel(config, topology, trainer.ddp, self.chunks)
        self.routing = RoutingFormat.of(spec) if trainer.routing_replay else None
        self.replay = RoutingReplay(self.routing, self.ddp, config.sequence_parallel, trainer.recompute) if self.routing else None
        settings = optimizer or trainer.optimizer
        self.optimizer = build_optimizer(settings, self.ddp, self.dtype, topology.zero)
        self.learning_rate = LearningRate(settings, self.optimizer, total_steps)
        self._reference: list[torch.Tensor] | None = None

    # -- training

    def train_step(
        self,
        sequences: Sequence[TrainSequence | Elsewhere],
        loss: LossFn,
        denominator: float,
        *,
        temperature: float = 1.0,
        reference_logprobs: Sequence[np.ndarray] | None = None,
        proximal_logprobs: Sequence[np.ndarray] | None = None,
        old_values: Sequence[np.ndarray] | None = None,
        returns: Sequence[np.ndarray] | None = None,
        ages: Sequence[np.ndarray] | None = None,
    ) -> StepResult:
        """Makes one optimizer step on the gradient of sum(loss) / denominator.

        `temperature` is that of the behaviour policy; `reference_logprobs`, `proximal_logprobs`, `old_values`, `returns` and `ages`, one
        array per sequence, become MicroBatch's fields of these names. With `ages` the result has the agreement with the behaviour policy.
        Without sequences the gradient is zero and the optimizer still steps.
        Raises RuntimeError if the gradient is not finite.
        """
        assert denominator > 0
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.replay is not None:
            self.replay.reset()
        given = {"reference_logprobs": reference_logprobs, "proximal_logprobs": proximal_logprobs}
        given |= {"old_values": old_values, "returns": returns, "ages": ages}
        tally = None if ages is None else Tally(self.device)
        outputs = self._run(
            self._plan(sequences),
            partial(build, sequences=sequences, device=self.device, **given, routing=self.routing),
            partial(self._loss, loss, denominator, temperature, tally),
            forward_only=False,
        )
        learning_rate = self.learning_rate.advance()
        _, grad_norm, _ = self.optimizer.step()
        assert grad_norm is not None  # it is None only with loss scaling, which bf16 does not need
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"the gradient of step {self.learning_rate.position} is not finite (norm {grad_norm})")
        sums = parallel.global_sums(outputs, self.topology.dp, self.topology.pp)
        mean_loss = sums.pop("loss") / denominator
        tokens = int(sums.pop(ENTROPY_TOKENS))
        entropy = sums.pop(ENTROPY) / (tokens or math.nan)
        positions = sum(len(s) - 1 for s in sequences)
        padded = int(sums.pop(POSITIONS)) - positions
        routing = self.replay.metrics(positions, self.device) if self.replay is not None else {}
        here = self.coordinate.tp == self.coordinate.cp == 0  # other tensor and context ranks have seen the same tokens
        agreement = None if tally is None else tally.totals(here)
        return StepResult(mean_loss, float(grad_norm), sums, len(sequences), tokens, entropy, learning_rate, padded, routing, agreement)

    def _loss(
        self, loss: LossFn, denominator: float, temperature: float, tally: Tally | None, microbatch: MicroBatch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        outputs, entropy = self._outputs(hidden, microbatch, temperature)
        if tally is not None:
            tally.add(outputs, microbatch)
        out = loss(outputs, microbatch)
        computed = hidden.size(1) * self.topology.cp * (self.topology.tp if self.sequence_parallel else 1)
        counted = {ENTROPY_TOKENS: microbatch.loss_mask.sum(), POSITIONS: torch.tensor(computed, device=self.device)}
        sums = {"loss": out.loss.detach(), ENTROPY: entropy.detach().sum(), **counted, **out.sums}
        # Megatron would divide by this token count; see the head of this file.
        return out.loss / denominator, torch.zeros((), dtype=torch.int, device=self.device), sums

    # -- scoring

    def token_logprobs(
        self, sequences: Sequence[TrainSequence | Elsewhere], model: Literal["policy", "reference"] = "policy", temperature: float = 1.0
    ) -> list[np.ndarray]:
        """The log-prob of every token of `loss_mask` given those before it, one array per sequence, with 0 for the other tokens; the same
        on every rank."""
        assert self.spec.head == LM
        with self._reference_weights() if model == "reference" else contextlib.nullcontext():
            return self._scored(sequences, temperature)

    def token_values(self, sequences: Sequence[TrainSequence | Elsewhere]) -> list[np.ndarray]:
        """What a scalar head makes of the tokens before every token of `loss_mask`, one array per sequence, with 0 for the other tokens;
        the same on every rank."""
        assert self.spec.head == SCALAR
        return self._scored(sequences, temperature=1.0)

    def _scored(self, sequences: Sequence[TrainSequence | Elsewhere], temperature: float) -> list[np.ndarray]:
        plan = self._plan(sequences)
        with torch.no_grad():
            scored = self._run(
                plan,
                partial(build, sequences=sequences, device=self.device, routing=self.routing),
                lambda microbatch, hidden, non_loss_data: self._outputs(hidden, microbatch, temperature)[0],
                forward_only=True,
            )
        lengths = [len(s) for s in sequences]
        flat = torch.zeros(sum(lengths), dtype=torch.float32)
        slices = flat.split(lengths)  # views
        if self.coordinate.tp == self.coordinate.cp == 0:
            for microbatch, outputs in zip(plan, scored):
                outputs = outputs.cpu()
                for start, index in zip(microbatch.boundaries, microbatch.indices):
                    slices[index][1:] = outputs[start : start + lengths[index] - 1]
        if self.topology.world_size > 1:
            flat = flat.to(self.device)
            dist.all_reduce(flat)
        return [part.numpy() for part in flat.cpu().split(lengths)]

    def hold_reference(self) -> None:
        """Keeps a frozen copy of the current weights, for the KL penalty."""
        self._reference = [p.detach().clone() for p in self._parameters()]

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._reference is None:
            raise RuntimeError("there is no reference model: call hold_reference() first")
        policy = [p.data for p in self._parameters()]
        try:
            for parameter, data in zip(self._parameters(), self._reference, strict=True):
                parameter.data = data
            yield
        finally:
            for parameter, data in zip(self._parameters(), policy, strict=True):
                parameter.data = data

    # -- shared by training and scoring

    def shares(self, sequences: Sequence[TrainSequence | Elsewhere]) -> list[list[int]]:
        """[dp][…] which sequences each data-parallel rank needs: in the place of the others it may be given Elsewhere."""
        return [[index for microbatch in plan for index in microbatch.indices] for plan in self._plans(sequences)]

    def summed(self, values: Sequence[float]) -> list[float]:
        """The sums over the data-parallel ranks, of which each has values of its own."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=data_group())
        return total.tolist()

    def _plan(self, sequences: Sequence[TrainSequence | Elsewhere]) -> list[MicrobatchPlan]:
        return self._plans(sequences)[self.coordinate.dp]

    def _plans(self, sequences: Sequence[TrainSequence | Elsewhere]) -> list[list[MicrobatchPlan]]:
        lengths, stages = [len(s) for s in sequences], self.topology.pp if self.topology.vpp > 1 else 1
        return plan_microbatches(lengths, self.topology.dp, self.max_tokens, self.alignment, self.squares, stages)

    def _outputs(self, hidden: torch.Tensor, microbatch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What a loss is taken of, and the entropies."""
        if self.spec.head == SCALAR:
            values = token_values(hidden[0], microbatch, sequence_parallel=self.sequence_parallel)
            return values, torch.full_like(values, math.nan)
        return token_logprobs(
            hidden[0],
            output_weight(self.chunks[-1]),
            microbatch,
            self.spec.vocab_size,
            temperature=temperature,
            chunk_tokens=self.logprob_chunk_tokens,
            sequence_parallel=self.sequence_parallel,
        )

    def _run(
        self, plan: list[MicrobatchPlan], make: Callable[[MicrobatchPlan], MicroBatch], head: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        """Runs Megatron's schedule over the microbatches and returns what `head` returned, on the last stage.

        `head(microbatch, hidden)` is given hidden states [1, t / cp, h], or [1, t / cp / tp, h] under sequence parallelism; h is 1 with a
        scalar head, which GPTModel has applied.
        """

        def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            microbatch = next(batches)
            inputs = context.cut(microbatch.inputs, microbatch.plan.boundaries, context_group())
            if self.replay is not None:
                assert microbatch.routing is not None
                self.replay.put(model, microbatch.routing, microbatch.plan.boundaries)
            # No ids or mask: rotary positions and causality come from the boundaries of the sequences.
            packed = packed_sequences(microbatch, self.topology.cp)
            return model(inputs[None], None, None, packed_seq_params=packed), partial(head, microbatch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[map(make, plan) for _ in self.ddp],  # chunks of a rank are at different microbatches
            model=[*self.ddp],
            num_microbatches=len(plan),
            # Not used with variable_seq_lengths, but the schedule multiplies them.
            seq_length=plan[0].positions,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    # -- weights

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters by Megatron's names with global layer numbers: the tensors of `layout`."""
        return {name: parameter.data for name, parameter in parameters_by_name(self.chunks).items()}

    def init_random(self, seed: int) -> None:
        """Sets random weights, which depend only on the seed, not on the topology."""
        hf_io.init_random(self.spec, self.layout, self.local_parameters(), seed)
        self.optimizer.reload_model_params()

    def load_hf(self, path: str, new_head: hf_io.NewHead | None = None) -> None:
        """Loads the weights of an HF checkpoint folder. Raises ConfigError for missing tensors and wrong shapes.

        `new_head`: what a scalar head begins with, of which the checkpoint has none; None: it has one."""
        hf_io.load_hf(self.spec, self.layout, self.local_parameters(), path, new_head, self.seed)
        self.optimizer.reload_model_params()

    def export_hf(self, path: str, hf_config_dir: str, files: Mapping[str, str] = {}) -> None:
        """Writes the weights as an HF checkpoint folder, and `files` (name → text) beside them. Configuration and tokenizer files come from
        `hf_config_dir`."""
        self.begin_export(path, hf_config_dir, files, beside=False).finish()

    def begin_export(self, path: str, hf_config_dir: str, files: Mapping[str, str] = {}, *, beside: bool) -> Writing[None]:
        """As `export_hf`, but complete when `finish` of the result has returned; `beside` training if so."""
        return hf_io.export_hf(self.spec, self.layout, self.local_parameters(), path, hf_config_dir, files=files, beside=beside)
