"""An environment of OpenEnv, written without MegaRL: four guesses at a number from 1 to 9.

`uvicorn guess:app` serves it; so does `rollout.name=openenv` with `server: guess:app`.
"""

import random

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

GUESSES = 4


class Guess(Action):
    number: str


class Hint(Observation):
    hint: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number, self.guesses = 0, 0

    def reset(self, seed=None, episode_id=None):
        self.number, self.guesses = random.Random(seed).randint(1, 9), 0
        return Hint(hint="1-9")

    def step(self, action, timeout_s=None):
        self.guesses += 1
        said = action.number.strip()
        guess = int(said) if said.isascii() and said.isdigit() and len(said) < 4 else None
        if guess is None:
            hint = "a number"
        else:
            hint = "right" if guess == self.number else "higher" if guess < self.number else "lower"
        return Hint(
            hint=hint,
            reward=float(hint == "right"),
            done=hint == "right" or self.guesses == GUESSES,
        )

    @property
    def state(self):
        return State(step_count=self.guesses)


app = create_app(Numbers, Guess, Hint, env_name="guess", max_concurrent_envs=256)
