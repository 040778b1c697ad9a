"""The parts of the difference between the trainer's and an engine's log-probs, for a mixture of
experts at equal weights.

    pytest -m long -s tests/cpu/test_agreement_parts.py

prints the table of docs/asynchrony.md: a real engine samples, and a real trainer scores the same
tokens.
"""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8_reference import Quantised
from router_weights import WideFormat
from safetensors.torch import load_file, save_file
from sglang_engine import VOCABULARY, make_checkpoint, start_engine
from trainer_processes import saved, spawn

from megarl.base.rollout_types import TrainSequence
from megarl.generator.client import EngineClient
from megarl.generator.completions import Completion, Sampling
from megarl.generator.fleet import Fleet
from megarl.models.registry import load_spec

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
}  # fmt: skip
PROMPTS = 24
TOKENS = 60
# name -> (engine's weights, engine's dtype, trainer's weights, trainer's dtype)
ROWS = {
    "float32, float32": ("plain", "float32", "plain", "float32"),
    "bf16, bf16": ("plain", "bfloat16", "plain", "bfloat16"),
    "bf16, float32": ("plain", "bfloat16", "plain", "float32"),
    "fp8_block, bf16": ("fp8", "bfloat16", "plain", "bfloat16"),
    "fp8_block, bf16 with the weights that the codes stand for": (
        "fp8",
        "bfloat16",
        "dequantised",
        "bfloat16",
    ),
    "bf16, bf16, experts that add nothing": ("silent", "bfloat16", "silent", "bfloat16"),
}
WAYS = ("own", "ids", "ids and weights")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    plain, silent = (
        make_checkpoint(folder / name, 3, torch.bfloat16, False, "qwen3_moe", **SHAPE)
        for name in ("plain", "silent")
    )
    tensors = load_file(silent / "model.safetensors")
    experts = {
        name: torch.zeros_like(values)
        for name, values in tensors.items()
        if name.endswith("down_proj.weight")
    }
    assert experts
    save_file(tensors | experts, silent / "model.safetensors", metadata={"format": "pt"})
    quantised = Quantised.load(plain, "fp8_block")
    fp8 = quantised.save(plain, folder / "fp8")
    dequantised = quantised.save_dequantised(plain, folder / "dequantised")
    return {"plain": plain, "silent": silent, "fp8": fp8, "dequantised": dequantised}


def engine_samples(model: Path, dtype: str, log: Path) -> list[tuple[TrainSequence, np.ndarray]]:
    """An engine's samples with their experts, and the experts' weights [positions, layers, experts
    per token].
    """
    wide = WideFormat.of(load_spec(model))
    engines = start_engine(
        model, dtype, 1, log, entry="router_weights:main", enable_return_routed_experts=True
    )
    engine = next(engines)

    async def body() -> list[tuple[list[int], Completion]]:
        client = EngineClient(
            engine.url,
            engine.keys.api,
            engine.keys.admin,
            request_s=120,
            routing=wide,
            vocab_size=VOCABULARY,
        )
        await client.wait_ready(200, log, engine.died)
        prompts = [[1, *range(20 + 9 * i, 32 + 9 * i)] for i in range(PROMPTS)]
        fleet = Fleet([client], "resume")
        answers = await asyncio.gather(
            *(
                fleet.generate(prompt, Sampling(TOKENS, 1.0, ignore_eos=True), 1)
                for prompt in prompts
            )
        )
        await client.close()
        return [
            (prompt, completion) for prompt, (completion,) in zip(prompts, answers, strict=True)
        ]

    try:
        sequences = []
        for prompt, completion in asyncio.run(body()):
            ids, weights = wide.parts(completion.routing)
            tokens = np.array([*prompt, *completion.token_ids], np.int32)
            response_mask = np.arange(len(tokens)) >= len(prompt)
            mu = np.concatenate([np.zeros(len(prompt)), completion.logprobs]).astype(np.float32)
            sequences.append(
                (
                    TrainSequence(
                        tokens, response_mask, mu, np.zeros(len(tokens), np.float32), ids
                    ),
                    weights,
                )
            )
        return sequences
    finally:
        engines.close()


@pytest.fixture(scope="module")
def differences(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By row: |difference| of every token for each of WAYS; the share of replaced choices; the mean
    difference of the weights.
    """
    out = tmp_path_factory.mktemp("parts")
    engines = {(weights, dtype) for weights, dtype, *_ in ROWS.values()}
    sequences = {
        engine: engine_samples(models[engine[0]], engine[1], out / f"{'.'.join(engine)}.log")
        for engine in sorted(engines)
    }
    for engine, engine_sequences in sequences.items():
        (out / f"{'.'.join(engine)}.pickle").write_bytes(pickle.dumps(engine_sequences))
    spawn(1, out, [
        {"run": "parts", "name": f"row{number}", "model": str(models[weights]), "dtype": dtype,
        "topology": {},
         "trainer": {"routing_replay": True}, "sequences": str(out / f"{'.'.join(engine)}.pickle")}
        for number, (*engine, weights, dtype) in enumerate(ROWS.values())
    ])  # fmt: skip
    differences_by_part = {}
    for number, (name, engine) in enumerate((name, (row[0], row[1])) for name, row in ROWS.items()):
        (rank,) = saved(out, f"row{number}")
        trained, mu = (
            np.concatenate([getattr(sequence, field) for sequence, _ in sequences[engine]])
            for field in ("loss_mask", "mu_logprobs")
        )
        differences_by_part[name] = {
            way: np.abs(np.concatenate(rank[way]) - mu)[trained] for way in WAYS
        }
        differences_by_part[name] |= {key: rank[key] for key in ("replaced", "weights")}
    return differences_by_part


def test_what_remains_of_the_difference(differences: dict[str, dict[str, Any]]) -> None:
    print(
        "\n| engine; trainer | choices replaced | combine weights differ by | "
        + " | ".join(WAYS)
        + " |\n"
        + 6 * "|---"
        + "|"
    )
    for name, row in differences.items():
        cells = [
            f"{row['replaced']:.1%}",
            f"{row['weights']:.1g}",
            *(f"{row[way].mean():.2g}, {row[way].max():.2g}" for way in WAYS),
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    exact, bf16, _, fp8, dequantised, silent = differences.values()
    assert max(exact[way].max() for way in WAYS) < 1e-5 and exact["weights"] < 1e-6, (
        "the recorded weights are those of these passes"
    )
    assert bf16["ids"].mean() < 0.7 * bf16["own"].mean()
    assert 0.7 * bf16["ids"].mean() < bf16["ids and weights"].mean() < bf16["ids"].mean(), (
        "little is the weights'"
    )
    assert dequantised["ids"].mean() < 0.3 * fp8["ids"].mean(), "most is the quantisation's"
    assert (
        silent["own"].mean()
        == silent["ids"].mean()
        == silent["ids and weights"].mean()
        > 0.3 * bf16["ids"].mean()
    ), "attention's and head's"
