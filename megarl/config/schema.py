"""Every setting of a run, with its default, its limit and its meaning. The one place where a key is defined.

`async` is a Python keyword, so the section lives in the field `async_`; the loader maps the YAML key `async` to it.
docs/config.md is generated from here: `python -m megarl.config.reference > docs/config.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.data import DataConfig, DatasetConfig
from megarl.config.limits import IMPORT_PATH, INPUT, MODULE, OUTPUT, at_least, between, one_of, seconds, setting
from megarl.config.lora import LoraConfig
from megarl.config.operation import CheckpointConfig, ClusterConfig, LaunchConfig, ObserveConfig, PlanConfig, TimeoutConfig
from megarl.config.roles import RoleConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.training import CriticConfig, OptimizerConfig, RewardModelConfig, SftConfig

MAX_REWARD = 1e6  # in absolute value: above it the trainer's float32 cannot tell rewards apart that differ by 0.1
STRICT = "strict"  # weights.audit
UNSCORED = "none"  # reward.name


@dataclass
class ModelConfig:
    path: str = setting(
        MISSING,
        "HF checkpoint: local folder or hub name. A run begins with these weights, or with their warm start in sft.output if it exists",
        path=INPUT,
    )
    spec: str | None = setting(
        None, "config.json to plan with when the checkpoint is not on this machine; null: the one in `path`", path=INPUT
    )
    tokenizer: str | None = setting(None, "folder or hub name of the tokenizer; null: the one in `path`", path=INPUT)
    family: str | None = setting(
        None, "a module of your own that knows the tensors of another architecture; null: one of megarl/models", path=MODULE
    )
    dtype: str = setting("bfloat16", "dtype of the trainer's parameters and of weights on the wire", one_of("float32", "bfloat16"))
    random_init: bool = setting(False, "megarl sft starts from random weights; `path` then only needs config and tokenizer")


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
    local_layers: bool = setting(
        False, "on GPUs without Transformer Engine: train with Megatron's own layers, which are much slower, instead of refusing to start"
    )
    sequence_parallel: bool = setting(False, "split norms and residuals along the sequence over the tp ranks")
    recompute: bool = setting(False, "recompute activations in the backward pass instead of keeping them")
    routing_replay: bool = setting(
        False,
        "mixture of experts: the trainer sends each token to the experts that the engine chose when it generated the token (R3; "
        "docs/algorithms.md), in training and in scoring, not to those that its own router would choose",
    )
    minibatches: int = setting(
        1,
        "optimizer steps that each pass over a batch of rollouts is cut into, by prompts; it must divide rollout.prompts_per_step "
        "(docs/algorithms.md)",
        at_least(1),
    )
    epochs: int = setting(1, "passes over each batch of rollouts, with its prompts in another order each time", at_least(1))
    max_tokens_per_microbatch: int = setting(8192, "token budget of a microbatch, which is what a rank computes at a time", at_least(1))
    logprob_chunk_tokens: int = setting(
        2048, "tokens whose logits are held at a time: less takes less memory, and uses a GPU less well", at_least(1)
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "further settings of the model, by the names of Megatron's TransformerConfig"}
    )
    ddp: dict[str, Any] = field(
        default_factory=dict,
        metadata={"meaning": "further settings of data parallelism, by the names of Megatron's DistributedDataParallelConfig"},
    )

    @property
    def optimizer_steps(self) -> int:
        """Those that a batch of rollouts makes."""
        return self.minibatches * self.epochs


@dataclass
class GeneratorConfig:
    engines: int = setting(1, "SGLang servers", at_least(1))
    tp: int = setting(1, "tensor parallel size of an engine", at_least(1))
    ep: int = setting(1, "expert parallel size of an engine", at_least(1))
    dp_attention: int = setting(1, "replicas of attention inside an engine, for mixtures of experts: SGLang's attn_dp_size", at_least(1))
    quantization: str | None = setting(
        None,
        "keep the weights of the engines' linear layers in e4m3 with a scale per 128x128 block, per output channel, or per tensor, and all "
        "else in bfloat16; null: model.dtype",
        one_of("fp8_block", "fp8_channel", "fp8_tensor"),
    )
    max_concurrency: int = setting(256, "requests in flight per engine", at_least(1))
    kv_cache_tokens: int | None = setting(
        None, "size of an engine's KV cache, over all replicas of attention; null: SGLang decides from free memory", at_least(1)
    )
    mem_fraction: float = setting(0.85, "fraction of GPU memory for weights and KV cache together", between(0, 1, open_low=True))
    startup_timeout_s: float = setting(900.0, "until an engine answers", seconds())
    on_failure: str = setting(
        "restart",
        "what happens when an engine dies or hangs. restart: it is started again, gets the current weights, and serves again; drop: the "
        "other engines do its work; fail: the run ends. With restart and drop its unfinished requests go to other engines. If weights go "
        "by gloo or nccl (weights.transport), the run ends at the next update in any case",
        one_of("restart", "drop", "fail"),
    )
    max_restarts: int = setting(
        3, "restarts of one engine; the run ends if it dies once more, or exits by itself before it has ever answered", at_least(0)
    )
    health_s: float = setting(60.0, "an engine without a sign of life for so long counts as hanging", seconds(5))
    server_args: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "further arguments of the engines, by the names of SGLang's ServerArgs"}
    )


@dataclass
class AsyncConfig:
    capacity: int | None = setting(
        1, "capacity of the rollouts channel in steps. 0: synchronous; 1: one step behind; K: a bounded queue; null: unbounded", at_least(0)
    )
    max_staleness: int | None = setting(
        None,
        "how many weight versions the oldest token of a group may be behind when the group is used. Older groups are rejected and "
        "generated again, and no rollout begins further ahead; null: no limit beyond capacity's",
        at_least(0),
    )
    max_in_flight: int | None = setting(
        None, "prompts in flight at the same time, at generator.engines; null: rollout.prompts_per_step", at_least(1)
    )
    partial_rollout: str = setting(
        "block",
        "what a weight update does to running requests. block: waits for rollouts to finish, and begins none; in_flight: pauses requests "
        "and keeps their KV cache; retract: pauses them and computes their KV cache anew; abort: begins them again from the prompt, once; "
        "resume: cuts them and continues from prompt and prefix",
        one_of("block", "in_flight", "retract", "abort", "resume"),
    )
    chunk_tokens: int | None = setting(
        None,
        "with partial_rollout=resume, the most tokens of one request: longer responses are cut into several requests; null: a quarter of "
        "rollout.max_tokens",
        at_least(1),
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
    weight: float = setting(1.0, "what the part's score is multiplied by in the sum", between(-MAX_REWARD, MAX_REWARD))
    failed_score: float | None = setting(
        None, "the part's score if scoring failed; null: reward.failed_score", between(-MAX_REWARD, MAX_REWARD)
    )


@dataclass
class CodeConfig:
    test_timeout_s: float = setting(6.0, "time limit of a program on one test", seconds())
    timeout_s: float = setting(120.0, "time limit of a program on all tests together", seconds())
    memory_mib: int = setting(2048, "memory limit of a program, all its processes together", at_least(256))


@dataclass
class RewardConfig:
    name: str = setting(
        "math",
        "how a response is scored. math: 1 if its final answer equals the reference mathematically, else 0; last_number: 1 if the last "
        "number of a list does; choice: 1 if it chooses the letter A to J that is the reference; ifeval: 1 if it follows all instructions "
        "of the reference; code: 1 if its program passes all tests of the reference (docs/evaluation.md); none: nothing is scored, for a "
        "run that learns from teachers alone; a function of your own (docs/own_run.md); or a model of `roles` (docs/rewards.md)",
        _REWARDS,
        MODULE,
    )
    parts: dict[str, PartConfig | None] = field(
        default_factory=dict,
        metadata={"meaning": "the reward is the weighted sum of these, and `name` does not count; NAME=null removes one"},
    )
    workers: int | None = setting(
        None,
        "processes that score responses; null: one for every four cores of the generator's host, at least 1 and at most 32",
        at_least(1),
    )
    timeout_s: float = setting(5.0, "time limit of scoring a response", seconds())
    memory_mib: int = setting(1024, "memory limit of a worker process", at_least(256))
    code: CodeConfig = field(default_factory=CodeConfig)
    failed_score: float = setting(
        0.0,
        "score of a response whose scoring failed: it took longer than timeout_s, raised ValueError, ran out of memory, or ended its "
        "process. The response stays in its group, since leaving it out would make it free to break the verifier. Set this to the worst "
        "score if that is not 0",
        between(-MAX_REWARD, MAX_REWARD),
    )
    max_failed_fraction: float = setting(
        0.5, "the run ends if a larger share of a step's or an evaluation's scores failed; 1: never", between(0, 1)
    )
    unfinished_penalty: float = setting(
        0.0, "what a response that was cut at rollout.max_tokens loses of its reward in training", between(0, MAX_REWARD)
    )
    unfinished_score: float | None = setting(
        None,
        "the reward in training of every response that was cut at rollout.max_tokens, whatever its score; null: its score, less "
        "unfinished_penalty",
        between(-MAX_REWARD, MAX_REWARD),
    )
    overlong_tokens: int = setting(
        0,
        "how many of the last tokens before rollout.max_tokens lower the reward in training, up to overlong_penalty for a response of "
        "the full length (DAPO's soft overlong punishment); 0: none",
        at_least(0),
    )
    overlong_penalty: float = setting(1.0, "see overlong_tokens", between(0, MAX_REWARD))


@dataclass
class WeightsConfig:
    transport: str = setting(
        "auto",
        "how weights reach the engines. auto: for each pair of ranks the first that works of cuda_ipc or shared_memory (on one host), "
        "mooncake (RDMA with GPUs and InfiniBand, else TCP), nccl, gloo",
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
        "whether engines pass weights on to each other. auto: to other engines of the same host, so that weights reach a host over the "
        "network only once; engines: also to other hosts, as far as that shortens the update (docs/transports.md); off: no",
        one_of("auto", "engines", "off"),
    )
    audit: str = setting(
        STRICT,
        "on: after every update, hashes compare the engines' memory with what was sent, and what no update writes there (rotary caches, "
        "what is derived from weights) with what it was; strict: also, before an update and at the end, what lies there with what the last "
        "one left, and a run ends if engines hold what may be copies of old weights; off: no audit. true and false mean on and off",
        one_of("off", "on", STRICT, spelled={"true": "on", "false": "off"}),
    )

    delta: str = setting(
        "off",
        "auto: an update carries only what has changed since the last one, if that takes at most half of the bytes; trainer ranks keep "
        "what they sent last (docs/transports.md says when that pays); off: always everything",
        one_of("off", "auto", spelled={"false": "off"}),
    )
    delta_refresh: int = setting(
        50,
        "with weights.delta=auto: every so many updates everything is sent, and so many updates pass before changes are looked for again "
        "after they were too many",
        at_least(1),
    )
    delta_shadow: str = setting(
        "host",
        "where trainer ranks on GPUs keep what they sent last: host memory, which the GPU reads over its host link, or device memory "
        "(megarl plan counts either)",
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
        "a known benchmark, whose rows are asked and graded as is usual for it (docs/evaluation.md): prompt_key, answer_key and eval."
        "reward do not count; null: none",
        one_of(*GRADERS),
    )
    source: str = setting(OWN_PLACE, "as that of any dataset (see data.eval.source); benchmark: its own place on the hub", path=INPUT)
    since: str | None = setting(None, "of livecodebench only the problems of this date or later, such as 2024-08-01; null: all", _DATE)
    until: str | None = setting(None, "of livecodebench only the problems of this date or earlier; null: all", _DATE)
    samples: int | None = setting(None, "samples per prompt; null: eval.samples", at_least(1))
    temperature: float | None = setting(None, "sampling temperature; null: eval.temperature", at_least(0))
    max_tokens: int | None = setting(None, "longest response in tokens; null: eval.max_tokens", at_least(1))


@dataclass
class EvalConfig:
    every: int = setting(0, "steps between evaluations inside a run; 0: only before the first and after the last step", at_least(0))
    engines: int = setting(
        0,
        "further engines, as the generator's, which evaluate beside the training and serve no rollouts (docs/evaluation.md); 0: the "
        "generator's engines evaluate between two updates",
        at_least(0),
    )
    samples: int = setting(
        1, "samples per prompt, for avg@k, pass@k and maj@k (docs/evaluation.md); more than one needs a temperature", at_least(1)
    )
    temperature: float = setting(0.0, "sampling temperature; 0: greedy", at_least(0))
    max_tokens: int | None = setting(None, "longest response in tokens; null: rollout.max_tokens", at_least(1))
    limit: int | None = setting(None, "use only so many first prompts of each held-out set; null: all", at_least(1))
    reward: str | None = setting(None, "how responses are scored, as reward.name; null: as in training", _REWARDS)
    suites: dict[str, SuiteConfig | None] = field(
        default_factory=dict, metadata={"meaning": "held-out sets besides data.eval, by name; NAME=null removes one"}
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
        default_factory=dict, metadata={"meaning": "models beside the policy, by name; NAME=null removes one"}
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
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    max_steps: int = setting(100, "steps of the whole run, each of which trains on a batch and makes a version of the weights", at_least(1))
    seed: int = setting(0, "seed of everything random in the run", between(0, 2**31 - 1))
    run_dir: str = setting(
        "runs/default",
        "folder that the run writes to; if missing, it is created, accessible to this user only. A run continues from its last checkpoint "
        "there",
        path=OUTPUT,
    )
