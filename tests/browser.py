"""A headless Chromium, driven over its DevTools protocol: opens pages, evaluates JavaScript, takes
screenshots, records the console.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "no Chromium is installed (Debian: apt-get install chromium): the report page is not tested"
)
DEADLINE_S = 120.0


def find() -> str | None:
    return next((program for name in NAMES if (program := shutil.which(name))), None)


class Browser:
    """A context manager.

    One tab; `messages` are its errors and warnings since the page was opened.
    """

    def __init__(self, *flags: str):
        program = find()
        assert program is not None, MISSING
        self._folder = tempfile.mkdtemp(prefix="megarl-browser-")
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        # Tests need none of the services that a desktop browser starts with.
        command += [
            "--disable-extensions",
            "--disable-background-networking",
            f"--user-data-dir={self._folder}",
            "--remote-debugging-port=0",
        ]
        self._process = subprocess.Popen(
            [*command, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._answers = {}
        self.messages = []
        self._loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        port_file = Path(self._folder) / "DevToolsActivePort"
        deadline = time.monotonic() + DEADLINE_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self._process.poll() is None and time.monotonic() < deadline, (
                "Chromium did not start"
            )
            await asyncio.sleep(0.1)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            (tab,) = [target for target in await answer.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        self._reading = asyncio.ensure_future(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._send(f"{domain}.enable")

    async def _read(self) -> None:
        async for message in self._socket:
            message_body = json.loads(message.data)
            if "id" in message_body:
                self._answers[message_body["id"]].set_result(message_body)
            elif message_body["method"] == "Runtime.exceptionThrown":
                self.messages.append(
                    message_body["params"]["exceptionDetails"]
                    .get("exception", {})
                    .get("description", "an exception")
                )
            elif message_body["method"] == "Runtime.consoleAPICalled" and message_body["params"][
                "type"
            ] in (
                "error",
                "warning",
            ):
                self.messages.append(
                    str(
                        [
                            argument.get("value", argument.get("description"))
                            for argument in message_body["params"]["args"]
                        ]
                    )
                )
            elif message_body["method"] == "Log.entryAdded" and message_body["params"]["entry"][
                "level"
            ] in (
                "error",
                "warning",
            ):
                self.messages.append(message_body["params"]["entry"]["text"])
            elif message_body["method"] == "Network.requestWillBeSent":
                self.requests.append(message_body["params"]["request"]["url"])

    requests: list[str] = []

    async def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = self._loop.create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        reply = await asyncio.wait_for(answer, DEADLINE_S)
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._send(method, **parameters))

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> float:
        """Returns the milliseconds, by the page's own clock, until the page was ready to use."""
        self.requests = []
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        # otherwise a page that is already open would only change its fragment
        self.send("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.messages.clear()
        self.send("Page.navigate", url=url)
        self.until("document.documentElement?.dataset.ready")
        return float(self.js("document.documentElement.dataset.ready"))

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        reply = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, (
            expression,
            reply["exceptionDetails"].get("exception", {}).get("description"),
        )
        return reply["result"].get("value")

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.js(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never came to be: {expression}; {self.messages}"
            self._loop.run_until_complete(asyncio.sleep(0.05))

    def press(self, *keys: str) -> None:
        """Keys by name ("ArrowDown", "Tab") or character."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "PageDown": 34,
            "End": 35,
            "Home": 36,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        for key in keys:
            about = {
                "key": key,
                "code": key,
                "windowsVirtualKeyCode": codes.get(key, ord(key[0])),
            } | ({"text": key} if len(key) == 1 else {})
            about |= {"text": "\r"} if key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **about)
            self.send(
                "Input.dispatchKeyEvent",
                type="keyUp",
                **{name: value for name, value in about.items() if name != "text"},
            )

    def mouse(self, kind: str, x: float, y: float, **parameters: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **parameters)

    def screenshot(self, path: Path | str, full_page: bool = False) -> None:
        reply = self.send(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=full_page,
            **({"clip": self._page()} if full_page else {}),
        )
        Path(path).write_bytes(base64.b64decode(reply["data"]))

    def _page(self) -> dict[str, float]:
        return {
            **self.js(
                "({width: document.documentElement.clientWidth, height: "
                "document.documentElement.scrollHeight})"
            ),
            "x": 0,
            "y": 0,
            "scale": 1,
        }

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._reading.cancel()
        self._loop.run_until_complete(self._session.close())
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)
