"""Checks settings against each other. (model_checks checks them against the model.)

Each check is a small function that yields problems: the key, its value, what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from megarl.algorithms import recipes
from megarl.config.outputs import folder_problems, new_folder_problems
from megarl.config.rollout import BY_CALLS, OF_HUBS, RolloutConfig
from megarl.config.schema import GRADERS, OWN_PLACE, RewardConfig, RunConfig, SuiteConfig
from megarl.data.benchmarks import LIVECODEBENCH
from megarl.data.held_out import held_out
from megarl.data.mixture import mixture_problems
from megarl.plan.best import check_best
from megarl.plan.checkpoints import check_names
from megarl.plan.megatron_settings import check_megatron_settings
from megarl.plan.quantisation import check_ampere, check_blackwell_blocks, check_evaluated_format, check_format_arguments
from megarl.plan.resume import check_resume
from megarl.plan.roles import check_reward, check_roles, pairwise
from megarl.plan.server_args import check_server_args
from megarl.plan.teachers import check_distillation
from megarl.plan.weights import check_begun_warm_start, check_warm_start
from megarl.rewards import shaping
from megarl.rewards.parts import parts_of

SUITE_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
MAX_RANKS = 100_000
TAKEN_NAMES = ("reward", "response_tokens", "version", "ci95")  # the metric eval/reward/mean is data.eval's

ConfigCheck = Callable[[RunConfig], Iterable[str]]


def check_ranks(config: RunConfig) -> Iterable[str]:
    """More ranks than this are a typing error, not a cluster; and their layouts would fill the memory."""
    trainer, generator = config.trainer, config.generator
    for section, axes in (("trainer", {axis: getattr(trainer, axis) for axis in ("tp", "pp", "cp", "dp")}),
                          ("generator", {axis: getattr(generator, axis) for axis in ("engines", "tp")})):  # fmt: skip
        if (ranks := math.prod(axes.values())) > MAX_RANKS:
            product = " * ".join(f"{section}.{axis}={size}" for axis, size in axes.items() if size > 1)
            yield f"{product}: {ranks} ranks; at most {MAX_RANKS} can be planned with"


def check_virtual_stages(config: RunConfig) -> Iterable[str]:
    if config.trainer.vpp > 1 and config.trainer.pp == 1:
        yield f"trainer.vpp={config.trainer.vpp}: needs trainer.pp of at least 2; it is 1"


def check_sequence_parallel(config: RunConfig) -> Iterable[str]:
    if config.trainer.sequence_parallel and config.trainer.tp == 1:
        yield "trainer.sequence_parallel=true: needs trainer.tp of at least 2; it is 1"


def check_batch(config: RunConfig) -> Iterable[str]:
    rollout, dp, cuts = config.rollout, config.trainer.dp, config.trainer.minibatches
    if rollout.n < 2 and not recipes.has_critic(config.algorithm) and recipes.needs_reward(config.algorithm):
        yield f"rollout.n={rollout.n}: must be at least 2: {config.algorithm.name} compares a prompt's samples"
    if rollout.prompts_per_step % cuts:
        yield f"trainer.minibatches={cuts}: must divide rollout.prompts_per_step={rollout.prompts_per_step}"
    elif (sequences := rollout.prompts_per_step * rollout.n // cuts) < dp:
        product = f"rollout.prompts_per_step={rollout.prompts_per_step} * rollout.n={rollout.n}"
        product += f" / trainer.minibatches={cuts}" if cuts > 1 else ""
        yield f"{product}: {sequences} sequences an optimizer step must be at least trainer.dp={dp}"


def check_partial_rollout(config: RunConfig) -> Iterable[str]:
    """Refuses a chunk size that no response is long enough for."""
    tokens = config.async_.chunk_tokens
    if config.async_.partial_rollout != "resume" and tokens is not None:
        yield f"async.chunk_tokens={tokens}: only async.partial_rollout=resume cuts; it is {config.async_.partial_rollout}"
    elif tokens is not None and tokens >= config.rollout.max_tokens:
        yield f"async.chunk_tokens={tokens}: must be below rollout.max_tokens={config.rollout.max_tokens}, or nothing is ever cut"


def check_algorithm(config: RunConfig) -> Iterable[str]:
    return recipes.problems(config.algorithm)


def check_dynamic_sampling(config: RunConfig) -> Iterable[str]:
    batches, unless_set = config.rollout.max_num_gen_batches, RolloutConfig().max_num_gen_batches
    if not config.rollout.dynamic_sampling and batches != unless_set:
        shown = "null" if batches is None else batches
        yield f"rollout.max_num_gen_batches={shown}: must be left out ({unless_set}) without rollout.dynamic_sampling, whose limit it is"
    if config.rollout.dynamic_sampling and config.rollout.n < 2:
        yield f"rollout.dynamic_sampling=true: with rollout.n={config.rollout.n} all samples of a prompt have the same reward"
    if config.rollout.dynamic_sampling and recipes.recipe_of(config.algorithm).advantage == "best":
        name = config.algorithm.name
        yield f"rollout.dynamic_sampling=true: {name} trains on the best sample of every prompt, also where all have the same reward"


def check_program(config: RunConfig) -> Iterable[str]:
    """Programs make episodes with branches. (What their arguments are like is for rollouts/environments/functions.py.)"""
    name = config.rollout.name
    if name not in BY_CALLS:
        return
    if setting := recipes.needs_one_sequence(config.algorithm):
        yield f"{setting}: needs episodes of one sequence; those of rollout.name={name} may have branches (docs/agents.md)"
    if names := [part.setting for part in parts_of(config.reward) if pairwise(config, part)]:
        yield f"{names[0]}: compares responses; episodes of rollout.name={name} may have several (docs/agents.md)"
    if name in OF_HUBS and (config.reward.parts or config.reward.name != RewardConfig().name):
        yield f"{parts_of(config.reward)[0].setting}: must be left out with rollout.name={name}: the environment has a reward of its own"
    args, most_s = config.rollout.args, config.timeouts.samples_s
    attempts, deadline_s = args.get("retries", 2) + 1 if isinstance(args.get("retries", 2), int) else 1, args.get("deadline_s", 600.0)
    if isinstance(deadline_s, (int, float)) and deadline_s * attempts >= most_s:
        yield (
            f"rollout.args.deadline_s={deadline_s:g}: {attempts} attempts (rollout.args.retries) must take less than "
            f"timeouts.samples_s={most_s:g}"
        )


def check_mixtures(config: RunConfig) -> Iterable[str]:
    yield from mixture_problems(config.data.train, "data.train", config.rollout.prompts_per_step, "rollout.prompts_per_step")
    if config.sft.data:
        yield from mixture_problems(config.sft.data, "sft.data", config.sft.batch_size, "sft.batch_size")


def check_curriculum(config: RunConfig) -> Iterable[str]:
    band = config.data.curriculum
    if band and band.min_pass_rate >= band.max_pass_rate:
        yield f"data.curriculum.min_pass_rate={band.min_pass_rate:g}: must be below max_pass_rate={band.max_pass_rate:g}"
    if band and not recipes.needs_reward(config.algorithm):
        yield f"data.curriculum: needs rewards; algorithm.name={config.algorithm.name} learns from none"


def check_shaping(config: RunConfig) -> Iterable[str]:
    return shaping.problems(config)


def check_eval(config: RunConfig) -> Iterable[str]:
    if config.eval.every and not held_out(config):
        yield f"eval.every={config.eval.every}: needs a held-out set: set data.eval.source"
    if config.eval.samples > 1 and config.eval.temperature == 0:
        yield f"eval.samples={config.eval.samples}: with eval.temperature=0 all samples of a prompt are the same; set eval.temperature"
    for name, suite in config.eval.suites.items():
        if suite and suite.source == OWN_PLACE and suite.benchmark is None:
            yield f"eval.suites.{name}.source: must be set, or eval.suites.{name}.benchmark to one of {', '.join(GRADERS)}"
        if not SUITE_NAME.fullmatch(name) or name in TAKEN_NAMES:
            yield f"eval.suites.{name}: its name must be letters, digits, - and _, and none of {', '.join(TAKEN_NAMES)}"
        elif suite and _repeats(suite, config):
            samples = f"eval.suites.{name}.samples={suite.samples}" if suite.samples else f"eval.samples={config.eval.samples}"
            yield f"{samples}: at temperature 0 they are all the same; set eval.suites.{name}.temperature"
        if suite and suite.benchmark != LIVECODEBENCH:
            dates = {"since": suite.since, "until": suite.until}
            yield from (f"eval.suites.{name}.{key}={date}: only benchmark={LIVECODEBENCH} has dates" for key, date in dates.items() if date)


def _repeats(suite: SuiteConfig, config: RunConfig) -> bool:
    """Whether a set is sampled more than once greedily. What eval.samples and eval.temperature do together has a message of its own."""
    samples = suite.samples or config.eval.samples
    temperature = config.eval.temperature if suite.temperature is None else suite.temperature
    return samples > 1 and temperature == 0 and not (suite.samples is None and suite.temperature is None)


def check_eval_engines(config: RunConfig) -> Iterable[str]:
    engines, transport = config.eval.engines, config.weights.transport
    if not engines:
        return
    if not held_out(config):
        yield f"eval.engines={engines}: needs a held-out set: set data.eval.source"
    if transport in ("gloo", "nccl"):
        why = "whose process groups cannot change: the loss of one of these engines would end the run"
        yield f"weights.transport={transport}: with eval.engines={engines} it must be neither gloo nor nccl, {why}"


def check_sft_command(config: RunConfig) -> Iterable[str]:
    if config.sft.every and config.sft.eval is None:
        yield f"sft.every={config.sft.every}: needs held-out demonstrations: set sft.eval.source"
    if config.sft.steps < 1:
        yield f"sft.steps={config.sft.steps}: must be at least 1 for megarl sft"
    if config.sft.batch_size < config.trainer.dp:
        yield f"sft.batch_size={config.sft.batch_size}: must be at least trainer.dp={config.trainer.dp}"
    if (Path(config.sft.output) / "config.json").exists():  # then there is nothing to do
        yield from check_warm_start(config)
    else:
        yield from new_folder_problems("sft.output=", config.sft.output)
        yield from check_begun_warm_start(config)


def check_reward_model_command(config: RunConfig) -> Iterable[str]:
    settings = config.reward_model
    if settings.data is None:
        yield "reward_model.data=null: megarl reward-model needs pairs of responses: set reward_model.data.source"
    if (sequences := 2 * settings.batch_size) < config.trainer.dp:
        yield f"reward_model.batch_size={settings.batch_size}: its {sequences} sequences must be at least trainer.dp={config.trainer.dp}"
    if settings.every and settings.eval is None:
        yield f"reward_model.every={settings.every}: needs held-out pairs: set reward_model.eval.source"
    if config.trainer.routing_replay:
        yield "trainer.routing_replay=true: must be false for megarl reward-model: its pairs were not sampled from a router"
    yield from new_folder_problems("reward_model.output=", settings.output)


def check_run_dir(config: RunConfig) -> Iterable[str]:
    return folder_problems("run_dir=", config.run_dir)


def check_run_dir_here(config: RunConfig) -> Iterable[str]:
    """As `check_run_dir`, unless run_dir is on a disk that this machine does not have: a dry run is for other machines too."""
    top = Path(config.run_dir).absolute().parents[-2:-1]
    return check_run_dir(config) if not top or top[0].exists() else ()


def check_eval_command(config: RunConfig) -> Iterable[str]:
    if not held_out(config):
        yield "data.eval=null: megarl eval needs a held-out set: set data.eval.source"


def check_exported(config: RunConfig) -> Iterable[str]:
    return check_names(config.run_dir)


CONFIG_CHECKS: tuple[ConfigCheck, ...] = (
    check_ranks,
    check_virtual_stages,
    check_server_args,
    check_megatron_settings,
    check_format_arguments,
    check_sequence_parallel,
    check_batch,
    check_partial_rollout,
    check_algorithm,
    check_dynamic_sampling,
    check_program,
    check_mixtures,
    check_curriculum,
    check_shaping,
    check_eval,
    check_eval_engines,
    check_best,
    check_roles,
    check_reward,
    check_distillation,
)
PLANNING_COMMANDS = ("plan", "reshard")
_TRAIN_CHECKS: tuple[ConfigCheck, ...] = (check_ampere, check_blackwell_blocks, check_resume)
COMMAND_CHECKS: dict[str, tuple[ConfigCheck, ...]] = {
    "sft": (check_run_dir, check_sft_command),
    "reward-model": (check_run_dir, check_reward_model_command),
    "train": (check_run_dir, *_TRAIN_CHECKS),
    "dry-run": (check_run_dir_here, *_TRAIN_CHECKS),
    "eval": (check_run_dir, check_evaluated_format, check_eval_command),
    "export": (check_run_dir, check_exported),
}
