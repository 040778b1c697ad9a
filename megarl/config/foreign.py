"""What MegaRL calls the settings of other programs: verl, TRL's GRPOConfig, slime, OpenRLHF,
NeMo-RL, prime-rl and SkyRL.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

# An entry: MegaRL's key or -, the names elsewhere, and what differs, separated by |. A name is also
# found at the end of a key in a section that MegaRL does not have, such as actor_rollout_ref.actor
# or trainer.policy. A name that ends in .* stands for all keys of a section. A name that is also a
# key of MegaRL's for something else is accepted only beside the entry's key. Lines that begin with
# blanks continue an entry.
_TABLE = """
model.path | pretrain hf_checkpoint model_name_or_path model_name actor_rollout_ref.model.path
    model.name policy_model.path policy.model.path |
model.chat_template.name | renderer.name |
model.chat_template.arguments | chat_template_kwargs |
model.tokenizer | tokenizer.name tokenizer_name_or_path |
model.dtype | bf16 fp16 precision param_dtype | float32 or bfloat16
lora.rank | lora_rank lora_r |
lora.alpha | lora_alpha |
lora.targets | target_modules lora_target_modules |
data.train.source | data.train_files train_files prompt_data dataset_name dataset data.train_data
    train_data_path data.dataset_name data.train_data_path |
data.eval.source | data.val_files val_files eval_prompt_data eval_dataset data.val_data
    val_data_path data.val_data_path |
data.train.prompt_key | data.prompt_key input_key data.input_key |
data.train.answer_key | label_key data.answer_key data.output_key output_key |
data.train.prompt_template | apply_chat_template data.prompt_file prompt_file | chat, or a text with
    {prompt} in it
data.train.size | max_samples max_train_samples |
- | data.system_prompt_file system_prompt_file | write the system message into the rows' messages,
    or its text into data.train.prompt_template
data.bad_rows | data.truncation data.filter_overlong_prompts filter_overlong_prompts | drop leaves
    out rows that do not fit
data.shuffle | rollout_shuffle shuffle_dataset |
data.max_prompt_tokens | data.max_prompt_length max_prompt_length prompt_max_len
    rollout_max_prompt_len data.max_input_seq_length trainer.max_prompt_length | with
    data.bad_rows=drop longer ones are left out
rollout.prompts_per_step | data.train_batch_size rollout_batch_size per_device_train_batch_size
    generation_batch_size num_prompts_per_step trainer.train_batch_size orchestrator.batch_size | it
    counts the prompts of a step, on all GPUs together
rollout.n | num_generations n_samples_per_prompt num_return_sequences num_generations_per_prompt
    orchestrator.group_size group_size rollouts_per_example generator.n_samples_per_prompt |
rollout.max_tokens | data.max_response_length max_response_length max_completion_length
    max_new_tokens rollout_max_response_len generate_max_len max_generate_length
    max_completion_tokens |
rollout.temperature | rollout_temperature temperature |
rollout.top_p | rollout_top_p top_p |
rollout.top_k | rollout_top_k top_k | -1 is off, not 0
rollout.min_p | min_p |
rollout.stop | rollout_stop stop_strings |
- | repetition_penalty generation_kwargs stop_token_ids logprobs_mode | the trainer's log-probs must
    be those of the distribution sampled from: temperature, top_p, top_k, min_p and stop are all
    there is
rollout.name | multi_turn.enable rollout_function_path custom_generate_function_path agent_func_path
    max_rollout_turns env_class train.env.name train.env.id harness taskset | an environment of
    verifiers or openenv, tool_calls, program, or ./file.py:function; its arguments are rollout.args
data.train.sources.NAME.rollout.name | env envs environments | a section of data.train.sources for
    each environment, with its source, rollout and reward
data.train.sources.NAME.reward.name | data_source data.reward_fn_key reward_fn_key | a section of
    data.train.sources for each kind of rows, with its source and reward
