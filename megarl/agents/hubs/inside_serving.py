"""Shared code of the programs for other interpreters.

They import the standard library, this folder's inside_*.py and the hub's packages.

Such a program has one argument: a JSON object with `do` (look, rows or serve) and what its hub
needs. For rows it also has `files`, which maps splits to files to write. An error before an
environment is served is one line on standard error, with exit status 1.

When it serves, it first writes {"ready": true}. Each line of standard input is a request, a JSON
object: `id`, `row`, `model`, `deadline_s` and `episodes`, each with the `url` and the `key` of its
own endpoint. Each reply has `id` and `episodes`; an episode has `reward` and `metrics`, or `error`
and `kind` (environment, deadline, reward).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
from typing import Any

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
SAID = 2000  # most characters of a message
_MOST_WRITTEN = 1 << 15  # most characters of an episode's reward and metrics


class Mistake(Exception):
    """A problem with the environment or with the request."""


def check_module(module):
    """Finds a module without importing it; imports the packages above it. Raises Mistake."""
    try:
        spec = _MODULE.fullmatch(module) and importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if not spec:
        raise Mistake(f"its module {module} is not installed there")


def main(look, load, write_rows, play):
    """The whole program. Call it from `__main__`.

    Args: look: raises Mistake if something that the request needs is missing. load: request ->
    environment. write_rows: environment and `files` -> lines to print. play: async, environment and
    request -> the outcome of each episode.
    """
    del sys.path[0]  # this folder: its other modules are not for this interpreter
    try:
        _do(json.loads(sys.argv[1]), look, load, write_rows, play)
    except Mistake as mistake:
        # errors of httpx have two lines, the second of which is useless
        sys.exit(" ".join(str(mistake).split("\n")))


def _do(request, look, load, write_rows, play):
    if request["do"] == "look":
        look(request)
        return
    # Environments print and start programs. Neither may disturb the requests and replies.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    environment = load(request)
    if request["do"] == "rows":
        replies.writelines(write_rows(environment, request["files"]))
    else:
        asyncio.run(_serve(functools.partial(play, environment), requests, replies))
    replies.flush()


def write_lines(file, rows):
    """Writes rows as JSON, one a line. Returns a line about the file."""
    lines = [json.dumps(row) + "\n" for row in rows]
    with open(file, "w", encoding="utf-8") as out:
        out.writelines(lines)
    return f"{file}: {len(lines)} rows\n"


async def within(end, request, coroutine) -> Any:
    """The coroutine's result, or the reason of its failure: its exception, or that it took until
    `end`. An environment may itself raise TimeoutError and CancelledError, for example if it calls
    other services.
    """
    task = asyncio.ensure_future(coroutine)
    late = not (await asyncio.wait({task}, timeout=max(0.0, end - time.monotonic())))[0]
    if late:
        task.cancel()
        await asyncio.wait({task})
    if task.cancelled():
        error = asyncio.CancelledError("the episode has been cancelled from inside")
    else:
        error = task.exception()
    if late:
        return {"kind": "deadline", "error": f"it took longer than {request['deadline_s']:g} s"}
    return {"kind": "environment", "error": shown(error)} if error else task.result()


def policy_of(episode, **settings):
    """A client of the package `openai` for the policy.

    It is at 127.0.0.1 without TLS: reading certificates would take 17 ms an episode.
    """
    import openai  # serving has already imported it

    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=episode["url"],
        api_key=episode["key"],
        max_retries=0,
        http_client=plain,
        **settings,
    )


def metrics_of(values):
    """Metrics by reportable names.

    A reward function may be called `reward`, though its value is not the reward of the episode.
    """
    metrics = {}
    for name, value in values.items():
        metric = re.sub(r"\W", "_", str(name), flags=re.ASCII)
        metrics["reward_" if metric == "reward" else metric] = value
    return metrics


def shown(error):
    cause = error.__cause__
    message = f"{type(error).__name__}: {error}"
    if cause:
        message += f" (from {type(cause).__name__}: {cause})"
    return message[:SAID]


def _fitting(outcome):
    """The outcome of an episode as JSON.

    Metrics may have any type and size, and errors may contain half characters.
    """
    if "error" in outcome:
        return {**outcome, "error": outcome["error"].encode(errors="backslashreplace").decode()}
    try:
        written = json.dumps(outcome, default=_plain)
    except Exception as error:  # whatever the environment's objects raise
        return {
            "kind": "reward",
            "error": f"its reward and metrics are not numbers: {shown(error)}",
        }
    if len(written) > _MOST_WRITTEN:
        return {
            "kind": "reward",
            "error": f"its reward and metrics have {len(written)} characters; there can be "
            f"{_MOST_WRITTEN}",
        }
    return json.loads(written)


def _plain(value):
    """Converts numbers of NumPy and torch to Python's. The reader refuses everything else."""
    return value.item() if hasattr(value, "item") else str(value)


async def _serve(play, requests, replies):
    def say(reply):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    async def answer(request):
        outcomes = await play(request)
        say({"id": request["id"], "episodes": list(map(_fitting, outcomes))})

    def read():
        for line in requests:
            asyncio.run_coroutine_threadsafe(begin(json.loads(line)), loop)
        # The generator has gone. This exit does not wait for a hanging reward function, and ends
        # the environment's processes.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    async def begin(request):
        task = asyncio.ensure_future(answer(request))
        running.add(task)
        task.add_done_callback(finish)

    def finish(task):
        running.discard(task)
        if not task.cancelled() and task.exception():
            ended.set_exception(task.exception())

    # before the first episode, so that it does not count in its time
    importlib.import_module("openai")
    loop = asyncio.get_running_loop()
    running = set()
    ended = loop.create_future()
    threading.Thread(target=read, daemon=True).start()
    say({"ready": True})
    await ended
