"""`python tests/benchmarks logprobs`: peak memory and time of the log-probs of one microbatch, with all logits
at once and in chunks.

Each cell is a process of its own, on one thread, in float32. Scoring gives log-probs and entropy.
Training gives log-probs, and gradients of hidden states and output layer; the latter are added to a
buffer, as in the trainer. "all at once" is PyTorch's log_softmax. Memory is the growth of the
process's peak beyond its inputs and that buffer. The formulas beside it are for c rows at once,
hidden size h and vocabulary v, 4 bytes per number:

    all at once   3 c v   logits, their log_softmax, and a product with it or the gradient
    in chunks     2 c v   scaled logits and their exponentials; the gradient overwrites the logits.
                          In training at least v h: PyTorch asks for a gradient of the weight, which
                          is zeros, since the true one was added to the buffer
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megarl.base.cores import usable_cores
from megarl.kernels import linear_logprobs

TOKENS = 2048
VOCAB = 131_072
HIDDEN = 256
WAYS = (TOKENS, 1024, 256, 64)  # rows at once; the first is PyTorch's own method
MIB = 1 << 20
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class LogprobsCost:
    rows: int  # rows at once
    training: bool
    peak_mib: float
    formula_mib: float
    cpu_s: float


def run(as_json: bool) -> None:
    """Prints a table, or one JSON object. Raises TimeoutError."""
    costs = []
    for training in (False, True):
        for rows in WAYS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                costs.append(asdict(fresh.submit(measure, rows, training).result(TIMEOUT_S)))
    facts = {
        "hardware": f"{usable_cores()} CPU cores",
        "tokens": TOKENS,
        "vocab": VOCAB,
        "hidden": HIDDEN,
        "costs": costs,
    }
    print(json.dumps(facts) if as_json else render(facts))


def measure(rows: int, training: bool) -> LogprobsCost:
    """Measures in this process, which must be new, since its peak never falls."""
    torch.set_num_threads(1)
    hidden = torch.randn(TOKENS, HIDDEN)
    weight = torch.randn(VOCAB, HIDDEN).div_(HIDDEN**0.5)
    targets = torch.randint(VOCAB, (TOKENS,))
    total = torch.ones_like(weight)
    if training:
        hidden.requires_grad_()
        weight.requires_grad_()
    before = _peak_mib()
    started = time.process_time()
    if rows == TOKENS:
        log_p = torch.log_softmax(hidden @ weight.T, -1)
        logprobs = log_p.gather(-1, targets[:, None])
        if not training:
            (log_p.exp() * log_p).sum(-1)
    else:
        # a process group of this process alone
        group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        logprobs, _ = linear_logprobs(hidden, weight, targets, group, VOCAB, 1.0, rows, total)
    if training:
        logprobs.sum().backward()
        if rows == TOKENS:
            assert weight.grad is not None
            total += weight.grad
    formula = (3 if rows == TOKENS else 2) * rows * VOCAB * 4
    if training:
        formula = max(formula, VOCAB * HIDDEN * 4)
    return LogprobsCost(
        rows, training, _peak_mib() - before, formula / MIB, time.process_time() - started
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def render(facts: dict[str, Any]) -> str:
    lines = [
        f"log-probs of {facts['tokens']} tokens, vocabulary {facts['vocab']:,}, hidden size "
        f"{facts['hidden']}; {facts['hardware']}"
    ]
    lines.append(f"{'':9s}{'':>14s}{'peak MiB':>10s}{'formula':>9s}{'CPU s':>7s}")
    for cost in facts["costs"]:
        way = "all at once" if cost["rows"] == facts["tokens"] else f"{cost['rows']} at once"
        figures = f"{cost['peak_mib']:10.0f}{cost['formula_mib']:9.0f}{cost['cpu_s']:7.1f}"
        lines.append(f"{'training' if cost['training'] else 'scoring':9s}{way:>14s}{figures}")
    return "\n".join(lines)
