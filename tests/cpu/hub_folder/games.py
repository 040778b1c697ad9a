"""An environment that fails in the way its settings choose."""

import asyncio
import os
import subprocess
import time

import verifiers as vf

ROWS = [
    {"prompt": [{"role": "user", "content": text}], "answer": text, "example_id": number}
    for number, text in enumerate("ab")
]


class Game(vf.Environment):
    def __init__(self, kind, rubric):
        super().__init__(rubric, ROWS)
        self.kind = kind
        self.requires_group_rollouts = kind == "compares"

    async def rollout(self, row, client, model, sampling_args):
        print("environments may print")
        if self.kind == "mute":
            return {"said": "", "answer": ""}
        answer = await client.chat.completions.create(model=model, messages=row["prompt"])
        content = answer.choices[0].message.content
        if self.kind == "raises":
            raise RuntimeError("the board is broken")
        if self.kind == "leaves":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            time.sleep(1000)
        if self.kind == "dies":
            os._exit(3)
        if self.kind == "halves":
            raise RuntimeError("half of a character: \ud800")
        if self.kind == "cancels":
            raise asyncio.CancelledError
        if self.kind == "times out":
            raise TimeoutError("no answer of the judge")
        if self.kind == "late":
            await asyncio.sleep(1000)
        return {
            "said": content,
            "answer": row["answer"],
            "error": ValueError("no such move") if self.kind == "error" else None,
        }


class Array:
    def item(self):
        raise ValueError("can only convert an array of size 1 to a Python scalar")


METRICS = {
    "array": {"tokens": Array()},
    "keys": {"tokens": {(1, 2): 3}},
    "large": {"tokens": "x" * 3_000_000},
    "many": {f"m{number}": 1.0 for number in range(40)},
    "own reward": {"reward": 0.5},
}


class Measured(vf.Rubric):
    def __init__(self, kind, function):
        super().__init__(function)
        self.kind = kind

    async def score_rollout(self, state):
        await super().score_rollout(state)
        state["metrics"] = METRICS.get(self.kind, state["metrics"])

    async def cleanup(self, state):
        if self.kind == "cleans":
            await asyncio.sleep(2)


def load_environment(kind):
    if kind == "starts":
        subprocess.Popen(["sleep", "1009"])

    def reward(state):
        if kind == "hangs":
            time.sleep(1000)
        if kind == "function":
            raise KeyError("rubric")
        return float("nan") if kind == "nan" else state["said"] == state["answer"]

    return Game(kind, Measured(kind, reward))


def not_an_environment():
    return 7
