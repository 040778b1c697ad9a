"""An environment of OpenEnv with its own type of actions.

A row's `reset` chooses what it does: `kind`, `seed`, or a task of a split.
"""

import os
import random
import time

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    """A move on the board."""

    text: str
    times: int = 1


class Board(Observation):
    board: str = ""


class Boards(Environment):
    """Says a move backward. Each move is worth 0.25, and the third one ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.kind = "fine"
        self.moves = 0

    def reset(self, seed=None, episode_id=None, kind="fine", split=None, index=0):
        self.kind = kind
        self.moves = 0
        start = {"deaf": str(random.random()), "fine": f"seed {seed}"}.get(kind, "go")
        if kind == "large":
            start = "x" * 2_000_000
        return Board(board=f"{split} {index}" if split else start, done=kind == "over")

    def step(self, action, timeout_s=None):
        self.moves += 1
        if self.kind == "raises":
            raise RuntimeError("the board is broken")
        if self.kind == "dies":
            os._exit(3)
        if self.kind == "late":
            time.sleep(1000)
        reward = (
            None
            if self.kind == "poor"
            else float("nan")
            if self.kind == "nan" and self.moves == 2
            else 0.25 * self.moves
        )
        return Board(board=action.text[::-1] * action.times, reward=reward, done=self.moves == 3)

    # one that takes long holds up the whole server
    async def step_async(self, action, timeout_s=None):
        return self.step(action, timeout_s)

    @property
    def state(self):
        return State(step_count=self.moves)

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return {"train": 4, "test": 2}[split]


class Thread(Boards):
    """The same with steps in threads, as the package does it by itself."""

    step_async = Environment.step_async


app = create_app(Boards, Move, Board, env_name="boards", max_concurrent_envs=64)
narrow = create_app(Boards, Move, Board, env_name="boards", max_concurrent_envs=1)
threads = create_app(Thread, Move, Board, env_name="boards", max_concurrent_envs=64)
