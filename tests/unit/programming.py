"""Made-up problems with tests, in LiveCodeBench's own form, and programs that solve them or nearly
do.
"""

from __future__ import annotations

import base64
import json
import pickle
import random
import textwrap
import zlib


def packed(cases: object) -> str:
    text = cases if isinstance(cases, str) else json.dumps(cases)
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


def row(
    cases: list[tuple[str, str]], function: str | None = None, date: str = "2024-08-03T00:00:00"
) -> dict:
    """The first test is public, the others are not."""
    kind = "functional" if function else "stdin"
    tests = [{"input": stdin, "output": stdout, "testtype": kind} for stdin, stdout in cases]
    starter_code = (
        f"class Solution:\n    def {function}(self, a: int, b: List[int]) -> int:\n        "
    )
    return {
        "question_title": "Sum",
        "question_content": "Print the sum.",
        "platform": "leetcode" if function else "atcoder",
        "question_id": "1",
        "contest_id": "abc1",
        "contest_date": date,
        "difficulty": "easy",
        "starter_code": starter_code if function else "",
        "public_test_cases": json.dumps(tests[:1]),
        "private_test_cases": packed(tests[1:]),
        "metadata": json.dumps({"func_name": function} if function else {}),
    }


def fenced(program: str) -> str:
    return (
        "First an idea:\n```\nprint(0)\n```\nSo this is the "
        f"program.\n```python\n{program}\n```\nI hope that it helps."
    )


def pairs() -> list[tuple[dict, str, bool]]:
    """300 triples: a problem, a response, and whether it is right.

    Wrong programs are slightly off on at least one test.
    """
    rng = random.Random("code/7")
    graded_responses = []
    for number in range(150):
        k = rng.randint(2, 9)
        lists = [[rng.randint(-99, 99) for _ in range(rng.randint(2, 6))] for _ in range(3)]
        lists[1] = [100 + k, -k, *lists[1]]  # its largest element is first, and its sum is not 0
        lists[1] += [1] * (sum(lists[1]) == 0)
        record, right, wrong = (_sums, _quarters, _function)[number % 3](rng, k, lists)
        graded_responses += [(record, fenced(right), True), (record, fenced(wrong), False)]
    return graded_responses


def _sums(rng: random.Random, k: int, lists: list[list[int]]) -> tuple[dict, str, str]:
    read = rng.choice([
        "a = list(map(int, open(0).read().split()))[1:]",
        "import sys\na = [int(x) for x in sys.stdin.readlines()[1].split()]",
        "n = int(input())\na = list(map(int, input().split()))",
    ])  # fmt: skip
    program = f"{read}\nprint(sum(a) * {k})\nprint(max(a))"
    if rng.random() < 0.5:
        program = f"def main():\n{textwrap.indent(program, '    ')}\nif __name__ == '__main__':\n    main()"
    old, new = rng.choice([("max(a)", "a[-1]"), ("max(a)", "min(a)"), (f"* {k}", f"* {k + 1}")])
    cases = [(f"{len(a)}\n{' '.join(map(str, a))}\n", f"{sum(a) * k}\n{max(a)}\n") for a in lists]
    return row(cases), program, program.replace(old, new)


def _quarters(rng: random.Random, k: int, lists: list[list[int]]) -> tuple[dict, str, str]:
    wrong = rng.choice(
        [f"print(a / 4, {k}, sep='\\n')", f"print(a // 4 + .3, {k})", "print('NaN 1')"]
    )
    cases = [("\n".join(map(str, a[:2])), f"{a[0] / 4:.3f} {k}") for a in lists]
    return row(cases), f"a = int(input())\nprint(a / 4, {k})", f"a = int(input())\n{wrong}"


def _function(rng: random.Random, k: int, lists: list[list[int]]) -> tuple[dict, str, str]:
    body = rng.choice([
        "return [x * a for x in b if x > 0]",
        "return tuple(x * a for x in b if x > 0)",
        "return list(map(a.__mul__, filter(lambda x: x > 0, b)))",
    ])  # fmt: skip
    program = (
        f"class Solution:\n    def f(self, a: int, b: List[int]) -> List[int]:\n        {body}"
    )
    cases = [(f"{k}\n{json.dumps(a)}", json.dumps([x * k for x in a if x > 0])) for a in lists]
    return row(cases, "f"), program, program.replace("x > 0", "x > -9999")
