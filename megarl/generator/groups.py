"""Groups of engines: a fleet is a list of them, and a plain run is the case of one."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.base.geometry import GeneratorTopology
from megarl.config.schema import GeneratorConfig
from megarl.messaging.rendezvous import ROLLOUTS, Purpose


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
    def places(self) -> int:
        """The requests that its engines run together."""
        return self.settings.engines * self.settings.max_concurrency

    @property
    def topology(self) -> GeneratorTopology:
        return self.settings.topology

    @property
    def key(self) -> str:
        """The config section with the number and sizes of its engines, for messages."""
        return f"generator.groups.{self.name}" if self.name else self.purpose.section

    def dtype(self, model_dtype: str) -> str:
        """The dtype of activations and of unquantised weights.

        With fp8 weights SGLang computes only in 16 bits.
        """
        return model_dtype if self.settings.quantization is None else "bfloat16"
