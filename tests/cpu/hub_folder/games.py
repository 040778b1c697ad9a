"""An environment that fails as it is told to."""

import asyncio
import os
import time

import verifiers as vf

ROWS = [{"prompt": [{"role": "user", "content": text}], "answer": text, "example_id": number} for number, text in enumerate("ab")]


class Game(vf.Environment):
    def __init__(self, kind, rubric):
        super().__init__(rubric, ROWS)
        self.kind, self.requires_group_rollouts = kind, kind == "compares"

    async def rollout(self, row, client, model, sampling_args):
        print("environments may print")
        if self.kind == "mute":
            return {"said": "", "answer": ""}
        answer = await client.chat.completions.create(model=model, messages=row["prompt"])
        said = answer.choices[0].message.content
        if self.kind == "raises":
            raise RuntimeError("the board is broken")
        if self.kind == "dies":
            os._exit(3)
        if self.kind == "late":
            await asyncio.sleep(1000)
        return {"said": said, "answer": row["answer"], "error": ValueError("no such move") if self.kind == "error" else None}


def load_environment(kind):
    def reward(state):
        if kind == "hangs":
            time.sleep(1000)
        if kind == "function":
            raise KeyError("rubric")
        return float("nan") if kind == "nan" else state["said"] == state["answer"]

    return Game(kind, vf.Rubric(reward))


def not_an_environment():
    return 7
