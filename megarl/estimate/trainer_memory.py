"""Bytes of memory on the fullest rank of each pipeline stage of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.schema import TrainerConfig
from megarl.estimate import activations
from megarl.estimate.hardware import GIB, Gpu
from megarl.estimate.sizes import Held, adapters_held, stage_layers, trained_held, trainer_held
from megarl.models import ModelSpec
from megarl.models.adapters import Lora
from megarl.models.parameters import padded_vocab_size
from megarl.reshard.kinds import ITEM_BYTES
from megarl.reshard.schedule import DEFAULT_WAVE_BYTES

GRADIENT_BYTES = 4  # Megatron's buffer, grad_reduce_in_fp32
# Adam's state: two fp32 moments, and the fp32 master weights unless the weights themselves are fp32.
OPTIMIZER_BYTES = {"bfloat16": 12, "float32": 8}
SAVED_BYTES = 12  # per parameter, whatever its dtype in training
# Of a logit of a chunk (kernels/chunked_logprobs.py): the logit in fp32 and its gradient, which takes the logit's own place in fp32.
LOGIT_BYTES = {"bfloat16": 4 + 2, "float32": 4}
DIVERGENCE_BYTES = 12  # of a logit of a chunk for a teacher's divergence (kernels/chunked_kl.py): the policy's, the teacher's, a product
FRAGMENTATION = 0.05  # share of what is allocated anew for every microbatch


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one rank."""

    weights: float  # with adapters also these, and a copy of the weights that they are merged into
    gradients: float
    optimizer: float
    reference: float  # frozen copy of the weights, if the algorithm needs one
    shadow: float  # what was sent last, with weights.delta_shadow=device
    frozen: float  # the weights of frozen models beside the policy; their activations and logits come after the policy's, and are no more
    critic: float  # its weights, gradients and optimizer; its activations come after the policy's, and are no more
    activations: float
    logits: float  # those of one chunk, and the hidden states that they are made from
    buffers: float  # FSDP's gathered layers, staging of the weight update, fragmentation
    runtime: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def trainer_memory(
    spec: ModelSpec,
    trainer: TrainerConfig,
    dtype: str,
    gpu: Gpu,
    *,
    reference: bool = False,
    critic: ModelSpec | None = None,
    frozen: Sequence[ModelSpec] = (),
    divergence: bool = False,
    lora: Lora | None = None,
    merges: bool = True,
    shadow: float = 0.0,
) -> TrainerMemory:
    """Memory of the fullest stage. Raises ConfigError if the sizes do not divide the model."""
    others = {"reference": reference, "critic": critic, "frozen": frozen, "divergence": divergence, "lora": lora, "merges": merges}
    stages = stage_memory(spec, trainer, dtype, gpu, **others, shadow=shadow)
    return max(stages, key=lambda memory: memory.total)


def stage_memory(
    spec: ModelSpec,
    trainer: TrainerConfig,
    dtype: str,
    gpu: Gpu,
    *,
    reference: bool = False,
    critic: ModelSpec | None = None,
    frozen: Sequence[ModelSpec] = (),
    divergence: bool = False,
    lora: Lora | None = None,
    merges: bool = True,
    shadow: float = 0.0,
) -> list[TrainerMemory]:
    """[pp] memory of the fullest rank of each stage. `merges`: whether it keeps weights with the adapters of `lora` merged."""
    item = ITEM_BYTES[dtype]
    of_critic = [
        (item + GRADIENT_BYTES) * held.total + optimizer_bytes(held, trainer, dtype)
        for held in (trainer_held(critic, trainer, dtype) if critic else ())
    ]
    of_frozen = [trainer_held(model, trainer, dtype) for model in frozen]
    tokens = trainer.max_tokens_per_microbatch / trainer.cp
    trained, found = trained_held(spec, trainer, dtype, lora), []
    adapted = adapters_held(spec, trainer, dtype, lora) if lora else []
    beside = [adapters.total + merges * merged.total for adapters, merged in adapted] or [0] * trainer.pp
    for stage, (held, layers) in enumerate(zip(trainer_held(spec, trainer, dtype), stage_layers(spec, trainer), strict=True)):
        kept = item * activation_elements(spec, trainer, stage, *layers) * tokens
        logits = logprob_bytes(spec, trainer, dtype, divergence) if stage == trainer.pp - 1 else 0.0
        found.append(
            TrainerMemory(
                weights=item * (held.total + beside[stage]),
                gradients=GRADIENT_BYTES * trained[stage].total,
                optimizer=optimizer_bytes(trained[stage], trainer, dtype),
                reference=item * held.total if reference and lora is None else 0.0,  # adapters are switched off
                shadow=shadow,
                frozen=item * sum(stages[stage].total for stages in of_frozen),
                critic=of_critic[stage] if of_critic else 0.0,
                activations=kept,
                logits=logits,
                buffers=2 * DEFAULT_WAVE_BYTES + FRAGMENTATION * (kept + logits),
                runtime=gpu.runtime_gib * GIB,
            )
        )
    return found


