"""`megarl report --serve`: the page over HTTP, for this machine alone, and what is new in the runs whenever an open page asks."""

from __future__ import annotations

import http.server
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megarl.report.page import page
from megarl.report.reading import RunReader

PAGES = 8  # that are followed at a time: one that is opened beyond them makes the oldest load itself anew
EVERY_MS = 2000


class ReportServer(http.server.ThreadingHTTPServer):
    """Answers who knows `token`, on the loopback interface."""

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], text_bytes: int, port: int, now: Callable[[], str]):
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self._run_dirs, self._text_bytes, self._now = run_dirs, text_bytes, now
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def open(self) -> str:
        opened, name = _Page([RunReader(path, self._text_bytes) for path in self._run_dirs]), secrets.token_hex(8)
        found = opened.read()
        with self._lock:
            self._pages[name] = opened
            while len(self._pages) > PAGES:
                self._pages.popitem(last=False)
        return page(found, self._now(), {"token": self.token, "page": name, "every_ms": EVERY_MS})

    def new(self, name: str, number: int) -> list[dict[str, Any]] | None:
        """What is new for a page that has had `number` answers; None if it has to be loaded anew."""
        with self._lock:
            opened = self._pages.get(name)
        return None if opened is None else opened.new(number)


class _Page:
    def __init__(self, readers: Sequence[RunReader]):
        self._readers, self._answers, self._lock = readers, 0, threading.Lock()

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
        asked = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(asked.query).items()}
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        if self.headers.get("Host") not in hosts:  # another name that somebody has led to this machine
            self._answer(403, "text/plain", "the page is served as " + " or ".join(hosts))
        elif not secrets.compare_digest(query.get("token", "").encode(), self.server.token.encode()):
            self._answer(403, "text/plain", "the token is missing or wrong: take the address that megarl report has printed")
        elif asked.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.open())
        elif asked.path == "/new" and query.get("number", "").isdecimal():
            found = self.server.new(query.get("page", ""), int(query["number"]))
            self._answer(409 if found is None else 200, "application/json", json.dumps(found, allow_nan=False))
        else:
            self._answer(404, "text/plain", "there is nothing here")

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(data))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the token is in the addresses."""
