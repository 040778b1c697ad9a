"""The memory and step time of one config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema import SAMPLED, GeneratorConfig, GroupConfig, RunConfig, TrainerConfig
from megarl.critic.plan import find_critic
from megarl.data.rows import held_out_samplings
from megarl.estimate.hardware import GIB, Cluster, Constants, Gpu, constants_of
from megarl.estimate.memory import (
    BesideCache,
    GeneratorMemory,
    TrainerMemory,
    WeightElements,
    Workload,
    generator_memory,
    generator_weights,
    kv_room,
    kv_tokens,
    landing_bytes,
    offloaded_bytes,
    over_bytes,
    saving_bytes,
    scoring_passes,
    shadow_bytes,
    trained_elements,
    trainer_memory,
    usable_static,
)
from megarl.estimate.places import longest_of_prompt, wait_s
from megarl.estimate.times import (
    GenerateModel,
    GenerateTime,
    TrainModel,
    TrainTime,
    UpdateSeconds,
    control_s,
    sync_s,
)
from megarl.generator.groups import EngineGroup
from megarl.lora import estimate as adapters
from megarl.models import ModelSpec
from megarl.models.spec import LM
from megarl.plan.topologies import (
    engine_groups,
    evaluation_group,
    gpus_of_run,
    groups_of_run,
    run_ahead,
    trainer_topology,
)
from megarl.plan.weights import needs_reference
from megarl.reshard.deltas import INBOX_SHARE
from megarl.rewards.score import trained_parts
from megarl.roles.plan import ServedRole, find_served, pairs
from megarl.roles.settings import JUDGE, PAIRWISE, REFERENCE, TEACHER
from megarl.teachers.plan import find_frozen, teachers_of


def critic_of(config: RunConfig, spec: ModelSpec) -> ModelSpec | None:
    critic = find_critic(config, spec)
    return critic.with_scalar_head() if critic else None


def training_memory(
    config: RunConfig, spec: ModelSpec, trainer: TrainerConfig, gpu: Gpu
) -> TrainerMemory:
    """The trainer's memory with `trainer` instead of the config's.

    Raises ConfigError if the sizes do not divide a model.
    """
    frozen, is_swapped = frozen_of(config, spec)
    on_device = config.weights.delta != "off" and (
        config.weights.delta_shadow == "device" or gpu.device == "cpu"
    )
    shadow = _shadow_bytes(config, spec, trainer) if on_device else 0.0
    memory = trainer_memory(
        spec,
        trainer,
        config.model.dtype,
        gpu,
        reference=is_swapped,
        critic=critic_of(config, spec),
        frozen=frozen,
        divergence=bool(teachers_of(config)) and config.algorithm.distill.over != SAMPLED,
        adapter_elements=adapters.adapter_elements(config, spec, trainer, gpu.device),
        shadow=shadow,
    )
    if gpu.device == "cpu":
        memory = replace(memory, checkpoint=_saving_bytes(config, spec, trainer, gpu))
    return memory


def frozen_of(config: RunConfig, spec: ModelSpec) -> tuple[list[ModelSpec], bool]:
    """The frozen models on the trainer's ranks, and whether a reference replaces the policy's
    weights for its passes.
    """
    roles = find_frozen(config, spec, None)
    swapped = [
        role
        for role in roles
        if role.role == REFERENCE and role.spec == spec and not config.lora.rank
    ]
    frozen = [role.spec for role in roles if role not in swapped]
    return frozen, needs_reference(config) or bool(swapped)


def training_time(
    config: RunConfig,
    spec: ModelSpec,
    trainer: TrainerConfig,
    workload: Workload,
) -> TrainTime:
    """Policy and critic compute one after the other.

    The critic scores each batch once before it trains on the batch.
    """
    cluster = Cluster.of(config)
    adapter_elements = adapters.adapter_elements(config, spec, trainer, cluster.gpu.device)
    constants = constants_of(cluster.gpu.name)
    plain = TrainModel(spec, trainer, config.model.dtype, cluster, constants)
    policy = replace(plain, adapters=adapter_elements)
    policy_time = policy.seconds(workload, extra_forwards=scoring_passes(config))
    for model in frozen_of(config, spec)[0]:
        scoring_s = replace(plain, spec=model).scoring_s(workload)
        policy_time = replace(policy_time, compute=policy_time.compute + scoring_s)
    critic = critic_of(config, spec)
    if critic is None:
        return policy_time
    critic_time = replace(plain, spec=critic).seconds(workload, extra_forwards=1)
    seconds = {
        name: value + getattr(critic_time, name) for name, value in vars(policy_time).items()
    }
    tera_flop = policy_time.tflops * policy_time.total + critic_time.tflops * critic_time.total
    return TrainTime(**seconds | {"tflops": tera_flop / (policy_time.total + critic_time.total)})


@dataclass(frozen=True)
class ServedEstimate:
    """A frozen model on engines. `score_s`: time of the slowest engine for a step's responses; 0 if
    it only takes part in evaluations.

    Scores are requested while other responses are generated.
    """

    gpus: int
    memory: GeneratorMemory
    over_gib: float  # amount by which a rank is too large; negative: free memory
    score_s: float


def served(config: RunConfig) -> dict[str, ServedEstimate]:
    """The served models by the names of their roles.

    Raises ConfigError if the sizes do not divide a model.
    """
    cluster = Cluster.of(config)
    return {role.name: _served(config, role, cluster) for role in find_served(config, "plan")}


def _served(config: RunConfig, role: ServedRole, cluster: Cluster) -> ServedEstimate:
    settings = role.settings
    spec = replace(role.spec, head=LM)
    gpu = cluster.gpu  # a scalar head needs no more memory or time than LM's
    shape = role.group.settings
    work = _workload(config, role)
    memory = generator_memory(spec, shape, role.dtype, work, gpu)
    time = GenerateModel(spec, shape, role.dtype, cluster, constants_of(gpu.name)).seconds(work)
    scores_training = {part.role for part in trained_parts(config)}
    is_in_training = role.role == TEACHER or role.name in scores_training
    step_s = time.total if role.role == JUDGE else time.prefill
    return ServedEstimate(
        gpus=settings.engines * settings.tp,
        memory=memory,
        over_gib=over_bytes(memory, shape, gpu) / GIB,
        score_s=step_s if is_in_training else 0.0,
    )


def _workload(config: RunConfig, role: ServedRole) -> Workload:
    """The tokens that the model reads and writes in a step. The text of a template itself is not
    counted.
    """
    policy = Workload.generated(config)
    settings = role.settings
    read = policy.tokens_per_sequence
    longest = policy.longest
    if role.role != JUDGE:
        return Workload(policy.sequences, policy.sequences, read, 1, 1 + longest - read)
    sequences = policy.sequences
    if settings.mode == PAIRWISE:
        responses = max(2, config.rollout.n)  # one may be a reference (eval.win_rate)
        sequences = policy.prompts * 2 * len(pairs(responses, settings.opponents))
        read = read + policy.response_tokens
        longest = longest + policy.max_response_tokens
    return Workload(
        sequences, sequences, read, settings.max_tokens / 2, settings.max_tokens + longest - read
    )


UNBOUNDED_TOKENS = 10**15
FIXED_POINT_STEPS = 30


def with_kv_caches(
    config: RunConfig, spec: ModelSpec, served: Sequence[ServedRole] = (), gpu: Gpu | None = None
) -> RunConfig:
    """The config with the size of each KV cache that it leaves open (kv_cache_tokens): of the
    policy's engines, and of the roles `served`. It can then be planned, shown and set in SGLang.

    `gpu`: what the engines run on; None: cluster.gpu. Raises ConfigError if the parallel sizes do
    not divide the model.
    """
    gpu = gpu or Cluster.of(config).gpu
    generator = config.generator
    groups = {}
    for name, shape in generator.shapes.items():
        if name:
            groups[name] = replace(
                generator.groups[name] or GroupConfig(),
                kv_cache_tokens=_kv_tokens(config, spec, shape, gpu),
            )
    if not all(group.name for group in groups_of_run(config)):
        generator = replace(
            generator, kv_cache_tokens=_kv_tokens(config, spec, replace(generator, groups={}), gpu)
        )
    roles = dict(config.roles)
    for role in served:
        tokens = kv_tokens(role.spec, role.group.settings, role.dtype, _workload(config, role), gpu)
        roles[role.name] = replace(role.settings, kv_cache_tokens=tokens)
    return replace(config, generator=replace(generator, groups=groups), roles=roles)


def _kv_tokens(config: RunConfig, spec: ModelSpec, shape: GeneratorConfig, gpu: Gpu) -> int:
    beside = beside_cache(config, spec, shape, gpu)
    return kv_tokens(spec, shape, config.model.dtype, cached_workload(config), gpu, beside)


def cached_workload(config: RunConfig) -> Workload:
    """The workload with the longest response that a KV cache must hold, of a step or an
    evaluation.
    """
    longest_response = max(
        config.rollout.max_tokens,
        *(sampling.max_tokens for sampling in held_out_samplings(config)),
        0,
    )
    return replace(Workload.of(config), max_response_tokens=longest_response)


def beside_cache(
    config: RunConfig, spec: ModelSpec, shape: GeneratorConfig, gpu: Gpu
) -> BesideCache:
    """Memory for landing, the adapters' pool, and the trainer rank that shares the GPU."""
    landing = 0
    if may_land(config):
        landing = landing_bytes(spec, config.trainer, shape, config.model.dtype)
    return BesideCache(landing, adapters_pool(config, spec), beside_engine(config, spec, gpu))


