"""Settings of other programs: what MegaRL calls them, or why it has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.errors import ConfigError
from megarl.config.foreign import _names
from megarl.config.keys import foreign_setting_of, nearest, settings
from megarl.config.load import load_config

OWN_RUN = Path(__file__).parents[2] / "docs/own_run.md"
# The settings of usual scripts: what they are here, and their names there. `-`: there is no such
# setting, and a note says why.
SCRIPTS = {
    # examples/grpo_trainer/run_qwen3-1.7b.sh and run_qwen3-235b_megatron_96gb.sh,
    # recipe/dapo/run_dapo_qwen2.5_32b.sh
    "verl": """
algorithm.name: algorithm.adv_estimator
algorithm.kl: algorithm.use_kl_in_reward
algorithm.kl_coef: algorithm.kl_ctrl.kl_coef actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef
algorithm.kl_estimator: actor_rollout_ref.actor.kl_loss_type
algorithm.entropy_coefficient: actor_rollout_ref.actor.entropy_coeff
algorithm.rho: actor_rollout_ref.actor.clip_ratio_high
algorithm.rho_min: actor_rollout_ref.actor.clip_ratio_low
algorithm.dual_clip: actor_rollout_ref.actor.clip_ratio_c
algorithm.loss_mean: actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.use_token_level_loss
data.train.source: data.train_files
data.eval.source: data.val_files
data.train.prompt_key: data.prompt_key
data.bad_rows: data.filter_overlong_prompts data.truncation
rollout.prompts_per_step: data.train_batch_size
async.max_in_flight: data.gen_batch_size
rollout.max_tokens: data.max_response_length
rollout.dynamic_sampling: algorithm.filter_groups.enable algorithm.filter_groups.metric
rollout.max_num_gen_batches: algorithm.filter_groups.max_num_gen_batches
rollout.n: actor_rollout_ref.rollout.n
rollout.temperature: actor_rollout_ref.rollout.temperature
rollout.top_p: actor_rollout_ref.rollout.top_p
rollout.top_k: actor_rollout_ref.rollout.top_k
model.path: actor_rollout_ref.model.path
trainer.recompute: actor_rollout_ref.model.enable_gradient_checkpointing
trainer.optimizer.lr: actor_rollout_ref.actor.optim.lr
trainer.optimizer.warmup_steps: actor_rollout_ref.actor.optim.lr_warmup_steps
trainer.optimizer.weight_decay: actor_rollout_ref.actor.optim.weight_decay
trainer.optimizer.clip_grad: actor_rollout_ref.actor.optim.clip_grad actor_rollout_ref.actor.grad_clip
trainer.minibatches: actor_rollout_ref.actor.ppo_mini_batch_size
trainer.max_tokens_per_microbatch: actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
trainer.tp: actor_rollout_ref.actor.megatron.tensor_model_parallel_size
trainer.pp: actor_rollout_ref.actor.megatron.pipeline_model_parallel_size
trainer.cp: actor_rollout_ref.actor.megatron.context_parallel_size actor_rollout_ref.actor.ulysses_sequence_parallel_size
trainer.ep: actor_rollout_ref.actor.megatron.expert_model_parallel_size
trainer.etp: actor_rollout_ref.actor.megatron.expert_tensor_parallel_size
trainer.dp: trainer.n_gpus_per_node actor_rollout_ref.actor.fsdp_config.fsdp_size
trainer.megatron: +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion
trainer.optimizer.megatron: +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload
generator.tp: actor_rollout_ref.rollout.tensor_model_parallel_size
generator.mem_fraction: actor_rollout_ref.rollout.gpu_memory_utilization
timeouts.collective_s: actor_rollout_ref.nccl_timeout
eval.temperature: actor_rollout_ref.rollout.val_kwargs.temperature actor_rollout_ref.rollout.val_kwargs.do_sample
eval.top_p: actor_rollout_ref.rollout.val_kwargs.top_p
eval.top_k: actor_rollout_ref.rollout.val_kwargs.top_k
eval.samples: actor_rollout_ref.rollout.val_kwargs.n
eval.every: trainer.test_freq
reward.name: reward_model.reward_manager custom_reward_function.path
reward.overlong_tokens: +reward_model.reward_kwargs.overlong_buffer_cfg.len custom_reward_function.overlong_buffer.enable
reward.overlong_penalty: +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor
checkpoint.every: trainer.save_freq
run_dir: trainer.default_local_dir trainer.resume_mode
max_steps: trainer.total_epochs
observe.trackers: trainer.logger
observe.project: trainer.project_name
observe.name: trainer.experiment_name
observe.rollouts_per_step: trainer.log_val_generations
trainer.optimizer.offload: actor_rollout_ref.actor.fsdp_config.optimizer_offload
data.max_prompt_tokens: data.max_prompt_length
data.train.sources.NAME.reward.name: data.reward_fn_key data_source
-: data.val_batch_size trainer.nnodes trainer.val_before_train trainer.critic_warmup
    actor_rollout_ref.model.use_remove_padding actor_rollout_ref.model.use_liger actor_rollout_ref.model.use_fused_kernels
    actor_rollout_ref.model.fused_kernel_options.impl_backend +actor_rollout_ref.model.override_config.attention_dropout
    actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.ref.log_prob_use_dynamic_bsz actor_rollout_ref.rollout.name
    actor_rollout_ref.actor.fsdp_config.param_offload
    actor_rollout_ref.actor.megatron.grad_offload actor_rollout_ref.rollout.enforce_eager
    actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.rollout.enable_chunked_prefill
    actor_rollout_ref.rollout.max_num_batched_tokens actor_rollout_ref.rollout.max_model_len
    +reward_model.reward_kwargs.max_resp_len
