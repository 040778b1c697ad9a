"""Held-out evaluation: greedy pass@1 through SGLang."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Sequence

from megarl.executors.rollout import Rollout
from megarl.generator.client import Sampling
from megarl.types import Prompt, Version


async def pass_at_1(rollout: Rollout, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, float]:
    """Share of prompts whose one greedy answer gets the full reward."""
    started = time.monotonic()
    groups = await asyncio.gather(*(rollout(prompt, sampling, 1) for prompt in prompts))
    correct = sum(group.samples[0].reward >= 1.0 for group in groups)
    return {"pass@1": correct / len(prompts), "correct": correct, "prompts": len(prompts), "seconds": time.monotonic() - started}


def write_result(run_dir: Path | str, version: Version, result: dict[str, float]) -> None:
    """Keeps a run's evaluation as eval/version_000040.json."""
    folder = Path(run_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"version_{version:06d}.json").write_text(json.dumps({"version": version, **result}))


def read_results(run_dir: Path | str) -> list[dict[str, float]]:
    """Evaluations of a run, by weight version."""
    return [json.loads(path.read_text()) for path in sorted((Path(run_dir) / "eval").glob("version_*.json"))]


def evaluate_engines(plan: RunPlan, rendezvous: Rendezvous) -> dict[str, float]:
    """pass@1 of `data.eval` under the weights the engines were started with."""
    loop = asyncio.new_event_loop()
    return loop.run_until_complete(_evaluate_engines(plan, rendezvous))
