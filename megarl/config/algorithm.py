"""The schema's section on the training objective."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config.limits import IMPORT_PATH, MODULE, above, at_least, between, one_of, setting

NAMES = (
    *("aipo", "grpo", "gspo", "icepop", "topr", "reinforce", "rloo", "proximal_rloo", "best_of_n", "online_dpo", "ipo", "copg", "ppo"),
    "distill",
)
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
        one_of(*NAMES, or_like=IMPORT_PATH, written="package.module:rule, ./file.py:rule"),
        MODULE,
    )
    rho: float | None = setting(
        None,
        "upper bound of the importance ratio; null: the algorithm's own. aipo's is 4; 2 to 10 works (LlamaRL, section 6)",
        above(0),
    )
    rho_min: float | None = setting(None, "lower bound of the importance ratio; null: the algorithm's own. aipo has none", at_least(0))
    dual_clip: float | None = setting(
        None,
        "grpo, gspo and proximal_rloo: with a negative advantage, ratios above this have no gradient; null: 3, and for proximal_rloo none",
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
    behavior_level: str | None = setting(
        None,
        "with ratio=decoupled, whether prox/mu is a token's own, or sequence: the product of its response's; null: token",
        one_of("token", "sequence"),
    )
    behavior_above: str | None = setting(
        None,
        "with ratio=decoupled, what happens above behavior_cap. drop: tokens do not count; truncate: behavior_cap is their weight, as in "
        "truncated importance sampling; null: drop",
        one_of("drop", "truncate"),
    )
    advantage: str | None = setting(
        None,
        "mean: the reward minus the mean of the prompt's samples; normalized: that divided by their standard deviation; leave_one_out: the "
        "reward minus the mean of the prompt's other samples; null: the algorithm's own",
        one_of("mean", "normalized", "leave_one_out"),
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
    skip_zero_advantage: bool = setting(True, "do not train on groups whose rewards are all equal; the gradient is the same")
    distill: DistillConfig = field(default_factory=DistillConfig)
