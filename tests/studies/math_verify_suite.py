"""`python tests/studies/math_verify_suite.py FOLDER`: the verifier on the pairs of Math-Verify's
own tests.

FOLDER is `tests` of its sources, as `pip download --no-deps --no-binary :all: math-verify==0.9.0`
gets them. Nothing of it is run, except the literals of its parameters. A pair is (reference,
response, whether it is right); references are read as those of a data set.
"""

from __future__ import annotations

import ast
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megarl.rewards.extract import clean, marked_answer, plain
from megarl.rewards.verify import math_reward


class Pair(NamedTuple):
    location: str
    reference: str
    response: str
    right: bool


def pairs(folder: Path) -> Iterator[Pair]:
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
                yield from _of_parameters(path.name, node)


def _of_parameters(name: str, parametrize: ast.Call) -> Iterator[Pair]:
    names = [part.strip() for part in ast.literal_eval(parametrize.args[0]).split(",")]
    cases = parametrize.args[1]
    if not {"gold", "pred"} <= {*names} or not isinstance(cases, ast.List):
        return
    for case in cases.elts:
        assert isinstance(case, ast.Tuple)
        values = dict(zip(names, map(_literal, case.elts), strict=True))
        right = values.get("expected", values.get("result"))
        yield Pair(f"{name}:{case.lineno}", str(values["gold"]), str(values["pred"]), bool(right))


def _literal(node: ast.expr) -> str | int:
    """A literal. The one f-string formats the root of 17 or braces."""
    if isinstance(node, ast.JoinedStr):
        return (
            f"{math.sqrt(17):.15f}"
            if "math" in ast.unparse(node)
            else "".join(ast.literal_eval(part) for part in node.values)
        )
    return ast.literal_eval(node)


def main(folder: Path) -> None:
    logging.disable(logging.CRITICAL)  # math-verify logs what it cannot parse
    all_pairs = list(pairs(folder))
    mistaken = [pair for pair in all_pairs if _score(pair) != pair.right]
    for right, title in (True, "right pairs accepted"), (False, "wrong pairs refused"):
        count = sum(pair.right == right for pair in all_pairs)
        good = count - sum(pair.right == right for pair in mistaken)
        print(f"{title}: {good} of {count}, {100 * good / count:.1f} %")
    for pair in mistaken:
        print(
            f"{pair.location} ({'right' if pair.right else 'wrong'}): {pair.reference[-80:]!r} | "
            f"{pair.response[-80:]!r}"
        )


def _score(pair: Pair) -> bool:
    reference = plain(pair.reference)
    marked = marked_answer(reference)
    return math_reward(pair.response, clean(reference) if marked is None else marked) == 1.0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
