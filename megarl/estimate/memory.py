"""Bytes of memory on the fullest ranks of trainer and engines, and the numbers behind them: a
step's sequences, and each rank's weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megarl.algorithms.recipes import needs_reference, recipe_of
from megarl.base.geometry import STATES_PER_REQUEST, GeneratorTopology, TrainerTopology
from megarl.config.algorithms import VTRACE
from megarl.config.schema import TRAIN, GeneratorConfig, PlanConfig, RunConfig, TrainerConfig
from megarl.estimate.hardware import GIB, Gpu
from megarl.models import ModelSpec
from megarl.models.parameters import FIRST, LAYER, padded_vocab_size
from megarl.plan.topologies import trainer_topology
from megarl.reshard.layout import (
    ITEM_BYTES,
    Layout,
    generator_layout,
    stage_of_layer,
    trainer_layout,
)
from megarl.reshard.map import ReshardMap
from megarl.reshard.schedule import DEFAULT_WAVE_BYTES, landings


def scoring_passes(config: RunConfig) -> int:
    """The number of forward passes over a batch that do not train.

    The reference model makes one. The policy makes one if there are several optimizer steps, a
    penalty in the reward, or a critic's targets by V-trace. It makes one before each step if the loss is over several responses. A
    critic's passes are counted with the critic.
    """
    algorithm = config.algorithm
    proximal = (
        algorithm.kl == "reward"
        or algorithm.critic_targets == VTRACE
        or (algorithm.ratio != "behavior" and config.trainer.optimizer_steps > 1)
    )
    groups = config.trainer.epochs if recipe_of(algorithm).beta else 0
    return int(needs_reference(algorithm) is not None) + int(proximal) + groups


def dropped_share(config: RunConfig) -> float | None:
    """The share of generated prompts that are not trained on, or None if it is unknown."""
    return config.plan.dropped_share if config.rollout.dynamic_sampling else 0.0


@dataclass(frozen=True)
class Workload:
    """The sequences of a step. Response lengths are exponential, but at most
    `max_response_tokens`.

    `response_tokens` is the mean after this cut.
    """

    sequences: int
    prompts: int  # each is prefilled once on each engine that gets it (prefix caching)
    prompt_tokens: float
    response_tokens: float
    max_response_tokens: float

    @classmethod
    def of(cls, config: RunConfig) -> Workload:
        rollout = config.rollout
        plan = config.plan
        return cls(
            sequences=rollout.prompts_per_step * rollout.n,
            prompts=rollout.prompts_per_step,
            prompt_tokens=plan.mean_prompt_tokens,
            response_tokens=min(plan.response_tokens or rollout.max_tokens / 2, rollout.max_tokens),
            max_response_tokens=rollout.max_tokens,
        )

    @classmethod
    def generated(cls, config: RunConfig) -> Workload:
        """The generated sequences, including those that dynamic sampling drops if their share is
        known (plan.dropped_share).
        """
        trained = cls.of(config)
        share = dropped_share(config) or 0.0
        enlarged = {
            name: math.ceil(getattr(trained, name) / (1 - share))
            for name in ("sequences", "prompts")
        }
        return replace(trained, **enlarged)

    @property
    def tokens_per_sequence(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        return self.sequences * self.tokens_per_sequence

    @property
    def longest(self) -> float:
        return self.prompt_tokens + self.max_response_tokens

    @cached_property
    def mean_square(self) -> float:
        """E[R^2] for the length R of a response after the cut: the integral of 2 t times the share
        of responses longer than t.
        """
        longest = self.max_response_tokens
        scale = self.scale
        if math.isinf(scale):
            return longest * longest
        return 2 * scale * (scale - (scale + longest) * math.exp(-longest / scale))

    @property
    def tokens_per_square(self) -> float:
        """E[L^2] / E[L] for the length L of a sequence.

        Attention's work on a batch is as if all sequences had this length.
        """
        square = (
            self.prompt_tokens**2 + 2 * self.prompt_tokens * self.response_tokens + self.mean_square
        )
        return square / self.tokens_per_sequence

    @property
    def decoded(self) -> float:
        """The mean number of tokens that a response has so far, over all decoding steps of all
        responses: E[R^2] / 2 E[R]. It is half of the mean length if all responses are equally long.
        If lengths are exponential, it is the whole mean, because most steps are spent on long
        responses.
        """
        return self.mean_square / (2 * self.response_tokens)

    @cached_property
    def scale(self) -> float:
        """The exponential's mean before the cut, which solves mean = scale (1 - exp(-max / scale)).

        Infinite if all responses reach the cut.
        """
        longest = self.max_response_tokens
        mean = self.response_tokens
        if mean >= 0.999 * longest:
            return math.inf
        low = mean
        high = 1e4 * longest
        for _ in range(60):
            middle = math.sqrt(low * high)
            if middle * -math.expm1(-longest / middle) < mean:
                low = middle
            else:
                high = middle
        return low

    def survivors(self, tokens: float) -> float:
        """The share of responses longer than `tokens`."""
        return math.exp(-tokens / self.scale) if tokens < self.max_response_tokens else 0.0

    @cached_property
    def straggler(self) -> float:
        """The expected length of the longest response of a step."""
        return min(self.max_response_tokens, self.scale * (math.log(self.sequences) + 0.5772))


@dataclass(frozen=True)
class WeightElements:
    """Elements of weights on one rank, from the same layouts as the reshard map.

    Experts count separately, because they have their own mesh.
    """

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class GeneratorWeights:
    """Bytes on one engine rank.

    `streamed`: non-expert weights that every decoding step reads, without the embedding, from which
    it reads only some rows.
    """

    streamed: int
    expert: int
    embedding: int

    @property
    def total(self) -> int:
        return self.streamed + self.expert + self.embedding


def stage_elements(layout: Layout) -> list[WeightElements]:
    """Elements in the memory of the fullest rank of every pipeline stage."""
    stages = layout.kinds[0].ranks.shape[0]
    elements = np.zeros((stages, 2), dtype=np.int64)
    for kind in layout.kinds:
        column = int(kind.shards[0].experts is not None)
        elements[:, column] += np.bincount(kind.stages, minlength=stages) * max(
            math.prod(shard.shape) for shard in kind.shards
        )
    return [WeightElements(int(dense), int(expert)) for dense, expert in elements]


def trainer_elements(spec: ModelSpec, trainer: TrainerConfig, dtype: str) -> list[WeightElements]:
    """Elements on the fullest rank of each pipeline stage; with zero=3, those that its
    data-parallel ranks share.

    Raises ConfigError if the sizes do not divide the model.
    """
    return _trainer_elements(shape_of(spec), one_replica(trainer_topology(trainer)), dtype)


def held_elements(elements: WeightElements, trainer: TrainerConfig) -> float:
    """The elements of a model's weights that one rank keeps."""
    return shared_elements(elements, trainer) if trainer.zero == 3 else elements.total


