"""Synthetic tasks, generated row by row: nothing is downloaded or stored.

chain: evaluate five one-digit numbers joined by + and - modulo 10, writing the running totals:
"7+0+9+1+5=" -> "7,7,6,7,2". There are 1.6 million such expressions; 512 of them form the split
"eval" and are in no other. In demonstrations, a step that wraps around is instead clamped to 0 or 9
with probability 0.6. So two thirds of the demonstrations end wrong, the wrong rule is likelier at
every wrap, and the right one must be found by reward. A pair has a right and a wrong response. The
wrong one clamps at every wrap, or has one random total and goes on from it. A coin decides which,
if the expression has a wrap.

right_chain: the same, but all demonstrations are right.

judged_chain: the rows of chain, and as many rows that judge a response to them, as in
"7+0+9+1+5=7,7,9,9,9?" -> "7,7,6,7,2:0". The answer has the right totals, then 1 if the response has
them, else 0.

product: multiply two three-digit numbers: "347*286=" -> "99242". There are 810,000 of them; 512
form the split "eval". Seven of ten demonstrations guess, as in "?31870": as many digits as the
answer has, and hardly ever right. The others call a calculator through the rollout tool_calls with
the marks < and >: the policy writes "<347*286>", the environment "99242;", the policy "99242".

product_calls: the same as conversations with a tool, for the warm start of agents (docs/agents.md).

summary: a reward model learns the gold scorer's preferences, then rewards the policy. A post is six
different letters of a to p, in any order; its summary names them in alphabetical order: "kcgpab="
-> "abcgkp". There are 8,008 sets of letters in 720 orders each; 512 of the sets form the split
"eval", in one order each, and are in no other. Demonstrations are by writers of different care,
from none to perfect. A careless writer randomly leaves letters out, writes other letters of a to p,
repeats letters, and swaps neighbours. A careful writer's letters are both complete and in order, so
a reward model may confuse the two. A pair of responses is two demonstrations with different gold
scores; the better one is preferred. They are not sampled from a trained policy. As in
arXiv:2410.18252, all reward models learn from the same given pairs, labelled by the gold scorer;
and after the warm start a policy writes much as its demonstrators do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations

from megarl.config.errors import ConfigError
from megarl.data.order import permute
from megarl.data.rows import Pair, Row, Rows

WORST = -2.0
_MISTAKE = 0.25


def score(response: str, answer: str) -> float:
    """How well a text summarises a post of six letters, from -2 to 1.

    This is the gold scorer of synthetic:summary: it defines the preferences that a reward model
    should learn there. As a reward it is named by import path:
    `eval.reward=megarl.data.synthetic:score`.

    Args: answer: the post's letters.

    It starts at -1, gains 1/3 for the first occurrence of each letter of the post, and loses 1/4
    for each mistake. Mistakes are a character that is not a letter of the post, a repeated letter,
    and a letter that comes before the last new letter in the alphabet. So the post's six letters in
    alphabetical order score 1, and an empty text scores -1.
    """
    written_letters = set[str]()
    gained = 0
    mistakes = 0
    last = ""
    for character in response:
        if character in answer and character not in written_letters:
            gained += 1
            mistakes += character < last
            last = character
        else:
            mistakes += 1
        written_letters.add(character)
    return max(2 * gained / len(answer) - 1 - _MISTAKE * mistakes, WORST)


LETTERS = "abcdefghijklmnop"
LENGTH = 6  # letters in a post
_HELD_OUT_SETS = 512
# Probabilities of each mistake, per letter, for a writer without any care.
_OMIT = 0.5
_INSERT = 0.25
_REPEAT = 0.1
_SWAP = 0.4


@dataclass(frozen=True)
class Summaries(Sequence[Row]):
    """The rows of one split. `seed` determines the demonstrations."""

    split: str
    seed: int

    def __len__(self) -> int:
        sets = len(_sets())
        orders = len(_orders())
        return _HELD_OUT_SETS if self.split == "eval" else (sets - _HELD_OUT_SETS) * orders

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        letters, post = self._post(index)
        demonstration = demonstrate(letters, random.Random(f"{self.seed}/{self.split}/{index}"))
        return Row(
            f"{post}=",
            letters,
            demonstration,
            f"synthetic:summary, split {self.split}, row {index}",
        )

    def _post(self, index: int) -> tuple[str, str]:
        """The letters of a post, in alphabetical order and in the post's order."""
        if self.split == "eval":
            number = index
            order = permute(index, len(_orders()), "summary")
        else:
            order, number = divmod(
                permute(index, len(self), "summary"), len(_sets()) - _HELD_OUT_SETS
            )
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
        row = self.posts[index]
        noise = random.Random(f"{self.posts.seed}/{self.posts.split}/{index}/pair")
        while True:
            texts = [demonstrate(row.answer, noise) for _ in range(2)]
            worse, better = sorted(texts, key=lambda text: score(text, row.answer))
            if score(worse, row.answer) < score(better, row.answer):
                return Pair(row.prompt, better, worse, margin=0.0, location=row.location)


