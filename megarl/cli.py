"""The command line.

Arguments and configuration are checked in full before anything heavy is imported or started.

Exit status: 0 success, 1 a run that failed or a plan that does not fit, 2 a mistake in arguments or
configuration, 130 stopped by Ctrl-C, 143 by SIGTERM, 138 by SIGUSR1, 140 by SIGUSR2, 129 by SIGHUP
(see checkpoint.on_termination_s).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import megarl
from megarl import api
from megarl.base.results import CommandResult
from megarl.bench import command as bench
from megarl.config.errors import ConfigError, tell, unreadable
from megarl.config.keys import foreign_setting_of, nearest, settings
from megarl.config.limits import did_you_mean, similar_names
from megarl.launch import doctor, joining
from megarl.launch.watch import Stopped
from megarl.plan.checks import refused_by_train
from megarl.plan.resolve import RunPlan, resolve
from megarl.plan.weights import warm_start_due
from megarl.report import command as report
from megarl.starter import command as init

DESCRIPTION = """\
Asynchronous reinforcement learning for large language models.

CONFIG is a YAML file; dotted.key=value after it overrides its settings. docs/config.md lists every key."""

COMMANDS = {
    "sft": "train by supervised learning: the warm start of a model that cannot do the task at all",
    "run": "sft, if sft.steps asks for it and it is not done yet, then train; the same command "
    "goes on where it ended",
    "reward-model": "train a reward model on pairs of responses (Bradley-Terry)",
    "label": "score responses to prompts with a reward, a reward model or a judge, and make pairs "
    "for megarl reward-model; the same command goes on where it ended",
    "rows": "write the rows of an environment from a hub to data.train.source and "
    "data.eval.source (rollout.name=verifiers or openenv)",
    "train": "train by reinforcement learning; goes on from the last checkpoint in run_dir",
    "eval": "scores of the run's newest checkpoint, or of another model.path, on data.eval and "
    "eval.suites: pass@1 of greedy answers, "
    "or pass@k, avg@k and maj@k of eval.samples",
    "export": "write a checkpoint's weights as a Hugging Face checkpoint",
    "plan": "whether a run fits, how long its steps take and what binds; --search finds the "
    "fastest split of a GPU budget",
    "reshard": "how weights travel from trainer to generator: copies, bytes, balance, and the "
    "proof that each byte is written once",
}
EXAMPLES = {
    "init": init.EXAMPLES,
    "sft": ["megarl sft configs/quickstart.yaml"],
    "run": ["megarl run configs/quickstart.yaml"],
    "reward-model": ["megarl reward-model configs/examples/reward_model.yaml"],
    "label": ["megarl label configs/examples/preferences.yaml"],
    "rows": ["megarl rows configs/examples/verifiers.yaml"],
    "train": [
        "megarl train configs/quickstart.yaml",
        "megarl train configs/8b_aipo.yaml trainer.tp=4 generator.engines=8 run_dir=runs/8b",
        "megarl train configs/405b_aipo.yaml --dry-run",
    ],
    "eval": [
        "megarl eval configs/quickstart.yaml",
        "megarl eval configs/quickstart.yaml --step 0",
        "megarl eval configs/quickstart.yaml model.path=runs/quickstart/export --json",
    ],
    "export": ["megarl export configs/quickstart.yaml --output runs/quickstart/export"],
    "plan": [
        "megarl plan configs/8b_aipo.yaml trainer.dp=16",
        "megarl plan configs/70b_aipo.yaml --search --gpus 256 cluster.gpu=H200",
        "megarl plan configs/405b_aipo.yaml --picture 405b.svg --json",
        "megarl plan configs/8b_aipo.yaml --simulate plan.simulation.steps=20 --sweep "
        "async.capacity=0,1,2",
    ],
    "reshard": [
        "megarl reshard configs/8b_aipo.yaml generator.tp=2 --json",
        "megarl reshard configs/405b_aipo.yaml --rank trainer:17",
        "megarl reshard configs/405b_aipo.yaml --delta 0.02 --link 3",
        "megarl reshard configs/405b_aipo.yaml --picture 405b.svg",
        "megarl reshard configs/8b_aipo.yaml --dump 8b.jsonl",
    ],
    "engines": joining.EXAMPLES,
    "doctor": doctor.EXAMPLES,
    "report": report.EXAMPLES,
    "bench": bench.EXAMPLES,
}
WITH_JSON = ("eval", "plan", "reshard")
WITHOUT_CONFIG = {
    "init": init,
    "doctor": doctor,
    "engines": joining,
    "report": report,
    "bench": bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = parse(argv)
    return status_of(lambda: _do(arguments))


def _do(arguments: argparse.Namespace) -> int | None:
    with _paths_looked_at():
        _check_outputs(arguments)
        plan = None if arguments.command in WITHOUT_CONFIG else _resolved(arguments)
    if plan is None:
        plan = WITHOUT_CONFIG[arguments.command].run(arguments)
    return RUN[arguments.command](plan, arguments) if plan is not None else None


def status_of(command: Callable[[], int | None]) -> int:
    """Runs a command; prints why it ends if it fails.

    Returns the exit status: that of the command, 2 for a mistake in the input, 1 for what failed
    later.
    """
    try:
        return command() or 0
    except ConfigError as error:
        return _fail(error, 2)
    except (RuntimeError, TimeoutError) as error:
        return _fail(error, 1)
    except Stopped as stopped:  # which has been printed
        return stopped.exit_status
    except KeyboardInterrupt:
        return _fail(RuntimeError("ended by Ctrl-C"), 130)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # another pipe, of a process that died
        # The reader (head, less) has seen enough; keep Python from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@contextlib.contextmanager
def _paths_looked_at() -> Iterator[None]:
    """Turns an OSError about a path into a ConfigError, since it is a mistake in a setting."""
    try:
        yield
    except OSError as error:
        raise unreadable(error) from error


def _resolved(arguments: argparse.Namespace) -> RunPlan:
    """Raises ConfigError with all that is wrong: with keys and values, sizes and paths, and what
    the command is to read.
    """
    command = "dry-run" if getattr(arguments, "dry_run", False) else arguments.command
    step = getattr(arguments, "step", None)
    best = getattr(arguments, "best", False)
    return api.resolved(command, arguments.config, arguments.overrides, step=step, best=best)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raises ConfigError where a file or folder that an option names cannot be written."""
    names = (
        ("picture", "dump")
        if arguments.command == "report"
        else ("picture", "dump", "output", "keep")
    )
    api.check_outputs(**{name: getattr(arguments, name, None) for name in names})