def gathered_bytes(spec: ModelSpec, trainer: TrainerConfig, dtype: str, stage: int) -> float:
    """What FSDP2 holds at most beside the shards (trainer.fully_sharded).

    During a pass, what is outside of the layers. And the larger of: two gathered layers, the buffer
    in which the second arrives, one layer's gradients and their copy in fp32 for the
    reduce-scatter; or these gradients and their copy of what is outside of the layers.
    """
    if trainer.zero < 3:
        return 0.0
    layer, rest = _layer_and_rest(shape_of(spec), one_replica(trainer_topology(trainer)), dtype)[
        stage
    ]
    item = ITEM_BYTES[dtype]
    reduced = item + GRADIENT_BYTES
    return item * rest + max((3 * item + reduced) * layer, reduced * rest)


@functools.lru_cache(maxsize=4096)
def _layer_and_rest(
    spec: ModelSpec, topology: TrainerTopology, dtype: str
) -> list[tuple[int, int]]:
    """[pp] (elements of the largest layer, of all that is outside of the layers) on one rank."""
    layout = trainer_layout(spec, topology, dtype)
    of_layers = np.zeros((topology.pp, layout.num_layers), dtype=np.int64)
    rest = np.zeros(topology.pp, dtype=np.int64)
    for kind in layout.kinds:
        size = max(math.prod(shard.shape) for shard in kind.shards)
        if kind.place == LAYER:
            of_layers[kind.stages, list(kind.layers or ())] += size
        else:
            rest[kind.stages] += size
    return list(zip(of_layers.max(axis=1).tolist(), rest.tolist()))


@dataclass(frozen=True)
class AdapterElements:
    """What is trained beside a frozen model: elements on the fullest rank of each pipeline
    stage.
    """

    trained: Sequence[WeightElements]
    additional: Sequence[int]  # elements of trained tensors, and of copies of the model's weights