def beside_engine(config: RunConfig, spec: ModelSpec, gpu: Gpu) -> float:
    """The bytes of the fullest trainer rank, if trainer ranks share their GPUs with engines; 0 if
    they are apart.
    """
    if not config.cluster.share_gpus:
        return 0.0
    return training_memory(config, spec, config.trainer, gpu).total


def adapters_pool(config: RunConfig, spec: ModelSpec) -> int:
    """Bytes of an engine's pool of adapters; 0 if updates carry all weights, with the adapters
    merged.
    """
    return adapters.pool_bytes(config, spec, Cluster.of(config).gpu.device)


@dataclass(frozen=True)
class GroupEstimate:
    """The engines of one group (generator.groups), or all engines."""

    name: str
    key: str  # key of its section
    engines: int
    gpus: int
    memory: GeneratorMemory
    occupied: float  # bytes of the trainer rank that shares its GPU; 0: none does
    static_limit: float  # limit of the bytes of a rank's weights and KV cache
    share: float  # share of the step's responses
    time: GenerateTime  # time for its share
    tokens_per_s: float  # tokens that all its engines sample
    kv_tokens: int  # tokens that the KV cache of an engine holds
    at_full_length: float  # requests that an engine holds if all have full length
    unbounded_s: float  # time for its share if the KV cache held all requests that may run

    def over_gib(self, gpu: Gpu) -> float:
        """The amount by which a rank is too large for its GPU, or for what the trainer leaves of
        it; negative: free memory.
        """
        return max(
            self.gpu_total / GIB - gpu.memory_gib, (self.memory.static - self.static_limit) / GIB
        )

    @property
    def gpu_total(self) -> float:
        """Bytes of all that is on a GPU with one of its ranks."""
        return self.memory.total + self.occupied

    @property
    def facts(self) -> dict[str, Any]:
        """For megarl plan --json."""
        return {
            "engines": self.engines,
            "gpus": self.gpus,
            "gib_per_gpu": self.memory.total / GIB,
            "share": self.share,
            "generate_s": self.time.total,
            "tokens_per_s": self.tokens_per_s,
            "kv_cache_tokens": self.kv_tokens,
            "concurrency_per_engine": self.time.concurrency,
        }


