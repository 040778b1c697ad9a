import asyncio
import time
from socket import create_connection

import pytest
import zmq

from megarl.messaging.link import AT_ONCE, Hub, Peer, RunKey, UnknownMessage
from megarl.messaging.messages import Hello, WeightsOffer, encode


@pytest.fixture
def key():
    return RunKey.generate()


@pytest.fixture
def hub(key):
    hub = Hub("generator.0", key)
    yield hub
    hub.close()


def test_messages_arrive_typed_and_in_order_per_type(hub, key):
    peer = Peer("trainer.0", key, hub.address)
    peer.send(WeightsOffer(3))
    peer.send(Hello("abc"))
    peer.send(WeightsOffer(4))
    assert hub.receive(Hello, 5, "x") == ("trainer.0", Hello("abc"))
    assert hub.receive(WeightsOffer, 5, "x")[1].version == 3
    assert hub.receive(WeightsOffer, 5, "x")[1].version == 4
    hub.send("trainer.0", Hello("back"))
    assert peer.receive(Hello, 5, "x")[1] == Hello("back")
    peer.close()


def test_a_wait_past_its_deadline_names_both_sides(hub):
    with pytest.raises(
        TimeoutError, match="generator.0 waited 0 s for weights version 7 from trainer.1"
    ):
        hub.receive(WeightsOffer, 0.05, "weights version 7 from trainer.1")


def test_strangers_are_refused(hub, key):
    """Neither another run's key nor an unencrypted socket gets a message through."""
    foreign_key = RunKey.generate()
    mixed_key = RunKey(
        key.hub_public, foreign_key.hub_secret, foreign_key.peer_public, foreign_key.peer_secret
    )
    strangers = [
        Peer("trainer.0", foreign_key, hub.address),
        Peer("trainer.0", mixed_key, hub.address),
    ]
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.connect(hub.address)
    plain.send(b"\x81")
    for stranger in strangers:
        stranger.send(Hello("let me in"))
    with pytest.raises(TimeoutError):
        hub.receive(Hello, 0.4, "a stranger")
    friend = Peer("trainer.0", key, hub.address)
    friend.send(Hello("hi"))
    assert hub.receive(Hello, 5, "a friend")[1] == Hello("hi")
    for socket in (*strangers, friend):
        socket._socket.close(linger=0)
    plain.close(linger=0)


def test_hub_hears_a_peer_that_connects_again(hub, key):
    """As after a broken connection that only the peer has noticed."""
    before = Peer("trainer.0", key, hub.address)
    before.send(Hello("before"))
    assert hub.receive(Hello, 5, "x")[1] == Hello("before")
    after = Peer("trainer.0", key, hub.address)
    after.send(Hello("after"))
    assert hub.receive(Hello, 5, "x")[1] == Hello("after")
    hub.send("trainer.0", Hello("back"))
    assert after.receive(Hello, 5, "x")[1] == Hello("back")
    for peer in (before, after):
        peer.close()


def test_sending_to_an_absent_peer_is_an_error(hub):
    with pytest.raises(RuntimeError, match="generator.0 cannot reach trainer.5"):
        hub.send("trainer.5", Hello(""))


