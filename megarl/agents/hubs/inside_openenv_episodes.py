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
class EnvironmentHub:
    request: dict
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
    reset_reward: float
    turn_rewards: list = field(default_factory=list)  # of the steps that each turn has taken
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
            self.turn_rewards[-1] += float(result.reward)

    def outcome(self, rule):
        if not self.rewards:
            return {
                "kind": "reward",
                "error": f"none of its {self.steps} steps had a reward",
                "start": self.start,
            }
        reward = math.fsum(self.rewards) if rule == "sum" else self.rewards[-1]
        # A reward that is NaN arrives as None: servers write it as null.
        metrics = {
            "env_steps": self.steps,
            "env_refused": self.refused,
            "env_ended": float(self.ended),
            "env_unrewarded": self.unrewarded,
        }
        outcome = {"reward": reward, "metrics": metrics, "start": self.start}
        if rule == "sum" and self.turn_rewards:
            self.turn_rewards[0] += self.reset_reward
            outcome |= {"turn_rewards": self.turn_rewards, "final_reward": 0.0}
        return outcome


async def play(hub, request):
    """Returns the outcome of each episode. All episodes together take at most `deadline_s`."""
    end = time.monotonic() + request["deadline_s"]
    outcomes = await asyncio.gather(
        *(within(end, request, _episode(hub, request, episode)) for episode in request["episodes"])
    )
    different = len({outcome.pop("start") for outcome in outcomes if "start" in outcome}) > 1
    for outcome in outcomes:
        if "metrics" in outcome:
            outcome["metrics"]["other_starts"] = float(different)
    return outcomes


async def _episode(hub, request, episode):
    row = request["row"]
    async with contextlib.AsyncExitStack() as stack:
        session, first = await stack.enter_async_context(
            _session(hub, request, row.get("reset") or {})
        )
        policy = await stack.enter_async_context(policy_of(episode, timeout=request["deadline_s"]))
        start = _start(first.observation, hub.request["shown"])
        rewards = [float(first.reward)] if first.reward else []
        course = _Course(start, bool(first.done), rewards, reset_reward=math.fsum(rewards))
        messages = _begin(row.get("prompt") or "", course.start)
        for _ in range(hub.request["max_turns"]):
            message = None if course.ended else await _ask(hub, request, policy, messages)
            if message:
                course.turn_rewards.append(0.0)
            answers = await _answer(hub, session, course, message) if message else []
            if not answers:
                break
            messages += [message, *answers]
        return course.outcome(hub.request["reward"])


@contextlib.asynccontextmanager
async def _session(hub, request, reset):
    """A session and its first result, at the server with the fewest of our sessions.

    A full server is asked again. So is an unreachable server, after all others, for as long as a
    server may take to start.
    """
    from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]
    from websockets.exceptions import ConnectionClosed  # pyright: ignore[reportMissingImports]

    wait_s, longest_s = _ASK_AGAIN_S
    # before the time limit, to give the reason
    patient = time.monotonic() + 0.5 * min(hub.request["start_s"], request["deadline_s"])
    while True:
        url = _least_loaded(hub)
        hub.sessions[url] += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    client = GenericEnvClient(base_url=url, message_timeout_s=request["deadline_s"])
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


def _least_loaded(hub):
    now = time.monotonic()
    return min(hub.sessions, key=lambda url: (hub.away.get(url, 0.0) > now, hub.sessions[url]))


def _begin(prompt, start):
    """The row's messages, with the first observation at the end of the user's last text."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    last = {"role": "user", "content": ""}
    if messages and messages[-1]["role"] == "user":
        last = messages.pop()
    text = last["content"]
    if isinstance(text, list):  # parts, which are texts
        text = "".join(part["text"] for part in text)
    return [*messages, {**last, "content": "\n".join(filter(None, [text, start]))}]


async def _ask(hub, request, policy, messages):
    """The policy's next message; None if it has no room or calls left."""
    import openai

    tools = {"tools": hub.tools} if hub.tools else {}
    try:
        answer = await policy.chat.completions.create(
            model=request["model"], messages=messages, **tools
        )
    except openai.APIStatusError as error:
        if error.code in _NO_ROOM:
            return None
        raise
    return answer.choices[0].message.model_dump(exclude_none=True)


async def _answer(hub, session, course, message):
    """The messages that answer the policy's message.

    Empty if it calls no tool, which ends the episode. Calls after the end are ignored.
    """
    if not hub.tools:
        action = {hub.request["text_field"]: message.get("content") or ""}
        text, _ = await _step(hub, session, course, action)
        return [{"role": "user", "content": text}]
    answers = []
    for call in message.get("tool_calls") or ():
        if not course.ended:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            answer = await _call(hub, session, course, function["name"], arguments)
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
    return answers


async def _call(hub, session, course, name, arguments):
    """The answer to a call, whose arguments are a JSON object.

    Mistakes of the policy are counted and shown to it.
    """
    if not hub.by_mcp:
        return (await _step(hub, session, course, arguments))[0]
    action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
    text, observation = await _step(hub, session, course, action)
    # otherwise it is an ordinary field of the observation
    error = observation.get("error")
    if isinstance(error, dict):
        course.refused += 1
        return f"error: {error.get('message', '')}"
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
    return _text(result.observation, hub.request["shown"]), result.observation


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
        shown_fields = {}
        for name, value in observation.items():
            if name != "metadata" and value not in (None, "", [], {}):
                shown_fields[name] = value
    else:
        shown_fields = {name: observation[name] for name in fields if name in observation}
    values = list(shown_fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(shown_fields, ensure_ascii=False) if shown_fields else ""


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
    texts = []
    for part in parts:
        is_text = isinstance(part.get("text"), str)
        texts.append(part["text"] if is_text else f"[{part.get('type')}]")
    return "\n".join(texts)


def code_of(error):
    """The server's error code in an exception of the client; empty without one."""
    match = _CODE.search(str(error))
    return match.group(1) if match else ""
