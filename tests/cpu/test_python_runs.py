"""Runs the cells of docs/python.md as a notebook does: inside a running event loop, in a folder
that is no checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documented import snippets
from run_tools import rows

from megarl.plan.checkpoints import complete_checkpoints

SHORT = [
    "max_steps=2",
    "sft.steps=2",
    "rollout.prompts_per_step=4",
    "rollout.n=2",
    "eval.limit=8",
    "checkpoint.every=0",
]
GROWS = "# … run.metrics grows"
NOTEBOOK = """
import asyncio, sys
from pathlib import Path

async def notebook(cells):
    space = {"__name__": "__main__"}
    for cell in cells:
        exec(Path(cell).read_text(), space)

asyncio.run(notebook(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_cells_of_the_document_run_in_a_notebook(tmp_path: Path) -> None:
    """The last cell stops a run of another thread while it trains."""
    begin, graders, train, thread = snippets("python.md", "python")
    (tmp_path / "graders.py").write_text(graders)
    assert '"max_steps=40"' in begin and GROWS in thread
    begin = begin.replace('"max_steps=40"', ", ".join(map(repr, SHORT)))
    thread = thread.replace('"max_steps=80"', '"max_steps=100000"')
    thread = (
        thread.replace(GROWS, "import time\nwhile len(run.metrics) < 4:\n    time.sleep(0.2)")
        + "training.join()\n"
    )
    cells = []
    for number, cell in enumerate((begin, train, thread)):
        cells.append(tmp_path / f"cell_{number}.py")
        cells[-1].write_text(cell)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    completed = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, *cells],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
    run_dir = tmp_path / "runs/notebook"
    assert (
        "runs/notebook: 2 steps" in completed.stdout
        and (run_dir / "exported/model.safetensors").exists()
    )
    assert f"name: {tmp_path}/graders.py:share_right" in (run_dir / "config.yaml").read_text()
    steps = len(rows(run_dir))
    assert (
        steps >= 4
        and complete_checkpoints(run_dir)[-1][0] == steps
        and f"stopped at step {steps}" in completed.stdout
    )
