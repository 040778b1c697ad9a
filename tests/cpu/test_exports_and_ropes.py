"""Exports after a step of training, loaded by Transformers: log-probs in float64 against the
trainer's, for every family and each form of rotary embeddings that the family accepts.

`pytest -s` prints the largest difference of each.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_config_values import compared, saved
from trainer_cases import LLAMA3, MODELS, YARN, YARN_EXACT, save_model
from trainer_processes import saved as results_of
from trainer_processes import spawn
from trainer_reference import hf_loss, load_float64
from trainer_rig import sequences
from transformers import AutoTokenizer

from megarl.models import load_spec
from megarl.plan.checks import check_rope

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]  # the first test waits for all trainers

TOKENIZER = Path(__file__).parents[2] / "configs/models/tiny-llama"
LENGTHS = (3, 17, 60, 200)  # beyond the original context of scaled embeddings
TOLERANCE = 3e-5
KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
# Older ways to write them give the same spec (test_config_values.py).
FORMS: dict[str, dict[str, Any]] = {
    "as saved": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16},
    "yarn with mscale": YARN,
    "yarn without rounding": YARN_EXACT,
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    },
    "half of each head": {"rope_type": "default", "partial_rotary_factor": 0.5},
}  # fmt: skip


def with_form(values: dict[str, Any], form: str) -> dict[str, Any]:
    """The contents of a config.json with this form of rotary embeddings."""
    if not FORMS[form]:
        return values
    inner = values.get("text_config", values)
    sections = {
        key: value
        for key, value in (inner.get("rope_parameters") or {}).items()
        if key.startswith("mrope_")
    }
    rope = FORMS[form] | {"rope_theta": 700.0} | sections
    changed = {key: value for key, value in inner.items() if key not in KEYS} | {
        "rope_parameters": rope
    }
    if "linear_num_key_heads" in inner:  # SGLang reads it there
        changed["rope_theta"] = 700.0
    return values | {"text_config": changed} if "text_config" in values else changed


@functools.cache
def refusal(family: str, form: str) -> str:
    """Why the family does not have the form; empty if it has."""
    values = with_form(saved(family), form)
    result = compared(values)
    if result != "equal":
        return result
    config: Any = SimpleNamespace(model=SimpleNamespace(path=""))
    return "; ".join(check_rope(config, load_spec(values)))


ACCEPTED = [(family, form) for family in MODELS for form in FORMS if not refusal(family, form)]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[str, str], tuple[Path, Path]]:
    """The folder of each chosen model, and of its export after a step."""
    root = tmp_path_factory.mktemp("ropes")
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    selected = {(str(case["family"]), str(case["form"])) for case in params}
    folders_by_case: dict[tuple[str, str], tuple[Path, Path]] = {}
    for number, (family, form) in enumerate(sorted(selected)):
        folder = root / str(number)
        save_model(family, folder)
        (folder / "config.json").write_text(
            json.dumps(with_form(saved(family), form)), encoding="utf-8"
        )
        for file in TOKENIZER.glob("tokenizer*.json"):
            shutil.copy(file, folder)
        folders_by_case[family, form] = (folder, root / f"exported.{number}.hf")
    spawn(
        1,
        root,
        [
            {
                "run": "exported",
                "name": f"exported.{number}",
                "model": str(folder),
                "topology": {},
                "lengths": LENGTHS,
            }
            for number, (folder, _) in enumerate(folders_by_case.values())
        ],
    )
    return folders_by_case


@pytest.mark.parametrize(("family", "form"), ACCEPTED)
def test_trained_export_has_the_log_probs_of_the_trainer(
    folders: dict[tuple[str, str], tuple[Path, Path]], family: str, form: str
) -> None:
    source, exported = folders[family, form]
    (rank,) = results_of(exported.parent, exported.stem)
    model = load_float64(exported)
    batch = sequences(model.config.vocab_size, LENGTHS)
    with torch.no_grad():
        _, expected = hf_loss(model, batch, temperature=1.0)
        _, before = hf_loss(load_float64(source), batch, temperature=1.0)
    difference, change = (distance(rank["logprobs"], reference) for reference in (expected, before))
    print(f"\n| {family} | {form} | {difference:.1e} |")
    assert difference < TOLERANCE
    assert change > 1e-3, "the step changed the weights"
    text = "What is 12 + 30? The result is 42."
    assert (
        AutoTokenizer.from_pretrained(exported)(text).input_ids
        == AutoTokenizer.from_pretrained(source)(text).input_ids
    )


def distance(rows: list[list[float]], references: list[list[float]]) -> float:
    return max(
        abs(a - b)
        for row, reference in zip(rows, references, strict=True)
        for a, b in zip(row, reference, strict=True)
    )


def test_each_rope_form_is_accepted_or_refused_with_its_name() -> None:
    forms = {form for _, form in ACCEPTED}
    assert FORMS.keys() - forms == {"dynamic", "longrope", "yarn"}
    for form in ("dynamic", "longrope", "yarn"):
        assert all(refusal(family, form) for family in MODELS)
