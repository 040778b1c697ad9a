"""The share of an engine's elements that one optimizer step changes, by learning rate: `python
tests/tools/changed_by_lr.py`.

Weights are random with standard deviation 0.02, like a new model's. AdamW (betas 0.9 and 0.95)
updates float32 masters. Gradients are noise plus a constant part, so that updates are about as
large as in training. The share is that of the last of STEPS steps: in bfloat16, and in fp8 by
block, whose codes and scales are quantised from the bfloat16 values.
"""

from __future__ import annotations

import torch

from megarl.kernels.changes import bits_of
from megarl.kernels.quantise import quantise
from megarl.kernels.quantise_rules import BLOCK

STEPS = 20
RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 1e-4)
MODELS = {  # matrices of the quickstart's model, and rows as wide as an 8B model's
    "quickstart": [(256, 128), (128, 128), (768, 128), (128, 384)],
    "wide": [(512, 4096)],
}


def changed(shapes: list[tuple[int, int]], lr: float) -> tuple[float, float]:
    torch.manual_seed(1)
    masters = [0.02 * torch.randn(shape) for shape in shapes]
    tensors = [torch.randn(shape) for shape in shapes]
    adam = torch.optim.AdamW(masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(STEPS):
        before = states(masters)
        for values, part in zip(masters, tensors):
            values.grad = torch.randn(values.shape) + 0.3 * part
        adam.step()
    after = states(masters)
    return tuple(
        sum(int((bits_of(a) != bits_of(b)).sum()) for a, b in zip(now, was))
        / sum(a.numel() for a in now)
        for now, was in zip(after, before)
    )


def states(masters: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors in bfloat16, and in fp8 by block: codes and scales."""
    halves = [values.bfloat16() for values in masters]
    return halves, [part.contiguous() for values in halves for part in quantise(values, BLOCK, "w")]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| learning rate |" + "".join(f" {rate:g} |" for rate in RATES))
    print("|---|" + "---|" * len(RATES))
    for name, shapes in MODELS.items():
        results = [changed(shapes, rate) for rate in RATES]
        for n, dtype in enumerate(("bf16", "fp8_block")):
            print(
                f"| {name}, {dtype} |" + "".join(f" {100 * result[n]:.3f} |" for result in results)
            )
