"""Loads an environment of PrimeIntellect's `verifiers`, lists its rows, and plays its episodes.

It runs in the interpreter that has the packages of the environment, so it imports the standard library and these, and nothing of MegaRL.
Arguments: a JSON object with `do` (look, rows or serve), `environment` and `args`; with `rows` also `files`, split → file to write.
What goes wrong before an environment is served is one line on standard error, and exit status 1.

Served, it reads a JSON object a line from standard input: `id`, `row`, `model`, `deadline_s` and `episodes`, each with the `url` and the
`key` of an endpoint of its own. It writes {"ready": true}, then for each of these `id` and `episodes`: `reward` and `metrics`, or
`error` and `kind` (environment, deadline, reward). Rollouts of a row that the rubric compares are scored together, all others alone.
"""

import asyncio
import contextvars
import copy
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import sys
import threading
import time

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_CLEANING_S = 5.0
_SAID = 2000  # characters of a message
_failed_functions = contextvars.ContextVar("reward functions that have failed")


class Mistake(Exception):
    """What is wrong with the environment, or with what was asked for."""


def look(name):
    """The module and attribute that `name` names, without importing them; no attribute for the hub's name of an environment.

    Raises Mistake.
    """
    there = importlib.util.find_spec("verifiers")
    if there is None:
        raise Mistake("the package verifiers is not installed there")
    folders = [os.path.join(place, inner) for place in there.submodule_search_locations or () for inner in ("envs", "legacy")]
    if not any(map(os.path.isdir, folders)):
        version = importlib.metadata.version("verifiers")
        raise Mistake(f"verifiers {version} has no load_environment any more; the versions before 0.4 have")
    module, _, attribute = name.partition(":")
    module = module if attribute else module.split("/")[-1].replace("-", "_")
    try:
        found = _MODULE.fullmatch(module) and importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if not found:
        raise Mistake(f"its module {module} is not installed there")
    return module, attribute


def load(name, args):
    """Raises Mistake."""
    module, attribute = look(name)
    import verifiers as vf

    try:
        make = getattr(importlib.import_module(module), attribute) if attribute else None
        load_it = vf.load_environment  # pyright: ignore[reportAttributeAccessIssue]
        environment = make(**args) if make else load_it(name, **args)
    except Exception as error:  # whatever the environment raises
        raise Mistake(f"it cannot be loaded: {_shown(error)}") from error
    if not isinstance(environment, vf.Environment):  # pyright: ignore[reportAttributeAccessIssue]
        raise Mistake(f"it is no environment of verifiers, but {type(environment).__name__}")
    if getattr(environment, "message_type", "chat") != "chat":
        raise Mistake("its prompts are texts to complete (message_type); only conversations are played")
    return environment


def write_rows(environment, files):
    """Writes the rows of each split as JSON, one a line; returns a line about each file. Raises Mistake."""
    told = []
    own = {"train": environment.get_dataset, "eval": environment.get_eval_dataset}
    for split, file in files.items():
        try:
            rows = own[split]()
            lines = [json.dumps({name: value for name, value in row.items() if value is not None}) for row in rows]
        except Exception as error:
            raise Mistake(f"its {split} rows cannot be had: {_shown(error)}") from error
        with open(file, "w") as out:
            out.writelines(f"{line}\n" for line in lines)
        told.append(f"{file}: {len(lines)} rows\n")
    return told


async def play(environment, asked):
    """What each of the episodes has come to, within `deadline_s` for all of it."""
    end, alone = time.monotonic() + asked["deadline_s"], not _compares(environment)
    ran = await asyncio.gather(*(_episode(environment, asked, episode, end) for episode in asked["episodes"]))
    states = [state for state, wrong in ran if wrong is None]
    scoring = [_scored(environment.rubric.score_rollout, state) for state in states] if alone else []
    scoring += [_scored(environment.rubric.score_group, states)] if states and not alone else []
    found = await asyncio.gather(*(_within(end, asked, each) for each in scoring))
    failures = iter(found if alone else found * len(states))
    told = [wrong or next(failures) or _result(state) for state, wrong in ran]
    for state in states:
        await _within(time.monotonic() + _CLEANING_S, asked, environment.rubric.cleanup(state))
    return told


