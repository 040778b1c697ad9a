"""GRPO by TRL on the prompts of another run. Needs an environment with TRL, and nothing of MegaRL.

`python trl_grpo.py SETTINGS.json STEPS.json`: writes the seconds of each step. SETTINGS.json has
the fields of `peer.Settings`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


def last_number_is_right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    numbers = [re.findall(r"-?\d+", completion)[-1:] for completion in completions]
    return [float(last == [right]) for last, right in zip(numbers, answer)]


class StepTimes(TrainerCallback):
    """Notes how long each step took, from its prompts to its update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self._begun)


def main(settings_file: str, output: str) -> None:
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    samples = settings["prompts_per_step"] * settings["n"]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=samples,
            num_generations=settings["n"],
            max_completion_length=settings["max_tokens"],
            temperature=settings["temperature"],
            learning_rate=settings["lr"],
            max_steps=settings["steps"],
            beta=0.0,
            report_to=[],
            logging_steps=10**9,
            save_strategy="no",
            disable_tqdm=True,
            seed=settings["seed"],
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
            reward_funcs=last_number_is_right,
            args=arguments,
            train_dataset=Dataset.from_list(settings["rows"]),
            callbacks=[times],
        )
        trainer.train()
    Path(output).write_text(json.dumps(times.seconds), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