def trained_elements(spec: ModelSpec, trainer: TrainerConfig, dtype: str) -> list[WeightElements]:
    """Elements with a gradient and an optimizer on the fullest rank of each pipeline stage, if the
    model is not frozen.
    """
    if trainer.mtp != TRAIN:
        spec = replace(spec, mtp_layers=0)
    return trainer_elements(spec, trainer, dtype)


def generator_weights(spec: ModelSpec, generator: GeneratorConfig, dtype: str) -> GeneratorWeights:
    """Bytes on the fullest rank, including scales.

    Raises ConfigError if the sizes do not divide the model.
    """
    return _generator_weights(
        shape_of(spec),
        replace(generator.topology, engines=1),
        generator.quantization,
        dtype,
    )


def landing_bytes(
    spec: ModelSpec, trainer: TrainerConfig, generator: GeneratorConfig, dtype: str
) -> int:
    """Memory that an engine rank keeps beside its weights for boxes of short rows (schedule.lands).

    It is needed if trainer ranks of other nodes write to the rank. 0 if the trainer cuts no finer
    than the engine.
    """
    topology = one_replica(
        replace(
            trainer_topology(trainer), pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None
        )
    )
    engine = replace(generator.topology, engines=1)
    # All later layers are equal, or repeat in a period. With pp = 1 they are on one rank.
    period = spec.period
    dense = spec.experts.first_layer if spec.experts else 0
    shapes = (shape_of(spec).cut(dense + periods * period) for periods in (1, 2))
    one_period, two_periods = (
        _landing_bytes(shape, topology, engine, generator.quantization, dtype) for shape in shapes
    )
    return one_period + (spec.num_layers - dense - period) * (two_periods - one_period) // period


def shadow_bytes(
    spec: ModelSpec, trainer: TrainerConfig, generator: GeneratorConfig, dtype: str
) -> float:
    """Bytes that the fullest trainer rank keeps to find changes (weights.delta): all its weights in
    the engines' precision. If there are few engines, replicas of the trainer divide the sending,
    and each keeps only its part.
    """
    topology = trainer_topology(trainer)
    # replicated tensors count for each rank
    engine_bytes = generator.tp * generator_weights(spec, generator, dtype).total
    stages = trainer_elements(spec, trainer, dtype)
    elements = topology.tp * sum(stage.total for stage in stages)
    fullest_rank_bytes = engine_bytes * max(stage.total for stage in stages) / elements
    return min(fullest_rank_bytes, engine_bytes * generator.engines / topology.world_size)


def largest_stage(spec: ModelSpec, trainer: TrainerConfig) -> int:
    """The number of layers of the largest pipeline stage."""
    return max(map(sum, stage_layers(spec, trainer)))


def stage_layers(spec: ModelSpec, trainer: TrainerConfig) -> tuple[tuple[int, int], ...]:
    """(dense layers, expert layers) of each pipeline stage."""
    t = trainer
    return _stage_layers(shape_of(spec), t.pp, t.vpp, t.first_stage_layers, t.last_stage_layers)


def one_replica(topology: TrainerTopology) -> TrainerTopology:
    """The topology with as few replicas as the experts' mesh allows. All replicas hold the same, or
    with zero=3 share the same.
    """
    ranks = topology.tp * topology.cp
    dp = math.lcm(topology.ep * topology.etp, ranks) // ranks
    return replace(topology, dp=dp, zero=min(topology.zero, 1))


# A search needs the same sizes many times, so these are cached.
@functools.lru_cache(maxsize=4096)
def _trainer_elements(
    spec: ModelSpec, topology: TrainerTopology, dtype: str
) -> list[WeightElements]:
    return stage_elements(trainer_layout(spec, topology, dtype))


@functools.lru_cache(maxsize=4096)
def _stage_layers(
    spec: ModelSpec,
    pp: int,
    vpp: int,
    first_stage_layers: int | None,
    last_stage_layers: int | None,
) -> tuple[tuple[int, int], ...]:
    stages = stage_of_layer(
        spec.num_layers,
        TrainerTopology(
            pp=pp,
            vpp=vpp,
            first_stage_layers=first_stage_layers,
            last_stage_layers=last_stage_layers,
        ),
    )
    dense = spec.dense_layers
    return tuple((stages[:dense].count(stage), stages[dense:].count(stage)) for stage in range(pp))


