"""What the rollouts of all hubs have in common."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megarl.config.errors import ConfigError
from megarl.config.schema import MAX_REWARD
from megarl.generator.completions import Sampling
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.hubs.player import Player
from megarl.types import Group, Prompt

LOOK_S = 120.0
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class HubRollout:
    """Rows, turns and reward are an environment's own, which a process of another interpreter plays."""

    player: Player

    async def __call__(self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int) -> Group:
        return await self.player.play(context, prompt, sampling, n)

    async def close(self) -> None:
        await self.player.close()


def check_on_crash(on_crash: float) -> None:
    """Raises ConfigError."""
    if not abs(on_crash) <= MAX_REWARD:
        raise ConfigError(f"rollout.args.on_crash={on_crash}: must be a finite number of absolute value at most {MAX_REWARD:g}")
