"""Like inside_verifiers.py, for verifiers 0.4 and later (`verifiers.v1`): a taskset, agents with
harnesses, and an Env that plays tasks.

The request has `environment`, the taskset's id; `args`, the other fields of its EnvConfig; and
`rows`, which says which tasks each split has. Episodes are played as the package's own environment
server plays them: a row has the data of a task, from which the task is made again. The policy is
called through the client for evaluations, which passes requests on unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import time
import uuid
from typing import Any

from inside_serving import Mistake, check_module, metrics_of, shown, within, write_lines

_CLEANING_S = 10.0
_SPLIT_FIELDS = "include, exclude, shuffle, seed, skip, limit and taskset"


@dataclasses.dataclass(frozen=True)
class Loaded:
    taskset: str  # its id
    config: Any  # EnvConfig
    raw: dict[str, Any]  # the fields from which `config` was made
    agent: str  # name of the agent that the policy plays
    rows: dict[str, dict[str, Any]]  # split -> its settings


def look(request):
    """Raises Mistake if the taskset's module is not installed."""
    module = request["environment"].split("/")[-1].split("@")[0].replace("-", "_").lower()
    spec = importlib.util.find_spec("verifiers")
    folders = spec.submodule_search_locations or () if spec else ()
    if not any(os.path.isdir(os.path.join(folder, "v1", "tasksets", module)) for folder in folders):
        check_module(module)


def load(request):
    """Raises Mistake."""
    look(request)
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    raw = _with_taskset(request["args"], request["environment"], {})
    try:
        config = vf.resolve_env_config(raw)
        data = type(vf.load_environment(config).taskset).task_type().data_type()
    except Exception as error:  # whatever the taskset, its harness or the configuration raises
        raise Mistake(f"it cannot be loaded: {_line(error)}") from error
    excluded = [name for name, field in data.model_fields.items() if field.exclude]
    if excluded:
        raise Mistake(
            f"its tasks cannot be written as rows: {data.__name__} does not serialize "
            f"{', '.join(excluded)}"
        )
    return Loaded(
        request["environment"], config, raw, _agent(vf, config), request.get("rows") or {}
    )


def _with_taskset(args, environment, taskset_fields):
    """The fields of an EnvConfig, with the taskset's id and these fields. Raises Mistake."""
    taskset = {**(args.get("taskset") or {}), **taskset_fields}
    if taskset.get("id", environment) != environment:
        raise Mistake(
            f"args.taskset.id={taskset['id']} is another one than environment={environment}"
        )
    return {**args, "taskset": {**taskset, "id": environment}}


def _agent(vf, config):
    """The agent that the policy plays: the only one without its own client. Raises Mistake."""
    agents = []
    for name, value in config:
        if isinstance(value, vf.AgentConfig) and value.client is None:
            agents.append(name)
    if len(agents) != 1:
        raise Mistake(
            f"the policy would play {' and '.join(agents) or 'none'} of its agents: an episode "
            "has one reward, so all agents but one"
            " must have a `client` (and a `model`) of their own in args"
        )
    return agents[0]


def write_rows(loaded, files):
    """Writes the tasks of each split, one JSON object a line.

    Returns a line about each file. Raises Mistake.
    """
    summary = []
    for split, file in files.items():
        try:
            rows = [_row(loaded, task) for task in _tasks(loaded, split)]
            summary.append(write_lines(file, rows))
        except Mistake:
            raise
        except Exception as error:
            raise Mistake(f"its {split} rows cannot be had: {_line(error)}") from error
    return summary


