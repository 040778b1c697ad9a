"""LlamaRL's table 3, planned and simulated: `python tests/tools/table3.py` prints the table of
docs/papers.md.

Each row is a config of configs/papers with overrides. Published seconds are those of
planner_published.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planner_published import TABLES

from megarl import api
from megarl.config.load import load_config
from megarl.estimate.estimate import estimate
from megarl.plan.resolve import resolve

CONFIGS = Path(__file__).parents[2] / "configs" / "papers"
SYNCHRONOUS = (
    "cluster.share_gpus=true async.capacity=0 async.partial_rollout=block async.chunk_tokens=null "
    "generator.quantization=null "
)
# name in planner_published.py -> config, overrides
ROWS = {
    "8B baseline, 8 / 8": (
        "llamarl_8b_math",
        SYNCHRONOUS
        + "trainer.dp=32 generator.engines=32 generator.tp=8 generator.max_concurrency=16",
    ),
    "70B baseline, 8 / 8": (
        "llamarl_70b_math",
        SYNCHRONOUS + "trainer.dp=32 trainer.zero=3 generator.engines=32 generator.tp=8",
    ),
    "405B baseline, 64 / 64": (
        "llamarl_405b_math",
        SYNCHRONOUS + "trainer.tp=64 trainer.dp=16 generator.engines=16 generator.tp=64",
    ),
    "8B, 8 / 8": (
        "llamarl_8b_math",
        "generator.engines=16 generator.tp=8 generator.max_concurrency=64",
    ),
    "8B, 8 / 1": ("llamarl_8b_math", ""),
    "70B, 8 / 8": (
        "llamarl_70b_math",
        "trainer.dp=16 generator.engines=16 generator.tp=8 generator.quantization=null "
        "generator.max_concurrency=64",
    ),
    "70B, 8 / 4 fp8": ("llamarl_70b_math", ""),
    "405B, 32 / 32": (
        "llamarl_405b_math",
        "trainer.tp=32 trainer.dp=16 generator.engines=16 generator.tp=32 "
        "generator.quantization=null",
    ),
    "405B, 16 / 16": (
        "llamarl_405b_math",
        "generator.engines=32 generator.tp=16 generator.quantization=null "
        "generator.max_concurrency=48",
    ),
    "405B, 16 / 8 fp8": ("llamarl_405b_math", ""),
}
PUBLISHED_S = {row.name: row.measured_s for row in TABLES[0]}
STEPS = 20  # simulated


def main() -> None:
    print(*table(), sep="\n")


def table() -> Iterator[str]:
    """The table, in Markdown."""
    yield "| config | row | paper, s | planned, s | simulated, s | overrides |"
    yield "|---|---|---|---|---|---|"
    for name, (config, overrides) in ROWS.items():
        paper_s = PUBLISHED_S[name]
        planned = with_error(planned_s(name), paper_s)
        simulated = with_error(simulated_s(name), paper_s)
        shown = f"`{overrides}`" if overrides else "–"
        yield f"| `{config}` | {name} | {paper_s:g} | {planned} | {simulated} | {shown} |"


def planned_s(name: str) -> float:
    config, overrides = ROWS[name]
    plan = resolve(load_config(CONFIGS / f"{config}.yaml", overrides.split()), "plan")
    return estimate(plan.config, plan.spec).step_s


def simulated_s(name: str) -> float:
    """The median step."""
    config, overrides = ROWS[name]
    steps = f"plan.simulation.steps={STEPS}"
    result = api.simulate(str(CONFIGS / f"{config}.yaml"), *overrides.split(), steps)
    return result["step_p50_s"]


def with_error(seconds: float, paper_s: float) -> str:
    return f"{seconds:.4g} ({seconds / paper_s - 1:+.0%})"


if __name__ == "__main__":
    main()
