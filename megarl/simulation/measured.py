"""The measured times of a run, used instead of the planner's (`megarl plan --simulate --from
RUN`).
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from megarl.base.rollout_types import Batch
from megarl.config.errors import ConfigError
from megarl.config.keys import value_at, yaml_text
from megarl.config.load import load_config
from megarl.observe.metrics import METRICS_FILE, Row, read_metrics
from megarl.observe.status import TRACE_FOLDER
from megarl.plan.resolve import RunPlan
from megarl.simulation.engines import Speed
from megarl.simulation.run import Models, simulate

FEWEST = 8  # least number of steps for a fit
FIT_STEPS = 24
TRIALS = 8
CLOSE = 0.02
FAR = 0.25
LEAST = 1e-4  # the fit of the engines' speed
POSITIVE = (
    "time/step_s",
    "time/rollout_s",
    "tokens_per_s",
    "samples_per_s",
)  # these must be above 0
# these must be at least 0
NON_NEGATIVE = (
    "time/sync_s",
    "time/sync_pause_s",
    "time/trainer_wait_s",
    "time/weights_wait_s",
    "time/save_s",
)
# Settings that the measured times depend on.
SIZES = (
    "model.path",
    "model.dtype",
    "cluster.gpu",
    "algorithm.name",
    "rollout.prompts_per_step",
    "rollout.n",
    "rollout.max_tokens",
    "trainer.dp",
    "trainer.tp",
    "trainer.pp",
    "trainer.vpp",
    "trainer.cp",
    "trainer.ep",
    "trainer.etp",
    "trainer.zero",
    "trainer.recompute",
    "trainer.minibatches",
    "trainer.epochs",
    "generator.engines",
    "generator.tp",
    "generator.ep",
    "generator.quantization",
    "generator.max_concurrency",
)


def measured_models(plan: RunPlan, unit: int, run: Path) -> Models:
    """The planner's models, scaled to a run's metrics.

    A step's training time becomes a line over its tokens; the update and the engines' speed are set
    to medians. Raises ConfigError if the run has other sizes, or too few steps.
    """
    _check_sizes(plan, run)
    rows = read_metrics(run / METRICS_FILE)
    rows = [row for row in rows[len(rows) // 5 :] if _is_usable(row)]
    if len(rows) < FEWEST:
        raise ConfigError(
            f"--from {run}: has {len(rows)} steps with all times, after the first fifth; at least "
            f"{FEWEST} are needed"
        )
    models = Models.of(plan, unit)
    samples = plan.sequences_per_step
    beside = plan.config.checkpoint.beside
    fixed_s, token_s = _line(
        [_tokens(row, samples) for row in rows],
        [_rest_s(row) + beside * row["time/save_s"] for row in rows],
    )
    write_s, pause_s = (
        float(np.median([row[name] for row in rows]))
        for name in ("time/sync_s", "time/sync_pause_s")
    )

    def train_s(batch: Batch) -> float:
        return fixed_s + token_s * unit * sum(sample.tokens for sample in batch.samples)

    control_s = max(0.0, pause_s - write_s)
    checkpoint_s = _checkpoint_s(run)
    if checkpoint_s is None:
        checkpoint_s = models.checkpoint_s
    # With resume, an update always waits for the ends of chunks. The simulation does the same.
    grant_s = 0.0
    if plan.config.async_.partial_rollout != "resume":
        grant_s = min(row["time/weights_wait_s"] for row in rows)
    models = replace(
        models,
        train_s=train_s,
        write_s=write_s,
        control_s=control_s,
        grant_s=grant_s,
        checkpoint_s=checkpoint_s,
    )
    return _fitted_speed(
        run, plan, models, float(np.median([row["time/rollout_s"] for row in rows]))
    )


def _check_sizes(plan: RunPlan, run: Path) -> None:
    before = load_config(run / "config.yaml")
    if plan.config.generator.has_groups or before.generator.has_groups:
        raise ConfigError(
            f"--from {run}: generator.groups must be empty in both: a run's times do not tell how "
            "fast each group was"
        )
    changed_keys = [key for key in SIZES if value_at(before, key) != value_at(plan.config, key)]
    if changed_keys:
        sizes_text = ", ".join(f"{key}={yaml_text(value_at(before, key))}" for key in changed_keys)
        raise ConfigError(f"--from {run}: its sizes differ: {sizes_text}; plan with the same sizes")


def _is_usable(row: Row) -> bool:
    is_complete = all(
        isinstance(row.get(name), int | float) and math.isfinite(row[name])
        for name in (*POSITIVE, *NON_NEGATIVE)
    )
    return (
        is_complete
        and min(row[name] for name in POSITIVE) > 0
        and min(row[name] for name in NON_NEGATIVE) >= 0
        and _rest_s(row) > 0
    )


def _checkpoint_s(run: Path) -> float | None:
    """Time from the beginning of a checkpoint to its completion, from the trace; None without
    checkpoints.
    """
    file = run / TRACE_FOLDER / "trainer.0.jsonl"
    start_us: dict[str, float] = {}
    durations_s: list[float] = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        with contextlib.suppress(msgspec.MsgspecError):
            span = msgspec.json.decode(line, type=_TraceSpan)
            start = re.fullmatch(r"checkpoint (\d+)", span.name)
            if start:
                start_us[start[1]] = span.ts
            end = re.fullmatch(r"complete step_0*(\d+)", span.name)
            if end and end[1] in start_us:
                durations_s.append((span.ts + span.dur - start_us.pop(end[1])) / 1e6)
    return float(np.median(durations_s)) if durations_s else None


class _TraceSpan(msgspec.Struct):
    name: str
    ts: float  # microseconds
    dur: float


def _tokens(row: Row, samples: int) -> float:
    """The tokens of a step's responses."""
    return row["tokens_per_s"] / row["samples_per_s"] * samples


