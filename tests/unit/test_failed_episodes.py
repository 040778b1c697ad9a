"""Episodes and scores that fail, and scores that are late: what is printed, and when.

All parts are fakes.
"""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_policy import SAMPLING, TOKENIZER, VOCABULARY, ScriptedPolicy, prompt

from megarl.agents.episode import Episode, EpisodeResult, Tree, group_of
from megarl.agents.hubs.rollout import HubRollout
from megarl.algorithms.batches import batch_metrics
from megarl.base.rollout_types import Batch, Failure, GroupSummary, Sample
from megarl.config.schema import RewardConfig, RolloutConfig, RunConfig
from megarl.generator.completions import Completion
from megarl.observe.agreement import advisories
from megarl.observe.metrics import MetricsWriter, Row
from megarl.observe.progress import Progress
from megarl.observe.report import summarize
from megarl.observe.samples import FailuresTail, FailuresWriter, format_sample
from megarl.report.reading import RunReader, advice
from megarl.rewards.pool import BLOCKED_S, MOST_WORKERS, RewardInLoop, workers_of
from megarl.rewards.score import Score, ScoreRequest, too_many_failed_episodes, too_many_failures
from megarl.rollouts.channel import judged, pack
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.rollout import CheckedRollout, RolloutClock, ScoringClock

CRASH = Failure("exit", "exit status 1: ZeroDivisionError: by \x1b[31mzero", part="rollout.program")
LATE = Failure("timeout", "it took longer than 5 s", "abc")


def sample(*failures: Failure, branch: int = 0) -> Sample:
    metrics = {"failed_exit": float(CRASH in failures)} if not branch else {}
    return Sample(
        [1], [-0.5], [0], "x", 0.0, "stop", failures=list(failures), metrics=metrics, branch=branch
    )


def metrics_of(*samples: Sample) -> dict[str, float]:
    group = GroupSummary(0, 1, [sample.summary() for sample in samples])
    return batch_metrics(Batch(0, [group], 0.0, 0.0), 0)


def test_limit_counts_episodes_and_gives_a_reason():
    samples = [sample(CRASH), sample(branch=1), sample(CRASH), sample()]
    assert metrics_of(*samples[:1], *samples[2:])["rollout/failed_fraction"] == pytest.approx(2 / 3)
    assert too_many_failed_episodes(RolloutConfig(name="program"), samples) == (
        "rollout.name=program: 2 of 3 episodes failed (2 exit), more than "
        "rollout.max_failed_fraction=0.5; "
        "for example 'exit status 1: ZeroDivisionError: by \\x1b[31mzero'"
    )
    assert too_many_failed_episodes(RolloutConfig(max_failed_fraction=0.7), samples) is None
    unanswered = sample(Failure("unanswered", "none", part="rollout.program"))
    assert too_many_failed_episodes(RolloutConfig(), [unanswered]) is None


def test_failed_episode_is_marked_and_is_no_failed_score():
    assert too_many_failures(RewardConfig(max_failed_fraction=0.0), [sample(CRASH)]) is None
    assert metrics_of(sample(CRASH))["reward/failed_fraction"] == 0.0
    text = format_sample(0, sample(CRASH).summary(), "x")
    assert "reward 0 (failed: exit of rollout.program)" in text
    assert "  ! exit status 1: ZeroDivisionError: by \\x1b[31mzero\n" in text
    nothing = Failure("unanswered", "no call of it was answered", part="rollout.program")
    group = group_of(
        prompt(), [EpisodeResult(Tree(), Score(-1.0, failures=[nothing]), {})], TOKENIZER.decode_all
    )
    assert group.samples[0].failures == [nothing] and judged(pack(group), RunConfig()).dropped


def test_raising_environment_is_a_failed_episode():
    unused: Any = None
    player = HubRollout(
        rollout="verifiers",
        name="the environment x",
        tokenizer=TOKENIZER,
        template=unused,
        parser=unused,
        on_crash=-0.5,
        max_calls=1,
        retries=0,
        at_once=1,
        max_unanswered=0.1,
        worker=unused,
        deadline_s=9.0,
    )
    episode = Episode(ScriptedPolicy().generate, TOKENIZER, unused, unused, SAMPLING)
    episode.tree.add(None, [1], Completion([4], [-0.5], [0], "stop"))
    report = {"kind": "environment", "error": "RuntimeError: the board is broken"}
    played = player._score(prompt(), episode, report)
    failure = Failure("environment", "RuntimeError: the board is broken", part="rollout.verifiers")
    assert played.score == Score(-0.5, failures=[failure])
    assert played.metrics["failed_environment"] == 1.0


