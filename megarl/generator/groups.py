"""Groups of engines: a fleet is a list of them, and a plain run is the case of one."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.base.geometry import GeneratorTopology
from megarl.config.schema import GeneratorConfig
from megarl.messaging.rendezvous import POLICY


@dataclass(frozen=True)
class Purpose:
    """What engines are for."""

    prefix: str  # of their processes' names
    text: str  # their name in messages
    section: str = "generator"  # config section with their sizes
    driver: str = ""  # worker role that brings them the run's weights; empty: they are frozen
    spare: bool = False  # whether training goes on without them


ROLLOUTS = Purpose(prefix=POLICY, text="engines", driver="generator")
EVALUATION = Purpose(
    prefix="eval_engine", text="evaluation engines", driver="evaluator", spare=True
)
PURPOSES = (ROLLOUTS, EVALUATION)  # of engines with the run's weights


@dataclass(frozen=True)
class EngineGroup:
    """Engines of one shape and purpose.

    A run without generator.groups has one group for rollouts, whose name is empty.
    """

    name: str
    settings: GeneratorConfig  # the generator's, with the group's own
    first: int = 0  # number of its first engine: engines of a purpose are numbered group by group
    purpose: Purpose = ROLLOUTS

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.settings.engines)

    @property
    def topology(self) -> GeneratorTopology:
        return generator_topology(self.settings)

    @property
    def key(self) -> str:
        """The config section with the number and sizes of its engines, for messages."""
        return f"generator.groups.{self.name}" if self.name else self.purpose.section

    def dtype(self, model_dtype: str) -> str:
        """The dtype of activations and of unquantised weights.

        With fp8 weights SGLang computes only in 16 bits.
        """
        return model_dtype if self.settings.quantization is None else "bfloat16"


def generator_topology(generator: GeneratorConfig) -> GeneratorTopology:
    """The topology of a generator without groups, or of one group."""
    return GeneratorTopology(generator.engines, generator.tp, generator.ep, generator.dp_attention)
