"""Who stands where: ranks of trainer and generator as coordinates on their parallel axes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerCoordinate:
    """Place of one trainer rank on the mesh axes."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class TrainerTopology:
    """Sizes of the trainer's mesh axes. Ranks run in Megatron's default order: tp fastest, then cp, dp, pp."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    zero: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinate(self, rank: int) -> TrainerCoordinate:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return TrainerCoordinate(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, coordinate: TrainerCoordinate) -> int:
        c = coordinate
        return c.tp + self.tp * (c.cp + self.cp * (c.dp + self.dp * c.pp))


@dataclass(frozen=True)
class GeneratorTopology:
    """`engines` SGLang servers of `tp` ranks each. Generator rank g is TP rank g % tp of engine g // tp."""

    engines: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.engines * self.tp
