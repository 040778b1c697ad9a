"""The Python entry (docs/python.md): the commands of megarl as functions that return objects, and a
run's files as one object.

A function checks what its command checks, and then calls what its command calls. `megarl` imports
this file when one of its names is first used; this file imports what starts processes only where
that is called. So planning needs no torch.

Mistakes raise ConfigError. What fails later raises RunError, or TimeoutError if a process has
waited for another until a deadline.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.base.files import PICTURES, file_problems, new_folder_problems
from megarl.base.results import CommandResult
from megarl.config.errors import ConfigError, RunError, problems_of, unreadable
from megarl.config.limits import path_of
from megarl.config.load import ConfigSource, load_config, override_text, read_config
from megarl.config.schema import RunConfig
from megarl.config.tasks import tasks_of, with_source_keys
from megarl.launch.gpus import gpus
from megarl.launch.nodes import this_node
from megarl.launch.watch import Stopped
from megarl.observe.metrics import METRICS_FILE, Row, read_metrics
from megarl.plan.checks import COMMAND_CHECKS, problems_by_group
from megarl.plan.resolve import RunPlan, resolve
from megarl.plan.topologies import with_one_gpu_shared
from megarl.plan.weights import scores_checkpoint, warm_start_due
from megarl.rewards.score import trained_parts

__all__ = [
    "CommandResult",
    "ConfigError",
    "Run",
    "RunError",
    "Stopped",
    "evaluate",
    "load",
    "plan",
    "reshard",
    "sft",
    "simulate",
    "train",
]


def load(config: ConfigSource, *overrides: str) -> RunConfig:
    """The settings of `config`, the path of a YAML file or a mapping, with `overrides` such as
    "trainer.tp=2".

    Paths in a mapping are relative to the working directory. Raises ConfigError with all unknown
    keys and impossible values.
    """
    return load_config(config, overrides)


def plan(
    config: ConfigSource,
    *overrides: str,
    search: bool = False,
    theory: bool = False,
    eta: Sequence[str] = (),
    gpus: int | None = None,
    picture: str | None = None,
) -> CommandResult:
    """What `megarl plan` prints: whether the run fits (`fits`), how long a step takes (`step_s`),
    what limits it (`binding`). The options are those of the command. Needs no GPU. Raises
    ConfigError.
    """
    from megarl.estimate.command import run_plan

    check_outputs(picture=picture)
    if gpus is not None and type(gpus) is not int:
        raise ConfigError(f"gpus={gpus!r}: must be a whole number")
    run = resolved("plan", config, overrides)
    given = shlex.join([str(config) if isinstance(config, str | Path) else "CONFIG", *overrides])
    return run_plan(
        run, given, searching=search, theory=theory, eta=eta, budget=gpus, picture=picture
    )


def simulate(
    config: ConfigSource,
    *overrides: str,
    sweep: Sequence[str] = (),
    source: str | None = None,
    output: str | None = None,
) -> CommandResult:
    """What `megarl plan` prints with `--simulate`: the run in virtual time (`step_p50_s`, `tokens_per_s`,
    `waits_for_batch`).

    Args:
        sweep: such as ["async.capacity=0,1"]; the result then has `rows`, one for each combination
            of values, and `take`, the settings to choose.
        source: a run's folder, whose measured times are used (--from).
        output: a folder for the simulated run, for `megarl.Run(output).report()`.

    Raises ConfigError, RunError.
    """
    from megarl.simulation.command import run_simulation

    return run_simulation(
        lambda swept: resolved("plan", config, [*overrides, *swept]),
        sweep=sweep,
        source=source,
        output=output,
    )


def reshard(
    config: ConfigSource,
    *overrides: str,
    rank: str | None = None,
    delta: float = 0.01,
    link: float | None = None,
    dump: str | None = None,
    picture: str | None = None,
) -> CommandResult:
    """What `megarl reshard` prints: the proven map of a weight update (`copies`, `bytes`,
    `exactly_once`). The options are those of the command; `link` is in GB/s. Raises ConfigError.
    """
    from megarl.estimate.command import run_map

    check_outputs(picture=picture, dump=dump)
    if rank is not None and not isinstance(rank, str):
        raise ConfigError(f'rank={rank!r}: must be a text such as "trainer:17"')
    return run_map(
        resolved("reshard", config, overrides),
        rank=rank,
        delta=delta,
        link=link,
        dump=dump,
        picture=picture,
    )


def train(
    config: ConfigSource,
    *overrides: str,
    reward: Callable[..., Any] | str | None = None,
    rollout: Callable[..., Any] | str | None = None,
) -> Run:
    """Trains as `megarl train` does, from the newest checkpoint in run_dir or from the start, and
    returns the run when it is complete.

    Args: reward, rollout: a function of an imported file, or a text, as reward.name and
    rollout.name.

    Ctrl-C, or a notebook's button for it, ends the run once the running step is saved, and raises
    Stopped; the same call goes on from there. Raises ConfigError before anything starts, RunError,
    TimeoutError, Stopped.
    """
    from megarl.launch import commands

    run = resolved(
        "train",
        config,
        [*overrides, *_named("reward.name", reward), *_named("rollout.name", rollout)],
    )
    if reward is not None and run.config.reward.parts:
        parts = ", ".join(f"reward.parts.{name}" for name in run.config.reward.parts)
        raise ConfigError(
            f"reward={run.config.reward.name}: does not count beside {parts}: name it as one of "
            "the parts instead"
        )
    _check_used("reward", reward, "reward.name", {part.key for part in trained_parts(run.config)})
    rollouts = {
        with_source_keys("rollout.name", run.config, source) for source in tasks_of(run.config)
    }
    _check_used("rollout", rollout, "rollout.name", rollouts)
    with _signals_as_stops():
        commands.train(run)
    return Run(run.config.run_dir)


def _check_used(argument: str, value: object, key: str, used_keys: set[str]) -> None:
    """Raises ConfigError if `value` is given and each source has its own in its place."""
    if value is not None and key not in used_keys:
        raise ConfigError(
            f"{argument}: does not count: each source in data.train.sources has its own {key}"
        )


def sft(config: ConfigSource, *overrides: str) -> Path:
    """Makes the warm start as `megarl sft` does, unless it is there.

    Returns the folder of its weights, sft.output. Raises ConfigError, RunError, TimeoutError,
    Stopped.
    """
    run = resolved("sft", config, overrides)
    with _signals_as_stops():
        warm_starts(run, config, overrides)
    return Path(run.config.sft.output)


def evaluate(
    config: ConfigSource,
    *overrides: str,
    step: int | None = None,
    best: bool = False,
    reward: Callable[..., Any] | str | None = None,
) -> CommandResult:
    """The scores that `megarl eval` prints: of the run's newest checkpoint, that of `step`, or the
    `best`; without one, of model.path. `reward`: a function or a text, as for `train`; it is
    eval.reward. Raises ConfigError, RunError, TimeoutError, Stopped.
    """
    from megarl.launch import commands

    run = resolved(
        "eval", config, [*overrides, *_named("eval.reward", reward)], step=step, best=best
    )
    with _signals_as_stops():
        return commands.evaluate_checkpoint(run, step, best)


class Run:
    """The files of the run in `run_dir` (docs/run_dir.md), also of one that goes on.

    Each property reads them anew.
    """

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        if not any((self.run_dir / name).is_file() for name in ("config.yaml", METRICS_FILE)):
            raise ConfigError(
                f"{run_dir}: holds neither config.yaml nor {METRICS_FILE}: not the folder of a run"
            )

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r}): {len(read_metrics(self.run_dir / METRICS_FILE))} steps"

    @property
    def config(self) -> RunConfig:
        """The settings of the run's last start."""
        return load_config(
            self.run_dir / "config.yaml", [override_text("run_dir", str(self.run_dir))]
        )

    @property
    def metrics(self) -> Any:
        """The columns of metrics.jsonl: a pandas.DataFrame with a row a step, or without pandas a
        dict of lists. A step without a value has NaN.
        """
        rows = read_metrics(self.run_dir / METRICS_FILE)
        keys = dict.fromkeys(key for row in rows for key in row)
        columns = {key: [row.get(key, float("nan")) for row in rows] for key in keys}
        try:
            import pandas
        except ImportError:
            return columns
        return pandas.DataFrame(columns, index=columns.get("step"))

    @property
    def samples(self) -> list[Row]:
        """The groups of rollouts/samples.jsonl: prompt, answer, and each response with its reward."""
        return read_metrics(self.run_dir / "rollouts/samples.jsonl")

    @property
    def ledger(self) -> list[Row]:
        """The steps of rollouts/ordinals.jsonl: the numbers of the prompts that each was trained on
        (`ordinals`), and that were dropped.
        """
        return read_metrics(self.run_dir / "rollouts/ordinals.jsonl")

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step -> folder of each complete checkpoint, the oldest first."""
        from megarl.plan.checkpoints import complete_checkpoints

        return dict(complete_checkpoints(self.run_dir))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The held-out scores of each weight version that was evaluated."""
        from megarl.evaluation.scores import read_results

        return read_results(self.run_dir)

    @property
    def summary(self) -> str:
        """The summary that megarl train prints at the end."""
        from megarl.observe.report import summarize

        return summarize(self.run_dir, self.evaluations).strip()

    def report(self, output: str | Path | None = None) -> Path:
        """Writes the page of `megarl report`, by default report.html in the run's folder.

        Returns its path. Raises ConfigError.
        """
        from megarl.report.command import write_report

        return write_report([self.run_dir], output)

    def export(
        self, output: str | Path, step: int | None = None, best: bool = False, lora: bool = False
    ) -> Path:
        """Writes a checkpoint as `megarl export` does: the newest, that of `step`, or the `best`;
        with `lora`, its adapter. Returns `output`. Raises ConfigError, RunError, TimeoutError,
        Stopped.
        """
        from megarl.launch import commands

        check_outputs(output=str(output))
        run = resolved("export", self.config, ())
        with _signals_as_stops():
            commands.export(run, str(output), step, lora, best)
        return Path(output)

    def stop(self) -> None:
        """Asks the run, which another thread or program has started, to end once the running step
        is saved. Raises ConfigError if none is under way.
        """
        from megarl.launch.running import find_run

        find_run(str(self.run_dir)).stop()


