"""`megarl bench WHAT`: the arguments of each benchmark.

A benchmark is imported only when it is chosen. `megarl bench gpu` is `make gpu` (bench/gpu).
Benchmarks of single parts stand with the tests: `python tests/benchmarks`.
"""

from __future__ import annotations

import argparse

DESCRIPTION = (
    "measure one thing on this machine, and compare it with its physical limit and with "
    "how other projects do it"
)
SYNC = (
    "how fast new weights get into a live engine, by direct writes and by the methods of "
    "other stacks"
)
OVERLAP = (
    "step time compared with perfect overlap, for several settings of asynchrony; "
    "sleeps emulate engines and trainer"
)
EXAMPLES = [
    "megarl bench sync",
    "megarl bench sync --model-size 1b --dtype bfloat16 --picture sync.png",
    "megarl bench overlap --picture overlap.png",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    sync = benches.add_parser("sync", help=SYNC, description=SYNC)
    overlap = benches.add_parser("overlap", help=OVERLAP, description=OVERLAP)
    for bench in (sync, overlap):
        bench.add_argument(
            "--json", action="store_true", help="print one JSON object, and nothing else, on stdout"
        )
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


def run(arguments: argparse.Namespace) -> None:
    """Raises ConfigError, RuntimeError, TimeoutError; SystemExit on SIGTERM, so that a benchmark
    ends the processes it started.
    """
    from megarl.launch.watch import termination_as_exit

    with termination_as_exit():
        if arguments.what == "sync":
            from megarl.bench import sync

            sync.run(
                arguments.model_size,
                arguments.dtype,
                arguments.transport or sync.TRANSPORTS,
                arguments.repeats,
                arguments.json,
                arguments.picture,
            )
        else:
            from megarl.bench import overlap

            overlap.run(
                arguments.step_s,
                arguments.steps,
                arguments.lanes,
                arguments.json,
                arguments.picture,
            )
