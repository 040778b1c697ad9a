"""Sets up torch.distributed for one trainer rank, from torchrun's environment variables.

MegaRL adds one variable: MEGARL_TRAINER_STORE is a file through which ranks on a single host meet,
instead of MASTER_ADDR:MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import traceback
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megarl.messaging.members import members_only
from megarl.messaging.process_groups import listening_store

_EXPIRED = re.compile(r"Timed out waiting (\d+)ms for \w+ operation to complete")
_FROM_ONE = {
    "broadcast": "src",
    "recv": "src",
    "irecv": "src",
    "send": "dst",
    "isend": "dst",
    "scatter": "src",
}


def init_distributed(timeout_s: float) -> torch.device:
    """Joins the trainer's process group (NCCL with CUDA, gloo without) and returns this rank's
    device.

    `timeout_s` bounds the wait for the other ranks, and every later collective. Raises on expiry.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    with groups_closed():
        store = _store(rank, world_size, timeout_s)
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    return device


def groups_closed() -> contextlib.AbstractContextManager[None]:
    """The context for a block that makes process groups: `members_only`, unless a group may use
    NCCL. NCCL connects later, and keeps strangers out by a number that cannot be guessed.
    """
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return members_only()


def _store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Opens the store, closed to others as far as possible: see messaging.stores."""
    timeout = datetime.timedelta(seconds=timeout_s)
    path = os.environ.get("MEGARL_TRAINER_STORE")
    if path:
        store: dist.Store = dist.FileStore(path, world_size)
        store.set_timeout(timeout)
        return store
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        return listening_store(host, port, timeout_s)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)


def shutdown_distributed() -> None:
    """Makes all ranks leave together, since a rank that leaves early would look like a lost peer to
    the others.
    """
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def naming_peers(role: str, rank: int) -> Iterator[None]:
    """Replaces the error that gloo raises when a collective's deadline expires, even inside other
    errors, with a TimeoutError that says who waited for whom, and in which call.

    NCCL's watchdog ends the process itself. The launcher then reports what every other process was
    doing (launch.process_report).
    """
    try:
        yield
    except TimeoutError:  # already names the peers, as for weights that a transport could not send
        raise
    except Exception as error:
        expiry = _expired(error)
        if expiry is None:
            raise
        expired, waited_s = expiry
        raise TimeoutError(
            f"{role}.{rank} waited {waited_s:.0f} s for {_awaited(expired, role)}"
        ) from error


def _expired(error: BaseException) -> tuple[BaseException, float] | None:
    """If `error` is, or was caused by, an expired deadline of gloo: that error, and the deadline in
    seconds.
    """
    visited: list[BaseException] = []
    pending = [error]
    while pending:
        candidate = pending.pop()
        if candidate in visited:
            continue
        reported = (
            candidate.__cause__ is not None
            and _EXPIRED.search(str(candidate.__cause__)) is not None
        )
        match = _EXPIRED.search(str(candidate))
        if match and not reported:
            return candidate, int(match[1]) / 1000
        visited.append(candidate)
        pending += [
            linked for linked in (candidate.__context__, candidate.__cause__) if linked is not None
        ]
    return None


def _awaited(expired: BaseException, role: str) -> str:
    """Whom the rank waited for, and in which call.

    It is read from the torch.distributed call in the traceback.
    """
    frames = [frame for frame, _ in traceback.walk_tb(expired.__traceback__)]
    for frame in reversed(frames):
        if (
            frame.f_globals.get("__name__") == distributed_c10d.__name__
            and "group" in frame.f_locals
        ):
            return (
                f"{_names(frame, role)} in {frame.f_code.co_name} of {_description(frame)}, "
                f"{_called_from(frames)}"
            )
    return f"another rank of the trainer, {_called_from(frames)}"


def _names(frame: FrameType, role: str) -> str:
    ranks = dist.get_process_group_ranks(frame.f_locals["group"])
    own_rank = dist.get_rank()
    only_rank = frame.f_locals.get(_FROM_ONE.get(frame.f_code.co_name, ""))
    if isinstance(only_rank, int) and only_rank != own_rank:
        awaited = [only_rank]
    else:
        awaited = [rank for rank in ranks if rank != own_rank]
    return " or ".join(f"{role}.{rank}" for rank in awaited)


def _description(frame: FrameType) -> str:
    group = frame.f_locals["group"] or dist.group.WORLD
    assert group is not None  # a collective of it has just failed
    if group.group_desc not in ("", "default_pg", "undefined"):
        return group.group_desc
    return "all ranks"


def _called_from(frames: list[FrameType]) -> str:
    """The innermost function of MegaRL among `frames`."""
    megarl_frames = []
    for frame in frames:
        if frame.f_globals.get("__name__", "").startswith("megarl."):
            megarl_frames.append(frame)
    calls = []
    for frame in megarl_frames:
        if frame.f_globals["__name__"] != __name__:
            calls.append(frame.f_code.co_name)
    if calls:
        return f"called by {calls[-1]}"
    return "called outside of megarl"


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on `device`.

    The host does not wait: it copies them to pinned memory, from which the GPU copies them in
    stream order.
    """
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values
