"""`megarl plan` and `megarl reshard`: a resolved config's plan, or its reshard map, as values, as
text, and as a picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megarl.base.results import CommandResult
from megarl.config.errors import ConfigError
from megarl.estimate import report
from megarl.estimate.baseline import best_baseline
from megarl.estimate.estimate import check_longest, estimate, steps_by_capacity, to_json
from megarl.estimate.hardware import Cluster
from megarl.estimate.memory import rank_bytes
from megarl.estimate.search import remedies, search
from megarl.estimate.theory import compare, measured_etas
from megarl.estimate.times import update_bytes_per_s
from megarl.lora.estimate import adapters_s
from megarl.plan.checks import refused_by_train
from megarl.plan.resolve import RunPlan, resolve
from megarl.plan.topologies import engines_layout, evaluation_group, gpus_of_run
from megarl.reshard import report as map_report
from megarl.reshard.forwarding import planned_relays
from megarl.reshard.layout import Layout, parameter_count, trainer_layout
from megarl.reshard.map import ReshardMap


def run_plan(
    plan: RunPlan,
    command: str,
    *,
    searching: bool = False,
    theory: bool = False,
    eta: Sequence[str] = (),
    budget: int | None = None,
    picture: str | None = None,
) -> CommandResult:
    """The plan of the config; with `searching`, of the best config on `budget` GPUs.

    Its `fits` says whether it can be run: it fits, and megarl train would accept it.

    `command`: the config and its overrides, as given by the user. `theory`: whether to add the
    optimum of LlamaRL's section 7 besides the best config; `eta`: measurements for it
    (theory.measured_etas). Raises ConfigError for what cannot be planned.
    """
    _check_options(plan, searching, theory, budget)
    if eta and not theory:
        raise ConfigError("--eta: needs --theory")
    measured = measured_etas(eta)
    # they keep their GPUs
    served = sum(role.settings.engines * role.settings.tp for role in plan.served)
    search_result = None
    optima = None
    base_config = plan.config
    beside = evaluation_group(base_config).topology.world_size
    budget = gpus(plan) + beside if budget is None else budget - served
    if searching or theory:
        search_result, best = search(base_config, plan.spec, budget)
        optima = compare(search_result, best, plan.spec, budget, measured) if theory else None
        plan = resolve(best, "plan") if searching else plan
    check_longest(plan.config, plan.spec)
    estimated = estimate(plan.config, plan.spec)
    baseline = best_baseline(plan.config, plan.spec, gpus(plan))
    cures = remedies(plan.config, plan.spec, estimated)
    facts = describe(plan)
    refused = refused_by_train(plan.config, plan.spec)
    ignored_settings = report.not_counted(plan.config)
    steps_by_way = steps_by_capacity(plan.config, plan.spec) if estimated.shared else {}
    if picture:
        from megarl.estimate.picture import draw  # matplotlib takes longer than the plan

        title = f"{facts['family']}, {sizes(facts['trainer'])}; {sizes(facts['generator'])}"
        draw(estimated, baseline, picture, title)
    lines = [*_role_lines(plan, facts), *report.render(estimated, baseline, cures, refused)]
    facts |= to_json(estimated, baseline.step_s if baseline else None) | report.details(
        estimated, baseline, cures
    )
    facts |= {
        "fits": not estimated.overfull and not refused,
        "not_counted": ignored_settings,
        "refused": refused,
    }
    if steps_by_way:
        facts["share_gpus"] = {
            "step_s": steps_by_way,
            "capacity": report.advised_capacity(steps_by_way),
        }
        lines.append(report.render_sharing(steps_by_way))
    if ignored_settings:
        lines.append(f"not counted: {', '.join(ignored_settings)}")
    if searching and search_result:
        facts["search"] = report.search_details(search_result)
        lines += report.render_search(search_result, budget, base_config, command)
    if optima:
        facts["theory"] = asdict(optima)
        lines += report.render_theory(optima, budget)
    return CommandResult(facts, "\n".join(lines))


def _check_options(plan: RunPlan, searching: bool, theory: bool, budget: int | None) -> None:
    """Raises ConfigError for options that do not fit each other or the config."""
    if budget is not None and not (searching or theory):
        raise ConfigError(f"--gpus {budget}: needs --search or --theory")
    if (searching or theory) and plan.config.cluster.share_gpus:
        raise ConfigError(
            f"--{'search' if searching else 'theory'}: needs cluster.share_gpus=false: each side "
            "gets GPUs of its own"
        )
    if theory and plan.config.generator.has_groups:
        raise ConfigError(
            "--theory: generator.groups must be empty: LlamaRL's section 7 is on engines of one "
            "shape"
        )


def _role_lines(plan: RunPlan, facts: dict[str, Any]) -> Iterator[str]:
    rollout = plan.config.rollout
    yield f"model      {facts['family']}, {facts['parameters']:,} parameters, {facts['dtype']}"
    for name in ("trainer", "generator"):
        role = facts[name]
        ranks = f"{role['ranks']} rank{'s' * (role['ranks'] > 1)}"
        groups = role.get("groups", {})
        yield f"{name:<10} {sizes(role)}: {ranks}; weights {gib_range(role)} a rank"
        for group, group_facts in groups.items():
            precision = group_facts["quantization"] or facts["dtype"]
            ranks = f"{group_facts['ranks']} rank{'s' * (group_facts['ranks'] > 1)}"
            yield (
                f"           {group}: {ranks}, {precision}; weights {gib_range(group_facts)} a rank"
            )
    count = evaluation_group(plan.config).topology.world_size
    if count:
        ranks = f"{count} rank{'s' * (count > 1)}"
        yield (
            f"evaluation engines {plan.config.eval.engines}, tp {plan.config.generator.tp}: "
            f"{ranks}; as the generator's"
        )
    for role in plan.served:
        engines = role.settings.engines
        tp = role.settings.tp
        ranks = f"{engines * tp} rank{'s' * (engines * tp > 1)}"
        yield (
            f"{role.name:<10} engines {engines}, tp {tp}: {ranks}; a {role.spec.family} model, "
            "frozen"
        )
    optimizer_steps = plan.config.trainer.optimizer_steps
    optimizer_text = f" of {optimizer_steps} optimizer steps each" if optimizer_steps > 1 else ""
    prompts = (
        f"{rollout.prompts_per_step} prompts x {rollout.n} samples of at most "
        f"{rollout.max_tokens} tokens"
    )
    yield f"a step     {prompts}; {plan.steps} steps{optimizer_text}"


def run_map(
    plan: RunPlan,
    *,
    delta: float = 0.01,
    link: float | None = None,
    dump: str | None = None,
    picture: str | None = None,
    rank: str | None = None,
) -> CommandResult:
    """The config's map, proven, dumped and drawn.

    The arguments are the options of the command line, whose help explains them. Raises ConfigError
    for impossible options.
    """
    config = plan.config
    if not 0 <= delta <= 1:
        raise ConfigError(f"--delta {delta:g}: must be at least 0 and at most 1")
    if link is not None and not link > 0:
        raise ConfigError(f"--link {link:g}: must be more than 0")
    reshard_map, forwarding = planned_relays(
        ReshardMap.build(*layouts(plan)), config.weights.relay, config.generator.tp
    )
    # as in megarl plan
    rate = link * 1e9 if link else update_bytes_per_s(config, Cluster.of(config))
    facts = map_report.to_json(reshard_map, forwarding, rate, delta)  # proves it
    if plan.adapters:
        facts["lora_predicted_s"] = adapters_s(
            plan.spec, config, Cluster.of(config).gpu.device, rate
        )
    if dump:
        with open(dump, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in map_report.dump_lines(reshard_map))
    if picture:
        from megarl.reshard.picture import draw  # not at the top: it imports matplotlib

        title = (
            f"{plan.spec.family}, {sizes(asdict(plan.trainer_topology))} to "
            f"{sizes(describe(plan)['generator'])}"
        )
        draw(reshard_map, picture, title, forwarding)
    if rank:
        copies = map_report.copies_of(reshard_map, rank)
        part_s = map_report.own_part_s(reshard_map, rank)
        facts |= {
            "rank": rank,
            "rank_part_s": part_s,
            "rank_copies": list(map(map_report.copy_fields, copies)),
        }
        return CommandResult(facts, "\n".join(map_report.render_copies(rank, copies, part_s)))
    lines = [map_report.render(reshard_map, rate, forwarding, delta)]
    if facts.get("lora_predicted_s"):  # the engines can serve the adapters
        lines.append(
            f"{facts['lora_predicted_s']:.3g} s for an update of the adapters alone "
            "(lora.sync=adapter)"
        )
    lines.append("proven: every destination byte is written exactly once")
    return CommandResult(facts, "\n".join(lines))


def layouts(plan: RunPlan) -> tuple[Layout, Layout]:
    """The layouts of trainer and generator on machines of cluster.gpu."""
    dtype = plan.config.model.dtype
    device = Cluster.of(plan.config).gpu.device
    trainer = trainer_layout(plan.spec, plan.trainer_topology, dtype)
    return trainer, engines_layout(plan.config, plan.spec, device)


def gpus(plan: RunPlan) -> int:
    return gpus_of_run(plan.config)


def describe(plan: RunPlan) -> dict[str, Any]:
    """Parallel sizes of the roles, parameters, and bytes of weights per rank, as plain values."""
    trainer, generator = layouts(plan)
    evaluation = {}
    count = evaluation_group(plan.config).topology.world_size
    if count:
        evaluation = {"evaluation": {"ranks": count, "engines": plan.config.eval.engines}}
    return {
        "family": plan.spec.family,
        "dtype": plan.config.model.dtype,
        "parameters": parameter_count(plan.spec),
        "trainer": {
            "ranks": trainer.world_size,
            **asdict(plan.trainer_topology),
            **_weight_bytes(trainer),
        },
        "generator": {"ranks": generator.world_size, **_engines(plan), **_weight_bytes(generator)},
        **evaluation,
        "steps": plan.steps,
        "sequences_per_step": plan.sequences_per_step,
    }


def _engines(plan: RunPlan) -> dict[str, Any]:
    """The sizes of the engines, or those of each group, with its weights."""
    if not plan.config.generator.has_groups:
        return asdict(plan.config.generator.topology)
    device = Cluster.of(plan.config).gpu.device
    groups = {}
    for group in plan.groups:
        layout = engines_layout(plan.group_alone(group.name).config, plan.spec, device)
        group_facts = {"quantization": group.settings.quantization, **_weight_bytes(layout)}
        groups[group.name] = {"ranks": layout.world_size, **asdict(group.topology), **group_facts}
    return {"engines": plan.engines, "groups": groups}


def sizes(role: dict[str, Any]) -> str:
    """The parallel sizes of a role, such as `tp 8, pp 16, dp 4`."""
    if "groups" in role:
        return "; ".join(f"{name}: {sizes(group)}" for name, group in role["groups"].items())
    shown = {key: role[key] for key in ("engines", "tp", "pp", "dp") if key in role}
    shown |= {
        key: role[key] for key in ("vpp", "cp", "ep", "etp", "dp_attention") if role.get(key, 1) > 1
    }
    return ", ".join(f"{key} {size}" for key, size in shown.items())


def gib_range(role: dict[str, Any]) -> str:
    low, high = (f"{role[key] / 2**30:.3f}" for key in ("weight_bytes_min", "weight_bytes_max"))
    return f"{high} GiB" if low == high else f"{low} to {high} GiB"


def _weight_bytes(layout: Layout) -> dict[str, int]:
    """Bytes on the rank with the least and on the rank with the most (pipeline stages differ),
    including padding.
    """
    bytes_by_rank = rank_bytes(layout)
    return {"weight_bytes_min": min(bytes_by_rank), "weight_bytes_max": max(bytes_by_rank)}
