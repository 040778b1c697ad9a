"""What every process of a run was doing when one of them had waited in vain for another: its status line, its state, its stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import psutil

from megarl.observe.status import read_statuses

# The stack that faulthandler writes on SIGUSR1, of the thread that has got the signal: the main one.
_STACK = re.compile(r"^Current thread .*\(most recent call first\):\n((?:  File .*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (\S+)')
_WAITS = ("torch/distributed/", "megarl/messaging/", "selectors.py")  # where a process stands that waits for another
_OUTERMOST = ("<module>", "_run_module_as_main")  # of a main thread that runs a program
_STOPPED = "is stopped (SIGSTOP, or a debugger)"


def whereabouts(running: Mapping[str, int], stacks: Mapping[str, str], run_dir: Path) -> str:
    """`running`: the process of each name that runs on this host; `stacks`: what those have written that were asked for their stacks.

    Marked, and first, are those that neither wait for others nor serve: the others may wait for them. A process that is ending, as one
    does that has lost its peer, or that gives no stack, since it may be about to end, is marked only where nobody else is.
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
    """Of the main thread's stack, the innermost first."""
    stack = _STACK.search(written)
    return [frame for line in stack[1].splitlines() if (frame := _FRAME.match(line))] if stack else []


def _is_ending(written: str) -> bool:
    """Whether the main thread, whose stack is there, was in the handlers of the interpreter's exit, which no module's code has called, or
    told of an error."""
    stack = _STACK.search(written)
    assert stack is not None
    frames = _frames(written)
    whole = not written[stack.end() :].startswith("  ...")  # faulthandler stops at 100 frames
    return (whole and frames[-1][3] not in _OUTERMOST) or any(Path(frame[1]).name == "traceback.py" for frame in frames)


def _state(pid: int) -> str:
    """Of a process that does not get on, or has a child that does not; empty else."""
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            if each.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return _STOPPED if each == process else f"has process {each.pid} ({each.name()}), which {_STOPPED}"
    except psutil.NoSuchProcess:
        pass  # it has ended since
    return ""


def _where(frames: list[re.Match[str]]) -> str:
    """The innermost call, and the last of our own that led there."""
    if not frames:
        return ""
    own = next((frame for frame in frames if "megarl/" in frame[1]), frames[0])
    inner = "" if own is frames[0] else f" at {_named(frames[0])}, called"
    return f"was{inner} in {_named(own)}"


def _named(frame: re.Match[str]) -> str:
    return f"{frame[3]} ({'/'.join(Path(frame[1]).parts[-2:])}:{frame[2]})"
