"""Explains collectives that a peer never joined. gloo says how long it waited; this says who waited for whom, and in which call.

(NCCL's watchdog ends the process itself. The launcher then reports what every other process was doing: launch.process_report.)
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from types import FrameType

import torch.distributed as dist
from torch.distributed import distributed_c10d

_EXPIRED = re.compile(r"Timed out waiting (\d+)ms for \w+ operation to complete")
_FROM_ONE = {"broadcast": "src", "recv": "src", "irecv": "src", "send": "dst", "isend": "dst", "scatter": "src"}


@contextlib.contextmanager
def naming_peers(role: str, rank: int) -> Iterator[None]:
    """Replaces the error that gloo raises when a collective's deadline expires, even inside other errors, with a TimeoutError."""
    try:
        yield
    except TimeoutError:  # it names them already: weights that a transport could not send, for one
        raise
    except Exception as error:
        if (found := _expired(error)) is None:
            raise
        late, waited_s = found
        raise TimeoutError(f"{role}.{rank} waited {waited_s:.0f} s for {_awaited(late, role)}") from error


def _expired(error: BaseException) -> tuple[BaseException, float] | None:
    """The error of gloo's deadline that `error` is, or was caused by, and the deadline in seconds."""
    seen: list[BaseException] = []
    within = [error]
    while within:
        each = within.pop()
        if each in seen:
            continue
        told = each.__cause__ is not None and _EXPIRED.search(str(each.__cause__)) is not None
        if (match := _EXPIRED.search(str(each))) and not told:
            return each, int(match[1]) / 1000
        seen.append(each)
        within += [other for other in (each.__context__, each.__cause__) if other is not None]
    return None


def _awaited(late: BaseException, role: str) -> str:
    """Whom the rank waited for, and in which call, from the torch.distributed call in the traceback that the deadline ended."""
    frames = [frame for frame, _ in traceback.walk_tb(late.__traceback__)]
    for frame in reversed(frames):
        if frame.f_globals.get("__name__") == distributed_c10d.__name__ and "group" in frame.f_locals:
            return f"{_names(frame, role)} in {frame.f_code.co_name} of {_description(frame)}, {_called_from(frames)}"
    return f"another rank of the trainer, {_called_from(frames)}"


def _names(frame: FrameType, role: str) -> str:
    ranks, own = dist.get_process_group_ranks(frame.f_locals["group"]), dist.get_rank()
    one = frame.f_locals.get(_FROM_ONE.get(frame.f_code.co_name, ""))
    awaited = [one] if isinstance(one, int) and one != own else [rank for rank in ranks if rank != own]
    return " or ".join(f"{role}.{rank}" for rank in awaited)


def _description(frame: FrameType) -> str:
    group = frame.f_locals["group"] or dist.group.WORLD
    assert group is not None  # a collective of it has just failed
    return group.group_desc if group.group_desc not in ("", "default_pg", "undefined") else "all ranks"


def _called_from(frames: list[FrameType]) -> str:
    """The innermost of MegaRL's own functions on the way."""
    ours = [frame for frame in frames if frame.f_globals.get("__name__", "").startswith("megarl.")]
    calls = [frame.f_code.co_name for frame in ours if frame.f_globals["__name__"] != __name__]
    return f"called by {calls[-1]}" if calls else "called outside of megarl"
