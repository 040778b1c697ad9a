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

summary: see megarl.data.summaries.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.config.errors import ConfigError
from megarl.data.permutation import permute
from megarl.data.rows import Pair, Row, Rows
from megarl.data.summaries import Summaries, SummaryPairs

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