def _tasks(loaded, split):
    """Raises Mistake."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    if split not in loaded.rows:
        raise Mistake(
            f"a taskset has no splits: rollout.args.rows.{split} must say which tasks {split} has "
            f"({_SPLIT_FIELDS})"
        )
    selection = dict(loaded.rows[split])
    taskset_fields = selection.pop("taskset", {})
    if "task" in taskset_fields:
        raise Mistake(
            f"rollout.args.rows.{split}.taskset.task: what tasks read while they are played "
            "belongs in args.taskset.task"
        )
    config = vf.resolve_env_config(_with_taskset(loaded.raw, loaded.taskset, taskset_fields))
    tasks = vf.load_taskset(config.taskset).select(vf.SelectConfig.model_validate(selection))
    if not tasks.bounded:
        raise Mistake(f"its tasks never end: set rollout.args.rows.{split}.limit")
    return tasks


def _row(loaded, task):
    """A task as JSON, with its first messages.

    Raises Mistake if the task cannot be made from that JSON again.
    """
    data = task.data.model_dump(mode="json", exclude_none=True)
    prompt = (
        data.get("prompt") or data.get("description") or data.get("name") or f"task {task.data.idx}"
    )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if data.get("system_prompt"):
        messages.insert(0, {"role": "system", "content": data["system_prompt"]})
    row = {
        "prompt": messages,
        "taskset": loaded.taskset,
        "hash": task.hash,
        "task": data,
    }
    _task_of(loaded, row)
    return row


def _task_of(loaded, row):
    """The task that a row was written from.

    Raises Mistake if the row now makes a different task.
    """
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    if row.get("taskset") != loaded.taskset:
        raise Mistake(
            f"the row is of the taskset {row.get('taskset')}, not of {loaded.taskset}: write the "
            "rows again with megarl rows"
        )
    make = vf.task_type(loaded.taskset)
    task = make(make.data_type().model_validate(row["task"]), loaded.config.taskset.task)
    if task.hash != row["hash"]:
        raise Mistake(
            "the row now makes another task than it was written from: write the rows again with "
            "megarl rows"
        )
    return task


async def play(loaded, request):
    """Returns the outcome of each episode. All episodes together take at most `deadline_s`.

    Each request has its own Env, since its server keeps a client for each endpoint, and each
    episode has its own endpoint.
    """
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    end = time.monotonic() + request["deadline_s"]
    outcomes = {}

    async def one(environment, number):
        outcomes[number] = await within(
            end, request, _episode(loaded, environment, request, request["episodes"][number])
        )

    async def serve():
        environment = vf.load_environment(loaded.config)
        async with environment.serving():
            await asyncio.gather(
                *(one(environment, number) for number in range(len(request["episodes"])))
            )

    failure = await within(end + _CLEANING_S, request, serve())
    return [outcomes.get(number, failure) for number in range(len(request["episodes"]))]


async def _episode(loaded, environment, request, episode):
    from verifiers.v1 import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]

    with _key(episode["key"]) as variable:
        client = EvalClientConfig(base_url=episode["url"], api_key_var=variable)
        [slot] = environment.slots(_task_of(loaded, request["row"]))
        played = await environment.run_slot(
            slot, ModelContext(model=request["model"], client=client)
        )
    return _wrong(played) or _result(loaded, played)


@contextlib.contextmanager
def _key(key):
    """The name of an environment variable with the key, since clients read keys only from there.

    Harnesses do not pass on variables with such names.
    """
    name = f"MEGARL_API_KEY_{uuid.uuid4().hex}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


def _wrong(episode):
    """The error of an episode, or None.

    An agent that has used up its time is scored, as in the package's own evaluations.
    """
    failed = [trace for trace in episode.traces if not trace.ok]
    error = episode.last_error or next((trace.last_error for trace in failed), None)
    message = f"{error.type}: {error.message}" if error else "it did not end well"
    if episode.is_timeout:
        return {"kind": "deadline", "error": message}
    if episode.ok:
        return None
    scoring = not episode.errors and any(trace.timing.scoring.start for trace in failed)
    return {"kind": "reward" if scoring else "environment", "error": message}


def _result(loaded, episode):
    traces = [trace for trace in episode.traces if trace.agent.name == loaded.agent]
    if len(traces) != 1:
        return {
            "kind": "environment",
            "error": f"{loaded.agent} has run {len(traces)} times: an episode has one reward",
        }
    [trace] = traces
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        reason = (
            f"rewards were not given: {', '.join(unscored) or 'it has none'} (stopped by "
            f"{trace.stop_condition})"
        )
        return {"kind": "deadline" if trace.is_timeout else "reward", "error": reason}
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    metrics = {
        **scores,
        **{name: value for name, value in trace.metrics.items() if value is not None},
    }
    return {"reward": trace.reward, "metrics": metrics_of(metrics)}


def _line(error):
    return " ".join(shown(error).split())
