"""Reports what every process of a run was doing when one had waited in vain for another: its status line, state and stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import psutil

from megarl.observe.status import read_statuses

# The stack that faulthandler writes on SIGUSR1 for the thread that got the signal, which is the main one.
_STACK = re.compile(r"^Current thread .*\(most recent call first\):\n((?:  File .*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (\S+)')
_WAITS = ("torch/distributed/", "megarl/messaging/", "selectors.py")  # where a process is that waits for another
_OUTERMOST = ("<module>", "_run_module_as_main")  # the first frames of a program's main thread
_STOPPED = "is stopped (SIGSTOP, or a debugger)"


def process_report(running: Mapping[str, int], stacks: Mapping[str, str], run_dir: Path) -> str:
    """One line per process. `running` has the processes on this host by name, `stacks` what each wrote when asked for its stack.

    Processes that neither wait for others nor serve come first and are marked, since the others may wait for them. A process that is
    ending, as after losing its peer, or that wrote no stack, and so may be about to end, is marked only if no other is.
    """
    lines = {status.name: str(status) for status in read_statuses(run_dir)}
    busy, ending, waiting = [], [], []
    for name, pid in running.items():
        state, frames = _state(pid), _frames(stacks.get(name, ""))
        ends = name in stacks and not state and (not frames or _is_ending(stacks[name]))
        doing = state or ("was ending" if frames and ends else _where(frames)) or ("gave no stack" if name in stacks else "")
        line = f"  {lines.pop(name, name)}{doing and f'; it {doing}'}"
        if ends:
            ending.append(line)
        else:
            (busy if state or (frames and not any(part in frames[0][1] for part in _WAITS)) else waiting).append(line)
    marked = busy or ending
    others = [*(ending if busy else []), *waiting, *(f"  {line}" for line in lines.values())]
    return "\n".join(["what the others were doing:", *(f"{line}   <- not waiting" for line in marked), *others])


def _frames(written: str) -> list[re.Match[str]]:
    """The frames of the main thread's stack, innermost first."""
    stack = _STACK.search(written)
    return [frame for line in stack[1].splitlines() if (frame := _FRAME.match(line))] if stack else []


def _is_ending(written: str) -> bool:
    """Whether the main thread was running the interpreter's exit handlers, which no module's code calls, or printing an error."""
    stack = _STACK.search(written)
    assert stack is not None
    frames = _frames(written)
    whole = not written[stack.end() :].startswith("  ...")  # faulthandler stops at 100 frames
    return (whole and frames[-1][3] not in _OUTERMOST) or any(Path(frame[1]).name == "traceback.py" for frame in frames)


def _state(pid: int) -> str:
    """Says if a process, or a descendant of it, is stopped; otherwise empty."""
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            if each.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return _STOPPED if each == process else f"has process {each.pid} ({each.name()}), which {_STOPPED}"
    except psutil.NoSuchProcess:
        pass  # it has ended meanwhile
    return ""


def _where(frames: list[re.Match[str]]) -> str:
    """The innermost call, and the innermost one of MegaRL's own that led there."""
    if not frames:
        return ""
    own = next((frame for frame in frames if "megarl/" in frame[1]), frames[0])
    inner = "" if own is frames[0] else f" at {_named(frames[0])}, called"
    return f"was{inner} in {_named(own)}"


def _named(frame: re.Match[str]) -> str:
    return f"{frame[3]} ({'/'.join(Path(frame[1]).parts[-2:])}:{frame[2]})"
