"""The interface of rollouts: what a rollout is given, and what it must return.

This file is all you need to write one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from megarl.base.kept_sets import KeptSets, join_kept_sets
from megarl.base.rollout_types import (
    UNANSWERED,
    Group,
    Prompt,
    Sample,
    TurnReward,
    episodes,
    impossible_logprobs,
    typed,
    view,
)
from megarl.config.schema import MAX_REWARD
from megarl.data.chat import ChatTemplate, Message, load_chat_template
from megarl.data.tokenizer import Tokenizer
from megarl.generator.completions import Completion, Sampling
from megarl.generator.seeds import seed_of
from megarl.rewards.score import Score, ScoreRequest


class Generate(Protocol):
    async def __call__(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        """Returns n independent continuations of `prompt_ids`.

        Each token comes with its log-prob and the weight version that sampled it.

        The least loaded engine serves the request. Weight updates may happen meanwhile; the caller
        does not have to handle them.
        """
        ...


class RunInWorker(Protocol):
    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a module-level function in a worker process, for at most rollout.tool_timeout_s.

        Arguments and result must be JSON.

        Raises: ToolError with the message of the function's ValueError, or with the reason of any
        other failure.
        """
        ...


@dataclass(frozen=True)
class RolloutContext:
    """The functions a rollout may call. Hundreds of samples may await them at once."""

    tokenizer: Tokenizer
    generate: Generate
    # calls the run's verifier, such as context.score(transcript.to_score)
    score: Callable[[ScoreRequest], Awaitable[Score]]
    run_in_worker: RunInWorker
    tool_timeout_s: float  # the limit for any tool


