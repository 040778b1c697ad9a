"""The faults of `python tests/studies faults`: for each, what the run must say, and how it must
recover or end.

- A transport and a rollout of the run fail when an order tells them to (fault_orders).
- Bits of an engine's memory that it computes with are flipped from outside while it serves.
- Strangers and undecodable messages come to the run's ports; another process takes a port.
- Processes are killed, stopped, or stopped for a while.
- File systems are filled, and checkpoints are damaged.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import gc
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
import psutil
import torch
import zmq
from fault_orders import (
    DIE,
    FLIP,
    GARBLE,
    KILL_ENGINE,
    ORDERS,
    TOOL,
    order,
    ordered_tool,
    take_order,
)

from megarl.base.processes import BEATS
from megarl.base.rollout_types import Prompt, Sample
from megarl.generator.completions import Sampling
from megarl.messaging.link import Peer, RunKey
from megarl.messaging.messages import WeightsOffer
from megarl.messaging.rendezvous import ROLLOUTS, Rendezvous
from megarl.models import ModelSpec, load_spec
from megarl.plan.checkpoints import complete_checkpoints
from megarl.reshard.map import Copy
from megarl.rollouts.buffer import Ledger
from megarl.rollouts.environments.base import RolloutContext, ToolError
from megarl.rollouts.environments.single_turn import single_turn
from megarl.weight_sync.transports.shared_memory import SharedMemoryTransport

# the transport carries out orders before it writes this tensor
FLIPPED = "model.layers.1.mlp.gate_up_proj.weight"
REWARD_S = 1.0  # slows steps down, so that restarting engines get processor time


class OfAnotherVersion(msgspec.Struct, frozen=True, tag=True):
    """A message that the run does not know."""


def _the_peer() -> Peer:
    """This trainer rank's connection to the hub; transports are not given it."""
    return next(item for item in gc.get_objects() if isinstance(item, Peer))


class FaultyTransport(SharedMemoryTransport):
    """On orders, in the middle of a write, it flips a bit, kills an engine or its own rank, or
    sends an unknown message.
    """

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        folder = os.environ[ORDERS]
        if copy.destination_tensor == FLIPPED:
            if take_order(folder, FLIP) is not None:
                values = values.clone()
                values.view(torch.uint8)[0, 5] ^= 4
            pids = take_order(folder, KILL_ENGINE)
            if pids:
                for pid in pids.split():
                    os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.2)  # until the kill has taken effect
            if take_order(folder, DIE) is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            if take_order(folder, GARBLE) is not None:
                _the_peer().send(OfAnotherVersion())  # pyright: ignore[reportArgumentType]  # that is the fault
        super().write(copy, values)


async def rollout(
    context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int, *, orders: str
) -> list[Sample]:
    """Runs a tool that an order can make fail, then single_turn: a failing tool does not lose the
    prompt.
    """
    try:
        await context.run_in_worker(ordered_tool, orders)
    except ToolError as error:
        print(f"the tool failed: {error}", flush=True)
    await asyncio.sleep(REWARD_S)
    return await single_turn(context, prompt, sampling, n)


SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 256 << 20
RUN_DIR_BYTES = 512 << 20
_CLONE_NEWNS = 0x00020000  # sched.h
_FILLER = "filler"


