"""Packed sequences of any lengths, under all layouts that treat them differently: see
trainer_lengths.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_cases import LAYOUTS, save_model
from trainer_processes import saved, spawn

pytestmark = pytest.mark.long

EXAMPLES = {1: 25, 2: 8, 4: 8}  # batches, by world size
CASES = [
    *(("untied", layout) for layout in ("single", "tp2_sp_recompute", "cp2", "pp2_vpp2",
    "tp2_cp2")),
    *(("deepseek_v3", layout) for layout in ("single", "cp2_ep2", "tp2_ep2")),
]  # fmt: skip

# One long sequence beside short ones in one microbatch: 2 cp = 4 chunks of a thousand positions,
# and chunks of one position.
LONG = [4100, *range(1, 51)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with smaller weights than in other tests, where gradients in float32 have larger
    errors.
    """
    folders = {name: tmp_path_factory.mktemp(f"hf_{name}") for name, _ in CASES}
    for name, folder in folders.items():
        save_model(name, folder, initializer_range=0.08)
    return folders


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_log_probs_and_gradients_equal_hf(
    models: dict[str, Path], tmp_path: Path, world_size: int
) -> None:
    def scenario(model: str, layout: str) -> dict[str, Any]:
        _, topology, settings = LAYOUTS[layout]
        of_model = {
            "model": str(models[model]),
            "topology": topology,
            "trainer": settings,
            "examples": EXAMPLES[world_size],
        }
        return {"run": "lengths", "name": f"{model}.{layout}", **of_model}

    cases = [case for case in CASES if LAYOUTS[case[1]][0] == world_size]
    spawn(world_size, tmp_path, [scenario(*case) for case in cases])
    for case in cases:
        for rank in saved(tmp_path, ".".join(case)):
            assert 0 < rank["gradient"] < 1 and rank["loss"] < 1e-6 and rank["logprobs"] < 1e-5


def test_a_long_sequence_beside_short_ones_over_context_ranks(tmp_path: Path) -> None:
    wide = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
    }
    save_model("untied", tmp_path / "hf", initializer_range=0.08, **wide)
    _, topology, settings = LAYOUTS["cp2"]
    of_model = {"model": str(tmp_path / "hf"), "topology": topology, "trainer": settings}
    spawn(
        2,
        tmp_path,
        [
            {
                "run": "lengths",
                "name": "long",
                "lengths": LONG,
                "max_tokens": 2 * sum(LONG),
                **of_model,
            }
        ],
    )
    for rank in saved(tmp_path, "long"):
        assert 0 < rank["gradient"] < 1 and rank["loss"] < 1e-6 and rank["logprobs"] < 1e-5