def _reader_is_gone() -> bool:
    watched = select.poll()
    watched.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Adds the name that was meant to a message about a wrong choice: of a command, of a
        command's command, or of an option's value.
        """
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        super().error(
            message
            + (
                did_you_mean(similar_names(wrong[1], re.findall(r"[\w.-]+", wrong[2])))
                if wrong
                else ""
            )
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options may stand before, between and after the overrides.

    Exits with 2 and the usage where argparse finds a mistake.
    """
    parser = _Parser(
        "megarl", description=DESCRIPTION, epilog=_examples(*EXAMPLES), formatter_class=_RAW
    )
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    by_name = {}
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(
            name, help=meaning, description=meaning, epilog=_examples(name), formatter_class=_RAW
        )
        command.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        command.add_argument(
            "overrides",
            metavar="dotted.key=value",
            nargs="*",
            default=[],
            help="overrides a setting, as in trainer.tp=2",
        )
        by_name[name] = command
    for name in WITH_JSON:
        by_name[name].add_argument(
            "--json", action="store_true", help="print one JSON object, and nothing else, on stdout"
        )
    _add_train_arguments(by_name["train"])
    _add_checkpoint_arguments(by_name["export"], by_name["eval"])
    _add_reshard_arguments(by_name["reshard"])
    _add_plan_arguments(by_name["plan"])
    for name, module in WITHOUT_CONFIG.items():
        about = module.DESCRIPTION
        by_name[name] = commands.add_parser(
            name, help=about, description=about, epilog=_examples(name), formatter_class=_RAW
        )
        module.add_arguments(by_name[name])
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command in WITHOUT_CONFIG and not hasattr(arguments, "overrides"):
        if rest:
            by_name[arguments.command].error(f"unknown argument: {' '.join(rest)}")
        return arguments
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        by_name[arguments.command].error(
            f"unknown option: {' '.join(unknown)}{_meant_as_settings(unknown)}"
        )
    arguments.overrides += rest  # argparse takes positional arguments only up to the first option
    return arguments


