"""`megarl report`: makes the page of one or several runs, or serves it."""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import html
import http.server
import json
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megarl.base.files import file_problems, write_whole
from megarl.config.errors import ConfigError
from megarl.observe.metrics import METRICS_FILE
from megarl.report.reading import RunReader

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "uPlot.iife.min.js",
    *(
        f"{name}.js"
        for name in (
            "store",
            "charts",
            "timeline",
            "times",
            "weights",
            "samples",
            "sample",
            "summary",
            "main",
        )
    ),
)
STYLES = ("uPlot.min.css", "page.css")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">to the content</a>
<header><div class="bar">
<h1>{heading}</h1><span class="live" id="live">{made}</span><nav role="tablist" aria-label="questions"></nav>
</div></header>
<main id="main"><div id="top"><p class="soft">reading …</p></div><div id="tools"></div></main>
<footer>Made by megarl report from {sources}. Curves by uPlot (MIT).</footer>
<noscript><p>This page needs JavaScript; the same is in the run's metrics.jsonl, trace.json and rollouts/.</p></noscript>
<script type="application/json" id="live-data">{live}</script>
{runs}
<script>{script}</script>
{chunks}
</body>
</html>
"""


def page(
    runs: Sequence[Mapping[str, Any]], timestamp: str, live: Mapping[str, Any] | None = None
) -> str:
    """The report page: one HTML file that needs no other. It has the runs' data compressed, and
    shows it only as text nodes. Its security policy allows only its own script, and no requests,
    except those of a served page to its server.

    `runs`: the result of RunReader.read for each run. `timestamp`: when the page is made. `live`:
    how a served page asks for updates.
    """
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "</script" not in script
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}"
    )
    names = [run["name"] for run in runs]
    heading = names[0] if len(names) == 1 else f"{len(names)} runs"
    scripts = []
    chunks = []
    for number, run in enumerate(runs):
        scripts.append(
            f'<script type="text/plain" class="run">{packed(_without_chunks(run))}</script>'
        )
        for chunk_number, chunk in enumerate(run["samples"]["chunks"]):
            name = f"chunk-{number}-{chunk_number}"
            chunks.append(f'<script type="text/plain" id="{name}">{chunk}</script>')
    return PAGE.format(
        policy=policy,
        title=html.escape(f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''} · MegaRL"),
        heading=html.escape(heading),
        made=html.escape(timestamp),
        sources=html.escape(", ".join(str(run["path"]) for run in runs)),
        style="\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES),
        live=json.dumps(live).replace("<", "\\u003c"),
        runs="\n".join(scripts),
        script=script,
        chunks="\n".join(chunks),
    )


def packed(value: Any) -> str:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _without_chunks(run: Mapping[str, Any]) -> dict[str, Any]:
    """The result without chunks of samples.

    The page has each chunk as a separate element, and unpacks it when it is looked at.
    """
    samples = run["samples"]
    return {**run, "samples": {**samples, "chunks": [0] * len(samples["chunks"])}}


PAGES = 8  # pages that are kept up to date at a time; one more makes the oldest reload
EVERY_MS = 2000


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves the page (`megarl report --serve`): listens on the loopback interface, and answers
    requests that have `token`. Open pages ask for what is new in the runs.
    """

    daemon_threads = True

    def __init__(
        self, run_dirs: Sequence[Path], text_bytes: int, port: int, now: Callable[[], str]
    ):
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self._run_dirs = run_dirs
        self._text_bytes = text_bytes
        self._now = now
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def open(self) -> str:
        opened = _Page([RunReader(path, self._text_bytes) for path in self._run_dirs])
        name = secrets.token_hex(8)
        runs = opened.read()
        with self._lock:
            self._pages[name] = opened
            while len(self._pages) > PAGES:
                self._pages.popitem(last=False)
        return page(runs, self._now(), {"token": self.token, "page": name, "every_ms": EVERY_MS})

    def new(self, name: str, number: int) -> list[dict[str, Any]] | None:
        """The news for a page that has had `number` answers; None if it has to be loaded anew."""
        with self._lock:
            opened = self._pages.get(name)
        if opened is None:
            return None
        return opened.new(number)


