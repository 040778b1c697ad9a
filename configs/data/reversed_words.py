"""Prints demonstrations for configs/examples/verifiers.yaml: words spelled backward.

Three of ten are right; in the others two letters are exchanged.
"""

import json
import random

noise = random.Random(0)
for _ in range(10000):
    word = "".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=3))
    said = list(reversed(word))
    if noise.random() < 0.7:
        place = noise.randrange(len(said) - 1)
        said[place], said[place + 1] = said[place + 1], said[place]
    messages = [
        {"role": "user", "content": f"Spell this word backward (example: sun -> nus): {word}"},
        {"role": "assistant", "content": f"<answer>{''.join(said)}</answer>"},
    ]
    print(json.dumps({"messages": messages}))
