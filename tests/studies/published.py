"""`python tests/studies published`: published asynchronous and synchronous runs, simulated.

Rows of LlamaRL and NeMo-RL have the planner's times, and follow the real scheduler's rules instead
of means. For Async RLHF the paper gives the times of both phases in turns. The simulation predicts
the step with both side by side.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.base.geometry import TrainerTopology
from megarl.config.schema import (
    AsyncConfig,
    GeneratorConfig,
    PlanConfig,
    RolloutConfig,
    RunConfig,
    SimulationConfig,
    TimeoutConfig,
)
from megarl.models import load_spec
from megarl.plan.resolve import RunPlan
from megarl.plan.weights import WeightsSource
from megarl.simulation.engines import Speed
from megarl.simulation.run import KnownLengths, Models, simulate, speed_of

# pytest adds this path; `python tests/studies` does not
sys.path.append(str(Path(__file__).parents[1] / "tools"))

from planner_published import FIT, MODELS, TABLES, RlRow, Sides

STEPS = 24


@dataclass(frozen=True)
class PublishedRow:
    table: str
    row: str
    held_out: bool
    published_s: float
    planned_s: float  # from means
    simulated_s: float


def run(as_json: bool) -> None:
    rows = [*planned_rows(), *measured_rows()]
    print(json.dumps([asdict(row) for row in rows]) if as_json else "\n".join(render(rows)))


def planned_rows() -> list[PublishedRow]:
    """LlamaRL's rows are scaled by the factor of its fitted rows, because only ratios count."""
    rows: list[PublishedRow] = []
    for table in TABLES[:2]:
        sides = [row.sides(FIT) for row in table if isinstance(row, RlRow)]
        of_means = [side.step_s() for side in sides]
        of_events = [simulated_s(side) for side in sides]
        for row in table:
            print(row.name, file=sys.stderr)
        scale = [
            _factor(table, times) if table[0].table == "LlamaRL" else 1.0
            for times in (of_means, of_events)
        ]
        rows += [
            PublishedRow(
                row.table,
                row.name,
                bool(index % 2),
                row.measured_s,
                scale[0] * of_means[index],
                scale[1] * of_events[index],
            )
            for index, row in enumerate(table)
        ]
    return rows


def _factor(table: Sequence, times: Sequence[float]) -> float:
    return math.exp(
        statistics.fmean(
            math.log(row.measured_s / time) for row, time in zip(table[::2], times[::2])
        )
    )


def simulated_s(sides: Sides) -> float:
    """The mean time of a step."""
    work = sides.work

    def models(plan: RunPlan, unit: int) -> Models:
        return Models(
            speed_of(sides.engines),
            lambda batch: sides.train_s(KnownLengths.of_batch(batch, unit)) + sides.rest_s,
            0.0,
            0.0,
        )

    prompts = int(work.prompts)
    config = RunConfig(
        async_=AsyncConfig(
            sides.steps_off,
            max_in_flight=prompts * max(1, sides.steps_off),
            partial_rollout="in_flight" if sides.steps_off else "block",
        ),
        rollout=RolloutConfig(
            prompts_per_step=prompts,
            n=int(work.sequences) // prompts,
            max_tokens=int(work.max_response_tokens),
        ),
        generator=sides.engines.generator,
        plan=PlanConfig(
            int(work.prompt_tokens), int(work.response_tokens), simulation=SimulationConfig(STEPS)
        ),
        timeouts=TimeoutConfig(rollouts_s=1e5, rendezvous_s=1e5),
        max_steps=STEPS,
    )
    return mean_step_s(config, models)


def mean_step_s(config: RunConfig, models, lengths=None) -> float:
    plan = RunPlan(
        config, load_spec(MODELS / "llama-3.1-8b"), TrainerTopology(),
        config.max_steps, config.rollout.prompts_per_step * config.rollout.n, WeightsSource(""),
    )  # fmt: skip
    totals = simulate(plan, models, lengths=lengths)
    rows = totals.rows[len(totals.rows) // 4 :]
    return statistics.fmean(row["time/step_s"] for row in rows)


# Async RLHF (arXiv 2410.18252), appendices A.2 and A.4: seconds of generation and of training in
# turns; seconds of a step in turns, and of a step with both side by side.
ASYNC_RLHF = {
    "8B chat, 8 H100": (21.0, 33.0, 209 * 60 / 233, 151 * 60 / 233),
    "1B math, 4 L40S": (12.3, 12.8, 25.5, 15.1),
}


@dataclass(frozen=True)
class EqualLengths:
    """All responses are equally long: the paper gives a batch's time, not its lengths."""

    longest: int = 100

    def __call__(self, ordinal: int, n: int) -> list[int]:
        return [self.longest] * n


def measured_rows() -> list[PublishedRow]:
    rows = []
    for name, (generate_s, train_s, in_turns_s, beside_s) in ASYNC_RLHF.items():
        for capacity, published_s, mode in (
            (0, in_turns_s, "in turns"),
            (1, beside_s, "side by side"),
        ):
            speed = Speed(
                lambda running, context: generate_s / EqualLengths.longest,
                lambda tokens, length: 0.0,
                1e9,
                1024,
            )
            config = RunConfig(
                async_=AsyncConfig(capacity, partial_rollout="block"),
                rollout=RolloutConfig(prompts_per_step=64, n=4, max_tokens=EqualLengths.longest),
                generator=GeneratorConfig(engines=1, max_concurrency=1024),
                plan=PlanConfig(prompt_tokens=10, response_tokens=EqualLengths.longest),
                max_steps=STEPS,
            )
            time_s = mean_step_s(
                config,
                lambda plan, unit: Models(speed, lambda batch: train_s, 0.0, 0.0),
                EqualLengths(),
            )
            planned_s = max(generate_s, train_s) if capacity else generate_s + train_s
            rows.append(
                PublishedRow("Async RLHF", f"{name}, {mode}", True, published_s, planned_s, time_s)
            )
    return rows


def render(rows: Sequence[PublishedRow]) -> list[str]:
    """Markdown."""
    lines = ["| row | use | published s | from means | simulated |", "|---|---|---|---|---|"]
    for row in rows:
        errors = (
            f"{time:.4g} ({time / row.published_s - 1:+.0%})"
            for time in (row.planned_s, row.simulated_s)
        )
        use = "held out" if row.held_out else "fitted"
        lines.append(
            f"| {row.table}, {row.row} | {use} | {row.published_s:.4g} | {' | '.join(errors)} |"
        )
    for name in ("planned_s", "simulated_s"):
        errors = [abs(getattr(row, name) / row.published_s - 1) for row in rows if row.held_out]
        lines.append(
            f"{name}: median error of held-out rows {statistics.median(errors):.0%}, largest "
            f"{max(errors):.0%}"
        )
    return lines
