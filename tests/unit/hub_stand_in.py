"""A stand-in for the Hugging Face hub on this host: as much of its HTTP interface as its client
asks for to read public files.
"""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789" * 4


@contextmanager
def hub_stand_in(folder: Path) -> Iterator[str]:
    """Serves the repositories in `folder`: models at owner/name, data sets at datasets/owner/name.

    Yields its address, for HF_ENDPOINT.
    """

    class Handler(_Handler):
        root = folder

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    root: Path

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        if path.startswith("api/"):
            self._describe(path.removeprefix("api/").removeprefix("models/"))
        else:
            repository, _, place = path.partition("/resolve/")
            self._send(self.root / repository / place.partition("/")[2])

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Facts about the paths that the body names."""
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        path = urllib.parse.urlsplit(self.path).path.partition("/paths-info")[0]
        repository = path.removeprefix("/api/").removeprefix("models/")
        paths = form.get("paths", [])
        self._answer([entry for entry in self._entries(repository) if entry["path"] in paths])

    def _describe(self, path: str) -> None:
        repository = path.partition("/tree/")[0].partition("/revision/")[0]
        if not (self.root / repository).is_dir() or not path:
            self.send_error(HTTPStatus.NOT_FOUND)
        elif "/tree/" in path:
            self._answer(self._entries(repository))
        else:
            files = [{"rfilename": entry["path"]} for entry in self._entries(repository)]
            name = repository.removeprefix("datasets/")
            self._answer(
                {
                    "id": name,
                    "sha": COMMIT,
                    "siblings": files,
                    "private": False,
                    "gated": False,
                    "tags": [],
                }
            )

    def _entries(self, repository: str) -> list[dict]:
        files = sorted(path for path in (self.root / repository).rglob("*") if path.is_file())
        return [
            {
                "type": "file",
                "path": str(path.relative_to(self.root / repository)),
                "size": path.stat().st_size,
                "oid": _digest(path),
            }
            for path in files
        ]

    def _send(self, file: Path) -> None:
        if not file.is_file():
            self.send_response(HTTPStatus.NOT_FOUND)
            folders = list(file.parents)[: -len(self.root.parents) - 1]
            repository_exists = any(folder.is_dir() for folder in folders)
            self.send_header(
                "X-Error-Code", "EntryNotFound" if repository_exists else "RepoNotFound"
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._content(file.read_bytes(), {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT})

    def _answer(self, value: object) -> None:
        self._content(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _content(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