@functools.lru_cache(maxsize=4096)
def _generator_weights(
    spec: ModelSpec, topology: GeneratorTopology, quantization: str | None, dtype: str
) -> GeneratorWeights:
    layout = generator_layout(spec, topology, dtype, quantization=quantization)
    embedding = expert = streamed = 0
    for kind in layout.kinds:
        size = kind.instances * max(
            math.prod(shard.shape) * ITEM_BYTES[shard.dtype] for shard in kind.shards
        )
        if kind.shards[0].experts is not None:
            expert += size
        elif kind.place == FIRST and not spec.tie_word_embeddings:
            embedding += size
        else:
            streamed += size
    return GeneratorWeights(streamed=streamed, expert=expert, embedding=embedding)


@functools.lru_cache(maxsize=4096)
def _landing_bytes(
    spec: ModelSpec,
    trainer: TrainerTopology,
    engine: GeneratorTopology,
    quantization: str | None,
    dtype: str,
) -> int:
    map = ReshardMap.build(
        trainer_layout(spec, trainer, dtype),
        generator_layout(spec, engine, dtype, quantization=quantization),
    )
    return sum(copy.bytes for copy in landings(map, 0))


def rank_bytes(layout: Layout) -> list[int]:
    """[world_size] bytes of weights on each rank."""
    sizes = np.zeros(layout.world_size, dtype=np.int64)
    for kind in layout.kinds:
        times = np.bincount(kind.stages, minlength=kind.ranks.shape[0])  # instances on each stage
        for shard, tensor in enumerate(kind.shards):
            np.add.at(
                sizes,
                kind.ranks[:, shard],
                times[:, None] * math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype],
            )
    return sizes.tolist()


def shape_of(spec: ModelSpec) -> ModelSpec:
    """The spec without the scaling of positions, which is not hashable and does not change
    sizes.
    """
    return spec if spec.rope_scaling is None else replace(spec, rope_scaling=None)


@dataclass(frozen=True)
class LayerActivations:
    """Elements per token of a microbatch that one trainer rank keeps of one layer.

    From Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198), section 4,
    without dropout, and with fused attention (no score matrix) and fused SwiGLU, like the trainer
    on GPUs. A trainer on CPUs fuses neither norms, rotary embeddings nor SwiGLU, and also keeps the
    results of their parts (`unfused`).
    """

    boundary: float  # the layer's input; full recomputation keeps only this
    saved: float  # what the backward pass needs, including the boundary
    workspace: float  # the most gradients of one layer that exist at once


def layer_activations(
    spec: ModelSpec, trainer: TrainerConfig, experts: bool, unfused: int = 0
) -> LayerActivations:
    """`experts`: whether the layer has routed experts.

    Tokens are assumed to be spread evenly over experts. `unfused`: 0 on GPUs; on CPUs the bytes of
    an element.
    """
    tp = trainer.tp
    h = spec.hidden_size
    split = tp if trainer.sequence_parallel else 1
    # gate, up and their product; unfused also the gate before its activation, and a copy
    parts = 5 if unfused else 3
    if experts:
        assert spec.experts
        routed = spec.experts.activation_elements(spec, trainer.etp, parts) / split
        mlp = routed + parts * spec.experts.shared_size / tp
        chosen_rows = spec.experts.intermediate_size * spec.experts.per_token
        widest = 2 * chosen_rows / trainer.etp / split
    else:
        mlp = parts * spec.intermediate_size / tp
        widest = 2 * spec.intermediate_size / tp
    # inputs and outputs of both; unfused, two more, all but the inputs in fp32
    norms = 2 + 4 * 4 / unfused if unfused else 4
    mixers = sum(len(layers) * mixer.activation_elements(spec, tp) for mixer, layers in spec.mixers)
    activations = norms * h / split + mixers / spec.num_layers + mlp
    if unfused:
        activations += spec.attention.unfused_elements(spec, tp)
    gathered = h if trainer.sequence_parallel else 0
    return LayerActivations(
        boundary=h / split, saved=activations, workspace=2 * widest + 2 * h / split + gathered
    )