def test_key_file_is_private(tmp_path, key):
    key.save(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert RunKey.load(tmp_path / "key") == key


def test_concurrent_tasks_receive_the_types_they_wait_for(hub, key):
    """All messages are delivered: those that come during a wait for another, without any wait, and
    during a send.
    """
    peer = Peer("trainer.0", key, hub.address)

    async def numbers(count: int) -> list[int]:
        return [(await hub.arrival(WeightsOffer, 5, "offers"))[1].version for _ in range(count)]

    async def texts(count: int) -> list[str]:
        hashes = []
        for _ in range(count):
            hashes.append((await hub.arrival(Hello, 5, "hellos"))[1].plan_hash)
            hub.send("trainer.0", Hello("yes"))
        return hashes

    async def speak(count: int) -> None:
        for number in range(count):
            peer.send(WeightsOffer(number))
            peer.send(Hello(str(number)))
            if number % 3 == 0:
                await asyncio.sleep(0.001)

    async def main() -> list:
        return await asyncio.gather(numbers(200), texts(200), speak(200))

    for _ in range(2):  # in one event loop, and in another
        results = asyncio.run(main())
        assert results[:2] == [list(range(200)), [str(number) for number in range(200)]]
    for _ in range(400):
        peer.receive(Hello, 5, "answers")
    peer.close()


def test_a_task_that_waits_past_its_deadline_names_both_sides(hub):
    with pytest.raises(
        TimeoutError, match="generator.0 waited 0 s for weights version 7 from trainer.1"
    ):
        asyncio.run(hub.arrival(WeightsOffer, 0.05, "weights version 7 from trainer.1"))


@pytest.mark.parametrize(
    "frames", [[b"\xff\xff"], [b"\x81"], [b""], [b"a", b"b"], [encode(Hello("x")), b""]]
)
def test_malformed_message_ends_every_wait_and_names_its_sender(hub, key, frames, capsys):
    """Also from a new peer, and without a waiting task: then only the event loop reads."""

    async def main() -> list:
        waits = [hub.arrival(kind, None, "what does not come") for kind in (WeightsOffer, Hello)]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.sleep(0.05)
        peer._socket.send_multipart(frames)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    peer = Peer("trainer.3", key, hub.address)
    message = "generator.0 was sent something by trainer.3 that is not a message of this run"
    assert [(type(error), message in str(error)) for error in asyncio.run(main())] == [
        (UnknownMessage, True)
    ] * 2
    with pytest.raises(UnknownMessage, match="by trainer.3"):
        hub.receive(Hello, 60, "what came before")
    peer.close()


def test_malformed_message_of_the_hub_ends_the_wait_of_a_peer(hub, key):
    peer = Peer("trainer.0", key, hub.address)
    peer.send(Hello("here"))
    hub.receive(Hello, 5, "x")
    hub._socket.send_multipart([b"trainer.0", b"\xff"])
    with pytest.raises(
        UnknownMessage,
        match="trainer.0 was sent something by the hub that is not a message of this run: 1 bytes in",
    ):
        peer.receive(Hello, 60, "an answer")
    peer.close()


def test_connections_without_the_key_are_refused_and_logged(hub, key, capsys):
    forger = Peer("trainer.0", RunKey.generate(), hub.address)
    forger._socket.send(b"\xff\xff")
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.connect(hub.address)
    plain.send(b"\xff\xff")
    friend = Peer("trainer.0", key, hub.address)
    output = ""
    deadline = time.monotonic() + 20
    while "2 by now" not in output:
        friend.send(Hello("hi"))
        assert hub.receive(Hello, 5, "a friend") == ("trainer.0", Hello("hi"))
        output += capsys.readouterr().out
        assert time.monotonic() < deadline, output
    assert (
        f"generator.0 refused a connection without the run's key at {hub.address}, 1 by now\n"
        in output
    )
    for socket in (forger._socket, plain):
        socket.close(linger=0)
    friend.close()


def test_unfinished_handshake_is_not_reported_as_a_missing_key(hub, key, capsys):
    """It may be from a member that was late among thousands, and comes back."""
    host, port = hub.address.removeprefix("tcp://").split(":")
    with create_connection((host, int(port))):
        pass
    friend = Peer("trainer.0", key, hub.address)
    output = ""
    deadline = time.monotonic() + 60
    while "before its handshake was over" not in output:
        friend.send(Hello("hi"))
        assert hub.receive(Hello, 30, "a friend") == ("trainer.0", Hello("hi"))
        output += capsys.readouterr().out
        assert time.monotonic() < deadline, output
    assert "without the run's key" not in output
    friend.close()


def test_a_rush_of_messages_lets_other_tasks_have_their_turn(hub, key):
    peer = Peer("trainer.0", key, hub.address)
    count = 10 * AT_ONCE
    turns = []

    async def take() -> int:
        async def look_on() -> None:
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        for version in range(count):
            peer.send(WeightsOffer(version))
        assert hub.wait(30)
        time.sleep(0.2)  # so that many arrive at once
        task = asyncio.ensure_future(look_on())
        offers = []
        while len(offers) < count:
            batch = await hub.arrivals(WeightsOffer, 30, "offers")
            assert len(batch) <= count // 2
            offers += batch
        task.cancel()
        assert [offer.version for _, offer in offers] == list(range(count))
        return len(turns)

    assert asyncio.run(take()) >= 2
    peer.close()


def test_messages_read_ahead_are_kept_and_wake_waiting_callers(hub, key):
    peer = Peer("trainer.0", key, hub.address)
    peer.read_ahead()
    peer.send(Hello("abc"))
    hub.receive(Hello, 5, "a peer")
    for version in (3, 4):
        hub.send("trainer.0", WeightsOffer(version))
    deadline = time.monotonic() + 30
    while len(peer._inbox._queues[WeightsOffer]) < 2:
        assert time.monotonic() < deadline, "nobody reads ahead"
        time.sleep(0.01)
    assert peer.wait(60), "though the socket has nothing more"
    assert [offer.version for offer in peer.drain(WeightsOffer)] == [3, 4]
    assert not peer.wait(0)
    hub._socket.send_multipart([b"trainer.0", b"\x81"])
    peer._reader.join(30)
    with pytest.raises(UnknownMessage):
        peer.poll(Hello)
    peer.close()
