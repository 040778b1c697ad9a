"""`megarl report`: makes the page of one or several runs, or serves it."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.outputs import file_problems
from megarl.files import write_whole
from megarl.observe.metrics import METRICS_FILE

DESCRIPTION = "make one HTML page of runs: curves, times, weight updates, samples; --serve follows a run that is going on"
EXAMPLES = [
    "megarl report runs/quickstart",
    "megarl report runs/q0 runs/q1 --output compared.html",
    "megarl report runs/quickstart --serve",
]
PAGE_FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="a run's folder; several are drawn over each other")
    parser.add_argument("--output", metavar="FILE", help=f"page to write, .html; default: {PAGE_FILE} in the (first) run's folder")
    parser.add_argument(
        "--serve", action="store_true", help="serve the page on this machine alone, at an address with a token, until Ctrl-C"
    )
    parser.add_argument("--port", metavar="N", type=int, default=0, help="with --serve: the port; default: a free one")
    parser.add_argument(
        "--text-mib", metavar="N", type=float, default=64, help="about how large the samples' texts may become; default: 64"
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for folders that hold no run, and for what cannot be written."""
    folders = [Path(folder) for folder in arguments.run_dirs]
    output = Path(arguments.output or folders[0] / PAGE_FILE)
    problems = [
        f"RUN_DIR {path}: holds no {METRICS_FILE}: not the folder of a run" for path in folders if not (path / METRICS_FILE).is_file()
    ]
    if arguments.serve and arguments.output:
        problems.append("--output: a page that is served is not written; leave one of --output and --serve out")
    if not arguments.serve and arguments.port:
        problems.append(f"--port {arguments.port}: needs --serve")
    if not 0 <= arguments.port <= 65535:
        problems.append(f"--port {arguments.port}: must be 0 to 65535")
    if not 1e-6 <= arguments.text_mib < math.inf:
        problems.append(f"--text-mib {arguments.text_mib:g}: must be above 0 and finite")
    if not problems and not arguments.serve:
        problems += file_problems("--output", str(output), (".html",))
    if problems:
        raise ConfigError(problems)
    from megarl.report.page import page  # what is checked above needs none of it
    from megarl.report.reading import RunReader

    text_bytes = int(arguments.text_mib * 2**20)
    if arguments.serve:
        _serve(folders, text_bytes, arguments.port)
        return
    found = [RunReader(folder, text_bytes).read() for folder in folders]
    write_whole(output, page(found, _now()))
    skipped = sum(sum(each["skipped"].values()) for each in found)
    print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB" + (f"; {skipped} damaged or half-written lines left out" if skipped else ""))


def _serve(folders: list[Path], text_bytes: int, port: int) -> None:
    from megarl.report.serve import ReportServer

    try:
        server = ReportServer(folders, text_bytes, port, _now)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}") from error
    with server:
        tunnel = f"-L {server.server_port}:127.0.0.1:{server.server_port}"
        print(f"{server.url}\nThis machine alone can open it (over ssh: {tunnel}); Ctrl-C ends it.", flush=True)
        server.serve_forever()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
