"""The order of prompts: shuffling, the mixture of several sources, and the curriculum."""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from megarl.base.rollout_types import Ordinal
from megarl.config.errors import ConfigError, problems_of
from megarl.config.schema import (
    MIXED,
    CurriculumConfig,
    DatasetConfig,
    MixedConfig,
    MixtureConfig,
    RunConfig,
)

_ROUNDS = 6


def permute(position: int, size: int, key: str) -> int:
    """The index at `position` of a pseudo-random permutation of range(size) that depends only on
    `key`, computed in constant time and memory instead of stored.

    A Feistel network on the smallest even number of bits that hold `size`, walked until it lands
    inside the range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002: cycle
    walking). Raises IndexError outside 0 <= position < size.
    """
    if not 0 <= position < size:
        raise IndexError(f"position {position} is outside 0..{size - 1}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    index = _feistel(position, half_bits, key)
    while index >= size:
        index = _feistel(index, half_bits, key)
    return index


def _feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left_half = value >> half_bits
    right_half = value & mask
    for round_ in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{round_}/{right_half}".encode(), digest_size=8).digest()
        left_half, right_half = right_half, left_half ^ (int.from_bytes(digest, "little") & mask)
    return left_half << half_bits | right_half


LONGEST_PERIOD = 100_000
SOURCE_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


class Mixture:
    """Maps ordinals, the prompts of a run, to sources and back.

    Of the first k ordinals, each source has its share of k, with an error below one.

    The order is periodic. The j-th ordinal of a source with share w may not come before j / w, and
    must come before (j + 1) / w rounded up. Of the sources that may come next, the one with the
    earliest deadline does. This schedule meets every deadline, and so the bound above (Baruah,
    Cohen, Plaxton and Varvel, "Proportionate progress", 1996). Where share times k is a whole
    number for every source, the counts are exactly these numbers, so quotas are exact.
    """

    def __init__(self, shares: Sequence[Fraction | int] = (1,), names: Sequence[str] = ("",)):
        """Raises ValueError if the period of the order is too long."""
        self.names = tuple(names)
        denominator = math.lcm(*(Fraction(share).denominator for share in shares))
        units = [int(share * denominator) for share in shares]
        common = math.gcd(*units)
        self._units = [unit // common for unit in units]
        self._period = sum(self._units)
        if self._period > LONGEST_PERIOD:
            raise ValueError(
                f"shares of {' : '.join(map(str, self._units))} repeat only after {self._period} "
                "prompts"
            )
        self._source: list[int] = []  # place in the period -> source
        self._places: list[list[int]] = [[] for _ in shares]  # [source][…] its places in the period
        for place in range(self._period):
            ready_sources = []
            for source, places in enumerate(self._places):
                if len(places) * self._period < (place + 1) * self._units[source]:
                    ready_sources.append(source)
            source = min(ready_sources, key=self._deadline)
            self._source.append(source)
            self._places[source].append(place)

    def _deadline(self, source: int) -> int:
        return -(-(len(self._places[source]) + 1) * self._period // self._units[source])

    def source(self, ordinal: Ordinal) -> int:
        return self._source[ordinal % self._period]

    def draw(self, ordinal: Ordinal) -> int:
        """How many ordinals of the same source are below it."""
        return self.below(self.source(ordinal), ordinal)

    def ordinal(self, source: int, draw: int) -> Ordinal:
        """The ordinal of the source's `draw`-th prompt, from 0 on."""
        periods, index = divmod(draw, self._units[source])
        return periods * self._period + self._places[source][index]

    def below(self, source: int, ordinal: Ordinal) -> int:
        """How many ordinals of the source are below `ordinal`."""
        periods, position = divmod(ordinal, self._period)
        return periods * self._units[source] + bisect_left(self._places[source], position)

    def counts(self, first: Ordinal, end: Ordinal) -> list[int]:
        """[source] how many of the ordinals from `first` up to but excluding `end` it has."""
        counts = []
        for source in range(len(self.names)):
            counts.append(self.below(source, end) - self.below(source, first))
        return counts


def mixed(config: MixtureConfig) -> dict[str, MixedConfig]:
    return {name: source for name, source in config.sources.items() if source is not None}


_TRAIN = "data.train"


def source_sets[D: DatasetConfig](config: D, key: str) -> list[tuple[str, D | MixedConfig]]:
    """(config key, dataset) of each source that a section mixes, or of its only one."""
    if not isinstance(config, MixtureConfig) or not mixed(config):
        return [(key, config)]
    return [(f"{key}.sources.{name}", source) for name, source in mixed(config).items()]


def train_mixture(config: RunConfig) -> Mixture:
    return mixture_of(config.data.train, config.rollout.prompts_per_step)


def mixture_problems(config: MixtureConfig, per_step: int) -> Iterable[str]:
    if (config.source == MIXED) == (not mixed(config)):
        if mixed(config):
            yield (
                f"{_TRAIN}.source={config.source}: must be {MIXED}, or left out, beside "
                f"{_TRAIN}.sources"
            )
        else:
            yield (
                f"{_TRAIN}.source: must be set: synthetic:<task>, a file such as rows.jsonl, or "
                "a hub name"
            )
        return
    for name in mixed(config):
        if not SOURCE_NAME.fullmatch(name):
            yield f"{_TRAIN}.sources.{name}: its name must be letters, digits, - and _"
    yield from problems_of(lambda: mixture_of(config, per_step))


def mixture_of(config: MixtureConfig, per_step: int) -> Mixture:
    """The mixture that data.train describes, possibly of a single source.

    `per_step`: rollout.prompts_per_step.

    Raises ConfigError with all problems: no source, a source in two places, quotas that do not add
    up to a step, too fine weights.
    """
    sources = mixed(config)
    if not sources:
        return Mixture()
    for name, source in sources.items():
        if source.weight is not None and source.quota is not None:
            raise ConfigError(
                f"{_TRAIN}.sources.{name}.weight={source.weight:g}: must be null with a quota "
                f"(quota={source.quota})"
            )
    quotas = {name: source.quota for name, source in sources.items() if source.quota is not None}
    weights = {}
    for name, source in sources.items():
        if name not in quotas:
            weights[name] = Fraction(str(source.weight or 1))
    remaining = per_step - sum(quotas.values())
    if remaining < 0 or (remaining == 0) != (not weights):
        all_of = f"rollout.prompts_per_step={per_step}"
        demand = f"leave some of {all_of} for the other sources" if weights else f"be {all_of}"
        terms = [f"{_TRAIN}.sources.{name}.quota={quota}" for name, quota in quotas.items()]
        quota_terms = " + ".join(terms)
        raise ConfigError(f"{quota_terms}: {'together they ' * (len(quotas) > 1)}must {demand}")
    shares = {name: weight * remaining / sum(weights.values()) for name, weight in weights.items()}
    shares |= quotas
    try:
        return Mixture([shares[name] for name in sources], [*sources])
    except ValueError as error:
        raise ConfigError(
            f"{_TRAIN}.sources.NAME.weight: {error}; at most {LONGEST_PERIOD}: choose rounder "
            "weights"
        ) from error


class Place(NamedTuple):
    """The row that an ordinal stands for: indices of the source, of the epoch of that source, and
    of the row.
    """

    source: int
    epoch: int
    row: int


class Verdict(Enum):
    BEGINS = "begins"
    RESTS = "rests"
    WAITS = "waits"


class Curriculum:
    """Decides at the generator, without ever waiting, which rows rest.

    A row rests in epoch e of its source if, in one of the `rest_epochs` epochs before e, its draw
    had a pass rate outside the band.

    A decision may use only the scores of the row's earlier draws. If one of them is still in
    flight, the ordinal waits for it (`Verdict.WAITS`); that draw finishes by itself, since it needs
    nothing from the trainer. So which rows rest does not depend on the capacity of the channel, the
    order in which rollouts finish, or the trainer's step. A decision by "what has been trained on
    by now" would depend on them. It could also deadlock, since a batch may need the very ordinal
    that waits for training.

    A resumed run decides in the same way. The link keeps the order of messages, so the scores
    behind a decision reach a checkpoint before the decision does. If a group is generated again
    because it was too old, its first score counts, since a decision may have used it.
    """

    def __init__(self, locate: Callable[[Ordinal], Place], rest_epochs: int):
        self._locate = locate
        self._rest_epochs = rest_epochs
        self._running: dict[tuple[int, int], Ordinal] = {}  # row -> its draw that is not yet scored
        # row -> the last epoch in which it was outside the band
        self._outside: dict[tuple[int, int], int] = {}
        self._scored: Collection[Ordinal] = ()

    def resume(self, outside: Iterable[Ordinal], scored: Collection[Ordinal]) -> None:
        """`outside`: all draws of the run that were outside the band.

        `scored`: draws that are generated again but keep their first scores.
        """
        self._scored = scored
        for ordinal in outside:
            source, epoch, row = self._locate(ordinal)
            self._outside[source, row] = max(epoch, self._outside.get((source, row), -1))

    def begin(self, ordinal: Ordinal) -> Verdict:
        source, epoch, row = self._locate(ordinal)
        if (source, row) in self._running:
            return Verdict.WAITS
        last = self._outside.get((source, row))
        if last is not None and last < epoch <= last + self._rest_epochs:
            return Verdict.RESTS
        if ordinal not in self._scored:
            self._running[source, row] = ordinal
        return Verdict.BEGINS

    def finish(self, ordinal: Ordinal, outside: bool) -> None:
        source, epoch, row = self._locate(ordinal)
        if self._running.get((source, row)) == ordinal:
            del self._running[source, row]
            if outside:
                self._outside[source, row] = epoch


def outside_band(rewards: Sequence[float], config: CurriculumConfig) -> bool:
    passed = sum(reward >= config.pass_reward for reward in rewards) / len(rewards)
    return not config.min_pass_rate <= passed <= config.max_pass_rate
