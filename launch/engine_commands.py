"""`megarl engines add|remove|list`: the arguments, and what each prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megarl.config.errors import ConfigError

DESCRIPTION = "engines join a running run, and leave it"
MEANINGS = {
    "add": "start engines that join a running run; ends with them: when they have left, the run has ended, or SIGTERM makes them leave",
    "remove": "have engines leave a running run: others finish what they have begun",
    "list": "the engines of a running run, and what they are doing",
}
EXAMPLES = [
    "megarl engines add runs/8b 2",
    "megarl engines remove runs/8b 3",
    "megarl engines remove runs/8b --count 2",
    "megarl engines list runs/8b --json",
]
_RUN_DIR = "run_dir="


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, meaning in MEANINGS.items():
        command = commands.add_parser(name, help=meaning, description=meaning)
        command.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run, also as run_dir=…")
        if name == "add":
            rest = "how many; default: as many as this job's nodes hold. After it: settings that may differ from the run's"
            command.add_argument("rest", metavar="N dotted.key=value", nargs="*", help=rest)
        elif name == "remove":
            command.add_argument("engines", metavar="NUMBER", nargs="*", type=int, help="engines, by number")
            command.add_argument("--count", metavar="N", type=int, default=0, help="the N newest, instead")
        else:
            command.add_argument("--json", action="store_true", help="print one JSON object, and nothing else, on stdout")


def run(arguments: argparse.Namespace) -> None:
    """Raises ConfigError, RuntimeError, TimeoutError."""
    run_dir = arguments.run_dir.removeprefix(_RUN_DIR)
    if arguments.what == "add":
        from megarl.launch.joining import add_engines

        add_engines(run_dir, *_wanted(arguments.rest))
    elif arguments.what == "remove":
        _remove(run_dir, arguments.engines, arguments.count)
    else:
        _list(run_dir, arguments.json)


def _wanted(rest: Sequence[str]) -> tuple[int | None, list[str]]:
    """How many engines, and the overrides."""
    count = None
    if rest and "=" not in rest[0]:
        count, rest = (int(rest[0]) if rest[0].isdecimal() else 0), rest[1:]
        if count < 1:
            raise ConfigError("megarl engines add RUN_DIR N: N must be an integer of at least 1")
    return count, list(rest)


def _remove(run_dir: str, engines: Sequence[int], count: int) -> None:
    from megarl.launch.running import find_run
    from megarl.messaging.messages import FleetCall

    if bool(engines) == bool(count) or count < 0:
        raise ConfigError("megarl engines remove RUN_DIR: either numbers of engines, or --count N of at least 1")
    for engine in find_run(run_dir).ask(FleetCall("leave", engines=list(engines), count=count)).engines:
        print(f"engine {engine.number} {engine.text}")


def _list(run_dir: str, as_json: bool) -> None:
    from megarl.launch.running import find_run
    from megarl.messaging.messages import FleetCall

    found = find_run(run_dir).ask(FleetCall("list")).engines
    if as_json:
        rows = [{"number": e.number, "url": e.url, "serving": e.serving, "gone": e.gone, "doing": e.text} for e in found]
        print(json.dumps({"serving": sum(engine.serving for engine in found), "engines": rows}))
        return
    for engine in found:
        print(f"engine {engine.number:<4} {engine.url:<30} {engine.text}")