def _add_train_arguments(train: argparse.ArgumentParser) -> None:
    dry_run = "check the settings, print plan, map and each node's processes; start nothing"
    train.add_argument("--dry-run", action="store_true", help=dry_run)
    # the dry run also prints what megarl plan and megarl reshard print
    unused = {
        "json": False,
        "dump": None,
        "delta": 0.01,
        "link": None,
        "picture": None,
        "rank": None,
    }
    train.set_defaults(
        **unused,
        search=False,
        theory=False,
        eta=[],
        gpus=None,
        simulate=False,
        sweep=[],
        source=None,
        output=None,
    )


def _add_checkpoint_arguments(
    export: argparse.ArgumentParser, evaluate: argparse.ArgumentParser
) -> None:
    export.add_argument("--output", metavar="DIR", required=True, help="folder to write")
    export.add_argument(
        "--lora",
        action="store_true",
        help="write the adapter of a run with lora.rank, in PEFT's format",
    )
    for command, more in (
        (export, ""),
        (evaluate, "; 0: model.path, or the warm start made from it"),
    ):
        which = command.add_mutually_exclusive_group()
        which.add_argument(
            "--step", metavar="N", type=int, help=f"checkpoint to take; default: the newest{more}"
        )
        which.add_argument(
            "--best",
            action="store_true",
            help="take the checkpoint with the best held-out score (checkpoint.keep_best)",
        )


def _add_reshard_arguments(reshard: argparse.ArgumentParser) -> None:
    reshard.add_argument(
        "--rank", metavar="trainer:N|generator:N", help="list the copies of this rank alone"
    )
    shares = (
        "predict an update that carries only what has changed (weights.delta), if this share "
        "of the elements has; default: 0.01"
    )
    reshard.add_argument("--delta", metavar="SHARE", type=float, default=0.01, help=shares)
    reshard.add_argument(
        "--link",
        metavar="GB/S",
        type=float,
        help="rate of each rank's link; default: that of cluster.gpu",
    )
    reshard.add_argument("--dump", metavar="FILE", help="write every copy, one JSON object a line")
    reshard.add_argument(
        "--picture", metavar="FILE", help="draw who sends to whom, and how evenly: .svg or .png"
    )


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--search",
        action="store_true",
        help="look for the fastest parallel sizes, batches, precision and split",
    )
    plan.add_argument(
        "--theory",
        action="store_true",
        help="show the optimum of LlamaRL's section 7 beside what the search finds",
    )
    plan.add_argument(
        "--eta",
        metavar="RUN",
        nargs="+",
        default=[],
        help="with --theory: folders of runs whose seconds a sample are used, or values, such as "
        "t:8=0.4 g:64=1.2 (side, batch, seconds)",
    )
    plan.add_argument(
        "--gpus",
        metavar="N",
        type=int,
        help="GPUs to search over; default: as many as the config uses",
    )
    plan.add_argument(
        "--picture", metavar="FILE", help="draw what fills memory and time: .svg or .png"
    )
    plan.add_argument(
        "--simulate",
        action="store_true",
        help="run it in virtual time: lengths, waits, staleness, failures",
    )
    plan.add_argument(
        "--sweep",
        metavar="KEY=A,B,…",
        nargs="+",
        default=[],
        help="with --simulate: a row for each combination of values",
    )
    plan.add_argument(
        "--from",
        metavar="RUN",
        dest="source",
        help="with --simulate: a run folder whose measured times are used",
    )
    plan.add_argument(
        "--output", metavar="FOLDER", help="with --simulate: write the run there, for megarl report"
    )


