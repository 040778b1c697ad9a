"""The HTTP endpoint that agents call, in the generator's event loop. What they send is hostile
input: its size is bounded, and every call gets exactly one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from megarl.agents import anthropic_messages, openai_chat, openai_responses
from megarl.agents.episode import MISFORMED, TOO_LARGE, Answer, Episode, RequestRefused, Turn
from megarl.agents.openai_chat import Request
from megarl.agents.openai_responses import ResponsesRequest

MODEL = "policy"  # the name at /v1/models; calls may use any name
_BODY_BYTES = 256 << 10
_BODY_BYTES_PER_TOKEN = 64  # bound of a request: a longer one has no room in rollout.max_tokens
_MOST_CONNECTIONS = 64
# time for a new connection to send a call with the key; as long again if it has begun one
_KEY_S = 5.0
_BACKLOG = 1024
_KEEP_ALIVE_S = 30.0


class _Reply(NamedTuple):
    content: dict[str, Any] | list[str]  # JSON, or the lines of a stream
    turns: Sequence[Turn] = ()  # that the policy has sampled for it


_CallHandler = Callable[[Episode, Any], Awaitable[_Reply]]


class _Door:
    """Admits connections to an episode.

    Other users of the host can connect too, unless it listens at a socket in the file system.
    """

    def __init__(
        self,
        server: Callable[[], asyncio.Protocol],
        connections: dict[asyncio.BaseProtocol, _Connection],
    ):
        self._server = server
        self._connections = connections
        # connections that have not yet sent a call with the key, oldest first
        self.strangers: dict[_Connection, None] = {}
        self.members: set[_Connection] = set()
        self.room = asyncio.Event()
        self.room.set()

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while await self.room.wait():
            connection, _ = await loop.sock_accept(listener)
            if len(self.strangers) >= _MOST_CONNECTIONS:
                next(iter(self.strangers)).abort()
            await loop.connect_accepted_socket(
                lambda: _Connection(self._server(), self, self._connections), connection
            )

    def close(self) -> None:
        """Stops listening, and ends the connections once their answers are written."""
        for connection in [*self.strangers, *self.members]:
            connection.close()


class _Connection(asyncio.Protocol):
    """A connection.

    If it does not send a call with the key within a few seconds, it is closed and frees its place.
    """

    def __init__(
        self,
        handler: asyncio.Protocol,
        door: _Door,
        connections: dict[asyncio.BaseProtocol, _Connection],
    ):
        self._handler = handler
        self._door = door
        self._all = connections
        self._has_received = False
        self._lost = asyncio.Event()
        # drops the last answer that was sent; None if there is none
        self.unread: Callable[[], None] | None = None
        self.eof_received = handler.eof_received
        self.pause_writing = handler.pause_writing
        self.resume_writing = handler.resume_writing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._all[self._handler] = self
        self._door.strangers[self] = None
        self._timer = asyncio.get_running_loop().call_later(_KEY_S, self._expire)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        self._handler.data_received(data)

    def admit(self) -> None:
        self._timer.cancel()
        self._door.strangers.pop(self, None)
        self._door.members.add(self)
        self._make_room()

    def _expire(self) -> None:
        """Waits once more if a call has begun: after a slow turn of the event loop, its data may
        have arrived but not been read.
        """
        if self._has_received:
            self._timer = asyncio.get_running_loop().call_later(_KEY_S, self.abort)
        else:
            self.abort()

    def end_answers(self) -> None:
        """Tells the agent that this connection brings no more.

        Raises OSError if it has reset the connection.
        """
        self._transport.write_eof()

    async def closed_by_agent(self) -> None:
        """Waits a while until the agent closes the connection: only then it is known whether it has
        read the answer.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KEY_S):
                await self._lost.wait()

    def _make_room(self) -> None:
        if len(self._door.members) < _MOST_CONNECTIONS:
            self._door.room.set()
        else:
            self._door.room.clear()

    def abort(self) -> None:
        self._door.strangers.pop(self, None)
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._lost.set()
        # the kernel resets a connection that is closed with unread data
        if exc is not None and self.unread is not None:
            self.unread()
        self._all.pop(self._handler, None)
        self._door.strangers.pop(self, None)
        self._door.members.discard(self)
        self._make_room()
        self._handler.connection_lost(exc)


class EpisodeAccess(NamedTuple):
    """What a program needs to call its episode."""

    key: str
    port: int  # on 127.0.0.1; 0 for a socket in the file system
    failed: asyncio.Future[None]  # fails if the engines fail one of the episode's calls
    ended: asyncio.Future[str]  # gets the reason once no more of its calls are accepted