class Rollout(Protocol):
    """A rollout takes a prompt and returns n samples.

    It is an async function, or an object of a class whose constructor takes the tokenizer.

    `rollout.args` become keyword-only arguments of the function, or of the class's constructor, and
    are checked against their annotations. A rollout runs in the generator's event loop, many times
    at once, so it must await whatever takes time. If an object has `check`, it is awaited before
    anything starts and may raise ConfigError. If it has `close`, that is awaited at the end of the
    run.

    An episode may consist of several sequences. Its samples then follow each other in the list, and
    all but the first have `Sample.branch` above 0. If samples begin with other token ids than the
    prompt's, return a Group with the prompt that they begin with.
    """

    async def __call__(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[Sample] | Group: ...


class ToolError(Exception):
    """A tool call failed. The model is shown the message."""


def sample_problems(
    samples: Any, n: int, max_tokens: int, vocab_size: int, replayed: bool = False
) -> list[str]:
    """The problems with the samples that a rollout returned; empty if they are valid.

    `replayed`: samples must have kept sets.
    """
    if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
        return [f"it must return a list of Sample, not {type(samples).__name__}"]
    if samples and samples[0].branch:
        return [
            f"the first sample has branch={samples[0].branch}, but no sample of the same episode "
            "comes before it"
        ]
    episode_count = len(episodes(samples))
    if episode_count != n:
        return [f"it must return {n} samples, not {episode_count}"]
    problems = []
    for i, sample in enumerate(samples):
        for problem in _problems(sample, max_tokens, vocab_size, replayed):
            problems.append(f"sample {i}: {problem}")
    if not problems and not all(map(_have_one_reward, episodes(samples))):
        problems.append("the branches of an episode must have the same reward")
    return problems


def _have_one_reward(branches: Sequence[Sample]) -> bool:
    return all(sample.reward == branches[0].reward for sample in branches)


def _problems(sample: Sample, max_tokens: int, vocab_size: int, replayed: bool) -> list[str]:
    length = len(sample.token_ids)
    arrays = {
        "logprobs": sample.logprobs,
        "versions": sample.versions,
        "policy_mask": sample.policy_mask or sample.token_ids,
    }
    arrays["kept"] = sample.token_ids if sample.kept is None else sample.kept
    problems = []
    for name, values in arrays.items():
        if len(values) != length:
            problems.append(f"{length} token ids, but {len(values)} {name}")
    if sample.finish_reason == UNANSWERED:
        problems += [f"{length} tokens, though finish_reason={UNANSWERED}"] if length else []
    elif not (view(sample.policy_mask).any() if sample.policy_mask else length):
        problems.append("the policy sampled none of its tokens")
    if length > max_tokens:
        problems.append(f"{length} tokens, more than max_tokens={max_tokens}")
    if not _finite(sample.reward) or abs(sample.reward) > MAX_REWARD:
        problems.append(
            f"reward {sample.reward!r:.200}: must be a finite number of absolute value at most "
            f"{MAX_REWARD:g}"
        )
    problems += _turn_problems(sample)
    logprobs = view(sample.logprobs)
    impossible = impossible_logprobs(logprobs)
    if impossible.any():
        problems.append(f"log-prob {logprobs[impossible][0]}: must be a finite number, at most 0")
    ids = view(sample.token_ids)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        problems.append(f"token id {ids[outside][0]}: the vocabulary has 0 to {vocab_size - 1}")
    if replayed and length and not problems:
        lacking = np.ones(length, np.bool_) if sample.kept is None else sample.kept.counts == 0
        if sample.policy_mask:
            lacking = lacking & view(sample.policy_mask)
        missing = int(lacking.sum())
        if missing:
            problems.append(
                f"{missing} tokens of the policy lack the sets they were drawn from, which "
                "rollout.replay_mask needs: build samples with "
                "Transcript, or give Completion.kept to Sample; and leave top_p, top_k and min_p "
                "of Sampling as they are"
            )
    return problems


def _turn_problems(sample: Sample) -> Iterator[str]:
    mask = view(sample.policy_mask) if sample.policy_mask else np.ones(len(sample.token_ids), bool)
    start = 0
    learned = False
    for number, (end, reward) in enumerate(sample.turn_rewards):
        turn = f"turn_rewards[{number}]=({end!r}, {reward!r:.200})"
        if not _finite(reward) or abs(reward) > MAX_REWARD:
            yield (
                f"{turn}: the reward must be a finite number of absolute value at most "
                f"{MAX_REWARD:g}"
            )
        if not isinstance(end, int) or not start < end <= len(sample.token_ids):
            yield f"{turn}: it must end after token {start}, and within {len(sample.token_ids)}"
            return
        has_policy_tokens = bool(mask[start:end].any())
        # only first turns of a branch may be learned elsewhere
        if not has_policy_tokens and (learned or not sample.branch):
            yield f"{turn}: the policy sampled none of its tokens"
        learned = learned or has_policy_tokens
        start = end
    if sample.turn_rewards and mask[start:].any():
        yield f"turn_rewards end at token {start}, but the policy sampled later ones"


def _finite(number: Any) -> bool:
    """Whether `number` is finite.

    A bool is not a number here, since MessagePack would not send it to the trainer as one.
    """
    return (type(number) is float and math.isfinite(number)) or (
        type(number) is int and abs(number) <= MAX_REWARD
    )


@dataclass
class Transcript:
    """A sample under construction, from the alternating turns of policy and environment.

    Token ids are only ever appended. Sampled text is never tokenised again, which could give other
    ids.
    """

    prompt: Prompt
    tokenizer: Tokenizer
    max_tokens: int  # of the response, including the environment's tokens
    # index among the prompt's samples; with it, turns have seeds of their own
    sample_index: int | None = None
    last_text: str = ""  # the text of the policy's last turn
    finish_reason: str = "stop"
    turn_ends: list[int] = field(default_factory=list)  # in tokens of the response
    turn_rewards: list[float] = field(default_factory=list)  # of the policy's turns so far
    _ids: array[int] = field(default_factory=partial(array, "i"))
    _logprobs: array[float] = field(default_factory=partial(array, "f"))
    _versions: array[int] = field(default_factory=partial(array, "i"))
    _mask: array[int] = field(default_factory=partial(array, "b"))
    _routing: bytes = b""
    _kept_sets: KeptSets | None = None
    _text: str = ""
    _turns: int = 0  # of the policy
    _spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the response so far: what the next turn continues."""
        return self.prompt.token_ids + self._ids.tolist()

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self._ids)

    def turn(self, sampling: Sampling, max_tokens: int | None = None) -> Sampling:
        """`sampling` for the next turn, limited to the tokens that are left and to `max_tokens`."""
        seed = sampling.seed
        if seed is not None and self.sample_index is not None:
            seed = seed_of(seed, self.sample_index, self._turns)
        limit = self.tokens_left
        if max_tokens is not None:
            limit = min(max_tokens, limit)
        return replace(sampling, max_tokens=limit, seed=seed)

    def add_policy(self, completion: Completion) -> None:
        self._append(
            completion.token_ids,
            completion.logprobs,
            completion.versions,
            completion.kept,
            by_policy=True,
        )
        # Each completion has the experts of all positions so far. Tokens of earlier turns keep the
        # experts they were sampled with.
        self._routing += completion.routing[len(self._routing) :]
        self._turns += 1
        self.turn_ends.append(len(self._ids))
        self.turn_rewards.append(0.0)
        self.last_text = self.tokenizer.decode_turn(completion.token_ids)
        self._text += self.last_text
        # A turn that was cut at its own limit does not end the response.
        self.finish_reason = "stop" if self.tokens_left > 0 else completion.finish_reason

    def add_reward(self, reward: float) -> None:
        """Rewards the policy's last turn, besides the reward of the whole response.

        `algorithm.credit` says whether the turn's tokens answer for it. Several rewards of a turn
        add up.
        """
        if not self.turn_rewards:
            raise ValueError("there is no turn to reward")
        self.turn_rewards[-1] += reward

    def add_environment(self, token_ids: Sequence[int]) -> bool:
        """Appends the environment's answer.

        If that would leave no tokens for the policy, appends nothing and returns False.
        """
        if len(token_ids) >= self.tokens_left:
            self.finish_reason = "length"
            return False
        self._append(
            typed(token_ids, "i"),
            array("f", [0.0]) * len(token_ids),
            self._versions[-1:] * len(token_ids),
            None,
            by_policy=False,
        )
        start = len(self._text)
        self._text += self.tokenizer.decode(token_ids)
        self._spans.append((start, len(self._text)))
        return True

    @property
    def turn_ended(self) -> bool:
        """Whether the policy has sampled the end-of-text token of its last turn.

        False if the turn was cut, or ended at a stop text.
        """
        return len(self._ids) > 0 and self._ids[-1] in self.tokenizer.eos_ids

    def add_messages(self, messages: Sequence[Message]) -> bool:
        """Appends the environment's messages as the model's chat template frames them, and opens
        the policy's next turn.

        Messages are `{"role": "user" or "tool", "content": text}`. All tokens of the template are
        the environment's, so they are masked. These include the token that ends the policy's turn,
        unless the policy has sampled it (`turn_ended`). So prompt and response are what the
        template makes of the whole conversation. Text of messages cannot end a turn or open
        another. Returns what `add_environment` returns. Raises ConfigError without a chat template,
        and ValueError if it refuses the messages.
        """
        template = _template_of(self.tokenizer)
        return self.add_environment(template.following(messages, self.tokenizer, self.turn_ended))

    @property
    def to_score(self) -> ScoreRequest:
        """The request to score the response so far. Its text is the text of the last turn."""
        return ScoreRequest(
            response=self.last_text,
            answer=self.prompt.answer,
            prompt=self.prompt.text,
            row=self.prompt.row,
            source=self.prompt.source,
            prompt_token_ids=self.prompt.token_ids,
            token_ids=self._ids,
            turn_ends=self.turn_ends,
            version=int(view(self._versions).max(initial=-1)),
            sample_index=self.sample_index or 0,
            truncated=self.finish_reason == "length",
        )

    def sample(self, reward: Score | float, **metrics: float) -> Sample:
        """The finished sample.

        `reward` is the verifier's score, or a number that the rollout has computed itself.
        """
        score = reward if isinstance(reward, Score) else Score(reward)
        return Sample(
            token_ids=self._ids,
            logprobs=self._logprobs,
            versions=self._versions,
            text=self._text,
            reward=score.reward,
            finish_reason=self.finish_reason,
            policy_mask=array("b") if view(self._mask).all() else self._mask,
            environment_spans=self._spans,
            metrics=metrics,
            routing=self._routing,
            reward_parts=score.parts,
            failures=score.failures,
            kept=self._kept_sets,
            turn_rewards=self._rewards_with(score),
        )

    def _rewards_with(self, score: Score) -> list[TurnReward]:
        """What turns, or steps that `score` has scored, have earned; empty if only `score` counts,
        at the end of a single turn.
        """
        if len(self.turn_ends) < 2 and not any(self.turn_rewards) and not score.turn_rewards:
            return []
        last = self.turn_ends[-1]
        earned = dict.fromkeys(self.turn_ends, 0.0)
        of_score = score.turn_rewards or [TurnReward(last, score.reward)]
        for end, reward in (*zip(self.turn_ends, self.turn_rewards, strict=True), *of_score):
            # the environment may have written after the last turn
            end = min(end, last)
            earned[end] = earned.get(end, 0.0) + reward
        return [TurnReward(end, earned[end]) for end in sorted(earned)]

    def _append(
        self,
        ids: array[int],
        logprobs: array[float],
        versions: array[int],
        kept_sets: KeptSets | None,
        by_policy: bool,
    ) -> None:
        self._kept_sets = join_kept_sets(self._kept_sets, len(self._ids), kept_sets, len(ids))
        self._ids += ids
        self._logprobs += logprobs
        self._versions += versions
        self._mask += array("b", [by_policy]) * len(ids)


@cache
def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    setting = f"model.path={tokenizer.source}"
    return load_chat_template(
        tokenizer, setting, without="Transcript.add_messages needs one; use add_environment"
    )
