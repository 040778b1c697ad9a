"""The times of a run that was measured, in the place of the planner's (`megarl plan --simulate --from RUN`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.base.rollout_types import Batch
from megarl.config.errors import ConfigError
from megarl.config.keys import value_at, yaml_text
from megarl.config.load import load_config
from megarl.observe.metrics import METRICS_FILE, Row, read_metrics
from megarl.plan.resolve import RunPlan
from megarl.simulation.engines import Speed
from megarl.simulation.run import Models

FEWEST = 8  # steps that a fit needs
TIMES = ("time/step_s", "time/sync_s", "time/sync_pause_s", "time/generate_s", "time/trainer_wait_s")
NEEDED = (*TIMES, "tokens_per_s", "samples_per_s", "response_tokens/max")
# What its times hold for.
SIZES = (
    "model.path", "rollout.prompts_per_step", "rollout.n", "trainer.dp", "trainer.tp", "trainer.pp", "trainer.cp", "trainer.ep",
    "generator.engines", "generator.tp", "generator.ep", "generator.quantization", "generator.max_concurrency",
)  # fmt: skip


def measured(plan: RunPlan, unit: int, run: Path) -> Models:
    """The planner's models, scaled so that they give the medians of a run's metrics: a step's training by its tokens, the update, and
    the engines' speed. Raises ConfigError if the run has other sizes, or too few steps."""
    _check_sizes(plan, run)
    rows = read_metrics(run / METRICS_FILE)
    rows = [row for row in rows[len(rows) // 5 :] if all(name in row for name in NEEDED)]
    if len(rows) < FEWEST:
        raise ConfigError(f"--from {run}: has {len(rows)} steps with times, after the first fifth; at least {FEWEST} are needed")
    models = Models.of(plan, unit)
    samples = plan.sequences_per_step
    fixed_s, token_s = _line([_tokens(row, samples) for row in rows], [_rest_s(row) for row in rows])
    write_s, pause_s = (float(np.median([row[name] for row in rows])) for name in ("time/sync_s", "time/sync_pause_s"))

    def train_s(batch: Batch) -> float:
        return fixed_s + token_s * unit * sum(sample.tokens for sample in batch.samples)

    return replace(models, train_s=train_s, write_s=write_s, control_s=max(0.0, pause_s - write_s), speed=_scaled(plan, models.speed, rows))


def _check_sizes(plan: RunPlan, run: Path) -> None:
    before = load_config(run / "config.yaml")
    if others := [key for key in SIZES if value_at(before, key) != value_at(plan.config, key)]:
        said = ", ".join(f"{key}={yaml_text(value_at(before, key))}" for key in others)
        raise ConfigError(f"--from {run}: its times are of other sizes: {said}; plan with the same")


def _tokens(row: Row, samples: int) -> float:
    """Of a step's responses."""
    return row["tokens_per_s"] / row["samples_per_s"] * samples


def _rest_s(row: Row) -> float:
    """A step without its waits and its update: training, and what nothing overlaps."""
    return row["time/step_s"] - row["time/trainer_wait_s"] - row["time/sync_s"]


def _line(tokens: list[float], seconds: list[float]) -> tuple[float, float]:
    """(seconds of a step, seconds a token), neither below 0, by least squares."""
    x, y = np.array(tokens), np.array(seconds)
    slope = float(np.cov(x, y, bias=True)[0, 1] / x.var()) if x.var() > 0 else 0.0
    slope = min(max(0.0, slope), float(y.mean() / x.mean()))
    return float(y.mean() - slope * x.mean()), slope


def _scaled(plan: RunPlan, speed: Speed, rows: list[Row]) -> Speed:
    """The engines' speed, scaled by how long the longest response of a step took: its prefill is left as the planner has it."""
    found = []
    for row in rows:
        longest = row["response_tokens/max"]
        context = plan.config.plan.mean_prompt_tokens + longest / 2
        running = max(1, min(speed.most_running, round(plan.sequences_per_step / plan.config.generator.engines)))
        found.append(row["time/generate_s"] / (longest * speed.decode_s(running, context)))
    scale = float(np.median(found))
    return replace(speed, decode_s=lambda running, context: scale * speed.decode_s(running, context))
