"""Estimates, searches and theory as text, and their details for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megarl.config.keys import Settings, value_at, with_settings
from megarl.config.schema import RunConfig
from megarl.estimate.baseline import Baseline
from megarl.estimate.estimate import Estimate, GroupEstimate, generate_parts, train_parts
from megarl.estimate.hardware import GIB, Gpu
from megarl.estimate.memory import KV_ITEM_BYTES, dropped_share
from megarl.estimate.search import (
    Remedy,
    SearchResult,
    Side,
    as_overrides,
)
from megarl.estimate.theory import Optima
from megarl.estimate.times import CHANGED, GenerateTime
from megarl.plan.topologies import engine_groups, generator_ranks, groups_of_run


def render(
    result: Estimate,
    baseline: Baseline | None,
    remedies: Iterable[Remedy],
    refused: Iterable[str] = (),
) -> Iterator[str]:
    """`refused`: what megarl train would refuse."""
    yield from _memory(result)
    yield from _time(result, baseline)
    yield f"binds      {result.binding}"
    problems = list(refused)
    for problem in problems:
        yield f"refused    by megarl train: {problem}"
    yield from _verdict(result, list(remedies), refused=bool(problems))


CLOSE = 0.03  # settings whose speeds differ by less are equally fast
# On a shared GPU both at once is up to this much faster by mean times than by --simulate, because
# the trainer then also waits for the longest responses.
MEAN_TIMES_ERROR = 0.14
COUNTED = (
    "overlap_grad_reduce",
    "moe_token_dispatcher_type",
    "fp8",
    "fp8_recipe",
    "chunked_prefill_size",
    "disable_overlap_schedule",
)


def not_counted(config: RunConfig) -> list[str]:
    """The settings of Megatron and SGLang that no estimate depends on, and dynamic sampling if it
    drops an unknown share.
    """
    trainer = config.trainer
    mappings = {
        "trainer.megatron": trainer.megatron,
        "trainer.ddp": trainer.ddp,
        "trainer.optimizer.megatron": trainer.optimizer.megatron,
        **{
            f"{group.key}.server_args": group.settings.server_args
            for group in engine_groups(config.generator)
        },
        **{
            f"roles.{name}.server_args": role.server_args
            for name, role in config.roles.items()
            if role is not None
        },
    }
    unknown = []
    if dropped_share(config) is None:
        unknown.append("rollout.dynamic_sampling (set plan.dropped_share)")
    for key, settings in mappings.items():
        for name, value in settings.items():
            if name not in COUNTED and not _is_counted_cache(name, value):
                unknown.append(f"{key}.{name}")
    return unknown


def _is_counted_cache(name: str, value: Any) -> bool:
    return name == "kv_cache_dtype" and value in ("auto", *KV_ITEM_BYTES)


def _memory(result: Estimate) -> Iterator[str]:
    """The memory of both sides, by parts."""
    sides = gib_parts(result.trainer), gib_parts(result.generator)
    capacity = f"GiB per GPU, of {result.cluster.gpu.memory_gib:g} ({result.cluster.gpu.name})"
    yield f"memory     {capacity:<38}{'trainer':>9}  {'generator':>9}"
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        cells = (f"{side[name]:9.2f}" if name in side else " " * 9 for side in sides)
        if any(side.get(name) for side in sides):
            yield f"           {name:<38}{'  '.join(cells).rstrip()}"
    yield (
        f"           {'total':<38}{result.trainer.total / GIB:9.2f}  "
        f"{result.generator.total / GIB:9.2f}"
    )
    if result.shared:
        yield (
            "           "
            f"{'of both, on one GPU (share_gpus)':<38}{result.fullest.gpu_total / GIB:20.2f}"
        )
    for name, role in result.served.items():
        yield (
            f"           {f'total of {name}, {role.gpus} ranks':<38}{role.memory.total / GIB:20.2f}"
        )
    for group in result.groups:
        if len(result.groups) > 1:
            yield (
                "           "
                f"{f'total of {group.key}, {group.gpus} ranks':<38}{group.memory.total / GIB:20.2f}"
            )
        yield f"           engines' weights and KV cache {_static(group, result.cluster.gpu)}"
        yield f"           {_requests(group)}"
    if result.offloaded:
        yield (
            f"           the optimizer takes {result.offloaded / GIB:.1f} GiB of a trainer "
            "node's memory (trainer.optimizer.offload)"
        )
    effect = "stops training for"
    if result.saving:
        effect = "is written from its memory in"
    rate = f"plan.checkpoint_gb_s={result.checkpoint / result.checkpoint_s / 1e9:g}"
    yield (
        f"           a checkpoint of {result.checkpoint / GIB:.3g} GiB a trainer node {effect} "
        f"{result.checkpoint_s:.3g} s ({rate})"
    )
    if result.shadow and not result.trainer.shadow:
        gib = result.shadow / GIB
        yield (
            f"           what was sent last takes {gib:.1f} to {2 * gib:.1f} GiB of a trainer "
            "node's memory, which is pinned"
        )
    if result.inboxes:
        gib = result.inboxes / GIB
        yield (
            f"           inboxes for what has changed take {gib:.1f} to {2 * gib:.1f} GiB of an "
            "engine node's memory, which is pinned"
        )


def _static(group: GroupEstimate, gpu: Gpu) -> str:
    """What an engine's weights and KV cache take of the memory that they may take."""
    static_gib = group.memory.static / GIB
    limit_gib = group.static_limit / GIB
    setting = f"{group.key}.mem_fraction"
    if static_gib <= limit_gib:
        return f"take {static_gib:.1f} of {limit_gib:.1f} GiB of {setting}"
    if limit_gib > 0:
        over = f"{static_gib - limit_gib:.1f} GiB more than the {limit_gib:.1f} GiB of {setting}"
        return f"need {static_gib:.1f} GiB, {over}"
    trainer = f"the trainer beside them takes {group.occupied / GIB:.1f} of the GPU's"
    return f"need {static_gib:.1f} GiB, but {trainer} {gpu.memory_gib:g} GiB"


