"""Runs of the shipped program, for benchmarks that compare whole runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_megarl(command: str, config: str, overrides: Sequence[str], run_dir: Path) -> None:
    """Runs `megarl COMMAND CONFIG …`; what it prints goes to `run_dir`/COMMAND.log. Raises RuntimeError if it fails."""
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / f"{command}.log"
    with open(log, "ab") as output:
        status = subprocess.run([sys.executable, "-m", "megarl", command, config, *overrides], stdout=output, stderr=output).returncode
    if status != 0:
        raise RuntimeError(f"megarl {command} {config} {' '.join(overrides)} ended with exit status {status}; see {log}")
