"""Faults at the ports of a run: strangers, undecodable messages, and a port that another process has taken."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
from random import Random

import psutil
import zmq

from megarl.bench import fault_orders
from megarl.bench.fault_hooks import OfAnotherVersion
from megarl.bench.fault_run import ENGINES, STARTED_S, FaultRun, carried_out
from megarl.messaging.link import Peer, RunKey
from megarl.messaging.messages import WeightsOffer
from megarl.messaging.rendezvous import Rendezvous

NEW_PEER = "trainer.7"


def stranger_at_the_hub(run: FaultRun, random: Random) -> dict[str, str]:
    """Sends every port of the generator noise, ZeroMQ without a key, and a well-formed message under another run's key."""
    for port in _listening(run.generator()):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(random.randbytes(4096))
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.connect(f"tcp://127.0.0.1:{port}")
        stranger.send(b"let me in")
        forger = Peer("trainer.0", RunKey.generate(), f"tcp://127.0.0.1:{port}")
        forger.send(WeightsOffer(0))
        time.sleep(0.5)
        forger.close()
        stranger.close(linger=0)
    return {}


def stranger_at_an_engine(run: FaultRun, random: Random) -> dict[str, str]:
    """Sends requests without a key: one to generate, one that would change the weights, one whose body is not JSON."""
    requests = {"/generate": b'{"text": "x"}', "/update_weights_from_disk": b'{"model_path": "x"}', "/pause_generation": b"{"}
    for port in _listening(run.engine(random.randrange(ENGINES))):
        for path, body in requests.items():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                status = connection.getresponse().status
            except (OSError, http.client.HTTPException):
                continue  # a port that speaks something else
            finally:
                connection.close()
            if status == 200:
                raise RuntimeError(f"port {port} of an engine answered {path} to a stranger")
    return {}


def undecodable_from_a_new_peer(run: FaultRun, random: Random) -> dict[str, str]:
    """A new peer that has the run's key sends an unknown message, as a program of another version would."""
    (found,) = (run.run_dir / ".launch/train").glob("*/rendezvous.json")
    rendezvous = Rendezvous.load(found.parent)
    peer = Peer(NEW_PEER, rendezvous.key, rendezvous.hub_address)
    peer.send(OfAnotherVersion())  # pyright: ignore[reportArgumentType]  # that is the fault
    time.sleep(0.5)
    peer.close()
    return {}


def undecodable_from_a_trainer(run: FaultRun, random: Random) -> dict[str, str]:
    carried_out(run, fault_orders.GARBLE)
    return {}


def port_stolen(run: FaultRun, random: Random) -> dict[str, str]:
    """Kills an engine and takes its port before it is started again."""
    index = random.randrange(ENGINES)
    engine = run.engine(index)
    port = json.loads(engine.cmdline()[-1])["port"]
    for process in [engine, *engine.children(recursive=True)]:
        process.kill()
    thief = socket.socket()
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def taken() -> bool:
        with contextlib.suppress(OSError):
            thief.bind(("127.0.0.1", port))
            thief.listen()
            return True
        return False

    run.wait_until(taken, f"port {port}", STARTED_S, every_s=0.001)
    run.wait_until(lambda: run.said(f"port {port}, .* has been taken by process {os.getpid()}"), f"word of port {port}", STARTED_S)
    thief.close()
    return {"engine": str(index)}


def _listening(process: psutil.Process) -> list[int]:
    return sorted({c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN})
