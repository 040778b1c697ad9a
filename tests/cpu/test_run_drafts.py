"""Whole runs with speculative engines: drafts come from the model's multi-token prediction layer or
from n-grams.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from multi_token_checkpoint import take_last_layer
from run_tools import make_model, quickstart, rows, succeed

pytestmark = pytest.mark.long

GLM = {
    "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True, "num_hidden_layers": 5,
}  # fmt: skip
TRAINED = [
    "trainer.mtp=train",
    "trainer.pp=2",
    "trainer.tp=1",
    "trainer.dp=1",
    "generator.speculative.algorithm=nextn",
]
KEPT = [
    "trainer.sequence_parallel=true",
    "trainer.mtp=keep",
    "generator.speculative.algorithm=nextn",
    "trainer.routing_replay=true",
]
NGRAMS = ["trainer.sequence_parallel=true", "generator.speculative.algorithm=ngram"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    make_model(folder / "whole", "glm4_moe", **GLM)
    return take_last_layer("glm4_moe", folder)


@pytest.mark.parametrize("settings", [TRAINED, KEPT, NGRAMS], ids=["trained", "kept", "ngram"])
def test_twenty_steps(settings: list[str], model: Path, tmp_path: Path) -> None:
    """Every update is audited, and the engines' log-probs agree with the trainer's from the first
    step to the last.
    """
    overrides = [
        "max_steps=20",
        "eval.every=0",
        "algorithm.skip_zero_advantage=false",
        "async.partial_rollout=in_flight",
    ]
    overrides += ["generator.speculative.steps=2", "checkpoint.every=10"]
    succeed(quickstart(model, tmp_path / "run", *overrides, *settings))
    table = rows(tmp_path / "run")
    assert len(table) == 20 and all(row["sync/audit_ok"] for row in table)
    assert (
        max(row["logprob/abs_diff_mean"] for row in table if "logprob/abs_diff_mean" in row) < 1e-4
    )
    drafted = [row for row in table if "speculative/accept_rate" in row]
    assert len(drafted) >= 10 and all(
        0 <= row["speculative/accept_rate"] <= 1 <= row["speculative/accept_length"] <= 3
        for row in drafted
    )
    assert all(("mtp/loss" in row) == (settings is TRAINED) for row in table)
    assert all(("speculative/untrained_versions" in row) == (settings is KEPT) for row in drafted)
