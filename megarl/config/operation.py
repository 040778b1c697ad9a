"""The schema's sections on how a run is carried out: where its processes are, how long they wait, what they keep and show."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config.limits import OUTPUT, Limit, above, at_least, between, one_of, seconds, setting

TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")


@dataclass
class CheckpointConfig:
    every: int = setting(10, "steps between checkpoints; 0: only at the end", at_least(0))
    keep: int = setting(2, "how many newest checkpoints are kept", at_least(1))
    keep_best: str | None = setting(
        None,
        "a held-out score by its key in metrics.jsonl, such as eval/pass@1: the checkpoint with the highest one is kept beside the newest, "
        "and megarl export and megarl eval take it with --best. It needs eval.every to be a multiple of checkpoint.every; null: none",
    )
    beside: bool = setting(
        True,
        "write checkpoints while training goes on, from a copy in the hosts' memory (12 bytes a parameter, over all trainer ranks); each "
        "is complete at the end of the step during which its last byte was written. false: hold up the step instead",
    )
    hf_every: int = setting(
        0,
        "steps between exports of the weights as a Hugging Face checkpoint (run_dir/hf/step_000010, …), all of which are kept; 0: none",
        at_least(0),
    )
    on_termination_s: float = setting(
        120.0, "on SIGTERM (Slurm's preemption), time to finish and save the running step; then the run is ended regardless", seconds()
    )


@dataclass
class ObserveConfig:
    probe_every: int = setting(10, "steps between probes that compare the log-probs of trainer and generator; 0: none", at_least(0))
    probe_limit: float | None = setting(
        None,
        "the run warns if a probe's mean log-prob difference is larger, and ends if it is more than ten times as large or not finite. "
        "null: 0.001 in float32, 0.05 in bfloat16, 0.15 with engines in fp8, and twice that for a mixture of experts without "
        "trainer.routing_replay",
        above(0),
    )
    rollouts_per_step: int = setting(
        4, "groups of each step that are written to rollouts/, with numbers of each token that is trained on", at_least(0)
    )
    trackers: list[str] = field(
        default_factory=lambda: ["tensorboard"],
        metadata={
            "meaning": "experiment trackers that are given every row of metrics.jsonl (docs/own_run.md); all but tensorboard are extras",
            "limit": Limit(
                f"a list of {', '.join(TRACKERS)}, each at most once",
                lambda names: set(names) <= set(TRACKERS) and len(set(names)) == len(names),
                names=TRACKERS,
            ),
        },
    )
    project: str = setting("megarl", "the trackers' project (mlflow: experiment) that the run is put in")
    entity: str | None = setting(None, "whose project it is at wandb (entity) and swanlab (workspace); null: the one you are logged in as")
    name: str | None = setting(None, "the run's name at the trackers; null: run_dir")
    tags: list[str] = field(default_factory=list, metadata={"meaning": "the run's tags at wandb, swanlab and mlflow"})


@dataclass
class LaunchConfig:
    ranks_per_node: int | None = setting(
        None,
        "trainer or engine ranks on one node; null: its number of GPUs, or without GPUs the fewest for which all ranks fit",
        at_least(1),
    )
    interface: str | None = setting(
        None, "network interface by which nodes reach each other, a name or a pattern such as ib*; null: the default route's"
    )
    compile_cache: str | None = setting(
        None,
        "folder that keeps the kernels which engines and trainers compile (DeepGEMM's take 10 to 20 minutes at the first start), for each "
        "host in a folder of its own name. null: ~/.cache/megarl/compiled",
        path=OUTPUT,
    )


@dataclass
class TimeoutConfig:
    """Deadlines in seconds. A wait that expires says who waited for whom, and for what."""

    rendezvous_s: float = setting(600.0, "until all processes of the run are up and connected", seconds())
    collective_s: float = setting(
        1800.0,
        "one collective of the trainer ranks, and so how long one rank may load, save, or wait for engines while the others wait for it",
        seconds(),
    )
    rollouts_s: float = setting(
        3600.0, "the trainer's wait for a batch or for an evaluation, and the generator's for room in the channel", seconds()
    )
    weights_s: float = setting(600.0, "any part of a weight update", seconds())
    request_s: float = setting(3600.0, "a generation request", seconds())
    samples_s: float = setting(3600.0, "all samples of a prompt, including turns, tools and scores", seconds())
    trackers_s: float = setting(60.0, "the trackers (observe.trackers) to finish, when the run has ended", seconds())
    silence_s: float = setting(60.0, "a node's launcher without a sign of life", seconds())


@dataclass
class ClusterConfig:
    """The machines that megarl plan assumes."""

    gpu: str = setting(
        "H100",
        "kind of GPU; cpu: a core, for runs without GPUs, also on nodes with GPUs that PyTorch cannot use",
        one_of("L40S", "A100", "H100", "H200", "B200", "cpu"),
    )


@dataclass
class PlanConfig:
    """What megarl plan assumes. Runs ignore it."""

    prompt_tokens: int | None = setting(
        None, "mean length of a prompt; null: 256. A dry run takes that of data.train instead, where it can read it", at_least(1)
    )
    response_tokens: int | None = setting(None, "mean length of a response; null: half of rollout.max_tokens", at_least(1))
    dropped_share: float | None = setting(
        None,
        "share of the generated prompts that rollout.dynamic_sampling drops; null: unknown, and not counted",
        between(0, 1, open_high=True),
    )

    @property
    def mean_prompt_tokens(self) -> int:
        return self.prompt_tokens or 256
