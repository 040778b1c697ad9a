"""Defines every setting of a run: its key, default, limit and meaning.

`async` is a Python keyword, so the section lives in the field `async_`; the loader maps the YAML
key `async` to it. docs/config.md is generated from here: `python -m megarl.config.reference >
docs/config.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from omegaconf import MISSING

from megarl.base.geometry import GeneratorTopology
from megarl.base.kept_sets import MOST_KEPT
from megarl.config.algorithms import (
    ALGORITHMS,
    CRITIC,
    OUTCOME,
    PROCESS,
    PUBLISHED,
    RETURNS,
    VTRACE,
)
from megarl.config.limits import (
    IMPORT_PATH,
    INPUT,
    MODULE,
    OUTPUT,
    Limit,
    above,
    at_least,
    between,
    each_item,
    one_of,
    seconds,
    setting,
)
from megarl.lora.settings import LoraConfig
from megarl.roles.settings import ChatTemplateConfig, RoleConfig
from megarl.simulation.settings import SimulationConfig
from megarl.speculative.settings import SpeculativeConfig


@dataclass
class SourceConfig:
    """The settings that all datasets share: where rows come from, and how they become prompts."""

    source: str = setting(
        MISSING,
        "synthetic:<task>, a file that ends in .jsonl, .json, .csv, .tsv or .parquet "
        "(docs/data.md), or a hub name",
        path=INPUT,
    )
    split: str = setting("train", "which split of the source")
    subset: str | None = setting(None, 'hub configuration name, such as "main" of gsm8k')
    prompt_key: str | None = setting(
        None,
        "column of the prompt, or column.field for a field inside a column; null: question, or "
        "what rows in the formats of OpenAI, verl "
        "and slime call it (docs/data.md)",
    )
    prompt_template: str = setting(
        "{prompt}",
        "what the model sees; {prompt} stands for the column. chat: the model's chat template is "
        "applied to the column, a user's "
        "message or a list of messages. A list of messages always goes through the chat template",
    )


_SIZE = "use only this many rows, from the first on; null: all"


@dataclass
class DatasetConfig(SourceConfig):
    """Prompts with reference answers."""

    answer_key: str | None = setting(
        None,
        "column of the reference answer, written like prompt_key; null: answer, or what rows in a "
        "known format call it",
    )


@dataclass
class LearnedConfig(DatasetConfig):
    """Prompts to train on. SFT learns their demonstrations."""

    size: int | None = setting(None, _SIZE, at_least(1))
    demonstration_key: str | None = setting(
        None,
        "column that SFT learns: a text, or a list of texts that policy and environment write in "
        "turn; null: answer_key, or the "
        "whole conversation",
    )
    learn: str = setting(
        "all",
        "which of the assistant's turns SFT learns in a conversation; a message with weight=0 or "
        "train=false is never learned",
        one_of("all", "last"),
    )


@dataclass
class PreferenceConfig(SourceConfig):
    """Pairs of responses to a prompt; one of the two is preferred."""

    prompt_key: str | None = setting(
        None,
        "column of the prompt, or column.field for a field inside a column; null: prompt, or "
        "without such a column the text that "
        "both responses begin with",
    )
    chosen_key: str = setting(
        "chosen",
        "column of the preferred response, written like prompt_key: a text, or a list of messages "
        "whose last is the response",
    )
    rejected_key: str = setting("rejected", "column of the other response, written like chosen_key")
    margin_key: str | None = setting(
        None,
        "column with the margin of a pair: the loss wants the chosen response to score higher by "
        "at least this; null: 0 for all",
    )
    size: int | None = setting(None, _SIZE, at_least(1))


@dataclass
class HeldOutPairsConfig:
    """Held-out pairs, with the columns of the pairs that are learned."""

    source: str = setting(MISSING, "where rows come from, as data.eval.source says", path=INPUT)
    split: str = setting("train", "which split of the source")
    subset: str | None = setting(None, "hub configuration name")
    size: int | None = setting(None, _SIZE, at_least(1))


@dataclass
class MixedConfig(LearnedConfig):
    """One of several sources."""

    weight: float | None = setting(
        None,
        "relative share of the prompts that the quotas leave; null: 1, or no share with a quota",
        above(0),
    )
    quota: int | None = setting(
        None,
        "instead of a weight: how many prompts of each step come from this source",
        at_least(1),
    )
    reward: SourceRewardConfig = field(default_factory=lambda: SourceRewardConfig())
    rollout: SourceRolloutConfig = field(default_factory=lambda: SourceRolloutConfig())
    algorithm: SourceAlgorithmConfig = field(default_factory=lambda: SourceAlgorithmConfig())


MIXED = "sources"  # as source


@dataclass
class MixtureConfig(LearnedConfig):
    """One dataset, or several that are mixed."""

    source: str = setting(
        MIXED,
        "where rows come from, as data.eval.source says; sources: from the datasets in `sources`",
        path=INPUT,
    )
    sources: dict[str, MixedConfig | None] = field(
        default_factory=dict,
        metadata={
            "meaning": "several datasets, by name, whose prompts are mixed (docs/data.md); "
            "NAME=null removes one"
        },
    )


FAIL = "fail"
DROP = "drop"  # data.bad_rows


@dataclass
class CurriculumConfig:
    """Prompts that are too easy or too hard rest for a while (docs/data.md)."""

    min_pass_rate: float = setting(
        0.05, "a prompt rests if less than this share of its samples passes", between(0, 1)
    )
    max_pass_rate: float = setting(
        0.95, "a prompt rests if more than this share of its samples passes", between(0, 1)
    )
    pass_reward: float = setting(
        1.0, "a sample passes if its reward is at least this", between(-1e6, 1e6)
    )
    rest_epochs: int = setting(
        2,
        "for how many epochs of its source such a prompt is left out; then it comes again",
        at_least(1),
    )


@dataclass
class DataConfig:
    train: MixtureConfig = field(default_factory=MixtureConfig)
    eval: DatasetConfig | None = setting(None, "the held-out set; null: none")
    curriculum: CurriculumConfig | None = setting(None, "which training prompts rest; null: none")
    bad_rows: str = setting(
        FAIL,
        "what happens with rows that cannot be used, of any dataset: empty or missing fields, "
        "wrong types, prompts that leave no "
        "room for a response. fail: nothing starts, and the first such rows are named; drop: they "
        "are left out and counted, but "
        "nothing starts if no row is left",
        one_of(FAIL, DROP),
    )
    max_prompt_tokens: int | None = setting(
        None,
        "a row of data.train with a longer prompt cannot be used, so data.bad_rows decides; null: "
        "what the context leaves beside rollout.max_tokens",
        at_least(1),
    )
    shuffle: bool = setting(
        True, "shuffle the training prompts in every epoch, depending on the seed"
    )


# names of rollouts: their rows and rewards are an environment's own
OF_HUBS = ("verifiers", "openenv")
# names of rollouts whose policy is called from outside, so that an episode may branch
BY_CALLS = ("program", *OF_HUBS)


_ROLLOUTS = one_of(
    "single_turn",
    "tool_calls",
    *BY_CALLS,
    or_like=IMPORT_PATH,
    written="package.module:function, ./file.py:function",
)
_TOP_P = between(0, 1, open_low=True)
_TOP_K = Limit(
    f"-1, or from 2 to {MOST_KEPT}, the most that are recorded",
    lambda k: k == -1 or 2 <= k <= MOST_KEPT,
)
_MIN_P = between(0, 1, open_high=True)
_STOP = Limit("at most 32 texts, none empty", lambda texts: len(texts) <= 32 and all(texts))


@dataclass
class RolloutConfig:
    name: str = setting(
        "single_turn",
        "how a prompt becomes samples. single_turn: one completion per sample; tool_calls: turns "
        "with a tool (docs/environments.md); "
        "program: a program of yours that calls the policy by OpenAI's or Anthropic's interface; "
        "verifiers and openenv: an environment of these packages (docs/agents.md)",
        _ROLLOUTS,
        MODULE,
    )
    args: dict[str, Any] = field(
        default_factory=dict,
        metadata={"meaning": "keyword arguments of the rollout that `name` names"},
    )
    prompts_per_step: int = setting(
        32,
        "prompts in a batch. A batch is trained on between two weight updates, in "
        "trainer.minibatches * trainer.epochs optimizer steps",
        at_least(1),
    )
    n: int = setting(4, "samples per prompt", at_least(1))
    dynamic_sampling: bool = setting(
        False,
        "replace a prompt whose samples all have the same reward by the next prompt, since "
        "nothing is learned from it (DAPO; "
        "docs/algorithms.md)",
    )
    max_num_gen_batches: int | None = setting(
        10,
        "with dynamic_sampling, the run ends if this many * prompts_per_step generated prompts do "
        "not fill one step; null: no limit",
        at_least(1),
    )
    max_tokens: int = setting(
        1024, "longest response in tokens, including an environment's", at_least(1)
    )
    temperature: float = setting(1.0, "sampling temperature", above(0))
    top_p: float = setting(1.0, "nucleus sampling; 1: off", _TOP_P)
    top_k: int = setting(-1, "sample from the k likeliest tokens; -1: off", _TOP_K)
    min_p: float = setting(
        0.0,
        "sample from the tokens that are at least min_p times as likely as the likeliest; 0: off",
        _MIN_P,
    )
    replay_mask: bool = setting(
        True,
        "with top_p, top_k or min_p, the trainer too takes log-probs over only the tokens that "
        "the engine could have drawn "
        "(docs/algorithms.md); false: the trainer takes them over the whole vocabulary",
    )
    max_failed_fraction: float = setting(
        0.5,
        "the run ends if more than this share of a step's or an evaluation's episodes failed; 1: "
        "never. Episodes of programs and "
        "environments count, unless they sampled nothing (docs/agents.md)",
        between(0, 1),
    )
    stop: list[str] = field(
        default_factory=list,
        metadata={
            "meaning": "texts that end a response or a turn, besides end-of-text; such a text "
            "belongs to the response and is learned",
            "limit": _STOP,
        },
    )
    tool_workers: int = setting(
        1, "processes for each tool that computes; they start at its first call", at_least(1)
    )
    tool_timeout_s: float = setting(5.0, "time limit of a tool's call", seconds())

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from parts of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def replays_mask(self) -> bool:
        return self.truncated and self.replay_mask


SAMPLED = "sampled"
TOP_K = "top_k"
VOCABULARY = "vocabulary"


@dataclass
class DistillConfig:
    """For runs with teachers in `roles` (docs/algorithms.md)."""

    coef: float = setting(
        1.0,
        "weight of the reverse KL divergence from the teachers: with several, the sum weighted by "
        "each one's `weight`",
        above(0),
    )
    over: str = setting(
        SAMPLED,
        "which tokens the divergence covers at each position. sampled: an estimate from the "
        "sampled token alone, as an advantage; "
        "top_k: the teacher's likeliest tokens and one bucket for all others, for teachers on "
        "engines; vocabulary: all tokens, for "
        "teachers on the trainer's ranks",
        one_of(SAMPLED, TOP_K, VOCABULARY),
    )
    top_k: int | None = setting(
        None,
        "with over=top_k, how many of the teacher's likeliest tokens count; null: 20",
        between(1, 4096),
    )

    @property
    def likeliest(self) -> int:
        """How many tokens a teacher on engines is asked for at each place; 0: none but the sampled
        one.
        """
        if self.over == TOP_K:
            return self.top_k or 20
        return 0


_BASELINES = ("mean", "normalized", "batch_normalized", "leave_one_out")


@dataclass
class AlgorithmConfig:
    name: str = setting(
        "aipo",
        "the algorithm; see docs/algorithms.md",
        one_of(
            *ALGORITHMS,
            or_like=IMPORT_PATH,
            written="package.module:rule, ./file.py:rule",
            elsewhere={
                name: f"algorithm.recipe={name}" for name in PUBLISHED if name not in ALGORITHMS
            },
        ),
        MODULE,
    )
    recipe: str | None = setting(
        None,
        "a paper's settings: sets this section, except skip_zero_advantage and distill, to what "
        "docs/algorithms.md lists. Settings "
        "beside it in the file, or on the command line, win. A recipe on the command line "
        "replaces the file's whole section",
        one_of(
            *PUBLISHED,
            elsewhere={
                name: f"algorithm.name={name}" for name in ALGORITHMS if name not in PUBLISHED
            },
        ),
    )
    rho: float | None = setting(
        None,
        "upper bound of the importance ratio; null: the algorithm's own. aipo's is 4; 2 to 10 "
        "works (LlamaRL, section 6)",
        above(0),
    )
    rho_min: float | None = setting(
        None,
        "lower bound of the importance ratio; null: the algorithm's own. aipo has none",
        at_least(0),
    )
    dual_clip: float | None = setting(
        None,
        "grpo, gspo and proximal_rloo: with a negative advantage, ratios above this have no "
        "gradient; null: none, and for grpo 3",
        at_least(1),
    )
    ratio: str = setting(
        "behavior",
        "which ratio is bounded. behavior: pi/mu, where mu is the policy that sampled the token; "
        "proximal: pi/prox, where prox is "
        "the policy before the batch's first optimizer step, as if prox had sampled; decoupled: "
        "pi/prox, and each token is also "
        "weighted by prox/mu (docs/algorithms.md)",
        one_of("behavior", "proximal", "decoupled"),
    )
    behavior_cap: float | None = setting(
        None,
        "with ratio=decoupled, tokens whose prox/mu is above this do not count; null: 5",
        at_least(1),
    )
    behavior_floor: float | None = setting(
        None,
        "with ratio=decoupled, tokens whose prox/mu is below this do not count; null: 0",
        at_least(0),
    )
    behavior_level: str | None = setting(
        None,
        "with ratio=decoupled, what prox/mu covers. token: the token itself; sequence: the "
        "product over its response; null: token",
        one_of("token", "sequence"),
    )
    behavior_above: str | None = setting(
        None,
        "with ratio=decoupled, what happens above behavior_cap and below behavior_floor. drop: "
        "such tokens do not count; truncate: "
        "their weight is that bound, as in truncated importance sampling; null: drop",
        one_of("drop", "truncate"),
    )
    advantage: str | None = setting(
        None,
        "mean: the reward minus the mean of the prompt's samples; normalized: mean, divided by "
        "the standard deviation of the "
        "prompt's samples; batch_normalized: mean, divided by its standard deviation over the "
        "batch; leave_one_out: the reward minus"
        " the mean of the prompt's other samples; critic: of each token, from the values of a "
        "critic (section critic); null: the algorithm's own",
        one_of(*_BASELINES, CRITIC),
    )
    credit: str = setting(
        OUTCOME,
        "which rewards a token answers for. outcome: the response's reward alone; returns: those "
        "of its turn and of all later turns, compared with the same turn of the prompt's other "
        "samples; process: the same sum, but of rewards that are first compared with those of all "
        "turns of the prompt (docs/algorithms.md)",
        one_of(OUTCOME, RETURNS, PROCESS),
    )
    turn_gamma: float | None = setting(
        None,
        "with credit=returns and no critic, discount of later turns' rewards, per turn; null: 1",
        between(0, 1),
    )
    loss_mean: str | None = setting(
        None,
        "token: all tokens of a mini-batch count equally; sequence: all responses do; "
        "sequence_sum: the mean over responses of the sum "
        "over their tokens; null: the algorithm's own. aipo's is token",
        one_of("token", "sequence", "sequence_sum"),
    )
    gamma: float | None = setting(
        None,
        "with advantage=critic, discount of later rewards, per token; null: 1",
        between(0, 1),
    )
    gae_lambda: float | None = setting(
        None,
        "with advantage=critic, lambda of generalised advantage estimation. 0: advantages use the "
        "next value alone; 1: the rewards alone; null: 0.95",
        between(0, 1),
    )
    whiten: bool | None = setting(
        None,
        "with advantage=critic, shift and scale the advantages of a batch to mean 0 and variance 1 "
        "over the policy's tokens; null: true",
    )
    critic_targets: str | None = setting(
        None,
        "with advantage=critic, what its values learn. gae: the advantage plus the value; vtrace: "
        "the same, with truncated importance weights for the age of samples (docs/algorithms.md); "
        "null: gae",
        one_of("gae", VTRACE),
    )
    rho_bar: float | None = setting(
        None, "with critic_targets=vtrace, upper bound of a token's own weight; null: 1", above(0)
    )
    c_bar: float | None = setting(
        None,
        "with critic_targets=vtrace, upper bound of the weights of earlier tokens, by which later "
        "ones count; null: 1",
        above(0),
    )
    kl_coef: float = setting(
        0.0,
        "weight of the KL divergence from the frozen initial policy; 0: none, and no reference "
        "model is kept",
        at_least(0),
    )
    kl: str = setting(
        "loss",
        "where the divergence counts. loss: in the loss, token by token; reward: its sum over the "
        "tokens is taken off the response's"
        " reward before advantages are computed, and with a critic it is taken off each token's "
        "reward",
        one_of("loss", "reward"),
    )
    kl_estimator: str | None = setting(
        None,
        "how the divergence is estimated from d = log pi - log ref of a sampled token. k1: d, "
        "only for kl=reward; k2: d^2/2; k3: "
        "exp(-d) - 1 + d; null: k2 in the loss, k1 in the reward (docs/algorithms.md)",
        one_of("k1", "k2", "k3"),
    )
    beta: float | None = setting(
        None,
        "online_dpo, ipo and copg: weight of the KL divergence from the frozen initial policy in "
        "their losses; null: 0.1, and for "
        "copg 0.05. With copg it may be 0: none, and no reference model is kept",
        at_least(0),
    )
    entropy_coefficient: float = setting(
        0.0,
        "weight of a bonus for the entropy of the policy's distribution at each of its tokens, "
        "over the whole vocabulary",
        at_least(0),
    )
    mask_truncated: bool = setting(
        False,
        "leave samples that were cut at their token limit out of the loss and its means (DAPO's "
        "overlong filtering). Their rewards "
        "still count in the advantages of the prompt's other samples",
    )
    skip_zero_advantage: bool = setting(
        True, "do not train on groups whose rewards are all equal; the gradient is the same"
    )
    distill: DistillConfig = field(default_factory=DistillConfig)


def published(recipe: str) -> dict[str, Any]:
    """Dotted keys of all that `recipe`, one of PUBLISHED, sets, with its values; the section's
    others are at their defaults.
    """
    defaults = {
        setting.name: setting.default
        for setting in fields(AlgorithmConfig)
        if setting.name not in ("recipe", "skip_zero_advantage", "distill")
    }
    return {
        key if "." in key else f"algorithm.{key}": value
        for key, value in (defaults | PUBLISHED[recipe]).items()
    }


@dataclass
class AdamConfig:
    lr: float = setting(1e-6, "peak learning rate (AdamW)", at_least(0))
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "decay rates of Adam's two moments", each_item(between(0, 1, open_high=True))
    )
    eps: float = setting(1e-8, "Adam's epsilon", above(0))
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least(0))
    warmup_steps: int = setting(0, "optimizer steps of linear warm-up", at_least(0))
    schedule: str = setting(
        "constant", "learning rate after the warm-up", one_of("constant", "cosine", "linear")
    )
    min_lr_ratio: float = setting(0.1, "cosine and linear end at lr * min_lr_ratio", between(0, 1))
    clip_grad: float = setting(1.0, "global gradient norm to clip to; 0: no clipping", at_least(0))


@dataclass
class OptimizerConfig(AdamConfig):
    """The optimizer of the policy."""

    offload: bool = setting(
        False,
        "keep master weights and moments of every optimizer of a run in host memory, where the "
        "cores make its step. A GPU then holds "
        "6 bytes a parameter instead of 18, its host 16; a step takes longer (megarl plan counts "
        "both). Needs trainer.zero=1 and bfloat16",
    )
    megatron: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "further settings of every optimizer of a run, by the names of Megatron's "
            "OptimizerConfig"
        },
    )


@dataclass
class CriticConfig:
    """For algorithm.advantage=critic, which is that of algorithm.name=ppo.

    The critic has the trainer's ranks and sizes, and makes as many optimizer steps. It begins with
    the checkpoint of the role `critic`, or with the policy's weights if there is none.
    """

    warmup_steps: int = setting(
        0, "steps at the beginning of the run that train the critic alone", at_least(0)
    )
    value_clip: float | None = setting(
        0.2,
        "how far a value may move within a batch before its loss stops pushing it further; null: "
        "any distance",
        above(0),
    )
    optimizer: AdamConfig = field(default_factory=AdamConfig)


@dataclass
class SftConfig:
    steps: int = setting(0, "optimizer steps of megarl sft", at_least(0))
    tp: int | None = setting(
        None,
        "tensor parallel size of the warm start; null: trainer.tp, or 1 if sft sets pp or dp",
        at_least(1),
    )
    pp: int | None = setting(
        None,
        "pipeline parallel size of the warm start; null: trainer.pp, or 1 if sft sets tp or dp",
        at_least(1),
    )
    dp: int | None = setting(
        None,
        "data parallel size of the warm start; null: trainer.dp, or 1 if sft sets tp or pp",
        at_least(1),
    )
    batch_size: int = setting(128, "sequences per optimizer step", at_least(1))
    adapters: bool = setting(
        True,
        "with lora.rank, megarl sft too trains adapters, and merges them into its checkpoint; "
        "false: it trains all weights",
    )
    optimizer: AdamConfig = field(default_factory=AdamConfig)
    data: LearnedConfig | None = setting(None, "demonstrations; null: data.train")
    eval: LearnedConfig | None = setting(
        None, "held-out demonstrations, whose loss is measured; null: none"
    )
    every: int = setting(
        0,
        "steps between measurements of `eval`; 0: only before the first and after the last step",
        at_least(0),
    )
    score_every: int = setting(
        0,
        "steps between evaluations of data.eval and eval.suites by the engines, as in megarl "
        "eval, which interrupt the warm start; at the end `output` is evaluated too; 0: none",
        at_least(0),
    )
    keep: str = setting(
        "best",
        "with `eval`, which weights `output` gets: those with the lowest measured loss, or the "
        "last",
        one_of("best", "last"),
    )
    save_every: int = setting(
        100,
        "steps between checkpoints in run_dir/sft; an interrupted warm start goes on from the "
        "last one; 0: none",
        at_least(0),
    )
    output: str = setting(
        "${run_dir}/sft/hf",
        "folder of the HF checkpoint that megarl sft makes. megarl train and megarl eval begin "
        "with it if it exists and was made from the "
        "same model.path; a resumed run keeps to what it began with",
        path=OUTPUT,
    )


@dataclass
class RewardModelConfig:
    steps: int | None = setting(
        None, "optimizer steps of megarl reward-model; null: as many as `epochs` takes", at_least(1)
    )
    epochs: int = setting(1, "passes over the pairs, if `steps` is null", at_least(1))
    tp: int | None = setting(
        None,
        "tensor parallel size; null: trainer.tp, or 1 if reward_model sets pp or dp",
        at_least(1),
    )
    pp: int | None = setting(
        None,
        "pipeline parallel size; null: trainer.pp, or 1 if reward_model sets tp or dp",
        at_least(1),
    )
    dp: int | None = setting(
        None,
        "data parallel size; null: trainer.dp, or 1 if reward_model sets tp or pp",
        at_least(1),
    )
    batch_size: int = setting(64, "pairs per optimizer step", at_least(1))
    optimizer: AdamConfig = field(default_factory=AdamConfig)
    head: str = setting(
        "random",
        "what a new head on a causal model begins with. random: numbers of variance 1 / (hidden "
        "size + 1), by `seed`; or zeros. A "
        "reward model in model.path keeps its own head",
        one_of("random", "zeros"),
    )
    data: PreferenceConfig | None = setting(None, "the pairs of responses to learn from")
    eval: HeldOutPairsConfig | None = setting(
        None,
        "held-out pairs with the same columns, scored before the first and after the last step; "
        "null: none",
    )
    every: int = setting(
        0, "steps between further evaluations of the held-out pairs; 0: none", at_least(0)
    )
    output: str = setting(
        "${run_dir}/reward_model/hf",
        "folder of the HF checkpoint that megarl reward-model makes",
        path=OUTPUT,
    )


TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")


@dataclass
class CheckpointConfig:
    every: int = setting(10, "steps between checkpoints; 0: only at the end", at_least(0))
    keep: int = setting(2, "how many newest checkpoints are kept", at_least(1))
    keep_best: str | None = setting(
        None,
        "a held-out score by its key in metrics.jsonl, such as eval/pass@1. The checkpoint with "
        "the highest score is kept beside the"
        " newest; megarl export and megarl eval take it with --best. eval.every must be a "
        "multiple of checkpoint.every; null: none",
    )
    beside: bool = setting(
        True,
        "write checkpoints while training goes on, from a copy in the hosts' memory: 12 bytes a "
        "parameter, over all trainer ranks. A"
        " checkpoint is complete at the end of the step in which its last byte was written. "
        "false: training waits instead",
    )
    hf_every: int = setting(
        0,
        "steps between exports of the weights as a Hugging Face checkpoint "
        "(run_dir/hf/step_000010, …), all of which are kept; 0: none",
        at_least(0),
    )
    accept_changed_data: bool = setting(
        False,
        "a resumed run, or megarl sft, goes on although rows, tokenizer, chat template, own code, "
        "rollout.args or a judge's settings have "
        "changed since it began. It keeps its place in the order of rows, so some prompts may be "
        "trained twice or never",
    )
    on_termination_s: float = setting(
        120.0,
        "on SIGTERM (Slurm's preemption), SIGUSR1, SIGUSR2 and SIGHUP, time to finish and save "
        "the running step; then the run is ended "
        "regardless",
        seconds(),
    )


@dataclass
class ObserveConfig:
    probe_every: int = setting(
        10,
        "steps between probes that compare the log-probs of trainer and generator; 0: none",
        at_least(0),
    )
    probe_limit: float | None = setting(
        None,
        "the run warns if the mean log-prob difference of a probe is larger. It ends if the "
        "difference is more than ten times as "
        "large, or not finite. null: 0.001 in float32, 0.05 in bfloat16, 0.15 with engines in "
        "fp8; twice that for a mixture of "
        "experts without trainer.routing_replay",
        above(0),
    )
    rollouts_per_step: int = setting(
        4,
        "groups of each step that are written to rollouts/, with the numbers of each trained token",
        at_least(0),
    )
    trackers: list[str] = field(
        default_factory=lambda: ["tensorboard"],
        metadata={
            "meaning": "experiment trackers that are given every row of metrics.jsonl "
            "(docs/own_run.md); all but tensorboard are extras",
            "limit": Limit(
                f"a list of {', '.join(TRACKERS)}, each at most once",
                lambda names: set(names) <= set(TRACKERS) and len(set(names)) == len(names),
                names=TRACKERS,
            ),
        },
    )
    project: str = setting(
        "megarl", "the trackers' project (mlflow: experiment) that the run is put in"
    )
    entity: str | None = setting(
        None,
        "owner of the project at wandb (entity) and swanlab (workspace); null: the user who is "
        "logged in",
    )
    name: str | None = setting(None, "the run's name at the trackers; null: run_dir")
    tags: list[str] = field(
        default_factory=list, metadata={"meaning": "the run's tags at wandb, swanlab and mlflow"}
    )


@dataclass
class LaunchConfig:
    ranks_per_node: int | None = setting(
        None,
        "trainer or engine ranks on one node; null: its number of GPUs, or without GPUs the "
        "smallest number with which all ranks fit",
        at_least(1),
    )
    interface: str | None = setting(
        None,
        "network interface by which nodes reach each other, a name or a pattern such as ib*; "
        "null: the default route's",
    )
    compile_cache: str | None = setting(
        None,
        "folder for the kernels that engines and trainers compile; each host has a subfolder. "
        "Compiling DeepGEMM's takes 10 to 20 "
        "minutes at the first start. null: ~/.cache/megarl/compiled",
        path=OUTPUT,
    )


@dataclass
class TimeoutConfig:
    """Deadlines in seconds. A wait that expires says who waited for whom, and for what."""

    rendezvous_s: float = setting(
        600.0, "until all processes of the run are up and connected", seconds()
    )
    collective_s: float = setting(
        1800.0,
        "one collective of the trainer ranks. It also bounds how long one rank may load, save, or "
        "wait for engines while the others "
        "wait for it",
        seconds(),
    )
    rollouts_s: float = setting(
        3600.0,
        "the trainer's wait for a batch or for an evaluation, and the generator's for room in the "
        "channel",
        seconds(),
    )
    weights_s: float = setting(600.0, "any part of a weight update", seconds())
    request_s: float = setting(3600.0, "a generation request", seconds())
    samples_s: float = setting(
        3600.0, "all samples of a prompt, including turns, tools and scores", seconds()
    )
    trackers_s: float = setting(
        60.0, "the trackers (observe.trackers) to finish, when the run has ended", seconds()
    )
    silence_s: float = setting(
        60.0, "how long a node's launcher may be silent before the run ends", seconds()
    )


@dataclass
class ClusterConfig:
    """The machines of a run."""

    gpu: str = setting(
        "H100",
        "kind of GPU; cpu: a core, for runs without GPUs, also on nodes with GPUs that PyTorch "
        "cannot use",
        one_of("RTX4090", "L40S", "A100", "H100", "H200", "B200", "B300", "GB200", "GB300", "cpu"),
    )
    share_gpus: bool | None = setting(
        None,
        "whether the policy's engines are on the trainer's GPUs, both at the same time and in "
        "processes of their own (docs/gpu.md). "
        "Engines then get the memory that megarl plan leaves them; null: if a run of one trainer "
        "rank and one engine rank has one GPU",
    )


@dataclass
class PlanConfig:
    """What megarl plan assumes. Runs ignore it."""

    prompt_tokens: int | None = setting(
        None,
        "mean length of a prompt; null: 256. A dry run takes that of data.train instead, where it "
        "can read it",
        at_least(1),
    )
    response_tokens: int | None = setting(
        None, "mean length of a response; null: half of rollout.max_tokens", at_least(1)
    )
    dropped_share: float | None = setting(
        None,
        "share of the generated prompts that rollout.dynamic_sampling drops; null: unknown, and "
        "not counted",
        between(0, 1, open_high=True),
    )
    accept_length: float | None = setting(
        None,
        "tokens that a pass of an engine yields with generator.speculative "
        "(speculative/accept_length); null: unknown, drafts save nothing",
        at_least(1),
    )
    checkpoint_gb_s: float = setting(
        2.0, "GB of a checkpoint that each trainer node writes a second", between(0.001, 10000)
    )
    simulation: SimulationConfig = field(default_factory=SimulationConfig)

    @property
    def mean_prompt_tokens(self) -> int:
        return self.prompt_tokens or 256


# in absolute value: above it the trainer's float32 cannot tell rewards apart that differ by 0.1
MAX_REWARD = 1e6
STRICT = "strict"  # weights.audit
UNSCORED = "none"  # reward.name
IGNORE = "ignore"
KEEP = "keep"
TRAIN = "train"  # trainer.mtp


@dataclass
class ModelConfig:
    path: str = setting(
        MISSING,
        "HF checkpoint: local folder or hub name. A run begins with these weights, or with their "
        "warm start in sft.output if it exists",
        path=INPUT,
    )
    spec: str | None = setting(
        None,
        "config.json to plan with when the checkpoint is not on this machine; null: the one in "
        "`path`",
        path=INPUT,
    )
    tokenizer: str | None = setting(
        None, "folder or hub name of the tokenizer; null: the one in `path`", path=INPUT
    )
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    family: str | None = setting(
        None,
        "a module of your own that knows the tensors of another architecture; null: one of "
        "megarl/models",
        path=MODULE,
    )
    dtype: str = setting(
        "bfloat16",
        "dtype of the trainer's parameters and of weights on the wire",
        one_of("float32", "bfloat16"),
    )
    random_init: bool = setting(
        False, "megarl sft starts from random weights; `path` then only needs config and tokenizer"
    )


@dataclass
class TrainerConfig:
    tp: int = setting(
        1,
        "tensor parallel size: divides the model's key-value heads, or is a multiple of them",
        at_least(1),
    )
    pp: int = setting(1, "pipeline parallel size", at_least(1))
    vpp: int = setting(1, "virtual pipeline stages per rank", at_least(1))
    cp: int = setting(1, "context parallel size", at_least(1))
    ep: int = setting(1, "expert parallel size", at_least(1))
    etp: int = setting(1, "tensor parallel size inside an expert", at_least(1))
    dp: int = setting(1, "data parallel size", at_least(1))
    zero: int = setting(
        1,
        "0: plain data parallel; 1: distributed optimizer, whose state is split over the "
        "data-parallel ranks; 3: weights and gradients are split too (PyTorch's FSDP2), and "
        "gathered layer by layer",
        one_of(0, 1, 3),
    )
    first_stage_layers: int | None = setting(
        None, "layers of the first pipeline stage; null: as many as the others", at_least(1)
    )
    last_stage_layers: int | None = setting(
        None, "layers of the last pipeline stage; null: as many as the others", at_least(1)
    )
    local_layers: bool = setting(
        False,
        "on GPUs without Transformer Engine: train with Megatron's own layers, which are much "
        "slower, instead of refusing to start",
    )
    sequence_parallel: bool = setting(
        False, "split norms and residuals along the sequence over the tp ranks"
    )
    recompute: bool = setting(
        False, "recompute activations in the backward pass instead of keeping them"
    )
    routing_replay: bool | None = setting(
        None,
        "mixture of experts: in training and scoring, each token goes to the experts that the "
        "engine chose when it generated the "
        "token (R3; docs/algorithms.md), not to those of the trainer's own router. null: true in "
        "megarl train, unless async.capacity=0 or drafts are ngram",
    )
    mtp: str = setting(
        IGNORE,
        "the model's layer for multi-token prediction (docs/multi-token.md). ignore: it is not "
        "loaded; keep: it is loaded, and is in "
        "checkpoints and exports as it was; train: it learns beside the policy, which it does not "
        "change",
        one_of(IGNORE, KEEP, TRAIN),
    )
    minibatches: int = setting(
        1,
        "optimizer steps in one pass over a batch, which is split by prompts; must divide "
        "rollout.prompts_per_step (docs/algorithms.md)",
        at_least(1),
    )
    epochs: int = setting(
        1,
        "passes over each batch of rollouts, with its prompts in another order each time",
        at_least(1),
    )
    max_tokens_per_microbatch: int = setting(
        8192, "most tokens of a microbatch, which is what a rank computes at a time", at_least(1)
    )
    logprob_chunk_tokens: int = setting(
        2048,
        "tokens whose logits are in memory at a time; fewer take less memory, and use a GPU less "
        "well",
        at_least(1),
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "further settings of the model, by the names of Megatron's TransformerConfig"
        },
    )
    ddp: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "further settings of data parallelism, by the names of Megatron's "
            "DistributedDataParallelConfig"
        },
    )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps on one batch of rollouts."""
        return self.minibatches * self.epochs