GRADIENT_BYTES = 4  # Megatron's buffer, grad_reduce_in_fp32
# Adam's state: two fp32 moments, and the fp32 master weights unless the weights themselves are
# fp32.
OPTIMIZER_BYTES = {"bfloat16": 12, "float32": 8}
OFFLOADED_BYTES = 16  # per parameter: fp32 master, moments, and gradient
SAVED_BYTES = 12  # per parameter, independent of its dtype in training
# Per logit of a chunk (kernels/chunked_logprobs.py): the logit in fp32, and its gradient, which in
# fp32 replaces the logit.
LOGIT_BYTES = {"bfloat16": 4 + 2, "float32": 4}
# per logit of a chunk for a teacher's divergence (kernels/chunked_kl.py): the policy's, the
# teacher's, a product
DIVERGENCE_BYTES = 12
FRAGMENTATION = 0.05  # share of the memory that is allocated again for every microbatch


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one rank."""

    weights: float  # with LoRA also the adapters, and a copy of the weights for merging
    gradients: float
    optimizer: float
    reference: float  # frozen copy of the weights, if the algorithm needs one
    shadow: float  # the last weights sent, with weights.delta_shadow=device
    # weights of frozen models; their activations and logits come after the policy's, and are not
    # larger
    frozen: float
    # its weights, gradients and optimizer; its activations come after the policy's, and are not
    # larger
    critic: float
    activations: float
    logits: float  # those of one chunk, and the hidden states from which they are computed
    buffers: float  # FSDP's gathered layers, staging of the weight update, fragmentation
    runtime: float
    # on a CPU, the copy that is written during training; a GPU's is in its node's memory
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def trainer_memory(
    spec: ModelSpec,
    trainer: TrainerConfig,
    dtype: str,
    gpu: Gpu,
    **other_models: Any,
) -> TrainerMemory:
    """Memory of the fullest stage, with arguments as for `stage_memory`.

    Raises ConfigError if the sizes do not divide the model.
    """
    stages = stage_memory(spec, trainer, dtype, gpu, **other_models)
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
    adapter_elements: AdapterElements | None = None,
    shadow: float = 0.0,
) -> list[TrainerMemory]:
    """[pp] memory of the fullest rank of each stage.

    `adapter_elements`: what is trained instead of the model. The model is then also the reference.
    """
    item = ITEM_BYTES[dtype]
    critic_bytes = [0.0] * trainer.pp
    if critic:
        critic_bytes = [
            (item + GRADIENT_BYTES) * held_elements(elements, trainer)
            + optimizer_bytes(elements, trainer, dtype)
            for elements in trainer_elements(critic, trainer, dtype)
        ]
    frozen_elements = [trainer_elements(model, trainer, dtype) for model in frozen]
    tokens = trainer.max_tokens_per_microbatch / trainer.cp
    if adapter_elements:
        trained = adapter_elements.trained
        additional = list(adapter_elements.additional)
    else:
        trained = trained_elements(spec, trainer, dtype)
        additional = [0] * trainer.pp
    unfused = item if gpu.name == "cpu" else 0
    memories = []
    for stage, (elements, layers) in enumerate(
        zip(trainer_elements(spec, trainer, dtype), stage_layers(spec, trainer), strict=True)
    ):
        elements_per_token = activation_elements(spec, trainer, stage, *layers, unfused=unfused)
        activations = item * elements_per_token * tokens
        held = held_elements(elements, trainer)
        weights = held + additional[stage]
        gradients = trained[stage].total
        if adapter_elements is None:
            gradients = held_elements(trained[stage], trainer)
        gathered = gathered_bytes(spec, trainer, dtype, stage)
        frozen_weights = sum(held_elements(stages[stage], trainer) for stages in frozen_elements)
        logits = 0.0
        if stage == trainer.pp - 1:
            if divergence and trainer.zero == 3:  # whole output layers (teachers.ModelScores)
                frozen_weights += sum(output_elements(model, trainer) for model in frozen)
            weights += embedding_copy(spec, trainer)
            logits = logprob_bytes(spec, trainer, dtype, divergence)
        memories.append(
            TrainerMemory(
                weights=item * weights,
                gradients=GRADIENT_BYTES * gradients,
                optimizer=optimizer_bytes(trained[stage], trainer, dtype),
                reference=item * held if reference and adapter_elements is None else 0.0,
                shadow=shadow,
                frozen=item * frozen_weights,
                critic=critic_bytes[stage],
                activations=activations,
                logits=logits,
                buffers=gathered + 2 * DEFAULT_WAVE_BYTES + FRAGMENTATION * (activations + logits),
                runtime=gpu.runtime_gib * GIB,
            )
        )
    return memories


def embedding_copy(spec: ModelSpec, trainer: TrainerConfig) -> float:
    """Elements of the embedding that the last stage keeps to train the layer for multi-token
    prediction.
    """
    is_copied = spec.mtp_layers and trainer.mtp == TRAIN and trainer.pp > 1
    if not is_copied:
        return 0.0
    return output_elements(spec, trainer)


def output_elements(spec: ModelSpec, trainer: TrainerConfig) -> float:
    """Elements of the output layer, or of the embedding, on one tensor rank."""
    return padded_vocab_size(spec.vocab_size, trainer.tp) / trainer.tp * spec.hidden_size


def logprob_bytes(
    spec: ModelSpec, trainer: TrainerConfig, dtype: str, divergence: bool = False
) -> float:
    """On the last stage: a microbatch's hidden states of whole sequences with their gradient, and
    the larger of a chunk's logits and the output layer's gradient that PyTorch requires. The latter
    is zeros, because the true one is in Megatron's buffer.
    """
    item = ITEM_BYTES[dtype]
    tokens = trainer.max_tokens_per_microbatch / trainer.cp
    vocab = padded_vocab_size(spec.vocab_size, trainer.tp) / trainer.tp
    bytes_per_logit = DIVERGENCE_BYTES if divergence else LOGIT_BYTES[dtype]
    chunk = bytes_per_logit * min(tokens, trainer.logprob_chunk_tokens) * vocab
    return 2 * item * tokens * spec.hidden_size + max(chunk, item * vocab * spec.hidden_size)


def optimizer_bytes(elements: WeightElements, trainer: TrainerConfig, dtype: str) -> float:
    """Bytes of Adam's state on a GPU.

    Unless zero=0, it is split over the ranks with the same weights.
    """
    if trainer.optimizer.offload:
        return 0.0
    if not trainer.zero:
        return OPTIMIZER_BYTES[dtype] * elements.total
    return OPTIMIZER_BYTES[dtype] * shared_elements(elements, trainer)


def offloaded_bytes(trained: Iterable[WeightElements], trainer: TrainerConfig) -> float:
    """Bytes of host memory of the largest rank's optimizer, if it is there."""
    if not trainer.optimizer.offload:
        return 0.0
    return max(OFFLOADED_BYTES * shared_elements(elements, trainer) for elements in trained)


