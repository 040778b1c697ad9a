"""Plays episodes of an environment of OpenEnv with the package `openenv`. inside_openenv.py is the
program.

An episode is a session of its own. The policy answers observations with calls of tools, each of
which is a step, or with text, which becomes the field `text_field` of a step. Tools are the
environment's MCP tools. If it has none, there is the tool `step`, whose arguments are the action.

The request has `text_field`, `shown` (fields of observations to show), `reward` (sum or last) and
`max_turns`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from dataclasses import dataclass, field

from inside_serving import policy_of, within

_CODE = re.compile(r"\(code: (\w+)\)$")  # ends the client's message for an error from a server
FULL = "CAPACITY_REACHED"
# interval at which a full or unreachable server is asked again: first, longest
_ASK_AGAIN_S = (0.05, 1.0)
_AWAY_S = 5.0  # how long an unreachable server comes last in order
# error codes after which the policy cannot answer any more
_NO_ROOM = ("context_length_exceeded", "request_too_large", "max_calls")


@dataclass
class Hub:
    asked: dict
    sessions: dict  # URL -> number of open sessions
    # URL of an unreachable server -> until when it comes last
    away: dict = field(default_factory=dict)
    tools: list = field(default_factory=list)  # in OpenAI's form; none if actions are texts
    by_mcp: bool = False  # whether the tools are the environment's MCP tools


@dataclass
class _Course:
    """The course of an episode.

    Its start is recorded, since a row's episodes are compared only if they begin in the same way.
    """

    start: str
    ended: bool  # whether the environment has ended it
    rewards: list
    steps: int = 0
    refused: int = 0  # actions that the environment has refused
    unrewarded: int = 0  # steps without a reward

    def take(self, result):
        self.steps += 1
        self.ended = bool(result.done)
        if result.reward is None:
            self.unrewarded += 1
        else:
            self.rewards.append(float(result.reward))

    def told(self, how):
        if not self.rewards:
            return {
                "kind": "reward",
                "error": f"none of its {self.steps} steps had a reward",
                "start": self.start,
            }
        reward = math.fsum(self.rewards) if how == "sum" else self.rewards[-1]
        # A reward that is NaN arrives as None: servers write it as null.
        metrics = {
            "env_steps": self.steps,
            "env_refused": self.refused,
            "env_ended": float(self.ended),
            "env_unrewarded": self.unrewarded,
        }
        return {"reward": reward, "metrics": metrics, "start": self.start}


async def play(hub, asked):
    """Returns the outcome of each episode. All episodes together take at most `deadline_s`."""
    end = time.monotonic() + asked["deadline_s"]
    told = await asyncio.gather(
        *(within(end, asked, _episode(hub, asked, episode)) for episode in asked["episodes"])
    )
    different = len({each.pop("start") for each in told if "start" in each}) > 1
    for each in told:
        if "metrics" in each:
            each["metrics"]["other_starts"] = float(different)
    return told


async def _episode(hub, asked, episode):
    row = asked["row"]
    async with contextlib.AsyncExitStack() as stack:
        session, first = await stack.enter_async_context(
            _session(hub, asked, row.get("reset") or {})
        )
        policy = await stack.enter_async_context(policy_of(episode, timeout=asked["deadline_s"]))
        course = _Course(
            _start(first.observation, hub.asked["shown"]),
            bool(first.done),
            [float(first.reward)] if first.reward else [],
        )
        messages = _begin(row.get("prompt") or "", course.start)
        for _ in range(hub.asked["max_turns"]):
            said = None if course.ended else await _ask(hub, asked, policy, messages)
            answers = await _answer(hub, session, course, said) if said else []
            if not answers:
                break
            messages += [said, *answers]
        return course.told(hub.asked["reward"])


@contextlib.asynccontextmanager
async def _session(hub, asked, reset):
    """A session and its first result, at the server with the fewest of our sessions.

    A full server is asked again. So is an unreachable server, after all others, for as long as a
    server may take to start.
    """
    from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]
    from websockets.exceptions import ConnectionClosed  # pyright: ignore[reportMissingImports]

    wait_s, longest_s = _ASK_AGAIN_S
    # before the time limit, to give the reason
    patient = time.monotonic() + 0.5 * min(hub.asked["start_s"], asked["deadline_s"])
    while True:
        url = _chosen(hub)
        hub.sessions[url] += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    client = GenericEnvClient(base_url=url, message_timeout_s=asked["deadline_s"])
                    session = await stack.enter_async_context(client)
                    first = await session.reset(**reset)
                except RuntimeError as error:
                    if code_of(error) != FULL:
                        raise
                except (ConnectionError, ConnectionClosed):
                    hub.away[url] = time.monotonic() + _AWAY_S
                    if time.monotonic() > patient:
                        raise
                else:
                    yield session, first
                    return
        finally:
            hub.sessions[url] -= 1
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, longest_s)


def _chosen(hub):
    now = time.monotonic()
    return min(hub.sessions, key=lambda url: (hub.away.get(url, 0.0) > now, hub.sessions[url]))


def _begin(prompt, start):
    """The row's messages, with the first observation at the end of the user's last text."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    last = (
        messages.pop()
        if messages and messages[-1]["role"] == "user"
        else {"role": "user", "content": ""}
    )
    said = last["content"]
    if isinstance(said, list):  # parts, which are texts
        said = "".join(part["text"] for part in said)
    return [*messages, {**last, "content": "\n".join(filter(None, [said, start]))}]