def _meant_as_settings(options: Sequence[str]) -> str:
    """Other programs take their settings as options."""
    meant = []
    for option in options:
        name, equals, value = option.lstrip("-").partition("=")
        key = name.replace("-", "_")
        found = [key] if key in settings() else nearest(key)
        elsewhere = foreign_setting_of(key)
        note = elsewhere.note if elsewhere and key not in settings() else ""
        if found:
            meant.append(
                f"{found[0]}={value if equals and not note else '…'}{f' ({note})' if note else ''}"
            )
        elif note:
            meant.append(f"none for {option} ({note})")
    return f"; settings have no dashes: {' '.join(meant)}" if meant else ""


def _train(plan: RunPlan, arguments: argparse.Namespace) -> int | None:
    if arguments.dry_run:
        return _dry_run(plan, arguments)
    from megarl.launch.commands import train

    train(plan)


def _dry_run(plan: RunPlan, arguments: argparse.Namespace) -> int | None:
    from megarl.data.check import digests_of
    from megarl.data.contents import contents_of
    from megarl.launch.commands import (
        cache_lines,
        compared_data,
        gpus_line,
        render_launch,
        role_lines,
        sampling_lines,
        sandbox_lines,
        weights_lines,
        with_caches,
        with_lengths_of,
        with_nodes_of_here,
    )
    from megarl.launch.inputs import check_inputs
    from megarl.launch.resuming import check_resume_point, latest_checkpoint

    resume = latest_checkpoint(plan.config.run_dir)
    check_resume_point(plan.config.run_dir, resume)
    inputs = check_inputs(plan.config, "dry-run", plan, at_hand=True)
    of_data = compared_data(
        plan.config,
        plan.config.run_dir,
        resume,
        contents_of(plan.config, digests_of(inputs.datasets), rewarded=True),
    )
    plan = with_lengths_of(with_nodes_of_here(plan), inputs.datasets)
    for name, lines in (("data", inputs.datasets), ("reward", inputs.rewards)):
        print(
            *(f"{'' if number else name:<10} {line}\n" for number, line in enumerate(lines)),
            sep="",
            end="",
        )
    print(gpus_line(plan))
    status = _plan(plan, arguments)
    _reshard(plan, arguments)
    sized = with_caches(plan, dry_run=True)
    print(render_launch(sized))
    if resume.checkpoint:
        print(
            "The checkpoint's files have their full length. Their hashes are not checked now; "
            "the run does that when it reads them"
        )
    print(
        *weights_lines(plan, resume),
        *role_lines(plan),
        *cache_lines(sized),
        *sampling_lines(plan),
        *sandbox_lines(plan),
        *of_data,
        sep="\n",
    )
    if not (plan.weights.are_there or plan.weights.are_gone):
        print(
            f"before it  megarl sft {arguments.config}, with the same overrides: "
            f"{plan.weights_path} holds no weights yet"
        )
    return status


def _rows(plan: RunPlan, arguments: argparse.Namespace) -> None:
    from megarl.launch.rows import write_environment_rows

    print(write_environment_rows(plan.config), end="")


