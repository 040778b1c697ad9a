"""Failed scores: how they are counted, when there are too many, and where they are reported."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from megarl.base.rollout_types import Failure, Sample
from megarl.config.schema import RewardConfig
from megarl.launch.processes import LAST_WORDS, ProcessFailed, ProcessGroup, ProcessSpec
from megarl.observe.metrics import MetricsWriter
from megarl.observe.progress import Progress
from megarl.observe.report import summarize
from megarl.observe.samples import format_sample
from megarl.rewards.score import describe_failures, failure_metrics, too_many_failures


def sample(kind: str = "", reason: str = "") -> Sample:
    failures = [Failure(kind, reason, "x\u202ey")] if kind else []
    return Sample(
        [1],
        [-0.5],
        [3],
        "x\u202ey",
        0.0,
        "stop",
        failures=failures,
        reward_parts={} if kind else {"form\u202eat": 0.5},
    )


def test_too_many_failures_are_told_by_kind_share_and_example():
    samples = [
        sample(),
        sample("timeout", "it took longer than 5 s"),
        sample("error", "no number"),
        sample("timeout", "late"),
    ]
    assert failure_metrics(samples) == {
        "reward/timeouts": 2, "reward/errors": 1, "reward/out_of_memory": 0, "reward/exits": 0,
        "reward/failed_fraction": 0.75,
    }  # fmt: skip
    assert too_many_failures(RewardConfig(name="g:f"), samples) == (
        "reward.name=g:f: of 4 samples 3 scores failed: 2 timeouts, 1 errors, more than "
        "reward.max_failed_fraction=0.5; "
        "for example 'x\\u202ey': it took longer than 5 s"
    )
    assert too_many_failures(RewardConfig(max_failed_fraction=0.75), samples) is None
    assert too_many_failures(RewardConfig(), samples[:2]) is None, "half is not more than half"
    assert too_many_failures(RewardConfig(max_failed_fraction=0.0), [sample()]) is None
    assert describe_failures([failure_metrics([sample()]), {"step": 1}]) == ""


def test_a_rollout_says_why_its_score_is_what_it_is():
    failed = format_sample(2, sample("memory", "it ran\nout").summary(), "x\u202ey")
    head = "response 2: reward 0 (failed: memory), versions 3 to 3, 1 tokens, finish reason stop"
    assert failed == f"{head}\n  ! it ran\n  ! out\n  | x\\u202ey\n"
    assert format_sample(0, sample().summary(), "").startswith(
        "response 0: reward 0, versions 3 to 3, 1 tokens, finish reason stop, form\\u202eat 0.5\n"
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_live_view_and_summary_show_failures(tmp_path: Path, terminal: bool):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    progress = Progress(tmp_path, 3, console)
    writer = MetricsWriter(tmp_path)
    for step, samples in enumerate([[sample()], [sample("exit"), sample()], [sample("timeout")]]):
        writer.write(step, {"reward/mean": 0.5, **failure_metrics(samples)})
    writer.close()
    progress.close()
    shown = console.file.getvalue()
    assert (
        "2 scores failed: 1 timeouts, 1 exits in the last 3 steps"
        if terminal
        else "  step 1: 1 scores failed: 1 exits\n"
    ) in shown
    assert "step 0: " not in shown
    assert "2 scores failed: 1 timeouts, 1 exits; rollouts/ marks them" in summarize(tmp_path, [])


def test_process_with_last_words_is_the_cause_before_it_ends(tmp_path: Path):
    def process(name: str, code: str) -> ProcessSpec:
        return ProcessSpec(name, [sys.executable, "-S", "-c", f"import sys, time; {code}"])

    with ProcessGroup(tmp_path) as group:
        group.start(
            process("trainer.0", f"print({LAST_WORDS + 'no scores'!r}, flush=True); time.sleep(60)")
        )
        while "no scores" not in group.log_path("trainer.0").read_text():
            time.sleep(0.01)
        group.start(process("generator.0", "sys.exit('cannot reach trainer.0')"))
        while group.running() != ["trainer.0"]:
            time.sleep(0.01)
        with pytest.raises(ProcessFailed, match="^no scores"):
            group.check()


def test_last_words_take_the_place_of_the_end_of_a_log(tmp_path: Path):
    log = tmp_path / "generator.0.log"
    log.write_text(f"noise\n{LAST_WORDS}graders.py, line 7: return 1/0\nZeroDivisionError\n")
    message = str(ProcessFailed("generator.0", 1, log, ended_before=0))
    assert message.startswith("graders.py, line 7: return 1/0\nZeroDivisionError\n")
    assert "noise" not in message
    assert message.endswith(f"(generator.0 exited with status 1; its log is {log})")
