"""The critic of a run: which settings are allowed, and how planning counts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from resolving import MODEL, config, problems_of, with_weights

from megarl.config.schema import TrainerConfig
from megarl.estimate.estimate import estimate
from megarl.estimate.hardware import GPUS
from megarl.estimate.memory import scoring_passes, trainer_memory
from megarl.models import load_spec
from megarl.plan.resolve import resolve

pytestmark = pytest.mark.usefixtures("hub_offline")

PPO = "algorithm.name=ppo"


def critic(folder: Path, **changes: object) -> str:
    folder.mkdir()
    scores = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(
        json.dumps(json.loads((MODEL / "config.json").read_text()) | scores | changes)
    )
    return f"roles.critic.path={folder}"


def test_critic_begins_with_weights_of_the_policy_or_its_own(tmp_path: Path) -> None:
    assert resolve(config(tmp_path)).critic is None
    of_policy = resolve(config(tmp_path, PPO))
    assert of_policy.critic == of_policy.spec
    smaller = resolve(config(tmp_path, PPO, critic(tmp_path / "critic", num_hidden_layers=4)))
    assert smaller.critic is not None
    assert (smaller.critic.head, smaller.critic.num_layers) == (
        "scalar",
        4,
    )


def test_ppo_accepts_one_sample_a_prompt(tmp_path: Path) -> None:
    assert resolve(config(tmp_path, PPO, "rollout.n=1"))
    assert problems_of(tmp_path, PPO, "rollout.n=1", "rollout.dynamic_sampling=true") == [
        "rollout.dynamic_sampling=true: with rollout.n=1 all samples of a prompt have the same reward"
    ]


def test_unfit_settings_of_a_critic_are_refused_together(tmp_path: Path) -> None:
    path = critic(tmp_path / "critic", vocab_size=100, max_position_embeddings=64,
        num_hidden_layers=3, num_attention_heads=30,
                  num_key_value_heads=30, head_dim=128)  # fmt: skip
    assert problems_of(tmp_path, PPO, path, "trainer.pp=2", "trainer.tp=4") == [
        f"{path}: its vocabulary of 100 must have the policy's 128256 tokens",
        f"{path}: its context of 64 tokens must be at least the policy's, 131072",
        f"{path}: trainer.tp=4: must divide the model's 30 attention heads and 30 key-value heads",
        f"{path}: trainer.pp=2: must divide the model's 3 layers",
    ]
    (problem,) = problems_of(tmp_path, PPO, f"roles.critic.path={tmp_path}/critc", command="plan")
    assert (
        problem
        == f"roles.critic.path={tmp_path}/critc: no such folder; did you mean {tmp_path}/critic?"
    )


def test_other_algorithms_have_no_critic(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "critic.warmup_steps=3", "critic.optimizer.lr=1e-3") == [
        "critic.warmup_steps=3: aipo has no critic; set algorithm.advantage=critic",
        "critic.optimizer.lr=0.001: aipo has no critic; set algorithm.advantage=critic",
    ]
    assert problems_of(tmp_path, "algorithm.name=copg", "critic.warmup_steps=3") == [
        "critic.warmup_steps=3: copg has no critic; set algorithm.name=ppo",
    ]
    assert problems_of(tmp_path, PPO, "algorithm.advantage=mean") == [
        "algorithm.advantage=mean: must be null: ppo has its own"
    ]


def test_any_rule_may_have_a_critic(tmp_path: Path) -> None:
    beside_aipo = [
        "algorithm.advantage=critic",
        "algorithm.critic_targets=vtrace",
        "algorithm.gamma=0.99",
        "critic.warmup_steps=3",
        "rollout.n=1",
    ]
    plan = resolve(config(tmp_path, *beside_aipo))
    assert plan.critic == plan.spec
    of_recipe = config(tmp_path, "algorithm.recipe=cispo", "algorithm.advantage=critic")
    assert resolve(of_recipe).critic == plan.spec
    assert problems_of(tmp_path, "algorithm.advantage=critic", "rollout.name=program") == [
        "algorithm.advantage=critic: needs episodes of one sequence; those of rollout.name=program "
        "may have branches (docs/agents.md)"
    ]


def test_vtrace_takes_a_pass_for_its_ratios(tmp_path: Path) -> None:
    passes = []
    for targets in ("gae", "vtrace"):
        overrides = ["algorithm.advantage=critic", f"algorithm.critic_targets={targets}"]
        passes.append(scoring_passes(config(tmp_path, *overrides)))
    assert passes == [0, 1]


def test_critic_checkpoint_is_needed_for_training_alone(
    tmp_path: Path,
) -> None:
    """A warm start and a reward model may come before it."""
    later = [
        with_weights(tmp_path / "model"),
        PPO,
        "roles.critic.path=${reward_model.output}",
        "sft.steps=1",
    ]
    assert all(resolve(config(tmp_path, *later), command) for command in ("sft", "plan", "dry-run"))
    (problem,) = problems_of(tmp_path, *later, command="train")
    assert (
        problem == f"roles.critic.path={tmp_path}/run/reward_model/hf: no such folder; megarl "
        "reward-model writes it"
    )


def test_trainer_memory_counts_the_critic() -> None:
    """Weights, gradients and optimizer are as large as the policy's, except for the output layer.

    A step takes about twice the time, plus one scoring pass.
    """
    spec = load_spec(MODEL)
    trainer = TrainerConfig(tp=8, dp=2)
    with_critic = trainer_memory(
        spec, trainer, "bfloat16", GPUS["H100"], critic=spec.with_scalar_head()
    )
    alone = trainer_memory(spec, trainer, "bfloat16", GPUS["H100"])
    assert with_critic.total - alone.total == with_critic.critic
    assert alone.critic == 0
    head = 128256 * 4096 / 8
    assert with_critic.critic == pytest.approx(
        (2 + 4 + 12 / 2) * (with_critic.weights / 2 - head), rel=1e-3
    )


def test_a_plan_with_a_critic_takes_longer_and_more_memory(tmp_path: Path) -> None:
    sizes = ["trainer.tp=8", "trainer.dp=2", "algorithm.loss_mean=token"]
    spec = load_spec(MODEL)
    without = estimate(config(tmp_path, *sizes), spec)
    beside = estimate(config(tmp_path, *sizes, PPO), spec)
    assert beside.trainer.critic > 0 == without.trainer.critic
    assert beside.saving > 1.8 * without.saving
    assert 1.9 < beside.train.compute / without.train.compute < 2.4
    assert beside.generate == without.generate
    small = estimate(
        config(tmp_path, *sizes, PPO, critic(tmp_path / "critic", num_hidden_layers=4)), spec
    )
    assert small.trainer.critic < beside.trainer.critic / 4, "4 of 32 layers, and the embedding"
    assert small.train.compute < 1.3 * without.train.compute