FP8_FORMATS = ("fp8_block", "fp8_channel", "fp8_tensor")
UNQUANTISED = "none"  # generator.groups.NAME.quantization


@dataclass
class GroupConfig:
    """Engines that differ from the others of the run; null: as the generator's."""

    engines: int | None = setting(
        None,
        "how many of them; null: generator.engines, and so for all keys of a group",
        at_least(1),
    )
    tp: int | None = setting(None, "tensor parallel size of an engine", at_least(1))
    ep: int | None = setting(None, "expert parallel size of an engine", at_least(1))
    dp_attention: int | None = setting(None, "replicas of attention inside an engine", at_least(1))
    quantization: str | None = setting(
        None,
        f"format of the engines' linear layers, as generator.quantization; {UNQUANTISED}: "
        "model.dtype",
        one_of(UNQUANTISED, *FP8_FORMATS),
    )
    max_concurrency: int | None = setting(
        None,
        "requests in flight per engine. Rollouts go to the groups in proportion to it, so it is "
        "also a group's share",
        at_least(1),
    )
    kv_cache_tokens: int | None = setting(None, "tokens of an engine's KV cache", at_least(1))
    mem_fraction: float | None = setting(
        None,
        "fraction of GPU memory for weights and KV cache together",
        between(0, 1, open_low=True),
    )
    server_args: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "further arguments of these engines, in addition to generator.server_args"
        },
    )