def small_file_systems(run_dir: Path) -> bool:
    """Mounts file systems that a campaign can fill, for its run's shared memory and directory.

    They are mounted in a mount namespace of this process and its children. No other process sees
    them, and they vanish when the last of these processes ends. Only root may mount them. Without
    root, this returns False with nothing mounted. The campaign then leaves out the kinds of faults
    that need them, and says so.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    run_dir.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for mount_point, size in ((SHARED_MEMORY, SHARED_MEMORY_BYTES), (run_dir, RUN_DIR_BYTES)):
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(mount_point)],
            check=True,
        )
    return True


def fill(file_system: Path, left_bytes: int = 0) -> None:
    """Fills the file system until `left_bytes` remain.

    It can be called again after space was freed.
    """
    free = os.statvfs(file_system)
    # another process took the space first
    with open(file_system / _FILLER, "ab") as file, contextlib.suppress(OSError):
        os.posix_fallocate(
            file.fileno(), file.tell(), max(1, free.f_bavail * free.f_frsize - left_bytes)
        )


def empty(file_system: Path) -> None:
    (file_system / _FILLER).unlink(missing_ok=True)


ENGINES = 2
PROMPTS = 4
SAMPLES = 4
CHECKPOINT_EVERY = 3
RUN_DIR = "run"  # in the campaign's folder
ENDLESS = 10**6  # steps
HEALTH_S = 10
BATCH_S = 180
TOOL_S = 2
STARTED_S = 240
ENDED_S = 30  # deadlines: for the first steps, and for the last process of an ended run
NOISE = r"\.{40,}\n"  # from the tool that prints for ever
CONFIG = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"


Inject = Callable[["FaultRun", Random], dict[str, str]]
"""Injects a fault; returns the words to fill into the expected messages."""


class Hang(Exception):
    """An event did not come before its deadline."""


class Ended(Exception):
    """The run ended before the expected event."""


@dataclass
class FaultRun:
    """The run that the study harms: one run directory, continued by one launcher after another.

    Everything is written to `folder`; `model` is an HF checkpoint.
    """

    folder: Path
    model: Path
    launches: int = 0
    started: subprocess.Popen[bytes] | None = None
    known_processes: set[psutil.Process] = field(
        default_factory=set
    )  # descendants of the current launcher
    _read: dict[Path, int] = field(default_factory=dict)  # bytes read from each log
    _output: str = ""  # the text since the last mark

    def __post_init__(self) -> None:
        self.run_dir = self.folder / RUN_DIR
        self.orders = self.folder / "orders"
        self.orders.mkdir(parents=True, exist_ok=True)

    def start(self, max_steps: int = ENDLESS) -> None:
        """Starts or resumes the run; returns at once."""
        settings = {
            "model.path": self.model, "run_dir": self.run_dir, "max_steps": max_steps,
            "checkpoint.every": CHECKPOINT_EVERY,
            "rollout.prompts_per_step": PROMPTS, "rollout.n": SAMPLES,
            "rollout.name": "fault_kinds:rollout",
            "rollout.args.orders": self.orders, "rollout.tool_timeout_s": TOOL_S,
            "reward.timeout_s": TOOL_S,
            "generator.engines": ENGINES, "generator.health_s": HEALTH_S,
            "generator.max_restarts": ENDLESS,
            "weights.transport": "fault_kinds:FaultyTransport", "async.capacity": 2,
            "async.partial_rollout": "in_flight",
            "timeouts.rollouts_s": BATCH_S, "eval.every": 0, "eval.limit": 8,
            "observe.probe_every": 0, "observe.trackers": "[]",
            "observe.rollouts_per_step": 0, "trainer.optimizer.schedule": "constant",
        }  # fmt: skip
        command = [
            sys.executable,
            "-P",
            "-m",
            "megarl",
            "train",
            str(CONFIG),
            *(f"{key}={value}" for key, value in settings.items()),
        ]
        for order_file in self.orders.iterdir():
            order_file.unlink()
        self.launches = self.launches + 1
        self.known_processes = set()
        self._read = {}
        self._output = ""
        with open(self.output, "wb") as file:
            self.started = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {ORDERS: str(self.orders), "PYTHONPATH": str(Path(__file__).parent)},
                start_new_session=True,
            )

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        assert self.started is not None
        return self.started

    @property
    def output(self) -> Path:
        """The file with the current launcher's output."""
        return self.folder / f"launch.{self.launches}.log"

    @property
    def driver_log(self) -> Path:
        return self.run_dir / "logs/generator.0.log"

    def mark(self) -> None:
        """From now on `said` looks only at the output of launcher and driver after this call."""
        self._listen()
        self._output = ""

    def has_printed(self, pattern: str) -> bool:
        self._listen()
        return re.search(pattern, self._output) is not None

    def _listen(self) -> None:
        for path in (self.output, self.driver_log):
            if path.exists():
                with open(path, "rb") as file:
                    file.seek(self._read.get(path, 0))
                    new = file.read()
                self._read[path] = self._read.get(path, 0) + len(new)
                self._output += re.sub(NOISE, "", new.decode(errors="replace"))

    def processes(self, *words: str) -> list[psutil.Process]:
        """The launcher's descendants whose command lines contain all the words."""
        members = []
        for process in self.descendants():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(word in line for word in words):
                members.append(process)
        return members

    def descendants(self) -> list[psutil.Process]:
        try:
            children = psutil.Process(self.launcher.pid).children(recursive=True)
        except psutil.Error:
            return []
        self.known_processes |= set(children)
        return children

    def trainer(self, rank: int) -> psutil.Process:
        return self.processes("megarl.launch.worker", f"trainer {rank}")[0]

    def generator(self) -> psutil.Process:
        return self.processes("megarl.launch.worker", "generator 0")[0]

    def engine(self, index: int) -> psutil.Process:
        """The engine's server process; the scheduler is a child of it."""
        return self.engines(index)[0]

    def engines(self, index: int) -> list[psutil.Process]:
        """The engine's server process, if there is one, recognised by the file of its workers'
        heartbeats.
        """
        engine_processes = []
        for process in self.processes("megarl.generator.server"):
            with contextlib.suppress(psutil.Error):
                engine_processes += (
                    [process]
                    if process.environ().get(BEATS, "").endswith(f"/engine.{index}.beats")
                    else []
                )
        return engine_processes

    def wait_until(
        self, holds: Callable[[], bool], awaited: str, timeout_s: float, every_s: float = 0.25
    ) -> None:
        """Raises Hang past the deadline, Ended when the run ends first."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            self.descendants()
            if self.launcher.poll() is not None:
                if holds():
                    return
                raise Ended(
                    f"the run ended with {self.launcher.returncode} before {awaited}; its last "
                    f"words:\n{tail(self.output)}"
                )
            if time.monotonic() > deadline:
                raise Hang(
                    f"no {awaited} within {timeout_s:.0f} s; its last "
                    f"words:\n{tail(self.output, 6)}\n{tail(self.driver_log, 6)}"
                )
            time.sleep(every_s)

    def wait_steps(self, count: int, timeout_s: float = STARTED_S) -> None:
        before = self.steps
        self.wait_until(lambda: self.steps >= before + count, f"{count} more steps", timeout_s)

    def exit_status(self, timeout_s: float) -> int:
        """Raises Hang past the deadline."""
        deadline = time.monotonic() + timeout_s
        while self.launcher.poll() is None:
            self.descendants()
            if time.monotonic() > deadline:
                raise Hang(
                    f"the run did not end within {timeout_s:.0f} s; its last "
                    f"words:\n{tail(self.output, 12)}"
                )
            time.sleep(0.1)
        return self.launcher.returncode

    def orphans(self) -> int:
        """Kills the processes that the ended run left behind, and returns their number."""
        deadline = time.monotonic() + ENDED_S
        alive = [process for process in self.known_processes if _runs(process)]
        while alive and time.monotonic() < deadline:
            time.sleep(0.1)
            alive = [process for process in alive if _runs(process)]
        for process in alive:
            process.kill()
        return len(alive)

    def kill(self) -> None:
        if self.started is not None and self.started.poll() is None:
            for process in [*self.descendants(), self.launcher]:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self.launcher.wait()

    @property
    def steps(self) -> int:
        return len(self.trained())

    def trained(self) -> list[list[int]]:
        """The ordinals of every step, from the first."""
        path = self.run_dir / "rollouts/ordinals.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        assert [line["step"] for line in lines] == list(range(len(lines))), (
            f"{path}: steps are missing or repeated"
        )
        return [line["ordinals"] for line in lines]

    def repeated(self) -> list[int]:
        """Ordinals that were trained on more than once."""
        counts = collections.Counter(itertools.chain(*self.trained()))
        return sorted(ordinal for ordinal, count in counts.items() if count > 1)

    def missing(self) -> list[int]:
        """Ordinals that a finished run should have trained on, but did not."""
        trained = set(itertools.chain(*self.trained()))
        return sorted(set(range(self.steps * PROMPTS)) - trained)

    def ledger_problems(self) -> int:
        """The number of ordinals that differ between the newest checkpoint's ledger and the record
        of training. Call it only while nothing runs.
        """
        checkpoints = complete_checkpoints(self.run_dir)
        if not checkpoints:
            return 0
        step, folder = checkpoints[-1]
        ledger = Ledger.load(folder)
        consumed = ledger.trained()
        trained = set(itertools.chain(*self.trained()[:step]))
        held_ordinals = {group.ordinal for group in ledger.groups}
        return len(consumed ^ trained) + len(consumed & held_ordinals)


def _runs(process: psutil.Process) -> bool:
    """Whether the process runs. A zombie, whose exit status was not read yet, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def carried_out(run: FaultRun, name: str, text: str = "") -> None:
    """Gives an order and waits until a process has taken it."""
    order(run.orders, name, text)
    run.wait_until(
        lambda: not (run.orders / name).exists(),
        f"process that carries out {name}",
        STARTED_S,
        every_s=0.05,
    )


