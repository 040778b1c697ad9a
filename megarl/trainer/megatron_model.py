"""A model on the trainer's ranks: its forward passes, what is made of their hidden states, its weights as checkpoints. MegatronTrainer
(step.py) adds gradients and an optimizer; without these a model is frozen: a teacher, or a reference of another shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.config.schema import TrainerConfig
from megarl.models.flops import flops_per_token
from megarl.models.routing import RoutingFormat
from megarl.models.spec import LM, SCALAR, ModelSpec
from megarl.reshard.layout import trainer_layout
from megarl.topology import TrainerTopology
from megarl.trainer import context, cpu_support, hf_io, parallel
from megarl.trainer.folders import Writing
from megarl.trainer.groups import context_group, data_group
from megarl.trainer.layer_spec import layer_spec
from megarl.trainer.logprobs import scored_rows, token_logprobs
from megarl.trainer.microbatch import Alignment, MicroBatch, MicrobatchPlan, build, plan_microbatches
from megarl.trainer.model import DTYPES, build_chunks, output_weight, parameters_by_name, transformer_config
from megarl.trainer.packing import packed_sequences
from megarl.trainer.pipeline import PlannedShapes
from megarl.trainer.routing_replay import RoutingReplay
from megarl.trainer.sending import sent
from megarl.trainer.supported import check_transformer_engine, passed_on
from megarl.trainer.values import token_values
from megarl.trainer.vendor_warnings import refuse_corruption
from megarl.types import Elsewhere, TrainSequence


class MegatronModel:
    """One rank's part of a model. Every method is collective: all ranks call it, with the same arguments.

    torch.distributed must be initialised with `topology.world_size` ranks, and, without CUDA, cpu_support.install()
    must have been called before this module was imported. Weights are zero until load_hf.
    """

    def __init__(self, spec: ModelSpec, topology: TrainerTopology, trainer: TrainerConfig, dtype: str, seed: int, *, timeout_s: float):
        """`timeout_s` bounds every wait of one rank for another, in each of Megatron's groups.

        Raises ConfigError for what cannot be built here, RuntimeError for a wrong number of processes.
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
        self.flops = flops = flops_per_token(spec, 0)  # without attention's part, which `squares` is
        # Attention's part of what a sequence costs (see plan_microbatches). A second model on these ranks needs the first one's: a rank has
        # the tokens of that one's share of a batch.
        self.squares = (flops_per_token(spec, 1) - flops) / flops
        parallel.initialize(topology, seed, timeout_s)
        self.config = transformer_config(spec, topology, self.dtype, trainer)
        self.sequence_parallel = bool(self.config.sequence_parallel)
        with passed_on("trainer.megatron", trainer.megatron):
            self.chunks = self._build_chunks()
        self.modules: list[torch.nn.Module] = [*self.chunks]  # what Megatron's schedules run
        self.routing: RoutingFormat | None = None
        self.replay: RoutingReplay | None = None

    def _build_chunks(self) -> list[GPTModel]:
        return build_chunks(self.spec, self.topology, self.config)

    # -- scoring

    def token_logprobs(self, sequences: Sequence[TrainSequence | Elsewhere], temperature: float = 1.0) -> list[np.ndarray]:
        """The log-prob of every token of `loss_mask` given those before it, one array per sequence, with 0 for the other tokens; the same
        on every rank."""
        assert self.spec.head == LM
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
            flat = sent(flat, self.device)
            dist.all_reduce(flat)
        return [part.numpy() for part in flat.cpu().split(lengths)]

    def scored_hidden(self, sequences: Sequence[TrainSequence | Elsewhere]) -> dict[tuple[int, ...], torch.Tensor]:
        """By the sequences of each microbatch, on the last pipeline stage: the hidden states [N, h] that predict the tokens of `loss_mask`,
        in the host's memory. A context rank has those of its positions."""
        plan = self._plan(sequences)
        with torch.no_grad():
            rows = self._run(
                plan,
                partial(build, sequences=sequences, device=self.device, routing=self.routing),
                lambda microbatch, hidden, non_loss_data: scored_rows(hidden[0], microbatch, self.sequence_parallel).rows.cpu(),
                forward_only=True,
            )
        return dict(zip((microbatch.indices for microbatch in plan), rows)) if rows else {}

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
            scored_rows(hidden[0], microbatch, self.sequence_parallel),
            output_weight(self.chunks[-1]),
            microbatch,
            self.spec.vocab_size,
            temperature=temperature,
            chunk_tokens=self.logprob_chunk_tokens,
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

        known: dict[str, Any] = {}
        if self.topology.pp > 1 and self.topology.vpp == 1:
            split = self.topology.cp * (self.topology.tp if self.sequence_parallel else 1)
            communicator = PlannedShapes(self.config, plan, split)
            known = {"p2p_communicator": communicator, "pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[map(make, plan) for _ in self.modules],  # chunks of a rank are at different microbatches
            model=[*self.modules],
            num_microbatches=len(plan),
            # Not used, but the schedule multiplies them.
            seq_length=plan[0].positions,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **known,
        )

    # -- weights

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters by Megatron's names with global layer numbers: the tensors of `layout`."""
        return {name: parameter.data for name, parameter in parameters_by_name(self.chunks).items()}

    merged_parameters = local_parameters  # as engines and exports get them

    def load_hf(self, path: str, new_head: hf_io.NewHead | None = None) -> None:
        """Loads the weights of an HF checkpoint folder. Raises ConfigError for missing tensors and wrong shapes.

        `new_head`: what a scalar head begins with, of which the checkpoint has none; None: it has one."""
        hf_io.load_hf(self.spec, self.layout, self.local_parameters(), path, new_head, self.seed)

    def export_hf(self, path: str, hf_config_dir: str, files: Mapping[str, str] = {}) -> None:
        """Writes the weights as an HF checkpoint folder, and `files` (name → text) beside them. Configuration and tokenizer files come from
        `hf_config_dir`."""
        self.begin_export(path, hf_config_dir, files, beside=False).finish()

    def begin_export(self, path: str, hf_config_dir: str, files: Mapping[str, str] = {}, *, beside: bool) -> Writing[None]:
        """As `export_hf`, but complete when `finish` of the result has returned; `beside` training if so."""
        return hf_io.export_hf(self.spec, self.layout, self.merged_parameters(), path, hf_config_dir, files=files, beside=beside)