@dataclass
class GeneratorConfig:
    engines: int = setting(1, "SGLang servers", at_least(1))
    tp: int = setting(1, "tensor parallel size of an engine", at_least(1))
    ep: int = setting(1, "expert parallel size of an engine", at_least(1))
    dp_attention: int = setting(
        1,
        "replicas of attention inside an engine, for mixtures of experts: SGLang's attn_dp_size",
        at_least(1),
    )
    quantization: str | None = setting(
        None,
        "keep the engines' linear layers in e4m3, with a scale per 128x128 block, output channel "
        "or tensor, and all else in "
        "bfloat16; null: model.dtype",
        one_of(*FP8_FORMATS),
    )
    max_concurrency: int = setting(256, "requests in flight per engine", at_least(1))
    kv_cache_tokens: int | None = setting(
        None,
        "tokens of an engine's KV cache, over all replicas of attention; null: what mem_fraction "
        "leaves",
        at_least(1),
    )
    mem_fraction: float = setting(
        0.85,
        "fraction of GPU memory for weights and KV cache together",
        between(0, 1, open_low=True),
    )
    startup_timeout_s: float = setting(900.0, "time for an engine to start and answer", seconds())
    on_failure: str = setting(
        "restart",
        "what happens when an engine dies or hangs. restart: it is started again, gets the "
        "current weights, and serves again; drop: the "
        "other engines do its work; fail: the run ends. With restart and drop its unfinished "
        "requests go to other engines. If weights go "
        "by gloo or nccl (weights.transport), the run always ends at the next update",
        one_of("restart", "drop", "fail"),
    )
    max_restarts: int = setting(
        3,
        "restarts of one engine; the run ends if it dies once more, or exits by itself before it "
        "has ever answered",
        at_least(0),
    )
    health_s: float = setting(
        60.0, "an engine that gives no sign of life for this long counts as hanging", seconds(5)
    )
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    server_args: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "further arguments of the engines, by the names of SGLang's ServerArgs"
        },
    )
    groups: dict[str, GroupConfig | None] = field(
        default_factory=dict,
        metadata={
            "meaning": "engines of several shapes, by the names of their groups; empty: all "
            "engines are alike. Each group has the keys "
            "above, unless it sets its own (docs/cluster.md); NAME=null removes one"
        },
    )

    @property
    def topology(self) -> GeneratorTopology:
        """Of engines that are all alike."""
        return GeneratorTopology(self.engines, self.tp, self.ep, self.dp_attention)

    @property
    def has_groups(self) -> bool:
        return any(self.groups.values())

    @property
    def shapes(self) -> dict[str, GeneratorConfig]:
        """The settings of each group of engines, by its name.

        Without groups all engines are one, whose name is empty.
        """
        shapes = {}
        for name, group in self.groups.items():
            if group is not None:
                shapes[name] = self._with_group(group)
        return shapes or {"": replace(self, groups={})}

    def _with_group(self, group: GroupConfig) -> GeneratorConfig:
        settings = {}
        for group_field in fields(group):
            value = getattr(group, group_field.name)
            if value is not None:
                settings[group_field.name] = value
        if settings.get("quantization") == UNQUANTISED:
            settings["quantization"] = None
        settings["server_args"] = self.server_args | group.server_args
        settings["groups"] = {}
        return replace(self, **settings)