rollout.dynamic_sampling | algorithm.filter_groups.enable dynamic_sampling_filter_path
    dynamic_filtering algorithm.filter_groups.metric filter_groups.metric
    dynamic_filtering_reward_range | true; groups whose rewards are all equal are replaced
rollout.max_num_gen_batches | algorithm.filter_groups.max_num_gen_batches |
async.max_in_flight | data.gen_batch_size gen_batch_size over_sampling_batch_size
    max_inflight_rollouts initial_inflight max_inflight_episodes | prompts in flight at a time;
    null: a step's
async.partial_rollout | partial_rollout | what an update does to running requests, such as in_flight
async.capacity | async_grpo.enabled async_training enable_async | 0 is synchronous, 1 one step
    behind
async.max_staleness | max_off_policy_steps max_trajectory_age_steps max_staleness_steps
    max_async_level | in weight versions
trainer.optimizer.lr | lr learning_rate actor_learning_rate |
trainer.optimizer.warmup_steps | lr_warmup_steps lr_warmup_iters lr_warmup_steps_ratio warmup_ratio
    warmup_steps lr_warmup_ratio | a number of steps, no ratio
trainer.optimizer.schedule | lr_scheduler_type lr_scheduler lr_decay_style warmup_style
    lr_scheduler_kwargs |
- | optimizer.name optimizer optim.type lr_decay_iters lr_warmup_init weight_decay_incr_style
    start_weight_decay end_weight_decay | the optimizer is Adam; trainer.optimizer has its settings
trainer.optimizer.eps | adam_eps adam_epsilon |
trainer.optimizer.min_lr_ratio | min_lr min_lr_ratio lr_min | a share of lr
trainer.optimizer.weight_decay | weight_decay l2 |
trainer.optimizer.betas | adam_beta1 adam_beta2 adam_betas betas | a list of both
trainer.optimizer.clip_grad | grad_clip max_grad_norm clip_grad max_norm |
trainer.minibatches | ppo_mini_batch_size mini_batch_size global_batch_size train_batch_size
    num_steps_per_rollout steps_per_generation policy_mini_batch_size train_global_batch_size
    trainer.policy_mini_batch_size | the number of optimizer steps for a batch, not the size of a
    mini-batch
trainer.epochs | ppo_epochs num_iterations max_epochs update_epochs_per_batch
    trainer.update_epochs_per_batch | how often a batch is trained on
trainer.max_tokens_per_microbatch | ppo_micro_batch_size_per_gpu ppo_micro_batch_size
    ppo_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size
    log_prob_max_token_len_per_gpu max_tokens_per_gpu micro_train_batch_size
    micro_rollout_batch_size gradient_accumulation_steps micro_batch_size train_micro_batch_size
    micro_train_batch_size_per_gpu micro_forward_batch_size_per_gpu
    trainer.micro_train_batch_size_per_gpu trainer.micro_forward_batch_size_per_gpu
    logprob_batch_size train_mb_tokens logprob_mb_tokens train_max_tokens_per_gpu
    rollout_max_tokens_per_gpu seq_len max_total_sequence_length | in tokens; gradients are summed
    over as many microbatches as there are
- | use_dynamic_bsz use_dynamic_batch_size use_remove_padding packing_samples balance_batch
    trainer.balance_batch log_prob_use_dynamic_bsz use_dynamic_batch balance_data dynamic_batching.*
    sequence_packing.* make_sequence_length_divisible_by pad_to_multiple_of | sequences are always
    packed without padding, and shared out evenly
cluster.share_gpus | colocate colocate_all_models placement.colocate_all colocated.enabled vllm_mode
    | trainer and engines then live on the same GPUs, each its own process, at the same time
trainer.optimizer.offload | optimizer_offload optimizer_offload_fraction optimizer_cpu_offload | the
    optimizer's state is then in host memory
