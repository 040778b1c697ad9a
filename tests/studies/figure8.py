"""`python tests/studies figure8 CONFIG`: what AIPO's correction is worth (LlamaRL, figure 8).

It makes runs that differ in the engine's precision, in the age of samples, in the learning rate and
in the rule that weights tokens (`stale_loop`). Runs of the same seed have the same warm start,
prompts and noise, so they are compared seed by seed. Each result is kept in result.json in the
run's folder. The same command continues an interrupted study.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from offpolicy import Quality, held_out_of, measure, write_model
from stale_loop import run_loop
from whole_runs import check_settings, note_settings, run_megarl

from megarl.base.files import write_whole
from megarl.config.load import load_config
from megarl.observe.agreement import AGES
from megarl.observe.metrics import Row
from megarl.plan.resolve import resolve

HEAD_SIZE = 64  # so that rows of an fp8 block are whole
UPDATES = 64
LAST = 10  # steps over which a reward is averaged
FALL = 0.1  # a run has fallen if its reward ends further below its best
# Settings of all runs: the rules have the same advantages and the same mean.
COMMON = (
    f"max_steps={UPDATES}",
    "rollout.prompts_per_step=16",
    "algorithm.advantage=mean",
    "algorithm.loss_mean=token",
    "trainer.tp=1",
    "trainer.dp=1",
)
# The weight of a token, r being pi/mu
RULES: Mapping[str, Sequence[str]] = {
    "none": ("algorithm.name=reinforce",),  # 1
    "rho 1": ("algorithm.name=aipo", "algorithm.rho=1"),  # min(r, 1)
    "rho 2": ("algorithm.name=aipo", "algorithm.rho=2"),
    "rho 4": ("algorithm.name=aipo", "algorithm.rho=4"),
    "rho 10": ("algorithm.name=aipo", "algorithm.rho=10"),
    # r clamped to [0.8, 1.2], with a gradient outside
    "clamp": ("algorithm.name=aipo", "algorithm.rho_min=0.8", "algorithm.rho=1.2"),
    # PPO's clipping in [0.8, 1.2]: no gradient where A pushes r further out
    "clip": ("algorithm.name=grpo", "algorithm.dual_clip=1e9"),
    "drop": ("algorithm.name=icepop",),  # r; 0 outside [0.5, 5]
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    engine: str
    lag: int  # updates between sampling and training; fewer in the first steps
    rate: float  # of the config's learning rate
    rule: str
    seed: int

    @property
    def name(self) -> str:
        rule = self.rule.replace(" ", "")
        return f"{self.engine}-lag{self.lag}-lr{self.rate:g}-{rule}-seed{self.seed}"

    def overrides(self, learning_rate: float) -> list[str]:
        return [
            *COMMON,
            *RULES[self.rule],
            f"trainer.optimizer.lr={self.rate * learning_rate:g}",
            f"seed={self.seed}",
        ]


BASELINE = "rho 4"
USUAL = ("none", BASELINE)
# engine, lag, learning rate, rules: the most telling ones first
COMPARISONS: Sequence[tuple[str, int, float, Sequence[str]]] = (
    ("fp8", 8, 3, (*USUAL, "clip", "rho 1")),
    ("int4", 8, 3, USUAL),
    ("fp8", 8, 1, (*USUAL, "clip")),
    ("fp8", 8, 2, USUAL),
    ("fp8", 8, 1, ("rho 1", "rho 10", "drop")),
    ("fp8", 4, 3, USUAL),
    ("int4", 8, 1, USUAL),
    ("fp8", 1, 3, USUAL),
    ("exact", 8, 1, USUAL),
    ("fp8", 8, 1, ("rho 2", "clamp")),
    ("fp8", 1, 6, USUAL),
    ("fp8", 4, 1, USUAL),
    ("fp8", 8, 2, ("clip",)),
    ("fp8", 4, 3, ("clip",)),
    ("fp8", 1, 6, ("clip",)),
    ("int4", 8, 2, (*USUAL, "clip")),
    ("int4", 4, 3, USUAL),
    ("int4", 1, 3, USUAL),
    ("int4", 1, 6, USUAL),
    ("fp8", 8, 3, ("rho 2", "rho 10", "drop", "clamp")),
    ("int4", 8, 1, ("clip", "rho 1", "rho 2", "rho 10", "drop", "clamp")),
)


def cells_of(seeds: int) -> list[Cell]:
    """All runs, seed by seed within a comparison."""
    return [
        Cell(engine, lag, rate, rule, seed)
        for engine, lag, rate, rules in COMPARISONS
        for seed in range(seeds)
        for rule in rules
    ]


@dataclass(frozen=True)
class Study:
    config: str
    overrides: Sequence[str]
    runs: Path

    @property
    def model(self) -> Path:
        return self.runs / "model"

    def warm_start(self, seed: int) -> Path:
        return self.runs / "warm_starts" / f"seed{seed}"

    def common(self, seed: int) -> list[str]:
        return [
            *self.overrides,
            f"model.path={self.model}",
            f"seed={seed}",
            f"sft.output={self.warm_start(seed)}",
        ]

    def of_run(self, cell: Cell) -> list[str]:
        learning_rate = load_config(self.config, self.overrides).trainer.optimizer.lr
        return [*self.common(cell.seed), *cell.overrides(learning_rate)]

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Makes the model and the warm starts. Wrong settings show before anything starts."""
        settings = load_config(self.config, self.overrides)
        check_settings(self.runs, settings)
        write_model(Path(settings.model.path), self.model, {"head_dim": HEAD_SIZE})
        for cell in cells:
            load_config(self.config, self.of_run(cell))
        for seed in sorted({cell.seed for cell in cells}):
            if (self.warm_start(seed) / "config.json").exists():
                continue
            run_dir = Path(f"{self.warm_start(seed)}.run")
            run_megarl("sft", self.config, [*self.common(seed), f"run_dir={run_dir}"], run_dir)
        note_settings(self.runs, settings)

    def make(self, cell: Cell) -> None:
        """Makes a run and writes its result, in a process of its own."""
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = load_config(self.config, self.of_run(cell))
        held_out = held_out_of(config)
        with tempfile.TemporaryDirectory() as folder:
            rows = run_loop(
                resolve(config, "train"),
                lag=cell.lag,
                engine=cell.engine,
                judge=held_out.judge,
                output=Path(folder),
            )
            quality = measure(
                Path(folder),
                initial=self.warm_start(cell.seed),
                reward_model=None,
                held_out=held_out,
                max_tokens=config.rollout.max_tokens,
                seed=cell.seed,
            )
        write_whole(self.result_path(cell), json.dumps(asdict(cell) | facts_of(rows, quality)))

    def result_path(self, cell: Cell) -> Path:
        return self.runs / cell.name / "result.json"


