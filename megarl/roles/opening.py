"""Opens the engines of the models beside the policy, and their scorers and teachers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from megarl.config.errors import ConfigError, problems_of
from megarl.data.tokenizer import Tokenizer
from megarl.generator.client import EngineClient
from megarl.generator.fleet import Fleet
from megarl.messaging.rendezvous import Rendezvous
from megarl.plan.resolve import RunPlan
from megarl.plan.weights import convert_hint
from megarl.roles.judge import Judge, questions
from megarl.roles.plan import ServedRole
from megarl.roles.reward_model import RewardModel, reading
from megarl.roles.settings import INITIAL, JUDGE, REWARD_MODEL, TEACHER
from megarl.teachers.engines import ServedTeacher, ServedTeachers, check_tokens
from megarl.teachers.plan import teacher_format
from megarl.trainer.hf_files import header

Scorer = RewardModel | Judge


async def open_served(
    plan: RunPlan, rendezvous: Rendezvous, resources: AsyncExitStack, elastic: bool = False
) -> dict[str, Fleet]:
    """Opens the engines of each role, and returns when they take requests.

    `resources` closes the clients. `elastic` fleets may lose engines.
    """
    fleets: dict[str, Fleet] = {}
    for role in plan.served:
        clients = []
        for url in rendezvous.engine_urls(role.name):
            client = EngineClient(
                url,
                rendezvous.engine_key,
                rendezvous.engine_admin_key,
                role.settings.timeout_s,
            )
            clients.append(client)
        fleets[role.name] = Fleet(clients, elastic=elastic, frozen=True, name=role.name)
        resources.push_async_callback(fleets[role.name].close)
    timeout_s = plan.config.generator.startup_timeout_s
    waiting = []
    for fleet in fleets.values():
        waiting += [engine.client.wait_ready(timeout_s) for engine in fleet.engines]
    await asyncio.gather(*waiting)
    return fleets


def open_scorers(plan: RunPlan, fleets: dict[str, Fleet], policy: Tokenizer) -> dict[str, Scorer]:
    """The scorer of each role. Raises ConfigError."""
    scorers = {}
    for role in plan.served:
        if role.role in (REWARD_MODEL, JUDGE):
            scorers[role.name] = _scorer(role, fleets[role.name], policy, plan.config.seed)
    return scorers


def open_teachers(plan: RunPlan, fleets: dict[str, Fleet]) -> ServedTeachers | None:
    """The teachers on engines; None if there are none."""
    form = teacher_format(plan.config)
    teachers = []
    for role in plan.served:
        if role.role == TEACHER:
            teachers.append(ServedTeacher(role, fleets[role.name], form.top_k))
    return ServedTeachers(teachers, form) if teachers else None


def open_initial(plan: RunPlan, fleets: dict[str, Fleet]) -> ServedTeacher | None:
    """The model whose perplexity is measured, if there is one."""
    for role in plan.served:
        if role.role == INITIAL:
            return ServedTeacher(role, fleets[role.name], top_k=0)
    return None


def _scorer(role: ServedRole, fleet: Fleet, policy: Tokenizer, seed: int) -> Scorer:
    if role.role == REWARD_MODEL:
        return RewardModel(role, fleet, policy)
    return Judge(role, fleet, seed)


def check_served(role: ServedRole, policy: Tokenizer) -> None:
    """Raises ConfigError if the model cannot read the policy's responses."""
    if role.role == REWARD_MODEL:
        reading(role, policy)
    elif role.role in (TEACHER, INITIAL):
        check_tokens(f"roles.{role.name}.path", role.settings.path, policy)
    else:
        questions(role)


def check_role_weights(role: ServedRole) -> None:
    """Raises ConfigError if a local checkpoint has no weights or damaged files.

    SGLang would notice only when it starts.
    """
    folder = Path(role.settings.path)
    if not folder.is_dir():
        return
    key = f"roles.{role.name}.path={folder}"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{key}: holds no weights (*.safetensors){convert_hint(folder)}")
    problems = problems_of(*(partial(header, file) for file in files))
    if problems:
        raise ConfigError([f"{key}: {problem}" for problem in problems])
