"""What travels between executors: prompts, samples, groups, batches.

All are frozen msgspec structs, so the same types serve in memory and on the wire
(typed MessagePack, never pickle).
"""

from __future__ import annotations

from itertools import compress
from typing import Any

import msgspec

Version = int
"""Weight version: 0 for the initial weights, +1 for every optimizer step."""


Ordinal = int
"""Number of a prompt in the run's endless stream of prompts, from 0 on."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt. `ordinal` numbers the prompts of a run; it is never reused, also not across a resume."""

    ordinal: Ordinal
    token_ids: list[int]  # [P]
    text: str
    answer: str  # the reference the verifier compares with
    row: dict[str, Any] = {}  # of the data set, for a reward function of the user's own; it stays at the generator


class Failure(msgspec.Struct, frozen=True):
    """Why a response has no score of its own."""

    kind: str  # "timeout" | "error" | "memory" | "exit"
    reason: str  # as it completes "… failed: "


class Sample(msgspec.Struct, frozen=True):
    """One response to a prompt, with the behaviour policy mu that produced it.

    In a rollout of several turns the environment has written some of the tokens. Those are context, not actions: they
    have no log-prob and no version of their own, and are not learned.
    """

    token_ids: list[int]  # [T] response tokens, end-of-text included when it was sampled
    logprobs: list[float]  # [T] log mu(y_t | x, y_<t) under the distribution sampled from; 0 on the environment's tokens
    versions: list[int]  # [T] weight version that produced each token; anything on the environment's tokens
    text: str
    reward: float
    finish_reason: str  # "stop" | "length"
    policy_mask: list[bool] = []  # [T] False on the environment's tokens; empty: the policy produced all
    environment_spans: list[tuple[int, int]] = []  # [start, end) in `text` of what the environment wrote, for people
    metrics: dict[str, float] = {}  # what the rollout counted; a step reports each one's mean as rollout/<name>
    routing: bytes = b""  # experts chosen at the positions of prompt and response (models/routing.py), from the first on; empty: unknown
    reward_parts: dict[str, float] = {}  # what the reward is made of; a step reports each one's mean as reward/<name>/mean
    failure: Failure | None = None  # of its reward function; `reward` is then reward.failed_score

    @property
    def policy_tokens(self) -> int:
        return sum(self.policy_mask) if self.policy_mask else len(self.token_ids)

    @property
    def policy_versions(self) -> list[Version]:
        """Versions of the tokens that the policy produced, in order."""
        return list(compress(self.versions, self.policy_mask)) if self.policy_mask else self.versions

    @property
    def turns(self) -> int:
        """Runs of policy tokens; 1 where the environment wrote nothing in between."""
        return sum(mine and not before for before, mine in zip([False, *self.policy_mask], self.policy_mask)) if self.policy_mask else 1

    @property
    def min_version(self) -> Version:
        return min(self.policy_versions)

    @property
    def max_version(self) -> Version:
        return max(self.policy_versions)


class Group(msgspec.Struct, frozen=True):
    """The n samples of one prompt: the unit of the baseline, and of sending."""

    prompt: Prompt
    samples: list[Sample]  # [n]


class Batch(msgspec.Struct, frozen=True, tag=True):
    """The input of one optimizer step: `prompts_per_step` groups, in the order of their ordinals."""

    step: int
    groups: list[Group]
    generate_s: float  # from the start of its first rollout to the end of its last
    generator_wait_s: float  # how long the generator waited for weights since the batch before, counted in places in flight
    due_wait_s: float = 0.0  # of the trainer's waiting: for rollouts that would have become too old, though others were there
    rejected: int = 0  # groups found too old since the batch before, to be generated again
    buffered: int = 0  # finished groups left for later batches


class TrainSequence(msgspec.Struct, frozen=True):
    """One token sequence as the trainer sees it: prompt and response joined, with per-token training data.

    Position i of `loss_mask`, `mu_logprobs`, `advantages` speaks of the prediction of token i from tokens < i;
    position 0 is therefore always masked.
    """

    token_ids: list[int]  # [L]
    loss_mask: list[bool]  # [L] True on tokens that the policy produced (or, in SFT, is to learn)
    mu_logprobs: list[float]  # [L] 0 where masked
    advantages: list[float]  # [L] 0 where masked
    routing: bytes = b""  # experts to use (models/routing.py), at the first positions, up to L - 1 of them; elsewhere the router's own