""",
    # scripts/run-qwen3-4B.sh, and the options of its guide for dynamic sampling and partial
    # rollouts
    "slime": """
model.path: --hf-checkpoint
run_dir: --load --save
checkpoint.every: --save-interval
data.train.source: --prompt-data
data.eval.source: --eval-prompt-data
data.train.prompt_key: --input-key
data.train.answer_key: --label-key
data.train.prompt_template: --apply-chat-template
data.shuffle: --rollout-shuffle
reward.name: --rm-type --custom-rm-path
max_steps: --num-rollout
rollout.prompts_per_step: --rollout-batch-size
rollout.n: --n-samples-per-prompt
rollout.max_tokens: --rollout-max-response-len
rollout.temperature: --rollout-temperature
rollout.dynamic_sampling: --dynamic-sampling-filter-path
async.max_in_flight: --over-sampling-batch-size
async.partial_rollout: --partial-rollout
eval.every: --eval-interval
eval.samples: --n-samples-per-eval-prompt
eval.max_tokens: --eval-max-response-len
eval.top_p: --eval-top-p
trainer.minibatches: --global-batch-size --num-steps-per-rollout
trainer.tp: --tensor-model-parallel-size
trainer.pp: --pipeline-model-parallel-size
trainer.cp: --context-parallel-size
trainer.ep: --expert-model-parallel-size
trainer.etp: --expert-tensor-parallel-size
trainer.sequence_parallel: --sequence-parallel
trainer.recompute: --recompute-granularity
trainer.megatron: --recompute-method --recompute-num-layers --attention-softmax-in-fp32 --attention-backend
trainer.ddp: --accumulate-allreduce-grads-in-fp32
trainer.max_tokens_per_microbatch: --max-tokens-per-gpu --micro-batch-size
trainer.dp: --actor-num-nodes --actor-num-gpus-per-node
trainer.optimizer.lr: --lr
trainer.optimizer.schedule: --lr-decay-style
trainer.optimizer.weight_decay: --weight-decay
trainer.optimizer.betas: --adam-beta1 --adam-beta2
algorithm.name: --advantage-estimator
algorithm.kl_coef: --use-kl-loss --kl-loss-coef
algorithm.kl_estimator: --kl-loss-type
algorithm.entropy_coefficient: --entropy-coef
algorithm.rho: --eps-clip --eps-clip-high
algorithm.ratio: --use-tis
generator.tp: --rollout-num-gpus-per-engine
generator.engines: --rollout-num-gpus
generator.mem_fraction: --sglang-mem-fraction-static
observe.trackers: --use-wandb
observe.project: --wandb-project
observe.name: --wandb-group
cluster.share_gpus: --colocate
-: --ref-load --balance-data --use-dynamic-batch-size --optimizer --wandb-key --attention-dropout --hidden-dropout
""",
    # GRPOConfig with the fields of TrainingArguments in its examples
    "TRL": """
