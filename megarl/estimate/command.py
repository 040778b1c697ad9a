"""`megarl plan`: prints a resolved config's plan as a table or a JSON object, and draws it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from megarl.config.errors import ConfigError
from megarl.estimate import report, sides
from megarl.estimate.estimate import check_longest, estimate, to_json
from megarl.estimate.search import best_baseline, remedies, search
from megarl.estimate.theory import compare
from megarl.plan.checks import OF_GPUS, problems_by_group
from megarl.plan.resolve import RunPlan, resolve


def run(
    plan: RunPlan,
    command: str,
    *,
    searching: bool = False,
    theory: bool = False,
    gpus: int | None = None,
    picture: str | None = None,
    as_json: bool = False,
) -> None:
    """Prints the plan of the config, or with `searching` that of the best config on `gpus` GPUs.

    `command`: the config and its overrides, as given by the user. `theory`: whether to print the optimum of LlamaRL's section 7 besides the
    best config. Raises ConfigError for what cannot be planned.
    """
    if gpus is not None and not (searching or theory):
        raise ConfigError(f"--gpus {gpus}: needs --search or --theory")
    if theory and plan.groups[0].name:
        raise ConfigError("--theory: generator.groups must be empty: LlamaRL's section 7 is on engines of one shape")
    served = sum(role.settings.engines * role.settings.tp for role in plan.served)  # they keep their GPUs
    found, optima, asked, budget = None, None, plan.config, sides.gpus(plan) + sides.evaluating(plan) if gpus is None else gpus - served
    if searching or theory:
        found, best = search(asked, plan.spec, budget)
        optima = compare(found, best, plan.spec, budget) if theory else None
        plan = resolve(best, "plan") if searching else plan
    check_longest(plan.config, plan.spec)
    estimated = estimate(plan.config, plan.spec)
    baseline, cures = best_baseline(plan.config, plan.spec, sides.gpus(plan)), remedies(plan.config, plan.spec, estimated)
    facts, refused = sides.describe(plan), problems_by_group(plan.config, OF_GPUS)
    if picture:
        from megarl.estimate.picture import draw  # matplotlib takes longer than the plan

        title = f"{facts['family']}, {sides.sizes(facts['trainer'])}; {sides.sizes(facts['generator'])}"
        draw(estimated, baseline, picture, title)
    if as_json:
        facts |= to_json(estimated, baseline.step_s if baseline else None) | report.details(estimated, baseline, cures)
        facts |= {"not_counted": report.not_counted(plan.config), "refused": refused}
        facts |= {"search": report.search_details(found)} if searching and found else {}
        print(json.dumps(facts | ({"theory": asdict(optima)} if optima else {})))
        return
    _print_roles(plan, facts)
    print(*report.render(estimated, baseline, cures), *(f"refused    by megarl train: {problem}" for problem in refused), sep="\n")
    if left_out := report.not_counted(plan.config):
        print(f"not counted: {', '.join(left_out)}")
    if searching and found:
        print(*report.render_search(found, budget, asked, command), sep="\n")
    if optima:
        print(*report.render_theory(optima, budget), sep="\n")


def _print_roles(plan: RunPlan, facts: dict[str, Any]) -> None:
    rollout = plan.config.rollout
    print(f"model      {facts['family']}, {facts['parameters']:,} parameters, {facts['dtype']}")
    for name in ("trainer", "generator"):
        role = facts[name]
        ranks = f"{role['ranks']} rank{'s' * (role['ranks'] > 1)}"
        groups = role.get("groups", {})
        print(f"{name:<10} {sides.sizes(role)}: {ranks}; weights {sides.gib_range(role)} a rank")
        for group, own in groups.items():
            precision = own["quantization"] or facts["dtype"]
            print(f"           {group}: {own['ranks']} rank{'s' * (own['ranks'] > 1)}, {precision}; weights {sides.gib_range(own)} a rank")
    if evaluating := sides.evaluating(plan):
        ranks = f"{evaluating} rank{'s' * (evaluating > 1)}"
        print(f"evaluation engines {plan.config.eval.engines}, tp {plan.config.generator.tp}: {ranks}; as the generator's")
    for role in plan.served:
        engines, tp = role.settings.engines, role.settings.tp
        ranks = f"{engines * tp} rank{'s' * (engines * tp > 1)}"
        print(f"{role.name:<10} engines {engines}, tp {tp}: {ranks}; a {role.spec.family} model, frozen")
    several = f" of {steps} optimizer steps each" if (steps := plan.config.trainer.optimizer_steps) > 1 else ""
    prompts = f"{rollout.prompts_per_step} prompts x {rollout.n} samples of at most {rollout.max_tokens} tokens"
    print(f"a step     {prompts}; {plan.steps} steps{several}")
