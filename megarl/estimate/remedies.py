"""Settings that would make a run fit that does not; each is planned again before it is proposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig
from megarl.estimate.baseline import even_stages
from megarl.estimate.estimate import Estimate, estimate
from megarl.estimate.hardware import GIB
from megarl.estimate.knobs import Settings, problems, turned
from megarl.models import ModelSpec


@dataclass(frozen=True)
class Remedy:
    side: str  # "trainer" | "generator"
    settings: Settings
    gib: float  # per GPU of that side, with these settings
    step_s: float


def remedies(config: RunConfig, spec: ModelSpec, found: Estimate) -> list[Remedy]:
    """For each side that is too large, the single settings that make it fit; if there are none, pairs, then threes. Fastest first."""
    return [remedy for side in found.overfull if side not in found.served for remedy in _of_side(config, spec, side)]


def _of_side(config: RunConfig, spec: ModelSpec, side: str) -> list[Remedy]:
    knobs = list(trainer_knobs(config, spec) if side == "trainer" else generator_knobs(config))
    for together in (1, 2, 3):
        tried = (_try(config, spec, side, {k: v for knob in some for k, v in knob.items()}) for some in combinations(knobs, together))
        working = [remedy for remedy in tried if remedy is not None]
        if working:
            return sorted(working, key=lambda remedy: remedy.step_s)
    return []


def _try(config: RunConfig, spec: ModelSpec, side: str, settings: Settings) -> Remedy | None:
    changed = turned(config, settings)
    if problems(changed, spec):
        return None
    try:
        then = estimate(changed, spec)
    except ConfigError:  # an engine cannot have these sizes
        return None
    memory = then.trainer if side == "trainer" else then.generator
    return None if side in then.overfull else Remedy(side, settings, memory.total / GIB, then.step_s)


def trainer_knobs(config: RunConfig, spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Settings for the same GPUs first, then for twice as many, then for larger ones."""
    t = config.trainer
    if t.tp > 1 and not t.sequence_parallel:
        yield {"trainer.sequence_parallel": True}
    if not t.recompute:
        yield {"trainer.recompute": True}
    if t.zero == 0:
        yield {"trainer.zero": 1}
    if t.max_tokens_per_microbatch // 2 >= config.rollout.max_tokens + config.plan.mean_prompt_tokens:
        yield {"trainer.max_tokens_per_microbatch": t.max_tokens_per_microbatch // 2}
    if t.dp % 2 == 0:
        yield {"trainer.tp": 2 * t.tp, "trainer.dp": t.dp // 2, "trainer.sequence_parallel": True}
        first, last = even_stages(spec.num_layers, 2 * t.pp)
        stages = {"trainer.first_stage_layers": first, "trainer.last_stage_layers": last}
        keep = {key: value for key, value in stages.items() if value is not None or getattr(t, key.split(".")[1]) is not None}
        yield {"trainer.pp": 2 * t.pp, "trainer.dp": t.dp // 2} | keep
        yield {"trainer.cp": 2 * t.cp, "trainer.dp": t.dp // 2}
    if spec.num_experts:
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
    larger = {"L40S": "H100", "A100": "H200", "H100": "H200", "H200": "B200"}.get(config.cluster.gpu)
    if larger:
        yield {"cluster.gpu": larger}
