"""Prints rows for configs/examples/sources.yaml: short programs to write, with tests.

The task "7*x+2:" wants a program that reads x and prints 7*x+2. Six of ten demonstrations forget
the second number.
"""

import json
import random

noise = random.Random(0)
for _ in range(10000):
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
    print(json.dumps(row))
