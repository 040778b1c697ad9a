"""The schema's section on simulated runs."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.limits import INPUT, above, at_least, between, one_of, seconds, setting

EXPONENTIAL = "exponential"
LOGNORMAL = "lognormal"


@dataclass
class SimulationConfig:
    """What `megarl plan --simulate` assumes beside the rest of `plan`."""

    steps: int = setting(100, "steps that are simulated, at most max_steps", at_least(1))
    lengths: str = setting(
        EXPONENTIAL,
        "distribution of response lengths, of mean plan.response_tokens after the cut at "
        "rollout.max_tokens; or a run's samples.jsonl, "
        "whose lengths are drawn from",
        one_of(EXPONENTIAL, LOGNORMAL, or_like=r".+\.jsonl", written="FILE.jsonl"),
        INPUT,
    )
    sigma: float = setting(
        1.0, "with lengths=lognormal, the deviation of their logarithm", between(0.01, 4)
    )
    correlation: float = setting(
        0.5, "how much the lengths of responses to one prompt have in common", between(0, 1)
    )
    growth: float = setting(0.0, "by what share lengths grow every 100 steps", between(-0.9, 100))
    turns: int = setting(
        1,
        "requests that a response is made of, each followed by a tool call of tool_s",
        at_least(1),
    )
    tool_s: float = setting(
        1.0,
        "with turns above 1, mean duration of a tool call, exponentially distributed",
        at_least(0),
    )
    score_s: float = setting(
        0.0, "mean duration of scoring a response, exponentially distributed", at_least(0)
    )
    gpu_mtbf_h: float | None = setting(
        None,
        "mean hours between failures of one GPU; null: none fails. One of the trainer's ends the "
        "run, which goes on from its last "
        "checkpoint; one of an engine's ends that engine. Llama 3 405B had about 50000 (arXiv "
        "2407.21783, section 3.3.4)",
        above(0),
    )
    restart_s: float = setting(
        600.0, "from the failure of a trainer's GPU until the run goes on", seconds()
    )
    engine_restart_s: float = setting(
        300.0, "from the failure of an engine until it runs again", seconds()
    )
    checkpoint_s: float | None = setting(
        None,
        "duration of writing a checkpoint: beside training with checkpoint.beside, else training "
        "waits; null: that of its bytes at plan.checkpoint_gb_s",
        at_least(0),
    )