def test_failed_score_is_reported_before_its_rollout_ends():
    reported: list[tuple[Failure, int]] = []

    async def rollout(context: RolloutContext, prompt: Any, sampling: Any, n: int) -> list[Sample]:
        await context.score(ScoreRequest("abc", "144"))
        assert reported == [(LATE, 7)]
        return [sample(CRASH), sample()]

    async def late(request: ScoreRequest) -> Score:
        return Score(0.0, failures=[LATE])

    context = RolloutContext(
        TOKENIZER, ScriptedPolicy().generate, late, ScriptedPolicy().context().run_in_worker, 1.0
    )
    checked = CheckedRollout(
        "mine",
        rollout,
        context,
        60.0,
        VOCABULARY,
        tell=lambda failure, ordinal: reported.append((failure, ordinal)),
    )
    asyncio.run(checked(prompt(), SAMPLING, 2))
    assert reported == [(LATE, 7), (CRASH, 7)]


def test_last_of_two_quick_failures_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise the first failure's reason would stay beside the numbers of later ones until
    something fails again.
    """
    failures = FailuresWriter(tmp_path)
    tail = FailuresTail(tmp_path)
    for number in range(3):
        failures.tell(Failure("exit", f"status {number}", part="rollout.program"), number)
    tail.poll()
    assert tail.reason(episodes=True) == "; the last: status 0"
    failures.close()
    assert [failure.reason for failure in tail.poll()] == ["status 2"]
    assert tail.reason(episodes=True) == "; the last: status 2"
    monkeypatch.setattr("megarl.observe.samples.FAILURES_S", 0.01)
    failures = FailuresWriter(tmp_path)
    deadline = time.monotonic() + 30
    for number in (3, 4):
        failures.tell(Failure("exit", f"status {number}", part="rollout.program"), number)
    while tail.reason(episodes=True) != "; the last: status 4":
        assert time.monotonic() < deadline
        tail.poll()
    failures.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_first_failure_is_shown_before_a_step_ends(tmp_path: Path, terminal: bool):
    earlier = FailuresWriter(tmp_path)
    earlier.tell(Failure("memory", "of an earlier start"), 1)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    progress = Progress(tmp_path, 3, console)
    failures = FailuresWriter(tmp_path)
    for ordinal in range(3):
        failures.tell(LATE, ordinal)
        failures.tell(CRASH, ordinal)
    failures.tell(Failure("warning", "the loop is held up"), -1)
    progress.poll()
    shown = " ".join(console.file.getvalue().replace("\r\x1b[2K", "").split())
    assert shown.count("! prompt 0: scoring failed (timeout): it took longer than 5 s") == 1
    assert (
        "! prompt 0: an episode failed (exit of rollout.program): exit status 1: ZeroDivisionError:"
        in shown
    )
    assert "! the loop is held up" in shown
    for text in ("\x1b[31m", "earlier start", "prompt 1"):
        assert text not in shown
    writer = MetricsWriter(tmp_path)
    writer.write(0, metrics_of(sample(CRASH), sample(LATE), sample(), sample()))
    progress.poll()
    progress.close()
    line = " ".join(console.file.getvalue().split())
    assert "25% of the episodes failed (25% exit)" in line
    assert "; the last: exit status 1: ZeroDivisionError" in line
    assert "1 scores failed: 1 timeouts" in line and "; the last: it took longer than 5 s" in line
    summary = summarize(tmp_path, [])
    assert "episodes" in summary
    assert "25% of the episodes failed (25% exit); the last: exit status 1: Zero" in summary
    advisories_read = RunReader(tmp_path, 1 << 20).read()["advisories"]
    assert advisories_read[0].startswith(
        "25% of the episodes failed (25% exit) in the last 1 steps"
    )
    assert advisories_read[1:] == [
        "the last episode that failed, of prompt 0 (exit of rollout.program): exit status 1: "
        "ZeroDivisionError: by \\x1b[31mzero",
        "the last score that failed, of prompt 0 (timeout): it took longer than 5 s",
    ]
    for file in (earlier, failures, writer):
        file.close()


def rows(count: int, **metrics: float) -> list[Row]:
    """Rows of a run whose rewards are equal."""
    common = {"reward/mean": 0.0, "reward/std": 0.0, "zero_advantage_fraction": 1}
    return [{"step": step, **common, **metrics} for step in range(count)]


def test_advice_names_failures_not_equal_rewards():
    failing = {"rollout/failed_fraction": 1.0, "rollout/failed_exit": 1.0}
    assert "failed" not in advisories(rows(5))[0]
    assert advisories(rows(1, **failing)) == [
        "100% of the episodes failed (100% exit) in the last 1 steps: rollouts/ marks them and "
        "says why"
    ]
    (advisory,) = advisories(rows(5, **failing))
    assert advisory.startswith(
        "nothing has been learned for 5 steps, since 100% of the episodes failed (100% exit): "
        "rollouts/ marks them"
    )
    assert "100% of the scores failed" in advisories(rows(5, **{"reward/failed_fraction": 1.0}))[0]


def test_equal_highest_rewards_are_a_success():
    learned = [*rows(3), *rows(5)]
    for row in learned[3:]:
        row |= {"reward/mean": 1.0, "reward/max": 1.0}
    assert advisories(learned) == [
        "all rewards have been equal for 8 steps, and the highest of the run (1): nothing is left "
        "to learn"
    ]
    assert "look into rollouts/ whether answers or reward are wrong" in advisories(rows(8))[0]


def test_solved_task_needs_no_signal_in_all_groups():
    def advice_at(mean: float) -> list[str]:
        metrics = {
            "zero_advantage_fraction": 0.7,
            "reward/min": 0.0,
            "reward/mean": mean,
            "reward/max": 1.0,
        }
        return advice([{"step": step, **metrics} for step in range(12)], {}, {})

    assert advice_at(0.96) == []
    assert "too easy or too hard" in advice_at(0.5)[0]
    assert "are too hard;" in advice_at(0.03)[0]


class ManualClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_scoring_is_timed_apart_from_decoding():
    now = ManualClock()
    clock = ScoringClock(now)
    first = RolloutClock(clock)
    second = RolloutClock(clock)
    with first.running(), second.running(), first.scoring():
        with first.decoding():
            now.now_s = 1.0  # meanwhile it decodes another response
        assert clock.waited_s() == 0.0
        now.now_s = 3.0  # one of two responses waits
        assert clock.waited_s() == 1.0
        with second.scoring(), second.scoring():
            now.now_s = 4.0
        assert clock.waited_s() == 2.0
    now.now_s = 9.0
    assert clock.waited_s() == 2.0


def times(**seconds: float) -> list[Row]:
    durations = {f"time/{name}_s": value for name, value in seconds.items()}
    return [{"step": step, "reward/mean": 0.5, **durations} for step in range(10)]


def test_advice_for_a_run_that_waits_for_scores():
    slow = times(
        step=4.5, trainer_wait=4.0, generator_wait=0.1, generate=0.7, reward=3.7, train=0.4
    )
    scoring_limit = "scoring limits the speed: rollouts waited 3.7 s of a step of 4.5 s"
    assert advisories(slow)[0].startswith(scoring_limit)
    assert advice(slow, {}, {}) == []


def test_advice_for_a_run_that_waits_for_generation():
    decoding = times(
        step=4.5, trainer_wait=4.0, generator_wait=0.1, generate=4.3, reward=0.1, train=0.4
    )
    assert advisories(decoding) == []
    assert "more engines" in advice(decoding, {}, {})[0]


def test_no_advice_where_training_hides_the_scoring():
    hidden = times(
        step=4.5, trainer_wait=0.1, generator_wait=0.1, generate=0.7, reward=3.7, train=4.3
    )
    assert advisories(hidden) == []


def test_workers_fit_the_machine_unless_they_are_set(monkeypatch: pytest.MonkeyPatch):
    for cores, workers in ((1, 1), (2, 1), (16, 4), (512, MOST_WORKERS)):
        monkeypatch.setattr("megarl.rewards.pool.usable_cores", lambda cores=cores: cores)
        assert workers_of(RewardConfig()) == workers and workers_of(RewardConfig(workers=7)) == 7


def test_async_function_that_blocks_the_loop_gives_a_warning():
    now = ManualClock()
    warnings: list[str] = []

    async def judge(response: str) -> float:
        await asyncio.sleep(0)
        if response == "waits":
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        elif response != "rests":
            now.now_s += float(response)
        try:
            await asyncio.sleep(0)
            raise ValueError("no")
        except ValueError:
            return 1.0

    async def score(*responses: str) -> list[float]:
        reward = RewardInLoop(
            RewardConfig(name="x:judge"), judge, ["response"], warn=warnings.append, now_s=now
        )

        async def one(response: str) -> float:
            now.now_s += response == "rests"  # meanwhile the event loop does other work
            return (await reward.score(ScoreRequest(response, ""))).reward

        return [await one(response) for response in responses]

    assert asyncio.run(score("waits", str(BLOCKED_S / 2))) == [1.0, 1.0] and not warnings
    assert asyncio.run(score("0.5", "0.6", "1.5")) == [1.0] * 3
    assert len(warnings) == 2, "again only when it was much longer"
    assert "0.5 s" in warnings[0] and "1.5 s" in warnings[1]
    assert warnings[0].startswith(
        "reward.name=x:judge: the async function blocked the generator's event loop for 0.5 s"
    )
    warnings.clear()
    assert asyncio.run(score(*["0.11"] * 15)) == [1.0] * 15
    assert len(warnings) == 1 and "event loop for 1.1 of 5 s" in warnings[0], (
        "many short ones, once"
    )
    warnings.clear()
    assert asyncio.run(score(*["0.1", "rests"] * 15)) == [1.0] * 30 and not warnings


def test_cancelling_a_score_reaches_the_function():
    ended = []

    async def judge(response: str) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(response)
        return 1.0

    reward = RewardInLoop(RewardConfig(name="x:judge", timeout_s=0.01), judge, ["response"])
    score = asyncio.run(reward.score(ScoreRequest("a", "")))
    assert score.failures[0].kind == "timeout" and ended == ["a"]
