"""What a rollout is given, and what it must give back: everything that one's own rollout needs to know is in this file."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.config.schema import MAX_REWARD
from megarl.data.tokenizer import Tokenizer
from megarl.generator.completions import Completion, Sampling
from megarl.rewards.score import Score, ScoreRequest
from megarl.types import Prompt, Sample


class Generate(Protocol):
    async def __call__(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        """n independent continuations of the token ids, each token with its log-prob and the weight version that produced it.

        The engine is chosen by load, and a weight update in the middle is no concern of the caller's.
        """
        ...


class RunInWorker(Protocol):
    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A module's function, run in a worker process within rollout.tool_timeout_s; arguments and result are JSON.

        Raises: ToolError, with the message of the function's ValueError, or with how else it failed.
        """
        ...


@dataclass(frozen=True)
class RolloutContext:
    """What a rollout may call. All of it may be awaited by hundreds of samples at once."""

    tokenizer: Tokenizer
    generate: Generate
    score: Callable[[ScoreRequest], Awaitable[Score]]  # by the run's verifier; of a transcript: context.score(transcript.to_score)
    run_in_worker: RunInWorker
    tool_timeout_s: float  # what any tool may take


class Rollout(Protocol):
    """A rollout: a prompt in, n samples out. An async function, or an object whose class is built with the tokenizer.

    `rollout.args` are its keyword-only arguments (of the class: of its constructor), checked by their annotations. It runs
    in the generator's event loop, many times at once: it must await whatever takes time.
    """

    async def __call__(self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int) -> list[Sample]: ...


class ToolError(Exception):
    """A tool call without a result. The message is for the model."""


def sample_problems(samples: Any, n: int, max_tokens: int) -> list[str]:
    """What is wrong with what a rollout returned; empty if nothing is."""
    if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
        return [f"it must return a list of Sample, not {type(samples).__name__}"]
    if len(samples) != n:
        return [f"it must return {n} samples, not {len(samples)}"]
    return [f"sample {i}: {problem}" for i, sample in enumerate(samples) for problem in _problems(sample, max_tokens)]


def _problems(sample: Sample, max_tokens: int) -> list[str]:
    length = len(sample.token_ids)
    lists = {"logprobs": sample.logprobs, "versions": sample.versions, "policy_mask": sample.policy_mask or sample.token_ids}
    problems = [f"{length} token ids, but {len(values)} {name}" for name, values in lists.items() if len(values) != length]
    if not sample.policy_tokens:
        problems.append("none of its tokens is the policy's")
    if length > max_tokens:
        problems.append(f"{length} tokens, more than max_tokens={max_tokens}")
    if not _finite(sample.reward) or abs(sample.reward) > MAX_REWARD:
        problems.append(f"reward {sample.reward!r:.200}, no finite number of at most {MAX_REWARD:g} in size")
    if wrong := [logprob for logprob in sample.logprobs if not _finite(logprob)]:
        problems.append(f"log-prob {wrong[0]!r}, no finite number")
    return problems


def _finite(number: Any) -> bool:
    """A truth value is no number: it would not be one to the trainer, which is told of rewards in MessagePack."""
    return (type(number) is float and math.isfinite(number)) or (type(number) is int and abs(number) <= MAX_REWARD)