def saving_bytes(trained: Iterable[WeightElements], trainer: TrainerConfig) -> float:
    """The largest part of a checkpoint (fp32 master weights and both moments) that one rank copies
    to host memory and writes.
    """
    return max(SAVED_BYTES * shared_elements(elements, trainer) for elements in trained)


def shared_elements(elements: WeightElements, trainer: TrainerConfig) -> float:
    """Elements of one rank, if ranks with the same elements divide these among themselves."""
    expert_dp = trainer.tp * trainer.cp * trainer.dp / (trainer.ep * trainer.etp)
    return elements.dense / (trainer.dp * trainer.cp) + elements.expert / expert_dp


def activation_elements(
    spec: ModelSpec, trainer: TrainerConfig, stage: int, dense: int, routed: int, unfused: int = 0
) -> float:
    """Elements per token of a microbatch, summed over all microbatches in flight when the stage is
    fullest.

    `dense`, `routed`: numbers of dense layers and of layers with experts in the stage. `unfused`:
    as in `layer_activations`.
    """
    layers = [
        (count, layer_activations(spec, trainer, experts, unfused))
        for count, experts in ((dense, False), (routed, True))
        if count
    ]
    in_flight = microbatches_in_flight(trainer, stage)
    if trainer.recompute:  # layers are recomputed one at a time for their gradients
        working = max((layer.saved + layer.workspace for _, layer in layers), default=0.0)
        return in_flight * sum(count * layer.boundary for count, layer in layers) + working
    workspace = max((layer.workspace for _, layer in layers), default=0.0)
    return in_flight * sum(count * layer.saved for count, layer in layers) + workspace


def microbatches_in_flight(trainer: TrainerConfig, stage: int) -> float:
    """1F1B: pp - stage.

    Interleaved: chunks in flight / chunks per rank (Megatron's get_pp_rank_microbatches, warm-up
    plus one).
    """
    if trainer.vpp == 1:
        return trainer.pp - stage
    chunks = 2 * (trainer.pp - stage - 1) + (trainer.vpp - 1) * trainer.pp + 1
    return chunks / trainer.vpp


# (GiB, SGLang's default on GPUs with less): memory_hook.py
CHUNKED_PREFILL_TOKENS = ((60, 4096), (160, 8192), (math.inf, 16384))
CUDA_GRAPH_BYTES = 2 << 20  # per unit of batch size: sglang/srt/arg_groups/memory_hook.py
PAGE_SLACK = 1.02  # on average, a sequence's last page is half empty
# a run ignores plan.prompt_tokens, so what is set for it must not depend on that
UNKNOWN_PROMPT = PlanConfig().mean_prompt_tokens