class _Page:
    def __init__(self, readers: Sequence[RunReader]):
        self._readers = readers
        self._answers = 0
        self._lock = threading.Lock()

    def read(self) -> list[dict[str, Any]]:
        return [reader.read(follow=True) for reader in self._readers]

    def new(self, number: int) -> list[dict[str, Any]] | None:
        with self._lock:
            if number != self._answers:  # an answer was lost on its way
                return None
            self._answers += 1
            return self.read()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        # another name that somebody has pointed at this machine
        if self.headers.get("Host") not in hosts:
            self._answer(403, "text/plain", "the page is served as " + " or ".join(hosts))
        elif not secrets.compare_digest(
            query.get("token", "").encode(), self.server.token.encode()
        ):
            self._answer(
                403,
                "text/plain",
                "the token is missing or wrong: take the address that megarl report has printed",
            )
        elif url.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.open())
        elif url.path == "/new" and query.get("number", "").isdecimal():
            news = self.server.new(query.get("page", ""), int(query["number"]))
            status = 409 if news is None else 200
            self._answer(status, "application/json", json.dumps(news, allow_nan=False))
        else:
            self._answer(404, "text/plain", "there is nothing here")

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(data))),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, since addresses contain the token."""


DESCRIPTION = (
    "make one HTML page of runs: curves, times, weight updates, samples; --serve "
    "follows a run that is going on"
)
EXAMPLES = [
    "megarl report runs/quickstart",
    "megarl report runs/q0 runs/q1 --output compared.html",
    "megarl report runs/quickstart --serve",
]
PAGE_FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="+",
        help="a run's folder; several are drawn over each other",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"page to write, .html; default: {PAGE_FILE} in the (first) run's folder",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the page on this machine alone, at an address with a token, until Ctrl-C",
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=int,
        default=0,
        help="with --serve: the port; default: a free one",
    )
    parser.add_argument(
        "--text-mib",
        metavar="N",
        type=float,
        default=TEXT_MIB,
        help=f"approximate limit for the samples' texts, in MiB; default: {TEXT_MIB}",
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a folder that is not a run's, and for an output that cannot be
    written.
    """
    folders = list(map(Path, arguments.run_dirs))
    problems = [*_not_runs(folders)]
    if arguments.serve and arguments.output:
        problems.append(
            "--output: a page that is served is not written; leave one of --output and --serve out"
        )
    if not arguments.serve and arguments.port:
        problems.append(f"--port {arguments.port}: needs --serve")
    if not 0 <= arguments.port <= 65535:
        problems.append(f"--port {arguments.port}: must be 0 to 65535")
    if not 1e-6 <= arguments.text_mib < math.inf:
        problems.append(f"--text-mib {arguments.text_mib:g}: must be above 0 and finite")
    if not problems and not arguments.serve:
        problems += _unwritable(folders, arguments.output)
    if problems:
        raise ConfigError(problems)
    text_bytes = int(arguments.text_mib * 2**20)
    if arguments.serve:
        _serve(folders, text_bytes, arguments.port)
    else:
        write_report(folders, arguments.output, text_bytes)


TEXT_MIB = 64  # default limit for the samples' texts


def write_report(
    run_dirs: Sequence[Path], output: str | Path | None = None, text_bytes: int = TEXT_MIB << 20
) -> Path:
    """Writes the page of the runs, and prints its size.

    By default it is PAGE_FILE in the first run's folder. Returns its path. Raises ConfigError, as
    `run` does.
    """
    problems = list(_not_runs(run_dirs)) or list(_unwritable(run_dirs, output))
    if problems:
        raise ConfigError(problems)
    page_path = Path(output or run_dirs[0] / PAGE_FILE)
    runs = [RunReader(folder, text_bytes).read() for folder in run_dirs]
    write_whole(page_path, page(runs, _now()))
    skipped = sum(sum(run["skipped"].values()) for run in runs)
    left_out = f"; {skipped} damaged or half-written lines left out" if skipped else ""
    print(f"{page_path}: {page_path.stat().st_size / 2**20:.1f} MiB{left_out}")
    return page_path


def _not_runs(run_dirs: Sequence[Path]) -> Iterator[str]:
    for path in run_dirs:
        if not (path / METRICS_FILE).is_file():
            yield f"RUN_DIR {path}: holds no {METRICS_FILE}: not the folder of a run"


def _unwritable(run_dirs: Sequence[Path], output: str | Path | None) -> Iterator[str]:
    return file_problems("--output", str(output or run_dirs[0] / PAGE_FILE), (".html",))


def _serve(folders: list[Path], text_bytes: int, port: int) -> None:

    try:
        server = ReportServer(folders, text_bytes, port, _now)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}") from error
    with server:
        tunnel = f"-L {server.server_port}:127.0.0.1:{server.server_port}"
        print(
            f"{server.url}\nOnly this machine can open it (over ssh: {tunnel}); Ctrl-C ends it.",
            flush=True,
        )
        server.serve_forever()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
