"""The task synthetic:summary, in which a model is to be rewarded by another that has learned a gold scorer's preferences.

A post is six different letters of a to p, in any order; its summary names them in alphabetical order: "kcgpab=" -> "abcgkp". There are
8,008 sets of letters in 720 orders each; 512 of the sets form the split "eval", in one order each, and are in no other.

Demonstrations are by writers of different care, from none to perfect. A careless one leaves letters out, writes other letters of a to p,
writes letters twice, and swaps neighbours, all of it at random. What goes together there (a careful writer's letters are complete and in
order) a reward model may take for one another.

A pair of responses is two demonstrations that megarl.rewards.gold scores differently, the better one preferred. They are not sampled from
a trained policy: as in arXiv:2410.18252 all reward models learn from the same given pairs, which the gold scorer has labelled; and a warm
start writes much as its demonstrators do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations

from megarl.data.permutation import permute
from megarl.data.rows import Pair, Row
from megarl.rewards.gold import score

LETTERS = "abcdefghijklmnop"
LENGTH = 6  # letters of a post
_HELD_OUT = 512
# A writer without any care: probabilities for each letter.
_OMIT, _INSERT, _REPEAT, _SWAP = 0.5, 0.25, 0.1, 0.4


@dataclass(frozen=True)
class Summaries(Sequence[Row]):
    """Rows of one split. `seed` decides the demonstrations."""

    split: str
    seed: int

    def __len__(self) -> int:
        sets, orders = len(_sets()), len(_orders())
        return _HELD_OUT if self.split == "eval" else (sets - _HELD_OUT) * orders

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        letters, post = self._post(index)
        demonstration = demonstrate(letters, random.Random(f"{self.seed}/{self.split}/{index}"))
        return Row(f"{post}=", letters, demonstration, f"synthetic:summary, split {self.split}, row {index}")

    def _post(self, index: int) -> tuple[str, str]:
        """The letters in alphabetical order, and as the post has them."""
        if self.split == "eval":
            number, order = index, permute(index, len(_orders()), "summary")
        else:
            order, number = divmod(permute(index, len(self), "summary"), len(_sets()) - _HELD_OUT)
            number += _HELD_OUT
        letters = _sets()[permute(number, len(_sets()), "summary")]
        return letters, "".join(letters[place] for place in _orders()[order])


@dataclass(frozen=True)
class SummaryPairs(Sequence[Pair]):
    """The posts of one split, each with two demonstrations, of which the gold scorer prefers one."""

    posts: Summaries

    def __len__(self) -> int:
        return len(self.posts)

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        row, noise = self.posts[index], random.Random(f"{self.posts.seed}/{self.posts.split}/{index}/pair")
        while True:
            worse, better = sorted((demonstrate(row.answer, noise) for _ in range(2)), key=lambda text: score(text, row.answer))
            if score(worse, row.answer) < score(better, row.answer):
                return Pair(row.prompt, better, worse, margin=0.0, where=row.where)


def demonstrate(letters: str, noise: random.Random) -> str:
    """A summary by a writer of random care; never empty."""
    carelessness, text = noise.random(), ""
    for letter in letters:
        if noise.random() >= _OMIT * carelessness:
            text += letter * (2 if noise.random() < _REPEAT * carelessness else 1)
        if noise.random() < _INSERT * carelessness:
            text += noise.choice(LETTERS)
    swapped = list(text or letters[0])
    for place in range(len(swapped) - 1):
        if noise.random() < _SWAP * carelessness:
            swapped[place : place + 2] = reversed(swapped[place : place + 2])
    return "".join(swapped)


@cache
def _sets() -> list[str]:
    return list(map("".join, combinations(LETTERS, LENGTH)))


@cache
def _orders() -> list[tuple[int, ...]]:
    return list(permutations(range(LENGTH)))
