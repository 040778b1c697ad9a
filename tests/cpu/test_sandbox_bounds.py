"""Hostile programs in each kind of sandbox, as root and as another user.

Each tries one way past the sandbox's bounds.

This file is also the program that runs them as that user, and prints their outcomes as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.errors import ConfigError
from megarl.sandbox import inside
from megarl.sandbox.jail import BWRAP, LIMITS, NAMESPACE, PYTHON, Jail, kind_for, unbounded

KINDS = (BWRAP, NAMESPACE, LIMITS)
MEMORY_MIB = 160
FILE_MIB = 8
NOBODY = 65534
USERS = ("root", "nobody")
SOON = ((BWRAP, "root"),)
KEY = "megarl-test-secret"
WHICH = 1 if os.uname().machine == "aarch64" else 0
C = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    found = getattr(libc, name)(*(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    return found if found >= 0 else None
def tried(function, *arguments):
    try: return function(*arguments) is not None
    except OSError: return False
def escaped(*found): print("escaped" if any(found) else "held")
temporary = os.environ["TMPDIR"]
"""
GROW = """
for _ in range(8):
    memory = mmap.mmap(-1, 64 << 20)
    for place in range(0, 64 << 20, 4096): memory[place] = 1
    memory.madvise(mmap.MADV_DONTNEED)
    kept.append(memory)
time.sleep(60)
"""
DAEMON = """
if not os.fork():
    os.setsid()
    if not os.fork(): os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", os.environ["MARK"]])
    os._exit(0)
os.wait()
"""
COMET = "import os\nwhile True:\n if os.fork(): os._exit(0)"  # each process lives only for a moment
# Each prints "escaped" if it got past a bound, and else "held"; or it is killed.
ATTACKS = {
    "space behind its outputs": "escaped(*(tried(call, 'fallocate', file, 1, 0, 32 << 20) for "
    "file in (0, 1, 2)))",
    "space behind a file": "file = os.open(f'{temporary}/a', os.O_CREAT | os.O_RDWR)\n"
    "room = bytes(8) + (0).to_bytes(8, 'little') + (32 << 20).to_bytes(8, 'little') + bytes(24)\n"
    "escaped(call('fallocate', file, 1, 0, 32 << 20) is not None, tried(fcntl.ioctl, file, "
    "0x40305828, room))",
    "System V shared memory": "found = call('shmget', 0, 16 << 20, 0o1600)\nfound is None or "
    "call('shmctl', found, 0, None)\n"
    "escaped(found is not None)",
    "System V queues and semaphores": "queue, semaphores = call('msgget', 0, 0o1600), "
    "call('semget', 0, 4, 0o1600)\n"
    "queue is None or call('msgctl', queue, 0, None)\nsemaphores is None or call('semctl', "
    "semaphores, 0, 0)\n"
    "escaped(queue is not None, semaphores is not None)",
    "POSIX queues": "found = call('mq_open', b'/megarl-test', os.O_CREAT | os.O_RDWR, 0o600, "
    "None)\nlibc.mq_unlink(b'/megarl-test')\n"
    "escaped(found is not None)",
    "files without names": "escaped(tried(os.memfd_create, 'a'))",
    "mappings without pages": f"kept = []{GROW}",
    "keyrings": f"escaped(tried(call, 'syscall', {(250, 219)[WHICH]}, 10, -3, b'user', b'{KEY}', 0))",
    "sockets to the hypervisor": "escaped(tried(socket.socket, 40, socket.SOCK_STREAM))",
    "io_uring": "escaped(tried(call, 'syscall', 425, 8, ctypes.create_string_buffer(120)))",
    "namespaces of its own": "escaped(tried(call, 'unshare', 0x10000000))",
    "processes in namespaces of their own": f"found = call('syscall', {(56, 220)[WHICH]}, "
    "0x10000011, 0, 0, 0, 0)\n"
    "if found == 0: os._exit(0)\nescaped(found is not None)",
    "a pool of the whole host": f"found = ctypes.c_ulong()\nescaped({WHICH == 0} and tried(call, "
    "'syscall', 206, 4, ctypes.byref(found)))",
    # page tables take memory, although the pages do not
    "tables of pages": "libc.mmap.restype, huge = ctypes.c_void_p, 1 << 21\n"
    "where = libc.mmap(None, ctypes.c_size_t(60_000 * huge), 1, 0x4022, -1, ctypes.c_size_t(0))\n"
    "for place in range(60_000): ctypes.c_char.from_address(where + place * "
    "huge).value\ntime.sleep(60)",
    "threads": "import threading\nthreading.stack_size(32768)\nend = threading.Event()\ntry:\n"
    " for _ in range(6000): threading.Thread(target=end.wait, daemon=True).start()\nexcept "
    "RuntimeError: pass\ntime.sleep(60)",
    "mappings of what hides": f"call('prctl', 4, 0, 0, 0, 0)\nkept = []{GROW}",
    "mappings of what cannot be read": "import shutil\nhidden = temporary + "
    "'/hidden'\nshutil.copy('/usr/bin/python3', hidden)\n"
    "os.chmod(hidden, 0o111)\nos.execv(hidden, [hidden, '-c', "
    f"{f'import mmap, time{chr(10)}kept = []{GROW}'!r}])",
    "folders in folders": "os.chdir(temporary)\nfor _ in range(1200):\n os.mkdir('a')\n "
    "os.chdir('a')\nprint('held')",
    "a program that never stays at the deadline": "if not os.fork():\n os.setsid()\n"
    f" os.execv(sys.executable, [sys.executable, '-c', {COMET!r}, "
    "os.environ['MARK']])\ntime.sleep(60)",
    "a daemon": f"{DAEMON}time.sleep(0.5)\nprint('held')",
    "a daemon at the deadline": f"{DAEMON}time.sleep(60)",
    "sockets and pipes": "kept = []\nfor _ in range(4):\n if not os.fork():\n  for _ in "
    "range(490): kept.append(socket.socketpair())\n"
    "  time.sleep(60)\ntime.sleep(60)",
}
OF_THE_HOST = {  # documented as open in LIMITS
    "names of keys": f"escaped(tried(lambda: '{KEY}' in open('/proc/keys').read() or None))",
    "settings of the kernel": "escaped(os.getuid() == 0 and tried(os.open, "
    "'/proc/sys/vm/swappiness', os.O_WRONLY))",
    "signals to the run": "escaped(tried(lambda: os.kill(int(os.environ['HOST']), 0) or True))",
    "memory of the run": "escaped(tried(os.open, f\"/proc/{os.environ['HOST']}/mem\", os.O_RDWR))",
    "files of the host": "escaped(tried(os.open, os.environ['FOLDER'] + '/written', os.O_CREAT | "
    "os.O_WRONLY))",
    "sockets of the host": "escaped(tried(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + "
    "os.environ['ABSTRACT']) or True))",
    "terminals of the host": "escaped(tried(os.open, os.environ['TERMINAL'], os.O_WRONLY | "
    "os.O_NOCTTY))",
    "disks": "escaped(*(tried(os.open, '/dev/' + name, os.O_WRONLY) for name in ('loop0', "
    "'loop-control', 'fuse', 'kvm')))",
    "sockets in files": "escaped(tried(lambda: "
    "socket.socket(socket.AF_UNIX).connect(os.environ['FOLDER'] + '/socket') "
    "or True))",
    "what waits in connections": "there, kept = socket.create_server(('127.0.0.1', 0)), []\nfor _ "
    "in range(100):\n"
    " kept.append(socket.create_connection(there.getsockname()))\n "
    "kept.append(there.accept()[0])\n kept[-1].setblocking(False)\n"
    " try:\n  while True: kept[-1].send(bytes(1 << 20))\n except BlockingIOError: "
    "pass\ntime.sleep(60)",
    "files in memory": "for number in range(4):\n with open(f'/dev/shm/megarl-test-{number}', "
    "'wb') as file: file.write(bytes(4 << 20))\n"
    "print('escaped')",
    "empty files": "for number in range(200_000): os.close(os.open(f'{temporary}/{number}', "
    "os.O_CREAT))\ntime.sleep(60)",
}
GROWING = (
    "mappings without pages", "sockets and pipes", "tables of pages", "threads", "mappings of "
                                                                                 "what hides",
    "mappings of what cannot be read", "what waits in connections",
)  # fmt: skip
FULL = ("files in memory", "empty files")  # these end when there is no space


