"""Every setting has an effect: some code reads each key of the schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_reads import reads, unread

from megarl.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / folder for folder in ("megarl", "launch", "kernels")]
SOURCES = [
    path
    for folder in FOLDERS
    for path in folder.rglob("*.py")
    if path.parent != ROOT / "megarl/config"
]
CHECKS = ("checks.py", "vendor_settings.py", "checkpoints.py", "check.py")


def test_check_files_exist() -> None:
    assert set(CHECKS) <= {path.name for path in SOURCES}


def test_every_setting_is_read() -> None:
    assert unread(RunConfig, reads(path.read_text() for path in SOURCES)) == []


def test_run_uses_every_setting_beyond_its_checks() -> None:
    """A run also does more than plan with it, except for the settings of the planner."""
    of_a_run = [
        path
        for path in SOURCES
        if path.name not in CHECKS and path.parent.name not in ("estimate", "simulation")
    ]
    unused = unread(RunConfig, reads(path.read_text() for path in of_a_run))
    assert {"plan.prompt_tokens", "plan.response_tokens", "plan.dropped_share"} <= set(unused)
    assert all(key.startswith("plan.") for key in unused)


@pytest.mark.parametrize(
    "source",
    [
        "def f(config: RunConfig): return config.sft.steps",
        "def f(plan): return plan.config.sft.steps",
        "def f(sft: Optional[SftConfig]): return sft.steps",
        "def f(plan):\n  config, other = plan.config, 3\n  s = config.sft if other else None\n  "
        "return s.steps",
        "class A:\n  def g(self): return self.s.steps\n  def __init__(self, c: RunConfig): self.s "
        "= c.sft",
        "KEYS = ('steps', 'tp')\ndef f(c: RunConfig): return [getattr(c.sft, key) for key in KEYS]",
    ],
)
def test_setting_is_read_by(source: str) -> None:
    assert ("SftConfig", "steps") in reads([source])


@pytest.mark.parametrize(
    "source",
    [
        "def f(config: RunConfig): return config.trainer.steps",
        "def f(trainer: TrainerConfig): return trainer.steps",
        "def f(sft): return sft.steps",
        "def f(config: RunConfig): config.sft.steps = 3",
        "def f(c: RunConfig): return getattr(c.sft, 'batch_size')",
    ],
)
def test_setting_is_not_read_by(source: str) -> None:
    assert ("SftConfig", "steps") not in reads([source])


def test_unread_key_is_named() -> None:
    assert "max_steps" in unread(RunConfig, reads(["def f(config: RunConfig): return config.seed"]))
