"""`megarl bench WHAT`: the arguments of each benchmark.

A benchmark is imported only when it is chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megarl.config.errors import ConfigError

DESCRIPTION = (
    "measure one thing on this machine, and compare it with its physical limit and with "
    "how other projects do it"
)
MEANINGS = {
    "sync": "how fast new weights get into a live engine, by direct writes and by the methods of "
    "other stacks",
    "overlap": "step time compared with perfect overlap, for several settings of asynchrony; "
    "sleeps emulate engines and trainer",
    "channels": "what the rollouts channel costs per sample, with up to 100,000 samples in the "
    "buffer, and per token, at 16 million a step",
    "driver": "how much load one driver of many engines can carry: requests, tokens and weight "
    "updates, with emulated engines over HTTP",
    "fleet": "what weight updates cost the event loop, by trainer ranks and engine workers "
    "(thousands): CPU time, bytes, blocks",
    "logprobs": "peak memory and time of log-probs, with all logits at once and in chunks",
    "packing": "a training step on packed sequences, compared with one on sequences padded to a "
    "common length",
}
EXAMPLES = [
    "megarl bench sync",
    "megarl bench sync --model-size 1b --dtype bfloat16 --picture sync.png",
    "megarl bench overlap --picture overlap.png",
    "megarl bench channels --json",
    "megarl bench driver --engines 256",
    "megarl bench fleet",
    "megarl bench fleet 512+64 4096+1024 --json",
    "megarl bench logprobs",
    "megarl bench packing --sequences 256",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    by_name = {}
    for name, meaning in MEANINGS.items():
        by_name[name] = bench = benches.add_parser(name, help=meaning, description=meaning)
        bench.add_argument(
            "--json", action="store_true", help="print one JSON object, and nothing else, on stdout"
        )
    sync, overlap, packing = (by_name[name] for name in ("sync", "overlap", "packing"))
    sync.add_argument(
        "--transport",
        metavar="NAME",
        action="append",
        help="shared_memory, gloo or mooncake; repeatable; default: all",
    )
    sync.add_argument(
        "--model-size",
        choices=("tiny", "small", "medium", "1b"),
        default="small",
        help="of a random Llama; default: small",
    )
    sync.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of its weights; 1b: take bfloat16 below 32 GiB",
    )
    sync.add_argument("--picture", metavar="FILE", help="draw the times as bars: .svg or .png")
    sync.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=7,
        help="runs of each way, whose median counts; default: 7",
    )
    overlap.add_argument(
        "--picture", metavar="FILE", help="draw the efficiencies as bars: .svg or .png"
    )
    overlap.add_argument(
        "--step-s",
        metavar="S",
        type=float,
        default=1.0,
        help="seconds of the longer phase; default: 1",
    )
    overlap.add_argument(
        "--steps", metavar="N", type=int, default=16, help="steps of each cell; default: 16"
    )
    overlap.add_argument(
        "--lanes", metavar="N", type=int, default=8, help="cells that run side by side; default: 8"
    )
    by_name["driver"].add_argument(
        "--engines", metavar="N", type=int, default=256, help="default: 256"
    )
    sizes = (
        "trainer ranks and engine workers, both multiples of 8, with 16 workers or more, and "
        "as many trainer ranks or more; "
    )
    sizes += "default: six, from 128+64 to 4096+1024, which take about 10 minutes"
    by_name["fleet"].add_argument("sizes", metavar="TRAINERS+WORKERS", nargs="*", help=sizes)
    packing.add_argument(
        "--sequences", metavar="N", type=int, default=32, help="of a step; default: 32"
    )
    packing.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=7,
        help="steps of each way; their median counts; default: 7",
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises ConfigError, RuntimeError, TimeoutError; SystemExit on SIGTERM, so that a benchmark
    ends the processes it started.
    """
    from megarl.launch.watch import termination_as_exit

    with termination_as_exit():
        RUN[arguments.what](arguments)


def _sync(arguments: argparse.Namespace) -> None:
    from megarl.bench.sync import TRANSPORTS, run

    transports = arguments.transport or TRANSPORTS
    run(
        arguments.model_size,
        arguments.dtype,
        transports,
        arguments.repeats,
        arguments.json,
        arguments.picture,
    )


def _overlap(arguments: argparse.Namespace) -> None:
    from megarl.bench.overlap import run

    run(arguments.step_s, arguments.steps, arguments.lanes, arguments.json, arguments.picture)


def _channels(arguments: argparse.Namespace) -> None:
    from megarl.bench.channels import run

    run(arguments.json)


def _driver(arguments: argparse.Namespace) -> None:
    from megarl.bench.driver import run

    if arguments.engines < 1:
        raise ConfigError(f"--engines {arguments.engines}: must be at least 1")
    run(arguments.engines, arguments.json)


def _fleet(arguments: argparse.Namespace) -> None:
    from megarl.bench.fleet import SIZES, TP, run

    sizes = [_size(text, TP) for text in arguments.sizes]
    run(sizes or SIZES, arguments.json)


def _size(text: str, multiple: int) -> tuple[int, int]:
    ranks = [int(part) if part.isdecimal() else 0 for part in text.split("+")]
    # An engine is lost, so there must be two; and of more workers than trainer ranks all would pass
    # weights on, so all would be lost.
    if (
        len(ranks) != 2
        or any(count % multiple for count in ranks)
        or not 2 * multiple <= ranks[1] <= ranks[0]
    ):
        limits = f"at least {2 * multiple} workers, and no more of them than trainer ranks"
        raise ConfigError(
            f"{text}: must be TRAINERS+WORKERS, two multiples of {multiple}, as in 512+64; {limits}"
        )
    return ranks[0], ranks[1]


def _logprobs(arguments: argparse.Namespace) -> None:
    from megarl.bench.logprobs import run

    run(arguments.json)


def _packing(arguments: argparse.Namespace) -> None:
    from megarl.bench.packing import run

    run(arguments.sequences, arguments.repeats, arguments.json)


RUN: dict[str, Callable[[argparse.Namespace], None]] = {
    "sync": _sync,
    "overlap": _overlap,
    "channels": _channels,
    "driver": _driver,
    "fleet": _fleet,
    "logprobs": _logprobs,
    "packing": _packing,
}
