"""Writes rows for configs/examples/sources.yaml to the file that its argument names: short programs
to write, with tests.

The task "7*x+2:" wants a program that reads x and prints 7*x+2. Six of ten demonstrations forget
the second number.
"""

import json
import random
import sys
from pathlib import Path


def rows(count: int) -> list[dict[str, str]]:
    noise = random.Random(0)
    result = []
    for _ in range(count):
        factor = noise.randint(2, 9)
        term = noise.randint(1, 9)
        written = f"{factor}*x" if noise.random() < 0.6 else f"{factor}*x+{term}"
        numbers = noise.sample(range(10, 100), 3)
        tests = {
            "inputs": [f"{x}\n" for x in numbers],
            "outputs": [f"{factor * x + term}\n" for x in numbers],
        }
        row = {
            "question": f"{factor}*x+{term}:",
            "answer": json.dumps(tests),
            "demonstration": f"```\nx=int(input())\nprint({written})\n```",
        }
        result.append(row)
    return result


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows(10000)), encoding="utf-8")
