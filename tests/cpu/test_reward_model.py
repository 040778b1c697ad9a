"""`megarl reward-model`, called like a user does, against a plain loop over Hugging Face's model in
float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from json_files import write_json_lines
from reward_models import served_scores
from run_tools import ROOT, make_model, rows, run, succeed
from tokenizers import Tokenizer

from megarl.data.order import permute

PAIRS = 10
BATCH = 4
STEPS = 6
LR = 1e-3
EPS = 1e-4
TOLERANCE = 3e-5


def pairs() -> list[dict[str, Any]]:
    rows_of_pairs = [
        {"prompt": f"{n}+{7 * n % 10}=", "chosen": f"{n},{8 * n % 10}", "rejected": f"{n},5,{n}"}
        for n in range(PAIRS)
    ]
    return [row | {"by": 0.3 * (n % 3)} for n, row in enumerate(rows_of_pairs)]


def scores_checkpoint(folder: Path, causal: Path) -> Path:
    """The same model with a random scalar head."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        causal, num_labels=1, dtype=torch.float32
    )
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((causal / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "causal")


def plain_loop(model: Any, seed: int) -> dict[str, Any]:
    """Trains on the pairs in the command's order, one sequence at a time.

    Returns losses, weights, and the accuracies before and after.
    """
    tokenizer = Tokenizer.from_file(str(ROOT / "configs/models/tiny-llama/tokenizer.json"))
    data = pairs()

    def score(prompt: str, response: str) -> torch.Tensor:
        ids = tokenizer.encode(prompt).ids
        ids = [
            *(ids[:-1] if ids[-1] == 2 else ids),
            *tokenizer.encode(response, add_special_tokens=False).ids,
            2,
        ]
        return model(torch.tensor([ids])).logits[0, 0]

    def difference(row: dict[str, Any]) -> torch.Tensor:
        return score(row["prompt"], row["chosen"]) - score(row["prompt"], row["rejected"])

    def accuracy() -> float:
        with torch.no_grad():
            return sum(difference(row).item() > 0 for row in data) / PAIRS

    before = accuracy()
    losses = []
    adam = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
    )
    for step in range(STEPS):
        drawn = [divmod(ordinal, PAIRS) for ordinal in range(step * BATCH, (step + 1) * BATCH)]
        batch = [
            data[permute(place, PAIRS, f"reward_model/{seed}/{epoch}")] for epoch, place in drawn
        ]
        loss = -sum(F.logsigmoid(difference(row) - row["by"]) for row in batch) / BATCH
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(loss.item())
    return {"losses": losses, "before": before, "after": accuracy(), "weights": model.state_dict()}


def assert_served_alike(folder: Path, model: Any, log: Path) -> None:
    """Checks that SGLang gives the same scores as Hugging Face."""
    sequences = [[1, *range(5, 5 + length), 2] for length in (1, 6, 13)]
    expected = [model(torch.tensor([ids])).logits.item() for ids in sequences]
    assert served_scores(folder, sequences, log) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("head", "sizes"),
    [
        pytest.param("own", "reward_model.dp=2", marks=pytest.mark.long),
        ("zeros", "reward_model.tp=2"),
    ],
)
def test_a_run_equals_a_plain_loop(head: str, sizes: str, causal: Path, tmp_path: Path) -> None:
    """Compares losses, accuracies and weights. Transformers loads the export as a reward model."""
    from transformers import AutoModelForSequenceClassification

    write_json_lines(tmp_path / "pairs.jsonl", pairs())
    path = scores_checkpoint(tmp_path / "scores", causal) if head == "own" else causal
    completed = succeed([
        "reward-model", "configs/examples/reward_model.yaml", f"model.path={path}",
        "model.random_init=false", f"run_dir={tmp_path}/run",
        "seed=3", f"reward_model.data.source={tmp_path}/pairs.jsonl",
        f"reward_model.eval.source={tmp_path}/pairs.jsonl",
        "reward_model.eval.split=train", "reward_model.data.margin_key=by",
        "reward_model.dp=null", sizes, "reward_model.head=zeros", f"reward_model.steps={STEPS}",
        f"reward_model.batch_size={BATCH}",
        "reward_model.every=4",
        f"reward_model.optimizer.lr={LR}", f"reward_model.optimizer.eps={EPS}",
        "reward_model.optimizer.weight_decay=0",
        "reward_model.optimizer.warmup_steps=0", "reward_model.optimizer.schedule=constant",
    ])  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32
    ).double()
    if head == "zeros":
        torch.nn.init.zeros_(model.score.weight)
    expected = plain_loop(model, seed=3)
    metrics = rows(tmp_path / "run/reward_model")
    assert [row["loss"] for row in metrics] == pytest.approx(expected["losses"], abs=TOLERANCE)
    assert metrics[0]["before/accuracy"] == pytest.approx(expected["before"])
    assert [row["step"] for row in metrics if "eval/accuracy" in row] == [3, STEPS - 1]
    assert (
        metrics[-1]["eval/accuracy"] == pytest.approx(expected["after"])
        and metrics[-1]["learning_rate"] == LR
    )
    assert (
        f"{expected['before']:.3f} (loss" in completed.stdout
        and f"{expected['after']:.3f} (loss" in completed.stdout
    )
    trained = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run/reward_model/hf", dtype=torch.float32
    )
    assert trained.config.num_labels == 1
    if head == "own":
        assert_served_alike(
            tmp_path / "run/reward_model/hf", trained.double(), tmp_path / "engine.log"
        )
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(
            trained.state_dict()[name].double(),
            weights,
            rtol=0,
            atol=TOLERANCE,
            msg=lambda m, name=name: f"{name}: {m}",
        )


def test_bad_pairs_are_one_message_before_anything_starts(causal: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2"}\n')
    completed = run([
        "reward-model", "configs/examples/reward_model.yaml", f"model.path={causal}",
        f"run_dir={tmp_path}/run",
        f"reward_model.data.source={tmp_path}/pairs.jsonl",
    ])  # fmt: skip
    missing = (
        "no column 'rejected' (reward_model.data.rejected_key); its columns are 'prompt', 'chosen'"
    )
    assert (completed.returncode, completed.stdout) == (
        2,
        "",
    ) and completed.stderr == f"megarl: {tmp_path}/pairs.jsonl, line 1: {missing}\n"
    assert not (tmp_path / "run/reward_model/hf").exists()