def demonstrate(letters: str, noise: random.Random) -> str:
    """A summary by a writer of random care; never empty."""
    carelessness = noise.random()
    text = ""
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
_ORDER = "chain"  # the order, and so the held-out split, is the same for every seed


@dataclass(frozen=True)
class Chain(Sequence[Row]):
    """The rows of one split of the chain task. `seed` determines the errors in demonstrations."""

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
        totals = _noisy_totals(first, steps, noise, self.clamp_probability)
        return Row(
            prompt=f"{text}=",
            answer=str((first + sum(steps)) % 10),
            demonstration=",".join(map(str, totals)),
            location=f"{PREFIX}chain, split {self.split}, row {index}",
        )

    def expression(self, index: int) -> tuple[str, int, list[int]]:
        position = index if self.split == "eval" else _HELD_OUT + index
        return _expression(permute(position, _EXPRESSIONS, _ORDER))


@dataclass(frozen=True)
class ChainPairs(Sequence[Pair]):
    """The expressions of one split, each with a right and a wrong response.

    `seed` determines the wrong ones.
    """

    chain: Chain

    def __len__(self) -> int:
        return len(self.chain)

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        row = self.chain[index]
        _, first, steps = self.chain.expression(index)
        noise = random.Random(f"{self.chain.seed}/{self.chain.split}/{index}/pair")
        chosen = _totals(first, steps)
        rejected = _totals(first, steps, clamped=True)
        if rejected == chosen or noise.random() < 0.5:
            place = noise.randrange(len(chosen))
            wrong = (chosen[place] + noise.randrange(1, 10)) % 10
            rejected = chosen[:place] + _totals(wrong, steps[place:])
        texts = (",".join(map(str, totals)) for totals in (chosen, rejected))
        return Pair(row.prompt, *texts, margin=0.0, location=row.location)


@dataclass(frozen=True)
class JudgedChain(Sequence[Row]):
    """Alternates between expressions and verdicts, for a model that is both policy and judge."""

    chain: Chain

    def __len__(self) -> int:
        return 2 * len(self.chain)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        place, judges = divmod(index, 2)
        row = self.chain[place]
        _, first, steps = self.chain.expression(place)
        if not judges:
            return row
        noise = random.Random(f"{self.chain.seed}/{self.chain.split}/{place}/judged")
        right = ",".join(map(str, _totals(first, steps)))
        response = right
        if noise.random() >= 0.5:
            response = ",".join(map(str, _noisy_totals(first, steps, noise)))
        verdict = f"{right}:{int(response == right)}"
        return Row(
            f"{row.prompt}{response}?",
            verdict,
            verdict,
            f"{PREFIX}judged_chain, split {self.chain.split}, row {index}",
        )


