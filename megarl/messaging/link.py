"""Typed messages between the processes of one run: ZeroMQ for transport, MessagePack for content,
CURVE for authentication.

A `Hub` binds; `Peer`s connect to it under their own names. Only holders of the run's key get
through; others are refused and logged. Messages are decoded into the declared types only. Any other
message makes the current wait and all later ones raise an error that names its sender. Every wait
has a deadline that names both sides. `receive` blocks; the hub's `arrival` lets other tasks go on.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from megarl.config.errors import RunError
from megarl.messaging.host import with_port
from megarl.messaging.messages import Message, decode, encode
from megarl.messaging.waiting import Pulse

M = TypeVar("M", bound=Message)

# event: a handshake ended early, for example because it was too late
UNFINISHED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | UNFINISHED
# time for a connection's handshake: a hub does one at a time, for up to thousands of members
HANDSHAKE_S = 120
# connections that the kernel holds until ZeroMQ accepts them: thousands of members connect at once
BACKLOG = 4096
AT_ONCE = 64  # messages that an event loop reads or sends before other tasks get their turn
LOOK_UP_S = 0.2  # interval at which a wait checks whether it is given up
READ_AHEAD_S = 0.02  # interval at which a peer that reads ahead looks for messages


@dataclass(frozen=True)
class RunKey:
    """The secret of one run: CURVE key pairs of the binding and the connecting side."""

    hub_public: str
    hub_secret: str
    peer_public: str
    peer_secret: str

    @classmethod
    def generate(cls) -> RunKey:
        pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
        return cls(*pairs)

    def save(self, path: Path) -> None:
        """Writes the key so that only this user can read it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def load(cls, path: Path) -> RunKey:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


class _OnlyThisRun:
    """Credentials provider for the ZAP handler; accepts only the run's peer key."""

    def __init__(self, key: RunKey):
        self._accepted = key.peer_public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._accepted  # pyzmq passes the key as Z85 text


class _Inbox:
    """Messages that have arrived and were not yet received, in order of arrival per type."""

    def __init__(self) -> None:
        # by type: (sender, message of that type)
        self._queues: dict[type, deque[tuple[str, Any]]] = defaultdict(deque)

    def put(self, sender: str, message: Message) -> None:
        self._queues[type(message)].append((sender, message))

    def take(self, kind: type[M]) -> tuple[str, M] | None:
        queue = self._queues[kind]
        return queue.popleft() if queue else None

    def take_all(self, kind: type[M]) -> list[tuple[str, M]]:
        return list(self._queues.pop(kind, ()))


class UnknownMessage(RunError):
    """A holder of the run's key has sent something that is not a message of the run.

    It runs another version, or the data is damaged.
    """


