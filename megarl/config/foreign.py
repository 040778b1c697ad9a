"""The names of other programs' settings (verl, TRL's GRPOConfig, slime, OpenRLHF), and what MegaRL calls them."""

from __future__ import annotations

import functools
from typing import NamedTuple

# An entry: MegaRL's key or -, the names elsewhere, and what differs, separated by |. A name with dots is a whole key. A name
# without dots is also found at the end of a key in a section that MegaRL does not have, such as
# actor_rollout_ref.actor. Lines that begin with blanks continue an entry.
_TABLE = """
model.path | pretrain hf_checkpoint model_name_or_path model_name actor_rollout_ref.model.path |
model.dtype | bf16 fp16 | float32 or bfloat16
lora.rank | lora_rank lora_r |
lora.alpha | lora_alpha |
lora.targets | target_modules lora_target_modules |
data.train.source | data.train_files train_files prompt_data dataset_name dataset |
data.eval.source | data.val_files val_files eval_prompt_data eval_dataset |
data.train.prompt_key | data.prompt_key input_key |
data.train.answer_key | label_key data.answer_key |
data.train.prompt_template | apply_chat_template |
data.bad_rows | data.truncation data.filter_overlong_prompts filter_overlong_prompts | drop leaves
    out rows that do not fit
- | data.max_prompt_length max_prompt_length prompt_max_len rollout_max_prompt_len | prompts need
    no limit: data.bad_rows says what happens to one that does not fit the model
rollout.prompts_per_step | data.train_batch_size data.gen_batch_size rollout_batch_size
    per_device_train_batch_size generation_batch_size | it counts the prompts of a step, on all
    GPUs together
rollout.n | num_generations n_samples_per_prompt num_return_sequences |
rollout.max_tokens | data.max_response_length max_response_length max_completion_length
    max_new_tokens rollout_max_response_len generate_max_len |
rollout.temperature | rollout_temperature |
rollout.top_p | rollout_top_p |
rollout.top_k | rollout_top_k |
rollout.stop | rollout_stop |
rollout.name | multi_turn.enable rollout_function_path custom_generate_function_path |
rollout.dynamic_sampling | algorithm.filter_groups.enable dynamic_sampling_filter_path
    dynamic_filtering |
rollout.max_num_gen_batches | algorithm.filter_groups.max_num_gen_batches |
trainer.optimizer.lr | lr learning_rate actor_learning_rate |
trainer.optimizer.warmup_steps | lr_warmup_steps lr_warmup_iters lr_warmup_steps_ratio warmup_ratio
    warmup_steps lr_warmup_ratio | a number of steps, no ratio
trainer.optimizer.schedule | lr_scheduler_type lr_scheduler lr_decay_style warmup_style |
trainer.optimizer.weight_decay | weight_decay l2 |
trainer.optimizer.betas | adam_beta1 adam_beta2 adam_betas betas | a list of both
trainer.optimizer.clip_grad | grad_clip max_grad_norm clip_grad max_norm |
trainer.minibatches | ppo_mini_batch_size mini_batch_size global_batch_size train_batch_size
    num_steps_per_rollout steps_per_generation | the number of optimizer steps for a batch, not the
    size of a mini-batch
trainer.epochs | ppo_epochs num_iterations max_epochs | how often a batch is trained on
trainer.max_tokens_per_microbatch | ppo_micro_batch_size_per_gpu ppo_micro_batch_size
    ppo_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size
    log_prob_max_token_len_per_gpu max_tokens_per_gpu micro_train_batch_size
    micro_rollout_batch_size gradient_accumulation_steps | in tokens; gradients are summed over as
    many microbatches as there are
- | use_dynamic_bsz use_dynamic_batch_size use_remove_padding packing_samples balance_batch
    trainer.balance_batch | sequences are always packed without padding, and shared out evenly
- | param_offload optimizer_offload free_cache_engine enforce_eager enable_prefix_caching
    enable_chunked_prefill offload colocate colocate_all_models use_vllm vllm_mode | trainer and
    engines have GPUs of their own, and SGLang's arguments are in generator.server_args
trainer.recompute | enable_gradient_checkpointing gradient_checkpointing recompute_granularity |
trainer.tp | tensor_model_parallel_size |
trainer.pp | pipeline_model_parallel_size |
trainer.cp | ulysses_sequence_parallel_size context_parallel_size ring_attn_size |
trainer.ep | expert_model_parallel_size |
trainer.etp | expert_tensor_parallel_size |
trainer.dp | fsdp_size actor_num_nodes actor_num_gpus_per_node trainer.n_gpus_per_node
    n_gpus_per_node | the trainer has dp * tp * pp * cp GPUs; the engines' come in addition
trainer.zero | zero_stage |
- | trainer.nnodes nnodes num_nodes | the nodes are those of the job, with one launcher on each
    (docs/cluster.md)
generator.tp | rollout.tensor_model_parallel_size rollout_num_gpus_per_engine
    vllm_tensor_parallel_size |
generator.engines | rollout_num_gpus rollout_num_engines vllm_num_engines | engines of generator.tp
    GPUs each
generator.mem_fraction | gpu_memory_utilization vllm_gpu_memory_utilization
    sglang_mem_fraction_static |
generator.max_concurrency | max_num_seqs sglang_server_concurrency |
- | actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.name | all engines are SGLang's
algorithm.name | algorithm.adv_estimator adv_estimator advantage_estimator | ppo for gae; others
    have their names, or algorithm.recipe
algorithm.recipe | loss_type policy_loss.loss_mode |
algorithm.advantage | algorithm.norm_adv_by_std_in_grpo scale_rewards |
algorithm.kl_coef | use_kl_loss kl_loss_coef beta init_kl_coef kl_coef algorithm.kl_ctrl.kl_coef |
    above 0 turns the penalty on
algorithm.kl_estimator | kl_loss_type algorithm.kl_penalty | k2, or k3 for low_var_kl
algorithm.kl | algorithm.use_kl_in_reward use_kl_in_reward | loss or reward
algorithm.entropy_coefficient | entropy_coeff entropy_coef entropy_loss_coef |
algorithm.rho | clip_ratio clip_ratio_high cliprange epsilon epsilon_high eps_clip eps_clip_high
    clip_eps eps_clip_low_high | the bound of the ratio itself: 1.2 for a clip of 0.2
algorithm.rho_min | clip_ratio_low eps_clip_low clip_eps_low epsilon_low | the bound of the ratio
    itself: 0.8 for a clip of 0.2
algorithm.dual_clip | clip_ratio_c eps_clip_c dual_clip |
algorithm.loss_mean | loss_agg_mode |
algorithm.gae_lambda | algorithm.lam lambd |
algorithm.mask_truncated | mask_truncated_completions overlong_filtering |
max_steps | trainer.total_epochs trainer.total_training_steps total_epochs total_training_steps
    num_train_epochs num_rollout num_episodes num_epoch | steps, not epochs: an epoch has rows /
    rollout.prompts_per_step steps (trainer.epochs is something else)
run_dir | trainer.default_local_dir default_local_dir output_dir save ckpt_path save_path
    trainer.resume_mode resume_mode resume_from_checkpoint load load_checkpoint | a run continues
    from its last checkpoint there
checkpoint.every | trainer.save_freq save_freq save_steps save_interval |
checkpoint.keep | save_total_limit trainer.max_actor_ckpt_to_keep max_ckpt_num |
eval.every | trainer.test_freq test_freq eval_steps eval_interval |
eval.samples | val_kwargs.n n_samples_per_eval_prompt eval_n_samples_per_prompt |
eval.temperature | val_kwargs.temperature val_kwargs.do_sample eval_temperature | 0 is greedy
eval.top_p | val_kwargs.top_p eval_top_p |
eval.top_k | val_kwargs.top_k eval_top_k |
eval.max_tokens | eval_max_response_len |
- | trainer.val_before_train val_before_train val_only trainer.val_only trainer.critic_warmup
    critic_warmup | held-out sets are scored before the first step and after the last; megarl eval
    only scores
observe.trackers | trainer.logger logger report_to use_wandb use_tensorboard |
observe.project | trainer.project_name project_name wandb_project |
observe.name | trainer.experiment_name experiment_name run_name wandb_group wandb_run_name |
reward.name | custom_reward_function.path custom_reward_function.name reward_funcs rm_type
    custom_rm_path remote_rm_url reward_model.reward_manager reward_manager | math, another known
    one, or ./file.py:function
roles.NAME.path | reward_model.model.path reward_pretrain critic_pretrain critic.model.path | with
    roles.NAME.role=reward_model, or the like
critic.optimizer.lr | critic.optim.lr critic_learning_rate critic_lr |
seed | rollout_seed data.seed |
"""


class Known(NamedTuple):
    key: str  # MegaRL's; empty if there is none
    note: str  # what differs; may be empty


@functools.cache
def _names() -> dict[str, Known]:
    known = {}
    for line in _TABLE.replace("\n    ", " ").strip().splitlines():
        key, names, note = (part.strip() for part in line.split("|"))
        known.update(dict.fromkeys(names.split(), Known(key.lstrip("-"), note)))
    return known


def known_elsewhere(key: str, sections: frozenset[str]) -> Known | None:
    """What MegaRL calls another program's setting; None if no program is known to have it. `sections`: MegaRL's outermost sections."""
    name = key.lstrip("+-").replace("-", "_")
    parts = name.split(".")
    if parts[0] in sections:
        return _names().get(name)
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_names()[ending] for ending in endings if ending in _names()), None)
