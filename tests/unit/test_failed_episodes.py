"""Episodes and scores that fail, and scores that are late: what is printed, and when.

All parts are fakes.
"""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from typing import Any, cast

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
    return batch_metrics(
        Batch(0, [GroupSummary(0, 1, [each.summary() for each in samples])], 0.0, 0.0), 0
    )


def test_the_limit_is_over_episodes_and_the_reason_is_told():
    samples = [sample(CRASH), sample(branch=1), sample(CRASH), sample()]
    assert metrics_of(*samples[:1], *samples[2:])["rollout/failed_fraction"] == pytest.approx(2 / 3)
    assert too_many_failed_episodes(RolloutConfig(name="program"), samples) == (
        "rollout.name=program: 2 of 3 episodes failed (2 exit), more than "
        "rollout.max_failed_fraction=0.5; "
        "for example 'exit status 1: ZeroDivisionError: by \\x1b[31mzero'"
    )
    assert too_many_failed_episodes(RolloutConfig(max_failed_fraction=0.7), samples) is None
    assert (
        too_many_failed_episodes(
            RolloutConfig(), [sample(Failure("unanswered", "none", part="rollout.program"))]
        )
        is None
    )


def test_an_episode_that_failed_is_no_failed_score_and_is_marked():
    assert too_many_failures(RewardConfig(max_failed_fraction=0.0), [sample(CRASH)]) is None
    assert metrics_of(sample(CRASH))["reward/failed_fraction"] == 0.0
    text = format_sample(0, sample(CRASH).summary(), "x")
    assert (
        "reward 0 (failed: exit of rollout.program)" in text
        and "  ! exit status 1: ZeroDivisionError: by \\x1b[31mzero\n" in text
    )
    nothing = Failure("unanswered", "no call of it was answered", part="rollout.program")
    group = group_of(
        prompt(), [EpisodeResult(Tree(), Score(-1.0, failures=[nothing]), {})], TOKENIZER.decode_all
    )
    assert group.samples[0].failures == [nothing] and judged(pack(group), RunConfig()).dropped


def test_an_environment_that_raises_is_a_failed_episode_with_its_reason():
    player = HubRollout(
        "verifiers",
        "the environment x",
        TOKENIZER,
        *[cast(Any, None)] * 2,
        -0.5,
        1,
        0,
        1,
        0.1,
        cast(Any, None),
        9.0,
    )
    episode = Episode(
        ScriptedPolicy().generate, TOKENIZER, cast(Any, None), cast(Any, None), SAMPLING
    )
    episode.tree.add(None, [1], Completion([4], [-0.5], [0], "stop"))
    played = player._score(
        prompt(), episode, {"kind": "environment", "error": "RuntimeError: the board is broken"}
    )
    failure = Failure("environment", "RuntimeError: the board is broken", part="rollout.verifiers")
    assert (
        played.score == Score(-0.5, failures=[failure])
        and played.metrics["failed_environment"] == 1.0
    )


def test_a_rollout_tells_of_failures_at_once_scores_before_it_ends():
    told: list[tuple[Failure, int]] = []

    async def rollout(context: RolloutContext, prompt: Any, sampling: Any, n: int) -> list[Sample]:
        await context.score(ScoreRequest("abc", "144"))
        assert told == [(LATE, 7)]
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
        tell=lambda failure, ordinal: told.append((failure, ordinal)),
    )
    asyncio.run(checked(prompt(), SAMPLING, 2))
    assert told == [(LATE, 7), (CRASH, 7)]


def test_the_last_failure_of_a_kind_is_written_though_another_was_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    assert [told.reason for told in tail.poll()] == ["status 2"] and tail.reason(
        episodes=True
    ) == "; the last: status 2"
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
def test_the_first_failure_of_a_kind_is_shown_before_any_step_has_ended(
    tmp_path: Path, terminal: bool
):
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
    assert (
        "! the loop is held up" in shown
        and "\x1b[31m" not in shown
        and "earlier start" not in shown
        and "prompt 1" not in shown
    )
    writer = MetricsWriter(tmp_path)
    writer.write(0, metrics_of(sample(CRASH), sample(LATE), sample(), sample()))
    progress.poll()
    progress.close()
    line = " ".join(console.file.getvalue().split())
    assert (
        "25% of the episodes failed (25% exit)" in line
        and "; the last: exit status 1: ZeroDivisionError" in line
    )
    assert "1 scores failed: 1 timeouts" in line and "; the last: it took longer than 5 s" in line
    summary = summarize(tmp_path, [])
    assert (
        "episodes" in summary
        and "25% of the episodes failed (25% exit); the last: exit status 1: Zero" in summary
    )
    told = RunReader(tmp_path, 1 << 20).read()["advisories"]
    assert told[0].startswith("25% of the episodes failed (25% exit) in the last 1 steps")
    assert told[1:] == [
        "the last episode that failed, of prompt 0 (exit of rollout.program): exit status 1: "
        "ZeroDivisionError: by \\x1b[31mzero",
        "the last score that failed, of prompt 0 (timeout): it took longer than 5 s",
    ]
    for file in (earlier, failures, writer):
        file.close()


def rows(count: int, **more: float) -> list[Row]:
    return [
        {"step": step, "reward/mean": 0.0, "reward/std": 0.0, "zero_advantage_fraction": 1, **more}
        for step in range(count)
    ]


