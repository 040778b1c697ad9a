"""The fastest use of a number of GPUs: LlamaRL's problem 7 (m_t, m_g, b_t, b_g, theta, precision),
over configs that can be launched.

For a given split each side is a separate problem: the fastest shape that fits and uses at most that
side's GPUs. The trainer is not slower with more GPUs, and the generator is not faster with fewer.
So bisection finds the best split, at which both take equally long. A few splits with more trainer
ranks are also tried, since more senders shorten the weight update.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.keys import Settings, with_settings, yaml_text
from megarl.config.schema import GeneratorConfig, RunConfig, TrainerConfig
from megarl.estimate.estimate import (
    Estimate,
    adapters_pool,
    cached_workload,
    estimate,
    estimate_groups,
    generate_model,
    may_land,
    overlaps,
    training_memory,
    training_time,
    unfinished,
    updates_control_s,
    with_kv_caches,
)
from megarl.estimate.hardware import GIB, Cluster, constants_of
from megarl.estimate.memory import (
    BesideCache,
    Workload,
    generator_memory,
    generator_weights,
    kv_tokens,
    landing_bytes,
    over_bytes,
    shape_of,
)
from megarl.estimate.times import balanced_sync_s
from megarl.models import ModelSpec
from megarl.plan.checks import (
    CONFIG_CHECKS,
    MODEL_CHECKS,
    problems_by_group,
    refused_by_train,
    with_model,
)
from megarl.plan.topologies import (
    engine_groups,
    evaluation_group,
    generator_ranks,
    trainer_topology,
)
from megarl.reshard.forwarding import ENGINES


def problems(config: RunConfig, spec: ModelSpec) -> list[str]:
    """The problems that `megarl plan` and `megarl train` would find in the settings; empty if the
    run could begin.
    """
    config_problems = problems_by_group(
        config, [*CONFIG_CHECKS, *(with_model(check, spec) for check in MODEL_CHECKS)]
    )
    return config_problems + refused_by_train(config, spec)


def _lasting_problems(config: RunConfig, spec: ModelSpec, section: str) -> list[str]:
    """The problems of `config` that no other settings of `section` could solve."""
    return [problem for problem in problems(config, spec) if not problem.startswith(section)]


def _new_problems(changed: RunConfig, spec: ModelSpec, old: Collection[str]) -> list[str]:
    """The problems of `changed` that are not among the `old` ones."""
    return [problem for problem in problems(changed, spec) if problem not in old]


def as_overrides(settings: Settings) -> str:
    """The settings as overrides on a command line."""
    return " ".join(f"{key}={yaml_text(value)}" for key, value in settings.items())


def even_stages(layers: int, pp: int) -> tuple[int | None, int | None]:
    """Numbers of layers of the first and the last stage if pp does not divide `layers`.

    They are smaller than those of the other stages, which are equal.
    """
    if pp == 1 or layers % pp == 0:
        return None, None
    if pp == 2:
        return layers // 2, layers - layers // 2
    middle_layers = -(-layers // pp)
    end_layers = layers - middle_layers * (pp - 2)
    if end_layers < 2:
        return None, None
    return end_layers // 2, end_layers - end_layers // 2


# up to this number of nodes, trainer and engines may share one; with more, each side gets whole
# nodes
FINE_NODES = 4
LONG = 16384  # from this number of tokens of a sequence, context parallelism is tried


@dataclass(frozen=True)
class Side:
    """One shape of one side of the run."""

    settings: Settings
    seconds: float
    over_gib: float  # per GPU, above the limit; negative: free


@dataclass(frozen=True)
class SearchResult:
    settings: dict[str, Any]
    trainer: Side
    generator: Side
    theta: float  # share of the GPUs that train
    # lemma B.3: the share at which both sides take equally long, computed from their GPU-seconds
    balanced_theta: float
    trainer_too_large: Side | None  # one that would be faster, but does not fit
    generator_too_large: Side | None


@dataclass
class Search:
    """One search. It keeps the best shape of each side by number of GPUs."""

    config: RunConfig
    spec: ModelSpec
    gpus: int
    sharded: bool = True  # whether zero=3 is tried
    trainers: dict[int, Side | None] = field(default_factory=dict)
    generators: dict[int, Side | None] = field(default_factory=dict)
    beside_caches: dict[tuple[int, int, str | None], BesideCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster = Cluster.of(self.config)
        self.workload = Workload.of(self.config)
        self.cached = cached_workload(self.config)
        self.constants = constants_of(self.cluster.gpu.name)
        self.dtype = self.config.model.dtype
        shapes = trainer_shapes(self.config, self.spec, self.cluster)
        self.trainer_shapes = [shape for shape in shapes if self.sharded or shape.zero < 3]
        self.generator_shapes = []
        if not self.config.generator.has_groups:
            self.generator_shapes = list(generator_shapes(self.config, self.spec))

    def run(self) -> SearchResult:
        """Raises ConfigError if nothing fits the budget."""
        if self.gpus < 2:
            raise ConfigError(
                f"--gpus {self.gpus}: must be at least 2: trainer and generator do not share GPUs"
            )
        best = self.best_split()
        if best is None:
            raise ConfigError(
                f"--gpus {self.gpus}: nothing fits on {self.gpus} {self.cluster.gpu.name}; "
                f"{self._missing_side()}"
            )
        trainer = self.trainer(best)
        generator = self.generator(self.gpus - best)
        assert trainer is not None and generator is not None
        trainer_gpu_s = trainer.seconds * best
        generator_gpu_s = generator.seconds * (self.gpus - best)
        return SearchResult(
            settings={**trainer.settings, **generator.settings},
            trainer=trainer,
            generator=generator,
            theta=best / self.gpus,
            balanced_theta=trainer_gpu_s / (trainer_gpu_s + generator_gpu_s),
            trainer_too_large=_fastest_too_large(trainer, self._trainers(best, fitting=False)),
            generator_too_large=_fastest_too_large(
                generator, self._generators(self.gpus - best, fitting=False)
            ),
        )

    def best_split(self, below_s: float = math.inf) -> int | None:
        """The trainer's GPUs in the fastest run, or None if none fits, or if sides that take turns
        need `below_s` or more.
        """
        unit = (
            self.cluster.gpus_per_node if self.gpus > FINE_NODES * self.cluster.gpus_per_node else 1
        )
        splits = range(unit, self.gpus, unit)
        if overlaps(self.config):  # equation 3: the slower side counts
            meet = bisect.bisect_left(
                splits, True, key=lambda gpus: self._seconds(gpus)[0] <= self._seconds(gpus)[1]
            )
            tried = [
                splits[i]
                for i in (meet - 1, *(meet + 2**n - 1 for n in range(12)))
                if 0 <= i < len(splits)
            ]
            return next(filter(self._fits, sorted(tried, key=self._step_s)), None)
        return self._best_in_turns(splits[:: max(1, len(splits) // 16)], below_s)

    def _best_in_turns(self, splits: Sequence[int], below_s: float) -> int | None:
        """The best split by equation 2, where both sides count.

        No side is slower with more GPUs, which bounds the time of all splits in an interval.
        """

        def bound_s(first: int, last: int) -> float:
            return self._seconds(splits[last])[0] + self._seconds(splits[first])[1]

        best = None
        intervals = [(0.0, 0, len(splits) - 1)] if splits else []  # bound, first and last split
        while intervals:
            interval_s, first, last = heapq.heappop(intervals)
            if interval_s >= below_s:
                break
            if first < last:
                middle = (first + last) // 2
                for half in ((first, middle), (middle + 1, last)):
                    heapq.heappush(intervals, (bound_s(*half), *half))
                continue
            step_s = self._step_s(splits[first])
            if step_s < below_s and self._fits(splits[first]):
                below_s = step_s
                best = splits[first]
        return best

    def with_split(self, trainer_gpus: int) -> RunConfig | None:
        """The config with the best shapes of both sides, or None if a side has none."""
        trainer = self.trainer(trainer_gpus)
        generator = self.generator(self.gpus - trainer_gpus)
        if trainer is None or generator is None:
            return None
        return with_settings(self.config, {**trainer.settings, **generator.settings})

    def _fits(self, trainer_gpus: int) -> bool:
        """Whether both sides still fit when they are planned together: each was chosen beside the
        config's other side.
        """
        candidate = self.with_split(trainer_gpus)
        return candidate is not None and not estimate(candidate, self.spec).overfull

    def _step_s(self, trainer_gpus: int) -> float:
        """Includes the update.

        More senders shorten it, so more trainer ranks than balance requires may be better.
        """
        candidate = self.with_split(trainer_gpus)
        if candidate is None:
            return math.inf
        trainer_s, generator_s = self._seconds(trainer_gpus)
        groups = engine_groups(candidate.generator)
        senders = trainer_topology(candidate.trainer).world_size
        receivers = generator_ranks(groups)
        group_bytes = [
            group.topology.world_size
            * generator_weights(self.spec, group.settings, self.dtype).total
            for group in groups
        ]
        step_s = trainer_s + generator_s
        if overlaps(self.config):
            step_s = max(trainer_s, generator_s)
        relaying = candidate.generator.engines if candidate.weights.relay == ENGINES else 0
        control = updates_control_s(groups, senders, self.constants)
        return (
            step_s
            + balanced_sync_s(
                sum(group_bytes) / receivers, receivers, senders, self.cluster, relaying
            )
            + control
        )

    def _seconds(self, trainer_gpus: int) -> tuple[float, float]:
        sides = self.trainer(trainer_gpus), self.generator(self.gpus - trainer_gpus)
        seconds = [side.seconds if side else math.inf for side in sides]
        return seconds[0], seconds[1]

    def trainer(self, gpus: int) -> Side | None:
        """The fastest shape that fits, or None."""
        if gpus not in self.trainers:
            self.trainers[gpus] = min(
                self._trainers(gpus, fitting=True), key=lambda side: side.seconds, default=None
            )
        return self.trainers[gpus]

    def generator(self, gpus: int) -> Side | None:
        if gpus not in self.generators:
            self.generators[gpus] = min(
                self._generators(gpus, fitting=True), key=lambda side: side.seconds, default=None
            )
        return self.generators[gpus]

    def _trainers(self, gpus: int, fitting: bool) -> Iterator[Side]:
        """All shapes on at most `gpus` GPUs that fit, or all that do not."""
        for shape in self.trainer_shapes:
            dp = min(
                gpus // (shape.tp * shape.cp * shape.pp),
                self.workload.sequences // shape.minibatches,
            )
            # only whole expert-parallel groups
            dp -= dp % max(1, shape.ep // (shape.tp * shape.cp))
            if not dp:
                continue
            trainer = replace(shape, dp=dp)
            over = training_memory(self.config, self.spec, trainer, self.cluster.gpu).total / GIB
            over -= self.cluster.gpu.memory_gib
            if (over <= 0) == fitting:
                time = training_time(self.config, self.spec, trainer, self.workload).total
                yield Side(_trainer_settings(trainer), time, over)

    def _fleets(self, gpus: int, fitting: bool) -> Iterator[Side]:
        """Groups of different engines keep their shapes and proportions.

        There are as many engines as fit on the GPUs.
        """
        groups = engine_groups(self.config.generator)
        unit = math.gcd(*(group.settings.engines for group in groups))
        free_gpus = gpus - evaluation_group(self.config).topology.world_size
        times = free_gpus // (generator_ranks(groups) // unit)
        if times < 1:
            return
        settings = {
            f"{group.key}.engines": group.settings.engines // unit * times for group in groups
        }
        candidate = with_settings(self.config, settings)
        candidate = with_kv_caches(candidate, self.spec)
        group_estimates = estimate_groups(candidate, self.spec, engine_groups(candidate.generator))
        over = max(group.over_gib(self.cluster.gpu) for group in group_estimates)
        if (over <= 0) == fitting:
            yield Side(settings, max(group.time.total for group in group_estimates), over)

    def _generators(self, gpus: int, fitting: bool) -> Iterator[Side]:
        if self.config.generator.has_groups:
            yield from self._fleets(gpus, fitting)
            return
        for shape in self.generator_shapes:
            # engines that only evaluate have the same size
            engines = gpus // shape.tp - self.config.eval.engines
            if engines < 1:
                continue
            generator = replace(shape, engines=min(engines, self.workload.sequences))
            gpu = self.cluster.gpu
            beside = self._beside_cache(shape)
            tokens = kv_tokens(self.spec, generator, self.dtype, self.cached, gpu, beside)
            sized = replace(generator, kv_cache_tokens=tokens)
            memory = generator_memory(self.spec, sized, self.dtype, self.cached, gpu, beside)
            over = over_bytes(memory, sized, gpu) / GIB
            if (over <= 0) == fitting:
                model = generate_model(self.config, self.spec, sized)
                time = model.seconds(
                    Workload.generated(self.config), **unfinished(self.config)
                ).total
                yield Side(_generator_settings(generator), time, over)

    def _beside_cache(self, shape: GeneratorConfig) -> BesideCache:
        """As estimate.beside_cache, but for the finest trainer, since the trainer is not chosen
        yet.
        """
        key = (shape.tp, shape.ep, shape.quantization)
        if key not in self.beside_caches:
            finest = max(self.trainer_shapes, key=lambda trainer: trainer.tp)
            landing = 0
            if may_land(self.config, self.gpus):
                landing = landing_bytes(self.spec, finest, shape, self.dtype)
            pool = adapters_pool(replace(self.config, generator=shape), self.spec)
            self.beside_caches[key] = BesideCache(landing, pool)
        return self.beside_caches[key]

    def _missing_side(self) -> str:
        """The side that does not fit even on all GPUs."""
        sides = (("trainer", self.trainer(self.gpus)), ("generator", self.generator(self.gpus)))
        missing = [name for name, side in sides if side is None]
        if not missing:
            return "each side fits alone, but not both together"
        return f"not even all of them hold the {' or the '.join(missing)}"


def _fastest_too_large(best: Side, sides: Iterator[Side]) -> Side | None:
    """Among the shapes that would be clearly faster than the best but do not fit, the one that is
    closest to fitting.
    """
    return min(
        (side for side in sides if side.seconds < 0.95 * best.seconds),
        key=lambda side: side.over_gib,
        default=None,
    )


def trainer_shapes(config: RunConfig, spec: ModelSpec, cluster: Cluster) -> Iterator[TrainerConfig]:
    """Combinations of all settings except dp: tensor parallelism inside a node, pipelines, experts,
    microbatches, recomputation, and context parallelism for long sequences.
    """
    experts = [2**i for i in range(7) if spec.experts and spec.experts.count % 2**i == 0] or [1]
    longest = config.rollout.max_tokens + config.plan.mean_prompt_tokens
    budgets = [n for n in (4096, 8192, 16384, 32768) if n > longest][:3] or [
        config.trainer.max_tokens_per_microbatch
    ]
    # a microbatch of sharded parameters gathers them all, so it should have many tokens
    budgets_of_zero = {1: budgets, 3: sorted({*budgets, *[n for n in (32768,) if n > longest]})}
    contexts = (1,) if longest <= LONG else (1, 2, 4, 8)
    old = _lasting_problems(config, spec, "trainer.")
    for tp in (n for n in (1, 2, 4, 8) if n <= cluster.nvlinked):
        for pp, cp in itertools.product((1, 2, 4, 8, 16), contexts):
            first, last = even_stages(spec.num_layers, pp)
            base = replace(
                config.trainer,
                tp=tp,
                pp=pp,
                vpp=1,
                cp=cp,
                ep=1,
                etp=1,
                dp=max(experts),
                zero=1,
                sequence_parallel=tp > 1,
                first_stage_layers=first,
                last_stage_layers=last,
            )
            if _new_problems(replace(config, trainer=replace(base, dp=1)), spec, old):
                continue
            for ep in experts:
                # sharded parameters spare stages
                for zero in (1, 3) if pp == 1 and not config.trainer.ddp else (1,):
                    for budget, recompute in itertools.product(
                        budgets_of_zero[zero], (False, True)
                    ):
                        yield replace(
                            base,
                            ep=ep,
                            zero=zero,
                            max_tokens_per_microbatch=budget,
                            recompute=recompute,
                        )


def generator_shapes(config: RunConfig, spec: ModelSpec) -> Iterator[GeneratorConfig]:
    """Combinations of all settings except the number of engines: tensor parallelism, precision,
    concurrency.
    """
    old = _lasting_problems(config, spec, "generator.")
    for tp in (1, 2, 4, 8, 16):
        for quantization in (None, "fp8_block"):
            for ep in sorted({1, tp}) if spec.experts else (1,):
                shape = replace(
                    config.generator,
                    tp=tp,
                    ep=ep,
                    dp_attention=1,
                    quantization=quantization,
                    kv_cache_tokens=None,
                )
                try:
                    generator_weights(spec, shape, config.model.dtype)
                except ConfigError:  # SGLang cannot have these sizes
                    continue
                changed = replace(config, generator=shape)
                if _new_problems(changed, spec, old):
                    continue
                if bool(adapters_pool(changed, spec)) != bool(adapters_pool(config, spec)):
                    continue  # the trainer keeps other copies of the weights if adapters are merged
                yield from (replace(shape, max_concurrency=2**i) for i in range(2, 11))


def _trainer_settings(trainer: TrainerConfig) -> Settings:
    keys = (
        "tp pp vpp cp ep etp dp zero sequence_parallel first_stage_layers last_stage_layers "
        "recompute max_tokens_per_microbatch"
    )
    return {f"trainer.{key}": getattr(trainer, key) for key in keys.split()}


def _generator_settings(generator: GeneratorConfig) -> Settings:
    keys = "engines tp ep dp_attention quantization max_concurrency kv_cache_tokens"
    return {f"generator.{key}": getattr(generator, key) for key in keys.split()}


def search(config: RunConfig, spec: ModelSpec, gpus: int) -> tuple[SearchResult, RunConfig]:
    """The best split and shapes on `gpus` GPUs, and the config that has them.

    Raises ConfigError if nothing fits.
    """
    shape = shape_of(spec)
    result = Search(config, shape, gpus).run()
    proposal = with_settings(config, result.settings)
    if proposal.trainer.zero == 3:  # its many writes are counted only by the map of a whole run
        unsharded = Search(config, shape, gpus, sharded=False)
        if unsharded.best_split() is not None:
            other = unsharded.run()
            other_proposal = with_settings(config, other.settings)
            if estimate(other_proposal, spec).step_s < estimate(proposal, spec).step_s:
                return other, other_proposal
    return result, proposal


@dataclass(frozen=True)
class Remedy:
    """Settings that make a run fit. They are planned again before they are proposed."""

    side: str  # "trainer" | "generator"
    settings: Settings
    # memory per GPU of that side with these settings; of both sides for engines on shared GPUs
    gib: float
    step_s: float


def remedies(config: RunConfig, spec: ModelSpec, result: Estimate) -> list[Remedy]:
    """For each side that is too large, the single settings with which it fits, or else pairs, or
    else triples. Fastest first.
    """
    result_remedies = []
    for side in result.overfull:
        if side in ("trainer", "generator"):
            result_remedies += _remedies_of_side(config, spec, side)
    return result_remedies


def _remedies_of_side(config: RunConfig, spec: ModelSpec, side: str) -> list[Remedy]:
    trainer = list(trainer_knobs(config, spec))
    old = problems(config, spec)
    if side == "trainer":
        knobs = trainer
    else:
        knobs = list(generator_knobs(config))
        if config.cluster.share_gpus:  # it gets what the trainer leaves
            knobs += [knob for knob in trainer if knob not in knobs]
    for together in (1, 2, 3):
        tried = (
            _try(config, spec, side, {k: v for knob in combination for k, v in knob.items()}, old)
            for combination in combinations(knobs, together)
        )
        working = [remedy for remedy in tried if remedy is not None]
        if working:
            return sorted(working, key=lambda remedy: remedy.step_s)
    return []


def _try(
    config: RunConfig, spec: ModelSpec, side: str, settings: Settings, old: Collection[str]
) -> Remedy | None:
    changed = with_settings(config, settings)
    if _new_problems(changed, spec, old):
        return None
    try:
        then = estimate(changed, spec)
    except ConfigError:  # an engine cannot have these sizes
        return None
    total = then.trainer.total if side == "trainer" else then.fullest.gpu_total
    return None if side in then.overfull else Remedy(side, settings, total / GIB, then.step_s)


def trainer_knobs(config: RunConfig, spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Yields settings for the same GPUs, then for twice as many, then for larger ones."""
    t = config.trainer
    if t.tp > 1 and not t.sequence_parallel:
        yield {"trainer.sequence_parallel": True}
    if not t.recompute:
        yield {"trainer.recompute": True}
    if t.zero == 0:
        yield {"trainer.zero": 1}
    if t.zero < 3 and t.dp * t.cp > 1 and not t.ddp and not t.optimizer.offload:
        yield {"trainer.zero": 3}
    if (
        t.max_tokens_per_microbatch // 2
        >= config.rollout.max_tokens + config.plan.mean_prompt_tokens
    ):
        yield {"trainer.max_tokens_per_microbatch": t.max_tokens_per_microbatch // 2}
    if not t.optimizer.offload and config.model.dtype == "bfloat16":
        yield {"trainer.optimizer.offload": True}
    if t.dp % 2 == 0:
        yield {"trainer.tp": 2 * t.tp, "trainer.dp": t.dp // 2, "trainer.sequence_parallel": True}
        first, last = even_stages(spec.num_layers, 2 * t.pp)
        stages = {"trainer.first_stage_layers": first, "trainer.last_stage_layers": last}
        keep = {}
        for key, value in stages.items():
            if value is not None or getattr(t, key.split(".")[1]) is not None:
                keep[key] = value
        yield {"trainer.pp": 2 * t.pp, "trainer.dp": t.dp // 2} | keep
        yield {"trainer.cp": 2 * t.cp, "trainer.dp": t.dp // 2}
    if spec.experts:
        yield {"trainer.ep": 2 * t.ep}
    yield {"trainer.dp": 2 * t.dp}
    yield from _larger_gpu(config)


def generator_knobs(config: RunConfig) -> Iterator[dict[str, Any]]:
    g = config.generator
    for share in (2, 4, 8):
        if g.max_concurrency >= share and g.kv_cache_tokens is None:
            yield {"generator.max_concurrency": g.max_concurrency // share}
    if g.quantization is None:
        yield {"generator.quantization": "fp8_block"}
    if g.engines % 2 == 0:
        yield {"generator.tp": 2 * g.tp, "generator.engines": g.engines // 2}
    else:
        yield {"generator.tp": 2 * g.tp}
    if g.mem_fraction < 0.9:
        yield {"generator.mem_fraction": 0.9}
    yield from _larger_gpu(config)


def _larger_gpu(config: RunConfig) -> Iterator[dict[str, Any]]:
    larger = {
        "RTX4090": "L40S",
        "L40S": "H100",
        "A100": "H200",
        "H100": "H200",
        "H200": "B200",
        "B200": "B300",
    }.get(config.cluster.gpu)
    if larger:
        yield {"cluster.gpu": larger}
