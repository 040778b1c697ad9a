"""Prints demonstrations for configs/examples/openenv.yaml.

Two of ten games guess the middle of the remaining range. The others guess at random, and ignore the
hints.
"""

import json
import random

noise = random.Random(0)
for _ in range(10000):
    number, said, low, high, clever = noise.randint(1, 9), "1-9", 1, 9, noise.random() < 0.2
    messages = []
    while len(messages) < 8 and said != "right":
        guess = (low + high) // 2 if clever else noise.randint(1, 9)
        messages += [
            {"role": "user", "content": said},
            {"role": "assistant", "content": str(guess)},
        ]
        said = "right" if guess == number else "higher" if guess < number else "lower"
        low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
    print(json.dumps({"messages": messages}))
