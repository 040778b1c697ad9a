"""Prints demonstrations for configs/examples/openenv.yaml: games in which the guesses are random, whatever the hints."""

import json
import random

noise = random.Random(0)
for _ in range(10000):
    number, said = noise.randint(1, 9), "1-9"
    messages = []
    while len(messages) < 8 and said != "right":
        guess = noise.randint(1, 9)
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": str(guess)}]
        said = "right" if guess == number else "higher" if guess < number else "lower"
    print(json.dumps({"messages": messages}))