def is_bounded(name: str, ended: dict[str, object]) -> bool:
    if ended["left"]:
        return False
    if "deadline" in name:
        return ended["kind"] == "deadline"
    if name in GROWING:
        return ended["kind"] == "limits"
    if name in FULL:
        return ended["kind"] == "limits" or "No space left" in str(ended["errors"])
    return ended["output"] == "held\n" and not ended["kind"]


def attacks_in(kind: str) -> dict[str, str]:
    return ATTACKS if kind == LIMITS else {**ATTACKS, **OF_THE_HOST}


async def attack(kind: str, name: str, folder: str, address: str) -> dict[str, object]:
    cell = Jail(kind, MEMORY_MIB, FILE_MIB, 3.0 if "deadline" in name else 40.0)
    mark = f"megarl-mark-{os.getpid()}-{name}"
    master, terminal = os.openpty()
    environment = {
        "MARK": mark,
        "HOST": str(os.getpid()),
        "FOLDER": folder,
        "ABSTRACT": address,
        "TERMINAL": os.ttyname(terminal),
    }
    try:
        ended = await cell.run(
            [PYTHON, "-I", "-S", "-c", C + attacks_in(kind)[name]], "", environment, None
        )
        looks = 0
        # the kernel kills the rest of the sandbox
        while (survivors := running(mark)) and (looks := looks + 1) < 200:
            await asyncio.sleep(0.05)
        return {**ended._asdict(), "left": survivors}
    finally:
        os.close(master)
        os.close(terminal)
        await cell.close()


