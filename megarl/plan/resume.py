"""Whether a run directory that holds checkpoints may be continued with this config."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable

from megarl.config.errors import ConfigError
from megarl.config.keys import settings, value_at
from megarl.config.load import load_config
from megarl.config.schema import RunConfig

# What the checkpoints, the order of the prompts and the meaning of the reward depend on. Parallel sizes may change.
FIXED_KEYS = (
    "model.path",
    "model.tokenizer",
    "model.dtype",
    *(key for key in settings() if key.startswith("data.train.")),
    "data.shuffle",
    "trainer.zero",
    "algorithm.name",
    "rollout.prompts_per_step",
    "rollout.n",
    "reward.name",
    "seed",
)


def check_resume(config: RunConfig) -> Iterable[str]:
    """Problems with going on from what `config.run_dir` holds; none where there is no checkpoint yet."""
    run_dir = Path(config.run_dir)
    written = run_dir / "config.yaml"
    if not written.is_file() or not any(run_dir.glob("checkpoints/step_*")):
        return
    try:
        earlier = load_config(written)
    except ConfigError as error:
        yield f"run_dir={run_dir}: its config.yaml cannot be read ({error.problems[0]}); use another run_dir"
        return
    for key in FIXED_KEYS:
        before, now = value_at(earlier, key), value_at(config, key)
        if before != now:
            yield f"{key}={_show(now)}: the run in run_dir={run_dir} began with {_show(before)}; keep that, or use another run_dir"


def _show(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