model.path: model_name_or_path
model.dtype: bf16
model.chat_template.arguments: chat_template_kwargs
data.train.source: dataset_name
data.shuffle: shuffle_dataset
rollout.n: num_generations
rollout.max_tokens: max_completion_length
rollout.prompts_per_step: per_device_train_batch_size generation_batch_size
rollout.temperature: temperature
rollout.top_p: top_p
rollout.top_k: top_k
rollout.min_p: min_p
eval.samples: num_generations_eval
trainer.minibatches: steps_per_generation
trainer.max_tokens_per_microbatch: gradient_accumulation_steps
trainer.epochs: num_iterations
trainer.optimizer.lr: learning_rate
trainer.optimizer.warmup_steps: warmup_ratio warmup_steps
trainer.optimizer.schedule: lr_scheduler_type
trainer.optimizer.clip_grad: max_grad_norm
trainer.optimizer.weight_decay: weight_decay
trainer.recompute: gradient_checkpointing
generator.tp: vllm_tensor_parallel_size
generator.mem_fraction: vllm_gpu_memory_utilization
algorithm.kl_coef: beta
algorithm.rho: epsilon epsilon_high
algorithm.dual_clip: delta
algorithm.recipe: loss_type importance_sampling_level
algorithm.advantage: scale_rewards
algorithm.ratio: vllm_importance_sampling_correction
algorithm.entropy_coefficient: entropy_coef
algorithm.mask_truncated: mask_truncated_completions
reward.name: reward_funcs
reward.parts.NAME.weight: reward_weights
run_dir: output_dir resume_from_checkpoint
checkpoint.every: save_steps
checkpoint.keep: save_total_limit
eval.every: eval_steps
max_steps: num_train_epochs
observe.trackers: report_to
observe.name: run_name
observe.rollouts_per_step: log_completions num_completions_to_print
lora.rank: lora_r
lora.alpha: lora_alpha
lora.targets: lora_target_modules
cluster.share_gpus: vllm_mode
data.max_prompt_tokens: max_prompt_length
-: model_init_kwargs disable_dropout repetition_penalty generation_kwargs use_vllm  vllm_max_model_length
    vllm_enable_sleep_mode vllm_server_host logging_steps per_device_eval_batch_size use_liger_kernel
""",
    # configs/basic/reverse-text/rl.toml and configs/advanced/models/qwen3-30b-a3b/rl/4-nodes.toml
    "prime-rl": """
model.path: model.name
model.chat_template.name: orchestrator.renderer.name
rollout.prompts_per_step: orchestrator.batch_size
rollout.n: orchestrator.group_size orchestrator.rollouts_per_example
rollout.max_tokens: orchestrator.train.sampling.max_completion_tokens
rollout.temperature: orchestrator.train.sampling.temperature
rollout.name: orchestrator.train.env.name
data.train.sources.NAME.rollout.name: orchestrator.train.env orchestrator.env
async.max_staleness: orchestrator.max_off_policy_steps
async.max_in_flight: orchestrator.concurrency.initial_inflight
trainer.max_tokens_per_microbatch: seq_len
trainer.dp: deployment.num_train_gpus deployment.num_train_nodes
trainer.ep: trainer.model.ep
trainer.cp: trainer.model.cp
trainer.recompute: trainer.model.ac.freq
trainer.optimizer.lr: trainer.optim.lr
generator.engines: deployment.num_infer_gpus
generator.tp: inference.vllm.tensor_parallel_size
weights.transport: weight_broadcast.type
checkpoint.every: ckpt.interval
observe.project: wandb.project
observe.name: wandb.name
-: deployment.num_infer_nodes trainer.model.impl trainer.model.attn trainer.optim.type log.level
""",
    # examples/configs/grpo_math_1B.yaml
    "NeMo-RL": """