def _requests(group: GroupEstimate) -> str:
    """How many requests an engine's KV cache holds, and what a larger cache would save."""
    running = f"{group.time.concurrency:.0f} requests run at once in an engine"
    line = (
        f"{running}; its KV cache of {group.kv_tokens:,} tokens holds "
        f"{group.at_full_length:.0f} of full length"
    )
    saved_s = group.time.total - group.unbounded_s
    if saved_s > 0.005 * group.time.total:
        line += f", and costs {saved_s:.3g} s a step"
    return line


def _time(result: Estimate, baseline: Baseline | None) -> Iterator[str]:
    w = result.workload
    lengths = (
        f"{w.response_tokens:g} tokens on average, {w.max_response_tokens:g} at most, to "
        f"prompts of {w.prompt_tokens:g}"
    )
    dropped_sequences = result.generated.sequences - w.sequences
    dropped = f" (and {dropped_sequences} that are dropped)" if dropped_sequences else ""
    yield f"time       seconds a step; {w.sequences} responses{dropped} of {lengths}"
    for name, seconds, parts in (
        ("training", result.train.total, train_parts(result.train)),
        ("generation", result.generate.total, generate_parts(result.generate)),
    ):
        large_parts = []
        for part, value in parts.items():
            if value >= 0.005 * seconds:
                large_parts.append(f"{part} {value:.3g}")
        shown = ", ".join(large_parts)
        yield f"           {name:<14}{seconds:9.2f}   {shown}"
    for group in result.groups if len(result.groups) > 1 else ():
        rate = (
            f"{group.tokens_per_s:.0f} tokens/s by {group.engines} engines, {group.share:.0%} "
            "of the responses"
        )
        yield f"           {f'  {group.name}':<14} {group.time.total:8.2f}   {rate}"
    for name, role in result.served.items():
        yield (
            f"           {f'scores of {name}':<14} {role.score_s:8.2f}   beside generation, as "
            "responses finish"
        )
    yield from _update_time(result)
    mode = "the slower side" if result.overlaps else "both sides, one after the other"
    if result.places_wait_s > 0.005 * result.step_s:
        mode += ", waits"
        yield (
            f"           {'waits':<14}{result.places_wait_s:9.2f}   for each prompt's last "
            "response, which keeps its place (async.capacity, async.max_in_flight)"
        )
    yield (
        f"           {'a step':<14}{result.step_s:9.2f}   {mode}, the update, "
        f"and {result.glue_s:.3g} for all else"
    )
    if baseline:
        ratio = baseline.step_s / result.step_s
        yield (
            f"           {'synchronous':<14}{baseline.step_s:9.2f}   x{ratio:.2f}; the best on as "
            "many GPUs:"
        )
        yield f"           {'':<14}{'':9}   {baseline.describe()}"
    else:
        yield f"           {'synchronous':<14}{'-':>9}   nothing fits on as many GPUs"
    yield f"rates      {result.train.tflops:.0f} TFLOP/s per training GPU; {_decode(result)}"


def _update_time(result: Estimate) -> Iterator[str]:
    content = "adapters over its link" if result.sends_adapters else "bytes over its link"
    if result.writes_bind:
        content = "number of writes"
    bytes_s = result.sync_s - result.control_s
    yield f"           {'weight update':<14}{bytes_s:9.3g}   the busiest rank's {content}"
    if not result.sends_adapters:
        yield (
            f"           {'':<14}{result.delta_sync_s - result.control_s:9.2g}   if {CHANGED:.0%} "
            "of the elements have changed, with weights.delta=auto"
        )
    yield (
        f"           {'':<14}{result.control_s:9.2g}   more for its messages and calls, in "
        "either case"
    )


