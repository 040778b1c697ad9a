"""Tiny reward models for the tests, and their scores by Hugging Face and SGLang."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import requests
import torch
from run_tools import ROOT
from sglang_engine import make_checkpoint, start_engine


def make_scores(folder: Path, architecture: str, scale: float = 1.0) -> Path:
    """A random reward model with the quickstart's tokenizer."""
    from transformers import AutoModelForSequenceClassification

    family = architecture.partition("For")[0].lower()
    make_checkpoint(folder / "causal", 3, torch.float32, tied=False, family=family, vocab_size=64)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "causal", num_labels=1, dtype=torch.float32
    )
    if architecture == "Qwen2ForRewardModel":
        size = model.config.hidden_size
        model.score = torch.nn.Sequential(
            torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 1)
        )
    for parameter in model.score.parameters():
        parameter.data.uniform_(-scale, scale)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ROOT / "configs/models/tiny-llama" / name).read_bytes())
    torch.save(model, folder / "model.pt")
    return folder


@torch.no_grad()
def hf_score(folder: Path, ids: list[int]) -> float:
    """The score in float64, with the weights rounded as in the checkpoint."""
    model = torch.load(folder / "model.pt", weights_only=False).double()
    return model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]).item()


def served_scores(folder: Path, sequences: Sequence[Sequence[int]], log: Path) -> list[float]:
    """Scores by an engine that is started for them, in float32."""
    with contextlib.contextmanager(start_engine)(
        folder, "float32", 1, log, classifies=True
    ) as engine:
        authorised = {"Authorization": f"Bearer {engine.keys.api}"}
        deadline = time.monotonic() + 120
        while True:
            try:
                requests.get(
                    f"{engine.url}/health_generate", headers=authorised, timeout=60
                ).raise_for_status()
                break
            except requests.RequestException:
                assert engine.died() is None and time.monotonic() < deadline, log.read_text()[
                    -4000:
                ]
                time.sleep(0.2)
        answers = (
            requests.post(
                f"{engine.url}/encode",
                json={"input_ids": list(ids)},
                headers=authorised,
                timeout=60,
            )
            for ids in sequences
        )
        return [answer.json()["embedding"][0] for answer in answers]
