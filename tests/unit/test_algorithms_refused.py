"""Settings of algorithms that have no effect, or contradict each other, are refused with key,
value, and the allowed values.
"""

from __future__ import annotations

import pytest

from megarl.algorithms.recipes import problems
from megarl.config.schema import AlgorithmConfig

REFUSED = [
    (
        AlgorithmConfig(name="reinforce", rho=2.0),
        "algorithm.rho=2.0: must be null: reinforce has no such setting",
    ),
    (
        AlgorithmConfig(name="topr", rho_min=0.5),
        "algorithm.rho_min=0.5: must be null: topr has no such setting",
    ),
    (AlgorithmConfig(rho_min=4.0), "algorithm.rho_min=4.0: must be below algorithm.rho=4.0"),
    (
        AlgorithmConfig(name="grpo", rho=0.5),
        "algorithm.rho_min=0.8: must be below algorithm.rho=0.5",
    ),
    (
        AlgorithmConfig(name="reinforce", ratio="proximal"),
        "algorithm.ratio=proximal: reinforce goes with behavior only (docs/algorithms.md)",
    ),
    (
        AlgorithmConfig(name="icepop", ratio="decoupled"),
        "algorithm.ratio=decoupled: icepop goes with behavior only (docs/algorithms.md)",
    ),
    (
        AlgorithmConfig(name="topr", ratio="decoupled"),
        "algorithm.ratio=decoupled: topr goes with behavior and proximal only (docs/algorithms.md)",
    ),
    (
        AlgorithmConfig(behavior_level="sequence"),
        "algorithm.behavior_level=sequence: must be null: only algorithm.ratio=decoupled has it",
    ),
    (
        AlgorithmConfig(behavior_above="drop"),
        "algorithm.behavior_above=drop: must be null: only algorithm.ratio=decoupled has it",
    ),
    (
        AlgorithmConfig(behavior_cap=5.0),
        "algorithm.behavior_cap=5.0: must be null: only algorithm.ratio=decoupled has it",
    ),
    (
        AlgorithmConfig(ratio="proximal", behavior_cap=2.0),
        "algorithm.behavior_cap=2.0: must be null: only algorithm.ratio=decoupled has it",
    ),
    (
        AlgorithmConfig(behavior_floor=0.5),
        "algorithm.behavior_floor=0.5: must be null: only algorithm.ratio=decoupled has it",
    ),
    (
        AlgorithmConfig(ratio="decoupled", behavior_floor=6.0),
        "algorithm.behavior_floor=6.0: must be below algorithm.behavior_cap=5.0",
    ),
    (
        AlgorithmConfig(name="online_dpo", entropy_coefficient=0.1),
        "algorithm.entropy_coefficient=0.1: must be 0: online_dpo is a loss of whole responses",
    ),
    (
        AlgorithmConfig(name="best_of_n", mask_truncated=True),
        "algorithm.mask_truncated=true: must be false: best_of_n compares the responses to a "
        "prompt, all of them",
    ),
    (
        AlgorithmConfig(kl="reward", kl_coef=0.1, mask_truncated=True),
        "algorithm.mask_truncated=true: must be false with algorithm.kl=reward, which takes a "
        "penalty off every sample's reward",
    ),
    (
        AlgorithmConfig(recipe="dapo", dual_clip=1e9, rho_min=0.8, rho=1.28),
        "algorithm.name=aipo: must be left out with algorithm.recipe=dapo, which sets "
        "algorithm.dual_clip=1000000000.0: aipo has no such "
        "setting",
    ),
    (
        AlgorithmConfig(dual_clip=3.0),
        "algorithm.dual_clip=3.0: must be null: aipo has no such setting",
    ),
    (
        AlgorithmConfig(name="grpo", dual_clip=1.1),
        "algorithm.dual_clip=1.1: must be at least algorithm.rho=1.2",
    ),
    (
        AlgorithmConfig(name="rloo", rho=2.0),
        "algorithm.rho=2.0: must be null: rloo has no such setting",
    ),
    (
        AlgorithmConfig(name="best_of_n", advantage="mean"),
        "algorithm.advantage=mean: must be null: best_of_n has its own",
    ),
    (
        AlgorithmConfig(name="best_of_n", loss_mean="token"),
        "algorithm.loss_mean=token: must be null: best_of_n has its own",
    ),
    (
        AlgorithmConfig(name="rloo", ratio="proximal"),
        "algorithm.ratio=proximal: rloo goes with behavior only (docs/algorithms.md)",
    ),
    (
        AlgorithmConfig(name="proximal_rloo", ratio="decoupled"),
        "algorithm.ratio=decoupled: proximal_rloo goes with behavior and proximal only "
        "(docs/algorithms.md)",
    ),
    (AlgorithmConfig(beta=0.1), "algorithm.beta=0.1: must be null: aipo has no such setting"),
    (AlgorithmConfig(name="ipo", beta=0.0), "algorithm.beta=0.0: must be above 0 with ipo"),
    (
        AlgorithmConfig(name="online_dpo", beta=0.0),
        "algorithm.beta=0.0: must be above 0 with online_dpo",
    ),
    (
        AlgorithmConfig(name="copg", kl_coef=0.1),
        "algorithm.kl_coef=0.1: must be 0: algorithm.beta is copg's weight of the KL divergence",
    ),
    (
        AlgorithmConfig(name="online_dpo", advantage="mean"),
        "algorithm.advantage=mean: must be null: online_dpo has its own",
    ),
    (
        AlgorithmConfig(name="ipo", loss_mean="sequence"),
        "algorithm.loss_mean=sequence: must be null: ipo has its own",
    ),
    (
        AlgorithmConfig(name="online_dpo", ratio="proximal"),
        "algorithm.ratio=proximal: online_dpo goes with behavior only (docs/algorithms.md)",
    ),
    (
        AlgorithmConfig(gae_lambda=0.9),
        "algorithm.gae_lambda=0.9: must be null: only algorithm.advantage=critic has it",
    ),
    (
        AlgorithmConfig(name="online_dpo", whiten=False),
        "algorithm.whiten=false: must be null: only algorithm.advantage=critic has it",
    ),
    (
        AlgorithmConfig(name="online_dpo", advantage="critic"),
        "algorithm.advantage=critic: must be null: online_dpo has its own",
    ),
    (
        AlgorithmConfig(name="distill", advantage="critic"),
        "algorithm.advantage=critic: must be null: distill has its own",
    ),
    (
        AlgorithmConfig(advantage="critic", rho_bar=2.0),
        "algorithm.rho_bar=2.0: must be null: only algorithm.critic_targets=vtrace has it",
    ),
    (
        AlgorithmConfig(advantage="critic", critic_targets="vtrace", c_bar=1.5),
        "algorithm.c_bar=1.5: must be at most algorithm.rho_bar=1",
    ),
    (
        AlgorithmConfig(turn_gamma=0.9),
        "algorithm.turn_gamma=0.9: must be null: only algorithm.credit=returns has it, without a "
        "critic",
    ),
    (
        AlgorithmConfig(name="ppo", credit="returns", turn_gamma=0.9),
        "algorithm.turn_gamma=0.9: must be null: only algorithm.credit=returns has it, without a "
        "critic",
    ),
    (
        AlgorithmConfig(name="ipo", credit="returns"),
        "algorithm.credit=returns: must be outcome with ipo, which has no advantages of turns",
    ),
    (
        AlgorithmConfig(advantage="critic", credit="process"),
        "algorithm.credit=process: must be outcome or returns with algorithm.advantage=critic: a "
        "critic's advantages are not compared",
    ),
    (
        AlgorithmConfig(credit="process", kl="reward", kl_coef=0.1),
        "algorithm.credit=process: must be outcome with algorithm.kl=reward, which takes a penalty "
        "off the whole response",
    ),
    (
        AlgorithmConfig(kl="reward"),
        "algorithm.kl=reward: needs algorithm.kl_coef above 0; it is 0.0",
    ),
    (
        AlgorithmConfig(kl_estimator="k3"),
        "algorithm.kl_estimator=k3: needs algorithm.kl_coef above 0; it is 0.0",
    ),
    (
        AlgorithmConfig(kl_coef=0.1, kl_estimator="k1"),
        "algorithm.kl_estimator=k1: must be k2 or k3 with algorithm.kl=loss: the gradient of k1 "
        "is zero in the mean",
    ),
]


@pytest.mark.parametrize(("config", "problem"), REFUSED)
def test_settings_without_effect_are_refused(config: AlgorithmConfig, problem: str):
    assert list(problems(config)) == [problem]
