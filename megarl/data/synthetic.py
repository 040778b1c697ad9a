"""Tasks that are generated row by row: nothing is downloaded or stored.

chain: evaluate five one-digit numbers joined by + and - modulo 10, writing the running totals: "7+0+9+1+5=" -> "7,7,6,7,2".
There are 1.6 million such expressions; 512 of them form the split "eval" and are in no other. In demonstrations, a step that wraps
around is instead clamped to 0 or 9 with probability 0.6. So two thirds of the demonstrations end wrong, the wrong rule is likelier at
every wrap, and the right one must be found by reward. In pairs of responses one is right. The other clamps at every wrap, or has a random
total in one place and goes on from there; all clamp that have a wrap, if a coin says so.

right_chain: the same with demonstrations that are all right.

judged_chain: the rows of chain, and as many in which a response to them is judged, as in "7+0+9+1+5=7,7,9,9,9?" -> "7,7,6,7,2:0": the right
totals, and 1 if the response has them, else 0.

product: multiply two three-digit numbers: "347*286=" -> "99242". There are 810,000 of them; 512 form the split "eval". Seven of ten
demonstrations guess, as in "?31870": as many digits as the answer has, and hardly ever right. The others call a calculator by the rollout
tool_calls with the marks < and >: the policy writes "<347*286>", the environment "99242;", the policy "99242".

product_calls: the same as conversations with a tool, to begin agents with (docs/agents.md).

summary: see megarl.data.synthetic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations

from megarl.config.errors import ConfigError
from megarl.data.order import permute
from megarl.data.rows import Pair, Row, Rows

# The gold scorer of synthetic:summary: the preferences that a reward model is to learn there, known exactly.
#
# As a reward it is named by import path: `eval.reward=megarl.data.synthetic:score`.


WORST = -2.0
_MISTAKE = 0.25


def score(response: str, answer: str) -> float:
    """How well any text summarises a post of six letters, from -2 to 1. Args: answer: the post's letters.

    It is -1, plus 1/3 for each letter of the post where it first stands, minus 1/4 for each mistake. Mistakes are a character that is not a
    letter of the post, a repeated letter, and a letter that belongs before the last new one in the alphabet. So the post's six letters in
    alphabetical order score 1, an empty text scores -1.
    """
    seen, found, mistakes, last = set[str](), 0, 0, ""
    for character in response:
        if character in answer and character not in seen:
            found += 1
            mistakes += character < last
            last = character
        else:
            mistakes += 1
        seen.add(character)
    return max(2 * found / len(answer) - 1 - _MISTAKE * mistakes, WORST)


# The task synthetic:summary, in which a reward model that has learned a gold scorer's preferences rewards the policy.
#
# A post is six different letters of a to p, in any order; its summary names them in alphabetical order: "kcgpab=" -> "abcgkp". There are
# 8,008 sets of letters in 720 orders each; 512 of the sets form the split "eval", in one order each, and are in no other.
#
# Demonstrations are by writers of different care, from none to perfect. A careless one leaves letters out, writes other letters of a to p,
# writes letters twice, and swaps neighbours, all of it at random. What goes together there (a careful writer's letters are complete and in
# order) a reward model may take for one another.
#
# A pair of responses is two demonstrations that megarl.data.synthetic scores differently, the better one preferred. They are not sampled
# from a trained policy: as in arXiv:2410.18252 all reward models learn from the same given pairs, which the gold scorer has labelled; and a
# warm start writes much as its demonstrators do.


LETTERS = "abcdefghijklmnop"
LENGTH = 6  # letters of a post
_HELD_OUT_SETS = 512
# A writer without any care: probabilities for each letter.
_OMIT, _INSERT, _REPEAT, _SWAP = 0.5, 0.25, 0.1, 0.4


@dataclass(frozen=True)
class Summaries(Sequence[Row]):
    """Rows of one split. `seed` decides the demonstrations."""

    split: str
    seed: int

    def __len__(self) -> int:
        sets, orders = len(_sets()), len(_orders())
        return _HELD_OUT_SETS if self.split == "eval" else (sets - _HELD_OUT_SETS) * orders

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
            order, number = divmod(permute(index, len(self), "summary"), len(_sets()) - _HELD_OUT_SETS)
            number += _HELD_OUT_SETS
        letters = _sets()[permute(number, len(_sets()), "summary")]
        return letters, "".join(letters[place] for place in _orders()[order])


@dataclass(frozen=True)
class SummaryPairs(Sequence[Pair]):
    """The posts of one split, each with two demonstrations. The gold scorer prefers one."""

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


PREFIX = "synthetic:"

_TERMS = 5
_DIGITS = 10**_TERMS
_EXPRESSIONS = _DIGITS * 2 ** (_TERMS - 1)
_HELD_OUT = 512
_CLAMP_PROBABILITY = 0.6
_FACTORS = 900  # 100 to 999
_GUESS_PROBABILITY = 0.7
_ORDER = "chain"  # the order, and so what is held out, is the same for every seed


@dataclass(frozen=True)
class Chain(Sequence[Row]):
    """Rows of one split of the chain task. `seed` decides the demonstrations' errors."""

    split: str
    seed: int
    clamp_probability: float = _CLAMP_PROBABILITY

    def __len__(self) -> int:
        return _HELD_OUT if self.split == "eval" else _EXPRESSIONS - _HELD_OUT

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        text, first, steps = self.expression(index)
        noise = random.Random(f"{self.seed}/{self.split}/{index}")
        return Row(
            prompt=f"{text}=",
            answer=str((first + sum(steps)) % 10),
            demonstration=",".join(map(str, _noisy_totals(first, steps, noise, self.clamp_probability))),
            where=f"{PREFIX}chain, split {self.split}, row {index}",
        )

    def expression(self, index: int) -> tuple[str, int, list[int]]:
        position = index if self.split == "eval" else _HELD_OUT + index
        return _expression(permute(position, _EXPRESSIONS, _ORDER))