def running(mark: str) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            count += mark in Path(f"/proc/{name}/cmdline").read_text().split("\0")[-3:]
        except OSError:
            continue
    return count


async def attacks(kind: str, folder: str) -> dict[str, dict[str, object]]:
    """Runs four at a time, since some take all the memory they may."""
    libc = ctypes.CDLL(None)
    # a new session keyring for this process, with a key in it
    libc.syscall((250, 219)[WHICH], 1, None)
    libc.syscall((248, 217)[WHICH], b"user", KEY.encode(), b"x", 1, -3)
    places = asyncio.Semaphore(4)
    address = f"megarl-test-{os.getpid()}"

    async def one(name: str) -> dict[str, object]:
        async with places:
            return await attack(kind, name, folder, address)

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as in_files:
        for listening_socket, place in ((listener, f"\0{address}"), (in_files, f"{folder}/socket")):
            listening_socket.bind(place)
            listening_socket.listen()
        names = attacks_in(kind)
        return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder that every user may write to."""
    created = tempfile.mkdtemp(prefix="megarl-bounds-", dir="/tmp")
    os.chmod(created, 0o777)
    yield created
    shutil.rmtree(created)


def python_of(user: int) -> str:
    """A Python that the user can run, with the sandbox's dependencies.

    Skips the test if there is none.
    """
    for python in dict.fromkeys((sys.executable, "/usr/bin/python3")):
        try:
            completed = subprocess.run(
                [python, "-c", "import megarl.sandbox.jail"],
                env=variables(),
                user=user,
                group=user,
                extra_groups=[],
                check=False,
            )
        except OSError:
            continue
        if completed.returncode == 0:
            return python
    pytest.skip("no interpreter here that another user can run has the packages")


def variables() -> dict[str, str]:
    paths = [
        str(Path(__file__).parents[2]),
        *(path for path in sys.path if path.endswith("site-packages")),
    ]
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not inside.system_call_filter(),
    reason="system calls are not filtered on this machine, which the run says",
)
@pytest.mark.parametrize(
    ("kind", "user"),
    [
        (kind, user) if (kind, user) in SOON else pytest.param(kind, user, marks=pytest.mark.long)
        for kind in KINDS
        for user in USERS
    ],
)
def test_programs_stay_within_the_bounds_of_their_sandbox(
    kind: str, user: str, folder: str
) -> None:
    if os.getuid() and user == "root":
        pytest.skip("these tests do not run as root")
    python = sys.executable
    change = {}
    if os.getuid() == 0 and user == "nobody":
        python = python_of(NOBODY)
        change = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    completed = subprocess.run(
        [python, __file__, kind, folder],
        capture_output=True,
        text=True,
        env={**variables(), "TMPDIR": folder},
        cwd="/",
        **change,
    )
    assert completed.returncode in (0, 77), completed.stderr
    if completed.returncode == 77:
        pytest.skip(completed.stderr.strip())
    results = json.loads(completed.stdout)
    bad = {name: result for name, result in results.items() if not is_bounded(name, result)}
    assert len(results) == len(attacks_in(kind)) and not bad, bad
    assert os.listdir(folder) == ["socket"], "nothing is left of them"


@pytest.mark.skipif(os.getuid() != 0, reason="only root has capabilities")
def test_program_of_root_without_namespaces_has_no_capabilities() -> None:
    async def status() -> str:
        jail = Jail(LIMITS, MEMORY_MIB, FILE_MIB, 60.0)
        try:
            return (
                await jail.run(
                    [PYTHON, "-S", "-c", "print(open('/proc/self/status').read())"], "", {}, None
                )
            ).output
        finally:
            await jail.close()

    status_fields = dict(
        line.split(":\t", 1)
        for line in asyncio.run(status()).splitlines()
        if line.startswith("Cap")
    )
    assert {
        name: int(status_fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd")
    } == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd"), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_sandbox_does_not_bound_is_said(kind: str) -> None:
    message = unbounded(kind)
    assert "memory_mib does not count" in message and "may keep every core busy" in message
    assert ("host's network" in message) == (kind == LIMITS)


def test_a_run_says_at_its_start_what_its_sandboxes_do_not_bound() -> None:
    from megarl.config.load import load_config
    from megarl.launch.commands import sandbox_lines

    config = load_config(
        Path(__file__).parents[2] / "configs/examples/agent.yaml",
        [f"rollout.args.sandbox={LIMITS}", "reward.name=code"],
    )
    agents, rewards = sandbox_lines(SimpleNamespace(config=config))  # type: ignore[arg-type]
    assert agents.startswith(
        "Sandbox of rollout.name=program: limits; of a program, "
    ) and agents.endswith(unbounded(LIMITS))
    assert rewards.startswith(
        "Sandbox of reward.name=code: bwrap; of a program, "
    ) and rewards.endswith(unbounded(BWRAP))


if __name__ == "__main__":
    try:
        kind_for(sys.argv[1])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(77)
    print(json.dumps(asyncio.run(attacks(*sys.argv[1:]))))