MASK = "mask"  # value of async.too_old


@dataclass
class AsyncConfig:
    capacity: int | None = setting(
        1,
        "capacity of the rollouts channel in steps. 0: synchronous; 1: one step behind; K: a "
        "bounded queue; null: unbounded",
        at_least(0),
    )
    max_staleness: int | None = setting(
        None,
        "how many weight versions the oldest token of a group may be behind when the group is "
        "used. Older groups are rejected and "
        "generated again, and no rollout begins further ahead; null: no limit beyond capacity's",
        at_least(0),
    )
    max_in_flight: int | None = setting(
        None,
        "most prompts in flight at a time, over all of generator.engines; null: "
        "rollout.prompts_per_step",
        at_least(1),
    )
    partial_rollout: str = setting(
        "in_flight",
        "what a weight update does to running requests. block: waits for rollouts to finish, and "
        "begins none; in_flight: pauses requests "
        "and keeps their KV cache; retract: pauses them and computes their KV cache anew; abort: "
        "begins them again from the prompt, once; "
        "resume: cuts them and continues from prompt and prefix",
        one_of("block", "in_flight", "retract", "abort", "resume"),
    )
    chunk_tokens: int | None = setting(
        None,
        "with partial_rollout=resume, the most tokens of one request: longer responses are cut "
        "into several requests; null: a quarter of "
        "rollout.max_tokens",
        at_least(1),
    )
    too_old: str = setting(
        "reject",
        "what happens to a group with tokens older than max_staleness. reject: it is generated "
        "again; mask: its older tokens have no loss, and it is generated again only if all are",
        one_of("reject", MASK),
    )
    idle: str = setting(
        "off",
        "what the side that would wait does instead. updates: the trainer makes further passes over "
        "its batch until the next one is there, as long as the effective sample size of pi/mu "
        "stays above agreement/ess_limit; samples: the generator samples more responses to a "
        "prompt until newer weights come, and sends those whose rewards vary most",
        one_of("off", "updates", "samples"),
    )
    max_updates: int | None = setting(
        None,
        "with idle=updates, most passes over a batch, planned ones included; null: twice "
        "trainer.epochs",
        at_least(1),
    )
    max_samples: int | None = setting(
        None,
        "with idle=samples, most responses to a prompt, of which rollout.n are trained on; null: "
        "twice rollout.n",
        at_least(1),
    )
    keep_kv_cache: bool = setting(
        False,
        "with partial_rollout=in_flight, later turns of an episode reuse the keys and values of its "
        "earlier turns across weight updates, instead of computing the whole conversation again",
    )


