"""A whole run of a policy and its critic: first a reward model is trained; then PPO is killed and
resumed.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from run_tools import (
    OVERRIDES,
    PROMPTS,
    make_model,
    rows,
    run,
    started,
    succeed,
    trained_ordinals,
    wait_until,
)

from megarl.plan.checkpoints import complete_checkpoints

pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
def test_a_killed_run_goes_on_with_its_critic(tmp_path: Path) -> None:
    """The critic begins with the reward model of the same configuration.

    For two steps only the critic learns.
    """
    model = make_model(tmp_path / "model")
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    settings = [
        "configs/examples/ppo.yaml", f"model.path={model}", "model.random_init=false",
        f"run_dir={run_dir}", *OVERRIDES,
        "roles.critic.path=${reward_model.output}", "critic.warmup_steps=2", "rollout.n=2",
        "max_steps=8",
        "algorithm.kl=reward", "algorithm.kl_coef=0.05", "reward_model.steps=2",
        "reward_model.batch_size=4",
        "reward_model.data.source=synthetic:chain",
    ]  # fmt: skip
    succeed(["reward-model", *settings])
    with started(["train", *settings], log) as process:
        wait_until(
            lambda: any(step >= 4 for step, _ in complete_checkpoints(run_dir)),
            process,
            "fourth step's checkpoint",
        )
    _, checkpoint = complete_checkpoints(run_dir)[-1]
    assert (checkpoint / "critic/index.msgpack").exists()
    again = succeed(["train", *settings])
    assert (
        f"Critic: roles.critic.path={run_dir}/reward_model/hf, a reward model, 2 steps before the "
        "policy\n" in log.read_text()
    )
    assert f"Weights: the checkpoint {checkpoint}" in again.stdout
    table = rows(run_dir)
    assert [row["step"] for row in table] == list(range(8))
    for row in table:
        assert {
            "value/loss",
            "value/explained_variance",
            "value/clipped_fraction",
            "returns",
        } <= row.keys()
        assert (row["optimizer_steps"], "loss" not in row) == (
            (0, True) if row["step"] < 2 else (4, False)
        )
        assert "zero_advantage_fraction" not in row and row["sync/audit_ok"]
        assert (
            ("agreement/histogram" in row) == ("agreement/age_1/ess" in row) == (row["step"] >= 2)
        ), "the policy's first optimizer step"
    assert sorted(itertools.chain(*trained_ordinals(run_dir))) == list(range(8 * PROMPTS))
    succeed(["export", *settings, "--output", str(tmp_path / "policy")])
    assert json.loads((tmp_path / "policy/config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    damaged = complete_checkpoints(run_dir)[-1][1] / "critic/state.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    refused = run(["train", *settings, "max_steps=9"])
    assert (
        refused.returncode == 2
        and f"{damaged.parents[1]}: in critic/: state.json is damaged" in refused.stderr
        and "Move this folder away" in refused.stderr
    )
