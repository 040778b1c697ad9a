"""How far the probe's log-probs, of trainer and generator under the same weights, may lie apart.

Rounding keeps the mean over a probe's tokens far below the limits (docs/benchmarks.md); a stale or corrupt tensor, or engines that compute
something else, brings it far above them. It is the mean that counts: a token whose router is all but tied goes to another expert, and
lies 0.1 to 0.3 off, in a healthy run. The largest is reported beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the display need not import all that makes a plan
    from megarl.plan.resolve import RunPlan

DIFFERENCE, LARGEST, LIMIT = "logprob/abs_diff_mean", "logprob/abs_diff_max", "logprob/limit"
BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.05, "fp8": 0.15}
OWN_ROUTING = 2  # times as much where trainer and generator route tokens to experts each for itself
FAR = 10  # times the limit: the run ends


def probe_limit(plan: RunPlan) -> float:
    """observe.probe_limit, or what is usual for what trainer and engines compute in."""
    config = plan.config
    if config.observe.probe_limit is not None:
        return config.observe.probe_limit
    limit = BY_DTYPE["fp8" if config.generator.quantization else config.model.dtype]
    return limit * (OWN_ROUTING if plan.spec.num_experts and not config.trainer.routing_replay else 1)


def too_far(difference: float, limit: float) -> str | None:
    """Why to stop, where the run cannot go on with such a mean difference."""
    if math.isfinite(difference) and difference <= FAR * limit:
        return None
    found = f"differ by {difference:.3g} on average" if math.isfinite(difference) else "are not all finite"
    return (
        f"the log-probs of trainer and generator under the same weights {found}, more than {FAR} times observe.probe_limit={limit:g}: "
        "they do not compute the same model. What the last update wrote to the engines is what was sent where weights.audit is on. So look "
        "at what else they compute with: generator.server_args, config.json and spec of model.path (rotary embedding, scaling, dtype); "
        "of a mixture of experts, trainer.routing_replay. Where they are meant to differ so much, set observe.probe_limit"
    )


def told_differences(rows: Sequence[Mapping[str, float]]) -> str:
    """Those over the limit, in words; empty where there is none."""
    over = [row for row in rows if DIFFERENCE in row and LIMIT in row and row[DIFFERENCE] > row[LIMIT]]
    if not over:
        return ""
    most, limit = max(row[DIFFERENCE] for row in over), over[-1][LIMIT]
    probes = "a probe" if len(over) == 1 else f"{len(over)} probes"
    return f"log-probs of trainer and generator differ by {most:.2g} in {probes}, over observe.probe_limit={limit:g}"
