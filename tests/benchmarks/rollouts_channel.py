"""`python tests/benchmarks channels`: what the rollouts channel costs, per sample (channel_samples) and per
token (channel_tokens).
"""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from channel_samples import BUFFERED, SAMPLES_PER_STEP, STEP_S, measure, render
from channel_tokens import measure_tokens, render_tokens

from megarl.base.cores import usable_cores


def run(as_json: bool) -> None:
    """Prints a table, or one JSON object. Raises RuntimeError, TimeoutError."""
    torch.set_num_threads(1)
    facts = {
        "hardware": f"{usable_cores()} CPU cores",
        "step_s": STEP_S,
        "samples_per_step": SAMPLES_PER_STEP,
        "costs": [asdict(measure(buffered)) for buffered in BUFFERED],
        **measure_tokens().facts(),
    }
    print(json.dumps(facts) if as_json else f"{render(facts)}\n{render_tokens(facts)}")