def _compares(environment):
    """Whether the rubric scores the rollouts of a row together."""
    known = getattr(environment, "requires_group_rollouts", None)
    if known is not None:
        return known
    rubrics = getattr(environment.rubric, "rubrics", [environment.rubric])
    return any(rubric._is_group_func(function) for rubric in rubrics for function in rubric.funcs)


async def _episode(environment, asked, episode, end):
    """Its state, and what went wrong or None."""
    state = None

    async def run():
        nonlocal state
        import openai  # what `_serve` has imported

        async with openai.AsyncOpenAI(base_url=episode["url"], api_key=episode["key"], max_retries=0) as native:
            state = await environment.rollout(copy.deepcopy(asked["row"]), _client(native), asked["model"], {})
        return {"kind": "environment", "error": _shown(state["error"])} if state.get("error") is not None else None

    wrong = await _within(end, asked, run())
    return state, wrong


def _client(native):
    """What an environment calls the policy by; versions before 0.1.10 take the client of the package openai itself."""
    if importlib.util.find_spec("verifiers.clients") is None:
        return native
    from verifiers.clients import OpenAIChatCompletionsClient  # pyright: ignore[reportMissingImports]

    return OpenAIChatCompletionsClient(native)


async def _within(end, asked, coroutine):
    """What it says went wrong, what it raises, or that it took until `end`; None if nothing did."""
    try:
        return await asyncio.wait_for(coroutine, max(0.0, end - time.monotonic()))
    except asyncio.TimeoutError:  # noqa: UP041  in Python 3.10 not the built-in one
        return {"kind": "deadline", "error": f"it took longer than {asked['deadline_s']:g} s"}
    except Exception as error:  # whatever the environment raises
        return {"kind": "environment", "error": _shown(error)}


async def _scored(score, scored):
    """A reward function that raises counts as 0 for verifiers, which only logs it; that is what went wrong here."""
    failed = []
    _failed_functions.set(failed)
    try:
        await score(scored)
    except Exception as error:
        failed.append(_shown(error))
    return {"kind": "reward", "error": "; ".join(failed)[:_SAID]} if failed else None


class _Watched(logging.Handler):
    def emit(self, record):
        failed = _failed_functions.get(None)
        message = record.getMessage()
        if failed is not None and message.startswith("Error calling"):
            failed.append(message)


def _result(state):
    metrics = {re.sub(r"\W", "_", str(name), flags=re.ASCII): value for name, value in (state.get("metrics") or {}).items()}
    return {"reward": state.get("reward"), "metrics": metrics}


def _shown(error):
    cause = error.__cause__
    return (f"{type(error).__name__}: {error}" + (f" (from {type(cause).__name__}: {cause})" if cause else ""))[:_SAID]


def _plain(value):
    """Numbers of NumPy and of torch as Python's; the reader refuses what is no number."""
    return value.item() if hasattr(value, "item") else str(value)


async def _serve(environment, requests, replies):
    def say(told):
        replies.write(json.dumps(told, default=_plain) + "\n")
        replies.flush()

    async def answer(asked):
        say({"id": asked["id"], "episodes": await play(environment, asked)})

    def read():
        for line in requests:
            asyncio.run_coroutine_threadsafe(begin(json.loads(line)), loop)
        os._exit(0)  # whoever asks has gone; a reward function that hangs does not hold up this

    async def begin(asked):
        running.add(task := asyncio.ensure_future(answer(asked)))
        task.add_done_callback(done)

    def done(task):
        running.discard(task)
        if not task.cancelled() and task.exception():
            ended.set_exception(task.exception())

    importlib.import_module("openai")  # before the first episode, whose time it would take
    loop, running = asyncio.get_running_loop(), set()
    ended = loop.create_future()
    threading.Thread(target=read, daemon=True).start()
    say({"ready": True})
    await ended


def main(asked):
    if asked["do"] == "look":
        return look(asked["environment"])
    # Environments print, and start programs: neither may disturb the lines that are read and written here.
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    environment = load(asked["environment"], asked["args"])
    if asked["do"] == "rows":
        replies.writelines(write_rows(environment, asked["files"]))
    else:
        logging.getLogger("verifiers").addHandler(_Watched())
        asyncio.run(_serve(environment, requests, replies))
    replies.flush()


if __name__ == "__main__":
    del sys.path[0]  # its own folder, whose files are not for this interpreter
    try:
        main(json.loads(sys.argv[1]))
    except Mistake as mistake:
        sys.exit(str(mistake))
