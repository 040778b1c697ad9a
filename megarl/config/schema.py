"""Every setting of a run, with its default, its limit and its meaning. The one place where a key is defined.

`async` is a Python keyword, so the section lives in the field `async_`; the loader maps the YAML key `async` to it.
docs/config.md is generated from here: `python -m megarl.config.reference > docs/config.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megarl.config.limits import Limit, above, at_least, between, each, one_of, seconds, setting
from megarl.config.operation import CheckpointConfig, ClusterConfig, LaunchConfig, ObserveConfig, PlanConfig, TimeoutConfig

MAX_REWARD = 1e6  # in absolute value: above it the trainer's float32 cannot tell rewards apart that differ by 0.1
STRICT = "strict"  # weights.audit
IMPORT_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


@dataclass
class ModelConfig:
    path: str = setting(
        MISSING,
        "HF checkpoint: a local folder or a hub name; a run begins with these weights, or with the warm start of them in sft.output",
    )
    spec: str | None = setting(None, "a config.json to plan with while the checkpoint is not at hand; null: the one in `path`")
    tokenizer: str | None = setting(None, "a local folder or a hub name; null: the one in `path`")
    family: str | None = setting(None, "a module of your own that knows the tensors of another architecture; null: one of megarl/models")
    dtype: str = setting("bfloat16", "type of the trainer's parameters, and of weights on the wire", one_of("float32", "bfloat16"))
    random_init: bool = setting(False, "megarl sft starts from random weights; `path` need hold config and tokenizer only")


@dataclass
class DatasetConfig:
    source: str = setting(MISSING, "synthetic:<task>, a .jsonl or .parquet file, or a hub name")
    split: str = setting("train", "which split of the source")
    subset: str | None = setting(None, 'hub configuration name, such as "main" of gsm8k')
    prompt_key: str = setting("question", "column of the prompt; of what is inside a column: column.field")
    answer_key: str = setting("answer", "column of the reference answer, as prompt_key")
    demonstration_key: str | None = setting(
        None, "column of the text that SFT learns, or of a list: texts of policy and environment in turn; null: answer_key"
    )
    prompt_template: str = setting(
        "{prompt}",
        "what the model sees, with {prompt} standing for the column; chat: by the model's own chat template, the column a user's message "
        "or a list of messages",
    )
    size: int | None = setting(None, "first rows only; null: all", at_least(1))


@dataclass
class DataConfig:
    train: DatasetConfig = field(default_factory=DatasetConfig)
    eval: DatasetConfig | None = setting(None, "the held-out set; null: none")
    shuffle: bool = setting(True, "shuffle the training prompts anew every epoch, by the seed")


@dataclass
class OptimizerConfig:
    lr: float = setting(1e-6, "peak learning rate (AdamW)", at_least(0))
    betas: tuple[float, float] = setting((0.9, 0.95), "decay rates of Adam's two moments", each(between(0, 1, open_high=True)))
    eps: float = setting(1e-8, "Adam's epsilon", above(0))
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least(0))
    warmup_steps: int = setting(0, "steps of linear warm-up", at_least(0))
    schedule: str = setting("constant", "learning rate after the warm-up", one_of("constant", "cosine"))
    min_lr_ratio: float = setting(0.1, "cosine ends at lr * min_lr_ratio", between(0, 1))
    clip_grad: float = setting(1.0, "largest global gradient norm; 0: no clipping", at_least(0))


@dataclass
class TrainerConfig:
    tp: int = setting(1, "tensor parallel size", at_least(1))
    pp: int = setting(1, "pipeline parallel size", at_least(1))
    vpp: int = setting(1, "virtual pipeline stages per rank", at_least(1))
    cp: int = setting(1, "context parallel size", at_least(1))
    ep: int = setting(1, "expert parallel size", at_least(1))
    etp: int = setting(1, "tensor parallel size inside an expert", at_least(1))
    dp: int = setting(1, "data parallel size", at_least(1))
    zero: int = setting(
        1,
        "0: plain data parallel; 1: distributed optimizer, whose state is split over the data-parallel ranks",
        one_of(0, 1),
    )
    first_stage_layers: int | None = setting(None, "layers of the first pipeline stage; null: as many as the others", at_least(1))
    last_stage_layers: int | None = setting(None, "layers of the last pipeline stage; null: as many as the others", at_least(1))
    sequence_parallel: bool = setting(False, "split norms and residuals along the sequence over the tp ranks")
    recompute: bool = setting(False, "recompute activations in the backward pass instead of keeping them")
    routing_replay: bool = setting(
        False,
        "mixture of experts: each token goes to the experts that the engine chose when it generated (R3; docs/algorithms.md), in training "
        "and in scoring, instead of those that the trainer's router would choose",
    )
    max_tokens_per_microbatch: int = setting(8192, "token budget of a microbatch", at_least(1))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class GeneratorConfig:
    engines: int = setting(1, "SGLang servers", at_least(1))
    tp: int = setting(1, "tensor parallel size of an engine", at_least(1))
    ep: int = setting(1, "expert parallel size of an engine", at_least(1))
    dp_attention: int = setting(
        1, "replicas of attention inside an engine of a mixture of experts: SGLang's dp_size with enable_dp_attention", at_least(1)
    )
    quantization: str | None = setting(
        None,
        "weights of the engines' linear layers: e4m3 with a scale per 128x128 block, per output channel, or per tensor, all else in "
        "bfloat16; null: model.dtype",
        one_of("fp8_block", "fp8_channel", "fp8_tensor"),
    )
    max_concurrency: int = setting(256, "requests in flight per engine", at_least(1))
    kv_cache_tokens: int | None = setting(
        None, "size of an engine's KV cache, over all replicas of attention; null: SGLang decides from free memory", at_least(1)
    )
    mem_fraction: float = setting(0.85, "of GPU memory, weights and KV cache together", between(0, 1, open_low=True))
    startup_timeout_s: float = setting(900.0, "until an engine answers", seconds())
    on_failure: str = setting(
        "restart",
        "when an engine dies or hangs; restart: it is started again, given the current weights, and serves again; drop: the others do "
        "its work; fail: the run ends. Its unfinished requests go to others. Where weights go by gloo or nccl (weights.transport), the "
        "run ends in any case, at the next update",
        one_of("restart", "drop", "fail"),
    )
    max_restarts: int = setting(
        3, "of one engine; when it dies once more, or ends of itself before it has ever answered, the run ends", at_least(0)
    )
    health_s: float = setting(60.0, "an engine that shows no sign of life for so long hangs", seconds(5))
    server_args: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "more arguments of the engines, by the names of SGLang's ServerArgs"}
    )


@dataclass
class AsyncConfig:
    capacity: int | None = setting(
        1, "of the rollouts channel, in steps: 0 synchronous, 1 one step behind, K a bounded queue; null: unbounded", at_least(0)
    )
    max_staleness: int | None = setting(
        None,
        "most optimizer steps that the oldest token of a group may be behind when the group is used; "
        "older ones are rejected and generated again, and nothing is begun further ahead; null: no limit of its own",
        at_least(0),
    )
    max_in_flight: int | None = setting(None, "prompts whose rollouts run at the same time; null: rollout.prompts_per_step", at_least(1))
    partial_rollout: str = setting(
        "block",
        "what a weight update does to what is running; block: waits for rollouts to finish, and begins none; in_flight: pauses "
        "requests in place, keeping their KV cache; retract: computes it anew; abort: begins requests again from the prompt, once; "
        "resume: cuts them where they are, and continues from prompt and prefix",
        one_of("block", "in_flight", "retract", "abort", "resume"),
    )
    chunk_tokens: int | None = setting(
        None,
        "with partial_rollout=resume, most tokens of one request: longer responses are cut there, too; null: a quarter of "
        "rollout.max_tokens",
        at_least(1),
    )


@dataclass
class AlgorithmConfig:
    name: str = setting(
        "aipo",
        "docs/algorithms.md has them",
        one_of("aipo", "grpo", "gspo", "icepop", "topr", "reinforce", or_like=IMPORT_PATH, written="package.module:rule"),
    )
    rho: float | None = setting(
        None,
        "upper bound of the importance ratio; null: the algorithm's own, 4 for aipo, where 2 to 10 works (LlamaRL, section 6)",
        above(0),
    )
    rho_min: float | None = setting(None, "its lower bound; null: the algorithm's own, none for aipo", at_least(0))
    advantage: str | None = setting(
        None,
        "mean: the reward less the mean of the prompt's samples; normalized: that, over their standard deviation; "
        "leave_one_out: the reward less the mean of the other samples; null: the algorithm's own",
        one_of("mean", "normalized", "leave_one_out"),
    )
    loss_mean: str | None = setting(
        None,
        "what counts the same: each token of a batch, or each response; null: the algorithm's own, token for aipo",
        one_of("token", "sequence"),
    )
    kl_coef: float = setting(0.0, "weight of the KL to the frozen initial policy; 0 holds no reference model", at_least(0))
    skip_zero_advantage: bool = setting(True, "spend no training time on groups whose rewards are all equal; same gradient")


@dataclass
class RolloutConfig:
    name: str = setting(
        "single_turn",
        "how a prompt becomes samples; single_turn: one completion each; tool_calls: turns with a tool (docs/environments.md)",
        one_of("single_turn", "tool_calls", or_like=IMPORT_PATH, written="package.module:function"),
    )
    args: dict[str, Any] = field(default_factory=dict, metadata={"meaning": "keyword arguments of the rollout that `name` names"})
    prompts_per_step: int = setting(32, "prompts per optimizer step", at_least(1))
    n: int = setting(4, "samples per prompt", at_least(1))
    max_tokens: int = setting(1024, "longest response, in tokens, those of an environment included", at_least(1))
    temperature: float = setting(1.0, "sampling temperature", above(0))
    top_p: float = setting(1.0, "nucleus sampling; 1: off", between(0, 1, open_low=True))
    top_k: int = setting(-1, "sample among the k likeliest tokens; -1: off", Limit("-1, or at least 1", lambda k: k == -1 or k >= 1))
    stop: list[str] = field(
        default_factory=list,
        metadata={
            "meaning": "texts that end a response, or a turn of it, beside end-of-text; the text belongs to the response, and is learned",
            "limit": Limit("at most 32 texts, none empty", lambda texts: len(texts) <= 32 and all(texts)),
        },
    )
    tool_workers: int = setting(1, "processes for tools that compute; started when the first one is called", at_least(1))
    tool_timeout_s: float = setting(5.0, "per call of a tool", seconds())
    tool_memory_mib: int = setting(1024, "per tool process", at_least(256))


@dataclass
class RewardConfig:
    name: str = setting(
        "math",
        "what a response is worth; math: 1 if its final answer equals the reference as mathematics; last_number: 1 if the last number "
        "of a list does; or a function of your own (docs/own_run.md)",
        one_of("math", "last_number", or_like=IMPORT_PATH, written="package.module:function"),
    )
    workers: int = setting(1, "processes that verify", at_least(1))
    timeout_s: float = setting(5.0, "per answer", seconds())
    memory_mib: int = setting(1024, "per worker process", at_least(256))
    failed_score: float = setting(
        0.0,
        "what a response gets whose verification failed: it took longer than timeout_s, raised ValueError, ran out of memory, or ended "
        "its process. It stays in its group, since left out a response that breaks the verifier would cost the policy nothing; set it to "
        "the worst score, where that is not 0",
        between(-MAX_REWARD, MAX_REWARD),
    )
    max_failed_fraction: float = setting(
        0.5, "the run ends where a larger share of a step's scores, or of an evaluation's, failed; 1: never", between(0, 1)
    )


@dataclass
class WeightsConfig:
    transport: str = setting(
        "auto",
        "how weights reach the engines; auto: chosen for each pair of ranks: cuda_ipc or shared_memory on one host, else "
        "mooncake (RDMA with GPUs and InfiniBand, else TCP), nccl, gloo: the first that works",
        one_of("auto", "shared_memory", "cuda_ipc", "mooncake", "nccl", "gloo", or_like=IMPORT_PATH, written="package.module:Class"),
    )
    relay: str = setting(
        "auto",
        "weights that engines pass on; auto: where a host has several engines, what comes over the network comes once; engines: from any "
        "engine to any other, as far as that shortens the update (docs/transports.md); off: none",
        one_of("auto", "engines", "off"),
    )
    audit: str = setting(
        STRICT,
        "on: after every update, hashes of what was sent are compared with what is in the engines' memory, and what no update writes there "
        "(rotary caches, what is made of weights) with what it was; strict: what is about to be overwritten, too, with what the last "
        "update left; off: neither. true and false are on and off",
        one_of("off", "on", STRICT, spelled={"true": "on", "false": "off"}),
    )

    @property
    def audited(self) -> bool:
        return self.audit != "off"


@dataclass
class SuiteConfig(DatasetConfig):
    """One more held-out set, optionally with its own sampling."""

    samples: int | None = setting(None, "samples per prompt; null: eval.samples", at_least(1))
    temperature: float | None = setting(None, "of their sampling; null: eval.temperature", at_least(0))
    max_tokens: int | None = setting(None, "longest response, in tokens; null: eval.max_tokens", at_least(1))


@dataclass
class EvalConfig:
    every: int = setting(0, "steps between evaluations inside a run; 0: only before the first and after the last step", at_least(0))
    samples: int = setting(1, "samples per prompt, for avg@k and pass@k (docs/own_run.md); more than one need a temperature", at_least(1))
    temperature: float = setting(0.0, "sampling temperature; 0: greedy", at_least(0))
    max_tokens: int | None = setting(None, "longest response, in tokens; null: rollout.max_tokens", at_least(1))
    limit: int | None = setting(None, "first prompts of each held-out set only; null: all", at_least(1))
    suites: dict[str, SuiteConfig | None] = field(
        default_factory=dict, metadata={"meaning": "more held-out sets beside data.eval, by name; NAME=null: not this one"}
    )


@dataclass
class SftConfig:
    steps: int = setting(0, "optimizer steps of megarl sft", at_least(0))
    tp: int | None = setting(None, "tensor parallel size of the warm start; null: trainer.tp, or 1 where sft sets another", at_least(1))
    pp: int | None = setting(None, "pipeline parallel size of the warm start; null: trainer.pp, or 1 where sft sets another", at_least(1))
    dp: int | None = setting(None, "data parallel size of the warm start; null: trainer.dp, or 1 where sft sets another", at_least(1))
    batch_size: int = setting(128, "sequences per optimizer step", at_least(1))
    max_tokens_per_microbatch: int | None = setting(
        None, "token budget of a microbatch; null: trainer.max_tokens_per_microbatch", at_least(1)
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DatasetConfig | None = setting(None, "demonstrations; null: data.train")
    output: str = setting(
        "${run_dir}/sft/hf",
        "folder of the HF checkpoint that megarl sft makes. Where there is one of the same model.path, megarl train and megarl eval begin "
        "with it; a run that goes on keeps to what it began with",
    )


@dataclass
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    max_steps: int = setting(100, "optimizer steps of the whole run", at_least(1))
    seed: int = setting(0, "of everything random in the run", between(0, 2**31 - 1))
    run_dir: str = setting(
        "runs/default",
        "where the run writes; made for this user alone, unless it is there. A run that finds its checkpoints there goes on from the last",
    )