@dataclass(frozen=True)
class Estimate:
    """Times are in seconds. Memory is in bytes on the fullest rank."""

    workload: Workload
    generated: Workload  # the workload, with the responses that are dropped
    cluster: Cluster
    trainer: TrainerMemory
    groups: tuple[GroupEstimate, ...]  # groups of engines; one if all are equal
    offloaded: float  # bytes of a trainer node's memory for optimizers (trainer.optimizer.offload)
    checkpoint: float  # bytes that a trainer node writes of a checkpoint, from its ranks' memory
    saving: float  # of these, what it holds a copy of while it trains on (checkpoint.beside)
    checkpoint_s: float  # to write them, at plan.checkpoint_gb_s
    train: TrainTime
    sync_s: float
    delta_sync_s: float  # if only changed elements are sent: the share CHANGED of all
    writes_bind: bool  # the number of writes, not their bytes, determines `sync_s`
    control_s: float  # messages and calls of an update, whether full or a delta
    shadow: float  # bytes of a trainer node's memory for what was sent last
    inboxes: float  # bytes of an engine node's memory to which Mooncake writes changes
    glue_s: float  # work that overlaps with neither side
    asynchronous: bool
    shared: bool  # whether trainer and engines share their GPUs
    sends_adapters: bool = False  # whether updates carry adapters alone
    # for rollouts, beyond the slower side: prompts keep their places until their last responses end
    places_wait_s: float = 0.0
    served: Mapping[str, ServedEstimate] = field(default_factory=dict)  # the roles on engines

    @property
    def fullest(self) -> GroupEstimate:
        """The engines that are nearest to being too large."""
        return max(self.groups, key=lambda group: group.over_gib(self.cluster.gpu))

    @property
    def generator(self) -> GeneratorMemory:
        return self.fullest.memory

    @property
    def generate(self) -> GenerateTime:
        """The time of the slowest group."""
        return max(self.groups, key=lambda group: group.time.total).time

    @property
    def scored_s(self) -> float:
        """Seconds of generation with its scores.

        Scores are requested as responses finish, so the slowest engines decide.
        """
        return max([self.generate.total, *(served.score_s for served in self.served.values())])

    @property
    def step_s(self) -> float:
        """LlamaRL's equation 3 (equation 2 if nothing overlaps), plus glue and the update, for
        which both sides stop, and waits for places in flight.
        """
        if self.overlaps:
            sides_s = max(self.train.total, self.scored_s)
        else:
            sides_s = self.train.total + self.scored_s
        return sides_s + self.sync_s + self.glue_s + self.places_wait_s

    @property
    def overlaps(self) -> bool:
        """Whether training and generation overlap in time.

        On a shared GPU they do not: kernels of two processes take turns.
        """
        return self.asynchronous and not self.shared

    @property
    def marks_gib(self) -> dict[str, float]:
        """What a run measures as memory/trainer_gib, memory/engine_gib and memory/gpu_in_use_gib,
        on the fullest ranks. On a GPU a side is without context and libraries, as torch counts it.
        """
        on_gpu = self.cluster.gpu.device != "cpu"
        marks = {
            side: (memory.total - on_gpu * memory.runtime) / GIB
            for side, memory in (("trainer", self.trainer), ("engine", self.generator))
        }
        if self.shared:
            marks["gpu_in_use"] = self.fullest.gpu_total / GIB
        return marks

    @property
    def overfull(self) -> dict[str, float]:
        """GiB by which each side is too large, without sides that fit."""
        limit = self.cluster.gpu.memory_gib
        over = {
            "trainer": self.trainer.total / GIB - limit,
            **{group.key: group.over_gib(self.cluster.gpu) for group in self.groups},
            **{name: served.over_gib for name, served in self.served.items()},
        }
        return {side: gib for side, gib in over.items() if gib > 0}

    @property
    def binding(self) -> str:
        """What to change first: memory that does not fit, or else the slowest part of the slower
        side.
        """
        if self.overfull:
            return f"memory of the {max(self.overfull, key=lambda side: self.overfull[side])}"
        if self.sync_s > max(self.train.total, self.scored_s):
            return "weight update"
        if self.train.total > self.scored_s:
            side = "training: "
            parts = train_parts(self.train)
        elif self.scored_s > self.generate.total:
            side = "scores of "
            parts = {name: served.score_s for name, served in self.served.items()}
        else:
            side = "generation: "
            parts = generate_parts(self.generate)
        return side + max(parts, key=lambda name: parts[name])