@dataclass(frozen=True)
class ChainPairs(Sequence[Pair]):
    """The expressions of one split with a right and a wrong response. `seed` decides the wrong ones."""

    chain: Chain

    def __len__(self) -> int:
        return len(self.chain)

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        row, (_, first, steps) = self.chain[index], self.chain.expression(index)
        noise = random.Random(f"{self.chain.seed}/{self.chain.split}/{index}/pair")
        chosen, rejected = _totals(first, steps), _totals(first, steps, clamped=True)
        if rejected == chosen or noise.random() < 0.5:
            place = noise.randrange(len(chosen))
            wrong = (chosen[place] + noise.randrange(1, 10)) % 10
            rejected = chosen[:place] + _totals(wrong, steps[place:])
        texts = (",".join(map(str, totals)) for totals in (chosen, rejected))
        return Pair(row.prompt, *texts, margin=0.0, where=row.where)


@dataclass(frozen=True)
class JudgedChain(Sequence[Row]):
    """Expressions and verdicts in turn, for a model that is both policy and judge."""

    chain: Chain

    def __len__(self) -> int:
        return 2 * len(self.chain)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        place, judges = divmod(index, 2)
        row, (_, first, steps) = self.chain[place], self.chain.expression(place)
        if not judges:
            return row
        noise = random.Random(f"{self.chain.seed}/{self.chain.split}/{place}/judged")
        right = ",".join(map(str, _totals(first, steps)))
        response = right if noise.random() < 0.5 else ",".join(map(str, _noisy_totals(first, steps, noise)))
        verdict = f"{right}:{int(response == right)}"
        return Row(f"{row.prompt}{response}?", verdict, verdict, f"{PREFIX}judged_chain, split {self.chain.split}, row {index}")


def _totals(total: int, steps: list[int], clamped: bool = False) -> list[int]:
    totals = [total]
    for step in steps:
        total = min(max(total + step, 0), 9) if clamped else (total + step) % 10
        totals.append(total)
    return totals


