"""A training loop in one process, in which all samples have a fixed age in updates.

The trainer, its losses and meters are MegaRL's. Transformers samples, from weights of an earlier
step that have been rounded as an engine's would be. No scheduler decides anything, so runs that
differ in one setting see the same prompts and noise.
"""

from __future__ import annotations

import sys
import tempfile
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.data.tokenizer import Tokenizer
from megarl.kernels.quantise import quantise
from megarl.kernels.quantise_rules import BLOCK
from megarl.observe.metrics import Row
from megarl.plan.resolve import RunPlan

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

GROUP = 32  # inputs that share a scale in 4 bits, as in formats such as Q4_0
LARGEST_CODE = 7  # codes from -7 to 7


def in_fp8_blocks(weight: Tensor) -> Tensor:
    """[out, in] a weight as generator.quantization=fp8_block keeps it."""
    codes, scales = quantise(weight, BLOCK, "a weight")
    rows, columns = weight.shape
    tiles = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * tiles[:rows, :columns]


def in_4_bits(weight: Tensor) -> Tensor:
    """[out, in] a weight in int4 with a scale for GROUP inputs; `in` is a multiple of GROUP."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST_CODE
    return ((groups / scales).round() * scales).flatten(-2)


# How an engine keeps its linear layers, and its dtype
ENGINES = {
    "exact": (lambda weight: weight, torch.float32),
    "fp8": (in_fp8_blocks, torch.bfloat16),
    "int4": (in_4_bits, torch.bfloat16),
}


def run_loop(plan: RunPlan, lag: int, engine: str, judge: Any, output: Path) -> list[Row]:
    """Makes the run's steps and returns their metrics; `output` gets the last weights.

    Step s trains on samples of the weights of step max(0, s - lag). `judge` scores a response to a
    prompt.
    """
    from megarl.algorithms.registry import make_algorithm
    from megarl.data.prompts import train_prompts
    from megarl.data.tokenizer import load_tokenizer
    from megarl.executors.batch_steps import BatchSteps, step_metrics
    from megarl.executors.policy import make_policy, steps_of_run

    from batches import batch_of  # isort: skip

    config = plan.config
    tokenizer = load_tokenizer(config.model)
    prompts = train_prompts(config, tokenizer, plan.spec)
    trainer = make_policy(plan, steps_of_run(plan))
    trainer.load_hf(plan.weights_path)
    algorithm = make_algorithm(config.algorithm)
    steps = BatchSteps(trainer, algorithm, config)
    sampler = Sampler(config.model.path, engine, tokenizer)
    versions: deque[Mapping[str, Tensor]] = deque(maxlen=lag + 1)
    rows = []
    for step in range(config.max_steps):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            trainer.export_hf(folder, config.model.path)
            versions.append(load_file(f"{folder}/model.safetensors"))
        sampler.load(versions[0])
        age = len(versions) - 1
        first = step * config.rollout.prompts_per_step
        batch_prompts = [prompts[first + place] for place in range(config.rollout.prompts_per_step)]
        noise = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        groups = sampler.groups(
            batch_prompts, config.rollout.n, config.rollout.max_tokens, noise, step - age, judge
        )
        results = steps.train(batch_of(groups, step))
        rewards = [sample.reward for group in groups for sample in group.samples]
        rows.append(
            {
                "step": step,
                "reward/mean": sum(rewards) / len(rewards),
                "staleness/mean": age,
                **step_metrics(results, algorithm),
            }
        )
    trainer.export_hf(str(output), config.model.path)
    return rows


class Sampler:
    """Transformers' model with an engine's weights."""

    def __init__(self, model_path: str, engine: str, tokenizer: Tokenizer):
        from transformers import AutoConfig, AutoModelForCausalLM

        self._rounding, dtype = ENGINES[engine]
        config = AutoConfig.from_pretrained(model_path)
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._tokenizer = tokenizer

    def load(self, weights: Mapping[str, Tensor]) -> None:
        rounded = {}
        for name, weight in weights.items():
            is_linear = name.endswith("_proj.weight")
            rounded[name] = self._rounding(weight.float()) if is_linear else weight
        self.model.load_state_dict(rounded)

    def groups(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        max_tokens: int,
        noise: torch.Generator,
        version: int,
        judge: Any,
    ) -> list[Group]:
        """`samples` responses to each prompt, at temperature 1."""
        ids = [prompt.token_ids for prompt in prompts for _ in range(samples)]
        responses = iter(self._sample(ids, max_tokens, noise))
        groups = []
        for prompt in prompts:
            group = []
            for _ in range(samples):
                tokens, logprobs = next(responses)
                ended = tokens[-1] in self._tokenizer.eos_ids
                text = self._tokenizer.decode(tokens[:-1] if ended else tokens)
                group.append(
                    Sample(
                        token_ids=array("i", tokens),
                        logprobs=array("f", logprobs),
                        versions=array("i", [version] * len(tokens)),
                        text=text,
                        reward=judge(text, prompt),
                        finish_reason="stop" if ended else "length",
                    )
                )
            groups.append(Group(prompt, group))
        return groups

    @torch.no_grad()
    def _sample(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, noise: torch.Generator
    ) -> list[tuple[list[int], list[float]]]:
        """The tokens and log-probs of each response; prompts of equal length go together."""
        responses: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        for length in sorted(set(map(len, prompts))):
            places = [place for place, ids in enumerate(prompts) if len(ids) == length]
            ids = torch.tensor([list(prompts[place]) for place in places])
            cache = None
            going = torch.ones(len(places), dtype=torch.bool)
            ends = torch.tensor(list(self._tokenizer.eos_ids))
            for _ in range(max_tokens):
                output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logprobs = output.logits[:, -1].float().log_softmax(-1)
                ids = torch.multinomial(logprobs.exp(), 1, generator=noise)
                drawn = logprobs.gather(1, ids)[:, 0].tolist()
                for row, place in enumerate(places):
                    if going[row]:
                        responses[place][0].append(int(ids[row]))
                        responses[place][1].append(drawn[row])
                going &= ~torch.isin(ids[:, 0], ends)
                if not going.any():
                    break
        return responses