def estimate(config: RunConfig, spec: ModelSpec) -> Estimate:
    """Raises ConfigError if the parallel sizes do not divide the model."""
    config = with_kv_caches(config, spec)
    cluster = Cluster.of(config)
    workload = Workload.of(config)
    constants = constants_of(cluster.gpu.name)
    generated = Workload.generated(config)
    groups = engine_groups(config.generator)
    senders = trainer_topology(config.trainer).world_size
    messages_s = updates_control_s(groups, senders, constants)
    adapters_s = adapters.alone_s(config, spec, cluster)
    if adapters_s is None:
        update = sync_s(spec, config, cluster)
    else:  # an update carries all elements of the adapters, and nothing else
        update = UpdateSeconds(full=adapters_s, delta=adapters_s, writes=0.0)
    train = training_time(config, spec, config.trainer, workload)
    shared = bool(config.cluster.share_gpus)
    checkpoint_bytes = _on_node(
        config, cluster, _optimizers(config, spec, config.trainer, cluster.gpu, saving_bytes)
    )
    estimated = Estimate(
        workload=workload,
        generated=generated,
        cluster=cluster,
        trainer=training_memory(config, spec, config.trainer, cluster.gpu),
        groups=estimate_groups(
            config, spec, groups, beside_s=train.total + constants.glue_s if shared else 0.0
        ),
        offloaded=_on_node(
            config, cluster, _optimizers(config, spec, config.trainer, cluster.gpu, offloaded_bytes)
        ),
        checkpoint=checkpoint_bytes,
        saving=checkpoint_bytes if config.checkpoint.beside else 0.0,
        checkpoint_s=checkpoint_bytes / (config.plan.checkpoint_gb_s * 1e9),
        train=train,
        sync_s=update.full + messages_s,
        delta_sync_s=update.delta + messages_s,
        sends_adapters=adapters_s is not None,
        control_s=messages_s,
        writes_bind=update.full == update.writes,
        shadow=_shadow_bytes_of_node(config, spec, cluster),
        inboxes=_inbox_bytes_of_node(config, spec, cluster) if may_land(config) else 0.0,
        glue_s=constants.glue_s,
        asynchronous=overlaps(config),
        shared=shared,
        served=served(config),
    )
    return replace(estimated, places_wait_s=_places_wait_s(config, spec, estimated))


