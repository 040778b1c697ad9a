"""Who stands where: ranks of trainer and generator as coordinates on their parallel axes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

DP_ATTENTION_FAMILIES = ("deepseek_v3", "qwen3_moe")  # whose SGLang models can run attention data-parallel


@dataclass(frozen=True)
class TrainerCoordinate:
    """Place of one trainer rank on the mesh axes."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class TrainerTopology:
    """Sizes of the trainer's mesh axes. Ranks run in Megatron's default order: tp fastest, then cp, dp, pp.

    Experts live on a mesh of their own over the same ranks (megatron/core/parallel_state.py): etp fastest, then ep, then the
    replicas of an expert, then pp. Within a stage etp * ep * expert_dp = tp * cp * dp.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    zero: int = 1
    first_stage_layers: int | None = None  # None: stages that are not told share the rest evenly
    last_stage_layers: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of an expert. Not a whole number of them means that ep * etp does not divide the ranks of a stage."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def coordinate(self, rank: int) -> TrainerCoordinate:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return TrainerCoordinate(tp=tp, cp=cp, dp=dp, pp=pp)

    @property
    def replicas(self) -> list[list[int]]:
        """[dp][…] the ranks at each place of the data-parallel axis: those that train on the same sequences."""
        ranks: list[list[int]] = [[] for _ in range(self.dp)]
        for rank in range(self.world_size):
            ranks[self.coordinate(rank).dp].append(rank)
        return ranks

    def rank(self, coordinate: TrainerCoordinate) -> int:
        c = coordinate
        return c.tp + self.tp * (c.cp + self.cp * (c.dp + self.dp * c.pp))


@dataclass(frozen=True)
class GeneratorTopology:
    """`engines` SGLang servers of `tp` ranks each. Generator rank g is TP rank g % tp of engine g // tp.

    Of an engine's ranks, each run of tp / ep holds the same experts, cut over that run. With data-parallel attention (SGLang's
    attn_dp_size = dp_attention) each run of tp / dp_attention holds attention and embedding, cut over that run.
    """

    engines: int = 1
    tp: int = 1
    ep: int = 1
    dp_attention: int = 1

    @property
    def world_size(self) -> int:
        return self.engines * self.tp

    @property
    def attention_tp(self) -> int:
        """Ranks over which attention is cut."""
        return self.tp // self.dp_attention
