"""`python tests/studies WHAT`: studies of whole runs. Each takes from half an hour to a night."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from megarl.base.files import file_problems, new_folder_problems
from megarl.cli import status_of
from megarl.config.errors import ConfigError
from megarl.launch.watch import termination_as_exit

MEANINGS = {
    "faults": "harm a run in many ways (engines, ranks, disks, strangers): which faults it "
    "survives, which end it, what is lost",
    "staleness": "reward by capacity, staleness bound and seed: 24 runs of CONFIG",
    "simulated": "the scheduler in virtual time against the same in real time: steps, waits, ages",
    "published": "published runs, simulated: their steps against the published ones",
    "mutations": "break the code in one place at a time: which tests see it",
    "peer": "seconds of a step beside TRL's GRPO, on CONFIG's weights, prompts and sizes, in turns",
    "offpolicy": "how losses bear old data: runs of CONFIG over losses, mini-batches, sizes and "
    "seeds",
    "figure8": "what AIPO's correction is worth: runs of CONFIG over engines' precision, lags, "
    "learning rates and rules",
}


WITHOUT_CONFIG = ("faults", "simulated", "published", "mutations")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python tests/studies", description=__doc__)
    studies = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    by_name = {}
    for name, meaning in MEANINGS.items():
        by_name[name] = study = studies.add_parser(name, help=meaning, description=meaning)
        study.add_argument(
            "--json", action="store_true", help="print one JSON object, and nothing else, on stdout"
        )
        if name not in WITHOUT_CONFIG:
            study.add_argument("config", metavar="CONFIG", help="YAML file of the runs")
            study.add_argument(
                "overrides",
                metavar="dotted.key=value",
                nargs="*",
                default=[],
                help="overrides a setting of all runs",
            )
        if name in ("staleness", "offpolicy", "figure8"):
            study.add_argument(
                "--seeds", metavar="N", type=int, default=3, help="runs of each setting; default: 3"
            )
    faults, staleness, simulated, _, mutations, peer, offpolicy, figure8 = by_name.values()
    mutations.add_argument(
        "--only",
        metavar="PART",
        action="append",
        default=[],
        help="those with this in their name; repeatable",
    )
    simulated.add_argument(
        "--steps", metavar="N", type=int, default=16, help="steps of each cell; default: 16"
    )
    simulated.add_argument(
        "--step-s",
        metavar="S",
        type=float,
        default=1.0,
        help="seconds of the longer phase; default: 1",
    )
    simulated.add_argument(
        "--lanes", metavar="N", type=int, default=4, help="cells side by side; default: 4"
    )
    simulated.add_argument(
        "--runs",
        metavar="FOLDER",
        nargs="+",
        default=[],
        help="folders of runs that are simulated in place of cells",
    )
    kills = (
        "make CONFIG's run in FOLDER, kill engines and a trainer rank meanwhile, and simulate it"
    )
    simulated.add_argument(
        "--kills", metavar=("CONFIG", "FOLDER"), nargs="+", default=[], help=kills
    )
    peer.add_argument("--python", metavar="FILE", required=True, help="a Python that has TRL")
    peer.add_argument(
        "--steps", metavar="N", type=int, default=40, help="steps of each run; default: 40"
    )
    peer.add_argument(
        "--pairs", metavar="N", type=int, default=3, help="runs of each side; default: 3"
    )
    peer.add_argument(
        "--runs", metavar="DIR", type=Path, required=True, help="a new folder for runs and logs"
    )
    faults.add_argument(
        "--faults",
        metavar="N",
        type=int,
        default=50,
        help="number of faults; default: 50, which takes about 25 minutes",
    )
    faults.add_argument(
        "--seed", metavar="N", type=int, default=0, help="decides which, when and where; default: 0"
    )
    faults.add_argument("--kinds", metavar="KIND,…", default="", help="only these; default: all")
    faults.add_argument(
        "--minutes",
        metavar="M",
        type=float,
        default=60,
        help="begin no fault after so long; default: 60",
    )
    common = (
        "a new folder in which the run and its logs are kept; default: kept only when "
        "something is wrong"
    )
    faults.add_argument("--keep", metavar="DIR", help=common)
    staleness.add_argument(
        "--runs",
        metavar="DIR",
        default="runs/staleness",
        help="folder of the runs; complete runs are not repeated",
    )
    parts = (
        "losses, policies, epochs, samples, asynchrony, reward_models (where a model "
        "rewards); default: all"
    )
    offpolicy.add_argument("--parts", metavar="PART,…", default="", help=parts)
    lanes = "runs side by side; their times mean something only with 1, the default"
    common = (
        "folder of the runs; complete runs are not repeated; default: runs/{}/ and the name of "
        "CONFIG"
    )
    for study in (offpolicy, figure8):
        study.add_argument("--lanes", metavar="N", type=int, default=1, help=lanes)
    offpolicy.add_argument("--runs", metavar="DIR", type=Path, help=common.format("offpolicy"))
    figure8.add_argument("--runs", metavar="DIR", type=Path, help=common.format("figure8"))
    offpolicy.add_argument(
        "--picture", metavar="FILE", help="draw score against divergence: .svg or .png"
    )
    arguments, remaining = parser.parse_known_args(argv)
    unknown = [
        argument
        for argument in remaining
        if argument.startswith("-") or arguments.what in WITHOUT_CONFIG
    ]
    if unknown:
        by_name[arguments.what].error(f"unknown argument: {' '.join(unknown)}")
    if remaining:
        # argparse takes positional arguments only up to the first option
        arguments.overrides += remaining
    return arguments


def _faults(arguments: argparse.Namespace) -> None:
    from faults import run

    if arguments.keep and (problems := list(new_folder_problems("--keep ", arguments.keep))):
        raise ConfigError(problems)
    run(
        arguments.faults,
        arguments.seed,
        _listed(arguments.kinds),
        arguments.minutes,
        arguments.json,
        arguments.keep,
    )


def _simulated(arguments: argparse.Namespace) -> None:
    from simulated import run

    run(
        arguments.steps,
        arguments.step_s,
        arguments.lanes,
        arguments.runs,
        arguments.kills,
        arguments.json,
    )


def _published(arguments: argparse.Namespace) -> None:
    from published import run

    run(arguments.json)


def _mutations(arguments: argparse.Namespace) -> None:
    from mutations import run

    run(arguments.only, arguments.json)


def _staleness(arguments: argparse.Namespace) -> None:
    from staleness import run

    run(
        arguments.config, arguments.overrides, Path(arguments.runs), arguments.seeds, arguments.json
    )


def _peer(arguments: argparse.Namespace) -> None:
    from peer import WARM_UP_STEPS, run

    if arguments.steps < WARM_UP_STEPS + 2:
        raise ConfigError(f"--steps {arguments.steps}: must be at least {WARM_UP_STEPS + 2}")
    problems = list(new_folder_problems("--runs ", str(arguments.runs)))
    if problems:
        raise ConfigError(problems)
    run(
        config_path=arguments.config,
        overrides=arguments.overrides,
        python=arguments.python,
        steps=arguments.steps,
        pairs=arguments.pairs,
        runs=arguments.runs,
        as_json=arguments.json,
    )


def _offpolicy(arguments: argparse.Namespace) -> None:
    from offpolicy import run

    if arguments.picture and (
        problems := list(file_problems("--picture", arguments.picture, (".svg", ".png")))
    ):
        raise ConfigError(problems)
    run(
        arguments.config,
        arguments.overrides,
        arguments.runs or Path("runs/offpolicy", Path(arguments.config).stem),
        parts=_listed(arguments.parts),
        seeds=arguments.seeds,
        lanes=arguments.lanes,
        as_json=arguments.json,
        picture=arguments.picture,
    )


def _figure8(arguments: argparse.Namespace) -> None:
    from figure8 import run

    run(
        arguments.config,
        arguments.overrides,
        arguments.runs or Path("runs/figure8", Path(arguments.config).stem),
        seeds=arguments.seeds,
        lanes=arguments.lanes,
        as_json=arguments.json,
    )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


RUN: dict[str, Callable[[argparse.Namespace], None]] = {
    "faults": _faults,
    "staleness": _staleness,
    "simulated": _simulated,
    "published": _published,
    "mutations": _mutations,
    "peer": _peer,
    "offpolicy": _offpolicy,
    "figure8": _figure8,
}


def main(argv: list[str]) -> int:
    """Returns the exit status, as `megarl` does.

    On SIGTERM the study ends the processes that it started.
    """
    arguments = parse(argv)

    def study() -> None:
        for name in ("seeds", "lanes", "pairs"):
            if getattr(arguments, name, 1) < 1:
                raise ConfigError(f"--{name} {getattr(arguments, name)}: must be at least 1")
        with termination_as_exit():
            RUN[arguments.what](arguments)

    return status_of(study)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