def _places_wait_s(config: RunConfig, spec: ModelSpec, estimated: Estimate) -> float:
    """`Estimate.places_wait_s`. Fewer requests then run at once than `estimated` has, and each is
    faster, so both are found together.
    """
    if not estimated.overlaps or not unfinished(config)["carried_over"]:
        return 0.0
    work = estimated.generated
    ahead = run_ahead(config.async_)
    tokens = longest_of_prompt(work, config.rollout.n, config.plan.simulation.correlation)
    context = work.prompt_tokens + work.decoded
    group = max(estimated.groups, key=lambda group: group.time.total)
    settings = next(g.settings for g in engine_groups(config.generator) if g.name == group.name)
    model = generate_model(config, spec, settings)
    engine_tokens = group.share * work.sequences / group.engines * work.response_tokens
    trainer_s = estimated.train.total + estimated.sync_s + estimated.glue_s
    sides_s = estimated.step_s  # without waits
    step_s = sides_s
    running = group.time.concurrency
    for _ in range(FIXED_POINT_STEPS):
        token_s = model.decode_step(running, context).total
        waits_s = wait_s(
            prompts=work.prompts,
            places=config.async_.max_in_flight or config.rollout.prompts_per_step,
            ahead=math.inf if ahead is None else ahead,
            rollout_s=tokens * token_s,
            step_s=trainer_s,
            pause_s=min(trainer_s, estimated.sync_s + group.time.prefill),
        )
        step_s = (step_s + trainer_s + waits_s) / 2
        running = (running + engine_tokens * token_s / step_s) / 2
        running = min(group.time.concurrency, max(1.0, running))
    return max(0.0, step_s - sides_s)


def updates_control_s(groups: Sequence[EngineGroup], senders: int, constants: Constants) -> float:
    """`control_s` of all groups of engines. Trainer ranks count once."""
    return sum(
        control_s(senders * (not g.first), g.settings.engines, g.settings.tp, constants)
        for g in groups
    )


def generate_model(config: RunConfig, spec: ModelSpec, engine: GeneratorConfig) -> GenerateModel:
    """The model of engines of one shape on the cluster of `config`."""
    cluster = Cluster.of(config)
    return GenerateModel(
        spec,
        engine,
        config.model.dtype,
        cluster,
        constants_of(cluster.gpu.name),
        accept_length=config.plan.accept_length,
    )