- | param_offload free_cache_engine enforce_eager enable_prefix_caching
    enable_chunked_prefill offload use_vllm grad_offload
    cpu_offload max_num_batched_tokens max_model_len vllm_max_model_length vllm_enable_sleep
    vllm_enable_sleep_mode deepspeed_enable_sleep fsdp2_enable_sleep run_engines_locally
    async_engine distributed_executor_backend generator.batched generation.backend
    inference_engine.backend vllm_server_base_url vllm_server_host vllm_server_port vllm_model_impl
    | trainer and engines have GPUs of their own, all engines are SGLang's with the model's own
    context, and SGLang's arguments are in generator.server_args
trainer.recompute | enable_gradient_checkpointing gradient_checkpointing recompute_granularity
    activation_checkpointing ac.freq ac_offloading.* |
- | override_config.* attention_dropout hidden_dropout disable_dropout model_init_kwargs
    trust_remote_code | the model is what its config.json says, without dropout
- | use_liger use_fused_kernels fused_kernel_options.* use_liger_kernel attn_implementation impl
    attn model.compile.* torch_compile use_torch_compile trainer.strategy strategy
    megatron_cfg.enabled dtensor_cfg.enabled converter_type deepspeed fsdp fsdp_config | the trainer
    is Megatron's, with the kernels that fit the model and the GPU
trainer.optimizer.megatron | override_optimizer_config.* use_precision_aware_optimizer params_dtype
    | arguments of Megatron's OptimizerConfig, by their names there
trainer.ddp | override_ddp_config.* distributed_data_parallel_config.*
    accumulate_allreduce_grads_in_fp32 overlap_grad_reduce overlap_param_gather grad_reduce_in_fp32
    | arguments of Megatron's DistributedDataParallelConfig, by their names there
trainer.megatron | override_transformer_config.* recompute_method recompute_num_layers
    attention_softmax_in_fp32 attention_backend moe_router_dtype moe_permute_fusion
    moe_router_load_balancing_type moe_router_bias_update_rate freeze_moe_router apply_rope_fusion |
    arguments of Megatron's TransformerConfig, by their names there
trainer.tp | tensor_model_parallel_size dtensor_cfg.tensor_parallel_size |
trainer.sequence_parallel | sequence_parallel |
trainer.pp | pipeline_model_parallel_size |
trainer.cp | ulysses_sequence_parallel_size context_parallel_size ring_attn_size model.cp
    ring_head_stride |
trainer.ep | expert_model_parallel_size model.ep |
trainer.etp | expert_tensor_parallel_size |
trainer.dp | fsdp_size actor_num_nodes actor_num_gpus_per_node trainer.n_gpus_per_node
    n_gpus_per_node policy_num_gpus_per_node num_train_gpus num_train_nodes
    actor_rollout_ref.actor.fsdp_config.fsdp_size cluster.gpus_per_node gpus_per_node | the trainer
    has dp * tp * pp * cp GPUs; the engines' come in addition
trainer.zero | zero_stage use_distributed_optimizer |
- | trainer.nnodes nnodes num_nodes cluster.num_nodes num_infer_nodes ref_num_nodes
    ref_num_gpus_per_node critic_num_gpus_per_node critic_num_nodes num_gpus_per_node ref_num_gpus |
    the nodes are those of the job, with one launcher on each (docs/cluster.md); the reference model
    and a critic are on the trainer's ranks
generator.tp | rollout.tensor_model_parallel_size rollout_num_gpus_per_engine
    vllm_tensor_parallel_size vllm_cfg.tensor_parallel_size vllm.tensor_parallel_size
    inference_engine.tensor_parallel_size |
generator.ep | vllm_cfg.expert_parallel_size |
generator.engines | rollout_num_gpus rollout_num_engines vllm_num_engines
    inference_engine.num_engines num_infer_gpus | engines of generator.tp GPUs each
