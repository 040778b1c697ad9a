"""Builds one sample from what the policy and the environment write in turn."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from megarl.data.tokenizer import Tokenizer
from megarl.generator.completions import Completion, Sampling
from megarl.kept_sets import KeptSets, join
from megarl.rewards.score import Score, ScoreRequest
from megarl.types import Prompt, Sample, typed, view


@dataclass
class Transcript:
    """Token ids are only ever appended. Sampled text is never tokenised again, since that could give other ids."""

    prompt: Prompt
    tokenizer: Tokenizer
    max_tokens: int  # of the response, including the environment's tokens
    sample_index: int = 0  # which of the prompt's samples
    last_text: str = ""  # the text of the policy's last turn
    finish_reason: str = "stop"
    _ids: array[int] = field(default_factory=partial(array, "i"))
    _logprobs: array[float] = field(default_factory=partial(array, "f"))
    _versions: array[int] = field(default_factory=partial(array, "i"))
    _mask: array[int] = field(default_factory=partial(array, "b"))
    _routing: bytes = b""
    _kept: KeptSets | None = None
    _text: str = ""
    _spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the response so far, which the next turn continues."""
        return self.prompt.token_ids + self._ids.tolist()

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self._ids)

    def turn(self, sampling: Sampling, max_tokens: int | None = None) -> Sampling:
        """`sampling` for the next turn, with as many tokens as are left, but at most `max_tokens`."""
        return replace(sampling, max_tokens=self.tokens_left if max_tokens is None else min(max_tokens, self.tokens_left))

    def add_policy(self, completion: Completion) -> None:
        self._append(completion.token_ids, completion.logprobs, completion.versions, completion.kept, mine=True)
        # Each answer covers all positions so far. Earlier turns keep the experts that they were sampled with.
        self._routing += completion.routing[len(self._routing) :]
        self.last_text = self.tokenizer.decode(completion.token_ids)
        self._text += self.last_text
        # A turn that was cut at a limit of its own leaves the response room to go on.
        self.finish_reason = "stop" if self.tokens_left > 0 else completion.finish_reason

    def add_environment(self, token_ids: Sequence[int]) -> bool:
        """Appends the environment's answer. Returns False, and appends nothing, if that would leave the policy no tokens."""
        if len(token_ids) >= self.tokens_left:
            self.finish_reason = "length"
            return False
        self._append(typed(token_ids, "i"), array("f", [0.0]) * len(token_ids), self._versions[-1:] * len(token_ids), None, mine=False)
        start = len(self._text)
        self._text += self.tokenizer.decode(token_ids)
        self._spans.append((start, len(self._text)))
        return True

    @property
    def to_score(self) -> ScoreRequest:
        """The request to score the response so far; its text is that of the last turn."""
        return ScoreRequest(
            response=self.last_text,
            answer=self.prompt.answer,
            prompt=self.prompt.text,
            row=self.prompt.row,
            source=self.prompt.source,
            prompt_token_ids=self.prompt.token_ids,
            token_ids=self._ids,
            version=int(view(self._versions).max(initial=-1)),
            sample_index=self.sample_index,
            truncated=self.finish_reason == "length",
        )

    def sample(self, reward: Score | float, **metrics: float) -> Sample:
        """The finished sample, with the verifier's score or a reward of the rollout's own."""
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
            kept=self._kept,
        )

    def _append(self, ids: array[int], logprobs: array[float], versions: array[int], kept: KeptSets | None, mine: bool) -> None:
        self._kept = join(self._kept, len(self._ids), kept, len(ids))
        self._ids += ids
        self._logprobs += logprobs
        self._versions += versions
        self._mask += array("b", [mine]) * len(ids)
