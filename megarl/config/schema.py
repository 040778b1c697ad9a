"""Every setting of a run, with its default. The one place where a key's name and type are defined.

`async` is a Python keyword, so the section lives in the field `async_`; the loader maps the YAML key `async` to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING


@dataclass
class ModelConfig:
    path: str = MISSING  # HF checkpoint: a local folder or a hub name
    tokenizer: Optional[str] = None  # defaults to `path`
    dtype: str = "bfloat16"  # float32 | bfloat16: the trainer's parameters and the wire
    random_init: bool = False  # `path` holds config and tokenizer only; start from random weights (megarl sft)


@dataclass
class DatasetConfig:
    source: str = MISSING  # synthetic:<task> | a .jsonl / .parquet file | a hub name
    split: str = "train"
    subset: Optional[str] = None  # hub configuration name, such as "main" of gsm8k
    prompt_key: str = "question"
    answer_key: str = "answer"
    demonstration_key: Optional[str] = None  # SFT target; defaults to answer_key
    prompt_template: str = "{prompt}"
    size: Optional[int] = None  # first rows only


@dataclass
class DataConfig:
    train: DatasetConfig = field(default_factory=DatasetConfig)
    eval: Optional[DatasetConfig] = None
    shuffle: bool = True


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"  # constant | cosine
    min_lr_ratio: float = 0.1  # cosine ends at lr * min_lr_ratio
    clip_grad: float = 1.0  # global norm; 0 turns clipping off


@dataclass
class TrainerConfig:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    zero: int = 1  # 0: plain data parallel; 1: distributed optimizer
    sequence_parallel: bool = False
    recompute: bool = False
    max_tokens_per_microbatch: int = 8192
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class GeneratorConfig:
    engines: int = 1
    tp: int = 1
    ep: int = 1
    quantization: Optional[str] = None
    max_concurrency: int = 256  # requests in flight per engine
    kv_cache_tokens: Optional[int] = None  # None: SGLang decides from free memory
    mem_fraction: float = 0.85  # of GPU memory, weights and KV cache together
    startup_timeout_s: float = 900.0
    server_args: dict[str, Any] = field(default_factory=dict)  # passed on to sglang.launch_server as they are


@dataclass
class AsyncConfig:
    capacity: int = 1  # of the rollouts channel, in steps: 0 synchronous, 1 one step behind, K bounded queue
    max_staleness: Optional[int] = None
    partial_rollout: str = "block"  # block; in_flight, retract, resume, abort are not there yet


@dataclass
class AlgorithmConfig:
    name: str = "aipo"
    rho: float = 4.0  # importance-ratio clip, LlamaRL section 6: 2 to 10 works
    kl_coef: float = 0.0  # lambda_KL against the frozen initial policy; 0 holds no reference model
    skip_zero_advantage: bool = True


@dataclass
class RolloutConfig:
    prompts_per_step: int = 32
    n: int = 4
    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass
class RewardConfig:
    name: str = "math"  # verifier: math
    workers: int = 1
    timeout_s: float = 5.0  # per answer
    memory_mib: int = 1024  # per worker process


@dataclass
class WeightsConfig:
    transport: str = "auto"  # auto | shared_memory | gloo | package.module:Class
    audit: bool = True


@dataclass
class EvalConfig:
    every: int = 0  # steps between evaluations inside a run; 0: only before the first and after the last step
    max_tokens: Optional[int] = None  # defaults to rollout.max_tokens
    limit: Optional[int] = None  # first prompts of data.eval only


@dataclass
class CheckpointConfig:
    every: int = 10  # steps; 0 saves only at the end
    keep: int = 2  # newest checkpoints kept


@dataclass
class ObserveConfig:
    probe_every: int = 10  # steps between trainer-against-generator log-prob probes; 0 turns them off
    rollouts_per_step: int = 4  # groups written to rollouts/ as text
    tensorboard: bool = True


@dataclass
class SftConfig:
    steps: int = 0
    batch_size: int = 128  # sequences per optimizer step
    max_tokens_per_microbatch: Optional[int] = None  # defaults to trainer.max_tokens_per_microbatch
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: Optional[DatasetConfig] = None  # defaults to data.train
    output: str = "${run_dir}/sft/hf"  # HF checkpoint that the trained weights are exported to


@dataclass
class TimeoutConfig:
    """Deadlines in seconds. On expiry the waiting side says whom it waited for, and for what."""

    rendezvous_s: float = 600.0  # all processes of the run up and connected
    rollouts_s: float = 3600.0  # trainer waits for a batch; generator waits for room
    weights_s: float = 600.0  # one weight update, any part
    request_s: float = 3600.0  # one generation request


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
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    max_steps: int = 100
    seed: int = 0
    run_dir: str = "runs/default"