def logprob_bytes(spec: ModelSpec, trainer: TrainerConfig, dtype: str, divergence: bool = False) -> float:
    """On the last stage: a microbatch's hidden states of whole sequences and their gradient, and the larger of a chunk's logits and the
    gradient that PyTorch asks for of the output layer: zeros, since the true one is in Megatron's buffer."""
    item, tokens = ITEM_BYTES[dtype], trainer.max_tokens_per_microbatch / trainer.cp
    vocab = padded_vocab_size(spec.vocab_size, trainer.tp) / trainer.tp
    chunk = (DIVERGENCE_BYTES if divergence else LOGIT_BYTES[dtype]) * min(tokens, trainer.logprob_chunk_tokens) * vocab
    return 2 * item * tokens * spec.hidden_size + max(chunk, item * vocab * spec.hidden_size)


def optimizer_bytes(held: Held, trainer: TrainerConfig, dtype: str) -> float:
    """Adam's state, which zero=1 splits over the ranks with the same weights."""
    if not trainer.zero:
        return OPTIMIZER_BYTES[dtype] * held.total
    return OPTIMIZER_BYTES[dtype] * _shared(held, trainer)


def saving_bytes(spec: ModelSpec, trainer: TrainerConfig, dtype: str, lora: Lora | None = None) -> float:
    """The largest share of a checkpoint, fp32 master weights and both moments, which a rank copies to its host's memory and writes."""
    return max(SAVED_BYTES * _shared(held, trainer) for held in trained_held(spec, trainer, dtype, lora))


def _shared(held: Held, trainer: TrainerConfig) -> float:
    """Elements of one rank where those that hold the same ones share them out."""
    expert_dp = trainer.tp * trainer.cp * trainer.dp / (trainer.ep * trainer.etp)
    return held.dense / (trainer.dp * trainer.cp) + held.expert / expert_dp


def activation_elements(spec: ModelSpec, trainer: TrainerConfig, stage: int, dense: int, routed: int) -> float:
    """Elements per token of a microbatch, summed over all microbatches in flight when the stage is fullest.

    `dense`, `routed`: how many dense layers and layers with experts the stage has.
    """
    layers = [(count, activations.of_layer(spec, trainer, experts)) for count, experts in ((dense, False), (routed, True)) if count]
    in_flight = microbatches_in_flight(trainer, stage)
    if trainer.recompute:  # one layer at a time is recomputed for its gradient
        working = max((layer.kept + layer.workspace for _, layer in layers), default=0.0)
        return in_flight * sum(count * layer.boundary for count, layer in layers) + working
    workspace = max((layer.workspace for _, layer in layers), default=0.0)
    return in_flight * sum(count * layer.kept for count, layer in layers) + workspace


def microbatches_in_flight(trainer: TrainerConfig, stage: int) -> float:
    """1F1B: pp - stage. Interleaved: chunks in flight / chunks per rank (Megatron's get_pp_rank_microbatches, warm-up plus one)."""
    if trainer.vpp == 1:
        return trainer.pp - stage
    chunks = 2 * (trainer.pp - stage - 1) + (trainer.vpp - 1) * trainer.pp + 1
    return chunks / trainer.vpp