def _decode(result: Estimate) -> str:
    if len(result.groups) > 1:
        return "; ".join(f"{group.name}: {_decode_rate(group.time)}" for group in result.groups)
    return _decode_rate(result.generate)


def _decode_rate(g: GenerateTime) -> str:
    return (
        f"{1 / g.token_s:.0f} tokens/s per request at {g.concurrency:.0f} requests an engine, "
        f"{g.memory_share:.0%} of it reading memory"
    )


def render_sharing(steps: Mapping[int, float]) -> str:
    """Which of the two ways to share GPUs takes how long. `steps`: as from steps_by_capacity."""
    shown = (
        f"async.capacity=0: {steps[0]:.4g} s a step, in turns; 1: {steps[1]:.4g} s, both at "
        "once, whose kernels take turns"
    )
    capacity = advised_capacity(steps)
    ask = "which to take, --simulate --sweep async.capacity=0,1 says"
    return f"shared     {shown}; {ask if capacity is None else f'take {capacity}'}"


def advised_capacity(steps: Mapping[int, float]) -> int | None:
    """The faster one. If they are equally fast, 0, whose tokens are of the newest weights. None:
    the difference is within the error of mean times, so that only a simulation can tell.
    """
    gain = 1 - steps[1] / steps[0]
    if gain <= CLOSE:
        return 0
    return 1 if gain > MEAN_TIMES_ERROR else None


def _verdict(result: Estimate, remedies: list[Remedy], refused: bool) -> Iterator[str]:
    if not result.overfull:
        if refused:
            yield "fits       no: into memory, but megarl train refuses these settings"
        else:
            yield "fits       yes"
        return
    too_large = " and ".join(
        f"the {side} is {gib:.1f} GiB" for side, gib in result.overfull.items()
    )
    beside = ", beside the trainer" if result.shared and "trainer" not in result.overfull else ""
    yield f"fits       no: {too_large} per GPU too large{beside}"
    for side in result.overfull:
        fitting = [remedy for remedy in remedies if remedy.side == side]
        if fitting:
            yield f"           the {side} would fit with any of these, planned anew:"
        for remedy in fitting:
            yield f"             {as_overrides(remedy.settings)}: {remedy.gib:.1f} GiB"
        if side.startswith("generator.groups."):
            yield (
                f"           {side} would take less with a larger tp, or a smaller "
                "max_concurrency or kv_cache_tokens, or in fp8_block"
            )
        elif side in result.served:
            yield (
                f"           {side} would take less with a larger roles.{side}.tp, or a smaller "
                "max_concurrency or kv_cache_tokens"
            )
        elif not fitting:
            yield (
                f"           no three settings of the {side} together make it fit: take more "
                "GPUs, or a smaller model"
            )


def render_search(
    result: SearchResult, gpus: int, base_config: RunConfig, command: str
) -> Iterator[str]:
    """The search's choice and its limits, and the overrides that change `base_config`, given
    as `command`, to it.
    """
    settings = result.settings
    m_t = settings["trainer.tp"] * settings["trainer.cp"] * settings["trainer.pp"]
    config = with_settings(base_config, settings)
    side = config.generator
    groups = engine_groups(side)
    microbatch = settings["trainer.max_tokens_per_microbatch"]
    gpus_in_use = m_t * settings["trainer.dp"] + generator_ranks(groups_of_run(config))
    if len(groups) == 1:
        engine = groups[0].settings
        precision = groups[0].settings.quantization or "model.dtype"
        engines = (
            f"m_g {engine.tp}, b_t {microbatch} tokens, b_g {engine.max_concurrency}, theta "
            f"{result.theta:.3f}, engines in {precision}"
        )
    else:
        counts = ", ".join(f"{group.settings.engines} engines of {group.name}" for group in groups)
        engines = (
            f"b_t {microbatch} tokens, theta {result.theta:.3f}; {counts}, in the given proportions"
        )
    yield f"search     {gpus} GPUs, {gpus_in_use} of them used: m_t {m_t}, {engines}"
    yield (
        "           by GPU-seconds both sides would take equally long at theta "
        f"{result.balanced_theta:.3f} (lemma B.3)"
    )
    for name, side, larger in (
        ("trainer", result.trainer, result.trainer_too_large),
        ("generator, with its KV cache", result.generator, result.generator_too_large),
    ):
        spare = max(0.0, -side.over_gib)
        yield (
            f"           {name}: {side.seconds:.2f} s, {spare:.1f} GiB to spare; "
            f"{_memory_limit(side, larger)}"
        )
    changed = {key: value for key, value in settings.items() if value_at(base_config, key) != value}
    yield f"           {command} {as_overrides(changed)}"