class _Endpoint:
    """Base class of hub and peer: one socket, one inbox, waits with a deadline."""

    def __init__(self, name: str, socket: zmq.Socket):
        self.name = name
        self._socket = socket
        self._inbox = _Inbox()
        self._lock = threading.RLock()  # guards the socket and the inbox if a thread reads ahead
        self._read_ahead = False  # whether messages have come into the inbox since the last look
        self._broken: Exception | None = None  # once set, nothing more is read

    def _read(self) -> tuple[str, Message]:
        """The next message. Raises UnknownMessage; zmq.Again if none has arrived."""
        raise NotImplementedError

    def _take_in(self, most: float = math.inf) -> bool:
        """Moves everything that has arrived into the inbox, or only the first `most` messages.

        Returns whether that was all. If reading fails, this and every later call raises that error.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._read_ahead = False
            count = 0
            try:
                while count < most:
                    sender, message = self._read()
                    self._inbox.put(sender, message)
                    count += 1
            except zmq.Again:
                return True
            except Exception as error:
                self._broken = error
                raise
            finally:
                if count:
                    self._arrived()
            return False

    def _decoded(self, sender: str, *frames: bytes) -> Message:
        try:
            (body,) = frames
            return decode(body)
        except (ValueError, msgspec.DecodeError) as error:
            data = b"".join(frames)
            raise UnknownMessage(
                f"{self.name} was sent something by {sender} that is not a message of this run: "
                f"{len(data)} bytes in {len(frames)} parts, beginning with {data[:16].hex()}: "
                f"{error}"
            ) from error

    def _arrived(self) -> None:
        """Called when messages have arrived."""

    def poll(self, kind: type[M]) -> tuple[str, M] | None:
        """(sender, message) if a message of that type has arrived; does not wait."""
        with self._lock:
            self._take_in()
            return self._inbox.take(kind)

    def drain(self, kind: type[M]) -> list[M]:
        """All messages of that type that have arrived, in order; does not wait."""
        with self._lock:
            self._take_in()
            return [message for _, message in self._inbox.take_all(kind)]

    def wait(self, timeout_s: float) -> bool:
        """Blocks until anything arrives; returns False past the deadline."""
        with self._lock:
            if self._read_ahead:
                return True
            return bool(self._socket.poll(math.ceil(max(0.0, timeout_s) * 1000)))

    def receive(self, kind: type[M], timeout_s: float, awaited: str) -> tuple[str, M]:
        """Waits for a message of type `kind`; returns (sender, message).

        `awaited` completes the sentence "trainer.0 waited 60 s for …".
        Raises TimeoutError past the deadline.
        """
        arrival = self.receive_unless(lambda: False, kind, timeout_s, awaited)
        assert arrival is not None
        return arrival

    def receive_unless(
        self, given_up: Callable[[], bool], kind: type[M], timeout_s: float, awaited: str
    ) -> tuple[str, M] | None:
        """Like `receive`, but returns None if `given_up` becomes true before a message arrives."""
        deadline = time.monotonic() + timeout_s
        while True:
            arrival = self.poll(kind)
            if arrival is not None:
                return arrival
            remaining_s = deadline - time.monotonic()
            if given_up():
                return None
            if remaining_s <= 0:
                raise TimeoutError(f"{self.name} waited {timeout_s:.0f} s for {awaited}")
            self.wait(min(remaining_s, LOOK_UP_S))

    def close(self) -> None:
        self._socket.close(linger=1000)


class Hub(_Endpoint):
    """The binding side. `port` 0 takes a free one; `address` is what peers connect to."""

    def __init__(self, name: str, key: RunKey, host: str = "127.0.0.1", port: int = 0):
        # its own context, since ZeroMQ allows one authenticator per context
        context = zmq.Context()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=_OnlyThisRun(key)
        )
        socket = context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey = key.hub_public.encode()
        socket.curve_secretkey = key.hub_secret.encode()
        # sending to a peer that is gone is an error, not a silent drop
        socket.router_mandatory = True
        # a peer whose connection broke unnoticed can come back under its name
        socket.router_handover = True
        socket.sndhwm = socket.rcvhwm = 0
        socket.ipv6 = ":" in host
        socket.backlog = BACKLOG
        socket.handshake_ivl = HANDSHAKE_S * 1000
        socket.bind(f"tcp://{with_port(host, port)}")
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._refusals = socket.get_monitor_socket(REFUSALS)
        self._refused: Counter[str] = Counter()  # message -> how often
        # the event loop in which tasks wait for messages
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking = False  # whether the loop is about to look for more messages
        super().__init__(name, socket)

    def _read(self) -> tuple[str, Message]:
        sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        name = repr(sender)
        if sender.isascii() and sender.decode().isprintable():
            name = sender.decode()
        return name, self._decoded(name, *frames)

    def _take_in(self, most: float = math.inf) -> bool:
        self._note_refusals()
        return super()._take_in(most)

    def _note_refusals(self) -> None:
        """Logs connections refused because they lack the run's key, and handshakes that ended
        early. It logs only the first, second, fourth, eighth … so that they cannot fill the log.
        """
        while int(self._refusals.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._refusals)["event"]
            text = "refused a connection without the run's key"
            if event == UNFINISHED:
                text = "lost a connection before its handshake was over"
            self._refused[text] += 1
            count = self._refused[text]
            if count.bit_count() == 1:
                print(f"{self.name} {text} at {self.address}, {count} by now", flush=True)

    def send(self, peer: str, message: Message) -> None:
        """Sends `message` to `peer`. Raises RuntimeError if it is not connected."""
        self._send(peer, encode(message))

    async def send_each(self, messages: Iterable[tuple[str, Message]]) -> None:
        """Sends (peer, message) one after the other, while other tasks of the event loop go on.

        Raises RuntimeError like `send`.
        """
        for number, (peer, message) in enumerate(messages):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            self._send(peer, encode(message))

    async def send_all(self, peers: Iterable[str], message: Message) -> None:
        """Sends the same message to all `peers`, like `send_each`."""
        body = encode(message)
        for number, peer in enumerate(peers):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            self._send(peer, body)

    def _send(self, peer: str, body: bytes) -> None:
        try:
            self._socket.send(peer.encode(), zmq.SNDMORE)
            self._socket.send(body)
        except zmq.ZMQError as error:
            raise RuntimeError(f"{self.name} cannot reach {peer}: {error}") from error
        finally:
            # also after a failure, since sending may swallow a change of the socket's state
            # (`_listen`)
            if self._loop is not None:
                self._look_again()

    async def arrival(
        self, kind: type[M], timeout_s: float | None, awaited: str | Callable[[], str]
    ) -> tuple[str, M]:
        """Like `receive`, while other tasks of the event loop go on.

        A timeout of None means no deadline. `awaited` may be a function, which is called only past
        the deadline.

        Several tasks may wait at once, each for a different type.
        """

        def take() -> list[tuple[str, M]]:
            arrival = self._inbox.take(kind)
            return [] if arrival is None else [arrival]

        [arrival] = await self._next_arrivals(timeout_s, awaited, take)
        return arrival

    async def arrivals(
        self, kind: type[M], timeout_s: float | None, awaited: str | Callable[[], str]
    ) -> list[tuple[str, M]]:
        """Like `arrival`, but returns all messages of that type that have arrived, in order; at
        least one.
        """
        return await self._next_arrivals(timeout_s, awaited, lambda: self._inbox.take_all(kind))

    async def _next_arrivals(
        self,
        timeout_s: float | None,
        awaited: str | Callable[[], str],
        take: Callable[[], list[tuple[str, M]]],
    ) -> list[tuple[str, M]]:
        self._listen()
        arrivals: list[tuple[str, M]] = []

        def arrived() -> bool:
            if self._broken is not None:
                raise self._broken
            arrivals.extend(take())
            return bool(arrivals)

        try:
            async with asyncio.timeout(timeout_s):
                await self._arrivals.until(arrived)
        except TimeoutError:
            if not isinstance(awaited, str):
                awaited = awaited()
            raise TimeoutError(f"{self.name} waited {timeout_s:.0f} s for {awaited}") from None
        return arrivals

    def _listen(self) -> None:
        """Takes in messages whenever ZeroMQ's descriptor becomes readable.

        It does so when the socket's state may have changed, not while there is something to read.

        So everything must be taken in each time, and also after every send, which can swallow the
        change.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._arrivals = Pulse()
            self._looking = False
            loop.add_reader(self._socket.fileno(), self._take_in_some)
            self._look_again()

    def _look_again(self) -> None:
        """Makes the event loop take in arrived messages soon.

        Several calls have the effect of one.
        """
        assert self._loop is not None
        if not self._looking and not self._loop.is_closed():
            self._looking = True
            self._loop.call_soon(self._take_in_some)

    def _take_in_some(self) -> None:
        """Takes in some messages, then lets other tasks have their turn.

        Errors are kept for the waiting tasks to raise, since the event loop, which calls this,
        would only log them.
        """
        self._looking = False
        if self._socket.closed:
            return
        try:
            if not self._take_in(AT_ONCE):
                self._look_again()
        except Exception:
            self._arrivals.beat()

    def _arrived(self) -> None:
        if self._loop is not None:
            self._arrivals.beat()

    def close(self) -> None:
        if self._socket.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        context = self._socket.context
        self._socket.disable_monitor()
        self._refusals.close(linger=0)
        super().close()
        self._authenticator.stop()
        context.term()


