"""A run whose reward combines a rule, a reward model and two judges; the reward model's engine
dies. And an evaluation by one of them.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import psutil
import pytest
import torch
from json_files import write_json_lines
from reward_models import hf_score, make_scores
from run_tools import (
    OVERRIDES,
    PROMPTS,
    SAMPLES,
    descendants,
    make_model,
    rows,
    run,
    start,
    title,
    wait_for_steps,
)
from sglang_engine import hf_model

from megarl.config.load import load_config
from megarl.generator.completions import Completion
from megarl.rewards.score import RewardPart, ScoreRequest
from megarl.roles.judge import Judge
from megarl.roles.plan import find_served

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 6
SAMPLE = re.compile(
    r"^response (\d+): reward (\S+)( \(failed: .*?\))?, versions .* finish reason \w+(.*)$",
    re.MULTILINE,
)
WEIGHTS = {"rule": 1.0, "liked": 0.5, "verdict": 2.0, "best": -1.0}
FAILED = {"verdict": 7.0, "best": 9.0}


class HuggingFace:
    """Replaces a judge's engines: greedy answers by transformers."""

    def __init__(self, folder: Path):
        self._model = hf_model(folder, torch.float32)

    @torch.no_grad()
    async def generate(self, prompt_ids, sampling, n):
        ids = list(prompt_ids)
        while len(ids) < len(prompt_ids) + sampling.max_tokens:
            ids.append(int(self._model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in sampling.stop_token_ids:
                break
        generated = ids[len(prompt_ids) :]
        return [
            Completion(
                array("i", generated),
                array("f", [0.0] * len(generated)),
                array("i", [0] * len(generated)),
                "stop",
            )
        ]


def settings(model: Path, scores: Path, judge: Path, run_dir: Path) -> list[str]:
    small = [
        f"roles.{name}.{key}"
        for name in ("rm", "judge", "rival")
        for key in ("max_concurrency=64", "kv_cache_tokens=4096")
    ]
    parts = [f"reward.parts.{name}.weight={weight}" for name, weight in WEIGHTS.items()]
    parts += [f"reward.parts.{name}.failed_score={score}" for name, score in FAILED.items()]
    return [
        f"model.path={model}", f"run_dir={run_dir}", *OVERRIDES, f"max_steps={STEPS}",
        "trainer.tp=1", "data.eval=null", *small, *parts,
        "reward.parts.rule.name=reward_functions:told", "reward.parts.liked.name=roles.rm",
        "reward.parts.verdict.name=roles.judge",
        "reward.parts.best.name=roles.rival", "reward.max_failed_fraction=1",
        "roles.rm.role=reward_model", f"roles.rm.path={scores}",
        f"roles.judge.path={judge}", "roles.judge.chat=false",
        "roles.judge.template={prompt}{response}?", "roles.judge.max_tokens=6",
        "roles.judge.verdict=([0-9])", "roles.judge.verdict_range=[0,9]",
        "roles.rival.role=judge", "roles.rival.mode=pairwise", f"roles.rival.path={judge}",
        "roles.rival.chat=false",
        "roles.rival.template={response_a}?{response_b}!", "roles.rival.max_tokens=4",
        "roles.rival.verdict=(.)",
        "roles.rival.verdict_scores={'1': 1, '2': 0, a: 1, b: 0, c: 0.5, d: 0.25, e: 0.75}",
        "roles.rival.opponents=1",
    ]  # fmt: skip


def rewards_of_steps(
    run_dir: Path,
) -> dict[int, dict[str, list[tuple[float, str, dict[str, float]]]]]:
    """For each step, by prompt: rewards, failures and parts of its samples."""
    steps: dict[int, dict[str, list]] = {}
    for path in sorted((run_dir / "rollouts").glob("step_*.txt")):
        prompts = steps[int(path.stem[5:])] = {}
        for block in re.split(r"^prompt \d+$", path.read_text(), flags=re.MULTILINE)[1:]:
            prompt = block.split("\n", 2)[1].removeprefix("  | ")
            parts = [
                dict(part.rsplit(" ", 1) for part in match[4].split(", ")[1:])
                for match in SAMPLE.finditer(block)
            ]
            heads = [(float(match[2]), match[3] or "") for match in SAMPLE.finditer(block)]
            prompts[prompt] = [
                (*head, {k: float(v) for k, v in metrics.items()})
                for head, metrics in zip(heads, parts)
            ]
    return steps


def requests_by_prompt(run_dir: Path) -> dict[str, list[ScoreRequest]]:
    """The samples by prompt."""
    requests: dict[str, dict[int, ScoreRequest]] = defaultdict(dict)
    for line in (run_dir / "logs/reward.rule.0.log").read_text().splitlines():
        prompt, index, response, prompt_ids, ids = json.loads(line)
        assert index not in requests[prompt]
        requests[prompt][index] = ScoreRequest(response, "", prompt, {}, prompt_ids, ids)
    return {
        prompt: [samples[index] for index in range(SAMPLES)] for prompt, samples in requests.items()
    }


def expected(
    config_path: Path, scores: Path, judge: Path, samples: list[ScoreRequest]
) -> dict[str, list[float | None]]:
    """The scores of a prompt's samples by part; None if a part gives none."""
    roles = {role.name: role for role in find_served(load_config(config_path), "train")}
    judges = {name: Judge(roles[name], HuggingFace(judge)) for name in ("judge", "rival")}  # type: ignore[arg-type]
    part = RewardPart("", 0.0)

    async def ask():
        verdicts = [await judges["judge"].score(part, sample) for sample in samples]
        texts = [sample.response for sample in samples]
        return verdicts, await judges["rival"].compare(part, samples[0].prompt, "", texts)

    verdicts, best = asyncio.run(ask())
    return {
        "rule": [float(len(sample.token_ids) % 2) for sample in samples],
        "liked": [
            hf_score(scores, [*sample.prompt_token_ids, *sample.token_ids]) for sample in samples
        ],
        "verdict": [None if score.failures else score.reward for score in verdicts],
        "best": [None if score.failures else score.reward for score in best],
    }


def test_the_reward_is_the_sum_of_what_rules_and_models_say(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    data = tmp_path / "train.jsonl"
    model = make_model(tmp_path / "model")
    scores = make_scores(tmp_path / "scores", "Qwen3ForSequenceClassification")
    judge = make_model(tmp_path / "judge", initializer_range=0.3)
    write_json_lines(data, ({"question": f"{i}+1=", "answer": "1"} for i in range(PROMPTS * STEPS)))
    process = start(
        [
            "train",
            "configs/quickstart.yaml",
            f"data.train.source={data}",
            *settings(model, scores, judge, run_dir),
        ],
        log,
    )
    wait_for_steps(process, run_dir, 1)
    serves = [child for child in descendants(process) if str(scores) in title(child)]
    psutil.Process(min(child.pid for child in serves)).kill()
    assert process.wait(400) == 0, log.read_text()[-4000:]

    driver = (run_dir / "logs/generator.0.log").read_text()
    steps = rewards_of_steps(run_dir)
    requests = requests_by_prompt(run_dir)
    assert "rm 0 is lost, 0 are left" in driver and "rm 0 serves again" in driver
    assert "rm.0 was killed" in log.read_text() and "started again (1 of" in log.read_text()
    table = rows(run_dir)
    assert len(table) == STEPS and all(row["sync/audit_ok"] for row in table)
    assert len(requests) == PROMPTS * STEPS and sorted(steps) == list(range(STEPS))
    for step, row in enumerate(table):
        assert len(steps[step]) == PROMPTS
        sums = defaultdict(list)
        for prompt, samples in steps[step].items():
            right = expected(run_dir / "config.yaml", scores, judge, requests[prompt])
            for index, (reward, failed, parts) in enumerate(samples):
                values = {name: right[name][index] for name in WEIGHTS}
                assert {name for name in WEIGHTS if f" of {name}" in failed} == {
                    name for name, value in values.items() if value is None
                }
                values = {
                    name: FAILED[name] if value is None else value for name, value in values.items()
                }
                assert {name: parts[name] for name in WEIGHTS} == pytest.approx(values, abs=1e-4)
                assert reward == pytest.approx(
                    sum(WEIGHTS[name] * value for name, value in values.items()), abs=1e-3
                )
                for name in WEIGHTS:
                    sums[name].append(values[name])
                    sums[f"{name} failed"].append(right[name][index] is None)
        means = {name: fmean(sums[name]) for name in WEIGHTS}
        assert row["reward/mean"] == pytest.approx(
            sum(WEIGHTS[name] * means[name] for name in WEIGHTS), abs=1e-3
        )
        for name in WEIGHTS:
            assert row[f"reward/{name}/mean"] == pytest.approx(means[name], abs=1e-4)
            assert row.get(f"reward/{name}/failed", 0) == sum(sums[f"{name} failed"])
        assert row["reward/errors"] == sum(sum(sums[f"{name} failed"]) for name in WEIGHTS)
    assert (
        0 < sum(row.get("reward/verdict/failed", 0) for row in table) < PROMPTS * SAMPLES * STEPS
    ), "both happen"

    completed = run([
        "eval", "configs/quickstart.yaml", *settings(model, scores, judge, run_dir),
        "data.eval.source=synthetic:chain", "eval.limit=8",
        "eval.reward=roles.rm", "reward.name=math",
        *(f"reward.parts.{name}=null" for name in WEIGHTS),
        "roles.judge=null", "roles.rival=null", "--json",
    ])  # fmt: skip
    result = json.loads(completed.stdout)
    assert result["samples"] == 8 and "pass@1" not in result and result["reward/mean"] != 0, (
        "scores of a model are not right or wrong"
    )


def test_reward_model_scores_the_steps_of_responses(tmp_path: Path) -> None:
    """A step of the random responses ends after each 1."""
    run_dir = tmp_path / "run"
    scores = make_scores(tmp_path / "scores", "Qwen3ForSequenceClassification")
    completed = run([
        "train", "configs/quickstart.yaml", f"model.path={make_model(tmp_path / 'model')}",
        f"run_dir={run_dir}", *OVERRIDES, "max_steps=2", "trainer.tp=1", "data.eval=null",
        "roles.prm.role=reward_model", f"roles.prm.path={scores}", "roles.prm.scores=steps",
        "roles.prm.step_separator='1'", "roles.prm.max_concurrency=64",
        "roles.prm.kv_cache_tokens=4096",
        "algorithm.credit=process", "algorithm.advantage=normalized",
        "reward.parts.steps.name=roles.prm", "reward.parts.steps.weight=2",
        "reward.parts.rule.name=reward_functions:told",
    ])  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    requests = requests_by_prompt(run_dir)
    counts = []
    for line in (run_dir / "rollouts/samples.jsonl").read_text().splitlines():
        group = json.loads(line)
        for sample, request in zip(group["samples"], requests[group["prompt"]], strict=True):
            by_rule = sample["parts"]["rule"]
            turns = sample["turn_rewards"] or [[sample["tokens"], sample["reward"]]]
            expected_rewards = []
            for end, _ in turns:
                ids = [*request.prompt_token_ids, *request.token_ids[:end]]
                expected_rewards.append(2 * hf_score(scores, ids))
            assert sample["parts"]["steps"] == pytest.approx(expected_rewards[-1] / 2, abs=1e-4)
            expected_rewards[-1] += by_rule
            assert [reward for _, reward in turns] == pytest.approx(expected_rewards, abs=1e-4)
            assert len(turns) <= 1 + sample["text"].count("1")
            counts.append(len(turns))
    assert len(counts) == 2 * PROMPTS * SAMPLES and max(counts) > 1
    assert all(row["zero_advantage_fraction"] == 0 for row in rows(run_dir))
