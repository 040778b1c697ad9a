"""The algorithms and their published settings, by the names that people know them by.

`ALGORITHMS` has what `algorithm.name` may be: one entry says all that defines the algorithm.
`PUBLISHED` has what `algorithm.recipe` may be: the settings that a paper prints. Their sources are
in docs/algorithms.md. Both are data, without torch, so that a configuration is checked at once;
megarl/algorithms has the mathematics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

NO_DUAL_CLIP = 1e9
CRITIC = "critic"  # the value of algorithm.advantage with which a critic is trained
VTRACE = "vtrace"
OUTCOME = "outcome"
RETURNS = "returns"
PROCESS = "process"


@dataclass(frozen=True)
class Recipe:
    """What defines an algorithm. All share one loss (`losses.PolicyGradient`).

    `rule`: the function of megarl.algorithms.losses that weighs a token by its importance ratio.
    `rho_min`, `rho`: bounds of that ratio. None: the algorithm has no such bound, so it cannot be
    set. `dual_clip`: where ratios of negative advantages are cut off. None: as above; infinite:
    nowhere unless set.

    `group_loss`: the function of megarl.algorithms.advantages for a loss of several responses, and
    `beta`: its weight of the KL divergence.

    `ratios`: the values of algorithm.ratio that make sense with it. `fixed`: the settings that
    define the algorithm, and so cannot be changed.
    """

    rule: str
    rho_min: float | None = None
    rho: float | None = None
    dual_clip: float | None = None
    advantage: str = "mean"
    loss_mean: str = "token"
    ratios: tuple[str, ...] = ("behavior", "proximal", "decoupled")
    group_loss: str | None = None
    beta: float | None = None
    fixed: tuple[str, ...] = ()


# for a rule that a configuration names by its import path
CUSTOM_RULE = Recipe(rule="clamped", rho_min=0.0, rho=4.0)
_RESPONSES = Recipe(
    rule="uncorrected",
    loss_mean="sequence_sum",
    ratios=("behavior",),
    fixed=("advantage", "loss_mean"),
)

# Bounds are from the papers; beta is from arXiv:2410.18252, appendix A, also for copg.
ALGORITHMS = {
    "aipo": Recipe(rule="clamped", rho_min=0.0, rho=4.0),
    "grpo": Recipe(
        rule="clipped",
        rho_min=0.8,
        rho=1.2,
        dual_clip=3.0,
        advantage="normalized",
        loss_mean="sequence",
    ),
    "gspo": Recipe(
        rule="sequence_clipped",
        rho_min=1 - 3e-4,
        rho=1 + 4e-4,
        dual_clip=math.inf,
        advantage="normalized",
        loss_mean="sequence",
    ),
    "icepop": Recipe(
        rule="masked",
        rho_min=0.5,
        rho=5.0,
        advantage="normalized",
        # it bounds the difference between trainer and generator, which pi/prox ignores
        ratios=("behavior",),
    ),
    "topr": Recipe(
        rule="tapered",
        rho=1.0,
        # It leaves good responses uncorrected, and corrects others as a whole: a factor per token
        # contradicts both.
        ratios=("behavior", "proximal"),
    ),
    "reinforce": Recipe(rule="uncorrected", ratios=("behavior",)),  # the rule reads no ratio
    "rloo": Recipe(
        rule="uncorrected",
        advantage="leave_one_out",
        loss_mean="sequence_sum",
        ratios=("behavior",),
    ),
    "proximal_rloo": Recipe(
        rule="response_clipped",
        rho_min=0.8,
        rho=1.2,
        dual_clip=math.inf,
        advantage="leave_one_out",
        loss_mean="sequence_sum",
        # it uses the ratio of the whole response, which a factor per token contradicts
        ratios=("behavior", "proximal"),
    ),
    "best_of_n": replace(_RESPONSES, advantage="best"),
    "online_dpo": replace(_RESPONSES, advantage="best_and_worst", group_loss="dpo", beta=0.1),
    "ipo": replace(_RESPONSES, advantage="best_and_worst", group_loss="ipo", beta=0.1),
    "copg": replace(_RESPONSES, advantage="leave_one_out", group_loss="copg", beta=0.05),
    "ppo": Recipe(
        rule="clipped",
        rho_min=0.8,
        rho=1.2,
        dual_clip=math.inf,
        advantage=CRITIC,
        fixed=("advantage",),
    ),
    # aipo without a reward
    "distill": Recipe(rule="clamped", rho_min=0.0, rho=4.0, advantage="none", fixed=("advantage",)),
}

_CLIPPED = {"name": "grpo", "rho_min": 0.8, "rho": 1.2, "dual_clip": NO_DUAL_CLIP}
# settings of the section `algorithm`, or with a dot of others
PUBLISHED: dict[str, dict[str, Any]] = {
    "aipo": {"name": "aipo", "rho": 4.0, "advantage": "mean", "loss_mean": "token"},
    "grpo": {
        **_CLIPPED,
        "advantage": "normalized",
        "loss_mean": "sequence",
        "kl_coef": 0.04,
        "kl_estimator": "k3",
    },
    "dr_grpo": {**_CLIPPED, "advantage": "mean", "loss_mean": "sequence_sum"},
    "dapo": {
        **_CLIPPED,
        "rho": 1.28,
        "advantage": "normalized",
        "loss_mean": "token",
        "mask_truncated": True,
        "rollout.dynamic_sampling": True,
    },
    "gspo": {
        "name": "gspo",
        "rho_min": 0.9997,
        "rho": 1.0004,
        "advantage": "normalized",
        "loss_mean": "sequence",
    },
    "cispo": {
        "name": "aipo",
        "rho_min": 0.0,
        "rho": 5.0,
        "advantage": "normalized",
        "loss_mean": "token",
    },
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
