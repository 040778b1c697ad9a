"""How many sequences a step has, and how long they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from megarl.algorithms.recipes import needs_reference, recipe_of
from megarl.config.schema import RunConfig


def scoring_passes(config: RunConfig) -> int:
    """Forward passes over a batch that train nothing: of the reference model; of the policy before the first optimizer step (of several, or
    for a penalty in the reward); for a loss of several responses, of the policy before each. A critic's own are counted with it."""
    algorithm = config.algorithm
    proximal = algorithm.kl == "reward" or (algorithm.ratio != "behavior" and config.trainer.optimizer_steps > 1)
    groups = config.trainer.epochs if recipe_of(algorithm).beta else 0
    return int(needs_reference(algorithm) is not None) + int(proximal) + groups


def dropped_share(config: RunConfig) -> float | None:
    """The share of generated prompts that are not trained on; None: unknown."""
    return config.plan.dropped_share if config.rollout.dynamic_sampling else 0.0


@dataclass(frozen=True)
class Workload:
    """Response lengths are exponential, cut at `max_response_tokens`; `response_tokens` is their mean after the cut."""

    sequences: int
    prompts: int  # each is prefilled once per engine that gets it (prefix caching)
    prompt_tokens: float
    response_tokens: float
    max_response_tokens: float

    @classmethod
    def of(cls, config: RunConfig) -> Workload:
        rollout, plan = config.rollout, config.plan
        return cls(
            sequences=rollout.prompts_per_step * rollout.n,
            prompts=rollout.prompts_per_step,
            prompt_tokens=plan.mean_prompt_tokens,
            response_tokens=min(plan.response_tokens or rollout.max_tokens / 2, rollout.max_tokens),
            max_response_tokens=rollout.max_tokens,
        )

    @classmethod
    def generated(cls, config: RunConfig) -> Workload:
        """With the prompts that dynamic sampling is expected to drop, if that is known (plan.dropped_share)."""
        trained, share = cls.of(config), dropped_share(config) or 0.0
        more = {name: math.ceil(getattr(trained, name) / (1 - share)) for name in ("sequences", "prompts")}
        return replace(trained, **more)

    @property
    def tokens_per_sequence(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        return self.sequences * self.tokens_per_sequence

    @property
    def longest(self) -> float:
        return self.prompt_tokens + self.max_response_tokens

    @cached_property
    def mean_square(self) -> float:
        """E[R^2] of the length R of a response after the cut: the integral of 2 t times the share of responses longer than t."""
        longest, scale = self.max_response_tokens, self.scale
        if math.isinf(scale):
            return longest * longest
        return 2 * scale * (scale - (scale + longest) * math.exp(-longest / scale))

    @property
    def tokens_per_square(self) -> float:
        """E[L^2] / E[L] of the length L of a sequence: attention's work on a batch is that of sequences which all have this length."""
        whole = self.prompt_tokens**2 + 2 * self.prompt_tokens * self.response_tokens + self.mean_square
        return whole / self.tokens_per_sequence

    @property
    def decoded(self) -> float:
        """Tokens that a response has so far, the mean over all decoding steps of all responses: E[R^2] / 2 E[R]. Half of the mean if all
        are equally long; the whole mean if lengths are exponential, as most steps are spent on long responses."""
        return self.mean_square / (2 * self.response_tokens)

    @cached_property
    def scale(self) -> float:
        """The exponential's mean before the cut: solves mean = scale (1 - exp(-max / scale)). Infinite: all responses reach the cut."""
        longest, mean = self.max_response_tokens, self.response_tokens
        if mean >= 0.999 * longest:
            return math.inf
        low, high = mean, 1e4 * longest
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if middle * -math.expm1(-longest / middle) < mean else (low, middle)
        return low

    def survivors(self, tokens: float) -> float:
        """Share of responses longer than `tokens`."""
        return math.exp(-tokens / self.scale) if tokens < self.max_response_tokens else 0.0

    @cached_property
    def straggler(self) -> float:
        """Expected length of the longest response of a step."""
        return min(self.max_response_tokens, self.scale * (math.log(self.sequences) + 0.5772))
