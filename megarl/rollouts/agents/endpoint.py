"""The HTTP endpoint that agents call, in the generator's event loop. The key of a call says which episode it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import msgspec
from aiohttp import web

from megarl.rollouts.agents import anthropic_messages, openai_chat
from megarl.rollouts.agents.episode import Episode, Refused
from megarl.rollouts.agents.openai_chat import Request

MODEL = "policy"  # the name at /v1/models; calls may name any
_LARGEST_REQUEST_BYTES = 64 << 20


_Answer = Callable[[web.Request, Episode, Request], Awaitable[web.StreamResponse]]


class _Open(NamedTuple):
    episode: Episode
    failed: asyncio.Future[None]


class Endpoint:
    """Open it in the event loop in which the episodes' calls are to run. It listens on 127.0.0.1 and at a socket of the file system."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def open(self, socket: Path) -> None:
        app = web.Application(client_max_size=_LARGEST_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._handler(openai_chat, _openai))
        app.router.add_post("/v1/messages", self._handler(anthropic_messages, _anthropic))
        app.router.add_post("/v1/messages/count_tokens", self._handler(anthropic_messages, _count))
        app.router.add_get("/v1/models", _models)
        # A call whose agent has hung up is cancelled: what nobody reads is not part of the episode.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        await web.UnixSite(self._runner, str(socket)).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def serving(self, episode: Episode) -> AsyncIterator[tuple[str, asyncio.Future[None]]]:
        """The episode's key, which is refused afterwards, and a future that fails if the engines fail one of its calls."""
        key, failed = f"sk-{secrets.token_hex(24)}", asyncio.get_running_loop().create_future()
        self._open[key] = _Open(episode, failed)
        try:
            yield key, failed
        finally:
            del self._open[key]
            failed.cancel()

    def _handler(self, form: ModuleType, answer: _Answer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        def refused(message: str, kind: str, status: int) -> web.Response:
            return web.json_response(form.error(message, kind), status=status)

        async def handle(request: web.Request) -> web.StreamResponse:
            found = self._open.get(_key(request))
            if found is None:
                return refused("no such key, or its episode has ended", "invalid_api_key", 401)
            try:
                asked = form.read_request(msgspec.json.decode(await request.read()))
            except (LookupError, TypeError, AttributeError, ValueError) as mistake:
                return refused(f"the request does not have the form it must have: {mistake!r}", "invalid_request_error", 400)
            except Refused as refusal:
                return refused(str(refusal), refusal.kind, 400)
            try:
                return await answer(request, found.episode, asked)
            except Refused as refusal:
                return refused(str(refusal), refusal.kind, 400)
            except Exception as failure:  # the engine's, or a mistake of ours: the rollout fails with it
                if not found.failed.done():
                    found.failed.set_exception(failure)
                return refused("the call failed, and its episode with it", "server_error", 500)

        return handle


async def _openai(request: web.Request, episode: Episode, asked: Request) -> web.StreamResponse:
    answers, name = await episode.complete(asked.messages, asked.tools, asked.max_tokens, asked.n), secrets.token_hex(12)
    if not asked.stream:
        return web.json_response(openai_chat.written(answers, name, asked.model))
    chunks = openai_chat.streamed(answers, name, asked.model, asked.usage)
    return await _stream(request, [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"])


async def _anthropic(request: web.Request, episode: Episode, asked: Request) -> web.StreamResponse:
    [answer], name = await episode.complete(asked.messages, asked.tools, asked.max_tokens), secrets.token_hex(12)
    if not asked.stream:
        return web.json_response(anthropic_messages.written(answer, name, asked.model))
    events = anthropic_messages.streamed(answer, name, asked.model)
    return await _stream(request, [f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n" for kind, data in events])


async def _count(request: web.Request, episode: Episode, asked: Request) -> web.StreamResponse:
    return web.json_response({"input_tokens": episode.count_tokens(asked.messages, asked.tools)})


async def _models(request: web.Request) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}]})


def _key(request: web.Request) -> str:
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


async def _stream(request: web.Request, lines: list[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for line in lines:
        await response.write(line.encode())
    await response.write_eof()
    return response