_REWARDS = one_of(
    "math",
    "last_number",
    "choice",
    "ifeval",
    "code",
    UNSCORED,
    or_like=rf"{IMPORT_PATH}|roles\.[\w-]+",
    written="package.module:function, ./file.py:function, roles.NAME",
)


@dataclass
class PartConfig:
    name: str = setting(MISSING, "how this part is scored, as reward.name", _REWARDS, MODULE)
    weight: float = setting(
        1.0, "what the part's score is multiplied by in the sum", between(-MAX_REWARD, MAX_REWARD)
    )
    failed_score: float | None = setting(
        None,
        "the part's score if scoring failed; null: reward.failed_score",
        between(-MAX_REWARD, MAX_REWARD),
    )


@dataclass
class CodeConfig:
    test_timeout_s: float = setting(6.0, "time limit of a program on one test", seconds())
    timeout_s: float = setting(120.0, "time limit of a program on all tests together", seconds())
    memory_mib: int = setting(
        2048, "memory limit of a program, all its processes together", at_least(256)
    )


@dataclass
class RewardConfig:
    name: str = setting(
        "math",
        "how a response is scored. math: 1 if its final answer equals the reference "
        "mathematically, else 0; last_number: 1 if the last "
        "number of a list does; choice: 1 if it chooses the letter A to J that is the reference; "
        "ifeval: 1 if it follows all instructions "
        "of the reference; code: 1 if its program passes all tests of the reference "
        "(docs/evaluation.md); none: nothing is scored, for a "
        "run that learns from teachers alone; a function of your own (docs/extending.md); or a "
        "model of `roles` (docs/rewards.md)",
        _REWARDS,
        MODULE,
    )
    parts: dict[str, PartConfig | None] = field(
        default_factory=dict,
        metadata={
            "meaning": "the reward is the weighted sum of these, and `name` does not count; "
            "NAME=null removes one"
        },
    )
    workers: int | None = setting(
        None,
        "processes that score responses; null: one for every four cores of the generator's host, "
        "at least 1 and at most 32",
        at_least(1),
    )
    timeout_s: float = setting(5.0, "time limit of scoring a response", seconds())
    memory_mib: int = setting(
        1024,
        "memory limit of a worker process, beyond what it has after its imports",
        at_least(256),
    )
    code: CodeConfig = field(default_factory=CodeConfig)
    failed_score: float = setting(
        0.0,
        "score of a response whose scoring failed: it took longer than timeout_s, raised "
        "ValueError, ran out of memory, or ended its"
        " process. The response stays in its group; if it were left out, breaking the verifier "
        "would cost nothing. If the worst "
        "score is not 0, set this to the worst score",
        between(-MAX_REWARD, MAX_REWARD),
    )
    max_failed_fraction: float = setting(
        0.5,
        "the run ends if more than this share of a step's or an evaluation's scores failed; 1: "
        "never",
        between(0, 1),
    )
    unfinished_penalty: float = setting(
        0.0,
        "in training, taken off the reward of a response that was cut at rollout.max_tokens",
        between(0, MAX_REWARD),
    )
    unfinished_score: float | None = setting(
        None,
        "in training, the reward of every response that was cut at rollout.max_tokens, whatever "
        "it scored; null: its score, less "
        "unfinished_penalty",
        between(-MAX_REWARD, MAX_REWARD),
    )
    overlong_tokens: int = setting(
        0,
        "in training, a response that ends within this many tokens of rollout.max_tokens loses "
        "reward: the longer, the more, up to "
        "overlong_penalty at full length (DAPO's soft overlong punishment); 0: none",
        at_least(0),
    )
    overlong_penalty: float = setting(1.0, "see overlong_tokens", between(0, MAX_REWARD))


