"""An engine is told at once of requests for which nobody waits any more."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from aiohttp import web

from megarl.generator.client import EngineClient
from megarl.generator.completions import Sampling


class FakeEngine:
    """Answers no request before the end of the test, and notes what is aborted."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        self.asked += (await request.json())["rid"]
        self.changed.set()
        await self.ended.wait()
        return web.Response()

    async def abort(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer admin"
        self.aborted.append((await request.json())["rid"])
        self.changed.set()
        return web.Response()

    async def until(self, count: int, which: list[str]) -> None:
        async with asyncio.timeout(30):
            while len(which) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.mark.parametrize("request_s", [30.0, 0.2], ids=["cancelled", "late"])
def test_given_up_requests_are_aborted(request_s: float) -> None:
    async def main() -> None:
        engine = FakeEngine()
        application = web.Application()
        application.router.add_post("/generate", engine.generate)
        application.router.add_post("/abort_request", engine.abort)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        client = EngineClient(f"http://127.0.0.1:{port}", "user", "admin", request_s=request_s)
        sampling = Sampling(max_tokens=8)
        task = asyncio.ensure_future(client.complete([[1], [1]], [sampling] * 2))
        await engine.until(2, engine.asked)
        if request_s > 1:
            task.cancel()
        with suppress(asyncio.CancelledError, TimeoutError):
            await task
        await engine.until(2, engine.aborted)
        assert sorted(engine.aborted) == sorted(engine.asked)
        assert len(set(engine.asked)) == 2
        await client.close()
        engine.ended.set()
        await runner.cleanup()

    asyncio.run(main())


def test_closed_client_tells_nobody() -> None:
    async def main() -> None:
        client = EngineClient("http://127.0.0.1:9", "user", "admin")
        task = asyncio.ensure_future(client.complete([[1]], [Sampling(max_tokens=8)]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()

    asyncio.run(main())
