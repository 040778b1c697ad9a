"""Held-out evaluations that a run keeps: eval/version_<weight version>.json."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.files import write_whole
from megarl.types import Version


def write_result(run_dir: Path | str, version: Version, result: dict[str, float]) -> None:
    """Keeps `result` ("pass@1", "correct", "prompts", …) as that of one weight version; a second one replaces the first."""
    folder = Path(run_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"version_{version:06d}.json", json.dumps({"version": version, **result}))


def read_results(run_dir: Path | str) -> list[dict[str, float]]:
    """All of a run's evaluations, in the order of their weight versions."""
    results = [json.loads(path.read_text()) for path in (Path(run_dir) / "eval").glob("version_*.json")]
    return sorted(results, key=lambda result: result["version"])