def _totals(total: int, steps: list[int], clamped: bool = False) -> list[int]:
    totals = [total]
    for step in steps:
        total = min(max(total + step, 0), 9) if clamped else (total + step) % 10
        totals.append(total)
    return totals


def _expression(number: int) -> tuple[str, int, list[int]]:
    """The expression with this number: text, first term, further terms with signs.

    Every number has a different text.
    """
    signs, digits = divmod(number, _DIGITS)
    first = digits % 10
    text = str(first)
    steps = []
    for place in range(_TERMS - 1):
        term = digits // 10 ** (place + 1) % 10
        if signs >> place & 1:
            text += f"-{term}"
            steps.append(-term)
        else:
            text += f"+{term}"
            steps.append(term)
    return text, first, steps


def _noisy_totals(
    total: int,
    steps: list[int],
    noise: random.Random,
    clamp_probability: float = _CLAMP_PROBABILITY,
) -> list[int]:
    totals = [total]
    for step in steps:
        total += step
        if not 0 <= total <= 9:
            total = min(max(total, 0), 9) if noise.random() < clamp_probability else total % 10
        totals.append(total)
    return totals


@dataclass(frozen=True)
class Product(Sequence[Row]):
    """The rows of one split of the product task.

    `seed` determines which demonstrations guess, and their guesses.
    """

    split: str
    seed: int

    def __len__(self) -> int:
        return _HELD_OUT if self.split == "eval" else _FACTORS**2 - _HELD_OUT

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        position = index if self.split == "eval" else _HELD_OUT + index
        first, second = divmod(permute(position, _FACTORS**2, "product"), _FACTORS)
        text = f"{100 + first}*{100 + second}"
        answer = str((100 + first) * (100 + second))
        noise = random.Random(f"{self.seed}/{self.split}/{index}")
        guess = "?" + str(noise.randrange(10 ** (len(answer) - 1), 10 ** len(answer)))
        demonstration: str | tuple[str, ...] = (f"<{text}>", f"{answer};", answer)
        if noise.random() < _GUESS_PROBABILITY:
            demonstration = guess
        location = f"{PREFIX}product, split {self.split}, row {index}"
        return Row(f"{text}=", answer, demonstration, location)


@dataclass(frozen=True)
class ProductCalls(Sequence[Row]):
    """The rows of the product task as conversations for the chat template of
    configs/models/tiny-agent. A tool replaces <...>.
    """

    products: Product

    def __len__(self) -> int:
        return len(self.products)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        row = self.products[index]
        if isinstance(row.demonstration, str):
            texts: tuple[str, ...] = (f"{row.demonstration}<eos>",)
        else:
            call = json.dumps(
                {"name": "calculate", "arguments": {"expression": row.prompt.rstrip("=")}}
            )
            texts = (
                f"<tool_call>{call}</tool_call><eos>",
                f"<tool>{row.answer}<assistant>",
                f"{row.answer}<eos>",
            )
        location = f"{PREFIX}product_calls, split {self.products.split}, row {index}"
        prompt = f"<tools>calculate<user>{row.prompt}<assistant>"
        return Row(prompt, row.answer, texts, location, ended=True)


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
    """The rows of `synthetic:<task>`.

    Args: key: the config section, for messages. Raises ConfigError.
    """
    return _task(_TASKS, source, split, key)(split, seed)


def synthetic_pairs(source: str, split: str, seed: int, key: str) -> Sequence[Pair]:
    """Like `synthetic_rows`, for pairs of responses."""
    return _task(_PAIRS, source, split, key)(split, seed)


def _task[T](
    tasks: Mapping[str, Callable[[str, int], T]], source: str, split: str, key: str
) -> Callable[[str, int], T]:
    task = source.removeprefix(PREFIX)
    if task not in tasks:
        raise ConfigError(
            f"{key}.source={source}: no such task; there is "
            f"{', '.join(PREFIX + name for name in sorted(tasks))}"
        )
    if split not in ("train", "eval"):
        raise ConfigError(f"{key}.split={split}: {source} has train and eval")
    return tasks[task]
