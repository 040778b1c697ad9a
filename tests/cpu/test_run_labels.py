"""`megarl label`, called like a user does, up to a reward model; and the measures of an evaluation
beside Hugging Face's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest
import torch
from json_files import json_lines, write_json_lines
from reward_functions import by_chance
from run_tools import OVERRIDES, ROOT, make_model, rows, run, succeed
from sglang_engine import hf_model
from tokenizers import Tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
QUICKSTART = "configs/quickstart.yaml"


def test_labels_resume_and_a_reward_model_learns_them(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    run_dir = tmp_path / "run"
    settings = [
        *OVERRIDES,
        f"model.path={model}",
        f"run_dir={run_dir}",
        "label.reward=reward_functions:by_chance",
        "label.n=4",
        "label.reference=true",
        "label.pairs=all",
        "label.held_out=3",
        "reward_model.data.source=${label.output}/pairs.jsonl",
        "reward_model.eval.source=${label.output}/held_out.jsonl",
        "reward_model.steps=2",
        "reward_model.batch_size=4",
    ]
    succeed(["label", QUICKSTART, *settings, "label.prompts=6"])
    scored_file = run_dir / "label/scored.jsonl"
    first = scored_file.read_bytes()
    scored_file.write_bytes(first + b'{"ordinal":6,"pro')  # as a kill leaves it
    resumed = succeed(["label", QUICKSTART, *settings, "label.prompts=9"])
    assert "6 prompts are labelled already" in resumed.stdout
    assert scored_file.read_bytes().startswith(first)
    scored = json_lines(scored_file)
    assert sorted(line["ordinal"] for line in scored) == list(range(9))
    pairs = json_lines(run_dir / "label/pairs.jsonl") + json_lines(run_dir / "label/held_out.jsonl")
    assert pairs and {pair["ordinal"] for pair in pairs} <= set(range(9))
    for pair in pairs:
        assert by_chance(pair["chosen"], pair["prompt"]) == pair["score_chosen"] == 1.0
        assert by_chance(pair["rejected"], pair["prompt"]) == pair["score_rejected"] == 0.0
    expected = 0
    for line in scored:
        scores = [response["score"] for response in line["responses"]]
        expected += scores.count(0.0) * scores.count(1.0)
    assert len(pairs) == expected
    refused = run(["label", QUICKSTART, *settings, "label.prompts=9", "rollout.max_tokens=8"])
    assert refused.returncode == 2 and "rollout.max_tokens=8: the labels in" in refused.stderr

    succeed(["reward-model", QUICKSTART, *settings])
    assert len(rows(run_dir / "reward_model")) == 2
    assert (run_dir / "reward_model/hf/config.json").exists()


@torch.no_grad()
def perplexity(folder: Path, prompts: list[str], responses: list[str]) -> float:
    """By Hugging Face, of all tokens of the responses with end-of-text."""
    model = hf_model(folder, torch.float32).double()
    tokenizer = Tokenizer.from_file(str(ROOT / "configs/models/tiny-llama/tokenizer.json"))
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    surprise: list[float] = []
    for prompt, response in zip(prompts, responses, strict=True):
        given = tokenizer.encode(prompt).ids
        written = [*tokenizer.encode(response, add_special_tokens=False).ids, eos]
        logprobs = model(torch.tensor([given + written])).logits[0].log_softmax(-1)
        for place, token in enumerate(written, start=len(given) - 1):
            surprise.append(-logprobs[place, token].item())
    return math.exp(fmean(surprise))


def test_evaluation_measures_win_rate_and_perplexity(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    initial = make_model(tmp_path / "initial", initializer_range=0.3)
    data = tmp_path / "eval.jsonl"
    prompts = [f"{number}+{number}=" for number in range(8)]
    write_json_lines(data, ({"question": prompt, "answer": "42"} for prompt in prompts))
    completed = succeed([
        "eval", QUICKSTART, *OVERRIDES, f"model.path={model}", f"run_dir={tmp_path / 'run'}",
        f"data.eval={{source: {data}}}", "rollout.name=planted_rollouts:number",
        "eval.reward=reward_functions:constant", "eval.win_rate=reward_functions:by_chance",
        f"roles.initial.path={initial}", "roles.initial.max_concurrency=64",
        "roles.initial.kv_cache_tokens=4096", "--json",
    ])  # fmt: skip
    result = json.loads(completed.stdout)
    responses = [str(number) for number in range(8)]
    wins = []
    for prompt, response in zip(prompts, responses, strict=True):
        score = by_chance(response, prompt)
        reference = by_chance("42", prompt)
        wins.append((score > reference) + (score == reference) / 2)
    assert result["win_rate"] == fmean(wins) and result["win_rate/failed"] == 0
    expected = perplexity(initial, prompts, responses)
    assert result["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert result["ci95/perplexity/low"] < expected < result["ci95/perplexity/high"]
