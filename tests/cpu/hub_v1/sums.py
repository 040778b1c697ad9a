"""A taskset of verifiers 0.4: sums, with a tool or without, which fail in a chosen way.

`loop` plays in the worker's process.
"""

import asyncio
import json
import os
import time
from contextlib import AsyncExitStack

import openai
import verifiers.v1 as vf
from calculator import Calculator
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class SumTaskConfig(vf.TaskConfig):
    kind: str = "fine"
    tools: bool = False
    calculator: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    first: int = 1
    size: int = 4


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.calculator)] if config.tools else []

    @vf.reward(weight=0.5)
    async def right(self, trace):
        if self.config.kind == "function":
            raise KeyError("rubric")
        if self.config.kind == "hangs":
            time.sleep(1000)
        return float("nan") if self.config.kind == "nan" else trace.last_reply == self.data.answer

    @vf.reward(weight=0.25)
    async def short(self, trace):
        return len(trace.last_reply) == 1

    @vf.metric
    async def letters(self, trace):
        return len(trace.last_reply)


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for number in range(self.config.first, self.config.first + self.config.size):
            yield Sum(
                SumData(prompt=f"{number}+1", answer=str(number + 1), system_prompt="Add."),
                self.config.task,
            )


class LoopConfig(vf.HarnessConfig):
    turns: int = 1
    kind: str = "fine"


class Loop(vf.Harness[LoopConfig]):
    """Calls the tools that it is told to; then asks again."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        if self.config.kind != "mute":
            async with (
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client,
                AsyncExitStack() as stack,
            ):
                servers = {
                    "mcpServers": {
                        name: {"url": url, "timeout": 30} for name, url in mcp_urls.items()
                    }
                }
                tools, dispatch, connections = await connect_mcp(servers, stack)
                for _ in range(self.config.turns):
                    await self.turn(
                        client,
                        ctx.model,
                        messages,
                        tools,
                        lambda name, arguments: call_mcp(connections, dispatch, name, arguments),
                    )
        if self.config.kind == "raises":
            raise RuntimeError("the board is broken")
        if self.config.kind == "dies":
            os._exit(3)
        if self.config.kind == "late":
            await asyncio.sleep(1000)
        return vf.ProgramResult(0, "", "")

    async def turn(self, client, model, messages, tools, call):
        answer = (
            (
                await client.chat.completions.create(
                    model=model, messages=messages, tools=tools or openai.omit
                )
            )
            .choices[0]
            .message
        )
        messages.append(answer.model_dump(exclude_none=True))
        for tool_call in answer.tool_calls or ():
            result = await call(tool_call.function.name, json.loads(tool_call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
        if not answer.tool_calls:
            messages.append({"role": "user", "content": "Again."})


__all__ = ["Loop", "Sums"]
