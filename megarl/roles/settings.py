"""The schema's section on the models of a run beside the policy."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megarl.config.limits import INPUT, Limit, above, at_least, between, one_of, seconds, setting

CRITIC = "critic"
REWARD_MODEL = "reward_model"
JUDGE = "judge"
TEACHER = "teacher"
REFERENCE = "reference"
INITIAL = "initial"
TRAINER = "trainer"
ENGINES = "engines"
# role -> where it may be, the usual place first
PLACES = {
    CRITIC: (TRAINER,),
    REWARD_MODEL: (ENGINES,),
    JUDGE: (ENGINES,),
    TEACHER: (ENGINES, TRAINER),
    REFERENCE: (TRAINER,),
    INITIAL: (ENGINES,),
}
POINTWISE = "pointwise"
PAIRWISE = "pairwise"
RESPONSE = "response"
STEPS = "steps"
CHAT = "chat"  # value of `template`: the chat template of the model's tokenizer


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass
class ChatTemplateConfig:
    """How the chat template of a model's tokenizer is applied."""

    name: str | None = setting(
        None,
        "which of several templates; null: the tokenizer's only one, or as in Transformers "
        "tool_use if there are tools, else default",
    )
    arguments: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "variables of the template, such as {enable_thinking: false} or "
            "{date_string: 26 Jul 2024}"
        },
    )
    date: str | None = setting(
        None,
        "the date that a template prints with strftime_now; null: the day on which the run began",
        Limit("YYYY-MM-DD", _is_date),
    )


@dataclass
class RoleConfig:
    """docs/rewards.md says which keys belong to which role."""

    role: str | None = setting(
        None,
        "what the model does; null: NAME itself. initial: evaluations measure its perplexity on "
        "the policy's responses",
        one_of(*PLACES),
    )
    path: str = setting(
        MISSING,
        "HF checkpoint: local folder or hub name. A critic may begin with a reward model or a "
        "causal model",
        path=INPUT,
    )
    on: str | None = setting(
        None,
        "where the model is. trainer: on the trainer's ranks (critic, reference, teacher); "
        "engines: on SGLang engines of its own, "
        "frozen (reward_model, judge, teacher, initial); null: the only place that its role has, and "
        "engines for a teacher",
        one_of(TRAINER, ENGINES),
    )
    sft: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "overrides with which megarl sft makes this model too, in `path`, such as "
            "{model.path: …, sft.steps: 600}; "
            "empty: the model is there already"
        },
    )
    engines: int = setting(1, "SGLang servers", at_least(1))
    tp: int = setting(1, "tensor parallel size of an engine", at_least(1))
    ep: int = setting(1, "expert parallel size of an engine", at_least(1))
    max_concurrency: int = setting(256, "requests in flight per engine", at_least(1))
    kv_cache_tokens: int | None = setting(
        None, "tokens of an engine's KV cache; null: as generator.kv_cache_tokens", at_least(1)
    )
    mem_fraction: float = setting(
        0.85,
        "fraction of GPU memory for weights and KV cache together",
        between(0, 1, open_low=True),
    )
    server_args: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "further arguments of the engines, by the names of SGLang's ServerArgs"
        },
    )
    timeout_s: float = setting(
        120.0, "time limit of one request; beyond it the score counts as failed", seconds()
    )
    weight: float = setting(
        1.0, "teacher: weight of its divergence in the sum over all teachers", above(0)
    )
    template: str | None = setting(
        None,
        "what the model reads. reward_model: a text with {prompt} and {response}, or chat: its "
        "own chat template; null: the policy's "
        "tokens. judge: a text with {prompt}, {response} and, if wanted, {answer}; to compare "
        "pairs, {response_a} and {response_b}",
    )
    scores: str = setting(
        RESPONSE,
        "reward_model: what is scored. response: the whole response; steps: the text up to the end "
        "of each turn, or of each step of a response of one turn. Needs algorithm.credit=returns "
        "or process",
        one_of(RESPONSE, STEPS),
    )
    step_separator: str = setting(
        "\n\n",
        "reward_model, with scores=steps: the text after which a step of a response of one turn "
        "ends",
        Limit("not empty", bool),
    )
    chat: bool = setting(
        True,
        "judge: the text is a user's message in the model's chat template; false: it is the whole "
        "input",
    )
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    mode: str = setting(
        POINTWISE,
        "judge. pointwise: each response by itself; pairwise: the prompt's responses against each "
        "other, each pair in both orders. "
        "The score is then the share of wins",
        one_of(POINTWISE, PAIRWISE),
    )
    verdict: str | None = setting(
        None,
        "judge: a regular expression with one group, which is the verdict; the last place in the "
        "judge's answer counts",
    )
    verdict_scores: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "judge: the score of each verdict, such as {A: 1, B: 0, C: 0.5}; if empty, "
            "the verdict is a number"
        },
    )
    verdict_range: tuple[float, float] = setting(
        (0.0, 1.0),
        "judge: the lowest and highest number that a verdict may be, which score 0 and 1; other "
        "numbers count as failed",
    )
    temperature: float = setting(0.0, "judge: sampling temperature; 0: greedy", at_least(0))
    max_tokens: int = setting(512, "judge: longest answer in tokens", at_least(1))
    opponents: int | None = setting(
        None,
        "judge, pairwise: each response is compared with this many of the prompt's next "
        "responses, in a circle; null: with all others",
        at_least(1),
    )


def flat(overrides: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value in RoleConfig.sft, which may be written dotted or nested.

    The last of several values counts.
    """
    settings: dict[str, Any] = {}
    for name, value in overrides.items():
        if isinstance(value, Mapping):
            settings |= flat(value, f"{prefix}{name}.")
        else:
            settings[f"{prefix}{name}"] = value
    return settings


def role_of(name: str, settings: RoleConfig) -> str:
    return settings.role or name


def place_of(name: str, settings: RoleConfig) -> str:
    """Where the model is: "trainer" or "engines"."""
    return settings.on or PLACES[role_of(name, settings)][0]
