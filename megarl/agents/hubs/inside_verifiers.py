"""Loads an environment of PrimeIntellect's `verifiers`, lists its rows, and plays its episodes.
inside_serving.py describes the requests.

The request has `environment` and `args`. If the rubric compares the rollouts of a row, they are
scored together, otherwise one by one.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time

import inside_verifiers_v1 as v1
from inside_serving import (
    SAID,
    Mistake,
    check_module,
    main,
    metrics_of,
    policy_of,
    shown,
    within,
    write_lines,
)

_CLEANING_S = 5.0
_TURNS = "megarl_turn_rewards"  # key of a state
_failed_functions = contextvars.ContextVar("reward functions that have failed")


def look(request):
    """The module and attribute that the environment's name stands for, not yet imported.

    A name from the hub has no attribute.

    Raises Mistake.
    """
    spec = importlib.util.find_spec("verifiers")
    if spec is None:
        raise Mistake("the package verifiers is not installed there")
    if request.get("rows"):
        raise Mistake(
            "rollout.args.rows is for verifiers from 0.4 on; environments of earlier versions "
            "have rows of train and eval"
        )
    module, _, attribute = request["environment"].partition(":")
    module = module if attribute else module.split("/")[-1].replace("-", "_")
    check_module(module)
    return module, attribute


def _is_v1():
    """Whether the installed verifiers has no load_environment, which is so from 0.4 on.

    (A module in this folder is called `verifiers` too.)
    """
    spec = importlib.machinery.PathFinder.find_spec("verifiers", sys.path[1:])
    places = spec.submodule_search_locations or () if spec else ()
    inside = set()
    for place in places:
        for inner in ("envs", "legacy", "v1"):
            if os.path.isdir(os.path.join(place, inner)):
                inside.add(inner)
    return inside == {"v1"}


def load(request):
    """Raises Mistake."""
    module, attribute = look(request)
    import verifiers as vf

    try:
        if attribute:
            make = getattr(importlib.import_module(module), attribute)
            environment = make(**request["args"])
        else:
            make = vf.load_environment  # pyright: ignore[reportAttributeAccessIssue]
            environment = make(request["environment"], **request["args"])
    except Exception as error:  # whatever the environment raises
        raise Mistake(f"it cannot be loaded: {shown(error)}") from error
    if not isinstance(environment, vf.Environment):  # pyright: ignore[reportAttributeAccessIssue]
        raise Mistake(f"it is no environment of verifiers, but {type(environment).__name__}")
    if getattr(environment, "message_type", "chat") != "chat":
        raise Mistake(
            "its prompts are texts to complete (message_type); only conversations are played"
        )
    logging.getLogger("verifiers").addHandler(_Watched())
    return environment


def write_rows(environment, files):
    """Writes the rows of each split, one JSON object a line.

    Returns a line about each file. Raises Mistake.
    """
    summary = []
    datasets = {"train": environment.get_dataset, "eval": environment.get_eval_dataset}
    for split, file in files.items():
        try:
            rows = []
            for row in datasets[split]():
                rows.append({name: value for name, value in row.items() if value is not None})
            summary.append(write_lines(file, rows))
        except Exception as error:
            raise Mistake(f"its {split} rows cannot be had: {shown(error)}") from error
    return summary


async def play(environment, request):
    """Returns the outcome of each episode. All episodes together take at most `deadline_s`."""
    end = time.monotonic() + request["deadline_s"]
    alone = not _compares(environment)
    runs = await asyncio.gather(
        *(_episode(environment, request, episode, end) for episode in request["episodes"])
    )
    states = [state for state, error in runs if error is None]
    scoring = []
    if alone:
        scoring = [_scored(environment.rubric.score_rollout, state) for state in states]
    elif states:
        scoring = [_scored(environment.rubric.score_group, states)]
    scoring_failures = await asyncio.gather(
        *(within(end, request, coroutine) for coroutine in scoring)
    )
    failures = iter(scoring_failures if alone else scoring_failures * len(states))
    outcomes = [error or next(failures) or _result(state) for state, error in runs]
    cleaned = time.monotonic() + _CLEANING_S
    await asyncio.gather(
        *(within(cleaned, request, environment.rubric.cleanup(state)) for state in states)
    )
    return outcomes


def _compares(environment):
    """Whether the rubric scores the rollouts of a row together."""
    declared = getattr(environment, "requires_group_rollouts", None)
    if declared is not None:
        return declared
    rubrics = getattr(environment.rubric, "rubrics", [environment.rubric])
    return any(rubric._is_group_func(function) for rubric in rubrics for function in rubric.funcs)


async def _episode(environment, request, episode, end):
    """The state of the finished episode, and its error or None."""
    state = None

    async def run():
        nonlocal state
        async with policy_of(episode) as native:
            state = await environment.rollout(
                copy.deepcopy(request["row"]), _client(native), request["model"], {}
            )
        state[_TURNS] = turn_rewards_of(state)
        if state.get("error") is None:
            return None
        return {"kind": "environment", "error": shown(state["error"])}

    error = await within(end, request, run())
    return state, error


def turn_rewards_of(state):
    """The rewards that the environment has given to steps; empty without any.

    To be asked before scoring, which gives the rollout's reward to all steps that have none.
    """
    rewards = [step.get("reward") for step in state.get("trajectory") or ()]
    if all(reward is None for reward in rewards):
        return []
    return [0.0 if reward is None else float(reward) for reward in rewards]


def _client(native):
    """The client through which an environment calls the policy.

    Versions before 0.1.10 take the openai package's own client.
    """
    if importlib.util.find_spec("verifiers.clients") is None:
        return native
    from verifiers.clients import OpenAIChatCompletionsClient  # pyright: ignore[reportMissingImports]

    return OpenAIChatCompletionsClient(native)


async def _scored(score, scored):
    """The reward functions that failed.

    If one raises, verifiers only logs it and counts 0; here it is a failure.
    """
    failed = []
    _failed_functions.set(failed)
    try:
        await score(scored)
    except Exception as error:
        failed.append(shown(error))
    return {"kind": "reward", "error": "; ".join(failed)[:SAID]} if failed else None


class _Watched(logging.Handler):
    def emit(self, record):
        failed = _failed_functions.get(None)
        message = record.getMessage()
        if failed is not None and message.startswith("Error calling"):
            failed.append(message)


def _result(state):
    outcome = {"reward": state.get("reward"), "metrics": metrics_of(state.get("metrics") or {})}
    if state.get(_TURNS):
        outcome["turn_rewards"] = state[_TURNS]
    return outcome


if __name__ == "__main__":
    if _is_v1():
        main(v1.look, v1.load, v1.write_rows, v1.play)
    else:
        main(look, load, write_rows, play)
