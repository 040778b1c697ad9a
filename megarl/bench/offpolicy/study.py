"""`megarl bench offpolicy CONFIG`: how losses bear data that older weights have sampled. Real runs over losses, mini-batches, seeds, sizes.

Every run is a `megarl train` by the shipped program; runs with the same seed and size begin from the same warm start. What a run has led to
is kept in its folder's result.json, and its weights are removed. The same command continues an interrupted study: complete runs are not
repeated, interrupted ones go on, failed ones are tried again.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from megarl.bench.offpolicy.cells import OF_REWARD_MODELS, PARTS, SIZES, Cell
from megarl.bench.offpolicy.tables import render
from megarl.bench.runs import check_settings, ending_runs, note_settings, run_megarl
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.roles import REWARD_MODEL, role_of
from megarl.config.schema import RunConfig
from megarl.files import write_whole
from megarl.observe.metrics import METRICS_FILE, read_metrics
from megarl.plan.roles import roles_of

RESULT = "result.json"
LAST_SAMPLES = 1280  # the mean reward of so many last ones counts
CURVE_POINTS = 4  # weights measured in a run, the last among them


@dataclass(frozen=True)
class Study:
    config: str
    overrides: Sequence[str]
    runs: Path
    learned: bool  # the reward is a model's, which has to be made
    measuring: Lock = field(default_factory=Lock)  # one run at a time: two threads must not import transformers at once

    def common(self, cell: Cell) -> list[str]:
        model = [] if SIZES[cell.policy] is None else [f"model.path={self.runs / 'models' / cell.policy}"]
        reward_model = [f"reward_model.output={self.reward_model(cell)}"] if self.learned else []
        return [*self.overrides, *model, f"seed={cell.seed}", f"sft.output={self.initial(cell)}", *reward_model]

    def initial(self, cell: Cell) -> Path:
        return self.runs / "warm_starts" / f"{cell.policy}-seed{cell.seed}"

    def reward_model(self, cell: Cell) -> Path:
        return self.runs / "reward_models" / f"{cell.reward_model}-seed{cell.seed}"

    def folder(self, cell: Cell) -> Path:
        return self.runs / cell.name

    def of_run(self, cell: Cell) -> list[str]:
        common = self.common(cell)
        learning_rate = load_config(self.config, common).trainer.optimizer.lr
        kept = [f"checkpoint.hf_every={max(1, cell.steps // CURVE_POINTS)}", f"run_dir={self.folder(cell)}"]
        return [*common, *cell.overrides(learning_rate, penalised=self.learned), *kept]

    def prepare(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Makes models, warm starts and reward models; returns what became of the latter. Mistakes show before anything starts."""
        from megarl.bench.offpolicy.measure import judge_of

        settings = load_config(self.config, self.overrides)
        judge_of(settings)
        check_settings(self.runs, settings)
        judges = list({(cell.reward_model, cell.seed): _of_reward_model(cell) for cell in cells}.values()) if self.learned else []
        for cell in (*cells, *judges):
            if (own := SIZES[cell.policy]) is not None:
                _write_model(Path(settings.model.path), self.runs / "models" / cell.policy, own)
            load_config(self.config, self.of_run(cell))
        for cell in {(each.policy, each.seed): each for each in (*cells, *judges)}.values():
            run_megarl("sft", self.config, [*self.common(cell), f"run_dir={self.initial(cell)}.run"], Path(f"{self.initial(cell)}.run"))
        note_settings(self.runs, settings)
        return list(map(self._make_reward_model, judges))

    def _make_reward_model(self, cell: Cell) -> dict[str, Any]:
        """The share of held-out pairs that it orders rightly, beside a plain PyTorch run's."""
        from megarl.bench.offpolicy import plain

        folder = self.reward_model(cell)
        run_dir, path = Path(f"{folder}.run"), Path(f"{folder}.run") / RESULT
        overrides = [*self.common(cell), f"run_dir={run_dir}"]
        if not (folder / "config.json").exists():
            run_megarl("reward-model", self.config, overrides, run_dir)
        if not path.exists():
            config = load_config(self.config, overrides)
            found = {
                "size": cell.reward_model,
                "seed": cell.seed,
                "accuracy": read_metrics(run_dir / "reward_model" / METRICS_FILE)[-1]["eval/accuracy"],
                "accuracy_plain": plain.accuracy(plain.train(config, self.initial(cell)), config),
            }
            write_whole(path, json.dumps(found))
        return _read(path)

    def result(self, cell: Cell) -> dict[str, Any]:
        """Of the run, which is made if it is not complete. Raises RuntimeError if it fails."""
        path = self.folder(cell) / RESULT
        if not path.exists():
            print(cell.name, file=sys.stderr, flush=True)
            run_megarl("train", self.config, self.of_run(cell), self.folder(cell))
            with self.measuring:
                found = self._found(cell, load_config(self.config, self.of_run(cell)))
            write_whole(path, json.dumps(found))
            for name in ("checkpoints", "hf"):
                shutil.rmtree(self.folder(cell) / name, ignore_errors=True)
        return _read(path)

    def _found(self, cell: Cell, config: RunConfig) -> dict[str, Any]:
        from megarl.bench.offpolicy.measure import HeldOut, judge_of, measure
        from megarl.data.datasets import load_rows
        from megarl.data.prompts import held_out_sets
        from megarl.data.tokenizer import load_tokenizer
        from megarl.plan.resolve import find_spec

        tokenizer = load_tokenizer(config.model)
        config.eval.limit = None
        prompts = held_out_sets(config, tokenizer, find_spec(config))[0].prompts
        assert config.data.eval is not None  # judge_of has seen it
        rows = load_rows(config.data.eval, "data.eval", config.seed, "none", tokenizer.source)
        shown = [rows[place].demonstration for place in range(len(prompts))]
        held_out = HeldOut(prompts, [each if isinstance(each, str) else each[-1] for each in shown], tokenizer, judge_of(config))
        models = self.initial(cell), self.reward_model(cell) if self.learned else None
        rest = *models, held_out, config.rollout.max_tokens, cell.seed
        curve = [{"updates": 0, **asdict(measure(self.initial(cell), *rest))}]
        for weights in sorted((self.folder(cell) / "hf").glob("step_*")):
            updates = int(weights.name.removeprefix("step_")) * cell.minibatches
            curve.append({"updates": updates, **asdict(measure(weights, *rest))})
        metrics = read_metrics(self.folder(cell) / METRICS_FILE)
        last = max(1, LAST_SAMPLES // (config.rollout.prompts_per_step * config.rollout.n))
        return {
            **asdict(cell),
            "curve": curve,
            "reward": statistics.fmean(row["reward/mean"] for row in metrics[-last:]),
            "staleness_mean": statistics.fmean(row["staleness/mean"] for row in metrics),
            "step_s": statistics.median(row["time/train_s"] + row["time/trainer_wait_s"] for row in metrics),
        }


def run(
    config: str, overrides: Sequence[str], runs: Path, parts: Sequence[str], seeds: int, lanes: int, as_json: bool, picture: str | None
) -> None:
    """Prints tables, or one JSON object. `lanes`: runs side by side. Raises ConfigError; RuntimeError, at the end, if runs have failed."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"--parts {','.join(unknown)}: must be of {', '.join(PARTS)}")
    settings = load_config(config, overrides)
    learned = any(role_of(name, role) == REWARD_MODEL for name, role in roles_of(settings).items())
    if not learned and OF_REWARD_MODELS in parts:
        raise ConfigError(f"--parts {OF_REWARD_MODELS}: needs a reward model in `roles`; {config} has none")
    study = Study(config, overrides, runs, learned)
    chosen = list(parts or [part for part in PARTS if learned or part != OF_REWARD_MODELS])
    cells = {cell.name: cell for seed in range(seeds) for part in chosen for cell in PARTS[part](seed)}
    reward_models = study.prepare(list(cells.values()))
    found: dict[str, dict[str, Any]] = {}
    failures: list[str] = []

    def make(cell: Cell) -> None:
        try:
            found[cell.name] = study.result(cell)
        except (RuntimeError, OSError) as error:  # one run that fails must not end a night's work
            failures.append(f"{cell.name}: {error}")

    with ending_runs(), ThreadPoolExecutor(lanes) as pool, ending_runs():  # the outer one: of a second Ctrl-C while the runs end
        list(pool.map(make, cells.values()))
    by_part = {part: [found[cell.name] for seed in range(seeds) for cell in PARTS[part](seed) if cell.name in found] for part in chosen}
    given = {"config": config, "overrides": list(overrides)}
    facts: Mapping[str, Any] = given | {"reward_models": reward_models, "parts": by_part, "failures": failures}
    print(json.dumps(facts) if as_json else render(facts))
    if picture:
        from megarl.bench.offpolicy.picture import draw

        draw(facts, picture)
    if failures:
        raise RuntimeError(f"{len(failures)} runs failed; the same command tries them again\n" + "\n".join(failures))


def _of_reward_model(cell: Cell) -> Cell:
    """The policy that the run's reward model begins with."""
    return Cell("online_dpo", policy=cell.reward_model, reward_model=cell.reward_model, seed=cell.seed)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{path}: is damaged ({error}); remove {path.parent} to make it again") from error
    return found


def _write_model(shipped: Path, folder: Path, sizes: Mapping[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in shipped.iterdir():
        if file.name != "config.json" and file.is_file():
            shutil.copyfile(file, folder / file.name)
    write_whole(folder / "config.json", json.dumps(json.loads((shipped / "config.json").read_text()) | sizes, indent=2))