rollout.prompts_per_step: grpo.num_prompts_per_step
rollout.n: grpo.num_generations_per_prompt
rollout.name: grpo.max_rollout_turns
max_steps: grpo.max_num_epochs grpo.max_num_steps
algorithm.advantage: grpo.normalize_rewards grpo.use_leave_one_out_baseline
algorithm.mask_truncated: grpo.overlong_filtering
eval.every: grpo.val_period
eval.limit: grpo.max_val_samples
seed: grpo.seed
async.capacity: grpo.async_grpo.enabled
async.max_staleness: grpo.async_grpo.max_trajectory_age_steps
algorithm.kl_coef: loss_fn.reference_policy_kl_penalty
algorithm.rho: loss_fn.ratio_clip_max
algorithm.rho_min: loss_fn.ratio_clip_min
algorithm.dual_clip: loss_fn.ratio_clip_c
algorithm.ratio: loss_fn.use_importance_sampling_correction
algorithm.recipe: loss_fn.sequence_level_importance_ratios
algorithm.loss_mean: loss_fn.token_level_loss
run_dir: checkpointing.checkpoint_dir logger.log_dir
checkpoint.keep_best: checkpointing.metric_name
checkpoint.keep: checkpointing.keep_top_k
checkpoint.every: checkpointing.save_period checkpointing.enabled
checkpoint.hf_every: checkpointing.model_save_format
model.path: policy.model_name
model.tokenizer: policy.tokenizer.name
model.dtype: policy.precision
trainer.minibatches: policy.train_global_batch_size
trainer.max_tokens_per_microbatch: policy.train_micro_batch_size policy.logprob_batch_size policy.max_total_sequence_length
trainer.tp: policy.dtensor_cfg.tensor_parallel_size policy.megatron_cfg.tensor_model_parallel_size
trainer.cp: policy.dtensor_cfg.context_parallel_size
trainer.sequence_parallel: policy.megatron_cfg.sequence_parallel
trainer.recompute: policy.megatron_cfg.activation_checkpointing
trainer.megatron: policy.megatron_cfg.moe_router_dtype policy.megatron_cfg.apply_rope_fusion
trainer.ddp: policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce
trainer.zero: policy.megatron_cfg.optimizer.use_distributed_optimizer
trainer.optimizer.lr: policy.megatron_cfg.optimizer.lr policy.optimizer.kwargs.lr
trainer.optimizer.min_lr_ratio: policy.megatron_cfg.optimizer.min_lr
trainer.optimizer.betas: policy.megatron_cfg.optimizer.adam_beta1 policy.optimizer.kwargs.betas
trainer.optimizer.eps: policy.megatron_cfg.optimizer.adam_eps
trainer.optimizer.warmup_steps: policy.megatron_cfg.scheduler.lr_warmup_iters
trainer.optimizer.clip_grad: policy.max_grad_norm
rollout.max_tokens: policy.generation.max_new_tokens
rollout.temperature: policy.generation.temperature
rollout.stop: policy.generation.stop_strings
generator.tp: policy.generation.vllm_cfg.tensor_parallel_size
generator.ep: policy.generation.vllm_cfg.expert_parallel_size
generator.mem_fraction: policy.generation.vllm_cfg.gpu_memory_utilization
data.train.source: data.dataset_name data.train_data_path
data.train.prompt_template: data.prompt_file
data.train.prompt_key: data.input_key
data.train.answer_key: data.output_key
reward.workers: env.math.num_workers
observe.trackers: logger.wandb_enabled logger.tensorboard_enabled
observe.project: logger.wandb.project
observe.name: logger.wandb.name
trainer.dp: cluster.gpus_per_node
cluster.share_gpus: policy.generation.colocated.enabled
data.max_prompt_tokens: data.max_input_seq_length
-: grpo.val_at_start grpo.val_batch_size policy.dtensor_cfg.cpu_offload policy.megatron_cfg.enabled policy.sequence_packing.enabled
    policy.dynamic_batching.train_mb_tokens policy.optimizer.name policy.generation.backend policy.generation.vllm_cfg.max_model_len
    policy.generation.vllm_cfg.enforce_eager policy.generation.stop_token_ids
    data.system_prompt_file cluster.num_nodes logger.monitor_gpus