def render_theory(optima: Optima, gpus: int) -> Iterator[str]:
    closed = optima.closed_form
    searched = optima.search
    synchronous = optima.synchronous
    yield (f"theory     {f'LlamaRL, section 7, on {gpus} GPUs':<44}{'optimum':>11}  {'search':>9}")
    for name, key in (
        ("b_t, sequences a microbatch", "b_t"),
        ("b_g, requests an engine", "b_g"),
        ("m_t, GPUs a model in training", "m_t"),
        ("m_g, GPUs an engine", "m_g"),
        ("theta, share of the GPUs that trains", "theta"),
        ("training and generation, s a step", "step_s"),
    ):
        yield f"           {name:<44}{getattr(closed, key):11.4g}  {getattr(searched, key):9.4g}"
    sizes = f"b_t {synchronous.b_t:.4g}, b_g {synchronous.b_g:.4g}, m {synchronous.m:.4g}"
    yield f"           the synchronous optimum: {synchronous.step_s:.4g} s a step, {sizes}"
    yield (
        f"           so asynchronous can be at least x{optima.speedup_bound:.2f} as fast "
        "(theorem 7.5):"
    )
    yield (
        f"           x{optima.memory_factor:.2f}, as each side has its GPUs' memory alone (equation 11, "
        f"step a); x{optima.batch_factor:.2f}, as each has its own best batch (b)"
    )
    for side, eta in optima.measured.items():
        batches = ", ".join(f"{b:.4g}: {s:.4g} s" for b, s in zip(eta.batches, eta.seconds))
        increases = [f"{small:.4g} to {large:.4g}" for small, large in eta.increases()]
        verdict = "it decreases (assumption 7.1)"
        if increases:
            verdict = (
                f"it does not decrease from {', '.join(increases)}, against assumption 7.1, so the "
                "theorem promises nothing"
            )
        yield f"           eta_{side} measured, {batches}: {verdict}"


def _memory_limit(best: Side, larger: Side | None) -> str:
    if larger is None:
        return "no shape that memory rules out would be faster"
    changed = {key: value for key, value in larger.settings.items() if best.settings[key] != value}
    return (
        f"memory binds: {larger.seconds:.2f} s with {as_overrides(changed)}, {larger.over_gib:.1f} "
        "GiB too large"
    )


def gib_parts(memory: Any) -> dict[str, float]:
    return {
        name.replace("_", " ").replace("kv cache", "KV cache"): value / GIB
        for name, value in vars(memory).items()
    }


def details(
    result: Estimate, baseline: Baseline | None, remedies: Iterable[Remedy]
) -> dict[str, Any]:
    """The keys of `megarl plan --json` in addition to the fixed ones."""
    shared = {}
    if result.shared:
        shared = {"shared_gib_per_gpu": result.fullest.gpu_total / GIB}
    groups = {}
    if len(result.groups) > 1:
        groups = {"groups": {group.name: group.facts for group in result.groups}}
    return {
        "gpu": result.cluster.gpu.name,
        "gpu_memory_gib": result.cluster.gpu.memory_gib,
        "trainer_memory_gib": {name: value / GIB for name, value in vars(result.trainer).items()},
        "generator_memory_gib": {
            name: value / GIB for name, value in vars(result.generator).items()
        },
        "marks_gib": result.marks_gib,
        "too_large_gib": result.overfull,
        **shared,
        "delta_sync_s": result.delta_sync_s,
        "control_s": result.control_s,
        "places_wait_s": result.places_wait_s,
        "shadow_gib_per_node": result.shadow / GIB,
        "inboxes_gib_per_node": result.inboxes / GIB,
        "saving_gib_per_node": result.saving / GIB,
        "checkpoint_s": result.checkpoint_s,
        "offloaded_gib_per_node": result.offloaded / GIB,
        "train_parts_s": train_parts(result.train),
        "generate_parts_s": generate_parts(result.generate),
        "train_tflops_per_gpu": result.train.tflops,
        "concurrency_per_engine": result.generate.concurrency,
        "kv_cache_tokens": min(group.kv_tokens for group in result.groups),
        "decode_step_s": result.generate.token_s,
        "sync_baseline": baseline.describe() if baseline else None,
        **groups,
        "roles": {
            name: {"gpus": r.gpus, "gib_per_gpu": r.memory.total / GIB, "score_s": r.score_s}
            for name, r in result.served.items()
        },
        "remedies": [
            {"side": r.side, "settings": dict(r.settings), "gib_per_gpu": r.gib} for r in remedies
        ],
    }


def search_details(result: SearchResult) -> dict[str, Any]:
    settings: Settings = result.settings
    return {
        "settings": dict(settings),
        "theta": result.theta,
        "balanced_theta": result.balanced_theta,
    }
