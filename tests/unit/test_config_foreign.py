"""Settings of other programs: what MegaRL calls them, or why it has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.errors import ConfigError
from megarl.config.foreign import _names
from megarl.config.keys import elsewhere_called, nearest, settings
from megarl.config.load import load_config

VERL = {  # the keys of verl's example of GRPO, and what they are here; empty: there is no such setting, and a note says why
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.use_kl_in_reward": "algorithm.kl",
    "data.train_files": "data.train.source",
    "data.val_files": "data.eval.source",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.max_prompt_length": "",
    "data.max_response_length": "rollout.max_tokens",
    "data.filter_overlong_prompts": "data.bad_rows",
    "data.truncation": "data.bad_rows",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.use_remove_padding": "",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.recompute",
    "actor_rollout_ref.actor.optim.lr": "trainer.optimizer.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.minibatches",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coefficient",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "trainer.max_tokens_per_microbatch",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "generator.tp",
    "actor_rollout_ref.rollout.name": "",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generator.mem_fraction",
    "actor_rollout_ref.rollout.n": "rollout.n",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "trainer.max_tokens_per_microbatch",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "",
    "trainer.critic_warmup": "",
    "trainer.logger": "observe.trackers",
    "trainer.project_name": "observe.project",
    "trainer.experiment_name": "observe.name",
    "trainer.n_gpus_per_node": "trainer.dp",
    "trainer.nnodes": "",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.every",
    "trainer.total_epochs": "max_steps",
    "trainer.val_before_train": "",
}
OTHERS = {
    "num_generations": "rollout.n",
    "max_completion_length": "rollout.max_tokens",
    "learning_rate": "trainer.optimizer.lr",
    "beta": "algorithm.kl_coef",
    "--lr": "trainer.optimizer.lr",
    "--rollout-batch-size": "rollout.prompts_per_step",
    "--n-samples-per-prompt": "rollout.n",
    "--eval-top-p": "eval.top_p",
    "--zero-stage": "trainer.zero",
    "--actor-learning-rate": "trainer.optimizer.lr",
    "+trainer.total_epochs": "max_steps",
}


@pytest.mark.parametrize(("name", "key"), (VERL | OTHERS).items())
def test_settings_of_other_programs_lead_to_ours(name: str, key: str) -> None:
    assert nearest(name)[:1] == ([key] if key else [])
    elsewhere = elsewhere_called(name)
    assert key or (elsewhere and elsewhere.note)


def test_the_table_names_settings_that_exist_and_none_of_ours() -> None:
    for name, known in _names().items():
        assert known.key in settings() if known.key else known.note, name
        assert name not in settings() or name in ("seed", "max_steps"), name


@pytest.mark.parametrize("name", ["foo.bar", "frobnicate", "trainer.quux", "num_workers_of_something"])
def test_nothing_is_proposed_for_what_is_like_no_setting(name: str) -> None:
    assert nearest(name) == []


def test_messages_say_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: none}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_config(path, ["trainer.total_epochs=3", "num_generations=8", "data.max_prompt_length=512"])
    epochs, generations, prompts = str(error.value).splitlines()
    assert "trainer.total_epochs=3: unknown key; did you mean max_steps (steps, not epochs" in epochs
    assert generations == "num_generations=8: unknown key; did you mean rollout.n?"
    assert "data.max_prompt_length=512: unknown key; prompts need no limit" in prompts
    with pytest.raises(SystemExit):
        main(["train", str(path), "--clip-ratio=0.2", "--lr=1e-6"])
    told = capsys.readouterr().err
    assert "algorithm.rho=… (the bound of the ratio itself: 1.2 for a clip of 0.2) trainer.optimizer.lr=1e-6" in told
