"""The schema's sections of how a run is carried out: where its processes are, how long they wait, what they keep and show."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.limits import above, at_least, one_of, seconds, setting


@dataclass
class CheckpointConfig:
    every: int = setting(10, "steps between checkpoints; 0: only at the end", at_least(0))
    keep: int = setting(2, "newest checkpoints kept", at_least(1))
    on_termination_s: float = setting(
        120.0, "on SIGTERM (Slurm's preemption), until the running step is done and saved; past it the run is ended as it is", seconds()
    )


@dataclass
class ObserveConfig:
    probe_every: int = setting(10, "steps between trainer-against-generator log-prob probes; 0: none", at_least(0))
    probe_limit: float | None = setting(
        None,
        "mean difference of a probe's log-probs beyond which the run warns; beyond ten times as much, or where one is not finite, it ends; "
        "null: 0.001 in float32, 0.05 in bfloat16, 0.15 with engines in fp8, and twice that for a mixture of experts without "
        "trainer.routing_replay",
        above(0),
    )
    rollouts_per_step: int = setting(4, "groups written to rollouts/ as text", at_least(0))
    tensorboard: bool = setting(True, "write tb/")


@dataclass
class LaunchConfig:
    ranks_per_node: int | None = setting(
        None, "trainer or engine ranks on one node; null: its GPUs, and without GPUs as few as spread all ranks over the nodes", at_least(1)
    )
    interface: str | None = setting(
        None, "network interface by which nodes reach each other: a name or a pattern such as ib*; null: the default route's"
    )


@dataclass
class TimeoutConfig:
    """Deadlines in seconds. On expiry the waiting side says whom it waited for, and for what."""

    rendezvous_s: float = setting(600.0, "all processes of the run up and connected", seconds())
    collective_s: float = setting(
        1800.0,
        "one collective of the trainer ranks: so long may one load, save, or wait for engines while the others wait for it",
        seconds(),
    )
    rollouts_s: float = setting(
        3600.0, "the trainer waits for a batch, or for engines that evaluate; the generator waits for room", seconds()
    )
    weights_s: float = setting(600.0, "one weight update, any part", seconds())
    request_s: float = setting(3600.0, "one generation request", seconds())
    samples_s: float = setting(3600.0, "the samples of one prompt: all turns, tools and scores", seconds())
    silence_s: float = setting(60.0, "a node's launcher shows no sign of life", seconds())


@dataclass
class ClusterConfig:
    """The machines that megarl plan reckons with."""

    gpu: str = setting(
        "H100",
        "kind of GPU; cpu: a core, for runs without one, also on nodes with GPUs that PyTorch cannot use",
        one_of("H100", "H200", "B200", "cpu"),
    )


@dataclass
class PlanConfig:
    """Lengths that megarl plan expects. A run does not look at them."""

    prompt_tokens: int = setting(256, "mean length of a prompt", at_least(1))
    response_tokens: int | None = setting(None, "mean length of a response; null: half of rollout.max_tokens", at_least(1))