""",
    # examples/train/gsm8k/run_gsm8k.sh
    "SkyRL": """
data.train.source: data.train_data
data.eval.source: data.val_data
algorithm.name: trainer.algorithm.advantage_estimator
algorithm.kl_coef: trainer.algorithm.use_kl_loss
model.path: trainer.policy.model.path
trainer.dp: trainer.placement.policy_num_gpus_per_node
generator.engines: generator.inference_engine.num_engines
generator.tp: generator.inference_engine.tensor_parallel_size
generator.mem_fraction: generator.inference_engine.gpu_memory_utilization
weights.transport: generator.inference_engine.weight_sync_backend
eval.every: trainer.eval_interval
trainer.epochs: trainer.update_epochs_per_batch
max_steps: trainer.epochs
rollout.prompts_per_step: trainer.train_batch_size
trainer.minibatches: trainer.policy_mini_batch_size
trainer.max_tokens_per_microbatch: trainer.micro_forward_batch_size_per_gpu trainer.micro_train_batch_size_per_gpu
checkpoint.every: trainer.ckpt_interval
rollout.max_tokens: generator.sampling_params.max_generate_length
rollout.n: generator.n_samples_per_prompt
trainer.optimizer.lr: trainer.policy.optimizer_config.lr
rollout.name: environment.env_class
observe.trackers: trainer.logger
observe.project: trainer.project_name
observe.name: trainer.run_name
run_dir: trainer.resume_mode trainer.log_path trainer.ckpt_path
cluster.share_gpus: trainer.placement.colocate_all
data.max_prompt_tokens: trainer.max_prompt_length
-: trainer.placement.ref_num_gpus_per_node trainer.strategy trainer.eval_batch_size
    trainer.eval_before_train generator.inference_engine.backend generator.batched
    generator.inference_engine.run_engines_locally generator.inference_engine.async_engine
""",
    # examples/scripts/train_reinforce_baseline_hybrid_engine.sh and train_dapo_ray_hybrid_engine.sh
    "OpenRLHF": """
model.path: --pretrain
model.dtype: --param_dtype --bf16
run_dir: --save_path --ckpt_path --load_checkpoint
checkpoint.hf_every: --save_hf_ckpt
checkpoint.keep: --max_ckpt_num
checkpoint.every: --save_steps
rollout.name: --agent_func_path
reward.name: --remote_rm_url
data.train.source: --prompt_data
data.train.prompt_key: --input_key
data.train.answer_key: --label_key
data.train.prompt_template: --apply_chat_template
data.train.size: --max_samples
rollout.max_tokens: --generate_max_len
rollout.prompts_per_step: --rollout_batch_size
rollout.n: --n_samples_per_prompt
rollout.dynamic_sampling: --dynamic_filtering --dynamic_filtering_reward_range
trainer.minibatches: --train_batch_size
trainer.max_tokens_per_microbatch: --train_max_tokens_per_gpu --rollout_max_tokens_per_gpu --micro_train_batch_size
    --micro_rollout_batch_size
trainer.epochs: --max_epochs
max_steps: --num_episodes
trainer.dp: --actor_num_nodes --actor_num_gpus_per_node
trainer.cp: --ring_attn_size
trainer.zero: --zero_stage
trainer.recompute: --gradient_checkpointing
trainer.optimizer.lr: --actor_learning_rate
critic.optimizer.lr: --critic_learning_rate
generator.engines: --vllm_num_engines
generator.tp: --vllm_tensor_parallel_size
generator.mem_fraction: --vllm_gpu_memory_utilization
weights.transport: --vllm_sync_backend
algorithm.name: --advantage_estimator
algorithm.entropy_coefficient: --entropy_loss_coef
algorithm.kl_coef: --init_kl_coef --use_kl_loss
algorithm.kl_estimator: --kl_estimator
algorithm.rho: --eps_clip_low_high
algorithm.gamma: --gamma
algorithm.ratio: --enable_vllm_is_correction --vllm_is_correction_type
observe.trackers: --use_tensorboard
eval.every: --eval_steps
cluster.share_gpus: --colocate_all_models
data.max_prompt_tokens: --prompt_max_len
-: --packing_samples --use_dynamic_batch --ref_num_nodes --ref_num_gpus_per_node
    --fsdp2_enable_sleep --vllm_enable_sleep --deepspeed_enable_sleep --enforce_eager --logging_steps