_FOR_SOURCE = "for the prompts of this source; null: as in the section"


@dataclass
class SourceRewardConfig:
    """How the responses of one source are scored, where that differs from the section reward."""

    name: str | None = setting(
        None,
        f"as reward.name, {_FOR_SOURCE} reward. The run's reward.parts then do not count",
        _REWARDS,
        MODULE,
    )
    parts: dict[str, PartConfig | None] = field(
        default_factory=dict,
        metadata={
            "meaning": "as reward.parts, in place of the run's `name` and `parts`; NAME=null "
            "removes one"
        },
    )
    failed_score: float | None = setting(
        None, f"as reward.failed_score, {_FOR_SOURCE} reward", between(-MAX_REWARD, MAX_REWARD)
    )
    max_failed_fraction: float | None = setting(
        None, f"as reward.max_failed_fraction, {_FOR_SOURCE} reward", between(0, 1)
    )
    unfinished_penalty: float | None = setting(
        None, f"as reward.unfinished_penalty, {_FOR_SOURCE} reward", between(0, MAX_REWARD)
    )
    unfinished_score: float | None = setting(
        None, f"as reward.unfinished_score, {_FOR_SOURCE} reward", between(-MAX_REWARD, MAX_REWARD)
    )
    overlong_tokens: int | None = setting(
        None, f"as reward.overlong_tokens, {_FOR_SOURCE} reward", at_least(0)
    )
    overlong_penalty: float | None = setting(
        None, f"as reward.overlong_penalty, {_FOR_SOURCE} reward", between(0, MAX_REWARD)
    )