class _OpenEpisode(NamedTuple):
    episode: Episode
    failed: asyncio.Future[None]
    ended: asyncio.Future[str]

    def refuse(self, refusal: RequestRefused) -> None:
        """Counts a refused call. Too many of them end the episode, since they only cost time."""
        self.episode.refuse(refusal)
        self._end_if_exhausted()

    def unread(self, turns: Sequence[Turn]) -> None:
        """Drops answers that nobody has read."""
        if not turns:
            return
        self.episode.unread(turns)
        self._end_if_exhausted()

    def _end_if_exhausted(self) -> None:
        if self.episode.exhausted and not self.ended.done():
            self.ended.set_result(self.episode.exhausted)


class ModelEndpoint:
    """The endpoint of all episodes.

    Open it in the event loop in which the episodes' calls are to run.

    Each episode has its own listener and key. It may have 64 connections that have sent calls with
    the key; further ones wait until one of these is closed. It may have 64 connections without such
    a call. Each of those has a few seconds, and a new one replaces the oldest.
    """

    def __init__(self) -> None:
        self._open: dict[str, _OpenEpisode] = {}
        # aiohttp's handler -> its connection
        self._connections: dict[asyncio.BaseProtocol, _Connection] = {}
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handler(openai_chat, _openai))
        app.router.add_post("/v1/responses", self._handler(openai_responses, _responses))
        app.router.add_post("/v1/messages", self._handler(anthropic_messages, _anthropic))
        app.router.add_post("/v1/messages/count_tokens", self._handler(anthropic_messages, _count))
        app.router.add_get("/v1/models", _models)
        app.router.add_route("*", "/{path:.*}", _nothing)
        # If the agent hangs up, its call is cancelled: an answer that nobody reads is not part of
        # the episode.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, keepalive_timeout=_KEEP_ALIVE_S
        )
        await self._runner.setup()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def serving(self, episode: Episode, path: Path | None) -> AsyncIterator[EpisodeAccess]:
        """Listens for the episode at `path`, or at a port of 127.0.0.1, until the context ends.

        Afterwards its key is refused.
        """
        with socket.socket(socket.AF_UNIX if path else socket.AF_INET) as listener:
            listener.bind(str(path) if path else ("127.0.0.1", 0))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            assert self._runner is not None and self._runner.server is not None
            loop = asyncio.get_running_loop()
            key = f"sk-{secrets.token_hex(24)}"
            door = _Door(self._runner.server, self._connections)
            served = EpisodeAccess(
                key,
                0 if path else listener.getsockname()[1],
                loop.create_future(),
                loop.create_future(),
            )
            self._open[key] = _OpenEpisode(episode, served.failed, served.ended)
            accepting = asyncio.create_task(door.accept(listener), name="an episode's connections")
            accepting.add_done_callback(
                lambda task: task.cancelled() or _fail(served.failed, task.exception())
            )
            accepting.add_done_callback(lambda _: listener.close())
            served.ended.add_done_callback(lambda _: accepting.cancel())
            try:
                yield served
            finally:
                del self._open[key]
                served.failed.cancel()
                served.ended.cancel()
                accepting.cancel()
                await asyncio.wait({accepting})
                door.close()

    def _handler(
        self, form: ModuleType, answer: _CallHandler
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        def refused(message: str, kind: str, status: int, last: bool = False) -> web.Response:
            response = web.json_response(form.error(message, kind), status=status)
            if last:
                response.force_close()
            return response

        async def handle(request: web.Request) -> web.StreamResponse:
            open_episode = self._open.get(_key(request))
            if open_episode is None:
                return refused(
                    "no such key, or its episode has ended", "invalid_api_key", 401, last=True
                )
            connection = self._connections.get(request.protocol)
            if connection is not None:
                connection.admit()
                connection.unread = None  # an agent that asks again has read the answer before
            reason = open_episode.episode.exhausted
            if reason:
                return refused(reason, "max_calls", 400, last=True)
            try:
                answered = await answer(
                    open_episode.episode, await _read_request(request, open_episode.episode, form)
                )
            except RequestRefused as refusal:
                open_episode.refuse(refusal)
                return refused(
                    str(refusal), refusal.kind, refusal.status, bool(open_episode.episode.exhausted)
                )
            except asyncio.CancelledError:
                open_episode.refuse(RequestRefused("it was given up"))
                raise
            except Exception as failure:
                # from the engine, or a bug here: the rollout fails with it
                _fail(open_episode.failed, failure)
                return refused("the call failed, and its episode with it", "server_error", 500)
            try:
                response = await _send(request, answered.content)
                if connection is not None and not response.keep_alive:
                    connection.end_answers()
            except (asyncio.CancelledError, OSError):
                open_episode.unread(answered.turns)
                raise
            if connection is not None:
                connection.unread = partial(open_episode.unread, answered.turns)
                if not response.keep_alive:
                    await connection.closed_by_agent()
            return response

        return handle


def _fail(failed: asyncio.Future[None], failure: BaseException | None) -> None:
    if failure is not None and not failed.done():
        failed.set_exception(failure)


async def _read_request(request: web.Request, episode: Episode, form: ModuleType) -> Any:
    """Reads the call's request. Raises RequestRefused."""
    try:
        body = await _read(
            request, _BODY_BYTES + _BODY_BYTES_PER_TOKEN * episode.sampling.max_tokens
        )
        return await episode.aside(lambda: form.read_request(msgspec.json.decode(body)))
    except (*MISFORMED, web.RequestPayloadError) as mistake:
        raise RequestRefused(
            f"the request does not have the required form: {mistake!r}"[:500]
        ) from mistake


async def _read(request: web.Request, most_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise RequestRefused(f"the request has more than {most_bytes} bytes", TOO_LARGE, 413)
    return bytes(body)


def _turns(answers: Sequence[Answer]) -> list[Turn]:
    return [answer.turn for answer in answers if answer.turn is not None]


async def _openai(episode: Episode, request: Request) -> _Reply:
    answers = await episode.complete(
        request.messages,
        request.tools,
        max_tokens=request.max_tokens,
        n=request.n,
        stop=request.stop,
        arguments=request.template_arguments,
        seed=request.seed,
    )
    logprobs = [episode.logprobs(answer) if request.logprobs else None for answer in answers]
    name = secrets.token_hex(12)
    if not request.stream:
        return _Reply(openai_chat.written(answers, logprobs, name, request.model), _turns(answers))
    chunks = openai_chat.streamed(answers, logprobs, name, request.model, request.usage)
    return _Reply(
        [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"],
        _turns(answers),
    )


async def _anthropic(episode: Episode, request: Request) -> _Reply:
    [answer] = await episode.complete(
        request.messages,
        request.tools,
        request.max_tokens,
        stop=request.stop,
        arguments=request.template_arguments,
    )
    name = secrets.token_hex(12)
    if not request.stream:
        return _Reply(anthropic_messages.written(answer, name, request.model), _turns([answer]))
    return _Reply(
        _lines(anthropic_messages.streamed(answer, name, request.model)), _turns([answer])
    )


async def _responses(episode: Episode, request: ResponsesRequest) -> _Reply:
    messages = openai_responses.conversation(episode, request)
    name = secrets.token_hex(12)
    instructions = []
    if request.instructions:
        instructions = [{"role": "system", "content": request.instructions}]
    [answer] = await episode.complete(
        [*instructions, *messages],
        request.tools,
        request.max_tokens,
        stop=request.stop,
        arguments=request.template_arguments,
    )
    if request.store:
        openai_responses.keep(episode, name, request, messages, answer)
    logprobs = episode.logprobs(answer) if request.logprobs else []
    if not request.stream:
        return _Reply(openai_responses.written(answer, logprobs, name, request), _turns([answer]))
    return _Reply(
        _lines(openai_responses.streamed(answer, logprobs, name, request)), _turns([answer])
    )


def _lines(events: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    return [
        f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n" for kind, data in events
    ]


async def _count(episode: Episode, request: Request) -> _Reply:
    count = await episode.count_tokens(request.messages, request.tools, request.template_arguments)
    return _Reply({"input_tokens": count})


async def _models(request: web.Request) -> web.StreamResponse:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
    return web.json_response({"object": "list", "data": [model]})


async def _nothing(request: web.Request) -> web.StreamResponse:
    paths = (
        "POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, "
        "and GET /v1/models"
    )
    message = f"{request.method} {request.path[:100]}: there is {paths}"
    return web.json_response(openai_chat.error(message, "not_found"), status=404)


def _key(request: web.Request) -> str:
    authorization = request.headers.get("Authorization", "")
    return request.headers.get("x-api-key") or authorization.removeprefix("Bearer ")


async def _send(request: web.Request, content: dict[str, Any] | list[str]) -> web.StreamResponse:
    """Sends JSON, or a stream.

    The last line of a stream goes with the stream's end: an agent that stops after it has read all.
    """
    if isinstance(content, dict):
        response: web.StreamResponse = web.json_response(content)
        await response.prepare(request)
        await response.write_eof()
        return response
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    await response.write_eof("".join(content).encode())
    return response
