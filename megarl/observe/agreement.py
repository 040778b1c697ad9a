"""Agreement meters: how far the trainer's policy pi is from the sampling policy mu, and whether
that drifts.

With d = log pi - log mu of a token, the meters are: the mean, 99th percentile and maximum of |d|;
the estimates k1 and k3 of KL(mu || pi); the effective sample size (sum w)^2 / (N sum w^2) of the
ratios w = pi/mu; and a histogram of d. Each covers all tokens, or the tokens of one age. The age is
the number of weight versions between sampling a token and training on it. At age 0 the weights are
the same, so the difference comes from the computation alone.

All meters are computed from sums over tokens (`Totals`), so they do not depend on how tokens are
spread over ranks and microbatches. The percentile is read from narrow bins, with an error within
1.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.recipes import ignores_age
from megarl.observe.metrics import Histogram, Row
from megarl.rewards.score import FAILED_EPISODES, FAILED_FRACTION, describe_failed_episodes

if TYPE_CHECKING:
    from megarl.config.schema import AlgorithmConfig
    from megarl.plan.resolve import RunPlan

DIFFERENCE = "logprob/abs_diff_mean"
LARGEST = "logprob/abs_diff_max"
LIMIT = "logprob/limit"
LIMITS_BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.05, "fp8": 0.15}
SEPARATE_ROUTING = 2  # factor on the limit if trainer and generator choose experts independently
FAR = 10  # the run ends at this multiple of the limit


def probe_limit(plan: RunPlan, group: str | None = None) -> float:
    """How much a probe's log-probs may differ between trainer and generator under the same weights:
    observe.probe_limit, or the default for the precision of the trainer and of the engines (of
    `group`, or else the least precise).

    The limit is on the mean over a probe's tokens. Rounding keeps it far below the limit
    (docs/benchmarks.md). A stale or corrupt tensor, or engines that compute something else, raise
    it far above. Single tokens are not limited: even in a healthy run, a token whose router is
    nearly tied may go to another expert and differ by 0.1 to 0.3. The largest difference is
    reported too.
    """
    config = plan.config
    if config.observe.probe_limit is not None:
        return config.observe.probe_limit
    engines = [shape for name, shape in config.generator.shapes.items() if group in (None, name)]
    limit = max(
        LIMITS_BY_DTYPE["fp8" if shape.quantization else config.model.dtype] for shape in engines
    )
    if plan.spec.experts and not config.trainer.routing_replay:
        limit *= SEPARATE_ROUTING
    return limit


def too_far(difference: float, limit: float) -> str | None:
    """If this mean difference is too large, the reason why the run must stop; otherwise None."""
    if math.isfinite(difference) and difference <= FAR * limit:
        return None
    finding = "are not all finite"
    if math.isfinite(difference):
        finding = f"differ by {difference:.3g} on average"
    return (
        f"the log-probs of trainer and generator under the same weights {finding}, more than {FAR} "
        f"times observe.probe_limit={limit:g}: "
        "they do not compute the same model. If weights.audit is on, the engines have the weights "
        "that were sent, so look at the rest: "
        "generator.server_args, config.json and spec of model.path (rotary embedding, scaling, "
        "dtype), and with a mixture of experts "
        "trainer.routing_replay. If such a difference is to be expected, set observe.probe_limit"
    )


def describe_differences(rows: Sequence[Mapping[str, float]]) -> str:
    """The probes over the limit, in words; empty if there are none."""
    over = []
    for row in rows:
        if DIFFERENCE in row and LIMIT in row and row[DIFFERENCE] > row[LIMIT]:
            over.append(row)
    if not over:
        return ""
    most = max(row[DIFFERENCE] for row in over)
    limit = over[-1][LIMIT]
    probes = "a probe" if len(over) == 1 else f"{len(over)} probes"
    return (
        f"log-probs of trainer and generator differ by {most:.2g} in {probes}, over "
        f"observe.probe_limit={limit:g}"
    )


YOUNGEST = (0, 1, 2, 3, 5, 9, 17)  # least age of each class of tokens
AGES = ("age_0", "age_1", "age_2", "age_3_4", "age_5_8", "age_9_16", "age_17_up")
TOKENS, ABSOLUTE, LOG_RATIO, RATIO, SQUARE, K3 = range(6)  # columns of Totals.sums
PER_DECADE = 80
EDGES = 10.0 ** (np.arange(9 * PER_DECADE + 1) / PER_DECADE - 7)  # of |d|: from 1e-7 to 100
BINS = len(EDGES) + 1  # a bin below the first edge and one above the last
COARSE = PER_DECADE // 2  # a written histogram merges this many bins into one
# edges in d between the 40 counts of a written histogram
HISTOGRAM_EDGES = np.concatenate([-EDGES[::-COARSE], [0.0], EDGES[::COARSE]])

EQUAL_TOKENS = f"agreement/{AGES[0]}/tokens"
EQUAL_WEIGHTS = f"agreement/{AGES[0]}/abs_diff_mean"
RECENT = 10  # a warning uses the median of this many last steps
WARM_UP = 10  # steps left out of the earlier median
FEWEST_TOKENS = 32  # steps with fewer tokens are ignored
DRIFT = 5  # a warning needs this many times the earlier median,
DRIFT_FLOOR = 0.1  # and this share of the limit: less is rounding
ESS_LIMIT = "agreement/ess_limit"
# The least effective sample size. Measured (docs/offpolicy.md): runs whose reward fell had less.
LEAST_ESS = 0.7
LEAST_ESS_UNCORRECTED = 0.9  # with a loss that ignores the ratios
# bound of a log-ratio whose exponential is squared, so that float64 holds the square
MOST_LOG_RATIO = 300.0


@dataclass(frozen=True)
class Totals:
    """Sums over the tokens of one optimizer step."""

    sums: np.ndarray  # [ages, 6] float64
    bins: np.ndarray  # [ages, 2, BINS] histogram of |d|, for d >= 0 and for d < 0
    largest: np.ndarray  # [ages] largest |d|
    sequences: np.ndarray  # [3] number of sequences, sum and sum of squares of their ratios

    def metrics(self) -> dict[str, float]:
        """The meters of all tokens, and of each class of ages that has tokens; empty without
        tokens.
        """
        metrics = _meters(
            "agreement",
            self.sums.sum(axis=0),
            self.bins.sum(axis=(0, 1)),
            float(self.largest.max()),
        )
        if metrics:
            metrics["agreement/ess_sequences"] = effective_size(*self.sequences.tolist())
        for index, name in enumerate(AGES):
            metrics |= _meters(
                f"agreement/{name}",
                self.sums[index],
                self.bins[index].sum(axis=0),
                float(self.largest[index]),
            )
        return metrics

    def histograms(self) -> dict[str, Histogram]:
        """The histograms of log-ratios, under the same names."""
        bins_by_name = {"agreement": self.bins.sum(axis=0)}
        for name, bins in zip(AGES, self.bins, strict=True):
            bins_by_name[f"agreement/{name}"] = bins
        histograms = {}
        for name, bins in bins_by_name.items():
            if bins.any():
                histogram = Histogram(HISTOGRAM_EDGES.tolist(), _histogram(bins))
                histograms[f"{name}/histogram"] = histogram
        return histograms


def _meters(name: str, sums: np.ndarray, bins: np.ndarray, largest: float) -> dict[str, float]:
    tokens, absolute, log_ratio, ratio, square, k3 = sums.tolist()
    if not tokens:
        return {}
    values = {
        "tokens": tokens,
        "abs_diff_mean": absolute / tokens,
        "abs_diff_p99": _percentile(bins, 0.99, largest),
        "abs_diff_max": largest,
        "kl_k1": -log_ratio / tokens,
        "kl_k3": k3 / tokens,
        "ess": effective_size(tokens, ratio, square),
    }
    return {f"{name}/{key}": value for key, value in values.items()}


def effective_size(count: float, total: float, squares: float) -> float:
    """From the number of ratios, their sum and the sum of their squares; NaN without any."""
    if squares:
        return total * total / (count * squares)
    return math.nan


def _percentile(bins: np.ndarray, share: float, largest: float) -> float:
    """The least value that at least `share` of the values do not exceed, rounded to the logarithmic
    middle of its bin.
    """
    place = int((np.cumsum(bins) >= share * bins.sum() - 1e-6).argmax())
    if place == BINS - 1:
        return largest
    low = EDGES[max(place - 1, 0)]
    high = EDGES[place]
    return min(math.sqrt(low * high), largest)


def _histogram(bins: np.ndarray) -> list[int]:
    """[40] counts from the lowest log-ratio to the highest, from bins [2, BINS]."""
    coarse = [[row[0], *row[1:-1].reshape(-1, COARSE).sum(axis=1), row[-1]] for row in bins]
    return list(map(int, (*reversed(coarse[1]), *coarse[0])))


def describe_agreement(rows: Sequence[Row]) -> str:
    """The warnings of the meters, in words; empty if there are none. Each has one of these reasons:

    - Under equal weights, the median difference of the last steps is over the probe's limit. Only
      steps count whose tokens all have age 0: all steps without asynchrony, and at least the first
      with it. In other steps, the context of a token of age 0 may have keys and values of older
      weights.
    - That median, or the difference in the probes, is several times its value after the first
      steps, and not negligible beside the limit.
    - The effective sample size is small: the samples are too old for the size of the updates.
    """
    equal = []
    for row in rows:
        tokens = row.get("agreement/tokens", 0)
        if LIMIT in row and FEWEST_TOKENS <= tokens == row.get(EQUAL_TOKENS):
            equal.append(row)
    probes = [row for row in rows if DIFFERENCE in row and LIMIT in row]
    for key, series, subject in (
        (EQUAL_WEIGHTS, equal, "tokens sampled by the weights that they are trained on"),
        (DIFFERENCE, probes, "probes"),
    ):
        if not series:
            continue
        recent = _median(series[-RECENT:], key)
        limit = series[-1][LIMIT]
        text = (
            f"log-probs of trainer and generator differ by {recent:.2g} on {subject} (median of "
            f"the last {len(series[-RECENT:])})"
        )
        # describe_differences reports single probes over the limit
        if key == EQUAL_WEIGHTS and not recent <= limit:
            return f"{text}, over observe.probe_limit={limit:g}: they do not compute the same"
        warm = [row for row in series if row["step"] >= WARM_UP]
        if len(warm) >= 2 * RECENT:
            earlier = _median(warm[:RECENT], key)
            if not recent <= max(DRIFT * earlier, DRIFT_FLOOR * limit):
                return f"{text}; it was {earlier:.2g} after the first steps: they drift apart"
    sizes = [row for row in rows if row.get("agreement/tokens", 0) >= FEWEST_TOKENS][-RECENT:]
    if len(sizes) < RECENT:
        return ""
    size = _median(sizes, "agreement/ess", worst=0.0)
    limit = sizes[-1].get(ESS_LIMIT, LEAST_ESS)
    if size >= limit:
        return ""
    age = _median(sizes, "staleness/mean")
    way_out = "Lower the age or the learning rate"
    if limit == LEAST_ESS_UNCORRECTED:
        way_out += ", or take a loss that corrects for pi/mu (docs/asynchrony.md)"
    return (
        f"with samples {age:.1f} updates old the effective sample size is {size:.0%}, and should "
        f"be at least {limit:.0%} for this loss (medians of the last {RECENT} steps): pi has moved "
        "too far from mu, or trainer and generator disagree; see agreement/age_… in "
        f"metrics.jsonl. {way_out}"
    )


def least_ess(config: AlgorithmConfig) -> float:
    """The effective sample size below which a run with this loss is warned."""
    return LEAST_ESS_UNCORRECTED if ignores_age(config) else LEAST_ESS


def _median(rows: Sequence[Row], key: str, worst: float = math.inf) -> float:
    """The median. A value that is not finite counts as `worst`."""
    return median(row[key] if math.isfinite(row[key]) else worst for row in rows)


FAILED_SHARE = 0.1  # share of failed episodes or scores above which failures are no accident
BINDS = 0.2  # share of a step
EQUAL_STEPS = 5  # after this many steps in a row, equal rewards in every group are no accident


def advisories(rows: Sequence[Row]) -> list[str]:
    """Advice that the run's last steps call for, in words; possibly none. It is given only where it
    is certain.
    """
    return list(filter(None, (rule(rows) for rule in RULES)))


def equal_rewards(rows: Sequence[Row]) -> str:
    """Advice if rewards are equal, so that there is no gradient.

    Mostly the reward is wrong, or the task too hard or too easy.
    """
    steps = 0
    for row in reversed(rows):
        if row.get("zero_advantage_fraction") != 1:
            break
        steps += 1
    if steps < EQUAL_STEPS:
        return ""
    failures_text = describe_failed(rows[-steps:], FAILED_SHARE)
    if failures_text:
        return (
            f"nothing has been learned for {steps} steps, since {failures_text}: rollouts/ marks "
            "them and says why"
        )
    same = rows[-1].get("reward/std") == 0
    reward = rows[-1]["reward/mean"]
    most = max(row.get("reward/max", row["reward/mean"]) for row in rows)
    if same and reward == most and reward > min(row["reward/mean"] for row in rows):
        return (
            f"all rewards have been equal for {steps} steps, and the highest of the run "
            f"({reward:g}): nothing is left to learn"
        )
    finding = "the rewards of each prompt have been equal"
    if same:
        finding = f"all rewards have been equal ({reward:g})"
    return (
        f"{finding} for {steps} steps, so nothing is learned: look into rollouts/ whether answers "
        "or reward are wrong"
    )


def failures(rows: Sequence[Row]) -> str:
    """Advice if many episodes or scores fail: then the program or the reward is wrong, not the
    policy.
    """
    recent = rows[-EQUAL_STEPS:]
    failed = "" if equal_rewards(rows) else describe_failed(recent, FAILED_SHARE)
    if failed:
        return f"{failed} in the last {len(recent)} steps: rollouts/ marks them and says why"
    return ""


def scoring_binds(rows: Sequence[Row]) -> str:
    """Advice if rollouts wait longer for scores than for engines, and the trainer waits for
    rollouts. More engines would not help then.
    """
    recent = rows[-EQUAL_STEPS:]
    if len(recent) < EQUAL_STEPS or not all("time/reward_s" in row for row in recent):
        return ""
    step = median(row["time/step_s"] for row in recent)
    wait = median(row["time/trainer_wait_s"] for row in recent)
    generate = median(row["time/generate_s"] for row in recent)
    reward = median(row["time/reward_s"] for row in recent)
    if not (reward > generate and reward > BINDS * step and wait > BINDS * step):
        return ""
    return (
        f"scoring limits the speed: rollouts waited {reward:.3g} s of a step of {step:.3g} s for "
        f"scores, generation took {generate:.3g} s "
        f"(medians of the last {len(recent)}). Raise reward.workers, or give the scorer more "
        "capacity (an async function's service, a "
        "role's engines)"
    )


def describe_failed(rows: Sequence[Row], least: float) -> str:
    """Says so if a share of at least `least` of the episodes failed, or else of the scores;
    otherwise empty.
    """
    if not rows:
        return ""
    if fmean(row.get(FAILED_EPISODES, 0.0) for row in rows) >= least:
        return describe_failed_episodes(rows)
    failed_scores = fmean(row.get(FAILED_FRACTION, 0.0) for row in rows)
    if failed_scores >= least:
        return f"{failed_scores:.0%} of the scores failed"
    return ""


RULES = (equal_rewards, failures, scoring_binds, describe_differences, describe_agreement)
