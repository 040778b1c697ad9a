"""A game for configs/examples/sources.yaml: find a hidden number from 1 to 9. `ask` is its tool.
As a program, the file writes games.jsonl and held_out_games.jsonl, with demonstrations, to the
folder that its argument names.

The prompt "4711?" names a game. The policy asks "<4711 5>" and reads "lower;", "higher;" or
"right;", at most four times, and answers with the number. Two of ten demonstrations ask for the
middle of what is left; the others ask at random.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path


def hidden(game: str) -> int:
    return random.Random(game).randint(1, 9)


def ask(text: str) -> str:
    game, _, guess = text.partition(" ")
    if not guess.isdecimal():
        raise ValueError("ask for a number")
    number = hidden(game)
    if int(guess) == number:
        return "right"
    return "higher" if number > int(guess) else "lower"


def demonstration(game: str, noise: random.Random) -> list[str]:
    """Texts of the policy and of the tool, in turn."""
    clever = noise.random() < 0.2
    low = 1
    high = 9
    texts = []
    for _ in range(4):
        guess = (low + high) // 2 if clever else noise.randint(1, 9)
        reply = ask(f"{game} {guess}")
        texts += [f"<{game} {guess}>", f"{reply};"]
        if reply == "right":
            break
        if reply == "higher":
            low = guess + 1
        else:
            high = guess - 1
    return [*texts, str(guess)]


def rows(count: int, last_digits: str) -> Iterator[dict[str, object]]:
    noise = random.Random(0)
    for _ in range(count):
        game = f"{noise.randint(100, 999)}{noise.choice(last_digits)}"
        yield {
            "question": f"{game}?",
            "answer": str(hidden(game)),
            "demonstration": demonstration(game, noise),
        }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in (("games", rows(10000, "123456789")), ("held_out_games", rows(100, "0"))):
        lines = "".join(f"{json.dumps(row)}\n" for row in split)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
