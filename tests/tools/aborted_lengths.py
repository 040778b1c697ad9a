"""How much shorter responses become with async.partial_rollout=abort: the table of docs/asynchrony.md.

Every response decodes one token a tick. An update is due `every` ticks after the last one. It waits for responses that were already begun
again once; until they end, no response begins. Then all other responses begin again, each with a newly drawn length.
"""

from __future__ import annotations

import numpy as np


def mean_length(every: int, sigma: float, abort: bool = True, updates: int = 4000, slots: int = 64) -> tuple[float, float]:
    """Returns the mean length and the share of responses that began again. Lengths are lognormal with mean 64, cut at 256."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return np.clip(np.rint(rng.lognormal(np.log(64) - sigma**2 / 2, sigma, count)), 1, 256).astype(int)

    length, second = draw(slots), np.zeros(slots, bool)
    left, clock, done = length.copy(), 0, 0
    tokens = ended = again = 0
    while done < updates:
        clock += 1
        busy = left > 0
        left[busy] -= 1
        over = busy & (left == 0)
        tokens, ended = tokens + int(length[over].sum()), ended + int(over.sum())
        second[over] = False
        held = clock >= every
        if held and not second.any():
            clock, done, held = 0, done + 1, False
            if abort:
                cut = left > 0
                length[cut] = left[cut] = draw(int(cut.sum()))
                second[cut], again = True, again + int(cut.sum())
        if not held:
            free = left == 0
            length[free] = left[free] = draw(int(free.sum()))
    return tokens / ended, again / ended


def main() -> None:
    for sigma in (0.8, 0.4):
        whole, _ = mean_length(64, sigma, abort=False)
        for every in (16, 32, 64, 128, 256, 512):
            mean, again = mean_length(every, sigma)
            told = f"{mean:.1f} instead of {whole:.1f} tokens ({mean / whole - 1:+.0%}), {again:.0%} drawn again"
            print(f"sigma {sigma}, {every} ticks an update: {told}")


if __name__ == "__main__":
    main()