def _expression(number: int) -> tuple[str, int, list[int]]:
    """The expression with this number: text, first term, signed further terms. Every number has a different text."""
    signs, digits = divmod(number, _DIGITS)
    terms = [digits // 10**place % 10 for place in range(_TERMS)]
    minus = [bool(signs >> place & 1) for place in range(_TERMS - 1)]
    text = str(terms[0]) + "".join(f"{'-' if m else '+'}{term}" for m, term in zip(minus, terms[1:]))
    return text, terms[0], [-term if m else term for m, term in zip(minus, terms[1:])]


def _noisy_totals(total: int, steps: list[int], noise: random.Random, clamp_probability: float = _CLAMP_PROBABILITY) -> list[int]:
    totals = [total]
    for step in steps:
        total += step
        if not 0 <= total <= 9:
            total = min(max(total, 0), 9) if noise.random() < clamp_probability else total % 10
        totals.append(total)
    return totals


@dataclass(frozen=True)
class Product(Sequence[Row]):
    """Rows of one split of the product task. `seed` decides which demonstrations guess, and what."""

    split: str
    seed: int

    def __len__(self) -> int:
        return _HELD_OUT if self.split == "eval" else _FACTORS**2 - _HELD_OUT

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        position = index if self.split == "eval" else _HELD_OUT + index
        left, right = divmod(permute(position, _FACTORS**2, "product"), _FACTORS)
        text, answer = f"{100 + left}*{100 + right}", str((100 + left) * (100 + right))
        noise = random.Random(f"{self.seed}/{self.split}/{index}")
        guess = "?" + str(noise.randrange(10 ** (len(answer) - 1), 10 ** len(answer)))
        return Row(
            prompt=f"{text}=",
            answer=answer,
            demonstration=guess if noise.random() < _GUESS_PROBABILITY else (f"<{text}>", f"{answer};", answer),
            where=f"{PREFIX}product, split {self.split}, row {index}",
        )


@dataclass(frozen=True)
class ProductCalls(Sequence[Row]):
    """Those of the product task as conversations in the chat template of configs/models/tiny-agent, with a tool in the place of <...>."""

    products: Product

    def __len__(self) -> int:
        return len(self.products)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        row = self.products[index]
        call = '<tool_call>{"name": "calculate", "arguments": {"expression": "' + row.prompt.rstrip("=") + '"}}</tool_call>'
        guess = row.demonstration if isinstance(row.demonstration, str) else None
        turns = (call, f"<tool>{row.answer}<assistant>", row.answer) if guess is None else (guess,)
        texts = tuple(f"{text}<eos>" if place % 2 == 0 else text for place, text in enumerate(turns))
        where = f"{PREFIX}product_calls, split {self.products.split}, row {index}"
        return Row(f"<tools>calculate<user>{row.prompt}<assistant>", row.answer, texts, where, ended=True)


_TASKS: dict[str, Callable[[str, int], Rows]] = {
    "chain": Chain,
    "right_chain": lambda split, seed: Chain(split, seed, clamp_probability=0.0),
    "judged_chain": lambda split, seed: JudgedChain(Chain(split, seed)),
    "product": Product,
    "product_calls": lambda split, seed: ProductCalls(Product(split, seed)),
    "summary": Summaries,
}
_PAIRS: dict[str, Callable[[str, int], Sequence[Pair]]] = {
    "chain": lambda split, seed: ChainPairs(Chain(split, seed)),
    "summary": lambda split, seed: SummaryPairs(Summaries(split, seed)),
}


def synthetic_rows(source: str, split: str, seed: int, key: str) -> Rows:
    """Rows of `synthetic:<task>`. Args: key: the config section, for messages. Raises ConfigError."""
    return _task(_TASKS, source, split, key)(split, seed)


def synthetic_pairs(source: str, split: str, seed: int, key: str) -> Sequence[Pair]:
    """The same, of pairs of responses."""
    return _task(_PAIRS, source, split, key)(split, seed)


def _task[T](tasks: Mapping[str, Callable[[str, int], T]], source: str, split: str, key: str) -> Callable[[str, int], T]:
    task = source.removeprefix(PREFIX)
    if task not in tasks:
        raise ConfigError(f"{key}.source={source}: no such task; there is {', '.join(PREFIX + name for name in sorted(tasks))}")
    if split not in ("train", "eval"):
        raise ConfigError(f"{key}.split={split}: {source} has train and eval")
    return tasks[task]
