"""Tokens drawn from a part of the vocabulary.

In training and scoring, the trainer's log-probs are over the same part. So at equal weights the
ratios to the engine are 1.
"""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from batches import batch_of
from sglang_engine import make_checkpoint, start_engine
from trainer_cases import LAYOUTS, MODELS, save_model
from trainer_processes import saved, spawn
from trainer_reference import assert_same_gradients, drawn_reference, hf_gradients

from megarl.algorithms.batches import to_train_sequences
from megarl.base.geometry import TrainerTopology
from megarl.base.kept_sets import MOST_KEPT
from megarl.base.rollout_types import Group, Prompt, Sample, TrainSequence
from megarl.config.schema import ModelConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.generator.completions import Sampling
from megarl.generator.fleet import Fleet
from megarl.rollouts.environments.base import Transcript

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CASES = [
    ("untied", layout) for layout in ("single", "tp2_sp_recompute", "pp2", "dp2_zero1", "cp2")
] + [("tied", "tp2")]
TEMPERATURE = 0.8
VOCABULARY = 6000
SAMPLINGS = {
    "top_p": Sampling(40, TEMPERATURE, top_p=0.9, ignore_eos=True),
    "top_k": Sampling(40, TEMPERATURE, top_k=20, ignore_eos=True),
    "min_p": Sampling(40, TEMPERATURE, min_p=0.05, ignore_eos=True),
    # this would keep more tokens than are recorded
    "bounded": Sampling(40, TEMPERATURE, top_p=0.99, ignore_eos=True),
}
PROMPTS = [[1, *range(30 + 20 * i, 37 + 21 * i)] for i in range(3)]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[TrainSequence]]]:
    """The engine's checkpoint and its samples: responses of two turns, each turn in several
    requests, as after cuts.
    """
    folder = tmp_path_factory.mktemp("drawn")
    checkpoint = make_checkpoint(
        folder / "model", 3, torch.float32, tied=False, vocab_size=VOCABULARY
    )
    engines = start_engine(checkpoint, "float32", 1, folder / "engine.log")
    engine = next(engines)
    tokenizer = load_tokenizer(ModelConfig(path="configs/models/tiny-llama"))

    async def sample(fleet: Fleet, ordinal: int, sampling: Sampling) -> Sample:
        transcript = Transcript(
            Prompt(ordinal, PROMPTS[ordinal], "", ""), tokenizer, sampling.max_tokens
        )
        [first] = await fleet.generate(
            transcript.token_ids, msgspec.structs.replace(sampling, max_tokens=17), 1
        )
        transcript.add_policy(first)
        transcript.add_environment([7, 8, 9])
        [completion] = await fleet.generate(transcript.token_ids, transcript.turn(sampling), 1)
        transcript.add_policy(completion)
        return transcript.sample(1.0)

    async def body() -> dict[str, list[TrainSequence]]:
        client = engine.client(VOCABULARY)
        completions = {}
        await client.wait_ready(120, engine.log, engine.died)
        fleet = Fleet([client], "resume", chunk_tokens=7)
        for name, sampling in SAMPLINGS.items():
            samples = [
                await asyncio.gather(*(sample(fleet, ordinal, sampling) for _ in range(2)))
                for ordinal in range(len(PROMPTS))
            ]
            batch = batch_of(
                [
                    Group(Prompt(i, ids, "", ""), group)
                    for i, (ids, group) in enumerate(zip(PROMPTS, samples))
                ]
            )
            completions[name] = [
                *to_train_sequences(batch, torch.ones(len(PROMPTS), 2), skip_zero=True).values()
            ]
        await client.close()
        return completions

    try:
        return checkpoint, asyncio.run(body())
    finally:
        engines.close()


@pytest.fixture(scope="module")
def runs(
    models: dict[str, Path],
    drawn: tuple[Path, dict[str, list[TrainSequence]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("runs")
    checkpoint, sequences = drawn

    def ratios(name: str) -> dict[str, Any]:
        (out / f"{name}.pickle").write_bytes(pickle.dumps(sequences[name]))
        arguments = {
            "model": str(checkpoint),
            "sequences": str(out / f"{name}.pickle"),
            "temperature": TEMPERATURE,
        }
        return {"run": "ratios", "name": f"ratios.{name}", "topology": {"tp": 2}, **arguments}

    for world in (1, 2):
        cases = [
            (model, layout, *LAYOUTS[layout][1:])
            for model, layout in CASES
            if LAYOUTS[layout][0] == world
        ]
        spawn(world, out, [
            *({"run": "drawn", "name": f"{model}.{layout}", "model": str(models[model]),
            "topology": topology, "trainer": settings}
              for model, layout, topology, settings in cases),
            *(map(ratios, SAMPLINGS) if world == 2 else []),
        ])  # fmt: skip
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(f"hf_{name}") for name, _ in CASES}
    for name, folder in folders.items():
        save_model(name, folder)
    return folders


@pytest.mark.parametrize("name", SAMPLINGS)
def test_ratios_at_equal_weights_are_1_over_the_sets(runs: Path, drawn: Any, name: str) -> None:
    """Over the whole vocabulary they are not."""
    sequences = drawn[1][name]
    trained, mu = (
        np.concatenate([getattr(sequence, field) for sequence in sequences])
        for field in ("loss_mask", "mu_logprobs")
    )
    assert trained.sum() == len(sequences) * (SAMPLINGS[name].max_tokens - 3)
    counts = np.concatenate([sequence.kept.counts for sequence in sequences])
    largest = {"top_k": 20, "bounded": MOST_KEPT}.get(name)
    assert set(counts) == {0, largest} if largest else 1000 < counts.max() < MOST_KEPT
    for rank in saved(runs, f"ratios.{name}"):
        over_sets, over_all = (np.exp(np.concatenate(rows)[trained] - mu[trained]) for rows in rank)
        assert np.abs(over_sets - 1).max() < 1e-5
        assert over_all.max() < 1 + 1e-5 and over_all.mean() < 0.97, (
            "the share of the probability that was kept"
        )


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_log_probs_entropy_and_gradients_are_over_the_sets(
    models: dict[str, Path], runs: Path, model: str, layout: str
) -> None:
    """For the policy, the reference model, and a step of several microbatches, against autograd in
    float64.
    """
    expected = drawn_reference(models[model])
    ranks = saved(runs, f"{model}.{layout}")
    assert MODELS[model].vocab_size in {50, 140}, (
        "of tensor ranks, the last holds few tokens or none"
    )
    for rank in ranks:
        for scored in rank["logprobs"].values():
            for row, want in zip(scored, expected["logprobs"], strict=True):
                assert row == pytest.approx(want, abs=1e-5)
        assert rank["step"]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert rank["step"]["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)
    gradients = hf_gradients(
        models[model],
        TrainerTopology(**LAYOUTS[layout][1]),
        [rank["step"]["grads"] for rank in ranks],
    )
    assert_same_gradients(gradients, expected["grads"])
