"""A synchronous loop with MegaRL's parts but without its runtime: sample, score, train, load the
weights from disk, and again.

    plain_loop.py CONFIG OUT_DIR [key=value …]

One process trains; one engine samples, a prompt at a time. Writes OUT_DIR/steps.jsonl, with the
responses, losses and gradient norms of each step, and the last weights to OUT_DIR/hf.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from batches import batch_of
from msgspec.structs import replace
from reward_functions import by_chance

from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.config.load import load_config
from megarl.data.prompts import train_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.generator.client import EngineClient
from megarl.generator.completions import Completion
from megarl.generator.seeds import Seeds, seed_of
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.messaging.rendezvous import free_ports
from megarl.plan.resolve import resolve
from megarl.rollouts.rollout import train_sampling
from megarl.trainer import cpu_support


async def main(config_path: str, out: Path, overrides: list[str]) -> None:
    plan = resolve(load_config(config_path, overrides), "train")
    config = plan.config
    tokenizer = load_tokenizer(plan.config.model)
    prompts = train_prompts(config, tokenizer, plan.spec)
    trainer, batch_steps = make_trainer(plan)
    [port] = free_ports(1)
    keys = EngineKeys.generate()
    settings = EngineSettings(
        config.model.path,
        config.model.dtype,
        port,
        context_length=plan.spec.max_position_embeddings,
        max_running_requests=64,
        deterministic=config.deterministic,
    )
    argv, environment = server_command(settings, keys)
    with open(out / "engine.log", "wb") as log:
        server = subprocess.Popen(argv, env={**os.environ, **environment}, stdout=log, stderr=log)
    engine = EngineClient(f"http://127.0.0.1:{port}", keys.api, keys.admin)
    try:
        await engine.wait_ready(120, out / "engine.log")
        steps = (out / "steps.jsonl").open("w")
        for step in range(config.max_steps):
            trainer.export_hf(out / "hf", config.model.path)
            await engine.call("/update_weights_from_disk", {"model_path": str(out / "hf")}, 60)
            per_step = config.rollout.prompts_per_step
            groups = []
            for ordinal in range(step * per_step, (step + 1) * per_step):
                prompt = prompts[ordinal]
                sampling = train_sampling(config, tokenizer)
                seed = Seeds(seed_of(config.seed, ordinal)).next(prompt.token_ids)
                sampling = replace(sampling, seed=seed)
                completions = await engine.generate(prompt.token_ids, sampling, config.rollout.n)
                groups.append(
                    Group(
                        prompt,
                        [sample(prompt, completion, tokenizer, step) for completion in completions],
                    )
                )
            [result] = batch_steps.train(batch_of(groups, step))
            steps.write(
                json.dumps(
                    {
                        "loss": result.loss,
                        "grad_norm": result.grad_norm,
                        "groups": texts_and_rewards(groups),
                    }
                )
                + "\n"
            )
        steps.close()
        trainer.export_hf(out / "hf", config.model.path)
    finally:
        await engine.close()
        server.kill()
        server.wait()


def make_trainer(plan: Any) -> tuple[Any, Any]:
    from megarl.algorithms.registry import make_algorithm
    from megarl.executors.batch_steps import BatchSteps
    from megarl.executors.policy import make_policy, steps_of_run

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = make_policy(plan, steps_of_run(plan))
    trainer.load_hf(plan.weights_path)
    return trainer, BatchSteps(trainer, make_algorithm(plan.config.algorithm), plan.config)


def sample(prompt: Prompt, completion: Completion, tokenizer: Any, step: int) -> Sample:
    text = tokenizer.decode(completion.token_ids)
    return Sample(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=[step] * len(completion.token_ids),
        text=text,
        reward=by_chance(text, prompt.text),
        finish_reason=completion.finish_reason,
    )


def texts_and_rewards(groups: list[Group]) -> list[list[tuple[str, float]]]:
    return [[(response.text, response.reward) for response in group.samples] for group in groups]


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    cpu_support.install()
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
    os._exit(0)  # without waiting for gloo's threads