@dataclass
class SourceRolloutConfig:
    """How the prompts of one source become samples, where that differs from the section rollout."""

    name: str | None = setting(None, f"as rollout.name, {_FOR_SOURCE} rollout", _ROLLOUTS, MODULE)
    args: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "meaning": "keyword arguments of the source's rollout: those of its `name`, or without "
            "a name, arguments beside the run's rollout.args"
        },
    )
    max_tokens: int | None = setting(
        None,
        f"longest response in tokens, at most rollout.max_tokens, {_FOR_SOURCE} rollout",
        at_least(1),
    )
    stop: list[str] | None = setting(
        None, f"as rollout.stop, {_FOR_SOURCE} rollout; []: none", _STOP
    )
    max_failed_fraction: float | None = setting(
        None, f"as rollout.max_failed_fraction, {_FOR_SOURCE} rollout", between(0, 1)
    )


@dataclass
class SourceAlgorithmConfig:
    """How the policy learns from one source, where that differs from the section algorithm."""

    advantage: str | None = setting(
        None, f"as algorithm.advantage, {_FOR_SOURCE} algorithm", one_of(*_BASELINES)
    )
    mask_truncated: bool | None = setting(
        None, f"as algorithm.mask_truncated, {_FOR_SOURCE} algorithm"
    )


BEST_WORST = "best_worst"  # label.pairs
ALL_PAIRS = "all"


@dataclass
class LabelConfig:
    data: DatasetConfig | None = setting(None, "prompts to label; null: data.train")
    prompts: int | None = setting(
        None,
        "label only this many prompts, in the order in which a run would train on them; null: "
        "each row once",
        at_least(1),
    )
    held_out: int = setting(
        0,
        "this many prompts, the first ones, give held-out pairs: held_out.jsonl has them, for "
        "reward_model.eval.source",
        at_least(0),
    )
    n: int = setting(
        2, "responses that the policy samples to each prompt, as `rollout` says", at_least(0)
    )
    reference: bool = setting(
        False, "true: the row's reference answer is one more response to each prompt"
    )
    columns: list[str] = field(
        default_factory=list,
        metadata={
            "meaning": "columns with further responses: a text, or a list of texts; "
            "label.n=0 labels these alone"
        },
    )
    reward: str | None = setting(
        None, "how responses are scored, as reward.name; null: as in training", _REWARDS, MODULE
    )
    pairs: str = setting(
        BEST_WORST,
        "best_worst: one pair from each prompt, of its best and its worst response; all: every two "
        "of its responses. A pairwise judge then decides each pair by its comparisons of the two",
        one_of(BEST_WORST, ALL_PAIRS),
    )
    min_margin: float = setting(
        0.0,
        "least difference of a pair's scores; equal scores make no pair. By a pairwise judge's "
        "comparisons it is at most 1",
        at_least(0),
    )
    output: str = setting(
        "${run_dir}/label",
        "folder that megarl label writes pairs.jsonl to, for reward_model.data.source",
        path=OUTPUT,
    )