class Peer(_Endpoint):
    """The connecting side, known to the hub by `name`."""

    def __init__(self, name: str, key: RunKey, address: str):
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.identity = name.encode()
        socket.curve_serverkey = key.hub_public.encode()
        socket.curve_publickey = key.peer_public.encode()
        socket.curve_secretkey = key.peer_secret.encode()
        socket.sndhwm = socket.rcvhwm = 0
        socket.ipv6 = "[" in address
        socket.handshake_ivl = HANDSHAKE_S * 1000
        socket.connect(address)
        super().__init__(name, socket)

        self._closing = threading.Event()
        self._reader: threading.Thread | None = None

    def read_ahead(self) -> None:
        """From now on, messages are received and decoded even if nobody waits for them."""
        self._reader = threading.Thread(
            target=self._read_on, name=f"{self.name} reads ahead", daemon=True
        )
        self._reader.start()

    def _read_on(self) -> None:
        while not self._closing.wait(READ_AHEAD_S):
            with self._lock:
                if self._broken is not None:
                    return
                arrived = self._read_ahead or bool(self._socket.poll(0))
                try:
                    self._take_in()
                except Exception:
                    return  # the next look raises the error in `_broken`
                self._read_ahead = arrived

    def _read(self) -> tuple[str, Message]:
        return "hub", self._decoded("the hub", *self._socket.recv_multipart(zmq.NOBLOCK))

    def send(self, message: Message) -> None:
        with self._lock:
            self._socket.send(encode(message))

    def close(self) -> None:
        self._closing.set()
        if self._reader is not None:
            self._reader.join()
        super().close()