def test_the_advice_names_failures_in_the_place_of_equal_rewards():
    failing = {"rollout/failed_fraction": 1.0, "rollout/failed_exit": 1.0}
    assert "failed" not in advisories(rows(5))[0]
    assert advisories(rows(1, **failing)) == [
        "100% of the episodes failed (100% exit) in the last 1 steps: rollouts/ marks them and "
        "says why"
    ]
    (told,) = advisories(rows(5, **failing))
    assert told.startswith(
        "nothing has been learned for 5 steps, since 100% of the episodes failed (100% exit): "
        "rollouts/ marks them"
    )
    assert "100% of the scores failed" in advisories(rows(5, **{"reward/failed_fraction": 1.0}))[0]


def test_equal_rewards_that_are_the_highest_of_the_run_are_its_success():
    learned = [*rows(3), *rows(5)]
    for row in learned[3:]:
        row |= {"reward/mean": 1.0, "reward/max": 1.0}
    assert advisories(learned) == [
        "all rewards have been equal for 8 steps, and the highest of the run (1): nothing is left "
        "to learn"
    ]
    assert "look into rollouts/ whether answers or reward are wrong" in advisories(rows(8))[0]


def test_groups_without_signal_are_no_problem_once_the_task_is_solved():
    def told(mean: float) -> list[str]:
        found = {
            "zero_advantage_fraction": 0.7,
            "reward/min": 0.0,
            "reward/mean": mean,
            "reward/max": 1.0,
        }
        return advice([{"step": step, **found} for step in range(12)], {}, {})

    assert (
        told(0.96) == []
        and "too easy or too hard" in told(0.5)[0]
        and "are too hard;" in told(0.03)[0]
    )


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_scoring_is_timed_apart_from_decoding():
    now = Clock()
    clock = ScoringClock(now)
    one = RolloutClock(clock)
    other = RolloutClock(clock)
    with one.running(), other.running(), one.scoring():
        with one.decoding():
            now.now_s = 1.0  # meanwhile it decodes another response
        assert clock.waited_s() == 0.0
        now.now_s = 3.0  # one of two responses waits
        assert clock.waited_s() == 1.0
        with other.scoring(), other.scoring():
            now.now_s = 4.0
        assert clock.waited_s() == 2.0
    now.now_s = 9.0
    assert clock.waited_s() == 2.0


def times(**seconds: float) -> list[Row]:
    return [
        {
            "step": step,
            "reward/mean": 0.5,
            **{f"time/{name}_s": value for name, value in seconds.items()},
        }
        for step in range(10)
    ]


def test_the_advice_is_more_workers_where_scoring_binds_and_more_engines_where_generation_does():
    slow = times(
        step=4.5, trainer_wait=4.0, generator_wait=0.1, generate=0.7, reward=3.7, train=0.4
    )
    assert (
        advisories(slow)[0].startswith(
            "scoring limits the speed: rollouts waited 3.7 s of a step of 4.5 s"
        )
        and advice(slow, {}, {}) == []
    )
    decoding = times(
        step=4.5, trainer_wait=4.0, generator_wait=0.1, generate=4.3, reward=0.1, train=0.4
    )
    assert advisories(decoding) == [] and "more engines" in advice(decoding, {}, {})[0]
    assert (
        advisories(
            times(
                step=4.5, trainer_wait=0.1, generator_wait=0.1, generate=0.7, reward=3.7, train=4.3
            )
        )
        == []
    ), "it is hidden"


def test_workers_fit_the_machine_unless_they_are_set(monkeypatch: pytest.MonkeyPatch):
    for cores, workers in ((1, 1), (2, 1), (16, 4), (512, MOST_WORKERS)):
        monkeypatch.setattr("megarl.rewards.pool.usable_cores", lambda cores=cores: cores)
        assert workers_of(RewardConfig()) == workers and workers_of(RewardConfig(workers=7)) == 7


def test_an_async_function_that_holds_up_the_loop_is_warned_of():
    now, told = Clock(), list[str]()

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
            RewardConfig(name="x:judge"), judge, ["response"], warn=told.append, now_s=now
        )

        async def one(response: str) -> float:
            now.now_s += response == "rests"  # meanwhile the event loop does other work
            return (await reward.score(ScoreRequest(response, ""))).reward

        return [await one(response) for response in responses]

    assert asyncio.run(score("waits", str(BLOCKED_S / 2))) == [1.0, 1.0] and not told
    assert asyncio.run(score("0.5", "0.6", "1.5")) == [1.0] * 3
    assert ["0.5 s" in told[0], "1.5 s" in told[1], len(told)] == [True, True, 2], (
        "again only when it was much longer"
    )
    assert told[0].startswith(
        "reward.name=x:judge: the async function blocked the generator's event loop for 0.5 s"
    )
    told.clear()
    assert asyncio.run(score(*["0.11"] * 15)) == [1.0] * 15
    assert len(told) == 1 and "event loop for 1.1 of 5 s" in told[0], "many short ones, once"
    told.clear()
    assert asyncio.run(score(*["0.1", "rests"] * 15)) == [1.0] * 30 and not told


def test_cancelling_a_score_reaches_the_function():
    ended = []

    async def judge(response: str) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(response)
        return 1.0

    score = asyncio.run(
        RewardInLoop(RewardConfig(name="x:judge", timeout_s=0.01), judge, ["response"]).score(
            ScoreRequest("a", "")
        )
    )
    assert score.failures[0].kind == "timeout" and ended == ["a"]
