"""The schema's sections on optimizers, and on what else is trained beside the policy: its warm start, reward models, critics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.config.data import DatasetConfig, MixtureConfig, PreferenceConfig
from megarl.config.limits import OUTPUT, above, at_least, between, each, one_of, setting


@dataclass
class OptimizerConfig:
    lr: float = setting(1e-6, "peak learning rate (AdamW)", at_least(0))
    betas: tuple[float, float] = setting((0.9, 0.95), "decay rates of Adam's two moments", each(between(0, 1, open_high=True)))
    eps: float = setting(1e-8, "Adam's epsilon", above(0))
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least(0))
    warmup_steps: int = setting(0, "optimizer steps of linear warm-up", at_least(0))
    schedule: str = setting("constant", "learning rate after the warm-up", one_of("constant", "cosine", "linear"))
    min_lr_ratio: float = setting(0.1, "cosine and linear end at lr * min_lr_ratio", between(0, 1))
    clip_grad: float = setting(1.0, "global gradient norm to clip to; 0: no clipping", at_least(0))
    megatron: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "further settings, by the names of Megatron's OptimizerConfig"}
    )


@dataclass
class CriticConfig:
    """Of algorithm.name=ppo. The critic has the trainer's ranks and sizes, and makes as many optimizer steps. It begins with the checkpoint
    of the role `critic`, or with the policy's weights if there is none."""

    head: str = setting(
        "zeros",
        "what the head of a causal model's checkpoint begins with: zeros, or numbers of variance 1 / (hidden size + 1) by `seed`. A reward "
        "model keeps its own",
        one_of("random", "zeros"),
    )
    warmup_steps: int = setting(0, "first steps of the run that train the critic alone, while the policy's weights stay", at_least(0))
    value_clip: float | None = setting(
        0.2,
        "how far a value may move from the one that the batch began with before its loss stops pushing it further; null: any distance",
        above(0),
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class SftConfig:
    steps: int = setting(0, "optimizer steps of megarl sft", at_least(0))
    tp: int | None = setting(None, "tensor parallel size of the warm start; null: trainer.tp, or 1 if sft sets pp or dp", at_least(1))
    pp: int | None = setting(None, "pipeline parallel size of the warm start; null: trainer.pp, or 1 if sft sets tp or dp", at_least(1))
    dp: int | None = setting(None, "data parallel size of the warm start; null: trainer.dp, or 1 if sft sets tp or pp", at_least(1))
    batch_size: int = setting(128, "sequences per optimizer step", at_least(1))
    max_tokens_per_microbatch: int | None = setting(
        None, "token budget of a microbatch; null: trainer.max_tokens_per_microbatch", at_least(1)
    )
    adapters: bool = setting(True, "with lora.rank, megarl sft trains adapters too, and merges them into what it makes; false: all weights")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: MixtureConfig | None = setting(None, "demonstrations; null: data.train")
    eval: DatasetConfig | None = setting(None, "held-out demonstrations, whose loss is measured; null: none")
    every: int = setting(0, "steps between measurements of `eval`, besides those before the first and after the last step", at_least(0))
    keep: str = setting(
        "best",
        "with `eval`, the weights that end up in `output`: those of the measurement with the lowest loss, or the last",
        one_of("best", "last"),
    )
    save_every: int = setting(
        100, "steps between checkpoints in run_dir/sft, from the last of which an interrupted warm start goes on; 0: none", at_least(0)
    )
    output: str = setting(
        "${run_dir}/sft/hf",
        "folder of the HF checkpoint that megarl sft makes. megarl train and megarl eval begin with it if it exists and was made from the "
        "same model.path; a resumed run keeps to what it began with",
        path=OUTPUT,
    )


@dataclass
class RewardModelConfig:
    steps: int | None = setting(None, "optimizer steps of megarl reward-model; null: as many as `epochs` takes", at_least(1))
    epochs: int = setting(1, "passes over the pairs, if `steps` is null", at_least(1))
    tp: int | None = setting(None, "tensor parallel size; null: trainer.tp, or 1 if reward_model sets pp or dp", at_least(1))
    pp: int | None = setting(None, "pipeline parallel size; null: trainer.pp, or 1 if reward_model sets tp or dp", at_least(1))
    dp: int | None = setting(None, "data parallel size; null: trainer.dp, or 1 if reward_model sets tp or pp", at_least(1))
    batch_size: int = setting(64, "pairs per optimizer step", at_least(1))
    max_tokens_per_microbatch: int | None = setting(
        None, "token budget of a microbatch; null: trainer.max_tokens_per_microbatch", at_least(1)
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    head: str = setting(
        "random",
        "what the head of a causal model's checkpoint begins with: numbers of variance 1 / (hidden size + 1) by `seed`, or zeros. A reward "
        "model in model.path keeps its own",
        one_of("random", "zeros"),
    )
    data: PreferenceConfig | None = setting(None, "the pairs of responses to learn from")
    eval: PreferenceConfig | None = setting(None, "held-out pairs, scored before the first and after the last step; null: none")
    every: int = setting(0, "steps between further evaluations of the held-out pairs; 0: none", at_least(0))
    output: str = setting("${run_dir}/reward_model/hf", "folder of the HF checkpoint that megarl reward-model makes", path=OUTPUT)