def _rest_s(row: Row) -> float:
    """Time of a step without its waits, update and checkpoint: training, and everything that
    overlaps with nothing.
    """
    return row["time/step_s"] - row["time/trainer_wait_s"] - row["time/sync_s"] - row["time/save_s"]


def _line(tokens: list[float], seconds: list[float]) -> tuple[float, float]:
    """(seconds per step, seconds per token), neither below 0, by least squares."""
    x = np.array(tokens)
    y = np.array(seconds)
    slope = float(np.cov(x, y, bias=True)[0, 1] / x.var()) if x.var() > 0 else 0.0
    slope = min(max(0.0, slope), float(y.mean() / x.mean()))
    return float(y.mean() - slope * x.mean()), slope


def _fitted_speed(run: Path, plan: RunPlan, models: Models, rollout_s: float) -> Models:
    """The models with decoding scaled so that the rollout of a prompt takes `rollout_s`.

    Prefill stays as the planner has it. The scale is found by trial, since the time of a rollout
    also depends on waits.
    """
    settings = replace(
        plan.config.plan.simulation, steps=min(FIT_STEPS, plan.config.max_steps), gpu_mtbf_h=None
    )
    trial = replace(
        plan, config=replace(plan.config, plan=replace(plan.config.plan, simulation=settings))
    )
    scale = 1.0
    scaled = models
    took_s = 0.0
    for _ in range(TRIALS):
        scaled = replace(models, speed=_scaled(models.speed, scale))
        rows = simulate(trial, lambda plan, unit: scaled).rows
        took_s = float(np.median([row["time/rollout_s"] for row in rows[len(rows) // 5 :]]))
        if abs(took_s / rollout_s - 1) < CLOSE:
            break
        scale = max(LEAST, scale * rollout_s / took_s)
    if abs(took_s / rollout_s - 1) > FAR:
        raise ConfigError(
            f"--from {run}: at no speed of engines do rollouts take {rollout_s:.3g} s; simulated "
            f"ones take {took_s:.3g} s"
        )
    return scaled


def _scaled(speed: Speed, scale: float) -> Speed:
    return replace(
        speed, decode_s=lambda running, context: scale * speed.decode_s(running, context)
    )