@dataclass(frozen=True)
class BesideCache:
    """Bytes in a GPU's memory beside the weights and the KV cache of an engine."""

    landing: float = 0.0  # landing_bytes if `may_land`
    pool: float = 0.0  # of adapters
    occupied: float = 0.0  # by another process


NOTHING = BesideCache()


@dataclass(frozen=True)
class GeneratorMemory:
    """Bytes on one rank. SGLang has weights and KV cache inside mem_fraction, all else outside.

    `kv_cache` holds `kv_tokens`, and `states` those of linear attention for max_concurrency
    requests.
    """

    weights: float
    kv_cache: float
    states: float
    landing: float  # for weights from other nodes, before they are spread
    graphs: float
    # of a prefill chunk, the logits of a full batch, and the table with the positions of requests'
    # tokens in the cache
    activations: float
    runtime: float

    @property
    def static(self) -> float:
        """The bytes that must fit into SGLang's mem_fraction."""
        return self.weights + self.kv_cache + self.states

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def generator_memory(
    spec: ModelSpec,
    generator: GeneratorConfig,
    dtype: str,
    workload: Workload,
    gpu: Gpu,
    beside: BesideCache = NOTHING,
) -> GeneratorMemory:
    """Raises ConfigError if the sizes do not divide the model."""
    tokens = kv_tokens(spec, generator, dtype, workload, gpu, beside)
    kv_cache = tokens * kv_bytes_per_token(spec, generator, ITEM_BYTES[dtype])
    return replace(_without_cache(spec, generator, dtype, gpu, beside), kv_cache=kv_cache)


def _without_cache(
    spec: ModelSpec, generator: GeneratorConfig, dtype: str, gpu: Gpu, beside: BesideCache
) -> GeneratorMemory:
    item = ITEM_BYTES[dtype]
    ffn = spec.intermediate_size / generator.tp
    if spec.experts:
        chosen_rows = spec.experts.per_token * spec.experts.intermediate_size
        ffn = max(ffn, chosen_rows * generator.ep / generator.tp)
    # int32, as long as the context of engines
    table = 4 * (generator.max_concurrency + 1) * spec.max_position_embeddings
    # fp32, gathered over tp, and a copy for sampling
    logits = 2 * 4 * generator.max_concurrency * spec.vocab_size
    return GeneratorMemory(
        weights=generator_weights(spec, generator, dtype).total + beside.pool,
        kv_cache=0.0,
        states=states_bytes(spec, generator, item),
        landing=beside.landing,
        graphs=0.0 if gpu.name == "cpu" else CUDA_GRAPH_BYTES * generator.max_concurrency,
        activations=prefill_tokens(spec, generator, gpu) * item * (4 * spec.hidden_size + 3 * ffn)
        + logits
        + table,
        runtime=gpu.runtime_gib * GIB,
    )


def kv_tokens(
    spec: ModelSpec,
    generator: GeneratorConfig,
    dtype: str,
    workload: Workload,
    gpu: Gpu,
    beside: BesideCache = NOTHING,
) -> int:
    """Tokens of an engine's KV cache, over all replicas of attention, as the launcher sets it.

    generator.kv_cache_tokens if it is set. Otherwise a GPU's free memory is filled, as mem_fraction
    allows. On a CPU, or a GPU that another process shares, the cache is no larger than
    max_concurrency requests of full length or one whole context. What is left is for what nobody
    has planned. Holds at least one request of full length, even if there is no memory for it.
    """
    if generator.kv_cache_tokens is not None:
        return generator.kv_cache_tokens
    prompt_tokens = UNKNOWN_PROMPT if gpu.name == "cpu" else workload.prompt_tokens
    longest = math.ceil(prompt_tokens + workload.max_response_tokens)
    room = math.floor(kv_room(spec, generator, dtype, gpu, beside))
    tokens = max(room, longest * generator.dp_attention)
    if gpu.name != "cpu" and not beside.occupied:
        return tokens
    enough_tokens = math.ceil(generator.max_concurrency * longest * PAGE_SLACK)
    return min(tokens, max(enough_tokens, spec.max_position_embeddings * generator.dp_attention))


