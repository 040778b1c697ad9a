"""The schema's section on how prompts become samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.config.limits import IMPORT_PATH, MODULE, Limit, above, at_least, between, one_of, seconds, setting
from megarl.kept_sets import MOST_KEPT

OF_HUBS = ("verifiers", "openenv")  # names of rollouts: their rows and rewards are an environment's own
BY_CALLS = ("program", *OF_HUBS)  # names of rollouts whose policy is called from outside, so that an episode may branch


@dataclass
class RolloutConfig:
    name: str = setting(
        "single_turn",
        "how a prompt becomes samples. single_turn: one completion per sample; tool_calls: turns with a tool (docs/environments.md); "
        "program: a program of yours that calls the policy by OpenAI's or Anthropic's interface; "
        "verifiers and openenv: an environment of these packages (docs/agents.md)",
        one_of(
            "single_turn",
            "tool_calls",
            *BY_CALLS,
            or_like=IMPORT_PATH,
            written="package.module:function, ./file.py:function",
        ),
        MODULE,
    )
    args: dict[str, Any] = field(default_factory=dict, metadata={"meaning": "keyword arguments of the rollout that `name` names"})
    prompts_per_step: int = setting(
        32,
        "prompts of a batch: what is trained on between two weight updates, in trainer.minibatches * trainer.epochs optimizer steps",
        at_least(1),
    )
    n: int = setting(4, "samples per prompt", at_least(1))
    dynamic_sampling: bool = setting(
        False,
        "drop a prompt whose samples all have the same reward, since nothing is learned from it, and take the next one in its place "
        "(DAPO; docs/algorithms.md)",
    )
    max_num_gen_batches: int | None = setting(
        10,
        "with dynamic_sampling, the run ends if of so many times prompts_per_step prompts, generated for one step, fewer than "
        "prompts_per_step are left; null: no limit",
        at_least(1),
    )
    max_tokens: int = setting(1024, "longest response in tokens, including an environment's", at_least(1))
    temperature: float = setting(1.0, "sampling temperature", above(0))
    top_p: float = setting(1.0, "nucleus sampling; 1: off", between(0, 1, open_low=True))
    top_k: int = setting(
        -1,
        "sample from the k likeliest tokens; -1: off",
        Limit(f"-1, or from 2 to {MOST_KEPT}, the most that are recorded", lambda k: k == -1 or 2 <= k <= MOST_KEPT),
    )
    min_p: float = setting(
        0.0, "sample from the tokens that are at least min_p times as likely as the likeliest; 0: off", between(0, 1, open_high=True)
    )
    replay_mask: bool = setting(
        True,
        "with top_p, top_k or min_p, the trainer's log-probs too are over the tokens that each token was drawn from (docs/algorithms.md); "
        "false: over the whole vocabulary, while those of the engine stay over these",
    )
    max_failed_fraction: float = setting(
        0.5,
        "the run ends if a larger share of a step's or an evaluation's episodes failed: those of programs and environments, but for those "
        "that sampled nothing (docs/agents.md); 1: never",
        between(0, 1),
    )
    stop: list[str] = field(
        default_factory=list,
        metadata={
            "meaning": "texts that end a response or a turn, besides end-of-text; such a text belongs to the response and is learned",
            "limit": Limit("at most 32 texts, none empty", lambda texts: len(texts) <= 32 and all(texts)),
        },
    )
    tool_workers: int = setting(1, "processes for tools that compute; started at the first call", at_least(1))
    tool_timeout_s: float = setting(5.0, "time limit of a tool's call", seconds())
    tool_memory_mib: int = setting(1024, "memory limit of a tool process", at_least(256))

    @property
    def stops_on_text(self) -> bool:
        """Whether requests may have stop strings, so that engines need the tokenizer: the run's, or those of a program's calls."""
        return bool(self.stop) or self.name in BY_CALLS

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from parts of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def replays_mask(self) -> bool:
        return self.truncated and self.replay_mask