def in_child(study: Study, cell: Cell) -> None:
    """What the process of a run does. Its output goes to the run's log."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(study.result_path(cell).parent / "log", "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    status = 1
    try:
        study.make(cell)
        status = 0
    except Exception:
        traceback.print_exc()
    os._exit(status)  # without waiting for gloo's threads


def make_all(study: Study, cells: Sequence[Cell], lanes: int) -> None:
    """Makes the runs that have no result, `lanes` at a time.

    Their processes are forks of this one, since importing the trainer takes longer than many steps.
    """
    from megarl.trainer import cpu_support

    cpu_support.install()
    for module in ("megarl.executors.policy", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    running: list[Any] = []
    for cell in cells:
        if study.result_path(cell).exists():
            continue
        while len(running) >= lanes:
            connection.wait([process.sentinel for process in running])
            running = [process for process in running if process.is_alive()]
        print(cell.name, file=sys.stderr, flush=True)
        study.result_path(cell).parent.mkdir(parents=True, exist_ok=True)
        running.append(context.Process(target=in_child, args=(study, cell), daemon=True))
        running[-1].start()
    for process in running:
        process.join()


def facts_of(rows: Sequence[Row], quality: Quality) -> dict[str, Any]:
    """What is kept of a run: the last weights' quality, and what its steps reported."""
    series = {
        name: [row.get(name) for row in rows]
        for name in (
            "reward/mean",
            "staleness/mean",
            "agreement/abs_diff_mean",
            "agreement/ess",
            "agreement/ess_sequences",
            "agreement/kl_k3",
            "entropy/mean",
            "grad_norm",
            "is_ratio/clipped_fraction",
        )
    }
    for age in AGES:
        for meter in ("tokens", "abs_diff_mean", "ess"):
            name = f"agreement/{age}/{meter}"
            series[name] = [row.get(name) for row in rows]
    return {"score": quality.score, "kl": quality.kl, "series": series}