def resolved(
    command: str,
    config: ConfigSource,
    overrides: Sequence[str],
    step: int | None = None,
    best: bool = False,
) -> RunPlan:
    """The plan of `command`, one of megarl's or "dry-run".

    `step`, `best`: the checkpoint that megarl eval scores.

    Raises ConfigError with all that is wrong: with keys and values, sizes and paths, and what the
    command is to read.
    """
    from megarl.launch import inputs

    try:
        loaded = read_config(config, overrides)
        run: RunPlan | None = None
        problems = list(loaded.problems)
        if (settings := loaded.config) is None:
            raise ConfigError(problems)
        settings = one_gpu_shared(settings)
        checked = command
        if command == "run":
            checked = "dry-run" if warm_start_due(settings) else "train"
        elif command == "eval" and scores_checkpoint(settings, step, best):
            checked = "export"  # its first half
        try:
            run = resolve(settings, checked)
        except ConfigError as error:
            problems += filter(loaded.concerns, error.problems)
        if checked != command == "eval":
            problems += problems_by_group(settings, COMMAND_CHECKS["eval"])
        if run is not None and not problems:
            return run
        if checked in inputs.COMMANDS:
            of_inputs = problems_of(
                lambda: inputs.check_inputs(settings, checked, run, at_hand=True)
            )
            reported = {problem.partition(": ")[0] for problem in problems}  # key=value
            for problem in of_inputs:
                if loaded.concerns(problem) and problem.partition(": ")[0] not in reported:
                    problems.append(problem)
        raise ConfigError(problems)
    except OSError as error:  # about a path, which is a mistake in a setting
        raise unreadable(error) from error