def estimate_groups(
    config: RunConfig, spec: ModelSpec, groups: Sequence[EngineGroup], beside_s: float = 0.0
) -> tuple[GroupEstimate, ...]:
    """Estimates the groups, among which responses are divided.

    With partial rollouts each group gets as many as it can generate in the time. Otherwise all
    responses begin together, and go to engines in proportion to max_concurrency.

    `beside_s`: seconds of a step's training on the engines' GPUs; 0: they share none.
    """
    dtype = config.model.dtype
    work = Workload.generated(config)
    schedule = unfinished(config)
    gpu = Cluster.of(config).gpu
    models = [generate_model(config, spec, group.settings) for group in groups]
    speeds = [float(group.places) for group in groups]
    if schedule["carried_over"]:
        speeds = [1 / model.seconds(work, **schedule).total for model in models]
    estimates = []
    for group, model, speed in zip(groups, models, speeds):
        settings = group.settings
        share = speed / sum(speeds)
        part = work
        if len(groups) > 1:
            part = replace(work, sequences=share * work.sequences, prompts=share * work.prompts)
        time = _beside_training(model, part, config, beside_s)
        beside = beside_cache(config, spec, settings, gpu)
        memory = generator_memory(spec, settings, dtype, Workload.of(config), gpu, beside)
        rate = settings.engines * time.concurrency / time.token_s
        tokens = kv_tokens(spec, settings, dtype, part, gpu, beside)
        endless = replace(model, generator=replace(settings, kv_cache_tokens=UNBOUNDED_TOKENS))
        estimates.append(
            GroupEstimate(
                name=group.name,
                key=group.key,
                engines=settings.engines,
                gpus=group.topology.world_size,
                memory=memory,
                occupied=beside.occupied,
                static_limit=usable_static(settings, gpu, beside.occupied),
                share=share,
                time=time,
                tokens_per_s=rate,
                kv_tokens=tokens,
                at_full_length=tokens / work.longest,
                unbounded_s=_beside_training(endless, part, config, beside_s).total,
            )
        )
    return tuple(estimates)


def _beside_training(
    model: GenerateModel, work: Workload, config: RunConfig, beside_s: float
) -> GenerateTime:
    """The time of a step's responses. On a shared GPU it adds to the `beside_s` of training.

    With partial rollouts the next step's responses fill the places of those that end, so a step has
    no tail. But engines that are faster than the training beside them have nothing more to begin
    until the trainer's next weights: their last responses then end alone, as in turns.
    """
    time = model.seconds(work, **unfinished(config))
    alone_s = math.inf if run_ahead(config.async_) is None else model.seconds(work).total
    unfilled_s = min(beside_s, alone_s) - time.total
    return replace(time, tail=time.tail + max(0.0, unfilled_s))


def check_longest(config: RunConfig, spec: ModelSpec) -> None:
    """Raises ConfigError if the longest response and a prompt do not fit a microbatch, the model's
    context, or an engine's KV cache.

    If an engine does not even hold the weights, `Estimate.overfull` reports it.
    """
    gpu = Cluster.of(config).gpu
    prompt = config.plan.prompt_tokens or 1
    room = {
        "the model's context of": spec.max_position_embeddings,
        "trainer.max_tokens_per_microbatch =": config.trainer.max_tokens_per_microbatch,
    }
    for group in engine_groups(config.generator):
        g = group.settings
        key = group.key
        if g.kv_cache_tokens is not None:
            name = f"{key}.kv_cache_tokens" + f" / {key}.dp_attention" * (g.dp_attention > 1) + " ="
            room[name] = g.kv_cache_tokens // g.dp_attention
            continue
        beside = beside_cache(config, spec, g, gpu)
        cache = int(kv_room(spec, g, config.model.dtype, gpu, beside)) // g.dp_attention
        if cache > 0:
            room[
                f"what an engine of {key}.tp={g.tp} on {gpu.name} has for its KV cache "
                f"({key}.mem_fraction={g.mem_fraction}):"
            ] = cache
    longest = config.rollout.max_tokens + prompt
    prompt_text = f"plan.prompt_tokens={prompt}" if config.plan.prompt_tokens else "one token"
    problems = []
    for name, limit in room.items():
        if longest > limit:
            problems.append(
                f"rollout.max_tokens={config.rollout.max_tokens}: with a prompt of {prompt_text} "
                f"it is {longest} tokens; they must be at most {name} {limit}"
            )
    if problems:
        raise ConfigError(problems)


def may_land(config: RunConfig, ranks: int | None = None) -> bool:
    """Whether weights may be sent by Mooncake, which needs landing memory: true if the ranks of
    both sides fill several nodes. `ranks`: their number; None: that of the config.
    """
    if ranks is None:
        ranks = gpus_of_run(config) + evaluation_group(config).topology.world_size
    return ranks > Cluster.of(config).gpus_per_node and config.weights.transport in (
        "auto",
        "mooncake",
    )


def _on_node(config: RunConfig, cluster: Cluster, rank_bytes: float) -> float:
    """Bytes of all ranks of a trainer node."""
    return min(cluster.gpus_per_node, trainer_topology(config.trainer).world_size) * rank_bytes


