"""`python tests/studies peer`: the seconds of a step beside TRL's GRPO, on the same weights,
prompts, sizes and cores, in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path

from whole_runs import run_megarl

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.data.datasets import load_rows
from megarl.observe.metrics import METRICS_FILE, read_metrics

SCRIPT = Path(__file__).with_name("trl_grpo.py")
LONGEST_S = 3600.0
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Settings:
    """What both sides train on."""

    model: str
    rows: list[dict[str, str]]  # prompt, answer
    prompts_per_step: int
    n: int
    max_tokens: int
    temperature: float
    lr: float
    steps: int
    seed: int
    threads: int


def run(
    config_path: str,
    overrides: list[str],
    python: str,
    steps: int,
    pairs: int,
    runs: Path,
    as_json: bool,
) -> None:
    """Prints the median seconds of a step of both, and their ratio in each pair of runs.

    Raises ConfigError, RuntimeError.
    """
    config = load_config(config_path, overrides)
    if not Path(config.model.path, "config.json").is_file():
        raise ConfigError(
            f"model.path={config.model.path}: must be a local folder with weights, which both "
            "sides load"
        )
    settings = settings_of(config, steps)
    ratios = []
    for pair in range(pairs):
        folder = runs / str(pair)
        megarl_s = _megarl_step_s(config_path, overrides, steps, folder)
        trl_s = _trl_step_s(settings, python, folder)
        ratios.append(megarl_s / trl_s)
        if not as_json:
            print(
                f"pair {pair}: MegaRL {megarl_s:.3f} s a step, TRL {trl_s:.3f} s, ratio "
                f"{ratios[-1]:.2f}",
                flush=True,
            )
    if as_json:
        print(json.dumps({"ratios": ratios, "median": statistics.median(ratios)}))
    else:
        print(
            f"MegaRL takes {statistics.median(ratios):.2f} of TRL's time ({min(ratios):.2f} to "
            f"{max(ratios):.2f})"
        )


def settings_of(config: RunConfig, steps: int) -> Settings:
    rows = load_rows(config.data.train, "data.train", config.seed, model=config.model)
    sampled = config.rollout
    return Settings(
        model=config.model.path,
        rows=[
            {"prompt": row.prompt, "answer": row.answer}
            for row in islice(rows, steps * sampled.prompts_per_step)
        ],
        prompts_per_step=sampled.prompts_per_step,
        n=sampled.n,
        max_tokens=sampled.max_tokens,
        temperature=sampled.temperature,
        lr=config.trainer.optimizer.lr,
        steps=steps,
        seed=config.seed,
        threads=len(os.sched_getaffinity(0)),
    )


def _megarl_step_s(config: str, overrides: list[str], steps: int, folder: Path) -> float:
    run_dir = folder / "megarl"
    plain = [
        f"max_steps={steps}",
        f"run_dir={run_dir}",
        "eval.every=0",
        f"checkpoint.every={steps}",
    ]
    run_megarl("train", config, [*overrides, *plain], run_dir)
    rows = list(read_metrics(run_dir / METRICS_FILE))
    ends = [row["wall_s"] for row in rows[WARM_UP_STEPS - 1 :]]
    return statistics.median(after - before for before, after in pairwise(ends))


def _trl_step_s(settings: Settings, python: str, folder: Path) -> float:
    settings_file = folder / "trl.json"
    times_file = folder / "trl_steps.json"
    settings_file.write_text(json.dumps(asdict(settings)), encoding="utf-8")
    with open(folder / "trl.log", "wb") as log:
        status = subprocess.run(
            [python, str(SCRIPT), str(settings_file), str(times_file)],
            stdout=log,
            stderr=log,
            timeout=LONGEST_S,
        ).returncode
    if status != 0:
        raise RuntimeError(f"TRL ended with exit status {status}; see {folder / 'trl.log'}")
    return statistics.median(json.loads(times_file.read_text(encoding="utf-8"))[WARM_UP_STEPS:])