@dataclass
class WeightsConfig:
    transport: str = setting(
        "auto",
        "how weights reach the engines. auto: each pair of ranks takes the first that works of "
        "cuda_ipc or shared_memory (on one "
        "host), mooncake (RDMA with GPUs and InfiniBand, else TCP), nccl, gloo",
        one_of(
            "auto",
            "shared_memory",
            "cuda_ipc",
            "mooncake",
            "nccl",
            "gloo",
            or_like=IMPORT_PATH,
            written="package.module:Class, ./file.py:Class",
        ),
        MODULE,
    )
    relay: str = setting(
        "auto",
        "whether engines pass weights on to each other. auto: to other engines of the same host, "
        "so that weights reach a host over the "
        "network only once; engines: also to other hosts, as far as that shortens the update "
        "(docs/transports.md); off: no",
        one_of("auto", "engines", "off"),
    )
    audit: str = setting(
        STRICT,
        "on: after every update, hashes compare the engines' memory with what was sent. Memory "
        "that no update writes, such as rotary"
        " caches and tensors derived from weights, must not have changed. strict: also, before an "
        "update and at the end, "
        "hashes compare the memory with what the last update left; a run ends if engines may hold "
        "copies of old weights. off: no "
        "audit. true and false mean on and off",
        one_of("off", "on", STRICT, spelled={"true": "on", "false": "off"}),
    )

    delta: str = setting(
        "off",
        "auto: an update carries only what has changed since the last one, if that takes at most "
        "half of the bytes. Trainer ranks "
        "then keep what they sent last (docs/transports.md says when that pays). off: every "
        "update carries everything",
        one_of("off", "auto", spelled={"false": "off"}),
    )
    delta_refresh: int = setting(
        50,
        "with weights.delta=auto, one update in this many carries everything. If too much has "
        "changed, this many updates pass before"
        " changes are looked for again",
        at_least(1),
    )
    delta_shadow: str = setting(
        "host",
        "where trainer ranks on GPUs keep what they sent last. host: host memory, which the GPU "
        "reads over its host link; device: "
        "GPU memory. megarl plan counts either",
        one_of("host", "device"),
    )

    @property
    def audited(self) -> bool:
        return self.audit != "off"


GRADERS = {  # benchmark -> reward.name
    "math500": "math",
    "gsm8k": "math",
    "aime2024": "math",
    "aime2025": "math",
    "mmlu_pro": "choice",
    "gpqa": "choice",
    "ifeval": "ifeval",
    "livecodebench": "code",
}
OWN_PLACE = "benchmark"  # as source


_DATE = one_of(or_like=r"\d{4}-\d\d-\d\d", written="YYYY-MM-DD")


@dataclass
class SuiteConfig(DatasetConfig):
    """One more held-out set, optionally with its own sampling."""

    benchmark: str | None = setting(
        None,
        "a known benchmark, asked, graded and sampled in its usual way (docs/evaluation.md); "
        "prompt_key, answer_key and eval.reward then do not count; null: none",
        one_of(*GRADERS),
    )
    source: str = setting(
        OWN_PLACE,
        "where rows come from, as data.eval.source says; benchmark: from the benchmark's own "
        "place on the hub",
        path=INPUT,
    )
    since: str | None = setting(
        None,
        "livecodebench: only the problems of this date or later, such as 2024-08-01; null: all",
        _DATE,
    )
    until: str | None = setting(
        None, "livecodebench: only the problems of this date or earlier; null: all", _DATE
    )
    task: str | None = setting(
        None,
        "the name of a source in data.train.sources, whose rollout and reward this set has too; "
        "eval.reward then does not count. null: the run's own",
    )
    samples: int | None = setting(None, "samples per prompt; null: eval.samples", at_least(1))
    temperature: float | None = setting(
        None, "sampling temperature; null: eval.temperature", at_least(0)
    )
    top_p: float | None = setting(None, "as rollout.top_p; null: eval.top_p", _TOP_P)
    top_k: int | None = setting(None, "as rollout.top_k; null: eval.top_k", _TOP_K)
    min_p: float | None = setting(None, "as rollout.min_p; null: eval.min_p", _MIN_P)
    stop: list[str] | None = setting(None, "as rollout.stop; null: eval.stop", _STOP)
    max_tokens: int | None = setting(
        None, "longest response in tokens; null: eval.max_tokens", at_least(1)
    )


@dataclass
class EvalConfig:
    every: int = setting(
        0,
        "steps between evaluations inside a run; 0: only before the first and after the last step",
        at_least(0),
    )
    engines: int = setting(
        0,
        "further engines, with the generator's sizes, which evaluate while training goes on and "
        "serve no rollouts "
        "(docs/evaluation.md); 0: the generator's engines evaluate between two updates",
        at_least(0),
    )
    samples: int | None = setting(
        None,
        "samples per prompt, for avg@k, pass@k and maj@k (docs/evaluation.md); more than one "
        "needs a temperature; null: as a benchmark is published, else 1",
        at_least(1),
    )
    temperature: float | None = setting(
        None,
        "sampling temperature; 0: greedy; null: as a benchmark is published, else 0",
        at_least(0),
    )
    top_p: float | None = setting(
        None,
        "nucleus sampling; 1: off; null: as a benchmark is published, else rollout.top_p",
        _TOP_P,
    )
    top_k: int | None = setting(
        None,
        "sample from the k likeliest tokens; -1: off; null: off for a benchmark, else "
        "rollout.top_k",
        _TOP_K,
    )
    min_p: float | None = setting(
        None, "as rollout.min_p; 0: off; null: off for a benchmark, else rollout.min_p", _MIN_P
    )
    stop: list[str] | None = setting(None, "as rollout.stop; []: none; null: rollout.stop", _STOP)
    max_tokens: int | None = setting(
        None,
        "longest response in tokens; null: rollout.max_tokens, or a benchmark's published length "
        "if that is more",
        at_least(1),
    )
    limit: int | None = setting(
        None,
        "use only this many prompts of each held-out set, from the first on; null: all",
        at_least(1),
    )
    reward: str | None = setting(
        None, "how responses are scored, as reward.name; null: as in training", _REWARDS
    )
    win_rate: str | None = setting(
        None,
        "how each response is compared with the row's reference answer, as reward.name, or a "
        "pairwise judge of `roles`: the score win_rate, a tie being half a win; null: not",
        _REWARDS,
        MODULE,
    )
    suites: dict[str, SuiteConfig | None] = field(
        default_factory=dict,
        metadata={"meaning": "held-out sets besides data.eval, by name; NAME=null removes one"},
    )


@dataclass
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    roles: dict[str, RoleConfig | None] = field(
        default_factory=dict,
        metadata={"meaning": "models beside the policy, by name; NAME=null removes one"},
    )
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    label: LabelConfig = field(default_factory=LabelConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    max_steps: int = setting(
        100,
        "steps of the whole run. Each step trains on a batch and makes a version of the weights",
        at_least(1),
    )
    seed: int = setting(
        0,
        "seed of everything random in the run: initial weights, order of prompts, each sample "
        "(docs/asynchrony.md, section Repeating a "
        "run). For results equal to the last bit, see deterministic",
        between(0, 2**31 - 1),
    )
    deterministic: bool = setting(
        False,
        "engines compute a response in the same way whatever else they answer (SGLang's "
        "--enable-deterministic-inference). With "
        "async.capacity=0, two runs of one seed are then equal to the last bit on CPUs. It costs "
        "speed (docs/asynchrony.md)",
    )
    run_dir: str = setting(
        "runs/default",
        "folder that the run writes to; if missing, it is created, accessible to this user only. "
        "A run continues from its last checkpoint "
        "there",
        path=OUTPUT,
    )