generator.mem_fraction | gpu_memory_utilization vllm_gpu_memory_utilization
    sglang_mem_fraction_static mem_fraction_static |
timeouts.collective_s | nccl_timeout actor_rollout_ref.nccl_timeout |
weights.transport | weight_sync_backend vllm_sync_backend weight_broadcast.type | auto chooses
generator.max_concurrency | max_num_seqs sglang_server_concurrency |
- | actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.name | all engines are SGLang's
algorithm.name | algorithm.adv_estimator adv_estimator advantage_estimator | ppo for gae, or
    algorithm.advantage=critic; others have their names, or algorithm.recipe
algorithm.recipe | loss_type policy_loss.loss_mode importance_sampling_level
    sequence_level_importance_ratios | gspo, cispo, tis and others; a text
algorithm.ratio | use_tis use_importance_sampling_correction enable_vllm_is_correction
    vllm_enable_is_correction vllm_importance_sampling_correction vllm_is_correction_type
    use_rollout_correction | behavior, the default, divides by the engine's own log-probs, so
    nothing needs a correction
algorithm.advantage | algorithm.norm_adv_by_std_in_grpo scale_rewards normalize_rewards
    use_leave_one_out_baseline | normalized, mean or leave_one_out
algorithm.kl_coef | use_kl_loss kl_loss_coef beta init_kl_coef kl_coef algorithm.kl_ctrl.kl_coef
    reference_policy_kl_penalty | above 0 turns the penalty on
algorithm.kl_estimator | kl_loss_type algorithm.kl_penalty | k2, or k3 for low_var_kl
algorithm.kl | algorithm.use_kl_in_reward use_kl_in_reward | loss or reward
algorithm.entropy_coefficient | entropy_coeff entropy_coef entropy_loss_coef |
algorithm.rho | clip_ratio clip_ratio_high cliprange epsilon epsilon_high eps_clip eps_clip_high
    clip_eps eps_clip_low_high ratio_clip_max | the bound of the ratio itself: 1.2 for a clip of 0.2
algorithm.rho_min | clip_ratio_low eps_clip_low clip_eps_low epsilon_low ratio_clip_min | the bound
    of the ratio itself: 0.8 for a clip of 0.2
algorithm.dual_clip | clip_ratio_c eps_clip_c dual_clip ratio_clip_c delta |
algorithm.loss_mean | loss_agg_mode use_token_level_loss token_level_loss | token, sequence or
    sequence_sum
algorithm.gae_lambda | algorithm.lam lambd |
algorithm.gamma | gamma |
algorithm.mask_truncated | mask_truncated_completions overlong_filtering |
max_steps | trainer.total_epochs trainer.total_training_steps total_epochs total_training_steps
    num_train_epochs num_rollout num_episodes num_epoch max_num_steps max_num_epochs epochs
    num_epochs trainer.num_epochs total_train_epochs trainer.epochs | steps, not epochs: an epoch has
    rows / rollout.prompts_per_step steps
run_dir | trainer.default_local_dir default_local_dir output_dir save ckpt_path save_path
    trainer.resume_mode resume_mode resume_from_checkpoint load load_checkpoint checkpoint_dir
    log_path trainer.log_path trainer.ckpt_path log_dir | a run continues from its last checkpoint
    there
- | ref_load | the run begins with model.path, which is its reference model too
checkpoint.every | trainer.save_freq save_freq save_steps save_interval ckpt_interval
    trainer.ckpt_interval ckpt.interval save_period checkpointing.enabled |
checkpoint.keep | save_total_limit trainer.max_actor_ckpt_to_keep max_ckpt_num keep_top_k |
checkpoint.hf_every | save_hf_ckpt model_save_format save_consolidated save_hf | a number of steps
checkpoint.keep_best | metric_name metric_for_best_model | a held-out score by its key in
    metrics.jsonl, such as eval/pass@1
