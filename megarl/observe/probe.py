"""How much a probe's log-probs may differ between trainer and generator under the same weights.

Rounding keeps the mean over a probe's tokens far below the limits (docs/benchmarks.md); a stale or corrupt tensor, or engines that compute
something else, brings it far above. The mean counts, since even in a healthy run a token whose router is nearly tied may go to another
expert and differ by 0.1 to 0.3. The largest difference is reported too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the display does without the imports of a plan
    from megarl.plan.resolve import RunPlan

DIFFERENCE, LARGEST, LIMIT = "logprob/abs_diff_mean", "logprob/abs_diff_max", "logprob/limit"
BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.05, "fp8": 0.15}
OWN_ROUTING = 2  # factor on the limit where trainer and generator each choose experts themselves
FAR = 10  # at so many times the limit the run ends


def probe_limit(plan: RunPlan) -> float:
    """observe.probe_limit, or the usual limit for the precision of trainer and engines."""
    config = plan.config
    if config.observe.probe_limit is not None:
        return config.observe.probe_limit
    limit = BY_DTYPE["fp8" if config.generator.quantization else config.model.dtype]
    return limit * (OWN_ROUTING if plan.spec.num_experts and not config.trainer.routing_replay else 1)


def too_far(difference: float, limit: float) -> str | None:
    """Why the run must stop; None if it may go on with such a mean difference."""
    if math.isfinite(difference) and difference <= FAR * limit:
        return None
    found = f"differ by {difference:.3g} on average" if math.isfinite(difference) else "are not all finite"
    return (
        f"the log-probs of trainer and generator under the same weights {found}, more than {FAR} times observe.probe_limit={limit:g}: "
        "they do not compute the same model. If weights.audit is on, the engines have the weights that were sent, so look at the rest: "
        "generator.server_args, config.json and spec of model.path (rotary embedding, scaling, dtype), and with a mixture of experts "
        "trainer.routing_replay. If such a difference is to be expected, set observe.probe_limit"
    )


def describe_differences(rows: Sequence[Mapping[str, float]]) -> str:
    """The probes over the limit, in words; empty if there are none."""
    over = [row for row in rows if DIFFERENCE in row and LIMIT in row and row[DIFFERENCE] > row[LIMIT]]
    if not over:
        return ""
    most, limit = max(row[DIFFERENCE] for row in over), over[-1][LIMIT]
    probes = "a probe" if len(over) == 1 else f"{len(over)} probes"
    return f"log-probs of trainer and generator differ by {most:.2g} in {probes}, over observe.probe_limit={limit:g}"