def run(
    config: str, overrides: Sequence[str], runs: Path, seeds: int, lanes: int, as_json: bool
) -> None:
    """Prints tables, or one JSON object, of all complete runs.

    `lanes` runs go side by side. Raises ConfigError; RuntimeError, at the end, if runs have failed.
    """
    study = Study(config, overrides, runs)
    cells = cells_of(seeds)
    study.prepare(cells)
    make_all(study, cells, lanes)
    paths = [study.result_path(cell) for cell in cells]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    facts = {"config": config, "overrides": list(overrides), "runs": results}
    print(json.dumps(facts) if as_json else render(results))
    failed = [str(path.parent / "log") for path in paths if not path.exists()]
    if failed:
        raise RuntimeError(
            f"{len(failed)} runs failed; the same command tries them again; see {failed[0]}"
        )


Result = Mapping[str, Any]


def render(results: Sequence[Result]) -> str:
    """A Markdown table with a row for each setting and rule."""
    lines = [
        "| engine | lag | rate | rule | score, by seed | mean | minus that of rho 4 | fell | "
        "from step | age | log-prob difference | sample size |",
        "|" + "---|" * 12,
    ]
    by_setting: dict[tuple[str, int, float], dict[str, dict[int, Result]]] = {}
    for result in results:
        setting = (result["engine"], result["lag"], result["rate"])
        rules = by_setting.setdefault(setting, {})
        rules.setdefault(result["rule"], {})[result["seed"]] = result
    for setting, rules in by_setting.items():
        for rule, by_seed in rules.items():
            baseline = {} if rule == BASELINE else rules.get(BASELINE, {})
            lines.append(_row(setting, rule, by_seed, baseline))
    return "\n".join(lines)


def _row(
    setting: tuple[str, int, float],
    rule: str,
    by_seed: Mapping[int, Result],
    baseline: Mapping[int, Result],
) -> str:
    scores = {seed: result["score"] for seed, result in by_seed.items()}
    differences = [
        score - baseline[seed]["score"] for seed, score in scores.items() if seed in baseline
    ]
    falls = [fall_of(result["series"]["reward/mean"]) for result in by_seed.values()]
    steps = [fall for fall in falls if fall is not None]
    cells = [
        *map(str, setting),
        rule,
        " ".join(f"{scores[seed]:.2f}" for seed in sorted(scores)),
        f"{fmean(scores.values()):.3f}",
        _paired(differences),
        f"{len(steps)} of {len(falls)}",
        " ".join(map(str, steps)) or "–",
        f"{_mean(by_seed, 'staleness/mean'):.1f}",
        f"{_mean(by_seed, 'agreement/abs_diff_mean'):.3f}",
        f"{_mean(by_seed, 'agreement/ess'):.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _paired(differences: Sequence[float]) -> str:
    """Mean and twice its standard error."""
    if not differences:
        return "–"
    mean = fmean(differences)
    if len(differences) == 1:
        return f"{mean:+.3f}"
    return f"{mean:+.3f} ± {2 * stdev(differences) / math.sqrt(len(differences)):.3f}"


def _mean(by_seed: Mapping[int, Result], name: str) -> float:
    """Over seeds and steps; a step that trained on nothing has no value."""
    values = []
    for result in by_seed.values():
        values += [value for value in result["series"][name] if value is not None]
    return fmean(values)


def fall_of(rewards: Sequence[float]) -> int | None:
    """The first step after which the mean reward of LAST steps is more than FALL below its best so
    far, if it stays so to the end; None if the run has not fallen.
    """
    means = [fmean(rewards[end - LAST : end]) for end in range(LAST, len(rewards) + 1)]
    fallen = None
    best = -math.inf
    for end, mean in enumerate(means, LAST):
        best = max(best, mean)
        if mean >= best - FALL:
            fallen = None
        elif fallen is None:
            fallen = end - 1
    return fallen
