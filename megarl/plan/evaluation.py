"""Engines of their own for held-out evaluation (`eval.engines`): which versions are evaluated, and the plan that these engines follow."""

from __future__ import annotations

from dataclasses import replace

from megarl.config.schema import RunConfig
from megarl.plan.lora import sends_adapters
from megarl.plan.resolve import RunPlan
from megarl.types import Version


def is_due(config: RunConfig, version: Version) -> bool:
    """Whether this version of the weights is evaluated: the first, the last, and every `eval.every`-th."""
    return version in (0, config.max_steps) or (config.eval.every > 0 and version % config.eval.every == 0)


def evaluation_plan(plan: RunPlan) -> RunPlan:
    """The plan with the evaluation's engines in the generator's place. Each version is written whole, since they lack those in between; no
    request runs meanwhile, and probes are the generator's."""
    config, merges = plan.config, not sends_adapters(plan.config, plan.spec)  # which weights.delta has decided
    own = replace(
        config,
        lora=replace(config.lora, sync="merge") if merges else config.lora,
        generator=replace(config.generator, engines=config.eval.engines),
        async_=replace(config.async_, partial_rollout="block", chunk_tokens=None),
        weights=replace(config.weights, delta="off"),
        observe=replace(config.observe, probe_every=0),
    )
    return replace(plan, config=own, generator_topology=replace(plan.generator_topology, engines=config.eval.engines))
