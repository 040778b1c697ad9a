"""How much shorter responses become with async.partial_rollout=abort: the table of
docs/asynchrony.md.

Every response decodes one token a tick. An update is due `every` ticks after the last one. It waits
for responses that were already begun again once; until they end, no response begins. Then all other
responses begin again, with the same noise. So a response is the same up to the first token that the
new weights change. From there on it is a new one: its length is drawn anew, among those above that
place.
"""

from __future__ import annotations

import numpy as np

MEAN = 64  # tokens


def mean_length(
    every: int, sigma: float, changed: float, ticks: int = 50_000, slots: int = 64
) -> tuple[float, float]:
    """Returns the mean length and the share of responses that began again.

    Lengths are lognormal with mean 64, cut at 256. `changed`: the share of tokens that an update
    changes.
    """
    rng = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return np.clip(
            np.rint(rng.lognormal(np.log(MEAN) - sigma**2 / 2, sigma, count)), 1, 256
        ).astype(int)

    def drawn_again(lengths: np.ndarray) -> np.ndarray:
        place = rng.geometric(changed, len(lengths)) if changed else np.full(len(lengths), 1 << 30)
        again = lengths.copy()
        differs = lengths >= place
        while differs.any():
            again[differs] = draw(int(differs.sum()))
            differs &= again < place
        return again

    length = draw(slots)
    second = np.zeros(slots, bool)
    remaining = length.copy()
    clock = 0
    tokens = ended = again = 0
    for _ in range(ticks):
        clock += 1
        busy = remaining > 0
        remaining[busy] -= 1
        over = busy & (remaining == 0)
        tokens = tokens + int(length[over].sum())
        ended = ended + int(over.sum())
        second[over] = False
        pausing = clock >= every
        if pausing and not second.any():
            clock = 0
            pausing = False
            cut = remaining > 0
            length[cut] = remaining[cut] = drawn_again(length[cut])
            second[cut] = True
            again += int(cut.sum())
        if not pausing:
            free = remaining == 0
            length[free] = remaining[free] = draw(int(free.sum()))
    return tokens / ended, again / ended


def main() -> None:
    rng = np.random.default_rng(0)
    for sigma in (0.8, 0.4):
        lengths = np.clip(
            np.rint(rng.lognormal(np.log(MEAN) - sigma**2 / 2, sigma, 1_000_000)), 1, 256
        )
        for tokens in (MEAN, 4, 1, 0.25, 0):
            for every in (16, 32, 64, 128, 256, 512):
                mean, again = mean_length(every, sigma, changed=tokens / MEAN)
                text = f"{mean / lengths.mean() - 1:+.0%} length, {again:.0%} begun again"
                print(
                    f"sigma {sigma}, an update changes {tokens} tokens of {MEAN}, {every} ticks "
                    f"an update: {text}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