def kv_room(
    spec: ModelSpec,
    generator: GeneratorConfig,
    dtype: str,
    gpu: Gpu,
    beside: BesideCache = NOTHING,
) -> float:
    """Tokens of KV cache for which a rank has memory beside all else.

    Negative: there is too little even for the rest.
    """
    memory = _without_cache(spec, generator, dtype, gpu, beside)
    free_bytes = -over_bytes(memory, generator, gpu, beside.occupied)
    return free_bytes / kv_bytes_per_token(spec, generator, ITEM_BYTES[dtype])


# Bytes of an element of keys and values by SGLang's kv_cache_dtype (mem_cache/kv_cache_dtype.py).
# mxfp8 has a scale for 32 elements.
KV_ITEM_BYTES = {
    "bf16": 2.0,
    "bfloat16": 2.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "mxfp8": 1 + 1 / 32,
}


def kv_bytes_per_token(spec: ModelSpec, generator: GeneratorConfig, item: int) -> float:
    """KV bytes of all layers on one rank per token of an engine's request.

    A mean, since an attention replica keeps only its own requests.

    `item`: bytes of an element in the model's dtype, which the cache has if server_args give it no
    other (KV_ITEM_BYTES).
    """
    layers = float(spec.attention_layers + spec.mtp_layers * spec.mtp_drafts)
    settings = generator.server_args
    pool = spec.attention.window_pool
    if pool and not settings.get("disable_hybrid_swa_memory"):
        layers -= len(spec.attention.windowed_layers) * (
            1 - settings.get("swa_full_tokens_ratio", pool)
        )
    return _kv_bytes_of_layers(spec, generator, item, layers)


def kv_bytes_read(spec: ModelSpec, generator: GeneratorConfig, item: int, context: float) -> float:
    """KV bytes of all layers on one rank that are read for the next token of a request with
    `context` tokens.
    """
    tokens = spec.attention.tokens_read(spec.attention_layers, context)
    return _kv_bytes_of_layers(spec, generator, item, tokens)


def _kv_bytes_of_layers(
    spec: ModelSpec, generator: GeneratorConfig, item: int, layers: float
) -> float:
    replicas = generator.dp_attention
    bytes_of_element = KV_ITEM_BYTES.get(
        generator.server_args.get("kv_cache_dtype", ""), float(item)
    )
    elements = spec.attention.cached_elements(spec, generator.tp / replicas)
    return bytes_of_element * layers * elements / replicas


def state_bytes(spec: ModelSpec, generator: GeneratorConfig, item: int) -> float:
    """Bytes of linear attention for one request on one rank, independent of its length."""
    if spec.linear_attention is None:
        return 0.0
    state = spec.linear_attention.state_bytes(item)
    return len(spec.linear_layers) * state / generator.tp


def states_bytes(spec: ModelSpec, generator: GeneratorConfig, item: int) -> float:
    """Bytes of the pool of states: several for each request, because SGLang keeps some for its
    prefix cache, and one for padding.
    """
    return (STATES_PER_REQUEST * generator.max_concurrency + 1) * state_bytes(spec, generator, item)


def prefill_tokens(spec: ModelSpec, generator: GeneratorConfig, gpu: Gpu) -> int:
    """The most tokens that an engine prefills at once, for a chunk of a longer prompt or several
    shorter prompts.
    """
    default = next(
        tokens for below_gib, tokens in CHUNKED_PREFILL_TOKENS if gpu.memory_gib < below_gib
    )
    chunk = generator.server_args.get("chunked_prefill_size") or default
    # -1: prompts are not split
    return spec.max_position_embeddings if chunk < 0 else min(chunk, spec.max_position_embeddings)


def over_bytes(
    memory: GeneratorMemory, generator: GeneratorConfig, gpu: Gpu, occupied: float = 0.0
) -> float:
    """Bytes by which a rank is too large for its GPU, or for mem_fraction of it; negative: free."""
    return max(
        memory.total + occupied - gpu.memory_gib * GIB,
        memory.static - usable_static(generator, gpu, occupied),
    )


def usable_static(generator: GeneratorConfig, gpu: Gpu, occupied: float = 0.0) -> float:
    """The limit of the bytes of weights and KV cache: mem_fraction of the memory that is free
    before the weights are loaded. So SGLang measures it too, with what other processes hold
    (0.5.23: distributed/bootstrap.py, mem_cache/kv_cache_configurator.py).
    """
    return generator.mem_fraction * ((gpu.memory_gib - gpu.runtime_gib) * GIB - occupied)
