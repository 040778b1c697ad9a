"""The first process of a sandboxed program: sets limits, forwards its calls out of the sandbox, and
ends with the program's exit status.

The sandbox's own Python runs it, so it is a single file that imports only the standard library.
Arguments: a JSON object with `limits` (RLIMIT_… name: value), `socket`, `port`, `kind` ("bwrap" |
"namespace" | "limits"), `home` (a folder that becomes the program's own) and `size_bytes` (size
limit of `home` and of /dev/shm); then the command.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys

_NEW_NAMESPACES = {
    "mount": 0x20000,
    "UTS": 0x4000000,
    "IPC": 0x8000000,
    "user": 0x10000000,
    "PID": 0x20000000,
    "network": 0x40000000,
}
_ANY_NAMESPACE = sum(_NEW_NAMESPACES.values()) | 0x2000000 | 0x80  # also cgroup and time namespaces
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_BIND = 1 << 12
_MS_REC = 1 << 14
_MS_PRIVATE = 1 << 18
_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MS_REMOUNT = 1 << 5
_MOST_INODES = 1 << 16
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PDEATHSIG = 1
_SECCOMP = 22
_CAPBSET_DROP = 24
_CHILD_SUBREAPER = 36
_NO_NEW_PRIVS = 38  # operations of prctl
_FILTER = 2  # mode of PR_SET_SECCOMP
_JOIN_SESSION_KEYRING = 1

# Numbers of system calls on x86-64 and AArch64. Agents do not need them, and each is a way around a
# limit or out of the sandbox. They provide memory that belongs to no process (System V, files
# without names, keys), a pool of the whole host (io_setup), other families of sockets, namespaces
# with limits of their own, or work by the kernel.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_REFUSED = {
    errno.ENOSYS: {
        "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
        "semop": (65, 193), "semctl": (66, 191),
        "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
        "msgctl": (71, 187), "mq_open": (240, 180),
        "memfd_create": (319, 279), "memfd_secret": (447, 447), "add_key": (248, 217),
        "request_key": (249, 218), "keyctl": (250, 219),
        "io_setup": (206, 0), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
        "clone3": (435, 435),  # its flags are in memory, which filters cannot read
    },
    errno.EPERM: {
        "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
        "open_tree": (428, 428),
        "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "fspick": (433, 433),
        "mount_setattr": (442, 442),
    },
}  # fmt: skip
_UNSHARE = (272, 97)
_CLONE = (56, 220)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_FALLOCATE = (285, 47)
_IOCTL = (16, 29)
_PRCTL = (157, 167)
_SET_DUMPABLE = 4
_INTERNET = (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_FAMILIES = (socket.AF_UNIX, *_INTERNET)
_KEEP_SIZE = 1  # with this flag, fallocate ignores RLIMIT_FSIZE
_RESERVE = 0x40305828
_RESERVE_64 = 0x4030582A  # FS_IOC_RESVSP…, which also ignore it
_TYPE_INTO_TERMINAL = 0x5412  # TIOCSTI
_LOAD = 0x20
_EQUAL = 0x15
_SET = 0x45
_RETURN = 0x06  # BPF: load a word, jump if equal, jump if any bit is set, return
_ALLOW = 0x7FFF0000
_ERRNO = 0x50000
_KILL = 0x80000000
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST = 16
_SECOND = 24  # offsets in seccomp_data; of arguments, the lower halves
_OTHER_NUMBERS = 0x40000000  # system call numbers of the x32 interface


def system_call_filter(families: "tuple[int, ...]" = _FAMILIES) -> bytes:
    """The seccomp program (struct sock_filter[], linux/seccomp.h).

    Empty on machines whose system calls are unknown here.

    `families`: of sockets that may be created. Pairs of Unix sockets are always allowed.
    """
    if platform.machine() not in _ARCHITECTURES:
        return b""
    audited, column = _ARCHITECTURES[platform.machine()]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, audited),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    code += [(_SET, 0, 1, _OTHER_NUMBERS), _refuse(errno.ENOSYS)]
    for error, calls in _REFUSED.items():
        for numbers in calls.values():
            code += [(_EQUAL, 0, 1, numbers[column]), _refuse(error)]
    for numbers in (_UNSHARE, _CLONE):
        code += _looking_at(
            numbers[column], _FIRST, [(_SET, 0, 1, _ANY_NAMESPACE), _refuse(errno.EPERM)]
        )
    for numbers, allowed in ((_SOCKET, families), (_SOCKETPAIR, _FAMILIES)):
        jumps = [
            (_EQUAL, len(allowed) - place, 0, int(family)) for place, family in enumerate(allowed)
        ]
        code += _looking_at(numbers[column], _FIRST, [*jumps, _refuse(errno.EAFNOSUPPORT)])
    # A process that is not dumpable hides its memory from the watch. A program that asks for this
    # is told it succeeded, without effect.
    hide = [(_EQUAL, 0, 3, _SET_DUMPABLE), (_LOAD, 0, 0, _SECOND), (_EQUAL, 0, 1, 0), _refuse(0)]
    code += _looking_at(_PRCTL[column], _FIRST, hide)
    code += _looking_at(
        _FALLOCATE[column], _SECOND, [(_SET, 0, 1, _KEEP_SIZE), _refuse(errno.EOPNOTSUPP)]
    )
    for command in (_RESERVE, _RESERVE_64, _TYPE_INTO_TERMINAL):
        code += _looking_at(
            _IOCTL[column], _SECOND, [(_EQUAL, 0, 1, command), _refuse(errno.EOPNOTSUPP)]
        )
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _refuse(error: int) -> "tuple[int, int, int, int]":
    return _RETURN, 0, 0, _ERRNO | error


def _looking_at(number: int, place: int, code: list) -> list:
    """For the system call `number`: loads the argument at `place`, runs `code`, then loads the
    number again.
    """
    return [(_EQUAL, 0, len(code) + 2, number), (_LOAD, 0, 0, place), *code, (_LOAD, 0, 0, _NUMBER)]


def _call(name: str, *arguments: object) -> int:
    """Calls a function of the C library. Raises OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    c_arguments = []
    for argument in arguments:
        is_number = isinstance(argument, int)
        c_arguments.append(ctypes.c_long(argument) if is_number else argument)
    result = function(*c_arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _filter_system_calls(families: "tuple[int, ...]" = _FAMILIES) -> None:
    """Installs the filter in this process. Raises OSError if the kernel has no seccomp."""
    code = system_call_filter(families)
    if code:
        program = ctypes.create_string_buffer(code)
        struct_ = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
        _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("prctl", _SECCOMP, _FILTER, struct_)


def _leave_host(home: str, size_bytes: int) -> None:
    """Moves to new namespaces: only a loopback device, no System V IPC, no other processes, only
    the devices of `_own_devices`. All files are read-only except `home` and /dev/shm, which are new
    and in memory. Returns in the first process of the namespaces. Raises OSError if the kernel
    forbids it.
    """
    user = os.getuid()
    group = os.getgid()
    _call("unshare", sum(_NEW_NAMESPACES.values()))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    child = os.fork()
    if child:
        _end_as(child)
    _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    read_only = struct.pack("QQQQ", _MS_RDONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, len(read_only))
    plain = _MS_NOSUID | _MS_NODEV
    _own_devices()
    _call("mount", b"proc", b"/proc", b"proc", plain | _MS_NOEXEC | _MS_RDONLY, None)
    for folder, mode in (("/dev/shm", "1777"), (home, "0700")):
        options = f"size={size_bytes},nr_inodes={_MOST_INODES},mode={mode}".encode()
        if os.path.isdir(folder):
            _call("mount", b"tmpfs", folder.encode(), b"tmpfs", plain, options)
    for secret in filter(os.path.exists, ("/proc/keys", "/proc/key-users")):
        _call("mount", b"/dev/null", secret.encode(), None, _MS_BIND, None)
    os.chdir(os.getcwd())  # it may now be hidden by a mount
    _drop_capabilities()


def _drop_capabilities() -> None:
    """Drops root's capabilities, or those that come with a namespace, also for programs that this
    process starts.
    """
    number = 0
    # the number is above the last capability, or the user has no capabilities
    with contextlib.suppress(OSError):
        while number < 64:
            _call("prctl", _CAPBSET_DROP, number, 0, 0, 0)
            number += 1
    _call("capset", struct.pack("II", 0x20080522, 0), bytes(24))


def _own_devices() -> None:
    """Mounts a new /dev.

    A read-only file system alone would still let its user write to disks, terminals and other
    devices.
    """
    descriptors = {}
    for name in _DEVICES:
        if os.path.exists(f"/dev/{name}"):
            descriptors[name] = os.open(f"/dev/{name}", os.O_PATH)
    _call("mount", b"tmpfs", b"/dev", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=64k,mode=0755")
    for name, opened in descriptors.items():
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        _call(
            "mount",
            f"/proc/self/fd/{opened}".encode(),
            f"/dev/{name}".encode(),
            None,
            _MS_BIND,
            None,
        )
        os.close(opened)
    for name in ("pts", "shm"):
        os.mkdir(f"/dev/{name}")
    _call(
        "mount",
        b"devpts",
        b"/dev/pts",
        b"devpts",
        _MS_NOSUID | _MS_NOEXEC,
        b"newinstance,ptmxmode=0666,mode=620",
    )
    os.symlink("pts/ptmx", "/dev/ptmx")
    os.symlink("/proc/self/fd", "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    _call(
        "mount",
        None,
        b"/dev",
        None,
        _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV,
        None,
    )


def _end_as(child: int) -> None:
    """Waits for the program, and reaps orphans meanwhile.

    Then kills processes that the program left behind, and exits with its status. On SIGTERM, kills
    all of them at once.
    """
    status = None
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        while status is None:
            pid, ended = os.wait()
            status = os.waitstatus_to_exitcode(ended) if pid == child else None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit:
        status = -signal.SIGTERM
    with contextlib.suppress(ChildProcessError):
        while True:
            for orphan in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
            os.wait()
    sys.stderr.flush()
    os._exit(status if status >= 0 else 128 - status)


def _children() -> "list[int]":
    """The ids of all children of this process.

    It must be fast, to catch a process that forks and exits again and again, so it reads the
    kernel's list of children if there is one.
    """
    with (
        contextlib.suppress(OSError),
        open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file,
    ):
        return list(map(int, file.read().split()))
    children = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(name))
    return children


def _limit(settings: dict) -> None:
    for name, value in settings["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))
    # a network namespace does not bound Unix sockets, which are files of the host
    if settings["kind"] == "namespace":
        _filter_system_calls(_INTERNET)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            data = await reader.read(1 << 16)
            if not data:
                break
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return  # the other direction ends too
    finally:
        writer.close()


async def _main(settings: dict, command: "list[str]") -> int:
    async def lead_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outer_reader, outer_writer = await asyncio.open_unix_connection(settings["socket"])
        await asyncio.gather(_pipe(reader, outer_writer), _pipe(outer_reader, writer))

    if settings["socket"]:  # in the sandbox's own network, nobody else listens
        await asyncio.start_server(lead_out, "127.0.0.1", settings["port"])
    try:
        program = await asyncio.create_subprocess_exec(
            *command, preexec_fn=lambda: _limit(settings)
        )
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return 127
    status = await program.wait()
    return status if status >= 0 else 128 - status  # a signal, in the form of shells


def _enter(settings: dict) -> None:
    """Enters the sandbox. Returns in the process that starts the program."""
    _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if settings["kind"] == "bwrap":  # bwrap has already done all this
        return
    if settings["kind"] == "namespace":
        _leave_host(settings["home"], settings["size_bytes"])
    _call("prctl", _CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # the kernel has no keyrings
        _call(
            "syscall", 219 if platform.machine() == "aarch64" else 250, _JOIN_SESSION_KEYRING, None
        )
    _filter_system_calls()
    child = os.fork()
    if child:
        _end_as(child)
    _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if settings["kind"] == "limits":
        _drop_capabilities()


if __name__ == "__main__":
    sandbox_settings = json.loads(sys.argv[1])
    _enter(sandbox_settings)
    sys.exit(asyncio.run(_main(sandbox_settings, sys.argv[2:])))