def one_gpu_shared(config: RunConfig) -> RunConfig:
    """The settings of a run on this machine, whose only GPU trainer and engine share if each of
    them is one rank.
    """
    return with_one_gpu_shared(config, lambda: len(gpus()) if this_node().count == 1 else 0)


def check_outputs(
    picture: str | None = None,
    dump: str | None = None,
    output: str | None = None,
    keep: str | None = None,
) -> None:
    """Raises ConfigError where a file or folder that an option names cannot be written."""
    problems: list[str] = []
    if picture:
        problems += file_problems("--picture", picture, PICTURES)
    if dump:
        problems += file_problems("--dump", dump)
    for option, folder in (("output", output), ("keep", keep)):
        if folder:
            problems += new_folder_problems(f"--{option} ", folder)
    if problems:
        raise ConfigError(problems)


def warm_starts(run: RunPlan, config: ConfigSource, overrides: Sequence[str]) -> None:
    """Runs the warm start of `run`, and before it those of the models beside the policy.

    `config`, `overrides`: what `run` is from.
    """
    from megarl.launch import commands
    from megarl.roles.plan import roles_of
    from megarl.roles.settings import flat

    others = []
    for name, role in roles_of(run.config).items():
        if role.sft:
            of_role = [override_text(key, value) for key, value in flat(role.sft).items()]
            where = [f"run_dir={run.config.run_dir}/{name}", f"sft.output={role.path}"]
            others.append(resolve(load_config(config, [*overrides, *of_role, *where]), "sft"))
    for each in (*others, run):
        commands.sft(each)


def _named(key: str, function: Callable[..., Any] | str | None) -> list[str]:
    """The override that sets `key` to a function of the caller's, if there is one."""
    if function is None:
        return []
    return [override_text(key, function if isinstance(function, str) else path_of(function, key))]


@contextlib.contextmanager
def _signals_as_stops() -> Iterator[None]:
    """Turns the SystemExit by which a signal ends a launcher into Stopped."""
    try:
        yield
    except SystemExit as ended:
        number = int(ended.code or 0) - 128
        raise Stopped("ended at once", number if number > 0 else signal.SIGTERM) from None