def tail(path: Path, lines: int = 20) -> str:
    return (
        "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        if path.exists()
        else f"({path}: nothing)"
    )


# the file that holds an engine's parameters (megarl/weight_sync/transports/shared_memory.py)
WEIGHTS = "memfd:megarl-weights"
POSITION = 3  # the row of the rotary cache that is searched for


def parameter_changed(run: FaultRun, random: Random) -> dict[str, str]:
    """Flips a bit in the first half of the parameters' file.

    (The end of the file is unused padding.)
    """
    process = _worker(run.engine(random.randrange(ENGINES)))
    start, end = next(_regions(process, WEIGHTS))
    _flip(process, start + random.randrange((end - start) // 2) // 4 * 4)
    return {}


def rotary_changed(run: FaultRun, random: Random) -> dict[str, str]:
    process = _worker(run.engine(random.randrange(ENGINES)))
    row = _rotary_row(load_spec(run.model))
    changed = [
        address
        for region in _regions(process, "")
        for address in _occurrences(process, *region, row)
    ]
    if not changed:
        raise RuntimeError("the engine's rotary cache was not found in its memory")
    for address in changed:  # flips all, since one may be a freed copy
        _flip(process, address)
    return {}


def _rotary_row(model: ModelSpec) -> bytes:
    """The beginning of row POSITION: cos(position / theta^(2i/d)), computed in float32 as SGLang
    does.
    """
    frequencies = 1.0 / (
        model.rope_theta
        ** (torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim)
    )
    row = (torch.arange(POSITION + 1, dtype=torch.float32)[:, None] * frequencies)[POSITION].cos()
    return struct.pack(f"{len(row)}f", *row.tolist())


def _worker(engine: psutil.Process) -> psutil.Process:
    """The process that holds the parameters."""
    return next(child for child in engine.children(recursive=True) if any(_regions(child, WEIGHTS)))


def _regions(process: psutil.Process, name: str) -> Iterator[tuple[int, int]]:
    """First and last addresses of writable mappings of files whose name contains `name`.

    If `name` is empty: of anonymous memory and the heap.
    """
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions.startswith("rw") and (
            (name in path[0]) if name and path else not name and (not path or path[0] == "[heap]")
        ):
            first, last = addresses.split("-")
            yield int(first, 16), int(last, 16)


def _occurrences(process: psutil.Process, start: int, end: int, pattern: bytes) -> Iterator[int]:
    with open(f"/proc/{process.pid}/mem", "rb") as memory, contextlib.suppress(OSError):
        memory.seek(start)
        content = memory.read(end - start)
        position = -1
        while (position := content.find(pattern, position + 1)) >= 0:
            yield start + position


def _flip(process: psutil.Process, address: int) -> None:
    """Flips a bit that changes a float32 or bfloat16 noticeably."""
    with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address + 2)
        (byte,) = memory.read(1)
        memory.seek(address + 2)
        memory.write(bytes([byte ^ 4]))


NEW_PEER = "trainer.7"


def stranger_at_the_hub(run: FaultRun, random: Random) -> dict[str, str]:
    """Sends to every port of the generator: noise, ZeroMQ without a key, and a well-formed message
    under another run's key.
    """
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
    """Sends requests without a key: one generates, one would change the weights, and one has a body
    that is not JSON.
    """
    requests = {
        "/generate": b'{"text": "x"}',
        "/update_weights_from_disk": b'{"model_path": "x"}',
        "/pause_generation": b"{",
    }
    for port in _listening(run.engine(random.randrange(ENGINES))):
        for path, body in requests.items():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                status = connection.getresponse().status
            except (OSError, http.client.HTTPException):
                continue  # a port with another protocol
            finally:
                connection.close()
            if status == 200:
                raise RuntimeError(f"port {port} of an engine answered {path} to a stranger")
    return {}


def undecodable_from_a_new_peer(run: FaultRun, random: Random) -> dict[str, str]:
    """A new peer with the run's key sends an unknown message, as another version of the program
    would.
    """
    (rendezvous_file,) = (run.run_dir / ".launch/train").glob("*/rendezvous.json")
    rendezvous = Rendezvous.load(rendezvous_file.parent)
    peer = Peer(NEW_PEER, rendezvous.key, rendezvous.hub_address(ROLLOUTS))
    peer.send(OfAnotherVersion())  # pyright: ignore[reportArgumentType]  # that is the fault
    time.sleep(0.5)
    peer.close()
    return {}


def undecodable_from_a_trainer(run: FaultRun, random: Random) -> dict[str, str]:
    carried_out(run, GARBLE)
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

    def takes_the_port() -> bool:
        with contextlib.suppress(OSError):
            thief.bind(("127.0.0.1", port))
            thief.listen()
            return True
        return False

    run.wait_until(takes_the_port, f"port {port}", STARTED_S, every_s=0.001)
    run.wait_until(
        lambda: run.has_printed(f"port {port}, .* has been taken by process {os.getpid()}"),
        f"word of port {port}",
        STARTED_S,
    )
    thief.close()
    return {"engine": str(index)}


def _listening(process: psutil.Process) -> list[int]:
    return sorted(
        {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    )


PAUSE_S = 20.0


def engine_killed(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    run.engine(index).kill()
    return {"engine": str(index)}


def engine_stopped(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    for process in _with_children(run.engine(index)):
        process.suspend()
    return {"engine": str(index)}


def engine_stalled(run: FaultRun, random: Random) -> dict[str, str]:
    """Stops an engine for less than its allowed silence."""
    processes = _with_children(run.engine(random.randrange(ENGINES)))
    for process in processes:
        process.suspend()
    time.sleep(random.uniform(1.0, 4.0))
    for process in processes:
        process.resume()
    return {}


def scheduler_killed(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    random.choice(_schedulers(run.engine(index))).kill()
    return {"engine": str(index)}


def engine_killed_in_transfer(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    pids = " ".join(str(process.pid) for process in _with_children(run.engine(index)))
    carried_out(run, KILL_ENGINE, pids)
    return {"engine": str(index)}


def reward_worker_killed(run: FaultRun, random: Random) -> dict[str, str]:
    random.choice(run.processes("megarl.rewards.worker")).kill()
    return {}


def reward_worker_stopped(run: FaultRun, random: Random) -> dict[str, str]:
    """Stops a reward worker. The run kills and replaces it when its call has taken too long."""
    random.choice(run.processes("megarl.rewards.worker")).suspend()
    return {}


def trainer_killed(run: FaultRun, random: Random) -> dict[str, str]:
    rank = random.randrange(2)
    run.trainer(rank).kill()
    return {"rank": str(rank)}


def generator_killed(run: FaultRun, random: Random) -> dict[str, str]:
    run.generator().kill()
    return {}


def generator_stopped(run: FaultRun, random: Random) -> dict[str, str]:
    run.generator().suspend()
    return {}


def launcher_killed(run: FaultRun, random: Random) -> dict[str, str]:
    run.launcher.kill()
    return {}


def killed_while_saving(run: FaultRun, random: Random) -> dict[str, str]:
    """Kills the launcher when the first file of a checkpoint exists."""
    checkpoints = run.run_dir / "checkpoints"
    run.wait_until(
        lambda: any(checkpoints.glob("*.partial/*")),
        "checkpoint being written",
        STARTED_S,
        every_s=0.002,
    )
    run.launcher.kill()
    return {}


def sigterm(run: FaultRun, random: Random) -> dict[str, str]:
    run.launcher.terminate()
    return {}


def trainer_killed_in_transfer(run: FaultRun, random: Random) -> dict[str, str]:
    carried_out(run, DIE)
    return {}


def killed_before_ready(run: FaultRun, random: Random) -> dict[str, str]:
    """Kills an engine, and then a scheduler of its successor before the successor is ready."""
    index = random.randrange(ENGINES)
    before = run.engine(index)
    before.kill()
    run.wait_until(
        lambda: _started_again(run, index, before),
        f"scheduler of engine {index}",
        STARTED_S,
        every_s=0.05,
    )
    time.sleep(random.uniform(0.5, 3.0))
    random.choice(_schedulers(run.engine(index))).kill()
    return {"engine": str(index)}


def _started_again(run: FaultRun, index: int, before: psutil.Process) -> bool:
    engines = run.engines(index)
    return bool(engines) and engines[0] != before and bool(_schedulers(engines[0]))


def paused(role: str) -> Inject:
    """Stops a process for PAUSE_S: longer than an engine's allowed silence, and shorter than all
    other deadlines of the run.
    """

    def inject(run: FaultRun, random: Random) -> dict[str, str]:
        index = random.randrange(ENGINES)
        processes = {
            "trainer rank": lambda: [run.trainer(random.randrange(2))],
            "generator": lambda: [run.generator()],
            "launcher": lambda: [psutil.Process(run.launcher.pid)],
            "engine": lambda: _with_children(run.engine(index)),
            "scheduler": lambda: _schedulers(run.engine(index)),
            "reward worker": lambda: [random.choice(run.processes("megarl.rewards.worker"))],
        }[role]()
        for process in processes:
            process.suspend()
        time.sleep(PAUSE_S)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # the run gave it up and ended it
                process.resume()
        return {"engine": str(index)}

    return inject


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _schedulers(engine: psutil.Process) -> list[psutil.Process]:
    return [
        child
        for child in engine.children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]


# remains on a full disk: enough for logs and metrics, too little for a checkpoint
LEFT_BYTES = 1 << 20


def full_disk(run: FaultRun, random: Random) -> dict[str, str]:
    """Keeps trainer rank 1 from writing files of more than 1 MiB, so it cannot write its part of a
    checkpoint.
    """
    psutil.Process(run.trainer(1).pid).rlimit(psutil.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    return {}


def disk_filled(run: FaultRun, random: Random) -> dict[str, str]:
    """Fills the disk and keeps it full.

    Otherwise a run would continue in the space that it frees when it deletes older checkpoints.
    """
    deadline = time.monotonic() + STARTED_S
    while run.launcher.poll() is None and time.monotonic() < deadline:
        run.descendants()
        fill(run.run_dir, LEFT_BYTES)
        time.sleep(0.05)
    return {}


def disk_emptied(run: FaultRun) -> None:
    empty(run.run_dir)


def shared_memory_filled_before_the_start(run: FaultRun, random: Random) -> dict[str, str]:
    """A run on CPUs is not affected: its processes share anonymous memory, or files in a folder of
    the launch.
    """
    run.launcher.terminate()
    run.exit_status(STARTED_S)
    fill(SHARED_MEMORY)
    run.start()
    run.wait_steps(1)
    shared_memory_emptied(run)
    return {}


def shared_memory_filled(run: FaultRun, random: Random) -> dict[str, str]:
    """Running processes already have their memory, but an engine that dies cannot be started again
    until there is room.
    """
    index = random.randrange(ENGINES)
    fill(SHARED_MEMORY)
    run.engine(index).kill()
    run.wait_until(
        lambda: run.has_printed(str(SHARED_MEMORY)), "word of the full shared memory", STARTED_S
    )
    shared_memory_emptied(run)
    return {"engine": str(index)}


def shared_memory_emptied(run: FaultRun) -> None:
    empty(SHARED_MEMORY)


def checkpoint_file(files: str, harm: Callable[[Path, Random], None]) -> Inject:
    """Stops the run, damages a file of its newest checkpoint that matches `files`, and starts the
    run again. Each time it takes another file.
    """

    def inject(run: FaultRun, random: Random) -> dict[str, str]:
        run.launcher.terminate()
        run.exit_status(STARTED_S)
        _step, folder = complete_checkpoints(run.run_dir)[-1]
        matches = sorted(folder.glob(files))
        target = matches[run.launches % len(matches)]
        (run.folder / "damaged").write_text(str(target))
        shutil.copy(target, run.folder / "whole")
        harm(target, random)
        run.start()
        return {"folder": re.escape(folder.name), "file": re.escape(target.name)}

    return inject


def cut_short(file: Path, random: Random) -> None:
    os.truncate(file, random.randrange(file.stat().st_size))


def remove(file: Path, random: Random) -> None:
    file.unlink()


def flip_bit(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def whole_again(run: FaultRun) -> None:
    if (run.folder / "whole").exists():
        shutil.move(run.folder / "whole", (run.folder / "damaged").read_text())


FAILED = 1
STOPPED = 128 + signal.SIGTERM
KILLED = -signal.SIGKILL
REFUSED = 2  # exit statuses of the launcher


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    `notice` and `recovered` match what launcher or driver print; `inject` returns the values of
    their {words}.
    """

    inject: Inject
    notice: str = ""  # the message that names the cause; empty if none is expected
    recovered: str = ""  # after this message the run counts as recovered
    ends: int | None = None  # the exit status with which the run must end; None if it must continue
    # how often it is drawn after its first time; low if an engine or the run must restart, which
    # takes long
    weight: int = 1
    # undoes the damage before the run is started again
    mend: Callable[[FaultRun], None] = lambda run: None
    # it needs root: it mounts file systems, or writes to other processes' memory
    root: bool = False


def tool(task: str) -> Inject:
    def inject(run: FaultRun, random: Random) -> dict[str, str]:
        carried_out(run, TOOL, task)
        return {}

    return inject


def bit_flipped(run: FaultRun, random: Random) -> dict[str, str]:
    carried_out(run, FLIP)
    return {}


_LOST = r"engine {engine} is lost"
_BACK = r"engines \[[\d, ]*{engine}[\d, ]*\] serve version"
_SILENT = r"engine\.{engine} has answered nothing for"
_NO_MESSAGE = r"was sent something by trainer\.\d that is not a message of this run"
_NOT_WRITTEN = r"checkpoints/step_\d+ of \d+ bytes could not be written; \d+ bytes were free"
# the memory changed during an update
_NOT_AS_SENT = r"weight audit failed:\s+\S+ on generator rank \d is not what trainer rank"
_REWRITTEN = (
    r"something other than an update has written to an engine's memory:\s+\S+ on generator rank \d"
)
_DAMAGED = r"{folder}: {file} is damaged"
_DAMAGED_TENSORS = r"{folder} cannot be used: {file} is damaged"
_RANK_KILLED = r"trainer\.{rank} was killed by SIGKILL"

KINDS: dict[str, Kind] = {
    "engine killed": Kind(engine_killed, _LOST, _BACK, weight=2),
    "engine hangs": Kind(engine_stopped, _SILENT, _BACK, weight=2),
    "engine slow": Kind(engine_stalled, weight=8),
    "engine's scheduler killed": Kind(scheduler_killed, _LOST, _BACK, weight=2),
    "engine killed in a transfer": Kind(engine_killed_in_transfer, _LOST, _BACK, weight=2),
    "stranger at the rollouts port": Kind(stranger_at_the_hub, weight=8),
    "stranger at an engine": Kind(stranger_at_an_engine, weight=8),
    "reward worker killed": Kind(reward_worker_killed, weight=8),
    "reward worker hangs": Kind(reward_worker_stopped, weight=8),
    "tool crashes": Kind(
        tool("crash twice"), "the tool failed: it brought its process down", weight=8
    ),
    "tool hangs": Kind(tool("hang"), "the tool failed: it took longer than", weight=8),
    "tool prints for ever": Kind(tool("print"), "the tool failed: it took longer than", weight=8),
    "tool answers too much": Kind(
        tool("answer too much"), r"the tool failed: more than \d+ bytes of result", weight=8
    ),
    "trainer rank killed": Kind(trainer_killed, _RANK_KILLED, ends=FAILED, weight=2),
    "trainer rank killed in a transfer": Kind(
        trainer_killed_in_transfer, r"trainer\.[01] was killed by SIGKILL", ends=FAILED
    ),
    "generator killed": Kind(
        generator_killed, r"generator\.0 was killed by SIGKILL", ends=FAILED, weight=1
    ),
    "generator hangs": Kind(
        generator_stopped, r"waited \d+ s for .*generator\.0", ends=FAILED, weight=0
    ),
    "launcher killed": Kind(launcher_killed, ends=KILLED, weight=2),
    "launcher killed while saving": Kind(killed_while_saving, ends=KILLED, weight=1),
    "SIGTERM": Kind(
        sigterm,
        r"stopped at step \d+ by SIGTERM; the same command goes on from there",
        ends=STOPPED,
        weight=2,
    ),
    "full disk while saving": Kind(full_disk, _NOT_WRITTEN, ends=FAILED, weight=1),
    "bit flipped in a transfer": Kind(bit_flipped, re.escape(FLIPPED), ends=FAILED, weight=1),
    "undecodable message of a trainer rank": Kind(
        undecodable_from_a_trainer, _NO_MESSAGE, ends=FAILED
    ),
    "undecodable message of a new peer": Kind(
        undecodable_from_a_new_peer, _NO_MESSAGE, ends=FAILED
    ),
    "engine's port stolen": Kind(port_stolen, recovered=_BACK),
    "engine's scheduler killed before ready": Kind(killed_before_ready, _LOST, _BACK),
    "trainer rank stops for 20 s": Kind(paused("trainer rank"), weight=2),
    "generator stops for 20 s": Kind(paused("generator"), weight=2),
    "launcher stops for 20 s": Kind(paused("launcher"), weight=2),
    "reward worker stops for 20 s": Kind(paused("reward worker"), weight=2),
    "engine stops for 20 s": Kind(paused("engine"), _SILENT, _BACK),
    "engine's scheduler stops for 20 s": Kind(paused("scheduler"), _SILENT, _BACK),
    "disk full": Kind(disk_filled, _NOT_WRITTEN, ends=FAILED, mend=disk_emptied, root=True),
    "shared memory full at the start": Kind(
        shared_memory_filled_before_the_start, mend=shared_memory_emptied, root=True
    ),
    "shared memory full": Kind(
        shared_memory_filled, "/dev/shm", _BACK, mend=shared_memory_emptied, root=True
    ),
    "engine's parameter changed in memory": Kind(
        parameter_changed, f"{_REWRITTEN}|{_NOT_AS_SENT}", ends=FAILED, root=True
    ),
    "engine's rotary cache changed in memory": Kind(
        rotary_changed, _REWRITTEN, ends=FAILED, root=True
    ),
    "checkpoint truncated": Kind(
        checkpoint_file("*", cut_short), _DAMAGED, ends=REFUSED, mend=whole_again, weight=2
    ),
    "checkpoint's file removed": Kind(
        checkpoint_file("*", remove),
        r"{folder}: .*{file} is missing",
        ends=REFUSED,
        mend=whole_again,
        weight=2,
    ),
    "bit flipped in a checkpoint's small files": Kind(
        checkpoint_file("[!r]*", flip_bit), _DAMAGED, ends=REFUSED, mend=whole_again, weight=2
    ),
    "bit flipped in a checkpoint's tensors": Kind(
        checkpoint_file("rank_*.bin", flip_bit), _DAMAGED_TENSORS, ends=FAILED, mend=whole_again
    ),
}
