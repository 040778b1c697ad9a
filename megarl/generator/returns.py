"""Waits for lost engines to return. When one runs again, the fleet is told, and it serves after the next update or one of its own.

An engine that never ended returns in the same way: a connection may break without that. So does one that joins, when it has started.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

from megarl.files import log_tail
from megarl.generator.completions import EngineError
from megarl.generator.fleet import Fleet

LOOK_UP_S = 0.5


async def watch_returns(fleet: Fleet, logs: Path, restarted: bool, startup_timeout_s: float) -> None:
    """Runs until its task is cancelled. Engine i logs to `logs`/<name of the fleet>.i.log; `restarted` says whether engines that die
    are restarted.

    Raises EngineError, with the ends of their logs, when no engine is left and none comes back in time.
    """
    while True:
        await fleet.pulse.until(lambda: bool(fleet.lost))
        left_since = time.monotonic()
        while fleet.lost:
            awaited = [index for index in fleet.lost if restarted or index in fleet.joining]
            if fleet.members:
                left_since = time.monotonic()
            elif not awaited or time.monotonic() - left_since > startup_timeout_s:
                raise EngineError(_none_left(fleet, logs, startup_timeout_s if awaited else 0.0))
            back = await asyncio.gather(*(_is_back(fleet, index) for index in awaited))  # the host of one may be gone, and not even refuse
            for index in itertools.compress(awaited, back):
                if index in fleet.lost:  # and has not left meanwhile
                    fleet.come_back(index)
            await asyncio.sleep(LOOK_UP_S)


async def _is_back(fleet: Fleet, index: int) -> bool:
    engine = fleet.engines[index]
    return await engine.fresh() or ((fleet.frozen or index in fleet.intact) and await engine.answers())


def _none_left(fleet: Fleet, logs: Path, waited_s: float) -> str:
    lines = [f"no {fleet.name} is left, and none came back within {waited_s:.0f} s"]
    for index, reason in fleet.lost.items():
        log = logs / f"{fleet.name}.{index}.log"
        lines += [f"{fleet.name} {index}: {reason}; the end of {log}:", log_tail(log)]
    return "\n".join(lines)