def _saving_bytes(config: RunConfig, spec: ModelSpec, trainer: TrainerConfig, gpu: Gpu) -> float:
    """Bytes of a rank's copy of its part of a checkpoint, which is written during training."""
    if not config.checkpoint.beside:
        return 0.0
    return _optimizers(config, spec, trainer, gpu, saving_bytes)


def _optimizers(
    config: RunConfig,
    spec: ModelSpec,
    trainer: TrainerConfig,
    gpu: Gpu,
    bytes_of: Callable[[Iterable[WeightElements], TrainerConfig], float],
) -> float:
    """The sum of `bytes_of` over a rank's optimizers of policy and critic."""
    dtype = config.model.dtype
    adapter_elements = adapters.adapter_elements(config, spec, trainer, gpu.device)
    if adapter_elements:
        total = bytes_of(adapter_elements.trained, trainer)
    else:
        total = bytes_of(trained_elements(spec, trainer, dtype), trainer)
    critic = critic_of(config, spec)
    if critic is not None:
        total += bytes_of(trained_elements(critic, trainer, dtype), trainer)
    return total


def _shadow_bytes_of_node(config: RunConfig, spec: ModelSpec, cluster: Cluster) -> float:
    if config.weights.delta == "off" or config.weights.delta_shadow != "host":
        return 0.0
    return _on_node(config, cluster, _shadow_bytes(config, spec, config.trainer))


def _shadow_bytes(config: RunConfig, spec: ModelSpec, trainer: TrainerConfig) -> float:
    """The trainer keeps the last values that it sent to each group of engines."""
    size = 0.0
    for group in engine_groups(config.generator):
        size += shadow_bytes(spec, trainer, group.settings, config.model.dtype)
    return size


def _inbox_bytes_of_node(config: RunConfig, spec: ModelSpec, cluster: Cluster) -> float:
    if config.weights.delta == "off":
        return 0.0
    groups = engine_groups(config.generator)
    dtype = config.model.dtype
    sizes = [
        (group.topology.world_size, generator_weights(spec, group.settings, dtype).total)
        for group in groups
    ]
    return max(
        min(cluster.gpus_per_node, ranks) * INBOX_SHARE * weights for ranks, weights in sizes
    )


def steps_by_capacity(config: RunConfig, spec: ModelSpec) -> dict[int, float]:
    """async.capacity -> seconds of a step, for the two ways to share GPUs: in turns, and both sides
    at once.
    """
    configs = {
        capacity: replace(config, async_=replace(config.async_, capacity=capacity))
        for capacity in (0, 1)
    }
    return {capacity: estimate(variant, spec).step_s for capacity, variant in configs.items()}


def overlaps(config: RunConfig) -> bool:
    """Whether generation runs during training, and not in turns with it."""
    return run_ahead(config.async_) != 0


def unfinished(config: RunConfig) -> dict[str, Any]:
    """Arguments of GenerateModel.seconds: whether unfinished responses continue under the next
    weights instead of being waited for, whether they are prefilled again for that, and how many
    steps' responses may run at once.
    """
    mode = config.async_.partial_rollout if overlaps(config) else "block"
    ahead = run_ahead(config.async_)
    return {
        "carried_over": mode in ("in_flight", "retract", "resume"),
        "prefilled_again": mode in ("retract", "resume"),
        "ahead": math.inf if ahead is None else max(1, ahead),
    }


def train_parts(time: TrainTime) -> dict[str, float]:
    return {name.replace("_", " "): value for name, value in vars(time).items() if name != "tflops"}


def generate_parts(time: GenerateTime) -> dict[str, float]:
    return {
        "prefill": time.prefill,
        "decoding at full concurrency": time.full,
        "the longest responses": time.tail,
    }


def to_json(result: Estimate, baseline_s: float | None) -> dict[str, Any]:
    """The object that `megarl plan --json` prints."""
    return {
        "fits": not result.overfull,
        "trainer_gib_per_gpu": result.trainer.total / GIB,
        "generator_gib_per_gpu": result.generator.total / GIB,
        "train_s": result.train.total,
        "generate_s": result.generate.total,
        "sync_s": result.sync_s,
        "step_s": result.step_s,
        "sync_baseline_step_s": baseline_s,
        "speedup": baseline_s / result.step_s if baseline_s else None,
        "binding": result.binding,
    }
