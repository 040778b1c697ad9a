"""A whole run on several sources with a curriculum, killed at random moments and continued with
other settings of asynchrony. And a warm start on conversations, with held-out ones.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from json_files import write_json_lines
from run_tools import SAMPLES, quickstart, rows, started, succeed, trained_ordinals, wait_for_steps

from megarl.config.load import load_config
from megarl.data.order import outside_band, train_mixture
from megarl.data.prompts import load_sources
from megarl.plan.checkpoints import complete_checkpoints
from megarl.rollouts.buffer import Ledger

pytestmark = pytest.mark.timeout(900)

STEPS = 14
PER_STEP = 6
STARTS = (
    ("async.capacity=0", "async.partial_rollout=block"),
    ("async.capacity=2", "async.partial_rollout=in_flight", "async.max_in_flight=9"),
    ("async.capacity=null", "async.partial_rollout=abort"),
)


def write(path: Path, *rows: object) -> Path:
    write_json_lines(path, rows)
    return path


@pytest.mark.long
def test_each_step_has_its_share_of_each_source(model: Path, tmp_path: Path) -> None:
    """Random weights answer at random.

    The reward depends on the text, but is the same for all samples of a third of the prompts, which
    are so too easy or too hard (reward_functions.by_chance).
    """
    run_dir = tmp_path / "run"
    chance = random.Random(0)
    verl = [{"prompt": f"{n}*3=", "reward_model": {"ground_truth": str(3 * n)}} for n in range(7)]
    few = write(
        tmp_path / "few.jsonl", *({"question": f"{n}+2=", "answer": n + 2} for n in range(5))
    )
    weights = [
        "data.train.source=sources",
        f"data.train.sources.few.source={few}",
        "data.train.sources.few.quota=2",
        f"data.train.sources.verl.source={write(tmp_path / 'verl.jsonl', *verl)}",
        "data.train.sources.chain.source=synthetic:chain",
        "data.train.sources.chain.weight=2",
        "data.curriculum={min_pass_rate: 0.1, max_pass_rate: 0.9, rest_epochs: 2}",
        f"rollout.prompts_per_step={PER_STEP}",
        f"max_steps={STEPS}",
        "checkpoint.every=1",
        "data.eval=null",
        "observe.rollouts_per_step=1000",
        "reward.name=reward_functions:by_chance_of_source",
        "data.train.sources.few.rollout.max_tokens=8",
        "data.train.sources.chain.rollout={name: tool_calls, args: {tool: calculator, call_open: '<', "
        "call_close: '>', result: '{result};'}}",
        "data.train.sources.chain.algorithm.advantage=normalized",
    ]
    for number, settings in enumerate(STARTS):
        before = len(rows(run_dir))
        arguments = quickstart(model, run_dir, *weights, *settings)
        with started(arguments, tmp_path / f"log.{number}") as process:
            if number < len(STARTS) - 1:
                wait_for_steps(process, run_dir, before + 4)
                time.sleep(chance.random())
            else:
                assert process.wait(timeout=280) == 0, (tmp_path / f"log.{number}").read_text()

    config = load_config(run_dir / "config.yaml")
    mixture = train_mixture(config)
    sources = load_sources(
        config,
        config.data.train,
        "data.train",
        mixture,
        answers=lambda source: "whole",
        order="prompts",
        tokens=lambda source: lambda row: 0,
    )
    lines = trained_ordinals(run_dir)
    assert len(lines) == STEPS and mixture.counts(0, 18) == [6, 4, 8]
    for step, (ordinals, row) in enumerate(zip(lines, rows(run_dir), strict=True)):
        counts = Counter(mixture.names[mixture.source(ordinal)] for ordinal in ordinals)
        expected = dict(zip(mixture.names, mixture.counts(step * PER_STEP, (step + 1) * PER_STEP)))
        assert counts == expected and counts["few"] == 2
        assert {name: row[f"source/{name}/prompts"] for name in expected} == expected
        assert row["source/few/response_tokens/mean"] <= 8, "its own limit"
        calls = {name for name in expected if f"source/{name}/rollout/tool_calls" in row}
        assert calls <= {"chain"} and ("chain" in calls or not expected["chain"]), "its own tools"
        assert {
            name: round(row[f"reward/is_{name}/mean"] * PER_STEP) for name in expected
        } == expected, "what the reward function was told"

    ledger = Ledger.load(complete_checkpoints(run_dir)[-1][1])
    trained = set(chain(*lines))
    rested = set(ledger.rested)
    assert len(trained) == STEPS * PER_STEP and not trained & rested and not ledger.groups, (
        "nothing is repeated, nothing left over"
    )
    assert trained | rested == {*range(ledger.consumed_below), *ledger.consumed_beyond}
    assert sum(row["prompts/rested"] for row in rows(run_dir)) + ledger.rested_untold == len(
        rested
    ), "each is reported once"
    for source in range(3):
        draws = sorted(
            mixture.draw(ordinal)
            for ordinal in trained | rested
            if mixture.source(ordinal) == source
        )
        assert draws == list(range(len(draws))), "nothing is left out"

    rewards = {
        int(prompt): [
            float(reward)
            for reward in re.findall(r"^response \d: reward (\S+),", group, re.MULTILINE)
        ]
        for path in (run_dir / "rollouts").glob("step_*.txt")
        for group in path.read_text().split("=" * 80)[1:]
        for prompt in re.findall(r"^prompt (\d+)", group)[:1]
        or re.findall(r"^prompt (\d+)", group, re.MULTILINE)[:1]
    }
    assert rewards.keys() == trained and {*map(len, rewards.values())} == {SAMPLES}
    assert config.data.curriculum is not None
    outside = {
        ordinal
        for ordinal, scores in rewards.items()
        if outside_band(scores, config.data.curriculum)
    }
    assert outside == set(ledger.outside)
    places = {sources.place(ordinal) for ordinal in outside}
    for ordinal in trained | rested:
        source, epoch, row = sources.place(ordinal)
        assert (ordinal in rested) == any(
            (source, earlier, row) in places for earlier in (epoch - 1, epoch - 2)
        )
    # their number depends on when the run was killed
    assert len(rested) > STEPS // 2, "too few have rested to show anything"
    again = [ordinal for ordinal in outside if sources.place(ordinal).epoch >= 3]
    assert again, "and some have come again, only to rest once more"


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}{% "
    "if add_generation_prompt %}a:{% endif %}"
)


def test_warm_start_keeps_the_weights_of_the_lowest_loss(
    tmp_path: Path,
) -> None:
    """At this learning rate the loss on held-out conversations rises again.

    They have other answers than the training ones.
    """
    shutil.copytree("configs/models/tiny-llama", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)

    def talk(n: int, shift: int) -> dict[str, object]:
        turns = (
            ("user", f"{n}+1?"),
            ("assistant", str((n + 1) % 10)),
            ("user", f"{n}+2?"),
            ("assistant", str((n + 2 + shift) % 10)),
        )
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    learned = write(tmp_path / "learned.jsonl", *(talk(n, 0) for n in range(10)))
    held_out = write(tmp_path / "held_out.jsonl", *(talk(n, 5) for n in range(10)))
    run_dir = tmp_path / "run"
    sft = {
        "steps": 30,
        "batch_size": 10,
        "every": 2,
        "optimizer.lr": 0.01,
        "data.source": learned,
        "eval.source": held_out,
    }
    settings = [f"sft.{key}={value}" for key, value in sft.items()]
    base = [
        "configs/quickstart.yaml",
        f"model.path={tmp_path}/model",
        f"run_dir={run_dir}",
        "observe.trackers=[]",
        *settings,
    ]
    succeed(["sft", *base])
    measured = {
        row["step"]: row["eval/loss"] for row in rows(run_dir / "sft") if "eval/loss" in row
    }
    assert [*measured] == [*range(1, 30, 2)] and "before/eval/loss" in rows(run_dir / "sft")[0]
    best = min(measured, key=lambda step: measured[step])
    assert 1 < best < 29 and measured[29] > measured[best] + 0.1, measured
    assert (run_dir / "sft/hf/config.json").exists() and not (run_dir / "sft/hf.best").exists()
    assert held_out_loss(run_dir / "sft/hf", held_out) == pytest.approx(measured[best], abs=2e-3)


def held_out_loss(model: Path, held_out: Path) -> float:
    """The held-out loss by transformers: the mean over the assistants' tokens, which follow "a:" up
    to <eos>.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model, local_files_only=True)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = []
    for line in held_out.read_text().splitlines():
        ids = tokenizer(
            tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False),
            add_special_tokens=False,
        )["input_ids"]
        with torch.no_grad():
            logprobs = policy(torch.tensor([ids])).logits[0].log_softmax(-1)
        turns = [
            place
            for place in range(2, len(ids))
            if tokenizer.convert_ids_to_tokens(ids[place - 2 : place]) == ["a", ":"]
        ]
        losses += [
            -logprobs[place - 1, ids[place]].item()
            for first in turns
            for place in (first, first + 1)
        ]
    return sum(losses) / len(losses)