eval.every | trainer.test_freq test_freq eval_steps eval_interval val_period trainer.eval_interval |
- | data.val_batch_size val_batch_size trainer.eval_batch_size eval_batch_size
    per_device_eval_batch_size | a held-out set is scored whole, with as many requests at a time as
    the engines admit
eval.limit | max_val_samples max_eval_samples | prompts of each held-out set
eval.samples | val_kwargs.n n_samples_per_eval_prompt eval_n_samples_per_prompt num_generations_eval
    |
eval.temperature | val_kwargs.temperature val_kwargs.do_sample eval_temperature | 0 is greedy
eval.top_p | val_kwargs.top_p eval_top_p |
eval.top_k | val_kwargs.top_k eval_top_k |
eval.max_tokens | eval_max_response_len |
- | trainer.val_before_train val_before_train val_only trainer.val_only trainer.critic_warmup
    critic_warmup val_at_start eval_before_train trainer.eval_before_train | held-out sets are
    scored before the first step and after the last; megarl eval only scores
observe.trackers | trainer.logger logger report_to use_wandb use_tensorboard wandb_enabled
    tensorboard_enabled mlflow_enabled swanlab_enabled |
observe.project | trainer.project_name project_name wandb_project wandb.project |
observe.name | trainer.experiment_name experiment_name run_name wandb_group wandb_run_name
    wandb.name trainer.run_name |
- | logging_steps log_steps monitor_gpus gpu_monitoring.* log.level | every step is written to
    metrics.jsonl, with the engines' and trainers' times and memory
observe.rollouts_per_step | log_val_generations trainer.log_val_generations log_completions
    num_completions_to_print num_val_samples_to_print |
- | wandb_key wandb.key | a tracker's own environment holds its key, such as WANDB_API_KEY
reward.name | custom_reward_function.path custom_reward_function.name reward_funcs rm_type
    custom_rm_path remote_rm_url reward_model.reward_manager reward_manager | math, another known
    one, or ./file.py:function
- | reward_kwargs.max_resp_len | it is rollout.max_tokens
reward.workers | num_workers |
reward.parts.NAME.weight | reward_weights | reward.parts has a name and a weight for each function
reward.overlong_penalty | overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor |
reward.overlong_tokens | overlong_buffer.len overlong_buffer_cfg.len overlong_buffer.enable
    overlong_buffer_cfg.enable overlong_buffer.log overlong_buffer_cfg.log | the length of the
    buffer; 0: none
roles.NAME.path | reward_model.model.path reward_pretrain critic_pretrain critic.model.path | with
    roles.NAME.role=reward_model, or the like
critic.optimizer.lr | critic.optim.lr critic_learning_rate critic_lr |
seed | rollout_seed data.seed grpo.seed |
"""


class ForeignSetting(NamedTuple):
    key: str  # MegaRL's; empty if there is none
    note: str  # what differs; may be empty


@functools.cache
def _names() -> dict[str, ForeignSetting]:
    settings = {}
    for line in _TABLE.replace("\n    ", " ").strip().splitlines():
        key, names, note = map(str.strip, line.split("|"))
        settings.update(dict.fromkeys(names.split(), ForeignSetting(key.lstrip("-"), note)))
    return settings


def find_foreign_setting(key: str, sections: frozenset[str]) -> ForeignSetting | None:
    """What MegaRL calls another program's setting; None if no program is known to have it.

    `sections`: all of MegaRL's sections.
    """
    names = _names()
    name = key.lstrip("+-").replace("-", "_")
    parts = name.split(".")
    if parts[0] in sections and (len(parts) == 2 or ".".join(parts[:2]) in sections):
        return names.get(name)
    candidates = [name]
    for end in range(1, len(parts)):
        for start in range(end):
            candidates.append(".".join((*parts[start:end], "*")))
    for start in range(len(parts)):
        candidates.append(".".join(parts[start:]))
    for candidate in candidates:
        if candidate in names:
            return names[candidate]
    return None