""",
}


def names_of_scripts() -> list[tuple[str, str, str]]:
    """(program, name there, key here)."""
    table = []
    for program, text in SCRIPTS.items():
        for line in text.replace("\n    ", " ").strip().splitlines():
            key, _, names = line.partition(": ")
            table += [(program, name, key) for name in names.split()]
    return table


@pytest.mark.parametrize("program", SCRIPTS)
def test_settings_of_a_usual_script_lead_to_megarls(program: str) -> None:
    for script_program, name, key in names_of_scripts():
        if script_program != program:
            continue
        if key == "-":
            foreign_setting = foreign_setting_of(name)
            assert nearest(name) == [] and foreign_setting and foreign_setting.note, name
        else:
            assert nearest(name) == [key], name


@pytest.mark.parametrize(
    ("name", "key"), {"+trainer.total_epochs": "max_steps", "--zero-stage": "trainer.zero"}.items()
)
def test_dashes_and_plus_signs_do_not_matter(name: str, key: str) -> None:
    assert nearest(name)[:1] == [key]


def test_foreign_names_lead_to_existing_settings() -> None:
    for name, foreign_setting in _names().items():
        if foreign_setting.key:
            assert foreign_setting.key in settings(), name
        else:
            assert foreign_setting.note, name
        assert name not in settings() or foreign_setting.key not in ("", name), name


@pytest.mark.parametrize(
    "name", ["foo.qux", "frobnicate", "trainer.quux", "num_workers_of_something"]
)
def test_nothing_is_proposed_for_a_strange_name(name: str) -> None:
    assert nearest(name) == []


def test_key_with_another_meaning_elsewhere_needs_max_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: none}\ntrainer: {epochs: 20}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert error.value.problems == [
        "trainer.epochs=20: max_steps must be set too. In other programs trainer.epochs is what "
        "MegaRL calls max_steps (steps, not epochs: an epoch has rows / rollout.prompts_per_step "
        "steps). Here it is: passes over each batch of rollouts, with its prompts in another order "
        "each time"
    ]
    config = load_config(path, ["max_steps=5"])
    assert (config.trainer.epochs, config.max_steps) == (20, 5)
    assert load_config(config) == config
    for name in ("epochs", "trainer.num_epochs", "num_epochs", "+trainer.epochs"):
        assert nearest(name) == ["max_steps"], name


def test_messages_explain_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: none}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_config(
            path, ["trainer.total_epochs=3", "num_generations=8", "data.max_prompt_length=512"]
        )
    epochs, generations, prompts = str(error.value).splitlines()
    assert (
        "trainer.total_epochs=3: unknown key; did you mean max_steps (steps, not epochs" in epochs
    )
    assert generations == "num_generations=8: unknown key; did you mean rollout.n?"
    assert "data.max_prompt_length=512: unknown key; did you mean data.max_prompt_tokens" in prompts
    with pytest.raises(SystemExit):
        main(["train", str(path), "--clip-ratio=0.2", "--lr=1e-6"])
    stderr = capsys.readouterr().err
    assert (
        "algorithm.rho=… (the bound of the ratio itself: 1.2 for a clip of 0.2) "
        "trainer.optimizer.lr=1e-6" in stderr
    )


def test_table_of_the_page_of_own_runs_agrees() -> None:
    page = OWN_RUN.read_text(encoding="utf-8")
    lines = page.partition("## Names you may know")[2].splitlines()
    checked = []
    for cells in (line.split("|") for line in lines):
        if len(cells) != 5:
            continue
        for name in re.findall(r"`…?([\w.-]+)`(?! /)", " ".join(cells[2:])):
            foreign_setting = foreign_setting_of(name)
            if foreign_setting and foreign_setting.key:
                assert foreign_setting.key.rpartition(".")[2] in cells[1], name
                checked.append(name)
    assert len(checked) > 10
