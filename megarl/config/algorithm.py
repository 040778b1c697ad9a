"""The schema's section on the training objective."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from megarl.config.limits import IMPORT_PATH, MODULE, above, at_least, between, one_of, setting

NAMES = (
    *("aipo", "grpo", "gspo", "icepop", "topr", "reinforce", "rloo", "proximal_rloo", "best_of_n", "online_dpo", "ipo", "copg", "ppo"),
    "distill",
)
NO_DUAL_CLIP = 1e9
_CLIPPED = {"name": "grpo", "rho_min": 0.8, "rho": 1.2, "dual_clip": NO_DUAL_CLIP}
# What papers print, by the names that people know it by: settings of the section, or with a dot of others. Sources: docs/algorithms.md.
PUBLISHED: dict[str, dict[str, Any]] = {
    "aipo": {"name": "aipo", "rho": 4.0, "advantage": "mean", "loss_mean": "token"},
    "grpo": {**_CLIPPED, "advantage": "normalized", "loss_mean": "sequence", "kl_coef": 0.04, "kl_estimator": "k3"},
    "dr_grpo": {**_CLIPPED, "advantage": "mean", "loss_mean": "sequence_sum"},
    "dapo": {
        **_CLIPPED,
        "rho": 1.28,
        "advantage": "normalized",
        "loss_mean": "token",
        "mask_truncated": True,
        "rollout.dynamic_sampling": True,
    },
    "gspo": {"name": "gspo", "rho_min": 0.9997, "rho": 1.0004, "advantage": "normalized", "loss_mean": "sequence"},
    "cispo": {"name": "aipo", "rho_min": 0.0, "rho": 5.0, "advantage": "normalized", "loss_mean": "token"},
    "icepop": {
        **_CLIPPED,
        "advantage": "normalized",
        "loss_mean": "sequence",
        "ratio": "decoupled",
        "behavior_floor": 0.5,
        "behavior_cap": 5.0,
        "behavior_above": "drop",
    },
    "tis": {
        **_CLIPPED,
        "advantage": "normalized",
        "loss_mean": "token",
        "ratio": "decoupled",
        "behavior_cap": 2.0,
        "behavior_above": "truncate",
    },
    "rloo": {"name": "rloo", "advantage": "leave_one_out", "loss_mean": "sequence_sum"},
    "reinforce_pp_baseline": {**_CLIPPED, "advantage": "batch_normalized", "loss_mean": "token"},
}
SAMPLED, TOP_K, VOCABULARY = "sampled", "top_k", "vocabulary"


@dataclass
class DistillConfig:
    """Of runs with teachers among their `roles` (docs/algorithms.md)."""

    coef: float = setting(1.0, "weight of the reverse KL divergence from the teachers, which adds up by their own weights", above(0))
    over: str = setting(
        SAMPLED,
        "the tokens that the divergence is taken over at each place. sampled: an estimate from the sampled token alone, as an advantage; "
        "top_k: the teacher's likeliest tokens and one bucket for all others, for teachers on engines; vocabulary: all tokens, for "
        "teachers on the trainer's ranks",
        one_of(SAMPLED, TOP_K, VOCABULARY),
    )
    top_k: int | None = setting(None, "with over=top_k, how many of the teacher's likeliest tokens are known; null: 20", between(1, 4096))

    @property
    def likeliest(self) -> int:
        """How many tokens a teacher on engines is asked for at each place; 0: none but the sampled one."""
        return (self.top_k or 20) if self.over == TOP_K else 0


@dataclass
class AlgorithmConfig:
    name: str = setting(
        "aipo",
        "the algorithm; see docs/algorithms.md",
        one_of(
            *NAMES,
            or_like=IMPORT_PATH,
            written="package.module:rule, ./file.py:rule",
            elsewhere={name: f"algorithm.recipe={name}" for name in PUBLISHED if name not in NAMES},
        ),
        MODULE,
    )
    recipe: str | None = setting(
        None,
        "settings that a paper prints: it sets this section, apart from skip_zero_advantage and distill, to what docs/algorithms.md lists. "
        "Settings beside it in the file, or on the command line, win; one on the command line replaces the section of the file",
        one_of(*PUBLISHED, elsewhere={name: f"algorithm.name={name}" for name in NAMES if name not in PUBLISHED}),
    )
    rho: float | None = setting(
        None,
        "upper bound of the importance ratio; null: the algorithm's own. aipo's is 4; 2 to 10 works (LlamaRL, section 6)",
        above(0),
    )
    rho_min: float | None = setting(None, "lower bound of the importance ratio; null: the algorithm's own. aipo has none", at_least(0))
    dual_clip: float | None = setting(
        None,
        "grpo, gspo and proximal_rloo: with a negative advantage, ratios above this have no gradient; null: none, and for grpo 3",
        at_least(1),
    )
    ratio: str = setting(
        "behavior",
        "whose ratio the bounds apply to. behavior: pi/mu, mu having sampled the token; proximal: pi/prox, prox being the weights that the "
        "batch's optimizer steps began with, so that old samples count as prox's; decoupled: pi/prox, and tokens are weighted by prox/mu "
        "besides (docs/algorithms.md)",
        one_of("behavior", "proximal", "decoupled"),
    )
    behavior_cap: float | None = setting(
        None, "with ratio=decoupled, tokens whose prox/mu is above this do not count; null: 5", at_least(1)
    )
    behavior_floor: float | None = setting(
        None, "with ratio=decoupled, tokens whose prox/mu is below this do not count; null: 0", at_least(0)
    )
    behavior_level: str | None = setting(
        None,
        "with ratio=decoupled, whether prox/mu is a token's own, or sequence: the product of its response's; null: token",
        one_of("token", "sequence"),
    )
    behavior_above: str | None = setting(
        None,
        "with ratio=decoupled, what happens above behavior_cap and below behavior_floor. drop: tokens do not count; truncate: that bound "
        "is their weight, as in truncated importance sampling; null: drop",
        one_of("drop", "truncate"),
    )
    advantage: str | None = setting(
        None,
        "mean: the reward minus the mean of the prompt's samples; normalized: that divided by their standard deviation; batch_normalized: "
        "divided by its own over the whole batch; leave_one_out: the reward minus the mean of the prompt's other samples; null: the "
        "algorithm's own",
        one_of("mean", "normalized", "batch_normalized", "leave_one_out"),
    )
    loss_mean: str | None = setting(
        None,
        "token: all tokens of a mini-batch count equally; sequence: all responses do; sequence_sum: the mean over responses of the sum "
        "over their tokens; null: the algorithm's own. aipo's is token",
        one_of("token", "sequence", "sequence_sum"),
    )
    gamma: float | None = setting(None, "ppo: what a later reward is discounted by, for each token; null: 1", between(0, 1))
    gae_lambda: float | None = setting(
        None,
        "ppo: the weight of longer returns in generalised advantage estimation. 0: of the next value alone; 1: of the rewards alone; null: "
        "0.95",
        between(0, 1),
    )
    whiten: bool | None = setting(
        None, "ppo: shift and scale the advantages of a batch to mean 0 and variance 1 over the policy's tokens; null: true"
    )
    kl_coef: float = setting(
        0.0, "weight of the KL divergence from the frozen initial policy; 0: none, and no reference model is kept", at_least(0)
    )
    kl: str = setting(
        "loss",
        "where the divergence is counted. loss: token by token in the loss; reward: it is taken off a response's reward, summed over its "
        "tokens, before advantages are formed; with ppo, off the reward of each token",
        one_of("loss", "reward"),
    )
    kl_estimator: str | None = setting(
        None,
        "how the divergence is estimated from d = log pi - log ref of a sampled token. k1: d, in the reward alone; k2: d^2/2; k3: "
        "exp(-d) - 1 + d; null: k2 in the loss, k1 in the reward (docs/algorithms.md)",
        one_of("k1", "k2", "k3"),
    )
    beta: float | None = setting(
        None,
        "online_dpo, ipo and copg: the weight of the KL divergence from the frozen initial policy in their losses; null: 0.1, and for copg "
        "0.05; 0, with copg alone: none, and no reference model is kept",
        at_least(0),
    )
    entropy_coefficient: float = setting(
        0.0, "weight of a bonus for the entropy of the policy's distribution at each of its tokens, over the whole vocabulary", at_least(0)
    )
    mask_truncated: bool = setting(
        False,
        "leave samples that were cut at their token limit out of the loss and of its means; their rewards still count in the "
        "advantages of the prompt's others (DAPO's overlong filtering)",
    )
    skip_zero_advantage: bool = setting(True, "do not train on groups whose rewards are all equal; the gradient is the same")
    distill: DistillConfig = field(default_factory=DistillConfig)


def published(recipe: str) -> dict[str, Any]:
    """Dotted keys of all that `recipe`, one of PUBLISHED, sets, with its values; the section's others are at their defaults."""
    whole = {each.name: each.default for each in fields(AlgorithmConfig) if each.name not in ("recipe", "skip_zero_advantage", "distill")}
    return {key if "." in key else f"algorithm.{key}": value for key, value in (whole | PUBLISHED[recipe]).items()}
