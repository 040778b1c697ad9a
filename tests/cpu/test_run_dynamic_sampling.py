"""Whole runs with rollout.dynamic_sampling, killed at random moments and continued with other
settings of asynchrony.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest
from run_tools import (
    PROMPTS,
    SAMPLES,
    json_lines,
    quickstart,
    rows,
    run,
    started,
    wait_for_steps,
)

pytestmark = pytest.mark.timeout(900)

STEPS = 40
# the settings of each start, and the largest staleness they allow, including samples from an
# earlier start
STARTS = (
    (("async.capacity=0", "async.partial_rollout=block"), 0),
    (("async.capacity=1", "async.partial_rollout=in_flight", "async.max_in_flight=7"), None),
    (
        (
            "async.capacity=null",
            "async.max_staleness=2",
            "async.partial_rollout=resume",
            "async.chunk_tokens=3",
        ),
        2,
    ),
    (
        (
            "async.capacity=4",
            "async.max_staleness=1",
            "async.partial_rollout=retract",
            "async.max_in_flight=12",
        ),
        1,
    ),
    (("async.capacity=1", "async.partial_rollout=abort"), None),
)


def arguments(model: Path, run_dir: Path, *overrides: str) -> list[str]:
    defaults = [
        f"max_steps={STEPS}",
        "rollout.dynamic_sampling=true",
        "observe.rollouts_per_step=1000",
        "data.eval=null",
    ]
    return quickstart(model, run_dir, *defaults, *overrides)


def shown_rewards(
    run_dir: Path, step: int
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """By prompt, the rewards of a step's trained and dropped samples, from the files for people in
    rollouts/.
    """
    rewards: tuple[dict[int, list[float]], dict[int, list[float]]] = {}, {}
    for group in (run_dir / f"rollouts/step_{step:06d}.txt").read_text().split("=" * 80)[1:]:
        prompt, dropped = re.findall(r"^prompt (\d+)(, dropped)?", group, re.MULTILINE)[0]
        rewards[bool(dropped)][int(prompt)] = [
            float(reward)
            for reward in re.findall(r"^response \d: reward (\S+),", group, re.MULTILINE)
        ]
    return rewards


@pytest.mark.long
def test_killed_run_trains_on_or_drops_each_prompt_once(model: Path, tmp_path: Path) -> None:
    """Random weights answer at random.

    The reward depends on the text (reward_functions.by_chance), but is the same for all samples of
    a third of the prompts. Every start continues from the previous start's last checkpoint, with
    other settings.
    """
    run_dir = tmp_path / "run"
    chance = random.Random(0)
    overrides = ["reward.name=reward_functions:by_chance", "checkpoint.every=1"]
    for number, (settings, most) in enumerate(STARTS):
        before = len(rows(run_dir))
        with started(
            arguments(model, run_dir, *settings, *overrides), tmp_path / f"log.{number}"
        ) as process:
            if number < len(STARTS) - 1:
                wait_for_steps(process, run_dir, before + 3)
                time.sleep(chance.random())
            else:
                assert process.wait(timeout=240) == 0, (tmp_path / f"log.{number}").read_text()
        if most is not None:
            assert max(row["staleness/max"] for row in rows(run_dir)[before:]) <= most

    lines = json_lines(run_dir / "rollouts/ordinals.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS)) and [
        len(line["ordinals"]) for line in lines
    ] == [PROMPTS] * STEPS
    trained, dropped = ([line.get(key, []) for line in lines] for key in ("ordinals", "dropped"))
    uses = Counter(chain(*trained, *dropped))
    assert uses == Counter(range(uses.total())) and sum(map(len, dropped)) > STEPS, (
        "each once, and many dropped"
    )
    for step, row in enumerate(rows(run_dir)):
        of_trained, of_dropped = shown_rewards(run_dir, step)
        assert (sorted(of_trained), sorted(of_dropped)) == (trained[step], dropped[step])
        assert all(
            len(rewards) == SAMPLES for rewards in chain(of_trained.values(), of_dropped.values())
        )
        assert all(len(set(rewards)) > 1 for rewards in of_trained.values()), (
            "no group without signal is trained on"
        )
        assert all(len(set(rewards)) == 1 for rewards in of_dropped.values())
        assert row["prompts/dropped"] == len(of_dropped) and row["zero_advantage_fraction"] == 0
        assert row["samples/trained"] == PROMPTS * SAMPLES
        assert row["reward/mean"] == pytest.approx(
            fmean(chain(*of_trained.values(), *of_dropped.values()))
        )
        assert row["reward/trained_mean"] == pytest.approx(fmean(chain(*of_trained.values())))


def test_run_ends_if_nothing_is_learned_from_ten_batches(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = run(
        arguments(
            model, run_dir, "reward.name=reward_functions:constant", "rollout.max_num_gen_batches=2"
        )
    )
    assert ended.returncode == 1
    # A prompt in flight may arrive before the run ends.
    message = (
        r"at least 2 times rollout.prompts_per_step=4 prompts were generated for it, and "
        r"too few are left for a batch: in (\d+) of them "
    )
    end_message = re.search(
        message
        + r"all samples had the same reward \(mean reward 0.500; 0 all right, \1 all wrong\)",
        ended.stderr,
    )
    assert end_message and int(end_message[1]) >= 8, ended.stderr
    assert "Traceback" not in ended.stderr
    assert (run_dir / "rollouts/step_000000.txt").read_text().count(", dropped: ") == int(
        end_message[1]
    )
