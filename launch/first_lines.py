"""The lines that a command prints before it starts: what it does, with which weights, and which settings have changed."""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.kept_sets import MOST_KEPT
from megarl.launch.resuming import Resume
from megarl.models.spec import SCALAR
from megarl.plan.critic import critic_path
from megarl.plan.lora import sends_adapters, why_merged
from megarl.plan.resolve import RunPlan
from megarl.plan.resume import changes
from megarl.plan.weights import needs_reference
from megarl.rewards import code
from megarl.rewards.parts import all_parts
from megarl.sandbox import jail


def headline(plan: RunPlan, step: int, nodes: int) -> str:
    config = plan.config
    start = f"from the checkpoint of step {step}" if step else "from the start"
    engines = f"{config.generator.engines} engine{'s' * (config.generator.engines > 1)} TP{config.generator.tp}"
    where = f" on {nodes} nodes" if nodes > 1 else ""
    evaluating = f", {config.eval.engines} more to evaluate" if config.eval.engines else ""
    capacity = "unbounded" if config.async_.capacity is None else config.async_.capacity
    batch = f"{config.rollout.prompts_per_step} prompts x {config.rollout.n} samples"
    return (
        f"Asynchronous RL ({config.algorithm.name}, capacity {capacity}): {config.max_steps} steps {start}\n"
        f"  {batch}, trainer {sizes(plan)} -> {engines}{evaluating}{where}\n  in {config.run_dir}"
    )


def weights_lines(plan: RunPlan, resume: Resume) -> list[str]:
    """Says which weights a run starts from; for a resumed one also which settings differ from its last start."""
    if not resume.checkpoint:
        return [f"Weights: {plan.weights}", *_adapter_lines(plan), *_critic_lines(plan)]
    lines = [f"Weights: the checkpoint {resume.checkpoint}"]
    if plan.config.lora.rank:
        lines.append(f"Adapters: rank {plan.config.lora.rank}, of what the run began with, {plan.weights}")
        lines += _sync_lines(plan)
    elif needs_reference(plan.config):
        lines.append(f"Reference model: what the run began with, {plan.weights}")
    return [*lines, *(f"Changed: {change}" for change in changes(plan.config))]


def role_lines(plan: RunPlan) -> list[str]:
    """The frozen models."""
    sizes = [(role, role.settings.engines, role.settings.tp) for role in plan.served]
    served = [f"Role {r.name}: {r.settings.path}, frozen, on {n} engine{'s' * (n > 1)} TP{tp}" for r, n, tp in sizes]
    return served + [f"Role {role.name}: {role.path}, frozen, on the trainer's ranks" for role in plan.frozen]


def _adapter_lines(plan: RunPlan) -> list[str]:
    lora = plan.config.lora
    if not lora.rank:
        return []
    begins = f"lora.init={lora.init}" if lora.init else f"A random by seed {plan.config.seed}, B zero"
    return [
        f"Adapters: rank {lora.rank}, alpha {lora.alpha:g}, of {', '.join(lora.targets)} linear layers, {begins}; the weights are frozen",
        *_sync_lines(plan),
    ]


def _sync_lines(plan: RunPlan) -> list[str]:
    if sends_adapters(plan.config, plan.spec):
        return ["Adapters: sent alone, into the memory from which SGLang serves them"]
    why = "lora.sync=merge" if plan.config.lora.sync == "merge" else "; ".join(why_merged(plan.config, plan.spec))
    return [f"Adapters: each update merges them on the trainer's ranks and sends all weights: {why}"]


def _critic_lines(plan: RunPlan) -> list[str]:
    critic = plan.config.critic
    if plan.critic is None:
        return []
    head = "with a new head, " + ("of zeros" if critic.head == "zeros" else f"random by seed {plan.config.seed}")
    key, path = critic_path(plan.config)
    begins = "the policy's weights" if path is None else f"{key}={path}"
    first = f", {critic.warmup_steps} steps before the policy" if critic.warmup_steps else ""
    return [f"Critic: {begins}, {'a reward model' if plan.critic.head == SCALAR else head}{first}"]


def sampling_lines(plan: RunPlan) -> list[str]:
    """Says what is particular in drawing tokens: from parts of the vocabulary, or again."""
    rollout, lines = plan.config.rollout, list[str]()
    if plan.config.async_.partial_rollout == "abort":
        lines.append(
            "Sampling: async.partial_rollout=abort begins what an update interrupts again from the prompt. That is mostly long responses, "
            "so they become rarer than the policy makes them: the mean length falls by a tenth to a fifth (docs/asynchrony.md)"
        )
    if rollout.truncated and rollout.top_k < 0 and plan.spec.vocab_size > MOST_KEPT:
        lines.append(
            f"Sampling: rollout.top_p={rollout.top_p:g}, min_p={rollout.min_p:g} of the {MOST_KEPT} likeliest tokens, since no more are "
            "recorded; the metric mask/overflow counts the tokens drawn from so many"
        )
    if rollout.truncated and not rollout.replay_mask:
        lines.append(
            "Sampling: with rollout.replay_mask=false the engine's log-probs are over the tokens it keeps, the trainer's over all: ratios "
            "are too low by the share of the probability that is cut off"
        )
    return lines


def sandbox_lines(plan: RunPlan) -> list[str]:
    """Says what the sandboxes of programs do not bound. Those of agents run on the generator's host, which is taken to be like this one."""
    config, lines = plan.config, list[str]()
    if config.rollout.name == "program":
        try:
            kind = jail.kind_for(config.rollout.args.get("sandbox", jail.AUTO))
            lines.append(f"Sandbox of rollout.name=program: {kind}; of a program, {jail.unbounded(kind)}")
        except ConfigError:
            pass  # a dry run, on a machine that is another one
    if any(part.name == code.NAME for part in all_parts(config)):
        lines.append(f"Sandbox of reward.name={code.NAME}: {jail.BWRAP}; of a program, {jail.unbounded(jail.BWRAP)}")
    return lines


def sizes(plan: RunPlan) -> str:
    """The trainer's parallel sizes above 1, such as TP2xDP4."""
    axes = {axis: getattr(plan.trainer_topology, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
    return "x".join(f"{axis.upper()}{size}" for axis, size in axes.items() if size > 1) or "on one rank"
