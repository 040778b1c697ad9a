"""A dialogue with a tool: the policy writes a call and the environment its result, until a turn of
the policy ends without a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from megarl.base.rollout_types import Prompt, Sample
from megarl.config.errors import ConfigError
from megarl.config.limits import find_callable, is_async
from megarl.data.tokenizer import MOST_CHARS_PER_TOKEN, Tokenizer
from megarl.generator.completions import Sampling
from megarl.rewards.score import score_of
from megarl.rollouts.environments.base import RolloutContext, ToolError, Transcript


class _ToolAnswer(NamedTuple):
    text: str
    is_error: bool = False
    reward: float = 0.0  # of the turn that made the call


TOOLS = {"calculator": "megarl.rollouts.environments.calculator:calculate"}


class ToolCalls:
    """Two tokens mark a call, `call_open` … `call_close`; the second one ends the turn.

    The tool maps the text between the marks to the text of the result, or raises ValueError. An
    async tool runs in the event loop, any other in a worker process; rollout.tool_timeout_s bounds
    both. The result, cut to `max_result_tokens`, replaces {result} in `result`. A failed call is
    answered with "error: " and the reason. Only a bug in an async tool, an exception other than
    ValueError, ends the run.

    At most `max_calls` calls of a sample are answered. A sample scores 0 if it ends in an
    unanswered call, or has no room for the answer. All other samples are scored by their last turn.
    A result may also be {"result": text, "reward": number}: the number rewards the turn that made
    the call. Metrics: tool_calls (answered), tool_errors.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tool: str = "calculator",
        call_open: str = "<tool_call>",
        call_close: str = "</tool_call>",
        result: str = "{result}",
        max_calls: Annotated[int, Meta(ge=1)] = 4,
        max_result_tokens: Annotated[int, Meta(ge=1)] = 64,
    ):
        """Raises: ConfigError with all problems of the arguments."""
        self._tool_setting = f"rollout.args.tool={tool}"
        self._tool = find_callable(TOOLS.get(tool, tool), self._tool_setting, built_in=TOOLS)
        self._tokenizer = tokenizer
        marks = {"call_open": call_open, "call_close": call_close}
        ids = {name: tokenizer.token_id(text) for name, text in marks.items()}
        problems = []
        for name, token in ids.items():
            if token is None:
                setting = f"rollout.args.{name}={marks[name]}"
                problems.append(f"{setting}: must be one token of {tokenizer.source}")
        if result.count("{result}") != 1:
            problems.append(f"rollout.args.result={result}: must contain {{result}} once")
        if problems:
            raise ConfigError(problems)
        self._open = ids["call_open"]
        self._close = ids["call_close"]
        self._before, self._after = (
            tokenizer.encode_text(text, special_tokens=True) for text in result.split("{result}")
        )
        self._max_calls = max_calls
        self._max_result_tokens = max_result_tokens

    async def __call__(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[Sample]:
        return await asyncio.gather(
            *(self._sample(context, prompt, sampling, index) for index in range(n))
        )

    async def _sample(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, index: int
    ) -> Sample:
        transcript = Transcript(prompt, self._tokenizer, sampling.max_tokens, index)
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, self._close))
        calls = errors = 0
        for calls in range(self._max_calls + 1):
            [completion] = await context.generate(
                transcript.token_ids, transcript.turn(sampling), 1
            )
            transcript.add_policy(completion)
            if completion.token_ids[-1] != self._close:
                score = await context.score(transcript.to_score)
                return transcript.sample(score, tool_calls=calls, tool_errors=errors)
            if calls == self._max_calls:
                break
            answer = await self._answer(context, completion.token_ids[:-1])
            errors += answer.is_error
            transcript.add_reward(answer.reward)
            result = self._tokenizer.encode_text(
                answer.text[: self._max_result_tokens * MOST_CHARS_PER_TOKEN]
            )[: self._max_result_tokens]
            if not transcript.add_environment(self._before + result + self._after):
                break
        return transcript.sample(0.0, tool_calls=calls, tool_errors=errors)

    async def _answer(self, context: RolloutContext, turn_ids: Sequence[int]) -> _ToolAnswer:
        """The answer to the call at the end of a turn."""
        try:
            if self._open not in turn_ids:
                raise ToolError("the call was not opened")
            start = len(turn_ids) - turn_ids[::-1].index(self._open)
            result = await self._run(context, self._tokenizer.decode(turn_ids[start:]))
        except ToolError as error:
            return _ToolAnswer(f"error: {error}", is_error=True)
        if isinstance(result, dict) and set(result) == {"result", "reward"}:
            try:
                reward = score_of(result["reward"]).reward
            except TypeError as error:
                raise TypeError(f"{self._tool_setting}: the reward of a turn: {error}") from error
            return _ToolAnswer(str(result["result"]), reward=reward)
        return _ToolAnswer(str(result))

    async def _run(self, context: RolloutContext, argument: str) -> Any:
        if not is_async(self._tool):
            return await context.run_in_worker(self._tool, argument)
        deadline = asyncio.timeout(context.tool_timeout_s)
        try:
            async with deadline:
                return await self._tool(argument)
        except ValueError as error:
            raise ToolError(str(error)) from error
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise ToolError(f"it took longer than {context.tool_timeout_s:g} s") from error