def _run(plan: RunPlan, arguments: argparse.Namespace) -> None:
    from megarl.launch.commands import train
    from megarl.launch.inputs import check_inputs

    if warm_start_due(plan.config):
        # what is wrong with the run is told before its warm start takes hours
        check_inputs(plan.config, "dry-run", plan, at_hand=True)
        _sft(resolve(plan.config, "sft"), arguments)
        plan = resolve(plan.config, "train")
    train(plan)


def _sft(plan: RunPlan, arguments: argparse.Namespace) -> None:
    api.warm_starts(plan, arguments.config, arguments.overrides)


def _reward_model(plan: RunPlan, arguments: argparse.Namespace) -> None:
    from megarl.launch.commands import reward_model

    reward_model(plan)


def _label(plan: RunPlan, arguments: argparse.Namespace) -> None:
    from megarl.launch.commands import label

    label(plan)


def _eval(plan: RunPlan, arguments: argparse.Namespace) -> None:
    from megarl.launch.commands import evaluate_checkpoint

    scores = evaluate_checkpoint(plan, arguments.step, arguments.best, quiet=arguments.json)
    if scores:  # this is the head node
        _print(scores, arguments)


def _export(plan: RunPlan, arguments: argparse.Namespace) -> None:
    from megarl.launch.commands import export

    export(plan, arguments.output, arguments.step, arguments.lora, arguments.best)


def _plan(plan: RunPlan, arguments: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit status: 1 for one that cannot be run."""
    if arguments.simulate:
        others = ("search", "theory", "eta", "gpus", "picture")
        if unused := [
            f"--{name}" for name in others if getattr(arguments, name) not in (None, False, [])
        ]:
            raise ConfigError(f"{unused[0]}: is not for --simulate")
        found = api.simulate(
            arguments.config,
            *arguments.overrides,
            sweep=arguments.sweep,
            source=arguments.source,
            output=arguments.output,
        )
        print(json.dumps(found.get("rows", dict(found))) if arguments.json else found)
        return 1 if refused_by_train(plan.config, plan.spec) else 0
    given = [
        f"--{name}"
        for name, value in (
            ("sweep", arguments.sweep),
            ("from", arguments.source),
            ("output", arguments.output),
        )
        if value
    ]
    if given:
        raise ConfigError(f"{given[0]}: needs --simulate")
    from megarl.estimate.command import run_plan

    found = run_plan(
        plan,
        shlex.join([arguments.config, *arguments.overrides]),
        searching=arguments.search,
        theory=arguments.theory,
        eta=arguments.eta,
        budget=arguments.gpus,
        picture=arguments.picture,
    )
    _print(found, arguments)
    return 0 if found["fits"] else 1


def _reshard(plan: RunPlan, arguments: argparse.Namespace) -> None:
    from megarl.estimate.command import run_map

    asked = {
        name: getattr(arguments, name) for name in ("delta", "link", "dump", "picture", "rank")
    }
    _print(run_map(plan, **asked), arguments)


def _print(result: CommandResult, arguments: argparse.Namespace) -> None:
    print(json.dumps(dict(result)) if arguments.json else result)


def _warm(plan: RunPlan, arguments: argparse.Namespace) -> None:
    from megarl.launch.commands import warm

    warm(plan)


RUN: dict[str, Callable[[RunPlan, argparse.Namespace], int | None]] = {
    "sft": _sft,
    "run": _run,
    "rows": _rows,
    "reward-model": _reward_model,
    "label": _label,
    "train": _train,
    "eval": _eval,
    "export": _export,
    "plan": _plan,
    "reshard": _reshard,
    "doctor": _warm,
}


_RAW = argparse.RawDescriptionHelpFormatter


def _examples(*commands: str) -> str:
    return "examples:\n" + "\n".join(
        f"  {example}" for name in commands for example in EXAMPLES[name]
    )


def _fail(error: Exception, status: int) -> int:
    """Prints why the command ends, on many nodes only from the head's launcher, and returns
    `status`.
    """
    from megarl.launch.nodes import speaks

    if speaks():
        tell(error)
    return status
