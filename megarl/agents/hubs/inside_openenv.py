"""Finds or serves an environment of OpenEnv, and lists its rows. inside_serving.py describes the
requests to this program.

The request has `servers`, `rows`, `system_prompt` and `instructions` of the rows, `start_s`, and
what inside_openenv_episodes.py needs, which plays the episodes. Each of `servers` is the URL of a
running server, or a `module:app` that this program serves. `rows` maps a split to a number of
seeds, or to the name of one of the environment's splits.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import re
import socket
import threading
import time
import urllib.parse

from inside_openenv_episodes import FULL, EnvironmentHub, code_of, play
from inside_serving import Mistake, check_module, main, shown, write_lines

_URL = re.compile(r"(http|ws)s?://[^/\s]+.*")
_APP = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_ACT = "step"  # name of the tool for environments without tools


def look(request):
    """Raises Mistake."""
    if (
        importlib.util.find_spec("openenv") is None
        or importlib.util.find_spec("openenv.core") is None
    ):
        raise Mistake("the package openenv is not installed there")
    for server in request["servers"]:
        if not _URL.fullmatch(server):
            if not _APP.fullmatch(server):
                raise Mistake(
                    f"{server} must be a URL (http://host:8000), or module:app of an environment "
                    "that is installed there"
                )
            check_module(server.partition(":")[0])


def load(request):
    """Starts the servers that this program serves, and asks which actions the environment has.

    Raises Mistake.
    """
    look(request)
    served = request["do"] == "serve"
    if not served and not any(isinstance(rows, str) for rows in request["rows"].values()):
        return EnvironmentHub(request, {})  # seeds need no server
    urls = [server if _URL.fullmatch(server) else _serve(server) for server in request["servers"]]
    hub = EnvironmentHub(request, dict.fromkeys((url.rstrip("/") for url in urls), 0))
    # earlier than start_s, so that the caller still gets the reason
    end = time.monotonic() + 0.5 * request["start_s"]
    for url in hub.sessions:
        _wait_for(url, end)
    if served:
        asyncio.run(_ask_for_actions(hub, end))
    return hub


def _serve(name):
    """Serves `module:app` in a thread of its own, so that an environment that never awaits delays
    only its own episodes.
    """
    import uvicorn

    module, _, attribute = name.partition(":")
    try:
        app = getattr(importlib.import_module(module), attribute)
        app = app() if inspect.isfunction(app) else app
    except Exception as error:  # whatever the environment raises
        raise Mistake(f"{name} cannot be loaded: {shown(error)}") from error
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _wait_for(url, end):
    """Waits until a server is healthy. Raises Mistake with its last answer."""
    import httpx

    while True:
        try:
            answer = httpx.get(f"{_http(url)}/health", timeout=10.0)
            if answer.is_success:
                return
            status = f"status {answer.status_code}"
        except httpx.HTTPError as error:
            status = shown(error)
        if time.monotonic() > end:
            raise Mistake(f"{url}/health: {status}")
        time.sleep(0.2)


async def _ask_for_actions(hub, end):
    """Finds the tools to show to the policy, or checks that its text can be a field of an action.

    Raises Mistake.
    """
    text_field = hub.request["text_field"]
    url = next(iter(hub.sessions))
    schema = _json(f"{_http(url)}/schema")["action"]
    fields = {**schema.get("properties", {})}
    fields.pop("metadata", None)
    if text_field is None:
        listed = await _mcp_tools(url, hub.request["start_s"], end)
        hub.by_mcp = bool(listed)
        hub.tools = []
        for tool in listed:
            description = tool.get("description")
            hub.tools.append(_tool(tool["name"], description, tool.get("input_schema")))
        if not listed:
            step = {**schema, "properties": fields}
            hub.tools = [_tool(_ACT, schema.get("description"), step)]
        return
    if text_field not in fields:
        raise Mistake(f"text_field={text_field}: an action has {', '.join(fields) or 'no fields'}")
    missing = [name for name in schema.get("required", []) if name not in (text_field, "metadata")]
    if missing:
        raise Mistake(f"text_field={text_field}: an action needs {', '.join(missing)} too")


async def _mcp_tools(url, limit_s, end):
    """The environment's MCP tools.

    None if it has its own actions: it then refuses the request. Asks a full server again until
    `end`.
    """
    from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]

    while True:
        async with GenericEnvClient(base_url=url, message_timeout_s=limit_s) as client:
            try:
                observation = (await client.step({"type": "list_tools"})).observation
                break
            except RuntimeError as error:
                if code_of(error) in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
                    return []
                if code_of(error) != FULL or time.monotonic() > end:
                    raise Mistake(f"{url}: its tools cannot be listed: {error}") from error
        await asyncio.sleep(0.5)
    error = (observation.get("metadata") or {}).get("error")
    if error:
        raise Mistake(f"{url}: its tools cannot be listed: {error}")
    return observation.get("tools") or []


def _tool(name, description, parameters):
    function = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def write_rows(hub, files):
    """Writes a row for each seed, or for each task of one of the environment's splits.

    Returns a line about each file. Raises Mistake.
    """
    request = hub.request
    summary = []
    seeds = 0
    prompt = [{"role": "user", "content": request["instructions"]}]
    if request["system_prompt"]:
        prompt.insert(0, {"role": "system", "content": request["system_prompt"]})
    for split, file in files.items():
        source = request["rows"].get(split)
        if source is None:
            raise Mistake(
                f"rollout.args.rows has no {split}: give a number of seeds, or the name of a "
                "split of the environment's tasks"
            )
        if isinstance(source, str):
            tasks = range(_number_of_tasks(hub, source))
            resets = [{"split": source, "index": index} for index in tasks]
        else:
            resets = [{"seed": seed} for seed in range(seeds, seeds + source)]
            seeds += source
        rows = [{"prompt": prompt, "reset": reset} for reset in resets]
        summary.append(write_lines(file, rows))
    return summary


def _number_of_tasks(hub, split):
    """Raises Mistake."""
    base = _http(next(iter(hub.sessions)))
    names = _json(f"{base}/list_environments")
    if len(names) != 1:
        raise Mistake(
            f"{base} has {len(names)} environments: only one that serves a single environment has "
            "tasks that are its own"
        )
    return _json(f"{base}/{urllib.parse.quote(names[0])}/num_tasks", {"split": split})["num_tasks"]


def _json(url, body=None):
    """Raises Mistake."""
    import httpx

    method = "GET" if body is None else "POST"
    try:
        answer = httpx.request(method, url, json=body, timeout=60.0)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Mistake(f"{url} did not answer as OpenEnv's servers do: {shown(error)}") from error


def _http(url):
    return re.sub("^ws", "http", url)


if __name__ == "__main__":
    main(look, load, write_rows, play)
