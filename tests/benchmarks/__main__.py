"""`python tests/benchmarks WHAT`: what one part of a run costs on this machine.

Two cores and minutes are enough. What users compare with other projects is `megarl bench`.
"""

from __future__ import annotations

import argparse
import sys

from megarl.cli import status_of
from megarl.config.errors import ConfigError
from megarl.launch.watch import termination_as_exit

MEANINGS = {
    "channels": "what the rollouts channel costs per sample, with up to 100,000 samples in the "
    "buffer, and per token, at 16 million a step",
    "driver": "how much load one driver of many engines can carry: requests, tokens and weight "
    "updates, with emulated engines over HTTP",
    "fleet": "what weight updates cost the event loop, by trainer ranks and engine workers "
    "(thousands): CPU time, bytes, blocks",
    "logprobs": "peak memory and time of log-probs, with all logits at once and in chunks",
    "packing": "a training step on packed sequences, compared with one on sequences padded to a "
    "common length",
    "writes": "what an update's writes cost the processor of a sending rank, by the cut of its "
    "parameters and the engines' precision",
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python tests/benchmarks", description=__doc__)
    benchmarks = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    by_name = {}
    for name, meaning in MEANINGS.items():
        by_name[name] = benchmarks.add_parser(name, help=meaning, description=meaning)
        by_name[name].add_argument(
            "--json", action="store_true", help="print one JSON object, and nothing else, on stdout"
        )
    by_name["driver"].add_argument(
        "--engines", metavar="N", type=int, default=256, help="default: 256"
    )
    by_name["fleet"].add_argument(
        "sizes",
        metavar="TRAINERS+WORKERS",
        nargs="*",
        help="trainer ranks and engine workers, both multiples of 8, with 16 workers or more, and "
        "as many trainer ranks or more; default: six, from 128+64 to 4096+1024, which take about "
        "10 minutes",
    )
    by_name["packing"].add_argument(
        "--sequences", metavar="N", type=int, default=32, help="of a step; default: 32"
    )
    by_name["packing"].add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=7,
        help="steps of each way; their median counts; default: 7",
    )
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    """Raises ConfigError, RuntimeError, TimeoutError.

    A benchmark is imported only when it is chosen.
    """
    if arguments.what == "channels":
        import rollouts_channel

        rollouts_channel.run(arguments.json)
    elif arguments.what == "driver":
        import driver_load

        if arguments.engines < 1:
            raise ConfigError(f"--engines {arguments.engines}: must be at least 1")
        driver_load.run(arguments.engines, arguments.json)
    elif arguments.what == "fleet":
        import fleet_updates

        sizes = [fleet_updates.parse_size(text) for text in arguments.sizes]
        fleet_updates.run(sizes or fleet_updates.SIZES, arguments.json)
    elif arguments.what == "logprobs":
        import logprob_memory

        logprob_memory.run(arguments.json)
    elif arguments.what == "packing":
        import packed_step

        packed_step.run(arguments.sequences, arguments.repeats, arguments.json)
    elif arguments.what == "writes":
        import sender_writes

        sender_writes.run(arguments.json)


def main(argv: list[str]) -> int:
    """Returns the exit status, as `megarl` does.

    On SIGTERM the benchmark ends the processes that it started.
    """
    arguments = parse(argv)

    def benchmark() -> None:
        with termination_as_exit():
            run(arguments)

    return status_of(benchmark)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
