"""One engine of a fleet: its record, and the states that it goes through.

    add ──▶ STARTING ──runs──▶ JOINING ──has the weights──▶ SERVING ◀── engines of the run's start
               ▲                  │                         │    ▲
               └───── breaks ─────┘                  breaks │    │ has the weights
                                                            ▼    │
                                                          LOST ──runs──▶ RETURNED (breaks: LOST)

    each of these ──leaves──▶ LEAVING ──has given back its requests──▶ LEFT

An engine of a frozen model needs no weights: when it runs again it serves. A pause for an update
is no state of an engine, since it concerns all that serve (`Fleet.hold`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from megarl.generator.client import EngineClient


class EngineState(Enum):
    STARTING = auto()  # was added to the run, and does not run yet
    JOINING = auto()  # was added, runs, and has no weights of the run yet
    SERVING = auto()  # has the current weights, and takes requests
    LOST = auto()  # has served, and cannot be reached
    RETURNED = auto()  # was lost, runs again, and does not have the current weights yet
    LEAVING = auto()  # takes no more requests, and gives back those that it has
    LEFT = auto()  # for good


# engines that have served and have not left, including lost ones
COUNTED = (EngineState.SERVING, EngineState.LOST, EngineState.RETURNED)
# engines that run, but have not the current weights
WITHOUT_WEIGHTS = (EngineState.JOINING, EngineState.RETURNED)
# engines that take part in an update
MEMBERS = (EngineState.SERVING, *WITHOUT_WEIGHTS)
# engines that do not run
DOWN = (EngineState.STARTING, EngineState.LOST)
PRESENT = (*MEMBERS, *DOWN)


class Event(Enum):
    BREAKS = auto()
    RUNS = auto()
    HAS_WEIGHTS = auto()
    LEAVES = auto()
    HAS_LEFT = auto()


TRANSITIONS: dict[Event, dict[EngineState, EngineState]] = {
    Event.BREAKS: {
        EngineState.STARTING: EngineState.STARTING,
        EngineState.JOINING: EngineState.STARTING,
        EngineState.SERVING: EngineState.LOST,
        EngineState.LOST: EngineState.LOST,
        EngineState.RETURNED: EngineState.LOST,
    },
    Event.RUNS: {
        EngineState.STARTING: EngineState.JOINING,
        EngineState.LOST: EngineState.RETURNED,
    },
    Event.HAS_WEIGHTS: {
        EngineState.SERVING: EngineState.SERVING,
        EngineState.JOINING: EngineState.SERVING,
        EngineState.RETURNED: EngineState.SERVING,
    },
    Event.LEAVES: dict.fromkeys(PRESENT, EngineState.LEAVING),
    Event.HAS_LEFT: {EngineState.LEAVING: EngineState.LEFT},
}


@dataclass(eq=False)
class Engine:
    """An engine as its fleet knows it. Only the fleet changes the state (`Fleet._move`)."""

    number: int  # index in Fleet.engines; no number is used twice
    client: EngineClient
    group: int  # index in Fleet.groups
    state: EngineState = EngineState.SERVING
    reason: str = ""  # why it does not run, or has left
    # lost, but no update was writing its weights at the time
    is_intact: bool = False
    load: int = 0  # samples in flight
    finished: int = 0  # samples
    tokens: int = 0  # sampled

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def is_serving(self) -> bool:
        return self.state is EngineState.SERVING

    @property
    def is_down(self) -> bool:
        return self.state in DOWN