async def _ask(hub, asked, policy, messages):
    """The policy's next message; None if it has no room or calls left."""
    import openai

    tools = {"tools": hub.tools} if hub.tools else {}
    try:
        answer = await policy.chat.completions.create(
            model=asked["model"], messages=messages, **tools
        )
    except openai.APIStatusError as error:
        if error.code in _NO_ROOM:
            return None
        raise
    return answer.choices[0].message.model_dump(exclude_none=True)


async def _answer(hub, session, course, said):
    """The messages that answer the policy's message.

    Empty if it calls no tool, which ends the episode. Calls after the end are ignored.
    """
    if not hub.tools:
        text, _ = await _step(
            hub, session, course, {hub.asked["text_field"]: said.get("content") or ""}
        )
        return [{"role": "user", "content": text}]
    answers = []
    for call in said.get("tool_calls") or ():
        if not course.ended:
            function = call["function"]
            answer = await _call(
                hub, session, course, function["name"], json.loads(function["arguments"])
            )
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
    return answers


async def _call(hub, session, course, name, arguments):
    """The answer to a call, whose arguments are a JSON object.

    Mistakes of the policy are counted and shown to it.
    """
    if not hub.by_mcp:
        return (await _step(hub, session, course, arguments))[0]
    text, observation = await _step(
        hub, session, course, {"type": "call_tool", "tool_name": name, "arguments": arguments}
    )
    # otherwise it is an ordinary field of the observation
    if isinstance(failed := observation.get("error"), dict):
        course.refused += 1
        return f"error: {failed.get('message', '')}"
    return _text_of_tool(observation.get("result"), text)


async def _step(hub, session, course, action):
    """The text to show to the policy, and the observation.

    For an invalid action, the text is an error message.
    """
    try:
        result = await session.step(action)
    except RuntimeError as error:
        if code_of(error) != "VALIDATION_ERROR":
            raise
        course.refused += 1
        return "error: the action does not have the form of one", {}
    course.take(result)
    return _text(result.observation, hub.asked["shown"]), result.observation


def _start(observation, fields):
    """The text of the first observation for the policy.

    Raises ValueError if the observation has none of the fields; later observations may lack them.
    """
    if fields and not set(fields) & set(observation):
        raise ValueError(
            f"shown={', '.join(fields)}: the first observation has "
            f"{', '.join(observation) or 'no fields'}"
        )
    return _text(observation, fields)


def _text(observation, fields):
    """The fields of an observation to show to the policy, by default all that are not empty.

    A single text is shown as it is.
    """
    if fields is None:
        kept = {
            name: value
            for name, value in observation.items()
            if name != "metadata" and value not in (None, "", [], {})
        }
    else:
        kept = {name: observation[name] for name in fields if name in observation}
    values = list(kept.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(kept, ensure_ascii=False) if kept else ""


def _text_of_tool(result, otherwise):
    """The text of an MCP result: its text parts, and the kinds of other parts.

    A result without parts has a structure instead.
    """
    parts = result.get("content") if isinstance(result, dict) else None
    if not isinstance(parts, list):
        return result if isinstance(result, str) else otherwise
    structure = result.get("structured_content")
    if not parts and structure:
        return json.dumps(structure, ensure_ascii=False)
    return "\n".join(
        part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type')}]"
        for part in parts
    )


def code_of(error):
    """The server's error code in an exception of the client; empty without one."""
    found = _CODE.search(str(error))
    return found.group(1) if found else ""
